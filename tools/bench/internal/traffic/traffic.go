// Package traffic holds the system calls of clients and servers that a benchmark runs on one CPU, so that the result is
// the cost of the whole path.
package traffic

import (
	"errors"
	"fmt"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Pin binds the calling goroutine to its thread, and moves that to the last CPU that this process may use, with the highest
// priority there. The thread ends with the goroutine.
func Pin() error {
	runtime.LockOSThread()
	var allowed unix.CPUSet
	if err := unix.SchedGetaffinity(unix.Getpid(), &allowed); err != nil {
		return fmt.Errorf("read CPU affinity: %w", err)
	}
	var last unix.CPUSet
	for cpu := range int(unsafe.Sizeof(allowed)) * 8 {
		if allowed.IsSet(cpu) {
			last.Zero()
			last.Set(cpu)
		}
	}
	if err := unix.SchedSetaffinity(0, &last); err != nil {
		return fmt.Errorf("pin to one CPU: %w", err)
	}
	if err := unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), -20); err != nil {
		return fmt.Errorf("raise priority: %w", err)
	}
	return nil
}

// CPUTime returns the CPU time of this process.
func CPUTime() time.Duration {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &t) // every Linux has it
	return time.Duration(t.Nano())
}

// Socket makes an IPv4 socket. Receiving and accepting fail after the timeout.
func Socket(kind int, timeout time.Duration) (int, error) {
	fd, err := unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("make socket: %w", err)
	}
	limit := unix.NsecToTimeval(int64(timeout))
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit); err != nil {
		return -1, errors.Join(fmt.Errorf("set timeout: %w", err), unix.Close(fd))
	}
	return fd, nil
}

// Read calls read(2). Its timeout is often reported as a signal, which is no reason to stop.
func Read(fd int, b []byte) (n int, err error) {
	for {
		if n, err = unix.Read(fd, b); !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

// Idle reports whether an error only says that nothing arrived in time.
func Idle(err error) bool { return errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) }
