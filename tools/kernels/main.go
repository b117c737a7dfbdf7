// Kernels tests Isthmus on the supported kernels: Debian's oldest and a newer one, each booted in an emulated machine, and the
// kernel of this machine.
//
//	go run ./tools/kernels                        # those for amd64, and this machine's
//	go run ./tools/kernels 6.1 native             # some
//	go run ./tools/kernels 6.1-arm64 6.12-arm64   # those for arm64
//
// The same program runs on each of them (tools/kernels/guest): a real agent with real sockets of both families. It exits with 1
// if a check fails, if a kernel is unavailable, or if a run is cut short. Kernels are cached beside the lab's programs, in
// $ISTHMUS_LAB_DIR/cache or /var/tmp/isthmus/cache.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	flag.Usage = func() {
		fmt.Fprintf(flag.CommandLine.Output(), "usage: kernels [KERNEL ...]\nkernels: %s\nexample: go run ./tools/kernels 6.1\n", strings.Join(names(true), " "))
		flag.PrintDefaults()
	}
	flag.Parse()
	if err := run(ctx, flag.Args(), os.Stdout); err != nil {
		fmt.Fprintln(os.Stdout, "kernels:", err)
		stop()
		os.Exit(1)
	}
}

// run tests the named kernels, or those that are tested by default.
func run(ctx context.Context, named []string, out io.Writer) (err error) {
	begin := time.Now()
	r, err := newRig(out)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	if len(named) == 0 {
		named = names(false)
	}
	outcomes := make([]outcome, len(named))
	done := make(chan int)
	for i, name := range named {
		go func() {
			outcomes[i] = r.test(ctx, name)
			done <- i
		}()
	}
	passed := 0
	for range named {
		o := outcomes[<-done]
		passed += len(o.passed)
		err = errors.Join(err, o.fault())
	}
	fmt.Fprintf(out, "%d kernels, %d checks passed, %.1fs\n", len(named), passed, time.Since(begin).Seconds())
	return err
}
