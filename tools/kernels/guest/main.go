// Guest is what `make test-kernels` runs on every kernel: an agent, two nodes' worth of network and real
// sockets. As the first process of a virtual machine it sets the machine up before and switches it off
// after; else it runs where it is started, which must be network and mount namespaces of its own.
//
// It says one line for each check, "PASS name (time)" or "FAIL name: why", and ends with "END n passed, m
// failed". Without that last line the run was cut short.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// patience is how long one check may take; emulated machines are slow.
const patience = 3 * time.Minute

func main() {
	if len(os.Args) > 1 && os.Args[1] == pod {
		os.Exit(runPod(os.Stdout))
	}
	if !emulated() {
		os.Exit(run(os.Stdout))
	}
	if err := setUpMachine(); err != nil {
		fmt.Fprintln(os.Stdout, "FAIL machine:", err)
	} else {
		run(os.Stdout)
	}
	if err := unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF); err != nil {
		fmt.Fprintln(os.Stdout, "FAIL power off:", err)
		os.Exit(1) // the kernel panics, which ends the machine too
	}
}

// run makes a testbed, runs every check in it and closes it. It returns an exit code.
func run(out io.Writer) int {
	var passed, failed int
	say := func(name string, begin time.Time, err error) {
		if err != nil {
			failed++
			fmt.Fprintf(out, "FAIL %s: %s\n", name, strings.ReplaceAll(err.Error(), "\n", "; "))
			explain(out, err)
			return
		}
		passed++
		fmt.Fprintf(out, "PASS %s (%s)\n", name, time.Since(begin).Round(time.Millisecond))
	}
	begin := time.Now()
	w, err := newTestbed(context.Background())
	say("the agent starts and serves a snapshot", begin, err)
	if err == nil {
		for _, c := range slices.Concat(checks, packetChecks(), gatewayChecks()) {
			begin := time.Now()
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			say(c.name, begin, c.run(ctx, w))
			cancel()
		}
	}
	begin = time.Now()
	say("nothing is left", begin, errors.Join(w.close(), w.nothingLeft()))
	fmt.Fprintf(out, "END %d passed, %d failed\n", passed, failed)
	return min(failed, 1)
}

// explain says what a kernel's verifier had to say last, if that is what err is about.
func explain(out io.Writer, err error) {
	var refused *ebpf.VerifierError
	if !errors.As(err, &refused) {
		return
	}
	for _, line := range refused.Log[max(0, len(refused.Log)-30):] {
		fmt.Fprintln(out, "verifier:", line)
	}
}
