package bgp_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/gateway/agent"
	"github.com/isthmus-net/isthmus/gateway/bgp"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/tools/netlab"
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

// lab is a router, gateways and a client, with a speaker's process on each gateway that has one.
type lab struct {
	*edge.Lab
	router   *frr.Router
	speakers [2]*subprocess.Process
}

// newLab returns a lab whose router has cfg; its peers are the gateways, which peer may modify.
func newLab(t *testing.T, cfg frr.Config, peer frr.Peer) *lab {
	t.Helper()
	return newLabOver(t, ipv4, cfg, peer)
}

// newLabOver is newLab with sessions over one family.
func newLabOver(t *testing.T, family int, cfg frr.Config, peer frr.Peer) *lab {
	t.Helper()
	netlab.Privileged(t)
	e, err := edge.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = e.Close() })
	l := &lab{Lab: e}
	cfg.ASN, cfg.RouterID = routerASN, edge.Router[0]
	for i := range edge.Gateways {
		p := peer
		p.Addr = edge.Gateways[i][family]
		if p.ASN == 0 {
			p.ASN = gatewayASN
		}
		cfg.Peers = append(cfg.Peers, p)
		for _, a := range []netip.Addr{vip, vip6} {
			stop, err := e.Echo(i, a)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = stop() })
		}
	}
	if l.router, err = frr.Start(t.Context(), e.Router, cfg); err != nil {
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

// speak starts a speaker on a gateway and applies state.
func (l *lab) speak(t *testing.T, gateway int, how string, state *desired.State) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	said := new(output)
	p, err := subprocess.Start(t.Context(), l.Gateways[gateway], self, how, said)
	if err != nil {
		t.Fatal(err)
	}
	l.speakers[gateway] = p
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("gateway %d said:\n%s", gateway, said)
		}
		p.Kill()
	})
	l.apply(t, gateway, state)
}

func (l *lab) apply(t *testing.T, gateway int, state *desired.State) {
	t.Helper()
	if err := l.speakers[gateway].Apply(state); err != nil {
		t.Fatal(err)
	}
}

// output is the log of a process.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(b)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

// state announces both VIPs by a gateway; a higher prefer is less preferred.
func state(gateway int, med uint32) *desired.State {
	s := &desired.State{
		Cluster: "a", Group: "edge", Balancer: desired.NFTables,
		BGP: &desired.BGP{
			ASN: gatewayASN, RouterID: edge.Gateways[gateway][0], MED: &med,
			Peers: []desired.Peer{{Addr: edge.Router[0], ASN: routerASN}},
		},
	}
	for _, a := range []netip.Addr{vip, vip6} {
		backend := netip.MustParseAddr("10.1.0.5")
		if a.Is6() {
			backend = netip.MustParseAddr("fd01::5")
		}
		s.VIPs = append(s.VIPs, desired.VIP{Addr: a, Announce: desired.ByBGP, Return: desired.Routed, Frontends: []desired.Frontend{{
			Service: "shop/web", Protocol: "UDP", Port: 9000, Backends: []desired.Backend{{Addr: backend, Port: 9000, Weight: 1}},
		}}})
	}
	return s
}

// within bounds every wait.
const within = 30 * time.Second

// eventually fails the test unless condition soon returns "" instead of what is missing.
func eventually(t *testing.T, what func() string) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for begin := time.Now(); ; <-tick.C {
		missing := what()
		if missing == "" {
			return
		}
		if time.Since(begin) > within {
			t.Fatal(missing)
		}
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
	eventually(t, func() string {
		have := l.routes(t, vip)
		for i := range edge.Gateways {
			if _, ok := have[i]; ok != slices.Contains(gateways, i) {
				return fmt.Sprintf("routes to %s are %+v, want those from gateways %v", vip, have, gateways)
			}
		}
		return ""
	})
}

// awaitAnswers waits until a gateway answers a probe.
func awaitAnswers(t *testing.T, p *edge.Probe, gateway int) {
	t.Helper()
	begin := time.Now()
	eventually(t, func() string {
		if p.From(gateway, begin).IsZero() {
			return fmt.Sprintf("gateway %d does not answer", gateway)
		}
		return ""
	})
}

func (l *lab) probe(t *testing.T, vip netip.Addr) *edge.Probe {
	t.Helper()
	p, err := l.Probe(vip)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// The router has the routes of the state, in both families over one session, and follows each change. A VIP without
// backends and those of a cordoned gateway are withdrawn, and the session stays up.
func TestRoutesFollowState(t *testing.T) {
	t.Parallel()
	l := newLab(t, frr.Config{}, frr.Peer{})
	s := state(0, 50)
	s.BGP.Communities = []string{"65010:100", "no-export", "65010:1:2"}
	l.speak(t, 0, freshStart, s)
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
	announced, drift, err := l.speakers[0].Status()
	if err != nil || !reflect.DeepEqual(announced, []netip.Addr{vip6, vip}) && !reflect.DeepEqual(announced, []netip.Addr{vip, vip6}) || len(drift) > 0 {
		t.Errorf("announced %v, drift %v, %v", announced, drift, err)
	}

	s.BGP.MED, s.BGP.Communities = new(uint32(7)), []string{"65010:200"}
	l.apply(t, 0, s)
	eventually(t, func() string {
		if r := l.routes(t, vip)[0]; r.MED != 7 || !reflect.DeepEqual(r.Communities, []string{"65010:200"}) {
			return fmt.Sprintf("after a change the route is %+v", r)
		}
		return ""
	})
	s.VIPs[0].Frontends[0].Backends[0].Draining = true
	l.apply(t, 0, s)
	l.awaitRoutes(t, vip)
	l.awaitRoutes(t, vip6, 0)
	s.Cordoned = true
	l.apply(t, 0, s)
	l.awaitRoutes(t, vip6)
	if announced, _, err := l.speakers[0].Status(); err != nil || len(announced) > 0 {
		t.Errorf("a cordoned gateway announces %v, %v", announced, err)
	}
	s.Cordoned, s.VIPs[0].Frontends[0].Backends[0].Draining = false, false
	l.apply(t, 0, s)
	l.awaitRoutes(t, vip, 0)
	if n := l.sessions(t, 0); n != 1 {
		t.Errorf("there were %d sessions, want one", n)
	}
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

// A state that fails in the middle changes nothing.
func TestFailedApplyChangesNothing(t *testing.T) {
	t.Parallel()
	l := newLab(t, frr.Config{}, frr.Peer{})
	l.speak(t, 0, freshStart, state(0, 50))
	l.awaitRoutes(t, vip, 0)
	l.awaitRoutes(t, vip6, 0)
	bad := state(0, 7)
	bad.VIPs = bad.VIPs[:1]
	bad.BGP.Peers = append(bad.BGP.Peers, desired.Peer{ASN: routerASN}) // an invalid address
	if err := l.speakers[0].Apply(bad); err == nil {
		t.Fatal("a peer without address is applied")
	}
	eventually(t, func() string {
		if announced, drift, err := l.speakers[0].Status(); err != nil || len(announced) != 2 || len(drift) > 0 {
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
