package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/bpf/lb"
	cs "github.com/isthmus-net/isthmus/controlplane/clusterset"
)

var discard = slog.New(slog.DiscardHandler)

// snapshot returns a world of n Services, 243.0.0.1:80 and so on, each with the given backends.
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

func mustNew(t *testing.T, dp dataplane) *Agent {
	t.Helper()
	a, err := newAgent(t.Context(), dp, discard)
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

// text returns what the maps of a Fake hold.
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

// However far an update got before it failed, the next one finishes it.
func TestFailedApplyIsFinishedByTheNextSync(t *testing.T) {
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
		// The numbers may differ from those of an update that was not cut; what is served may not.
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
	if s.Frontends != 2 || s.Backends != 1 || s.Writes != 7 || s.LastSync.IsZero() || s.LastError != nil {
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
