package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/tools/netlab/connect"
)

// check is a test that must pass on every kernel.
type check struct {
	name string
	run  func(context.Context, *testbed) error
}

var checks = []check{
	{"every hook is attached", func(_ context.Context, tb *testbed) error { return tb.agent.Status().Ready() }},
	{"TCP over IPv4", connects("tcp4", echoVIPs[0])},
	{"TCP over IPv6", connects("tcp6", echoVIPs[1])},
	{"TCP over IPv4 of a socket for both families", connectsMapped},
	{"MPTCP", connectsMPTCP},
	{"UDP over IPv4, connected", connects("udp4", echoVIPs[0])},
	{"UDP over IPv6, connected", connects("udp6", echoVIPs[1])},
	{"UDP over IPv4, unconnected", asks("udp4", echoVIPs[0])},
	{"UDP over IPv6, unconnected", asks("udp6", echoVIPs[1])},
	{"a VIP without backends refuses TCP over IPv4", refuses("tcp4", emptyVIPs[0])},
	{"a VIP without backends refuses TCP over IPv6", refuses("tcp6", emptyVIPs[1])},
	{"a VIP without backends refuses UDP over IPv4", refuses("udp4", emptyVIPs[0])},
	{"a VIP without backends refuses UDP over IPv6", refuses("udp6", emptyVIPs[1])},
	{"a restarted agent writes nothing", adopts},
	{"a socket of a removed UDP backend is closed", closesStale},
	{"a gateway's balancer loads", loadsGateway},
}

// at returns the address and port of a VIP.
func at(vip netip.Addr) netip.AddrPort { return netip.AddrPortFrom(vip, servedPort) }

// dial connects in the client's namespace.
func (tb *testbed) dial(ctx context.Context, d *net.Dialer, network string, to netip.AddrPort) (c net.Conn, err error) {
	err = tb.client.Do(func() error {
		c, err = d.DialContext(ctx, network, to.String())
		return err
	})
	return c, err
}

// connects returns a check that a connection to a VIP is answered, and that the socket's peer address is the VIP.
func connects(network string, vip netip.Addr) func(context.Context, *testbed) error {
	return func(ctx context.Context, tb *testbed) error {
		d := &net.Dialer{}
		d.SetMultipathTCP(false)
		c, err := tb.dial(ctx, d, network, at(vip))
		if err != nil {
			return err
		}
		defer c.Close()
		if err := saysPeer(c, at(vip)); err != nil {
			return err
		}
		return isAnswered(ctx, c)
	}
}

// connectsMPTCP checks a connection of an MPTCP socket. It does not check the peer address, which is the backend's: the kernel
// connects a separate socket for each subflow.
func connectsMPTCP(ctx context.Context, tb *testbed) error {
	d := &net.Dialer{}
	d.SetMultipathTCP(true)
	c, err := tb.dial(ctx, d, "tcp4", at(echoVIPs[0]))
	if err != nil {
		return err
	}
	defer c.Close()
	if multipath, err := c.(*net.TCPConn).MultipathTCP(); err != nil {
		return err
	} else if !multipath {
		return errors.New("the socket fell back to plain TCP")
	}
	return isAnswered(ctx, c)
}

// connectsMapped connects an IPv6 socket to an IPv4 VIP, as dual-stack programs do.
func connectsMapped(ctx context.Context, tb *testbed) error {
	var fd int
	err := tb.client.Do(func() (err error) {
		if fd, err = unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return fmt.Errorf("make socket: %w", err)
		}
		return unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 0)
	})
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	limit := unix.NsecToTimeval(int64(checkTimeout))
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &limit); err != nil {
		return fmt.Errorf("set timeout: %w", err)
	}
	if err := connect.Socket(fd, &unix.SockaddrInet6{Addr: echoVIPs[0].As16(), Port: int(servedPort)}, checkTimeout); err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	return saysPeerFD(fd, at(echoVIPs[0]))
}

// asks returns a check that an unconnected socket receives its answer from the VIP.
func asks(network string, vip netip.Addr) func(context.Context, *testbed) error {
	return func(ctx context.Context, tb *testbed) error {
		var c net.PacketConn
		if err := tb.client.Do(func() (err error) {
			c, err = new(net.ListenConfig).ListenPacket(ctx, network, ":0")
			return err
		}); err != nil {
			return err
		}
		defer c.Close()
		if err := c.SetDeadline(time.Now().Add(checkTimeout)); err != nil {
			return err
		}
		if _, err := c.WriteTo([]byte("ask"), net.UDPAddrFromAddrPort(at(vip))); err != nil {
			return err
		}
		var b [8]byte
		n, from, err := c.ReadFrom(b[:])
		if err != nil {
			return err
		}
		if string(b[:n]) != "ask" {
			return fmt.Errorf("answer %q", b[:n])
		}
		if have := from.(*net.UDPAddr).AddrPort(); have != at(vip) {
			return fmt.Errorf("the answer came from %s, want %s", have, at(vip))
		}
		return nil
	}
}

// refuses returns a check that a VIP without backends refuses immediately, and that the refusal is counted.
func refuses(network string, vip netip.Addr) func(context.Context, *testbed) error {
	return func(ctx context.Context, tb *testbed) error {
		before := tb.agent.Status().Refusals[bpf.DropNoBackend]
		c, err := tb.dial(ctx, &net.Dialer{}, network, at(vip))
		if err == nil {
			return errors.Join(fmt.Errorf("connected to %s", c.RemoteAddr()), c.Close())
		}
		if !errors.Is(err, unix.ECONNREFUSED) {
			return err
		}
		// The kernel may retry an MPTCP socket as plain TCP, and count a second refusal.
		if after := tb.agent.Status().Refusals[bpf.DropNoBackend]; after <= before {
			return fmt.Errorf("refusals counted: %d, then %d", before, after)
		}
		return nil
	}
}

// adopts checks that a restarted agent adopts the state of its predecessor.
func adopts(ctx context.Context, tb *testbed) error {
	if err := tb.restartAgent(ctx); err != nil {
		return err
	}
	if n := tb.agent.Status().Writes; n != 0 {
		return fmt.Errorf("%d writes", n)
	}
	return connects("tcp4", echoVIPs[0])(ctx, tb)
}

// isAnswered sends data and expects it back.
func isAnswered(ctx context.Context, c net.Conn) error {
	limit, ok := ctx.Deadline()
	if !ok {
		limit = time.Now().Add(checkTimeout)
	}
	if err := c.SetDeadline(limit); err != nil {
		return err
	}
	if _, err := c.Write([]byte("ask")); err != nil {
		return err
	}
	var b [8]byte
	if n, err := c.Read(b[:]); err != nil {
		return err
	} else if string(b[:n]) != "ask" {
		return fmt.Errorf("answer %q", b[:n])
	}
	return nil
}

// saysPeer checks the peer address of c, as the kernel reports it.
func saysPeer(c net.Conn, want netip.AddrPort) error {
	raw, err := c.(syscall.Conn).SyscallConn()
	if err != nil {
		return err
	}
	var said error
	if err := raw.Control(func(fd uintptr) { said = saysPeerFD(int(fd), want) }); err != nil {
		return err
	}
	return said
}

func saysPeerFD(fd int, want netip.AddrPort) error {
	sa, err := unix.Getpeername(fd)
	if err != nil {
		return fmt.Errorf("getpeername: %w", err)
	}
	var have netip.AddrPort
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		have = netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		have = netip.AddrPortFrom(netip.AddrFrom16(sa.Addr).Unmap(), uint16(sa.Port))
	}
	if have != want {
		return fmt.Errorf("getpeername returns %s, want %s", have, want)
	}
	return nil
}

// loadsGateway checks that the kernel loads a gateway's program. Attaching it requires TCX.
func loadsGateway(context.Context, *testbed) error {
	spec, err := bpf.LoadGatewaySpec()
	if err != nil {
		return err
	}
	coll, err := ebpf.NewCollection(spec)
	if err != nil {
		return err
	}
	coll.Close()
	return nil
}
