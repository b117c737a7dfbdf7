package nft

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/flows"
)

// Every backend gets its share, and both gateways choose the same one for a client.
func TestGatewaysChooseSameBackend(t *testing.T) {
	t.Parallel()
	w := newTestbed(t)
	w.apply(w.state())
	w.serve()
	for family, name := range familyNames {
		got := map[string]int{}
		chosen := map[uint16]string{}
		for gateway := range w.gateways {
			w.steer(gateway)
			for port := uint16(20000); port < 20100; port++ {
				backend, err := w.ask(family, port)
				if err != nil {
					t.Fatalf("%s through gateway %d: %v", name, gateway, err)
				}
				if got[backend]++; gateway == 1 && chosen[port] != backend {
					t.Errorf("%s from port %d: %s through one gateway, %s through the other", name, port, chosen[port], backend)
				}
				chosen[port] = backend
			}
		}
		for n := 1; n <= backendCount; n++ {
			if have := got[netip.AddrPortFrom(backendAddr(family, n), backendPort).String()]; have < 20 || have > 90 {
				t.Errorf("%s: %d of 200 to backend %d", name, have, n)
			}
		}
	}
}

// Packets without a backend are refused at once: to another port, to a frontend without backends, or to one whose
// backends all drain.
func TestRefuses(t *testing.T) {
	t.Parallel()
	w := newTestbed(t)
	w.apply(w.state(func(v *desired.VIP) {
		empty, drained := v.Frontends[0], v.Frontends[0]
		empty.Port, empty.Backends = 81, nil
		drained.Port, drained.Backends = 82, []desired.Backend{drained.Backends[0]}
		drained.Backends[0].Draining = true
		v.Frontends = append(v.Frontends, empty, drained)
	}))
	w.serve()
	for family, name := range familyNames {
		for _, port := range []uint16{81, 82, 83} {
			_, err := w.dial("tcp", netip.AddrPortFrom(clientAddrs[family], 0), netip.AddrPortFrom(vips[family], port))
			if !errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("%s, TCP %d: %v", name, port, err)
			}
		}
		c, err := w.dial("udp", netip.AddrPortFrom(clientAddrs[family], 0), netip.AddrPortFrom(vips[family], 81))
		if err != nil {
			t.Fatal(err)
		}
		_, _ = c.Write([]byte("?"))
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("%s, UDP: %v", name, err)
		}
	}
}

// At an address that is also used otherwise, only frontends belong to the gateway.
func TestSharedAddress(t *testing.T) {
	t.Parallel()
	w := newTestbed(t)
	w.apply(w.state(func(v *desired.VIP) { v.Announce = desired.ByNone }, each(func(f *desired.Frontend) {
		if f.Protocol == "TCP" {
			f.Backends = nil
		}
	})))
	for family, name := range familyNames {
		g := w.gateways[0].ns
		give(t, g, "lo", netip.PrefixFrom(vips[family], vips[family].BitLen()))
		in(t, g, func() error {
			for _, port := range []uint16{22, vipPort} {
				l, err := net.Listen("tcp", netip.AddrPortFrom(vips[family], port).String())
				if err != nil {
					return err
				}
				t.Cleanup(func() { _ = l.Close() })
			}
			return nil
		})
		if _, err := w.dial("tcp", netip.AddrPortFrom(clientAddrs[family], 0), netip.AddrPortFrom(vips[family], 22)); err != nil {
			t.Errorf("%s: the gateway's own port: %v", name, err)
		}
		if _, err := w.dial("tcp", netip.AddrPortFrom(clientAddrs[family], 0), netip.AddrPortFrom(vips[family], vipPort)); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("%s: no backend: %v", name, err)
		}
	}
}

// Only sources may connect. Their ranges may overlap, and a change applies to the next client.
func TestSources(t *testing.T) {
	t.Parallel()
	w := newTestbed(t)
	restrict := func(sources ...netip.Prefix) *desired.State {
		return w.state(each(func(f *desired.Frontend) { f.Sources = sources }))
	}
	one := func(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
	w.serve()
	for _, s := range []*desired.State{
		restrict(one(clientAddrs[0]), one(clientAddrs[1])),
		restrict(one(clientAddrs[0]), netip.MustParsePrefix("192.0.2.0/27"), one(clientAddrs[1]), netip.MustParsePrefix("2001:db8::/123")),
	} {
		w.apply(s)
		for family, name := range familyNames {
			w.open(family, "echo")
			c, err := w.dial("udp", netip.AddrPortFrom(otherAddrs[family], 0), netip.AddrPortFrom(vips[family], vipPort))
			if err != nil {
				t.Fatal(err)
			}
			before := w.ruleCounter(0, "refuse clients outside of the sources")
			_, _ = c.Write([]byte("?"))
			w.poll(func() bool { return w.ruleCounter(0, "refuse clients outside of the sources") > before }, name+": a client outside of the sources was not dropped")
			_ = c.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
			if _, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("%s: a client outside of the sources gets %v", name, err)
			}
		}
	}
}

// A client keeps its backend at either gateway, from any port and with any new backends, for the timeout, also when an
// agent restarts.
func TestAffinity(t *testing.T) {
	t.Parallel()
	w := newTestbed(t)
	stays := func(seconds int32, backends ...int) *desired.State {
		return w.state(each(func(f *desired.Frontend) {
			f.Affinity = seconds
			all := f.Backends
			f.Backends = nil
			for _, n := range backends {
				f.Backends = append(f.Backends, all[n-1])
			}
		}))
	}
	w.serve()
	for family, name := range familyNames {
		w.apply(stays(60, 1))
		stop := w.tells(0, 1)
		w.steer(0)
		first := w.open(family, "echo").backend
		w.poll(func() bool { return w.stayed(1, family) > 0 }, name+": the other gateway does not know the client")
		stop()
		w.apply(stays(60, 1, 2, 3, 4))
		for i := range 20 {
			w.steer(i % 2)
			if backend := w.open(family, "echo").backend; backend != first {
				t.Fatalf("%s: at gateway %d the client leaves %s for %s", name, i%2, first, backend)
			}
			if i == 10 {
				w.restart(0)
				w.apply(stays(60, 1, 2, 3, 4))
			}
		}

		// A backend that no longer serves loses its clients.
		w.apply(stays(60, 2, 3, 4))
		second := w.open(family, "echo").backend
		if second == first {
			t.Errorf("%s: the client stays with a removed backend", name)
		}
		w.apply(stays(60, 1, 2, 3, 4))
		if backend := w.open(family, "echo").backend; backend != second {
			t.Errorf("%s: the client leaves %s for %s", name, second, backend)
		}
		w.apply(stays(0, 1, 2, 3, 4))
	}
	if have, _ := read(t, w.gateways[0].ns, w.gateways[0].Balancer); len(w.gateways[0].affinityChains) > 0 || len(have[familySet{affinity, true}]) > 0 {
		t.Errorf("chains %v and elements %v are left", w.gateways[0].affinityChains, have[familySet{affinity, true}])
	}
}

// After the timeout the client is forgotten.
func TestAffinityEnds(t *testing.T) {
	t.Parallel()
	w := newTestbed(t)
	w.apply(w.state(each(func(f *desired.Frontend) { f.Affinity = 1 })))
	w.serve()
	w.open(0, "echo")
	if n := w.stayed(0, 0); n != 1 {
		t.Errorf("%d clients stay, want 1", n)
	}
	w.poll(func() bool { return w.stayed(0, 0) == 0 }, "the client is not forgotten")
}

// Clients of a peer are imported unless they are known, whatever other clients come with them.
func TestAffinityOfPeers(t *testing.T) {
	t.Parallel()
	w := newTestbed(t)
	s := w.state(each(func(f *desired.Frontend) { f.Affinity = 60 }))
	w.apply(s)
	tell := func(stays map[netip.Addr]int) {
		t.Helper()
		var all []flows.Flow
		for client, n := range stays {
			from := netip.AddrPortFrom(client, 40000+uint16(n))
			all = append(all, flows.Flow{
				Protocol: "TCP", Client: from, VIP: netip.AddrPortFrom(vips[0], vipPort), Backend: netip.AddrPortFrom(backendAddr(0, n), backendPort), Source: from,
			})
		}
		in(t, w.gateways[1].ns, func() error { return w.gateways[1].knows(all) })
	}
	tell(map[netip.Addr]int{clientAddrs[0]: 1})
	w.restart(1)
	w.apply(s)
	tell(map[netip.Addr]int{clientAddrs[0]: 2, otherAddrs[0]: 3})
	want := map[string]string{
		string(clientAddrs[0].AsSlice()): addrPort(netip.AddrPortFrom(backendAddr(0, 1), backendPort)),
		string(otherAddrs[0].AsSlice()):  addrPort(netip.AddrPortFrom(backendAddr(0, 3), backendPort)),
	}
	have := map[string]string{}
	in(t, w.gateways[1].ns, func() error {
		s, err := w.gateways[1].open()
		if err != nil {
			return err
		}
		all, err := s.rules.GetSetElements(familySet{clients, true}.spec())
		for _, e := range all {
			have[string(e.Key[:4])] = string(e.Val)
		}
		return err
	})
	if !maps.Equal(have, want) {
		t.Errorf("clients stay with %q, want %q", have, want)
	}
}

// stayed returns the number of clients of a family with a backend.
func (w *testbed) stayed(gateway, family int) (n int) {
	w.t.Helper()
	in(w.t, w.gateways[gateway].ns, func() error {
		b := w.gateways[gateway].Balancer
		b.mu.Lock() // the import uses the same sockets
		defer b.mu.Unlock()
		s, err := b.open()
		if err != nil {
			return err
		}
		all, err := s.rules.GetSetElements(familySet{clients, family == 0}.spec())
		n = len(all)
		return err
	})
	return n
}

// restart replaces a gateway's agent by a new one.
func (w *testbed) restart(gateway int) {
	w.t.Helper()
	b, err := New(slog.New(slog.DiscardHandler))
	if err != nil {
		w.t.Fatal(err)
	}
	w.gateways[gateway].Balancer = b
}

// The backend sees the client address that Return promises.
func TestReturnPaths(t *testing.T) {
	t.Parallel()
	w := newTestbed(t)
	w.serve()
	for way, want := range map[desired.Return]func(family int) netip.Addr{
		desired.Routed: func(family int) netip.Addr { return clientAddrs[family] },
		desired.SNAT:   func(family int) netip.Addr { return vips[family] },
		desired.Masquerade: func(family int) netip.Addr {
			near, _ := link(family, 60, 0)
			return near.Addr()
		},
	} {
		w.apply(w.state(func(v *desired.VIP) { v.Return = way }))
		for family, name := range familyNames {
			f := w.open(family, "echo")
			if have := netip.MustParseAddrPort(f.shown).Addr(); have != want(family) {
				t.Errorf("%s, %s: the backend sees %v, want %v", way, name, have, want(family))
			}
		}
	}
}

// A draining backend keeps its connections and gets no new ones. A removed backend loses its connections at once.
func TestRemovedBackends(t *testing.T) {
	t.Parallel()
	w := newTestbed(t)
	w.apply(w.state())
	w.serve()
	for family, name := range familyNames {
		f := w.open(family, "echo")
		w.apply(w.state(each(func(fr *desired.Frontend) {
			for i := range fr.Backends {
				b := &fr.Backends[i]
				b.Draining = netip.AddrPortFrom(b.Addr, b.Port).String() == f.backend
			}
		})))
		if err := f.echoes(); err != nil {
			t.Errorf("%s: a backend that drains: %v", name, err)
		}
		for range 20 {
			if w.open(family, "echo").backend == f.backend {
				t.Errorf("%s: a backend that drains gets a new connection", name)
			}
		}
		w.apply(w.state(each(func(fr *desired.Frontend) {
			fr.Backends = slices.DeleteFunc(fr.Backends, func(b desired.Backend) bool {
				return netip.AddrPortFrom(b.Addr, b.Port).String() == f.backend
			})
		})))
		if err := f.echoes(); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%s: a removed backend: %v", name, err)
		}
		w.apply(w.state())
	}
}

// When an agent starts, it ends the connections of backends and frontends that were removed while none ran, and no
// others.
func TestBackendsRemovedWithoutAgent(t *testing.T) {
	t.Parallel()
	for _, way := range []desired.Return{desired.Routed, desired.SNAT} {
		w := newTestbed(t)
		returns := func(v *desired.VIP) { v.Return = way }
		w.apply(w.state(returns))
		w.serve()
		var gone, stays []*flow
		for family := range familyNames {
			for len(gone) < 1+family || len(stays) < 1+family {
				if f := w.open(family, "echo"); netip.MustParseAddrPort(f.backend).Addr() == backendAddr(family, 1) {
					gone = append(gone, f)
				} else {
					stays = append(stays, f)
				}
			}
		}
		w.restart(0)
		w.apply(w.state(returns, each(func(f *desired.Frontend) { f.Backends = f.Backends[1:] })))
		for _, f := range gone {
			if err := f.echoes(); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("%s: %s was removed: %v", way, f.backend, err)
			}
		}
		for _, f := range stays {
			if err := f.echoes(); err != nil {
				t.Errorf("%s: %s: %v", way, f.backend, err)
			}
		}
		w.restart(0)
		w.apply(&desired.State{})
		in(t, w.gateways[0].ns, func() error {
			return w.gateways[0].list(func(e entry) {
				if f, ok := e.flow(); ok {
					t.Errorf("%s: the frontend was removed: %s", way, f)
				}
			})
		})
	}
}

// echoes sends a message and reads it back.
func (f *flow) echoes() error {
	if err := f.wait(); err != nil {
		return err
	}
	if _, err := fmt.Fprintln(f, "hello"); err != nil {
		return err
	}
	line, err := f.ReadString('\n')
	if err == nil && line != "hello\n" {
		err = fmt.Errorf("%q is echoed", line)
	}
	return err
}

// A gateway that cannot forward reports the sysctl to set.
func TestSysctls(t *testing.T) {
	t.Parallel()
	w := newTestbed(t)
	g := w.gateways[0]
	for _, name := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding", "net/netfilter/nf_conntrack_tcp_loose"} {
		in(t, g.ns, func() error {
			if err := setSysctl(name, "0"); err != nil {
				return err
			}
			err := g.Apply(t.Context(), w.state())
			faults, ok := errors.AsType[desired.Faults](err)
			if want := "sysctl -w " + strings.ReplaceAll(name, "/", ".") + "=1"; !ok || len(faults) != 1 || !strings.Contains(faults[0].Message, want) {
				t.Errorf("%s: %v", name, err)
			}
			return setSysctl(name, "1")
		})
	}
	wrong := w.state()
	wrong.Balancer = desired.EBPF
	if err := g.Apply(t.Context(), wrong); err == nil || !strings.Contains(err.Error(), "balancer: is") {
		t.Errorf("eBPF: %v", err)
	}
}
