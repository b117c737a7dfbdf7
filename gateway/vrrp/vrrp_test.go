package vrrp_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/gateway/agent"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/vrrp"
	"github.com/isthmus-net/isthmus/tools/netlab"
	"github.com/isthmus-net/isthmus/tools/netlab/edge"
	"github.com/isthmus-net/isthmus/tools/netlab/subprocess"
)

var _ agent.Announcer = (*vrrp.Router)(nil)

func TestMain(m *testing.M) {
	subprocess.Main(func(dir string) subprocess.Announcer {
		r, err := vrrp.New(vrrp.Config{Dir: dir, Log: slog.New(slog.NewTextHandler(os.Stderr, nil))})
		if err != nil {
			panic(err)
		}
		return r
	})
	_ = flag.Set("test.parallel", "4") // they wait for timers, not for CPUs
	os.Exit(netlab.Main(m))
}

// The VIPs are in the gateways' network, so a router resolves them by ARP and neighbour discovery.
var (
	vip   = netip.MustParseAddr("10.99.0.100")
	vip6  = netip.MustParseAddr("fd99::100")
	later = netip.MustParseAddr("10.99.0.50") // sorts before vip
)

// lab is two gateways in one virtual router; gateway 0 has the higher priority.
type lab struct {
	*edge.Lab
	announcers [2]*subprocess.Process
	dirs       [2]string
}

func newLab(t *testing.T) *lab {
	t.Helper()
	netlab.Privileged(t)
	e, err := edge.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = e.Close() })
	l := &lab{Lab: e}
	for i := range l.announcers {
		l.dirs[i] = t.TempDir()
		for _, a := range []netip.Addr{vip, vip6, later} {
			stop, err := e.Echo(i, a)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = stop() })
		}
		t.Cleanup(func() { // keepalived outlives its starter
			if err := e.Gateways[i].Do(func() error { return vrrp.Cleanup(context.WithoutCancel(t.Context()), l.dirs[i]) }); err != nil {
				t.Error(err)
			}
		})
	}
	return l
}

// begin starts a gateway's announcer and applies a state with VIPs.
func (l *lab) begin(t *testing.T, gateway int, vips ...netip.Addr) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if l.announcers[gateway], err = subprocess.Start(t.Context(), l.Gateways[gateway], self, l.dirs[gateway], os.Stderr); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.announcers[gateway].Kill)
	l.apply(t, gateway, state(gateway, vips...))
}

func (l *lab) apply(t *testing.T, gateway int, s *desired.State) {
	t.Helper()
	if err := l.announcers[gateway].Apply(s); err != nil {
		t.Fatal(err)
	}
}

func state(gateway int, vips ...netip.Addr) *desired.State {
	s := &desired.State{
		Cluster: "a", Group: "edge", Balancer: desired.NFTables,
		VRRP: &desired.VRRP{
			Interface: edge.Device, Source: edge.Gateways[gateway][0], Peers: []netip.Addr{edge.Gateways[1-gateway][0]},
			RouterID: 51, Priority: uint8(200 - gateway*100), IntervalMillis: 300,
		},
	}
	for _, a := range vips {
		s.VIPs = append(s.VIPs, desired.VIP{Addr: a, Announce: desired.ByVRRP, Return: desired.Routed, Frontends: []desired.Frontend{{
			Service: "shop/web", Protocol: "UDP", Port: 9000, Backends: []desired.Backend{{Addr: a, Port: 9000, Weight: 1}},
		}}})
	}
	return s
}

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

// awaitHolder waits until a gateway, and no other, has these VIPs.
func (l *lab) awaitHolder(t *testing.T, gateway int, vips ...netip.Addr) {
	t.Helper()
	eventually(t, func() string {
		for _, a := range vips {
			for i := range l.announcers {
				has, err := l.Has(i, a)
				if err != nil {
					t.Fatal(err)
				}
				if has != (i == gateway) {
					return fmt.Sprintf("gateway %d has %s: %t, want gateway %d alone to have it", i, a, has, gateway)
				}
			}
		}
		return ""
	})
}

func (l *lab) awaitAnswers(t *testing.T, p *edge.Probe, gateway int) {
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

// The backup takes all VIPs, of both families, when the master's cable is cut; the master takes them back afterwards.
func TestTakeover(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.begin(t, 0, vip, vip6)
	l.begin(t, 1, vip, vip6)
	l.awaitHolder(t, 0, vip, vip6)
	p, p6 := l.probe(t, vip), l.probe(t, vip6)
	l.awaitAnswers(t, p, 0)
	l.awaitAnswers(t, p6, 0)
	if err := l.Cut(0); err != nil {
		t.Fatal(err)
	}
	cut := time.Now()
	l.awaitAnswers(t, p, 1)
	l.awaitAnswers(t, p6, 1)
	if err := l.Mend(0); err != nil {
		t.Fatal(err)
	}
	l.awaitHolder(t, 0, vip, vip6)
	l.awaitAnswers(t, p, 0)
	r := p.Stop()
	t.Logf("the backup answered %s after the cut; %s", r.From(1, cut).Sub(cut), r)
	p6.Stop()
	announced, drift, err := l.announcers[0].Status()
	if err != nil || len(drift) > 0 || !reflect.DeepEqual(announced, []netip.Addr{vip, vip6}) {
		t.Errorf("the master announces %v, drift %v, %v", announced, drift, err)
	}
	if announced, drift, err = l.announcers[1].Status(); err != nil || len(drift) > 0 || len(announced) > 0 {
		t.Errorf("the backup announces %v, drift %v, %v", announced, drift, err)
	}
}

// VIPs are added and removed on one gateway after another, and the agent restarts: the master stays the same, and no
// request to a remaining VIP is lost.
func TestReloadLosesNothing(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.begin(t, 0, vip)
	l.awaitHolder(t, 0, vip)
	l.begin(t, 1, vip)
	p := l.probe(t, vip)
	l.awaitAnswers(t, p, 0)
	l.apply(t, 1, state(1, later, vip, vip6))
	// The states differ for as long as a backup needs to miss a master.
	apart := time.Now().Add(1500 * time.Millisecond)
	eventually(t, func() string {
		if p.From(0, apart).IsZero() {
			return "gateway 0 does not answer"
		}
		return ""
	})
	l.apply(t, 0, state(0, later, vip, vip6))
	l.awaitHolder(t, 0, vip, vip6, later)
	l.apply(t, 0, state(0, vip))
	for _, a := range []netip.Addr{vip6, later} { // removed when Apply returns
		if has, err := l.Has(0, a); err != nil || has {
			t.Errorf("gateway 0 has %s: %t, %v", a, has, err)
		}
	}
	l.announcers[0].Kill()
	l.begin(t, 0, vip) // takes over the first one's keepalived
	if err := l.announcers[0].Close(false); err != nil {
		t.Fatal(err)
	}
	l.awaitHolder(t, 0, vip)
	l.awaitAnswers(t, p, 0)
	if r := p.Stop(); r.Lost() > 0 || r.By(1) > 0 {
		t.Errorf("%s, want all answered by gateway 0", r)
	}
}

// A killed keepalived leaves no VIP behind on two gateways, whether its agent lives or restarts.
func TestKilledKeepalivedLeavesNoVIP(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.begin(t, 0, vip, vip6)
	l.begin(t, 1, vip, vip6)
	l.awaitHolder(t, 0, vip, vip6)
	killed := l.killKeepalived(t, 0)
	eventually(t, func() string {
		if now, err := l.pid(0, "keepalived.pid"); err != nil || now == killed {
			return fmt.Sprintf("keepalived is %d still, %v", now, err)
		}
		return ""
	})
	l.awaitHolder(t, 0, vip, vip6) // preferred

	l.announcers[0].Kill() // without a watch
	l.killKeepalived(t, 0)
	l.begin(t, 0) // without VIPs
	for _, a := range []netip.Addr{vip, vip6} {
		if has, err := l.Has(0, a); err != nil || has {
			t.Errorf("gateway 0 has %s: %t, %v", a, has, err)
		}
	}
	l.awaitHolder(t, 1, vip, vip6)
}

// pid reads a process id from a file of a gateway.
func (l *lab) pid(gateway int, name string) (int, error) {
	content, err := os.ReadFile(filepath.Join(l.dirs[gateway], name))
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(content)))
}

// killKeepalived kills both processes and returns the parent's id.
func (l *lab) killKeepalived(t *testing.T, gateway int) (parent int) {
	t.Helper()
	for _, name := range []string{"vrrp.pid", "keepalived.pid"} { // the child of a dead parent ends gracefully
		pid, err := l.pid(gateway, name)
		if err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		parent = pid
	}
	return parent
}

// handsOver drains gateway 0, which has these VIPs, and waits until the other one has them.
func (l *lab) handsOver(t *testing.T, vips ...netip.Addr) {
	t.Helper()
	l.awaitHolder(t, 0, vips...)
	if err := l.announcers[0].Close(true); err != nil {
		t.Fatal(err)
	}
	l.awaitHolder(t, 1, vips...)
}

// A cordoned or drained master hands over before it stops. A VIP without backends is removed alone.
func TestCordonAndDrain(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.begin(t, 0, vip, vip6)
	l.begin(t, 1, vip, vip6)
	l.awaitHolder(t, 0, vip, vip6)
	s := state(0, vip, vip6)
	s.VIPs[1].Frontends[0].Backends[0].Draining = true
	l.apply(t, 0, s)
	if has, err := l.Has(0, vip6); err != nil || has {
		t.Errorf("gateway 0 has a VIP that does not serve: %t, %v", has, err)
	}
	s = state(0, vip, vip6)
	s.Cordoned = true
	l.apply(t, 0, s)
	l.awaitHolder(t, 1, vip, vip6)
	l.apply(t, 0, state(0, vip, vip6))
	l.handsOver(t, vip, vip6)
}

// A single gateway has no peers until another one is added.
func TestSingleGateway(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.begin(t, 0)
	alone := state(0, vip, vip6)
	alone.VRRP.Peers = nil
	l.apply(t, 0, alone)
	l.awaitHolder(t, 0, vip, vip6)
	l.begin(t, 1, vip, vip6)
	l.apply(t, 0, state(0, vip, vip6))
	l.handsOver(t, vip, vip6)
}

// A master that withdraws loses nothing, even if clients update their neighbour entries late. Without a peer that takes
// the VIPs it withdraws all the same.
func TestWithdrawalLosesNothing(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.begin(t, 0, vip, vip6)
	l.begin(t, 1, vip, vip6)
	l.awaitHolder(t, 0, vip, vip6)
	probes := []*edge.Probe{l.probe(t, vip), l.probe(t, vip6)}
	answers := func(gateway int) {
		t.Helper()
		for _, p := range probes {
			l.awaitAnswers(t, p, gateway)
		}
	}
	answers(0)
	cordoned := state(0, vip, vip6)
	cordoned.Cordoned = true
	for range 2 {
		l.apply(t, 0, cordoned)
		l.awaitHolder(t, 1, vip, vip6) // removed from gateway 0 when Apply returns
		answers(1)
		l.apply(t, 0, state(0, vip, vip6))
		l.awaitHolder(t, 0, vip, vip6)
		answers(0)
	}
	if err := l.announcers[0].Close(true); err != nil {
		t.Fatal(err)
	}
	answers(1)
	for _, p := range probes {
		if r := p.Stop(); r.Lost() > 0 {
			t.Errorf("%s", r)
		}
	}
	if err := l.Cut(0); err != nil {
		t.Fatal(err)
	}
	if err := l.announcers[1].Close(true); err != nil {
		t.Fatal(err)
	}
	for _, a := range []netip.Addr{vip, vip6} {
		if has, err := l.Has(1, a); err != nil || has {
			t.Errorf("gateway 1, alone, has %s: %t, %v", a, has, err)
		}
	}
}

// An invalid state is refused with its field, and the previous one continues.
func TestRefusals(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.begin(t, 0, vip)
	l.awaitHolder(t, 0, vip)
	for field, spoil := range map[string]func(*desired.VRRP){
		"vrrp.interface": func(v *desired.VRRP) { v.Interface = "eth7" },
		"vrrp.source":    func(v *desired.VRRP) { v.Source = netip.MustParseAddr("10.99.0.77") },
		"vrrp":           func(v *desired.VRRP) { v.IntervalMillis = 90_000 }, // more than the protocol allows
	} {
		s := state(0, vip, vip6)
		spoil(s.VRRP)
		err := l.announcers[0].Apply(s)
		var faults desired.Faults
		if !errors.As(err, &faults) || len(faults) != 1 || faults[0].Field != field || faults[0].Component != desired.ComponentVRRP {
			t.Errorf("%s: %v", field, err)
		}
	}
	l.awaitHolder(t, 0, vip)
	if _, drift, err := l.announcers[0].Status(); err != nil || len(drift) > 0 {
		t.Errorf("drift %v, %v", drift, err)
	}
	if err := os.WriteFile(filepath.Join(l.dirs[0], "keepalived.conf"), []byte("# mine\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, drift, err := l.announcers[0].Status(); err != nil || len(drift) != 1 || !strings.Contains(drift[0].Message, "was changed") {
		t.Errorf("drift %v, %v", drift, err)
	}
	l.apply(t, 0, state(0, vip))
	if _, drift, err := l.announcers[0].Status(); err != nil || len(drift) > 0 {
		t.Errorf("drift %v, %v", drift, err)
	}
}
