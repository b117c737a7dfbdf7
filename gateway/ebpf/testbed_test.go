package ebpf

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/tools/netlab"
	"github.com/isthmus-net/isthmus/tools/netlab/edge"
)

// testbed is an edge with two gateways that balance, and backends behind both: one machine with an address for each.
type testbed struct {
	t testing.TB
	*edge.Lab
	machine   *netlab.Namespace
	balancers [2]*Balancer
	bpffs     [2]string
	xdp       XDP // of the balancers that are opened

	uploads  sync.Mutex
	uploaded map[string]int // lines by name; guarded by uploads
}

// patience limits every wait.
const patience = 20 * time.Second

var (
	vips    = [2]netip.Addr{netip.MustParseAddr("198.51.100.7"), netip.MustParseAddr("2001:db8::7")}
	clients = [2]netip.Addr{netip.MustParseAddr("10.98.0.2"), netip.MustParseAddr("fd98::2")}
	// Each gateway has a cable to the machine, in both families.
	arms = [2][2][2]netip.Prefix{
		{{netip.MustParsePrefix("10.97.0.1/24"), netip.MustParsePrefix("10.97.0.2/24")}, {netip.MustParsePrefix("fd97:0::1/64"), netip.MustParsePrefix("fd97:0::2/64")}},
		{{netip.MustParsePrefix("10.97.1.1/24"), netip.MustParsePrefix("10.97.1.2/24")}, {netip.MustParsePrefix("fd97:1::1:1/64"), netip.MustParsePrefix("fd97:1::1:2/64")}},
	}
	backendNets = [2]netip.Prefix{netip.MustParsePrefix("10.97.100.0/24"), netip.MustParsePrefix("fd97:100::/64")}
)

const (
	servedPort  = 80
	backendPort = 8080
)

// backend returns the address of a backend by its number, from 1 on.
func backend(family, n int) netip.Addr {
	if family == 0 {
		return netip.AddrFrom4([4]byte{10, 97, 100, byte(n)})
	}
	return netip.MustParseAddr(fmt.Sprintf("fd97:100::%d", n))
}

const backends = 4

func newTestbed(t testing.TB) *testbed {
	t.Helper()
	netlab.Privileged(t)
	l, err := edge.New()
	if err != nil {
		t.Fatal(err)
	}
	w := &testbed{t: t, Lab: l, uploaded: map[string]int{}}
	t.Cleanup(func() { w.check(l.Close()) })
	w.machine, err = netlab.NewNamespace()
	w.check(err)
	t.Cleanup(func() { w.check(w.machine.Close()) })
	w.check(w.machine.Do(func() error {
		return os.WriteFile("/proc/sys/net/ipv6/conf/default/accept_dad", []byte("0"), 0)
	}))
	for g, gateway := range l.Gateways {
		for f := range vips {
			w.check(gateway.Connect(w.machine, arms[g][f][0], arms[g][f][1]))
			w.check(gateway.RouteTo(backendNets[f], arms[g][f][1].Addr()))
		}
		w.bpffs[g] = netlab.BPFFS(t)
		w.open(g)
		t.Cleanup(func() { w.check(w.balancers[g].Close(context.Background(), false)) })
	}
	w.check(w.machine.Do(func() error {
		lo, err := netlink.LinkByName("lo")
		for f := range vips {
			for n := 1; n <= backends; n++ {
				b := backend(f, n)
				addr, parseErr := netlink.ParseAddr(netip.PrefixFrom(b, b.BitLen()).String())
				addr.Flags = unix.IFA_F_NODAD // otherwise the address is not usable at once
				err = errors.Join(err, parseErr, netlink.AddrAdd(lo, addr))
			}
		}
		return err
	}))
	w.lead(0)
	return w
}

func (w *testbed) check(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// open starts a gateway's balancer, as a new process would.
func (w *testbed) open(g int) {
	w.t.Helper()
	v, err := thisVersion()
	w.check(err)
	w.openVersion(g, v)
}

func (w *testbed) openVersion(g int, v version) {
	w.t.Helper()
	w.check(w.Gateways[g].Do(func() (err error) {
		w.balancers[g], err = openVersion(Config{BPFFS: w.bpffs[g], Flows: 4096, XDP: w.xdp, Log: slog.New(slog.DiscardHandler)}, v)
		return err
	}))
}

// apply applies s on both gateways.
func (w *testbed) apply(s *desired.State) {
	w.t.Helper()
	for g := range w.balancers {
		w.check(w.applyTo(g, s))
	}
}

// applySlots applies s on both gateways. owner returns the owner of a slot, as a gateway knows it; the other gateway is its previous
// owner.
func (w *testbed) applySlots(s *desired.State, owner func(g, slot int) int) {
	w.t.Helper()
	for g := range w.balancers {
		other := edge.Gateways[1-g][0]
		own := *s
		own.Peers = []desired.PeerGateway{{URL: "https://192.0.2.1:9479", Name: "other", Address: other}}
		for i := range desired.SlotCount {
			number := (owner(g, i) + g) % 2 // 0 is the gateway itself
			own.Slots = append(own.Slots, desired.Slot{Owner: number, Previous: 1 - number})
		}
		w.check(w.applyTo(g, &own))
		w.check(w.Gateways[g].Do(func() error { // as agents do, so that the neighbour is known
			if _, err := net.DialTimeout("tcp", netip.AddrPortFrom(other, 9479).String(), patience); !errors.Is(err, unix.ECONNREFUSED) {
				return fmt.Errorf("connect to gateway %s: %w", other, err)
			}
			return nil
		}))
	}
}

// alternate gives gateways every second slot.
func alternate(_, slot int) int { return slot % 2 }

func (w *testbed) applyTo(g int, s *desired.State) error {
	return w.Gateways[g].Do(func() error { return w.balancers[g].Apply(context.Background(), s) })
}

// lead routes packets to the VIPs, and packets from backends, through a gateway. The packets from backends come
// first.
func (w *testbed) lead(g int) {
	w.t.Helper()
	w.leadBack(g)
	for f, vip := range vips {
		w.check(w.Router.Do(func() error { return route(netip.PrefixFrom(vip, vip.BitLen()), edge.Gateways[g][f]) }))
	}
}

// leadBack routes packets from backends through a gateway.
func (w *testbed) leadBack(g int) {
	w.t.Helper()
	for f, vip := range vips {
		for _, to := range []netip.Addr{vip, clients[f], edge.Gateways[0][f], edge.Gateways[1][f]} {
			w.check(w.machine.Do(func() error { return route(netip.PrefixFrom(to, to.BitLen()), arms[g][f][0].Addr()) }))
		}
	}
}

func route(to netip.Prefix, via netip.Addr) error {
	dst, err := netlink.ParseIPNet(to.String())
	if err != nil {
		return err
	}
	return netlink.RouteReplace(&netlink.Route{Dst: dst, Gw: via.AsSlice()})
}

// state returns a state with both VIPs, TCP and UDP, and the backends of these numbers.
func state(way desired.Return, numbers ...int) *desired.State {
	s := &desired.State{Cluster: "a", Group: "edge", Balancer: desired.EBPF}
	for f, vip := range vips {
		v := desired.VIP{Addr: vip, Announce: desired.ByBGP, Return: way}
		for _, proto := range []string{"TCP", "UDP"} {
			fe := desired.Frontend{Service: "shop/web", Protocol: proto, Port: servedPort}
			for _, n := range numbers {
				fe.Backends = append(fe.Backends, desired.Backend{Addr: backend(f, n), Port: backendPort, Weight: 1})
			}
			v.Frontends = append(v.Frontends, fe)
		}
		s.VIPs = append(s.VIPs, v)
	}
	return s
}

// serve replies on all backends until the test ends: with the backend, the source that it sees, and the text
// received.
func (w *testbed) serve() {
	w.t.Helper()
	var serving sync.WaitGroup
	var listener net.Listener
	var err error
	w.check(w.machine.Do(func() error {
		listener, err = (&net.ListenConfig{}).Listen(context.Background(), "tcp", fmt.Sprintf(":%d", backendPort))
		return err
	}))
	closers := []func() error{listener.Close}
	var open sync.Mutex
	var conns []net.Conn // guarded by open
	serving.Go(func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			open.Lock()
			conns = append(conns, c)
			open.Unlock()
			serving.Go(func() { w.talk(c) })
		}
	})
	for f := range vips {
		for n := 1; n <= backends; n++ {
			var c *net.UDPConn
			w.check(w.machine.Do(func() error {
				c, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(backend(f, n), backendPort)))
				return err
			}))
			closers = append(closers, c.Close)
			serving.Go(func() {
				b := make([]byte, 1<<13)
				for {
					n, from, err := c.ReadFromUDPAddrPort(b)
					if err != nil {
						return
					}
					_, _ = c.WriteToUDPAddrPort(fmt.Appendf(nil, "%s %s %s", ip(c.LocalAddr()), from.Addr().Unmap(), b[:n]), from)
				}
			})
		}
	}
	w.t.Cleanup(func() {
		for _, c := range closers {
			_ = c()
		}
		open.Lock()
		for _, c := range conns {
			_ = c.Close()
		}
		open.Unlock()
		serving.Wait()
	})
}

// talk echoes each line. After "download" it sends "tick" continuously, after "upload NAME" it only counts lines, and after "end" it
// closes the connection.
func (w *testbed) talk(c net.Conn) {
	defer c.Close()
	lines := bufio.NewScanner(c)
	for lines.Scan() {
		text := lines.Text()
		name, upload := strings.CutPrefix(text, "upload ")
		switch {
		case upload:
			w.uploads.Lock()
			w.uploaded[name]++
			w.uploads.Unlock()
		case text == "end":
			return
		case text == "download":
			tick := time.NewTicker(5 * time.Millisecond)
			defer tick.Stop()
			for now := range tick.C {
				if _, err := fmt.Fprintln(c, now.UnixNano()); err != nil {
					return
				}
			}
		default:
			fmt.Fprintf(c, "%s %s %s\n", ip(c.LocalAddr()), ip(c.RemoteAddr()), text)
		}
	}
}

// hasUploaded returns how many lines of an upload have arrived.
func (w *testbed) hasUploaded(name string) int {
	w.uploads.Lock()
	defer w.uploads.Unlock()
	return w.uploaded[name]
}

func ip(a net.Addr) netip.Addr { return netip.MustParseAddrPort(a.String()).Addr().Unmap() }

// conn is a client's connection.
type conn struct {
	net.Conn
	w *testbed
}

// dial connects to a port of a VIP from a port of the client, 0 for any.
func (w *testbed) dial(network string, f int, port, from uint16) (*conn, error) {
	c := &conn{w: w}
	d := net.Dialer{Timeout: patience}
	d.SetMultipathTCP(false)
	if from != 0 {
		at := netip.AddrPortFrom(clients[f], from)
		d.LocalAddr = net.TCPAddrFromAddrPort(at)
		if network == "udp" {
			d.LocalAddr = net.UDPAddrFromAddrPort(at)
		}
	}
	err := w.Client.Do(func() (err error) {
		c.Conn, err = d.Dial(network, netip.AddrPortFrom(vips[f], port).String())
		return err
	})
	return c, err
}

// ask sends a query and returns the backend that replied and the source that it saw.
func (c *conn) ask(text string) (backend, seen netip.Addr, err error) {
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return backend, seen, err
	}
	if _, err := fmt.Fprintln(c, text); err != nil {
		return backend, seen, err
	}
	return c.hear(text)
}

func (c *conn) hear(text string) (backend, seen netip.Addr, err error) {
	b := make([]byte, 1<<13)
	n, err := c.Read(b)
	if err != nil {
		return backend, seen, err
	}
	words := strings.Fields(string(b[:n]))
	if len(words) != 3 || words[2] != text {
		return backend, seen, fmt.Errorf("answer %q to %q", b[:n], text)
	}
	return netip.MustParseAddr(words[0]), netip.MustParseAddr(words[1]), nil
}

// refusals returns how many packets a gateway refused, by reason.
func (w *testbed) refusals(g int) map[string]uint64 {
	w.t.Helper()
	all, err := w.balancers[g].Refusals()
	w.check(err)
	sum := map[string]uint64{}
	for r, n := range all {
		sum[r.Reason] += n
	}
	return sum
}

// listen counts the packets that the client receives from now on, by source.
func (w *testbed) listen() (stop func() map[netip.Addr]int) {
	w.t.Helper()
	var fd int
	w.check(w.Client.Do(func() (err error) {
		const everything = 0x0300 // ETH_P_ALL in network order
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, everything); err != nil {
			return err
		}
		return unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 20_000})
	}))
	sources := map[netip.Addr]int{}
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		b := make([]byte, 1<<13)
		for {
			n, from, err := unix.Recvfrom(fd, b, 0)
			select {
			case <-done:
				return
			default:
			}
			if l, ok := from.(*unix.SockaddrLinklayer); err != nil || !ok || l.Pkttype == unix.PACKET_OUTGOING || n < 40 {
				continue
			}
			if b[0]>>4 == 4 {
				sources[netip.AddrFrom4([4]byte(b[12:16]))]++
			} else {
				sources[netip.AddrFrom16([16]byte(b[8:24]))]++
			}
		}
	}()
	return func() map[netip.Addr]int {
		close(done)
		<-ended
		_ = unix.Close(fd)
		return sources
	}
}
