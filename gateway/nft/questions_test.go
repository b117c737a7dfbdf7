package nft

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/flows"
)

// masqueradeState returns a state whose backends see the gateway.
func (w *testbed) masqueradeState() *desired.State {
	return w.state(func(v *desired.VIP) { v.Return = desired.Masquerade })
}

// tellEachOther makes both gateways export their connections to the other one until the test ends.
func (w *testbed) tellEachOther() {
	w.t.Helper()
	for g := range w.gateways {
		end := w.tells(g, 1-g)
		w.t.Cleanup(func() { end() })
	}
	w.awaitOpened()
}

// keptByPeers returns the number of connections that a gateway knows to be a peer's.
func (w *testbed) keptByPeers(gateway int) (n int) {
	w.t.Helper()
	in(w.t, w.gateways[gateway].ns, func() error {
		return w.gateways[gateway].list(func(e entry) {
			if e.isKept() {
				n++
			}
		})
	})
	return n
}

// Connections of a gateway that masquerades stay with it when the router leads their clients to another one, whether that one knows of
// them yet or not.
func TestMasqueradedConnectionsThatMove(t *testing.T) {
	t.Parallel()
	w := newTestbed(t)
	s := w.serve()
	w.applySlots(w.masqueradeState())
	w.tellEachOther()
	for family, name := range familyNames {
		for _, announced := range []bool{false, true} {
			had := w.keptByPeers(1)
			all := w.openStreams(family, 4)
			if announced {
				w.poll(func() bool { return w.keptByPeers(1) >= had+12 }, "the other gateway does not know the keeper of every connection")
			}
			w.steerClient(1)
			if idle, download, upload := all.broken(s); idle+download+upload > 0 {
				t.Errorf("%s, announced %t: broken are %d idle, %d download, %d upload of 4 each", name, announced, idle, download, upload)
			}
			w.steerClient(0)
		}
	}
	if n := w.ruleCounter(1, "to the peer that keeps the connection"); n == 0 {
		t.Error("no packet was handed over to the keeper")
	}
}

// A gateway whose peer is gone keeps nothing for it: the packet of a client then gets an answer, which ends the connection. A peer that
// is there keeps its connections, also while this gateway restarts.
func TestKeepersGo(t *testing.T) {
	t.Parallel()
	w := newTestbed(t)
	w.serve()
	w.applySlots(w.masqueradeState())
	end := w.tells(0, 1)
	w.openStreams(0, 2)
	w.openStreams(1, 2)
	w.poll(func() bool { return w.keptByPeers(1) >= 12 }, "the other gateway does not know the keeper of every connection")
	end()
	w.restart(1)
	w.applySlots(w.masqueradeState())
	if n := w.keptByPeers(1); n < 12 {
		t.Errorf("after a restart, %d of 12 connections are left", n)
	}
	w.applyTo(1, w.masqueradeState())
	if n := w.keptByPeers(1); n > 0 {
		t.Errorf("%d connections are left of a peer that is gone", n)
	}
}

// A client of two VIPs may have the same port at both, and one peer keep both connections. It stays with its backends.
func TestKeptConnectionsOfOnePort(t *testing.T) {
	t.Parallel()
	w := newTestbed(t)
	s := w.state(func(v *desired.VIP) { v.Return = desired.Masquerade }, each(func(f *desired.Frontend) { f.Affinity = 60 }))
	second := s.VIPs[0]
	second.Addr = second.Addr.Next()
	s.VIPs = append(s.VIPs, second)
	w.applySlots(s)
	var all []flows.Flow
	for _, vip := range []netip.Addr{vips[0], second.Addr} {
		all = append(all, flows.Flow{
			Protocol: "TCP", Client: netip.AddrPortFrom(clientAddrs[0], 4711), VIP: netip.AddrPortFrom(vip, vipPort), Gateway: "other",
			Source: netip.AddrPortFrom(betweenGateways(0, 0).Addr(), 4711), Backend: netip.AddrPortFrom(backendAddr(0, 1), backendPort),
		})
	}
	for range 2 { // the second time nothing changes
		in(t, w.gateways[1].ns, func() error { return w.gateways[1].knows(all) })
		if n := w.keptByPeers(1); n != len(all) {
			t.Errorf("%d connections are known, want %d", n, len(all))
		}
	}
	if n := w.stayed(1, 0); n != len(all) {
		t.Errorf("backends of %d VIPs are known, want %d", n, len(all))
	}
	all[0].Ended = true
	in(t, w.gateways[1].ns, func() error { return w.gateways[1].knows(all[:1]) })
	if n := w.keptByPeers(1); n != 1 {
		t.Errorf("%d connections are known when one has ended, want 1", n)
	}
}

// A client connects again by its port, after its connection has ended without the other gateway hearing of that.
func TestKeptPortsAreTakenAgain(t *testing.T) {
	t.Parallel()
	const port = 4711
	w := newTestbed(t)
	w.serve()
	w.applySlots(w.masqueradeState())
	end := w.tells(0, 1)
	var all []*flow
	for family := range familyNames {
		all = append(all, w.openFrom(netip.AddrPortFrom(clientAddrs[family], port), family, "echo"))
	}
	w.poll(func() bool { return w.keptByPeers(1) == len(all) }, "the other gateway does not know the keeper of every connection")
	end()
	for _, f := range all {
		if err := errors.Join(f.Conn.(*net.TCPConn).SetLinger(0), f.Close()); err != nil {
			t.Fatal(err)
		}
	}
	in(t, w.gateways[0].ns, func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) })
	w.steerClient(1)
	for family, name := range familyNames {
		if err := w.openFrom(netip.AddrPortFrom(clientAddrs[family], port), family, "echo").echoes(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The router leads a connection to another gateway after its SYN, when a gateway comes or goes.
func TestHandshakesThatMove(t *testing.T) {
	t.Parallel()
	for _, way := range []desired.Return{desired.SNAT, desired.Masquerade} {
		t.Run(string(way), func(t *testing.T) {
			t.Parallel()
			w := newTestbed(t)
			s := w.serve()
			w.applySlots(w.state(func(v *desired.VIP) { v.Return = way }))
			w.tellEachOther()
			w.splitAfterSYN()
			for family, name := range familyNames {
				all := w.openStreams(family, 8)
				if idle, download, upload := all.broken(s); idle+download+upload > 0 {
					t.Errorf("%s: broken are %d idle, %d download, %d upload of 8 each", name, idle, download, upload)
				}
			}
		})
	}
}

// splitAfterSYN makes the client send SYNs through gateway 0, and all that follows through gateway 1.
func (w *testbed) splitAfterSYN() {
	w.t.Helper()
	const table = 100
	in(w.t, w.client, func() error {
		nft := exec.Command("nft", "-f", "-")
		nft.Stdin = strings.NewReader(`table inet split { chain after { type route hook output priority mangle;
			tcp flags & (syn | ack) == ack meta mark set 1; }; }`)
		if said, err := nft.CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, said)
		}
		for family := range familyNames {
			rule := netlink.NewRule()
			rule.Family, rule.Mark, rule.Table = []int{unix.AF_INET, unix.AF_INET6}[family], 1, table
			near, _ := link(family, 50, 1)
			if err := errors.Join(netlink.RuleAdd(rule), netlink.RouteAdd(&netlink.Route{Dst: ipNet(vipNets[family]), Gw: near.Addr().AsSlice(), Table: table})); err != nil {
				return err
			}
		}
		return nil
	})
}

// A client's packets of no connection go on to the peers for a moment, never in a circle, and then by the hash.
func TestUnknownConnections(t *testing.T) {
	t.Parallel()
	w := newTestbed(t)
	w.serve()
	w.applySlots(w.snatState())
	const inVain = "drop a client's packet that a peer handed over in vain"
	for g := range w.gateways {
		w.steer(g)
		for family, name := range familyNames {
			before, own := w.ruleCounter(1-g, inVain), w.ruleCounter(g, inVain)
			c, err := w.dial("tcp", netip.AddrPortFrom(clientAddrs[family], 0), netip.AddrPortFrom(vips[family], vipPort))
			if err != nil {
				t.Fatal(err)
			}
			in(t, w.gateways[g].ns, func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) })
			_, _ = fmt.Fprintln(c, "echo")
			w.poll(func() bool { return w.ruleCounter(1-g, inVain) > before }, name+": the packet does not reach the peer")
			_, _ = c.Read(make([]byte, 1)) // it goes on, to a backend that may know the client by this port or not
			if n := w.ruleCounter(g, inVain) - own; n > 0 {
				t.Errorf("%s: %d packets have come back", name, n)
			}
		}
	}
}
