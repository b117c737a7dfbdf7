package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-net/isthmus/agent/evidence"
	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/bpf/lb"
	cs "github.com/isthmus-net/isthmus/controlplane/clusterset"
)

var discard = slog.New(slog.DiscardHandler)

// snapshot returns a snapshot of n Services, 243.0.0.1:80 and so on, each with the given backends.
func snapshot(n int, backends ...string) *cs.Snapshot {
	snap := &cs.Snapshot{}
	for i := range n {
		svc := cs.Service{Import: cs.Import{
			Service: cs.ServiceName{Namespace: "demo", Name: fmt.Sprint("s", i)},
			Type:    cs.ClusterSetIP,
			IPs:     []netip.Addr{netip.AddrFrom4([4]byte{243, 0, 0, byte(i + 1)})},
			Ports:   []cs.Port{{Name: "http", Protocol: cs.TCP, Port: 80}},
		}}
		for _, b := range backends {
			ap := netip.MustParseAddrPort(b)
			svc.Slices = append(svc.Slices, cs.Slice{
				Cluster: "a", Family: cs.FamilyOf(ap.Addr()),
				Ports:     []cs.EndpointPort{{Name: "http", Protocol: cs.TCP, Port: ap.Port()}},
				Endpoints: []cs.Endpoint{{Addrs: []netip.Addr{ap.Addr()}, Ready: true}},
			})
		}
		snap.Services = append(snap.Services, svc)
	}
	return snap
}

// ranges are those of the VIPs in the tests.
var ranges = []netip.Prefix{netip.MustParsePrefix("243.0.0.0/8"), netip.MustParsePrefix("fd00:243::/48")}

// withRanges returns maps without Services, as an agent with these ranges leaves them.
func withRanges() lb.State {
	s := lb.NewState()
	for _, r := range ranges {
		s.Ranges[r] = true
	}
	return s
}

// mustNew returns an agent that knows the ranges from the maps, or from its configuration if the maps have none.
func mustNew(t *testing.T, dp kernel) *Agent {
	t.Helper()
	a, err := newAgent(t.Context(), Config{Topology: Topology{Ranges: ranges}}, dp, discard)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func mustSync(t *testing.T, a *Agent, snap *cs.Snapshot) {
	t.Helper()
	if err := a.Sync(t.Context(), snap); err != nil {
		t.Fatal(err)
	}
}

// text returns the content of the maps of a Fake.
func text(t *testing.T, f *datapath.Fake) string {
	t.Helper()
	s, err := f.Load(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return s.Text()
}

func TestSyncTwiceWritesOnce(t *testing.T) {
	f := datapath.NewFake(lb.NewState())
	a := mustNew(t, f)
	mustSync(t, a, snapshot(3, "10.1.0.1:8080", "10.1.0.2:8080"))
	before := f.Writes()
	mustSync(t, a, snapshot(3, "10.1.0.1:8080", "10.1.0.2:8080"))
	if n := f.Writes() - before; n != 0 {
		t.Errorf("the same snapshot cost %d writes", n)
	}
}

func TestRestartWritesNothing(t *testing.T) {
	f := datapath.NewFake(lb.NewState())
	mustSync(t, mustNew(t, f), snapshot(3, "10.1.0.1:8080"))
	before, held := f.Writes(), text(t, f)
	again := mustNew(t, f)
	if s := again.Status(); s.Frontends != 3 || s.Backends != 1 {
		t.Errorf("taken over %d frontends and %d backends, want 3 and 1", s.Frontends, s.Backends)
	}
	mustSync(t, again, snapshot(3, "10.1.0.1:8080"))
	if n := f.Writes() - before; n != 0 {
		t.Errorf("a restart cost %d writes", n)
	}
	if diff := cmp.Diff(held, text(t, f)); diff != "" {
		t.Error(diff)
	}
}

// A Problem names a Service without room in the maps, and the others are served.
func TestFullMapIsProblem(t *testing.T) {
	f := datapath.NewFake(lb.NewState())
	f.Capacity.Frontends = 2
	a := mustNew(t, f)
	mustSync(t, a, snapshot(3, "10.1.0.1:8080"))
	s := a.Status()
	if s.Frontends != 2 || len(s.Problems) != 1 || s.Problems[0].Reason != lb.NoRoom || s.Problems[0].Service.Name != "s2" {
		t.Errorf("%d frontends, problems %v, want 2 and one of demo/s2", s.Frontends, s.Problems)
	}
	if err := s.Ready(); err != nil {
		t.Errorf("not ready for want of room: %v", err)
	}
}

// The next Sync completes an Apply that failed after any number of writes.
func TestFailedApplyIsCompletedByNextSync(t *testing.T) {
	broken := errors.New("map full")
	from, to := snapshot(3, "10.1.0.1:8080", "10.1.0.2:8080"), snapshot(4, "10.1.0.2:8080", "10.1.0.3:8080")
	whole := datapath.NewFake(lb.NewState())
	a := mustNew(t, whole)
	mustSync(t, a, from)
	first := whole.Writes()
	mustSync(t, a, to)
	for n := range int(whole.Writes() - first) {
		f := datapath.NewFake(lb.NewState())
		a := mustNew(t, f)
		mustSync(t, a, from)
		f.FailAfter, f.Err = &n, broken
		if err := a.Sync(t.Context(), to); !errors.Is(err, broken) {
			t.Fatalf("after %d writes: %v, want %v", n, err, broken)
		}
		if err := a.Status().Ready(); !errors.Is(err, broken) {
			t.Errorf("after %d writes: ready says %v, want %v", n, err, broken)
		}
		f.FailAfter = nil
		mustSync(t, a, to)
		if err := a.Status().Ready(); err != nil {
			t.Errorf("after %d writes and one more sync: %v", n, err)
		}
		// The numbers may differ from those of a complete update; the served backends may not.
		if diff := cmp.Diff(withoutIDs(text(t, whole)), withoutIDs(text(t, f))); diff != "" {
			t.Errorf("after %d writes and one more sync (-want +got):\n%s", n, diff)
		}
	}
}

func TestStatus(t *testing.T) {
	a := mustNew(t, datapath.NewFake(lb.NewState()))
	if a.Status().Ready() == nil {
		t.Error("ready before the first snapshot")
	}
	snap := snapshot(2, "10.1.0.1:8080")
	snap.Services[1].Ports[0].Protocol = cs.SCTP
	mustSync(t, a, snap)
	s := a.Status()
	if err := s.Ready(); err != nil {
		t.Errorf("not ready: %v", err)
	}
	if s.Frontends != 2 || s.Backends != 1 || s.Writes != 9 || s.LastSync.IsZero() || s.LastError != nil {
		t.Errorf("unexpected status %+v", s)
	}
	if len(s.Problems) != 1 || s.Problems[0].Reason != lb.UnsupportedProtocol {
		t.Errorf("problems %v, want one of %s", s.Problems, lb.UnsupportedProtocol)
	}
	s.Hooks[0].Attached = false
	if s.Ready() == nil {
		t.Error("ready with a program that is not attached")
	}
}

func TestClosed(t *testing.T) {
	f := datapath.NewFake(lb.NewState())
	a := mustNew(t, f)
	mustSync(t, a, snapshot(1, "10.1.0.1:8080"))
	held := text(t, f)
	for range 2 {
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.Sync(t.Context(), snapshot(0)); !errors.Is(err, ErrClosed) {
		t.Errorf("Sync: %v, want %v", err, ErrClosed)
	}
	if diff := cmp.Diff(held, text(t, f)); diff != "" {
		t.Errorf("closing changed the maps:\n%s", diff)
	}
	if s := a.Status(); s.Frontends != 1 {
		t.Errorf("status after Close: %+v", s)
	}
}

func TestConfigJoinsAllFaults(t *testing.T) {
	if err := (Config{}).Validate(); err != nil {
		t.Errorf("the zero value: %v", err)
	}
	err := Config{CgroupRoot: "sys/fs/cgroup", BPFFS: "bpf"}.Validate()
	var all interface{ Unwrap() []error }
	if !errors.As(err, &all) || len(all.Unwrap()) != 2 {
		t.Errorf("%v, want two faults", err)
	}
	if _, err := New(context.Background(), Config{BPFFS: "bpf"}, discard); err == nil {
		t.Error("New took a relative path")
	}
}

// Probes go to ready TCP backends of the member, once to each.
func TestTargets(t *testing.T) {
	snap := snapshot(3, "10.1.0.1:8080", "10.1.0.2:8080", "10.1.0.3:8080", "10.1.0.4:8080", "10.1.0.1:8080")
	for i := range snap.Services {
		s := snap.Services[i].Slices
		s[1].Cluster = "b"
		s[2].Endpoints[0].Ready = false
		s[3].Ports[0].Protocol = cs.UDP
	}
	a := mustNew(t, datapath.NewFake(lb.NewState()))
	if got := a.targets("a", 3); got != nil {
		t.Errorf("before the first snapshot: %v", got)
	}
	mustSync(t, a, snap)
	for c, want := range map[cs.ClusterID]string{"a": "[10.1.0.1:8080]", "b": "[10.1.0.2:8080]", "c": "[]"} {
		if got := fmt.Sprint(a.targets(c, 3)); got != want {
			t.Errorf("member %s: %s, want %s", c, got, want)
		}
	}
	mustSync(t, a, snapshot(2, "10.1.0.1:1", "10.1.0.1:2", "10.1.0.1:3", "10.1.0.1:4"))
	if got := a.targets("a", 3); len(got) != 3 {
		t.Errorf("%v, want three", got)
	}
}

// A silent member without backends to probe is drained, reported and restored.
func TestRunDrains(t *testing.T) {
	snap := snapshot(1, "10.1.0.1:53", "10.2.0.1:53")
	for i := range snap.Services[0].Slices {
		snap.Services[0].Slices[i].Ports[0].Protocol = cs.UDP // no TCP backend to probe
	}
	snap.Services[0].Ports[0].Protocol = cs.UDP
	snap.Services[0].Slices[1].Cluster = "b"
	f := datapath.NewFake(lb.NewState())
	f.Evidence = map[cs.ClusterID]datapath.Evidence{"a": {}, "b": {SilentAt: datapath.SinceBoot()}}
	reports := make(chan map[cs.ClusterID]evidence.State, 10)
	a, err := newAgent(t.Context(), Config{Topology: Topology{Ranges: ranges}, Report: func(s map[cs.ClusterID]evidence.State) { reports <- s }}, f, discard)
	if err != nil {
		t.Fatal(err)
	}
	mustSync(t, a, snap)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- a.Run(ctx) }()
	for i, want := range []map[cs.ClusterID]evidence.State{{}, {"b": evidence.Silent}} {
		select {
		case known := <-reports:
			if diff := cmp.Diff(want, known); diff != "" {
				t.Errorf("report %d (-want +have):\n%s", i, diff)
			}
		case <-time.After(time.Minute):
			t.Fatalf("no report %d", i)
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff([]cs.ClusterID{"b"}, a.Status().Drained); diff != "" {
		t.Error(diff)
	}
	want := "FE 243.0.0.1:80/UDP id=1 service=demo/s0 backends=[10.1.0.1:53]\n" +
		"BE id=1 10.1.0.1:53/UDP cluster=a\nBE id=2 10.2.0.1:53/UDP cluster=b draining\nRANGE 243.0.0.0/8\nRANGE fd00:243::/48\n"
	if diff := cmp.Diff(want, text(t, f)); diff != "" {
		t.Error(diff)
	}
	if err := a.drain(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if d := a.Status().Drained; len(d) != 0 {
		t.Errorf("restored, and still drained: %v", d)
	}
}

// An equal topology costs nothing. Before the first snapshot a topology is only stored.
func TestSetTopology(t *testing.T) {
	f := datapath.NewFake(lb.NewState())
	a := mustNew(t, f)
	topology := Topology{Node: lb.Node{Cluster: "b", Name: "n1"}, Ranges: []netip.Prefix{netip.MustParsePrefix("243.0.0.0/8")}}
	for i, want := range []uint64{0, 9, 9} { // a member, a backend, a range, and twice a Service, a slot and a frontend
		if i == 1 {
			mustSync(t, a, snapshot(2, "10.1.0.1:8080"))
		}
		if err := a.SetTopology(t.Context(), topology); err != nil {
			t.Fatal(err)
		}
		if n := f.Writes(); n != want {
			t.Errorf("step %d: %d writes, want %d", i, n, want)
		}
	}
}

// Sockets are closed after the start and after backends were removed, and at no other time.
func TestRunClosesStaleSockets(t *testing.T) {
	f := datapath.NewFake(lb.NewState())
	a := mustNew(t, f)
	mustSync(t, a, snapshot(1, "10.1.0.1:53", "10.1.0.2:53"))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- a.Run(ctx) }()
	reach := func(n int64) {
		t.Helper()
		tick, late := time.NewTicker(time.Millisecond), time.After(time.Minute)
		defer tick.Stop()
		for f.CloseStaleCalls.Load() < n {
			select {
			case <-tick.C:
			case <-late:
				t.Fatalf("asked %d times to close sockets, want %d", f.CloseStaleCalls.Load(), n)
			}
		}
	}
	reach(1)
	mustSync(t, a, snapshot(2, "10.1.0.1:53", "10.1.0.2:53"))
	mustSync(t, a, snapshot(2, "10.1.0.2:53"))
	reach(2)
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if n := f.CloseStaleCalls.Load(); n != 2 {
		t.Errorf("asked %d times, want 2", n)
	}
}

// The ranges are in the maps too. An agent that cannot read them from anywhere else keeps them.
func TestRangesOutliveTheAgent(t *testing.T) {
	f := datapath.NewFake(lb.NewState())
	mustSync(t, mustNew(t, f), snapshot(2, "10.1.0.1:8080"))
	a, err := newAgent(t.Context(), Config{}, f, discard)
	if err != nil {
		t.Fatal(err)
	}
	if err := a.SetTopology(t.Context(), Topology{Node: lb.Node{Cluster: "a"}}); err != nil {
		t.Fatal(err)
	}
	more := snapshot(4, "10.1.0.1:8080")
	more.Services[3].IPs[0] = netip.MustParseAddr("203.0.113.1")
	mustSync(t, a, more)
	s := a.Status()
	if s.Frontends != 3 || len(s.Problems) != 1 || s.Problems[0].Reason != lb.VIPOutsideRanges || s.Problems[0].Service.Name != "s3" {
		t.Errorf("%d frontends, problems %v, want 3 and one of demo/s3", s.Frontends, s.Problems)
	}
}

// While no range is known, not even from the maps, the agent serves what it served before and no other VIP.
func TestWithoutRanges(t *testing.T) {
	f := datapath.NewFake(lb.NewState())
	mustSync(t, mustNew(t, f), snapshot(2, "10.1.0.1:8080"))
	state, err := f.Load(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	clear(state.Ranges)
	f = datapath.NewFake(state)
	asked := 0
	a, err := newAgent(t.Context(), Config{Refused: func() { asked++ }}, f, discard)
	if err != nil {
		t.Fatal(err)
	}
	step := func(snap *cs.Snapshot, frontends int, refused ...string) {
		t.Helper()
		mustSync(t, a, snap)
		var names []string
		for _, p := range a.Status().Problems {
			names = append(names, p.Service.Name)
		}
		if n := a.Status().Frontends; n != frontends || !slices.Equal(names, refused) {
			t.Errorf("%d frontends and problems of %v, want %d and %v", n, names, frontends, refused)
		}
	}
	other := snapshot(3, "10.1.0.1:8080")
	other.Services[0].IPs, other.Services[1].IPs = other.Services[1].IPs, other.Services[0].IPs // each claims the other's
	step(snapshot(2, "10.1.0.1:8080"), 2)
	step(snapshot(3, "10.1.0.1:8080", "10.1.0.2:8080"), 2, "s2")
	step(other, 0, "s0", "s1", "s2")
	step(snapshot(3, "10.1.0.1:8080"), 2, "s2")
	if asked != 2 {
		t.Errorf("asked %d times for the ranges, want 2: when s2, and when s0 and s1 began to be refused", asked)
	}
	if err := a.SetTopology(t.Context(), Topology{Ranges: ranges}); err != nil {
		t.Fatal(err)
	}
	step(snapshot(3, "10.1.0.1:8080"), 3)
	step(other, 3)
}
