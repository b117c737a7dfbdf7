package connect

import (
	"errors"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A connect that a signal interrupts goes on; its end is its own, and not the signal's.
func TestInterrupted(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := closed.Close(); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		to   net.Addr
		want error
	}{"a listener": {l.Addr(), nil}, "no listener": {closed.Addr(), unix.ECONNREFUSED}} {
		t.Run(name, func(t *testing.T) {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(fd)
			// As after a signal, the caller is back and the connect goes on.
			to := tc.to.(*net.TCPAddr)
			if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: to.AddrPort().Addr().As4(), Port: to.Port}); !errors.Is(err, unix.EINPROGRESS) && !errors.Is(err, tc.want) {
				t.Fatal(err)
			}
			if err := await(fd, time.Second); !errors.Is(err, tc.want) {
				t.Errorf("have %v, want %v", err, tc.want)
			}
		})
	}
}
