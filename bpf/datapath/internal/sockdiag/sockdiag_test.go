package sockdiag

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/tools/netlab"
)

func TestMain(m *testing.M) { os.Exit(netlab.Main(m)) }

// connected returns a UDP socket to a port of loopback, and its cookie.
func connected(t *testing.T, family int) (fd int, cookie uint64) {
	t.Helper()
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	var to unix.Sockaddr = &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: 5300}
	if family == unix.AF_INET6 {
		to = &unix.SockaddrInet6{Addr: [16]byte{15: 1}, Port: 5300}
	}
	if err := unix.Connect(fd, to); err != nil {
		t.Fatal(err)
	}
	if cookie, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE); err != nil {
		t.Fatal(err)
	}
	return fd, cookie
}

func isClosed(t *testing.T, fd int) bool {
	t.Helper()
	_, _, err := unix.Recvfrom(fd, make([]byte, 1), unix.MSG_DONTWAIT)
	if !errors.Is(err, unix.ECONNABORTED) && !errors.Is(err, unix.EAGAIN) {
		t.Fatal(err)
	}
	return errors.Is(err, unix.ECONNABORTED)
}

// Each listed socket has its own cookie. Closing it closes no other socket, not even one to the same address.
func TestListAndClose(t *testing.T) {
	netlab.Privileged(t)
	for name, family := range map[string]int{"IPv4": unix.AF_INET, "IPv6": unix.AF_INET6} {
		t.Run(name, func(t *testing.T) {
			one, cookie := connected(t, family)
			other, _ := connected(t, family)
			all, err := List()
			if err != nil {
				t.Fatal(err)
			}
			var found *Socket
			for _, s := range all {
				if s.Cookie == cookie {
					found = &s
				}
			}
			if found == nil {
				t.Fatalf("no socket %d among %d", cookie, len(all))
			}
			if ok, err := found.Close(); !ok || err != nil {
				t.Errorf("close: %v, %v", ok, err)
			}
			if !isClosed(t, one) || isClosed(t, other) {
				t.Error("the wrong socket was closed")
			}
			if ok, err := found.Close(); ok || err != nil {
				t.Errorf("close what is closed: %v, %v, want neither", ok, err)
			}
		})
	}
}
