// Kernels tests Isthmus on the supported kernels: Debian's oldest and a newer one, each booted in an emulated machine, and the
// kernel of this machine.
//
//	go run ./tools/kernels              # all
//	go run ./tools/kernels 6.1 native   # some
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
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	flag.Usage = func() {
		fmt.Fprint(flag.CommandLine.Output(), "usage: kernels [KERNEL ...]\nexample: go run ./tools/kernels 6.1\n")
		flag.PrintDefaults()
	}
	flag.Parse()
	if err := run(ctx, flag.Args(), os.Stdout); err != nil {
		fmt.Fprintln(os.Stdout, "kernels:", err)
		stop()
		os.Exit(1)
	}
}

// run tests the named kernels, or all of them.
func run(ctx context.Context, names []string, out io.Writer) (err error) {
	begin := time.Now()
	r, err := newRig(ctx, out)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	if len(names) == 0 {
		names = kernels
	}
	outcomes := make([]outcome, len(names))
	done := make(chan int)
	for i, name := range names {
		go func() {
			outcomes[i] = r.test(ctx, name)
			done <- i
		}()
	}
	passed := 0
	for range names {
		o := outcomes[<-done]
		passed += len(o.passed)
		err = errors.Join(err, o.fault())
	}
	fmt.Fprintf(out, "%d kernels, %d checks passed, %.1fs\n", len(names), passed, time.Since(begin).Seconds())
	return err
}
