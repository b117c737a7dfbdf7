// Guest is the program that `make test-kernels` runs on every kernel: an agent, the network of two nodes, and real sockets. As
// the first process of a virtual machine it sets up the machine first and powers it off at the end. Otherwise it must be
// started in its own network and mount namespaces.
//
// It writes one line per check, "PASS name (time)" or "FAIL name: why", and ends with "END n passed, m failed". A missing last
// line means that the run was cut short.
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

// checkTimeout is the time limit of one check; emulated machines are slow.
const checkTimeout = 3 * time.Minute

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
		os.Exit(1) // the kernel panics, which also ends the machine
	}
}

// run sets up a testbed, runs all checks in it and closes it. It returns an exit code.
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
	tb, err := newTestbed(context.Background())
	say("the agent starts and serves a snapshot", begin, err)
	if err == nil {
		for _, c := range slices.Concat(checks, packetChecks(), gatewayChecks()) {
			begin := time.Now()
			ctx, cancel := context.WithTimeout(context.Background(), checkTimeout)
			say(c.name, begin, c.run(ctx, tb))
			cancel()
		}
	}
	begin = time.Now()
	say("cleanup leaves nothing behind", begin, errors.Join(tb.close(), tb.nothingLeft()))
	fmt.Fprintf(out, "END %d passed, %d failed\n", passed, failed)
	return min(failed, 1)
}

// explain writes the end of the verifier's log, if err contains one.
func explain(out io.Writer, err error) {
	var refused *ebpf.VerifierError
	if !errors.As(err, &refused) {
		return
	}
	for _, line := range refused.Log[max(0, len(refused.Log)-30):] {
		fmt.Fprintln(out, "verifier:", line)
	}
}
