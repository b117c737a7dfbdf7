package netlab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// inside marks a test binary that runs in the namespaces of Main.
const inside = "ISTHMUS_NETLAB_INSIDE"

// Main runs the tests of a package in a network and a mount namespace of their own, with nothing in the
// network but loopback: a test that connects to an untranslated address gets ENETUNREACH and never
// a machine somewhere. A TestMain ends with os.Exit(netlab.Main(m)), m being a *testing.M or what runs one. Without
// root the tests run where they are; those that need more call Privileged.
func Main(m interface{ Run() int }) int {
	if !IsRoot() {
		return m.Run()
	}
	if Inside() {
		if err := loopbackUp(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return m.Run()
	}
	return runInside()
}

// Inside reports whether Main gave this process its own network.
func Inside() bool { return os.Getenv(inside) == "1" }

// runInside starts this binary again in new namespaces, and returns its exit code.
func runInside() int {
	self, err := os.Executable()
	if err != nil {
		fmt.Fprintln(os.Stderr, "find the test binary:", err)
		return 1
	}
	cmd := exec.CommandContext(context.Background(), self, os.Args[1:]...)
	cmd.Env = append(os.Environ(), inside+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS,
		Pdeathsig:  syscall.SIGKILL,
	}
	// The terminal also interrupts the child; this process must outlive it.
	signal.Ignore(os.Interrupt)
	// The child dies with the thread that started it, not with the process.
	runtime.LockOSThread()
	err = cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		fmt.Fprintln(os.Stderr, "start the tests in their own network:", err)
		return 1
	}
	return cmd.ProcessState.ExitCode()
}

// loopbackUp makes 127.0.0.1 and ::1 work in a new network namespace.
func loopbackUp() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find loopback: %w", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("bring loopback up: %w", err)
	}
	// The mounts of a test stay in its own namespace.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	return nil
}
