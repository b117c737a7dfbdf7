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

// testbed is three members, the traffic of one node to them, and what the kernel would count.
type testbed struct {
	start  time.Time
	mu     sync.Mutex
	seen   map[cs.ClusterID]datapath.Evidence
	cut    map[cs.ClusterID]bool // packets get no answer
	denied map[cs.ClusterID]bool // a NetworkPolicy denies the node, and allows pods
	probes map[cs.ClusterID]int

	drained  map[cs.ClusterID]bool
	drainErr error
	drains   int
	reports  []map[cs.ClusterID]State
}

var addrs = map[cs.ClusterID]netip.AddrPort{
	"a": netip.MustParseAddrPort("10.1.0.1:80"), "b": netip.MustParseAddrPort("10.2.0.1:80"), "c": netip.MustParseAddrPort("10.3.0.1:80"),
}

// newTestbed must be called in a synctest bubble; the watcher runs until the test ends.
func newTestbed(t *testing.T) *testbed {
	t.Helper()
	w := &testbed{
		start: time.Now(), seen: map[cs.ClusterID]datapath.Evidence{"a": {}, "b": {}, "c": {}},
		cut: map[cs.ClusterID]bool{}, denied: map[cs.ClusterID]bool{}, probes: map[cs.ClusterID]int{},
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

func (w *testbed) now() time.Duration { return time.Since(w.start) + time.Hour }

func (w *testbed) Clusters() (map[cs.ClusterID]datapath.Evidence, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return maps.Clone(w.seen), nil
}

func (w *testbed) drain(_ context.Context, drained map[cs.ClusterID]bool) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.drains++
	if w.drainErr == nil {
		w.drained = drained
	}
	return w.drainErr
}

func (w *testbed) report(known map[cs.ClusterID]State) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.reports = append(w.reports, known)
}

func (w *testbed) dial(ctx context.Context, to netip.AddrPort) error {
	w.mu.Lock()
	silent := false
	for id, a := range addrs {
		if a == to {
			w.probes[id]++
			silent = w.cut[id] || w.denied[id]
		}
	}
	w.mu.Unlock()
	if silent {
		<-ctx.Done()
		return errSilent
	}
	return nil
}

// connect is one client's connection to a member. It is answered at once, or the kernel retransmits after a second.
func (w *testbed) connect(id cs.ClusterID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	e, member := w.seen[id]
	if w.drained[id] || !member {
		return // clients use other members
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

// run makes 20 connections a second to each member for d, or until the function returns true.
func (w *testbed) run(d time.Duration, until func() bool) {
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

func (w *testbed) set(f func()) { w.mu.Lock(); defer w.mu.Unlock(); f() }

func (w *testbed) isDrained(id cs.ClusterID) func() bool {
	return func() bool { w.mu.Lock(); defer w.mu.Unlock(); return w.drained[id] }
}

func never() bool { return false }

// 99 % of the time a silent member is drained within 3 s, and restored within 2 s once it answers.
func TestDrainAndRestoreTimes(t *testing.T) {
	var took, restored []time.Duration
	for range 200 {
		synctest.Test(t, func(t *testing.T) {
			w := newTestbed(t)
			w.run(time.Second+time.Duration(rand.Int64N(int64(time.Second))), never)
			w.set(func() { w.cut["b"] = true })
			began := time.Now()
			w.run(10*time.Second, w.isDrained("b"))
			took = append(took, time.Since(began))
			if w.isDrained("a")() || w.isDrained("c")() {
				t.Error("other members are drained too")
			}
			w.run(time.Duration(rand.Int64N(int64(5*time.Second))), never)
			w.set(func() { w.cut["b"] = false })
			began = time.Now()
			w.run(10*time.Second, func() bool { return !w.isDrained("b")() })
			restored = append(restored, time.Since(began))
		})
	}
	slices.Sort(took)
	slices.Sort(restored)
	if p99 := took[len(took)*99/100]; p99 >= 3*time.Second {
		t.Errorf("drained after %s (p99)", p99)
	}
	if p99 := restored[len(restored)*99/100]; p99 >= 2*time.Second {
		t.Errorf("restored after %s (p99)", p99)
	}
	t.Logf("drained after %s, %s (p50, p99), restored after %s, %s", took[len(took)/2], took[len(took)*99/100], restored[len(restored)/2], restored[len(restored)*99/100])
}

// A NetworkPolicy denies probes and allows pods. As long as pods connect, the node neither probes nor drains.
func TestNoProbesWithoutSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTestbed(t)
		w.denied["b"] = true
		w.run(time.Minute, never)
		w.set(func() {
			if w.drains > 0 || len(w.probes) > 0 {
				t.Errorf("%d changes and probes %v", w.drains, w.probes)
			}
		})
	})
}

func TestNoMemberIsDrainedWhenAllAreSilent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTestbed(t)
		w.run(time.Second, never)
		w.set(func() { w.cut["a"], w.cut["b"], w.cut["c"] = true, true, true })
		w.run(time.Minute, never)
		if w.isDrained("a")() || w.isDrained("b")() || w.isDrained("c")() {
			t.Error("members are drained although none answers")
		}
	})
}

// Drain is called again after an error.
func TestDrainIsRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTestbed(t)
		w.drainErr = errors.New("map full")
		w.set(func() { w.cut["b"] = true })
		w.run(5*time.Second, never)
		w.set(func() { w.drainErr = nil })
		w.run(time.Second, never)
		if !w.isDrained("b")() {
			t.Error("not drained once Drain succeeds")
		}
	})
}

// A member that is removed while it is drained comes back undrained, unless it is silent again.
func TestDrainedMemberIsRemoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTestbed(t)
		w.run(5*time.Second, never)
		w.set(func() { w.cut["b"] = true })
		w.run(10*time.Second, w.isDrained("b"))
		w.set(func() { delete(w.seen, "b") })
		w.run(10*time.Second, func() bool { return !w.isDrained("b")() })
		if w.isDrained("b")() {
			t.Fatal("b was removed and is still drained")
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

// Report is called after the first read and after each change, and never otherwise.
func TestReport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTestbed(t)
		next := func(want map[cs.ClusterID]State) {
			t.Helper()
			synctest.Wait()
			w.set(func() {
				if len(w.reports) == 0 {
					t.Fatalf("no report, want %v", want)
				}
				if !maps.Equal(w.reports[0], want) || len(w.reports) > 1 {
					t.Errorf("reports %v, want only %v", w.reports, want)
				}
				w.reports = nil
			})
		}
		<-time.After(readInterval)
		next(map[cs.ClusterID]State{})
		w.run(30*time.Second, never)
		next(map[cs.ClusterID]State{"a": Answering, "b": Answering, "c": Answering})
		w.set(func() { w.cut["b"] = true })
		w.run(5*time.Second, never)
		next(map[cs.ClusterID]State{"a": Answering, "b": Silent, "c": Answering})
		w.set(func() { w.cut["b"] = false })
		w.run(5*time.Second, never)
		next(map[cs.ClusterID]State{"a": Answering, "b": Answering, "c": Answering})
		<-time.After(recent + 2*readInterval) // and no traffic
		next(map[cs.ClusterID]State{})
	})
}
