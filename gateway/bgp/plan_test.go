package bgp

import (
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/osrg/gobgp/v4/api"
	"github.com/osrg/gobgp/v4/pkg/apiutil"
	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

func TestCommunities(t *testing.T) {
	t.Parallel()
	var have attributes
	for _, text := range []string{"65010:100", "no-export", "graceful-shutdown", "4200000000:1:2"} {
		if err := have.addCommunity(text); err != nil {
			t.Errorf("%s: %v", text, err)
		}
	}
	want := attributes{standard: []uint32{65010<<16 | 100, 0xffffff01, 0xffff0000}, large: []largeCommunity{{4200000000, 1, 2}}}
	if !have.equal(want) {
		t.Errorf("have %v, want %v", have, want)
	}
	for _, text := range []string{"", "1", "65536:1", "1:2:3:4", "no-exports", "1:-2", "1:2:4294967296", ":"} {
		if err := new(attributes).addCommunity(text); err == nil {
			t.Errorf("%q is a community", text)
		}
	}
}

// Every fault is reported with its field.
func TestPlanFaults(t *testing.T) {
	t.Parallel()
	peer := desired.Peer{Addr: netip.MustParseAddr("10.0.0.1"), ASN: 65000}
	_, err := newPlan(&desired.State{BGP: &desired.BGP{
		ASN: 1, RouterID: netip.IPv4Unspecified(), Communities: []string{"1:1", "everybody"}, Peers: []desired.Peer{peer, peer},
	}})
	var faults desired.Faults
	if !errors.As(err, &faults) {
		t.Fatalf("error %v, want faults", err)
	}
	var fields []string
	for _, f := range faults {
		fields = append(fields, f.Component+" "+f.Field)
	}
	if want := []string{"bgp bgp.routerID", "bgp bgp.communities[1]", "bgp bgp.peers[1].addr"}; !slices.Equal(fields, want) {
		t.Errorf("faults are %v, want %v", err, want)
	}
}

// The community has room for an AS number of two octets.
func TestNewLinkBandwidth(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		asn, mbits uint32
		want       linkBandwidth
	}{
		{64512, 0, linkBandwidth{}},
		{64512, 8, linkBandwidth{64512, 1e6}},
		{65535, 10_000, linkBandwidth{65535, 1.25e9}},
		{65536, 10_000, linkBandwidth{23456, 1.25e9}},
	} {
		if got := newLinkBandwidth(tc.asn, tc.mbits); got != tc.want {
			t.Errorf("newLinkBandwidth(%d, %d) = %v, want %v", tc.asn, tc.mbits, got, tc.want)
		}
	}
}

// Routes are those of VIPs announced by BGP with backends, on gateways that are not cordoned.
func TestPlanRoutes(t *testing.T) {
	t.Parallel()
	serves := []desired.Frontend{{Backends: []desired.Backend{{Weight: 1}}}}
	a := netip.MustParseAddr
	s := &desired.State{BGP: &desired.BGP{ASN: 1}, VIPs: []desired.VIP{
		{Addr: a("192.0.2.1"), Announce: desired.ByBGP, Frontends: serves},
		{Addr: a("192.0.2.2"), Announce: desired.ByVRRP, Frontends: serves},
		{Addr: a("192.0.2.3"), Announce: desired.ByBGP},
	}}
	p, err := newPlan(s)
	if _, has := p.routes[a("192.0.2.1")]; err != nil || len(p.routes) != 1 || !has {
		t.Errorf("routes are %v, %v", p.routes, err)
	}
	s.Cordoned = true
	if p, err = newPlan(s); err != nil || len(p.routes) > 0 {
		t.Errorf("routes of a cordoned gateway are %v, %v", p.routes, err)
	}
	if p, err = newPlan(&desired.State{}); err != nil || p != nil {
		t.Errorf("a state without BGP has the plan %v, %v", p, err)
	}
}

// Each step is an event of a session at a second, with the expected result.
func TestMayAnnounce(t *testing.T) {
	t.Parallel()
	with := neighbour{restart: 10 * time.Second, bfd: desired.BFD{IntervalMillis: 100, Multiplier: 3}}
	without := neighbour{restart: 10 * time.Second}
	type step struct {
		second         int
		change         string // "up", "down", "bfd"
		announced, bfd bool
	}
	for name, tt := range map[string]struct {
		n         neighbour
		restarted bool
		steps     []step
	}{
		"without BFD": {n: without, steps: []step{{0, "", true, false}, {1, "up", true, false}, {2, "down", true, false}, {3, "up", true, false}}},
		"with BFD": {n: with, steps: []step{
			{0, "", false, false}, {1, "up", false, true}, {60, "", false, true}, {61, "bfd", true, true}, {62, "down", false, false}, {63, "up", false, true},
		}},
		"a router that waits for BFD":      {n: with, steps: []step{{9, "", false, false}, {10, "", false, true}, {11, "up", false, true}, {12, "bfd", true, true}}},
		"restarted":                        {n: with, restarted: true, steps: []step{{0, "", true, false}, {2, "up", true, true}, {4, "bfd", true, true}, {60, "", true, true}}},
		"restarted, then without BFD":      {n: with, restarted: true, steps: []step{{0, "", true, false}, {2, "up", true, true}, {16, "", true, true}, {17, "", false, true}}},
		"restarted, without a router":      {n: with, restarted: true, steps: []step{{9, "", true, false}, {10, "", false, true}}},
		"restarted, then the session ends": {n: with, restarted: true, steps: []step{{0, "", true, false}, {2, "up", true, true}, {3, "down", false, false}, {4, "up", false, true}}},
	} {
		begin := time.Now()
		s := &session{since: begin, restarted: tt.restarted}
		for _, step := range tt.steps {
			now := begin.Add(time.Duration(step.second) * time.Second)
			switch step.change {
			case "up", "down":
				s.update(step.change == "up", [2]bool{true, true}, "", now)
			case "bfd":
				s.bfd = tt.n.bfd
				s.setBFDUp(true)
			}
			s.announced = s.mayAnnounce(tt.n, now)
			if s.announced != step.announced || s.wantsBFD(tt.n, now) != step.bfd {
				t.Errorf("%s, second %d: announced %t, BFD %t", name, step.second, s.announced, s.wantsBFD(tt.n, now))
			}
		}
	}
}

// A session that waits for BFD starts with it, or after half the restart time without it, or at once when BFD is turned
// off; meanwhile BFD runs.
func TestMayBegin(t *testing.T) {
	t.Parallel()
	with := neighbour{restart: 10 * time.Second, bfd: desired.BFD{IntervalMillis: 100, Multiplier: 3}}
	without := neighbour{restart: 10 * time.Second}
	for name, tt := range map[string]struct {
		n      neighbour
		second int
		up     bool
		want   bool
	}{
		"at first":          {n: with},
		"BFD is up":         {n: with, up: true, want: true},
		"not yet":           {n: with, second: 4},
		"after the timeout": {n: with, second: 5, want: true},
		"BFD is turned off": {n: without, want: true},
	} {
		begin := time.Now()
		now := begin.Add(time.Duration(tt.second) * time.Second)
		s := &session{since: begin, restarted: true, bfdFirst: true, held: true}
		if bfd := s.wantsBFD(tt.n, now); bfd != (tt.n.bfd != noBFD) {
			t.Errorf("%s: BFD runs: %t", name, bfd)
		}
		s.bfd = tt.n.bfd
		s.setBFDUp(tt.up)
		if have := s.mayBegin(tt.n, now); have != tt.want {
			t.Errorf("%s: %t, want %t", name, have, tt.want)
		}
	}
}

// A peer that sent too many routes has no session for a minute, whatever else holds.
func TestFloodedPeerRests(t *testing.T) {
	t.Parallel()
	begin := time.Now()
	s := &session{flooded: begin, held: true, addedHeld: true}
	for after, want := range map[time.Duration]bool{0: false, 59 * time.Second: false, time.Minute: true} {
		if have := s.mayBegin(neighbour{}, begin.Add(after)); have != want {
			t.Errorf("after %s: %t", after, have)
		}
	}
	s.update(true, [2]bool{}, "", begin)
	if why := s.downReason(neighbour{}, 1); !s.flooded.IsZero() || strings.Contains(why, "routes") {
		t.Errorf("of a new session: %q", why)
	}
}

// A change of session parameters is distinguished from one that keeps the session.
func TestSameSession(t *testing.T) {
	t.Parallel()
	a := neighbour{asn: 1, hold: time.Second}
	b, c := a, a
	b.bfd, c.password = desired.BFD{IntervalMillis: 100}, "x"
	if !sameSession(a, b) || sameSession(a, c) {
		t.Errorf("BFD %t, password %t", sameSession(a, b), sameSession(a, c))
	}
	if have := []bool{(attributes{med: new(uint32(1))}).equal(attributes{med: new(uint32(1))}), (attributes{med: new(uint32(1))}).equal(attributes{})}; !slices.Equal(have, []bool{true, false}) {
		t.Errorf("equal: %v", have)
	}
}

// Routers are asked to prefer other gateways before a cordoned gateway withdraws its routes.
func TestCordonShutsDownGracefully(t *testing.T) {
	t.Parallel()
	vip := netip.MustParseAddr("192.0.2.1")
	state := &desired.State{BGP: &desired.BGP{ASN: 65001, RouterID: vip}, VIPs: []desired.VIP{
		{Addr: vip, Announce: desired.ByBGP, Frontends: []desired.Frontend{{Backends: []desired.Backend{{Weight: 1}}}}},
	}}
	s := New(Config{Log: slog.New(slog.DiscardHandler)})
	defer func() {
		if err := s.Close(t.Context(), false); err != nil {
			t.Error(err)
		}
	}()
	if err := s.Apply(t.Context(), state); err != nil {
		t.Fatal(err)
	}
	var seen []string
	look := func() {
		is := "gone"
		err := s.server.s.ListPath(apiutil.ListPathRequest{TableType: api.TableType_TABLE_TYPE_GLOBAL, Family: families[ipv4]}, func(_ packet.NLRI, paths []*apiutil.Path) {
			is = "there"
			for _, a := range paths[0].Attrs {
				if c, ok := a.(*packet.PathAttributeCommunities); ok && slices.Contains(c.Value, uint32(gracefulShutdown)) {
					is = "leaving"
				}
			}
		})
		if err != nil {
			t.Error(err)
		}
		if len(seen) == 0 || seen[len(seen)-1] != is {
			seen = append(seen, is)
		}
	}
	look()
	cordoned := *state
	cordoned.Cordoned = true
	done := make(chan error, 1)
	go func() { done <- s.Apply(t.Context(), &cordoned) }()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for over := false; !over; {
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
			over = true
		case <-tick.C:
			look()
		}
	}
	look()
	if want := []string{"there", "leaving", "gone"}; !slices.Equal(seen, want) {
		t.Errorf("the route was %v, want %v", seen, want)
	}
}
