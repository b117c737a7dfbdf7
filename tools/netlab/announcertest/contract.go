package announcertest

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/tools/netlab"
	"github.com/isthmus-net/isthmus/tools/netlab/edge"
)

// Group is two gateways, of which gateway 0 is preferred.
type Group struct {
	*Lab
	// VIPs are those of the lab, one of each family.
	VIPs [2]netip.Addr
	// Arguments are the arguments of the announcers, by gateway.
	Arguments [2]string
	// State returns the state in which a gateway announces the VIPs.
	State func(gateway int) *desired.State
	// Announces reports whether the network sees that a gateway announces a VIP.
	Announces func(gateway int, vip netip.Addr) (bool, error)
	// Shared says that gateway 1 announces, too, while gateway 0 does. Otherwise it waits for gateway 0 to withdraw.
	Shared bool
	// AtOnce says that a withdrawal is complete when Apply returns.
	AtOnce bool
	// Check tests, before the gateways end, what only this kind of announcer promises; nil: nothing.
	Check func()
}

// Contract tests what an agent relies on, of an announcer and a router together. newGroup returns a group without
// announcers.
func Contract(t *testing.T, newGroup func(t *testing.T) Group) {
	t.Helper()
	netlab.Privileged(t)
	for name, test := range map[string]func(*testing.T, Group){
		"withdraws a VIP without backends and keeps the other":     testNoBackends,
		"hands over when cordoned or drained and loses no request": testHandOver,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := newGroup(t)
			g.Start(t, 0, g.Arguments[0], g.State(0))
			g.awaitAnnounced(t, 0, g.VIPs[:]...)
			g.Start(t, 1, g.Arguments[1], g.State(1))
			g.awaitPreferred(t)
			test(t, g)
		})
	}
}

// difference says how the VIPs that a gateway announces differ from vips; "": not at all.
func (g Group) difference(t *testing.T, gateway int, vips []netip.Addr) string {
	t.Helper()
	for _, a := range g.VIPs {
		announces, err := g.Announces(gateway, a)
		if err != nil {
			t.Fatal(err)
		}
		if announces != slices.Contains(vips, a) {
			return fmt.Sprintf("gateway %d announces %s: %t, want %v to be announced", gateway, a, announces, vips)
		}
	}
	return ""
}

// awaitAnnounced waits until a gateway announces these of the VIPs, and no others.
func (g Group) awaitAnnounced(t *testing.T, gateway int, vips ...netip.Addr) {
	t.Helper()
	Eventually(t, func() string { return g.difference(t, gateway, vips) })
}

// withdraw applies a state on gateway 0, after which it announces these of the VIPs, and no others, and reports them.
func (g Group) withdraw(t *testing.T, s *desired.State, remaining ...netip.Addr) {
	t.Helper()
	g.Apply(t, 0, s)
	if d := g.difference(t, 0, remaining); g.AtOnce && d != "" {
		t.Errorf("when Apply returns, %s", d)
	}
	g.awaitAnnounced(t, 0, remaining...)
	g.reports(t, 0, remaining...)
}

// awaitPreferred waits until gateway 0 announces the VIPs, and gateway 1 as far as it shares them.
func (g Group) awaitPreferred(t *testing.T) {
	t.Helper()
	g.awaitAnnounced(t, 0, g.VIPs[:]...)
	if g.Shared {
		g.awaitAnnounced(t, 1, g.VIPs[:]...)
	} else {
		g.awaitAnnounced(t, 1)
	}
}

// reports fails the test unless an announcer reports that it announces these VIPs, and no drift.
func (g Group) reports(t *testing.T, gateway int, vips ...netip.Addr) {
	t.Helper()
	announced, drift, err := g.Announcers[gateway].Status()
	slices.SortFunc(announced, netip.Addr.Compare)
	if err != nil || len(drift) > 0 || !slices.Equal(announced, vips) {
		t.Errorf("gateway %d reports that it announces %v, want %v; drift %v, %v", gateway, announced, vips, drift, err)
	}
}

func testNoBackends(t *testing.T, g Group) {
	t.Helper()
	s := g.State(0)
	s.VIPs[1].Frontends[0].Backends[0].Draining = true
	g.withdraw(t, s, g.VIPs[0])
	g.Apply(t, 0, g.State(0))
	g.awaitPreferred(t)
	g.reports(t, 0, g.VIPs[:]...)
	if g.Check != nil {
		g.Check()
	}
}

// A client may update its neighbour entry late: it loses nothing either.
func testHandOver(t *testing.T, g Group) {
	t.Helper()
	probes := []*edge.Probe{g.Probe(t, g.VIPs[0]), g.Probe(t, g.VIPs[1])}
	answers := func(gateway int) {
		t.Helper()
		for _, p := range probes {
			AwaitAnswers(t, p, gateway)
		}
	}
	answers(0)
	cordoned := g.State(0)
	cordoned.Cordoned = true
	for range 2 {
		g.withdraw(t, cordoned)
		g.awaitAnnounced(t, 1, g.VIPs[:]...)
		answers(1)
		g.Apply(t, 0, g.State(0))
		g.awaitPreferred(t)
		answers(0)
	}
	if g.Check != nil {
		g.Check()
	}
	if err := g.Announcers[0].Close(true); err != nil {
		t.Fatal(err)
	}
	answers(1)
	g.awaitAnnounced(t, 0)
	for i, p := range probes {
		if r := p.Stop(); r.Lost() > 0 {
			t.Errorf("%s: %s", g.VIPs[i], r)
		}
	}
}
