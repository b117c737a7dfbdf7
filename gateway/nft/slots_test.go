package nft

import (
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/flows"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// applySlots connects the gateways and applies s on both, which own every second slot.
func (w *testbed) applySlots(s *desired.State) {
	w.t.Helper()
	w.connectGateways()
	for g := range w.gateways {
		w.applyTo(g, withSlots(s, 1-g, func(slot int) int { return (slot + g) % 2 })) // 0 is the gateway itself
	}
}

// betweenGateways returns the address of a gateway on the link between both.
func betweenGateways(family, gateway int) netip.Prefix {
	near, far := link(family, 70, 0)
	return [2]netip.Prefix{near, far}[gateway]
}

// connectGateways adds that link, once.
func (w *testbed) connectGateways() {
	w.t.Helper()
	if w.connected {
		return
	}
	w.connected = true
	if err := w.gateways[0].ns.Connect(w.gateways[1].ns, betweenGateways(0, 0), betweenGateways(0, 1)); err != nil {
		w.t.Fatal(err)
	}
	for g := range w.gateways {
		give(w.t, w.gateways[g].ns, netlab.DeviceName(betweenGateways(0, g)), betweenGateways(1, g))
	}
}

// withSlots returns s with a gateway as the only peer, and the owners of slots.
func withSlots(s *desired.State, peer int, owner func(slot int) int) *desired.State {
	own := *s
	own.Peers = []desired.PeerGateway{{
		URL: "https://192.0.2.1:9479", Name: "other", Address: betweenGateways(0, peer).Addr(), OtherAddress: betweenGateways(1, peer).Addr(),
	}}
	own.Slots = nil
	for i := range desired.SlotCount {
		own.Slots = append(own.Slots, desired.Slot{Owner: owner(i), Previous: 1 - owner(i)})
	}
	return &own
}

// snatState returns a state whose backends see the VIP.
func (w *testbed) snatState() *desired.State {
	return w.state(func(v *desired.VIP) { v.Return = desired.SNAT })
}

// The source ports of the VIP say which gateway has a connection: each takes them from its own slots, and keeps the client's
// port if that is in one.
func TestPortsOfSlots(t *testing.T) {
	t.Parallel()
	w := newTestbed(t)
	w.serve()
	w.applySlots(w.snatState())
	for g := range w.gateways {
		w.steer(g)
		for family := range familyNames {
			for i := range uint16(desired.SlotCount) {
				port := i*desired.SlotPorts + i + 1 // so that no two of them have one place in their slots
				if _, err := w.ask(family, port); err != nil {
					t.Fatal(err)
				}
				c, err := w.dial("tcp", netip.AddrPortFrom(clientAddrs[family], port), netip.AddrPortFrom(vips[family], vipPort))
				if err != nil {
					t.Fatal(err)
				}
				_ = c.(*net.TCPConn).SetLinger(0) // the other gateway gets the same port
				_ = c.Close()
			}
		}
		if taken := w.portsTaken(g); taken["UDP"] != 2*desired.SlotCount || taken["TCP"] == 0 {
			t.Errorf("gateway %d has %v connections, want each of UDP and some that TCP's resets leave", g, taken)
		}
	}
}

// portsTaken checks the ports of a gateway's connections against its slots, and counts them by protocol.
func (w *testbed) portsTaken(g int) map[string]int {
	w.t.Helper()
	var all []flows.Flow
	in(w.t, w.gateways[g].ns, func() error {
		return w.gateways[g].list(func(e entry) {
			if fl, ok := e.flow(); ok {
				all = append(all, fl)
			}
		})
	})
	taken := map[string]int{}
	for i := range all {
		w.checkPort(g, &all[i], all)
		taken[all[i].Protocol]++
	}
	return taken
}

// checkPort checks the port of a connection among all of its gateway.
func (w *testbed) checkPort(g int, fl *flows.Flow, all []flows.Flow) {
	w.t.Helper()
	port := fl.Source.Port()
	if int(port/desired.SlotPorts)%2 != g {
		w.t.Errorf("gateway %d has taken port %d: %s", g, port, fl)
	}
	// The kernel draws a port for a client's port in another's slot, which may be this client's.
	drawn := slices.ContainsFunc(all, func(o flows.Flow) bool {
		return o.Protocol == fl.Protocol && o.Backend == fl.Backend && o.Source.Port() == fl.Client.Port()
	})
	if int(fl.Client.Port()/desired.SlotPorts)%2 == g && port != fl.Client.Port() && !drawn {
		w.t.Errorf("gateway %d has replaced a port of its own: %s", g, fl)
	}
}

// A TCP packet of a connection that began at another gateway, which is not known here, keeps its client's port, whoever owns
// its slot: the backend knows the connection by it.
func TestPortsOfOtherGateways(t *testing.T) {
	t.Parallel()
	w := newTestbed(t)
	s := w.serve()
	w.applySlots(w.snatState())
	for family, name := range familyNames {
		w.steer(0)
		var kept []*flow
		for len(kept) < 4 {
			f := w.open(family, "echo")
			if netip.MustParseAddrPort(f.shown).Port() == f.LocalAddr().(*net.TCPAddr).AddrPort().Port() {
				kept = append(kept, f)
			}
		}
		w.steer(1)
		if idle, _, _ := (streams{idle: kept}).broken(s); idle > 0 {
			t.Errorf("%s: %d of %d connections with their client's port are broken", name, idle, len(kept))
		}
	}
}

// Two clients with the same port that reach a backend through two gateways have different ports there.
func TestClientsWithOnePort(t *testing.T) {
	t.Parallel()
	w := newTestbed(t)
	s := w.serve()
	state := w.snatState()
	for i := range state.VIPs {
		each(func(f *desired.Frontend) { f.Backends = f.Backends[:1] })(&state.VIPs[i])
	}
	w.applySlots(state)
	for family, name := range familyNames {
		w.steer(0)
		first := w.open(family, "echo")
		w.steer(1)
		port := first.LocalAddr().(*net.TCPAddr).AddrPort().Port()
		second := w.openFrom(netip.AddrPortFrom(otherAddrs[family], port), family, "echo")
		if first.shown == second.shown {
			t.Errorf("%s: the backend knows both as %s", name, first.shown)
		}
		w.steer(0)
		if idle, _, _ := (streams{idle: []*flow{first}}).broken(s); idle > 0 {
			t.Errorf("%s: the first is broken", name)
		}
	}
}

// Other owners of slots change elements, and the same owners change nothing.
func TestSlotsAreElements(t *testing.T) {
	b := newContents()
	writes := func(owner func(slot int) int) int {
		c := newChanges()
		b.replaceGroup(groupElements(withSlots(&desired.State{}, 1, owner), nil), c)
		return len(c.add[familySet{ownPorts, true}])
	}
	alternate := func(slot int) int { return slot % 2 }
	gains63 := func(slot int) int { return min(slot%2, slot%63) }
	if first, same, other := writes(alternate), writes(alternate), writes(gains63); first != desired.SlotCount || same != 0 || other == 0 || other >= first {
		t.Errorf("%d elements written, then %d for the same slots and %d for another owner of one", first, same, other)
	}
}
