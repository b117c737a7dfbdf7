package evidence

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/isthmus-net/isthmus/bpf/datapath"
	cs "github.com/isthmus-net/isthmus/controlplane/clusterset"
)

var errSilent = errors.New("no answer")

// world is three members, the traffic of one node to them, and what the kernel would count.
type world struct {
	start  time.Time
	mu     sync.Mutex
	seen   map[cs.ClusterID]datapath.Evidence
	cut    map[cs.ClusterID]bool // packets die
	walled map[cs.ClusterID]bool // the node may not probe, pods may connect
	probes map[cs.ClusterID]int

	drained  map[cs.ClusterID]bool
	drainErr error
	drains   int
	reports  []map[cs.ClusterID]State
}

var addrs = map[cs.ClusterID]netip.AddrPort{
	"a": netip.MustParseAddrPort("10.1.0.1:80"), "b": netip.MustParseAddrPort("10.2.0.1:80"), "c": netip.MustParseAddrPort("10.3.0.1:80"),
}

// newWorld must be called in a bubble; the watcher runs until the test's end.
func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{
		start: time.Now(), seen: map[cs.ClusterID]datapath.Evidence{"a": {}, "b": {}, "c": {}},
		cut: map[cs.ClusterID]bool{}, walled: map[cs.ClusterID]bool{}, probes: map[cs.ClusterID]int{},
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		done <- Watcher{
			Source:  w,
			Targets: func(id cs.ClusterID, _ int) []netip.AddrPort { return []netip.AddrPort{addrs[id]} },
			Drain:   w.drain, Report: w.report, Log: slog.New(slog.DiscardHandler), Dial: w.dial, Now: w.now,
		}.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return w
}

func (w *world) now() time.Duration { return time.Since(w.start) + time.Hour }

func (w *world) Clusters() (map[cs.ClusterID]datapath.Evidence, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return maps.Clone(w.seen), nil
}

func (w *world) drain(_ context.Context, drained map[cs.ClusterID]bool) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.drains++
	if w.drainErr == nil {
		w.drained = drained
	}
	return w.drainErr
}

func (w *world) report(known map[cs.ClusterID]State) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.reports = append(w.reports, known)
}

func (w *world) dial(ctx context.Context, to netip.AddrPort) error {
	w.mu.Lock()
	silent := false
	for id, a := range addrs {
		if a == to {
			w.probes[id]++
			silent = w.cut[id] || w.walled[id]
		}
	}
	w.mu.Unlock()
	if silent {
		<-ctx.Done()
		return errSilent
	}
	return nil
}

// connect is one client's connection to a member: an answer at once, or nothing until the kernel sends the
// packet again, a second later.
func (w *world) connect(id cs.ClusterID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	e, member := w.seen[id]
	if w.drained[id] || !member {
		return // its clients are elsewhere
	}
	if !w.cut[id] {
		e.AnsweredAt = w.now()
		w.seen[id] = e
		return
	}
	time.AfterFunc(time.Second, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		if e, member := w.seen[id]; member {
			e.SilentAt = w.now()
			w.seen[id] = e
		}
	})
}

// run makes 20 connections a second to each member for a while, and stops when until says so.
func (w *world) run(d time.Duration, until func() bool) {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(d); time.Now().Before(end); <-tick.C {
		synctest.Wait()
		if until() {
			return
		}
		for id := range addrs {
			w.connect(id)
		}
	}
}

func (w *world) set(f func()) { w.mu.Lock(); defer w.mu.Unlock(); f() }

func (w *world) isDrained(id cs.ClusterID) func() bool {
	return func() bool { w.mu.Lock(); defer w.mu.Unlock(); return w.drained[id] }
}

func never() bool { return false }

// The promise: 99 of 100 times a member whose packets die is drained within 3 s, and when they come through
// again it is back within 2.
func TestDrainedInTime(t *testing.T) {
	var took, back []time.Duration
	for range 200 {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t)
			w.run(time.Second+time.Duration(rand.Int64N(int64(time.Second))), never)
			w.set(func() { w.cut["b"] = true })
			began := time.Now()
			w.run(10*time.Second, w.isDrained("b"))
			took = append(took, time.Since(began))
			if w.isDrained("a")() || w.isDrained("c")() {
				t.Error("others are drained with it")
			}
			w.run(time.Duration(rand.Int64N(int64(5*time.Second))), never)
			w.set(func() { w.cut["b"] = false })
			began = time.Now()
			w.run(10*time.Second, func() bool { return !w.isDrained("b")() })
			back = append(back, time.Since(began))
		})
	}
	slices.Sort(took)
	slices.Sort(back)
	if p99 := took[len(took)*99/100]; p99 >= 3*time.Second {
		t.Errorf("drained after %s (p99)", p99)
	}
	if p99 := back[len(back)*99/100]; p99 >= 2*time.Second {
		t.Errorf("back after %s (p99)", p99)
	}
	t.Logf("drained after %s, %s (p50, p99), back after %s, %s", took[len(took)/2], took[len(took)*99/100], back[len(back)/2], back[len(back)*99/100])
}

// A NetworkPolicy keeps the node from probing, and pods connect: nothing happens, for nothing is silent.
func TestNoProbesWithoutSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.walled["b"] = true
		w.run(time.Minute, never)
		w.set(func() {
			if w.drains > 0 || len(w.probes) > 0 {
				t.Errorf("%d changes and probes %v", w.drains, w.probes)
			}
		})
	})
}

func TestAllCutOffIsNotADrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.run(time.Second, never)
		w.set(func() { w.cut["a"], w.cut["b"], w.cut["c"] = true, true, true })
		w.run(time.Minute, never)
		if w.isDrained("a")() || w.isDrained("b")() || w.isDrained("c")() {
			t.Error("members are drained although none answers")
		}
	})
}

// What could not be carried out is told again.
func TestDrainIsRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.drainErr = errors.New("map full")
		w.set(func() { w.cut["b"] = true })
		w.run(5*time.Second, never)
		w.set(func() { w.drainErr = nil })
		w.run(time.Second, never)
		if !w.isDrained("b")() {
			t.Error("not drained after the error was gone")
		}
	})
}

// Who refuses answers.
// A member that goes while it is drained is not drained when it comes back, unless it is silent again.
func TestDrainedMemberThatIsGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.run(5*time.Second, never)
		w.set(func() { w.cut["b"] = true })
		w.run(10*time.Second, w.isDrained("b"))
		w.set(func() { delete(w.seen, "b") })
		w.run(10*time.Second, func() bool { return !w.isDrained("b")() })
		if w.isDrained("b")() {
			t.Fatal("b is no member any more, and drained")
		}
		w.set(func() { w.seen["b"], w.cut["b"] = datapath.Evidence{}, false })
		w.run(5*time.Second, never)
		if w.isDrained("b")() {
			t.Error("b is drained although it answers")
		}
	})
}

func TestHandshake(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	open := netip.MustParseAddrPort(l.Addr().String())
	if err := handshake(t.Context(), open); err != nil {
		t.Error(err)
	}
	l.Close()
	if err := handshake(t.Context(), open); err != nil {
		t.Errorf("a closed port: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := handshake(ctx, open); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

// What is known of members is told at the first look and when it changes, never again.
func TestReport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		next := func(want map[cs.ClusterID]State) {
			t.Helper()
			synctest.Wait()
			w.set(func() {
				if len(w.reports) == 0 {
					t.Fatalf("no report, want %v", want)
				}
				if !maps.Equal(w.reports[0], want) || len(w.reports) > 1 {
					t.Errorf("reports %v, want %v alone", w.reports, want)
				}
				w.reports = nil
			})
		}
		<-time.After(lookInterval)
		next(map[cs.ClusterID]State{})
		w.run(30*time.Second, never)
		next(map[cs.ClusterID]State{"a": Answering, "b": Answering, "c": Answering})
		w.set(func() { w.cut["b"] = true })
		w.run(5*time.Second, never)
		next(map[cs.ClusterID]State{"a": Answering, "b": Silent, "c": Answering})
		w.set(func() { w.cut["b"] = false })
		w.run(5*time.Second, never)
		next(map[cs.ClusterID]State{"a": Answering, "b": Answering, "c": Answering})
		<-time.After(Lately + 2*lookInterval) // and no traffic
		next(map[cs.ClusterID]State{})
	})
}
