package bgp_test

import (
	"encoding/json"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/isthmus-net/isthmus/gateway/agent"
	"github.com/isthmus-net/isthmus/gateway/bgp"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/tools/netlab"
	"github.com/isthmus-net/isthmus/tools/netlab/announcertest"
	"github.com/isthmus-net/isthmus/tools/netlab/edge"
	"github.com/isthmus-net/isthmus/tools/netlab/frr"
	"github.com/isthmus-net/isthmus/tools/netlab/subprocess"
)

var _ agent.Announcer = (*bgp.Speaker)(nil)

func TestMain(m *testing.M) {
	subprocess.Main(func(argument string) subprocess.Announcer {
		return bgp.New(bgp.Config{Restarting: argument == restarting, Log: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	})
	_ = flag.Set("test.parallel", "4") // they wait for timers, not for CPUs
	os.Exit(netlab.Main(m))
}

var (
	vip  = netip.MustParseAddr("203.0.113.10")
	vip6 = netip.MustParseAddr("2001:db8:f::10")
)

// both are the VIPs by family, as in the addresses of edge.
var both = [2]netip.Addr{ipv4: vip, ipv6: vip6}

const (
	ipv4 = 0
	ipv6 = 1
)

const (
	routerASN  = 65000
	gatewayASN = 65010
)

// lab is a router, gateways and a client.
type lab struct {
	*announcertest.Lab
	router *frr.Router
}

// newLab returns a lab whose router has cfg; its peers are the gateways, which peer may modify.
func newLab(t *testing.T, cfg frr.Config, peer frr.Peer) *lab {
	t.Helper()
	return newLabOver(t, ipv4, cfg, peer)
}

// newLabOver is newLab with sessions over one family.
func newLabOver(t *testing.T, family int, cfg frr.Config, peer frr.Peer) *lab {
	t.Helper()
	l := &lab{Lab: announcertest.NewLab(t, both[:]...)}
	cfg.ASN, cfg.RouterID = routerASN, edge.Router[0]
	for i := range l.Gateways {
		p := peer
		p.Addr = edge.Gateways[i][family]
		if p.ASN == 0 {
			p.ASN = gatewayASN
		}
		cfg.Peers = append(cfg.Peers, p)
	}
	var err error
	if l.router, err = frr.Start(t.Context(), l.Router, cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.router.Close(); err != nil {
			t.Error(err)
		}
	})
	return l
}

// Start modes of a speaker.
const (
	freshStart = ""
	restarting = "restarting"
)

// state announces both VIPs by a gateway; a higher MED is less preferred.
func state(gateway int, med uint32) *desired.State {
	return &desired.State{
		Cluster: "a", Group: "edge", Balancer: desired.NFTables,
		BGP: &desired.BGP{
			ASN: gatewayASN, RouterID: edge.Gateways[gateway][0], MED: &med,
			Peers: []desired.Peer{{Addr: edge.Router[0], ASN: routerASN}},
		},
		VIPs: announcertest.VIPs(desired.ByBGP, vip, vip6),
	}
}

// routes returns the router's routes to a VIP, by gateway.
func (l *lab) routes(t *testing.T, vip netip.Addr) map[int]frr.Route {
	t.Helper()
	all, err := l.router.Routes(t.Context(), vip)
	if err != nil {
		t.Fatal(err)
	}
	by := map[int]frr.Route{}
	for _, r := range all {
		for i, g := range edge.Gateways {
			if r.From == g[0] || r.From == g[1] {
				by[i] = r
			}
		}
	}
	return by
}

// awaitRoutes waits until the router has routes to a VIP from exactly these gateways.
func (l *lab) awaitRoutes(t *testing.T, vip netip.Addr, gateways ...int) {
	t.Helper()
	announcertest.Eventually(t, func() string {
		have := l.routes(t, vip)
		for i := range l.Gateways {
			if _, ok := have[i]; ok != slices.Contains(gateways, i) {
				return fmt.Sprintf("routes to %s are %+v, want those from gateways %v", vip, have, gateways)
			}
		}
		return ""
	})
}

// awaitForwarding waits until the router forwards packets to a VIP to one gateway alone. A route of BGP reaches the kernel a moment later,
// which on a busy machine is long enough to lose packets.
func (l *lab) awaitForwarding(t *testing.T, vip netip.Addr, gateway int) {
	t.Helper()
	family := 0
	if vip.Is6() {
		family = 1
	}
	announcertest.Eventually(t, func() string {
		var routes []byte
		err := l.Router.Do(func() (err error) {
			routes, err = exec.CommandContext(t.Context(), "ip", "route", "show", vip.String()).Output()
			return err
		})
		if err != nil {
			return fmt.Sprintf("routes of the kernel: %v", err)
		}
		for i := range l.Gateways {
			if strings.Contains(string(routes), "via "+edge.Gateways[i][family].String()+" ") != (i == gateway) {
				return fmt.Sprintf("the kernel's routes to %s are %s, want those by gateway %d", vip, routes, gateway)
			}
		}
		return ""
	})
}

// Two speakers, of which the router prefers the first one, keep the contract of announcers, and each session stays up.
func TestAnnouncer(t *testing.T) {
	t.Parallel()
	announcertest.Contract(t, func(t *testing.T) announcertest.Group {
		t.Helper()
		l := newLab(t, frr.Config{}, frr.Peer{})
		return announcertest.Group{
			Lab: l.Lab, VIPs: both, Shared: true,
			State: func(gateway int) *desired.State { return state(gateway, uint32(gateway*50)) },
			Announces: func(gateway int, vip netip.Addr) (bool, error) {
				_, has := l.routes(t, vip)[gateway]
				return has, nil
			},
			Check: func() {
				for i := range l.Announcers {
					if n := l.sessions(t, i); n != 1 {
						t.Errorf("gateway %d had %d sessions, want one", i, n)
					}
				}
			},
		}
	})
}

// The router has the routes of the state, in both families over one session, and follows each change.
func TestRoutesFollowState(t *testing.T) {
	t.Parallel()
	l := newLab(t, frr.Config{}, frr.Peer{})
	s := state(0, 50)
	s.BGP.Communities = []string{"65010:100", "no-export", "65010:1:2"}
	l.Start(t, 0, freshStart, s)
	l.awaitRoutes(t, vip, 0)
	l.awaitRoutes(t, vip6, 0)
	for _, a := range []netip.Addr{vip, vip6} {
		r := l.routes(t, a)[0]
		if r.MED != 50 || !reflect.DeepEqual(r.Communities, []string{"65010:100", "noExport"}) || !reflect.DeepEqual(r.Large, []string{"65010:1:2"}) {
			t.Errorf("route to %s is %+v", a, r)
		}
		want := edge.Gateways[0][0]
		if a.Is6() {
			want = edge.Gateways[0][1]
		}
		if !slices.Contains(r.NextHops, want) {
			t.Errorf("next hops to %s are %v, want %s", a, r.NextHops, want)
		}
	}
	announced, drift, err := l.Announcers[0].Status()
	if err != nil || !reflect.DeepEqual(announced, []netip.Addr{vip6, vip}) && !reflect.DeepEqual(announced, []netip.Addr{vip, vip6}) || len(drift) > 0 {
		t.Errorf("announced %v, drift %v, %v", announced, drift, err)
	}

	s.BGP.MED, s.BGP.Communities = new(uint32(7)), []string{"65010:200"}
	l.Apply(t, 0, s)
	announcertest.Eventually(t, func() string {
		if r := l.routes(t, vip)[0]; r.MED != 7 || !reflect.DeepEqual(r.Communities, []string{"65010:200"}) {
			return fmt.Sprintf("after a change the route is %+v", r)
		}
		return ""
	})
	if n := l.sessions(t, 0); n != 1 {
		t.Errorf("there were %d sessions, want one", n)
	}
}

// The route to a VIP may differ from the others of its gateway, and only some peers may receive it. Here they are one router's two
// addresses.
func TestRouteOfItsOwn(t *testing.T) {
	t.Parallel()
	l := newLab(t, frr.Config{Peers: []frr.Peer{{Addr: edge.Gateways[0][ipv6], ASN: gatewayASN}}}, frr.Peer{})
	s := state(0, 50)
	s.BGP.Communities = []string{"65010:100"}
	s.BGP.Peers = append(s.BGP.Peers, desired.Peer{Addr: edge.Router[ipv6], ASN: routerASN})
	s.VIPs[0].Route = &desired.Route{MED: new(uint32(7)), Communities: []string{"no-export"}, Peers: []netip.Addr{edge.Router[ipv6]}}
	own, other := s.VIPs[0].Addr, s.VIPs[1].Addr
	l.Start(t, 0, freshStart, s)
	for _, step := range []struct {
		name  string
		route *desired.Route
		from  []netip.Addr
		med   int
		has   []string
	}{
		{"by IPv6", s.VIPs[0].Route, edge.Gateways[0][ipv6:], 7, []string{"noExport"}},
		{"by IPv4, with the gateway's communities", &desired.Route{MED: new(uint32(9)), Peers: []netip.Addr{edge.Router[ipv4]}}, edge.Gateways[0][:ipv6], 9, []string{"65010:100"}},
		{"by both", nil, edge.Gateways[0][:], 50, []string{"65010:100"}},
		{"by no peer that there is", &desired.Route{Peers: []netip.Addr{edge.Gateways[1][ipv4]}}, nil, 0, nil},
		{"by IPv6 again", &desired.Route{Peers: []netip.Addr{edge.Router[ipv6]}}, edge.Gateways[0][ipv6:], 50, []string{"65010:100"}},
	} {
		s.VIPs[0].Route = step.route
		l.Apply(t, 0, s)
		announcertest.Eventually(t, func() string {
			for vip, want := range map[netip.Addr][]netip.Addr{own: step.from, other: edge.Gateways[0][:]} {
				have, err := l.router.Routes(t.Context(), vip)
				if err != nil {
					t.Fatal(err)
				}
				var from []netip.Addr
				for _, r := range have {
					from = append(from, r.From)
					if vip == own && (r.MED != step.med || !slices.Equal(r.Communities, step.has)) {
						return fmt.Sprintf("%s: the route is %+v", step.name, r)
					}
				}
				if slices.SortFunc(from, netip.Addr.Compare); !slices.Equal(from, want) {
					return fmt.Sprintf("%s: the router has %s from %v, want from %v", step.name, vip, from, want)
				}
			}
			announced, _, err := l.Announcers[0].Status()
			if is := slices.Contains(announced, own); err != nil || is != (len(step.from) > 0) {
				return fmt.Sprintf("%s: %v are announced, %v", step.name, announced, err)
			}
			return ""
		})
	}
	if n := l.sessions(t, 0); n != 1 {
		t.Errorf("there were %d sessions, want one", n)
	}
}

// A router with several routes of equal preference shares connections among gateways in proportion to their bandwidths.
func TestLinkBandwidth(t *testing.T) {
	t.Parallel()
	l := newLab(t, frr.Config{Paths: 2}, frr.Peer{})
	states := []*desired.State{state(0, 0), state(1, 0)}
	for i, s := range states {
		l.Start(t, i, freshStart, s)
	}
	for _, step := range []struct {
		name  string
		mbits [2]uint32
		want  int // the share of the second gateway, in shares of the first, rounded: the router rounds, too
	}{
		{"none", [2]uint32{}, 1},
		{"one and three", [2]uint32{1_000, 3_000}, 3},
		{"equal", [2]uint32{3_000, 3_000}, 1},
		{"one and four", [2]uint32{1_000, 4_000}, 4},
		{"none again", [2]uint32{}, 1},
	} {
		for i, s := range states {
			s.BGP.LinkBandwidth = step.mbits[i]
			l.Apply(t, i, s)
		}
		for _, a := range []netip.Addr{vip, vip6} {
			announcertest.Eventually(t, func() string {
				weights := l.weights(t, a)
				if len(weights) != 2 || (weights[1]+weights[0]/2)/weights[0] != step.want {
					return fmt.Sprintf("%s: the router's weights for %s are %v, want the second to be %d times the first", step.name, a, weights, step.want)
				}
				return ""
			})
		}
	}
	for i := range states {
		if n := l.sessions(t, i); n != 1 {
			t.Errorf("gateway %d had %d sessions, want one", i, n)
		}
	}
}

// weights returns the weights of the router's next hops to a VIP, the smallest first.
func (l *lab) weights(t *testing.T, vip netip.Addr) []int {
	t.Helper()
	var all []int
	if err := l.Router.Do(func() error {
		family := netlink.FAMILY_V4
		if vip.Is6() {
			family = netlink.FAMILY_V6
		}
		dst := &net.IPNet{IP: vip.AsSlice(), Mask: net.CIDRMask(vip.BitLen(), vip.BitLen())}
		routes, err := netlink.RouteListFiltered(family, &netlink.Route{Dst: dst}, netlink.RT_FILTER_DST)
		for _, r := range routes {
			for _, hop := range r.MultiPath {
				all = append(all, hop.Hops+1)
			}
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	slices.Sort(all)
	return all
}

// sessions returns how often the router had a session with a gateway.
func (l *lab) sessions(t *testing.T, gateway int) int {
	t.Helper()
	n := l.neighbour(t, gateway)
	if n.Established == 0 {
		t.Fatalf("no session with gateway %d", gateway)
	}
	return n.Established
}

// neighbour is a neighbour of the router's bgpd.
type neighbour struct {
	Established int `json:"connectionsEstablished"`
	BFD         struct {
		Status string `json:"status"`
	} `json:"peerBfdInfo"`
}

func (l *lab) neighbour(t *testing.T, gateway int) neighbour {
	t.Helper()
	addr := edge.Gateways[gateway][0].String()
	out, err := l.router.Ask(t.Context(), fmt.Sprintf("show bgp neighbors %s json", addr))
	if err != nil {
		t.Fatal(err)
	}
	var all map[string]neighbour
	if err := json.Unmarshal(out, &all); err != nil {
		t.Fatalf("what bgpd knows of gateway %d: %v, %s", gateway, err, out)
	}
	return all[addr]
}

// A peer that sends more routes than a gateway allows loses its session, which says so. The other gateway keeps its own. With a higher limit
// there is a session at once.
func TestTooManyRoutes(t *testing.T) {
	t.Parallel()
	var networks []netip.Prefix
	for i := range byte(30) {
		networks = append(networks, netip.PrefixFrom(netip.AddrFrom4([4]byte{198, 51, 100, 8 * i}), 29))
	}
	l := newLab(t, frr.Config{Networks: networks}, frr.Peer{})
	limited := func(most uint32) *desired.State {
		s := state(0, 0)
		s.BGP.Peers[0].MaxPrefixes = most
		return s
	}
	l.Start(t, 0, freshStart, limited(20))
	l.Start(t, 1, freshStart, state(1, 0))
	announcertest.Eventually(t, func() string {
		_, drift, err := l.Announcers[0].Status()
		if err != nil || len(drift) != 1 || !strings.Contains(drift[0].Message, "it sent more than 20 routes of one address family") {
			return fmt.Sprintf("drift %v, %v", drift, err)
		}
		return ""
	})
	l.awaitRoutes(t, vip, 1)
	l.Apply(t, 0, limited(40))
	l.awaitRoutes(t, vip, 0, 1)
	if n := l.sessions(t, 1); n != 1 {
		t.Errorf("the other gateway had %d sessions, want one", n)
	}
}

// With TTL security packets come from no farther away than the peer. A router without it sends with a TTL of 1, as from a distance: it
// has no session.
func TestTTLSecurity(t *testing.T) {
	t.Parallel()
	secure := state(0, 0)
	secure.BGP.Peers[0].TTLSecurity = 1
	for name, hops := range map[string]int{"on the link": 1, "from a distance": 0} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, frr.Config{}, frr.Peer{Hops: hops})
			l.Start(t, 0, freshStart, secure)
			if hops == 1 {
				l.awaitRoutes(t, vip, 0)
				return
			}
			l.Start(t, 1, freshStart, state(1, 0))
			l.awaitRoutes(t, vip, 1)
			_, drift, err := l.Announcers[0].Status()
			if err != nil || len(drift) != 1 || l.neighbour(t, 0).Established > 0 {
				t.Errorf("drift %v, %v; %d sessions", drift, err, l.neighbour(t, 0).Established)
			}
		})
	}
}

// A state that fails in the middle changes nothing.
func TestFailedApplyChangesNothing(t *testing.T) {
	t.Parallel()
	l := newLab(t, frr.Config{}, frr.Peer{})
	l.Start(t, 0, freshStart, state(0, 50))
	l.awaitRoutes(t, vip, 0)
	l.awaitRoutes(t, vip6, 0)
	bad := state(0, 7)
	bad.VIPs = bad.VIPs[:1]
	bad.BGP.Peers = append(bad.BGP.Peers, desired.Peer{ASN: routerASN}) // an invalid address
	if err := l.Announcers[0].Apply(bad); err == nil {
		t.Fatal("a peer without address is applied")
	}
	announcertest.Eventually(t, func() string {
		if announced, drift, err := l.Announcers[0].Status(); err != nil || len(announced) != 2 || len(drift) > 0 {
			return fmt.Sprintf("announced %v, drift %v, %v", announced, drift, err)
		}
		for _, a := range both {
			if r, ok := l.routes(t, a)[0]; !ok || r.MED != 50 {
				return fmt.Sprintf("the router's way to %s is %+v", a, r)
			}
		}
		return ""
	})
	if n := l.sessions(t, 0); n != 1 {
		t.Errorf("there were %d sessions, want one", n)
	}
}
