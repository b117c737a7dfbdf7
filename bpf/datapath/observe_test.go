package datapath

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/bpf/lb/lbtest"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// observed is a node that serves 243.0.0.5:80, from cluster "b", and refuses clients of 243.0.0.6:80.
func observed(t *testing.T) (*Datapath, *traffic) {
	t.Helper()
	cfg, tr := testConfig(t), startTraffic(t)
	d := mustOpen(t, cfg)
	s := serving(tr.port)
	s.Clusters[1] = "b"
	be := s.Backends[1]
	be.Cluster = 1
	s.Backends[1] = be
	s.Services[2] = clusterset.ServiceName{Namespace: "demo", Name: "empty"}
	s.Frontends[lb.Address{AddrPort: netip.MustParseAddrPort("243.0.0.6:80"), Protocol: clusterset.TCP}] = lb.Frontend{ID: 2, Service: 2}
	if err := d.Apply(t.Context(), lbtest.Diff(lb.NewState(), s)); err != nil {
		t.Fatal(err)
	}
	tr.more(t)
	return d, tr
}

func observeSetting(t *testing.T, d *Datapath) uint32 {
	t.Helper()
	var s bpf.Settings
	if err := d.maps[bpf.MapSettings].Lookup(uint32(0), &s); err != nil {
		t.Fatal(err)
	}
	return s.Observe
}

func refusedConnect(t *testing.T) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: [4]byte{243, 0, 0, 6}, Port: 80}); !errors.Is(err, unix.ECONNREFUSED) {
		t.Fatalf("connect: %v, want %v", err, unix.ECONNREFUSED)
	}
}

// Observe returns choices and refusals with names; before and after it the programs emit nothing.
func TestObserve(t *testing.T) {
	d, tr := observed(t)
	if n := observeSetting(t, d); n != 0 {
		t.Fatalf("the programs emit one in %d choices without an observer", n)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var chosen, refused *Event
	began := time.Now()
	err := d.Observe(ctx, 1, func(e Event) {
		if e.Refused {
			refused = &e
		} else if chosen == nil {
			chosen = &e
			if err := d.Observe(ctx, 1, nil); !errors.Is(err, ErrObserved) {
				t.Errorf("a second one: %v, want %v", err, ErrObserved)
			}
			refusedConnect(t)
		}
		if refused != nil && chosen != nil {
			cancel()
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if n := observeSetting(t, d); n != 0 {
		t.Errorf("the programs emit one in %d choices after the last observer", n)
	}
	if chosen == nil || refused == nil {
		t.Fatalf("events of chosen %v, refused %v, want both", chosen, refused)
	}
	for _, e := range []*Event{chosen, refused} {
		if e.Time.Before(began.Add(-time.Second)) || e.Time.After(time.Now().Add(time.Second)) {
			t.Errorf("an event of %v, seen between %v and now", e.Time, began)
		}
		if e.Netns == 0 || e.Command == "" {
			t.Errorf("client in namespace %d, command %q", e.Netns, e.Command)
		}
	}
	pid := uint32(os.Getpid())
	want := []Event{
		{
			VIP: netip.MustParseAddrPort("243.0.0.5:80"), Backend: netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), tr.port), Protocol: clusterset.TCP,
			Service: clusterset.ServiceName{Namespace: "demo", Name: "hello"}, Cluster: "b", PID: pid,
		},
		{
			Refused: true, Reason: bpf.DropNoBackend, VIP: netip.MustParseAddrPort("243.0.0.6:80"), Protocol: clusterset.TCP,
			Service: clusterset.ServiceName{Namespace: "demo", Name: "empty"}, PID: pid,
		},
	}
	opts := cmp.Options{cmpopts.IgnoreFields(Event{}, "Time", "Netns", "Command"), cmpopts.EquateComparable(netip.AddrPort{})}
	if diff := cmp.Diff(want, []Event{*chosen, *refused}, opts); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

// Observe returns one in rate choices.
func TestObserveSamples(t *testing.T) {
	d, tr := observed(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	before, events := int64(0), 0
	err := d.Observe(ctx, 50, func(Event) {
		if events++; events == 1 {
			before = tr.done.Load()
		}
		if events == 20 {
			cancel()
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	// 19 more events take some 950 random choices; fewer than 200 are practically impossible.
	if n := tr.done.Load() - before; n < 200 {
		t.Errorf("%d events within %d connects, at one in 50", events, n)
	}
}

// A process that is killed while it observes leaves the programs emitting events, until the next Open.
func TestObserveEndsWithTheNextOpen(t *testing.T) {
	cfg := testConfig(t)
	d := mustOpen(t, cfg)
	if err := d.setObserve(7); err != nil {
		t.Fatal(err)
	}
	if n := observeSetting(t, mustOpen(t, cfg)); n != 0 {
		t.Errorf("the programs emit one in %d choices without an observer", n)
	}
}

func TestCounters(t *testing.T) {
	d, _ := observed(t)
	began := SinceBoot()
	refusedConnect(t)
	if err := dial(); err != nil {
		t.Fatal(err)
	}
	refusals, err := d.Refusals()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[Refusal]uint64{{2, bpf.DropNoBackend}: 1}, refusals); diff != "" {
		t.Errorf("refusals (-want +got):\n%s", diff)
	}
	chosen, err := d.Chosen()
	if err != nil {
		t.Fatal(err)
	}
	if chosen[1] == 0 || len(chosen) != 2 || chosen[2] != 0 {
		t.Errorf("chosen %v, want some of service 1", chosen)
	}
	await(t, "evidence of the connection", func() bool {
		clusters, err := d.Clusters()
		if err != nil {
			t.Fatal(err)
		}
		e := clusters["b"]
		return len(clusters) == 1 && e.Established > 0 && e.AnsweredAt >= began && e.AnsweredAt <= SinceBoot()
	})
}

// Counters are keyed by the name of the Service.
func TestCountersByName(t *testing.T) {
	d, tr := observed(t)
	tr.more(t)
	refusedConnect(t)
	have, err := d.Counters()
	if err != nil {
		t.Fatal(err)
	}
	empty := have[clusterset.ServiceName{Namespace: "demo", Name: "empty"}]
	if empty.Chosen != 0 || empty.Refused[bpf.DropNoBackend] != 1 || len(have) != 2 {
		t.Errorf("counters %+v, want one refused client of demo/empty", have)
	}
	delete(have, clusterset.ServiceName{Namespace: "demo", Name: "empty"})
	for name, c := range have {
		if c.Chosen < 2 || len(c.Refused) != 0 {
			t.Errorf("%s: %+v, want clients that were served", name, c)
		}
	}
}

// Differences counts each entry that another process has changed.
func TestDifferences(t *testing.T) {
	d := mustOpen(t, testConfig(t))
	want := stateOf(4)
	if err := d.Apply(t.Context(), lbtest.Diff(lb.NewState(), want)); err != nil {
		t.Fatal(err)
	}
	for corrupted, corrupt := range []func() error{
		func() error { return nil },
		func() error { return d.maps[bpf.MapBackends].Delete(uint32(1)) },
		func() error { return d.maps[bpf.MapSlots].Put(bpf.SlotKey{FrontendId: 77}, uint32(5)) },
	} {
		if err := corrupt(); err != nil {
			t.Fatal(err)
		}
		if n, err := d.Differences(t.Context(), lb.NewPlanner(want).Audit()); n != corrupted || err != nil {
			t.Errorf("%d differences, %v, want %d", n, err, corrupted)
		}
	}
}

// A Reader reads the same as the agent's Datapath, while the agent runs and after it. Its error names the version that is
// installed if it is not its own.
func TestRead(t *testing.T) {
	cfg := testConfig(t)
	if _, err := Read(cfg); !errors.Is(err, ErrNotInstalled) {
		t.Errorf("a clean node: %v, want %v", err, ErrNotInstalled)
	}
	upgrade(t, cfg, currentVersion(t), stateOf(5))
	r, err := Read(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	have, err := r.Load(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if n := lbtest.Diff(have, stateOf(5)).Writes(); n != 0 {
		t.Errorf("%d differences", n)
	}
	if err := r.maps[bpf.MapBackends].Delete(uint32(1)); err == nil {
		t.Error("a Reader can write")
	}
	upgrade(t, cfg, nextABI(currentVersion(t)), stateOf(5))
	if _, err := Read(cfg); !errors.Is(err, ErrNotInstalled) {
		t.Errorf("another version: %v, want %v", err, ErrNotInstalled)
	}
}
