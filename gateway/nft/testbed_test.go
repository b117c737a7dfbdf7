package nft

import (
	"bufio"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// patience is how long a packet may take on a busy machine.
const patience = 30 * time.Second

// Addresses of a testbed, of both families.
var (
	clientAddrs  = []netip.Addr{netip.MustParseAddr("192.0.2.10"), netip.MustParseAddr("2001:db8::10")}
	otherAddrs   = []netip.Addr{netip.MustParseAddr("192.0.2.99"), netip.MustParseAddr("2001:db8::99")}
	clientNets   = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8::/64")}
	backendNets  = []netip.Prefix{netip.MustParsePrefix("10.1.0.0/24"), netip.MustParsePrefix("fd00:1::/64")}
	vips         = []netip.Addr{netip.MustParseAddr("198.51.100.7"), netip.MustParseAddr("2001:db8:7::7")}
	vipNets      = []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("2001:db8:7::/64")}
	familyNames  = []string{"IPv4", "IPv6"}
	backendCount = 4
)

const (
	vipPort     = 80
	backendPort = 8080
)

// backendAddr returns the address of the nth backend, from 1 on.
func backendAddr(family, n int) netip.Addr {
	b := backendNets[family].Addr().AsSlice()
	b[len(b)-1] = byte(n)
	a, _ := netip.AddrFromSlice(b)
	return a
}

// testbed is a client, two gateways in parallel, and a machine with all backends' addresses.
//
//	client ── gateway 0 ── servers
//	      └── gateway 1 ──┘
type testbed struct {
	t               *testing.T
	client, servers *netlab.Namespace
	gateways        [2]*gateway
	connected       bool // with each other, see connectGateways
}

type gateway struct {
	ns *netlab.Namespace
	*Balancer
}

// link returns the addresses of both ends of a link: side is 50 towards the client and 60 towards the servers.
func link(family, side, gateway int) (near, far netip.Prefix) {
	if family == 0 {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(side), byte(gateway), 1}), 24), netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(side), byte(gateway), 2}), 24)
	}
	base := fmt.Sprintf("fd00:%d:%d::", side, gateway)
	return netip.MustParsePrefix(base + "1/64"), netip.MustParsePrefix(base + "2/64")
}

func newTestbed(t *testing.T) *testbed {
	t.Helper()
	netlab.Privileged(t)
	w := &testbed{t: t, client: namespace(t), servers: namespace(t)}
	for i := range w.gateways {
		ns := namespace(t)
		b, err := New(slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		w.gateways[i] = &gateway{ns, b}
		for side, other := range map[int]*netlab.Namespace{50: w.client, 60: w.servers} {
			near, far := link(0, side, i)
			if err := ns.Connect(other, near, far); err != nil {
				t.Fatal(err)
			}
			nearDevice, farDevice := netlab.DeviceName(near), netlab.DeviceName(far)
			near, far = link(1, side, i)
			give(t, ns, nearDevice, near)
			give(t, other, farDevice, far)
		}
		in(t, ns, func() error { return setSysctl("net/ipv6/conf/all/forwarding", "1") })
		for family := range familyNames {
			_, client := link(family, 50, i)
			_, servers := link(family, 60, i)
			route(t, ns, clientNets[family], client.Addr())
			route(t, ns, backendNets[family], servers.Addr())
		}
	}
	for family := range familyNames {
		give(t, w.client, "lo", netip.PrefixFrom(clientAddrs[family], clientAddrs[family].BitLen()))
		give(t, w.client, "lo", netip.PrefixFrom(otherAddrs[family], otherAddrs[family].BitLen()))
		for n := 1; n <= backendCount; n++ {
			a := backendAddr(family, n)
			give(t, w.servers, "lo", netip.PrefixFrom(a, a.BitLen()))
		}
	}
	w.steer(0)
	return w
}

func namespace(t *testing.T) *netlab.Namespace {
	t.Helper()
	ns, err := netlab.NewNamespace()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ns.Close() })
	// Addresses can be used at once.
	in(t, ns, func() error { return setSysctl("net/ipv6/conf/default/dad_transmits", "0") })
	return ns
}

func in(t *testing.T, ns *netlab.Namespace, f func() error) {
	t.Helper()
	if err := ns.Do(f); err != nil {
		t.Fatal(err)
	}
}

// give adds a usable address to a device. The kernel adds the route to an IPv6 address a moment later: until then packets
// to it are unreachable.
func give(t *testing.T, ns *netlab.Namespace, device string, p netip.Prefix) {
	t.Helper()
	in(t, ns, func() error {
		l, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(l, &netlink.Addr{IPNet: ipNet(p), Flags: unix.IFA_F_NODAD}); err != nil {
			return err
		}
		for end := time.Now().Add(patience); ; <-time.After(time.Millisecond) {
			routes, err := netlink.RouteGet(p.Addr().AsSlice())
			if err == nil && routes[0].Type == unix.RTN_LOCAL {
				return nil
			}
			if time.Now().After(end) {
				return fmt.Errorf("address %s of %s is no local one: %w", p, device, err)
			}
		}
	})
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func route(t *testing.T, ns *netlab.Namespace, to netip.Prefix, via netip.Addr) {
	t.Helper()
	in(t, ns, func() error { return netlink.RouteReplace(&netlink.Route{Dst: ipNet(to), Gw: via.AsSlice()}) })
}

// steer sends all packets, in both directions, through one gateway.
func (w *testbed) steer(to int) {
	w.t.Helper()
	w.steerServers(to)
	w.steerClient(to)
}

func (w *testbed) steerServers(to int) {
	w.t.Helper()
	for family := range familyNames {
		near, _ := link(family, 60, to)
		route(w.t, w.servers, clientNets[family], near.Addr())
		route(w.t, w.servers, vipNets[family], near.Addr())
	}
}

func (w *testbed) steerClient(to int) {
	w.t.Helper()
	for family := range familyNames {
		near, _ := link(family, 50, to)
		route(w.t, w.client, vipNets[family], near.Addr())
	}
}

// state returns one VIP of each family with a TCP and a UDP frontend; change modifies it.
func (w *testbed) state(change ...func(*desired.VIP)) *desired.State {
	s := &desired.State{Cluster: "a", Group: "edge", Balancer: desired.NFTables}
	for family, addr := range vips {
		v := desired.VIP{Addr: addr, Announce: desired.ByVRRP, Return: desired.Routed}
		for _, p := range []string{"TCP", "UDP"} {
			f := desired.Frontend{Service: "shop/web", Protocol: p, Port: vipPort}
			for n := 1; n <= backendCount; n++ {
				f.Backends = append(f.Backends, desired.Backend{Addr: backendAddr(family, n), Port: backendPort, Weight: 1})
			}
			v.Frontends = append(v.Frontends, f)
		}
		for _, f := range change {
			f(&v)
		}
		s.VIPs = append(s.VIPs, v)
	}
	return s
}

// each applies a change to each frontend.
func each(f func(*desired.Frontend)) func(*desired.VIP) {
	return func(v *desired.VIP) {
		for i := range v.Frontends {
			f(&v.Frontends[i])
		}
	}
}

// apply applies a state to both gateways.
func (w *testbed) apply(s *desired.State) {
	w.t.Helper()
	for g := range w.gateways {
		w.applyTo(g, s)
	}
}

// applyTo applies a state to one gateway.
func (w *testbed) applyTo(gateway int, s *desired.State) {
	w.t.Helper()
	g := w.gateways[gateway]
	in(w.t, g.ns, func() error {
		if err := g.Apply(w.t.Context(), s); err != nil {
			return fmt.Errorf("gateway %d: %w", gateway, err)
		}
		g.deletes.Wait() // no other caller
		return nil
	})
}

// flow is a connection of the client.
type flow struct {
	net.Conn
	*bufio.Reader
	backend string // the backend that answers
	shown   string // the client's address at the backend
}

func (f *flow) Read(b []byte) (int, error) { return f.Reader.Read(b) }

// wait restarts the deadline of packets.
func (f *flow) wait() error { return f.SetDeadline(time.Now().Add(patience)) }

// dial connects to a VIP from an address and port of the client; port 0 is any.
func (w *testbed) dial(network string, from netip.AddrPort, to netip.AddrPort) (c net.Conn, err error) {
	reuse := func(_, _ string, raw syscall.RawConn) (err error) {
		return errors.Join(raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) }), err)
	}
	var local net.Addr = net.TCPAddrFromAddrPort(from)
	if network == "udp" {
		local = net.UDPAddrFromAddrPort(from)
	}
	err = w.client.Do(func() error {
		d := net.Dialer{LocalAddr: local, Timeout: patience, Control: reuse}
		c, err = d.DialContext(w.t.Context(), network, to.String())
		return err
	})
	if err == nil {
		w.t.Cleanup(func() { _ = c.Close() })
		err = c.SetDeadline(time.Now().Add(patience))
	}
	return c, err
}

// open opens a flow for a service of serve.
func (w *testbed) open(family int, wish string) *flow {
	w.t.Helper()
	return w.openFrom(netip.AddrPortFrom(clientAddrs[family], 0), family, wish)
}

// openFrom opens a flow from an address and port of the client; port 0 is any.
func (w *testbed) openFrom(from netip.AddrPort, family int, wish string) *flow {
	w.t.Helper()
	c, err := w.dial("tcp", from, netip.AddrPortFrom(vips[family], vipPort))
	if err != nil {
		w.t.Fatal(err)
	}
	f := &flow{Conn: c, Reader: bufio.NewReader(c)}
	fmt.Fprintln(c, wish)
	line, err := f.ReadString('\n')
	if err != nil {
		w.t.Fatal(err)
	}
	if _, err := fmt.Sscanf(line, "%s %s", &f.backend, &f.shown); err != nil {
		w.t.Fatal(err)
	}
	return f
}

// listen records the sources of all IPv4 packets to the client, until the returned function is called.
func (w *testbed) listen() (stop func() []netip.Addr) {
	w.t.Helper()
	var fd int
	in(w.t, w.client, func() (err error) {
		const allIP = 0x0008 // htons(ETH_P_IP)
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, allIP)
		return err
	})
	return func() (sources []netip.Addr) {
		defer unix.Close(fd)
		b := make([]byte, 2048)
		for {
			n, _, err := unix.Recvfrom(fd, b, 0)
			if err != nil || n < 20 {
				return sources
			}
			source, _ := netip.AddrFromSlice(b[12:16])
			sources = append(sources, source)
		}
	}
}

// ask sends a datagram from a port and returns the backend that answers.
func (w *testbed) ask(family int, port uint16) (backend string, err error) {
	c, err := w.dial("udp", netip.AddrPortFrom(clientAddrs[family], port), netip.AddrPortFrom(vips[family], vipPort))
	if err != nil {
		return "", err
	}
	defer c.Close()
	if _, err := c.Write([]byte("?")); err != nil {
		return "", err
	}
	b := make([]byte, 100)
	n, err := c.Read(b)
	if err != nil {
		return "", err
	}
	_, err = fmt.Sscanf(string(b[:n]), "%s", &backend)
	return backend, err
}
