package netlab

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Namespace is a network namespace. It exists while it is open, or while a socket or device is in it.
type Namespace struct{ fd int }

// noDAD makes an IPv6 address usable at once. Without it, and even with accept_dad=0, the kernel keeps the address tentative
// until a worker has run, and a bind to it meanwhile fails.
const noDAD = unix.IFA_F_NODAD

// NewNamespace creates a namespace with loopback up, forwarding on, and no other device.
func NewNamespace() (*Namespace, error) {
	n := &Namespace{fd: -1}
	err := onOwnThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("make network namespace: %w", err)
		}
		var err error
		if n.fd, err = unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
			return fmt.Errorf("open network namespace: %w", err)
		}
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return fmt.Errorf("find loopback: %w", err)
		}
		if err := netlink.LinkSetUp(lo); err != nil {
			return fmt.Errorf("bring loopback up: %w", err)
		}
		if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
			return fmt.Errorf("turn forwarding on: %w", err)
		}
		return nil
	})
	if err != nil {
		return nil, errors.Join(err, n.Close())
	}
	return n, nil
}

// OpenNamespace opens the namespace of a file, such as one of /run/netns.
func OpenNamespace(path string) (*Namespace, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open network namespace %s: %w", path, err)
	}
	return &Namespace{fd: fd}, nil
}

// Do runs f on a thread in the namespace. Goroutines that f starts run elsewhere; sockets that f opens stay in the namespace.
func (n *Namespace) Do(f func() error) error {
	return onOwnThread(func() error {
		if err := unix.Setns(n.fd, unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter network namespace: %w", err)
		}
		return f()
	})
}

// onOwnThread runs f on a thread that runs nothing else meanwhile, and returns to its network namespace afterwards. It does not
// end the thread: that would kill the commands that other goroutines started on it with PDEATHSIG, because for the kernel
// their parent is the thread.
func onOwnThread(f func() error) error {
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			runtime.UnlockOSThread()
			result <- fmt.Errorf("open the thread's network namespace: %w", err)
			return
		}
		err = f()
		back := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET)
		if back == nil {
			runtime.UnlockOSThread()
		} else { // the thread ends with this goroutine, so that no other one inherits the namespace
			back = fmt.Errorf("leave network namespace: %w", back)
		}
		result <- errors.Join(err, back, home.Close())
	}()
	return <-result
}

// Connect joins n and other by a veth pair: n's end has the address here, other's end there. Both must be in one subnet.
func (n *Namespace) Connect(other *Namespace, here, there netip.Prefix) error {
	// Names are per namespace; an address is unique in both.
	a, b := DeviceName(here), DeviceName(there)
	return n.Do(func() error {
		veth := &netlink.Veth{
			LinkAttrs: netlink.LinkAttrs{Name: a}, PeerName: b, PeerNamespace: netlink.NsFd(other.fd),
		}
		if err := netlink.LinkAdd(veth); err != nil {
			return fmt.Errorf("make veth %s to %s: %w", a, b, err)
		}
		return errors.Join(setUp(a, here), other.Do(func() error { return setUp(b, there) }))
	})
}

// Disconnect removes the device with address p, and with it the other end. A missing device is no error. A closed
// namespace keeps its ends until its last connections have ended, perhaps for minutes.
func (n *Namespace) Disconnect(p netip.Prefix) error {
	return n.Do(func() error {
		link, err := netlink.LinkByName(DeviceName(p))
		if _, none := errors.AsType[netlink.LinkNotFoundError](err); none {
			return nil
		}
		if err != nil {
			return fmt.Errorf("find %s: %w", DeviceName(p), err)
		}
		return netlink.LinkDel(link)
	})
}

// DeviceName returns the name, of at most 15 characters, of the device that Connect gives address p.
func DeviceName(p netip.Prefix) string {
	b := p.Addr().As16()
	return fmt.Sprintf("v%02x%02x%02x%02x", b[12], b[13], b[14], b[15])
}

func setUp(name string, addr netip.Prefix) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("find %s: %w", name, err)
	}
	a, err := netlink.ParseAddr(addr.String())
	if err != nil {
		return fmt.Errorf("address of %s: %w", name, err)
	}
	a.Flags = noDAD
	if err := netlink.AddrAdd(l, a); err != nil {
		return fmt.Errorf("give %s to %s: %w", addr, name, err)
	}
	if err := netlink.LinkSetUp(l); err != nil {
		return fmt.Errorf("bring %s up: %w", name, err)
	}
	return nil
}

// Route adds a default route through via.
func (n *Namespace) Route(via netip.Addr) error {
	return n.Do(func() error {
		if err := netlink.RouteAdd(&netlink.Route{Gw: via.AsSlice()}); err != nil {
			return fmt.Errorf("route through %s: %w", via, err)
		}
		return nil
	})
}

// Close closes the namespace.
func (n *Namespace) Close() error {
	if n.fd < 0 {
		return nil
	}
	if err := unix.Close(n.fd); err != nil {
		return fmt.Errorf("close network namespace: %w", err)
	}
	n.fd = -1
	return nil
}

// Own adds an address to the namespace itself, independent of its devices.
func (n *Namespace) Own(addr netip.Addr) error {
	return n.Do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return fmt.Errorf("find loopback: %w", err)
		}
		a, err := netlink.ParseAddr(netip.PrefixFrom(addr, addr.BitLen()).String())
		if err != nil {
			return err
		}
		a.Flags = noDAD
		if err := netlink.AddrAdd(lo, a); err != nil {
			return fmt.Errorf("give %s to loopback: %w", addr, err)
		}
		return nil
	})
}

// RouteTo adds a route to dst through via.
func (n *Namespace) RouteTo(dst netip.Prefix, via netip.Addr) error {
	return n.Do(func() error {
		to, err := netlink.ParseIPNet(dst.Masked().String())
		if err != nil {
			return fmt.Errorf("route to %s: %w", dst, err)
		}
		if err := netlink.RouteAdd(&netlink.Route{Dst: to, Gw: via.AsSlice()}); err != nil {
			return fmt.Errorf("route to %s through %s: %w", dst, via, err)
		}
		return nil
	})
}

// Path names the namespace for programs such as nsenter, while it is open and this process runs.
func (n *Namespace) Path() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), n.fd) }
