package main

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/tools/netlab/connect"
)

// newSCTP makes a one-to-one SCTP socket with timeouts.
func newSCTP() (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_SCTP)
	if err != nil {
		return -1, fmt.Errorf("make SCTP socket: %w", err)
	}
	limit := unix.NsecToTimeval(int64(checkTimeout))
	for _, option := range []int{unix.SO_SNDTIMEO, unix.SO_RCVTIMEO} {
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, option, &limit); err != nil {
			return -1, errors.Join(fmt.Errorf("set timeout: %w", err), unix.Close(fd))
		}
	}
	return fd, nil
}

// startSCTP starts an SCTP echo server. It must be called in the backend's namespace.
func (tb *testbed) startSCTP() error {
	l, err := newSCTP()
	if err != nil {
		return err
	}
	if err := errors.Join(unix.Bind(l, &unix.SockaddrInet4{Port: backendPort}), unix.Listen(l, 8)); err != nil {
		return errors.Join(fmt.Errorf("listen: %w", err), unix.Close(l))
	}
	go func() {
		defer unix.Close(l)
		for {
			c, _, err := unix.Accept(l)
			if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
				continue
			}
			if err != nil {
				return
			}
			var b [64]byte
			if n, err := unix.Read(c, b[:]); err == nil {
				_, _ = unix.Write(c, b[:n]) // a missing answer fails the check at the client
			}
			_ = unix.Close(c)
		}
	}()
	return nil
}

// connectsSCTP checks that an association with a VIP is answered. The backend has another port, so every packet needs a new
// checksum.
func connectsSCTP(_ context.Context, tb *testbed) (err error) {
	var fd int
	if err := tb.client.Do(func() error {
		fd, err = newSCTP()
		return err
	}); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unix.Close(fd)) }()
	if err := connect.Socket(fd, &unix.SockaddrInet4{Addr: echoVIPs[0].As4(), Port: int(servedPort)}, checkTimeout); err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	if _, err := unix.Write(fd, []byte("ask")); err != nil {
		return fmt.Errorf("send: %w", err)
	}
	var b [8]byte
	n, err := unix.Read(fd, b[:])
	if err != nil {
		return fmt.Errorf("receive: %w", err)
	}
	if string(b[:n]) != "ask" {
		return fmt.Errorf("answer %q", b[:n])
	}
	return nil
}
