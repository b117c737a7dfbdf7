// Package connect connects blocking sockets in programs whose threads get signals, as Go's do.
package connect

import (
	"errors"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Socket connects the blocking socket fd to a server, within patience. A signal to the thread interrupts connect(2) where the
// socket has a SO_SNDTIMEO, and the kernel goes on without its caller; to call it again would be another connect to the
// socket hooks.
func Socket(fd int, to unix.Sockaddr, patience time.Duration) error {
	err := unix.Connect(fd, to)
	if errors.Is(err, unix.EINTR) {
		return await(fd, patience)
	}
	return err
}

func await(fd int, patience time.Duration) error {
	for end := time.Now().Add(patience); ; {
		left := time.Until(end)
		if left <= 0 {
			return unix.ETIMEDOUT
		}
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, int(left.Milliseconds())+1)
		if errors.Is(err, unix.EINTR) || err == nil && n == 0 {
			continue
		}
		if err != nil {
			return err
		}
		code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
		if err == nil && code != 0 {
			err = syscall.Errno(code)
		}
		return err
	}
}
