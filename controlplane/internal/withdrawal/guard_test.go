package withdrawal

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"pgregory.net/rapid"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

const peer clusterset.ClusterID = "b"

// runningGuard is a Guard that runs, and a log of its callbacks.
type runningGuard struct {
	*Guard[int]
	t0   time.Time
	log  []string // "1s changed b [3 4]", "1s b held 6 of 10"
	stop func()
}

// startGuard starts a Guard inside a synctest bubble. The caller must stop it.
func startGuard(cfg Config[int]) *runningGuard {
	g := &runningGuard{t0: time.Now()}
	if cfg.Changed == nil {
		var at time.Time // of the last call, with its keys and its index in log
		var all []int
		last := -1
		cfg.Changed = func(id clusterset.ClusterID, keys []int) {
			// Run may wake at any of several calls made at one instant; their keys count as one callback.
			if now := time.Now(); now.Equal(at) && last == len(g.log)-1 && strings.Contains(g.log[last], fmt.Sprintf(" changed %s ", id)) {
				g.log = g.log[:last]
			} else {
				at, all = now, nil
			}
			all = append(all, keys...)
			slices.Sort(all)
			last = len(g.log)
			g.logf("changed %s %v", id, all)
		}
	}
	cfg.Decided = func(d Decision) { g.logf("%s %v %d of %d", d.Source, d.Outcome, d.Count, d.Of) }
	g.Guard = New(cfg)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- g.Run(ctx) }()
	g.stop = func() {
		cancel()
		if err := <-done; err != nil {
			panic(err) // Run returns nil
		}
	}
	return g
}

func (g *runningGuard) logf(format string, args ...any) {
	g.log = append(g.log, fmt.Sprintf("%v ", time.Since(g.t0))+fmt.Sprintf(format, args...))
}

// later lets d pass and everything due happen.
func later(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

// offered, vanished, vanishedUnseen and withdrawn report the keys from, from+1, ... to-1.
func (g *runningGuard) offered(from, to int)        { each(g.Offered, from, to) }
func (g *runningGuard) vanished(from, to int)       { each(g.Vanished, from, to) }
func (g *runningGuard) vanishedUnseen(from, to int) { each(g.VanishedUnseen, from, to) }
func (g *runningGuard) withdrawn(from, to int)      { each(g.Withdrawn, from, to) }

func each(report func(clusterset.ClusterID, int), from, to int) {
	for k := from; k < to; k++ {
		report(peer, k)
	}
	synctest.Wait()
}

// keeps returns which of the keys below n are kept.
func (g *runningGuard) keeps(n int) []int {
	var kept []int
	for k := range n {
		if g.Keeps(peer, k) {
			kept = append(kept, k)
		}
	}
	return kept
}

func TestJudgement(t *testing.T) {
	for name, tc := range map[string]struct {
		cfg  Config[int]
		run  func(g *runningGuard)
		log  []string
		kept []int // of keys below 20, at the end
	}{
		"one loss is accepted after the window": {
			run: func(g *runningGuard) {
				g.offered(0, 10)
				later(time.Minute)
				g.vanished(0, 1)
				later(5 * time.Second)
			},
			log: []string{"1m1s changed b [0]", "1m1s b accepted 1 of 10"},
		},
		"a loss is kept until the window ends": {
			run: func(g *runningGuard) {
				g.offered(0, 10)
				later(time.Minute)
				g.vanished(0, 1)
				later(time.Second - 1)
			},
			kept: []int{0},
		},
		"vanished unseen, and back before the grace is over": {
			run: func(g *runningGuard) {
				g.offered(0, 10)
				g.vanishedUnseen(0, 2)
				later(30*time.Second - 1)
				g.offered(0, 2)
				later(time.Minute)
			},
		},
		"vanished unseen, and not back": {
			run: func(g *runningGuard) {
				g.offered(0, 10)
				g.vanishedUnseen(0, 2)
				later(time.Minute)
			},
			log: []string{"30s changed b [0 1]", "30s b accepted 2 of 10"},
		},
		"vanishes while others have a grace": {
			run: func(g *runningGuard) {
				g.offered(0, 10)
				g.vanishedUnseen(0, 2)
				later(10 * time.Second)
				g.vanished(2, 4)
				later(20*time.Second - 1)
			},
			kept: []int{0, 1, 2, 3},
		},
		"back within the window": {
			run: func(g *runningGuard) {
				g.offered(0, 10)
				g.vanished(0, 10)
				later(time.Second / 2)
				g.offered(0, 10)
				later(time.Minute)
			},
		},
		"withdrawn": {
			run: func(g *runningGuard) {
				g.offered(0, 10)
				g.withdrawn(0, 10)
				g.vanished(0, 10)
				later(time.Minute)
			},
		},
		"withdrawn within the window": {
			run: func(g *runningGuard) {
				g.offered(0, 10)
				g.vanished(0, 10)
				g.withdrawn(0, 10)
				later(time.Minute)
			},
			log: []string{"0s changed b [0 1 2 3 4 5 6 7 8 9]"},
		},
		"half is accepted": {
			run: func(g *runningGuard) {
				g.offered(0, 10)
				g.vanished(0, 5)
				later(time.Minute)
			},
			log: []string{"1s changed b [0 1 2 3 4]", "1s b accepted 5 of 10"},
		},
		"over half is held": {
			run: func(g *runningGuard) {
				g.offered(0, 10)
				g.vanished(0, 6)
				later(time.Hour)
			},
			log:  []string{"1s b held 6 of 10"},
			kept: []int{0, 1, 2, 3, 4, 5},
		},
		"held for an hour, then expired": {
			run: func(g *runningGuard) {
				g.offered(0, 10)
				g.vanished(0, 6)
				later(2 * time.Hour)
			},
			log: []string{"1s b held 6 of 10", "1h0m1s changed b [0 1 2 3 4 5]", "1h0m1s b expired 6 of 10"},
		},
		"held, then confirmed by its source": {
			run: func(g *runningGuard) {
				g.offered(0, 10)
				g.vanished(0, 6)
				later(time.Minute)
				g.Confirm(peer)
				later(time.Second)
				g.vanished(6, 8) // judged anew: two of four
				later(time.Minute)
			},
			log: []string{"1s b held 6 of 10", "1m0s changed b [0 1 2 3 4 5]", "1m0s b confirmed 6 of 10", "1m2s changed b [6 7]", "1m2s b accepted 2 of 4"},
		},
		"confirmed before it is judged": {
			run: func(g *runningGuard) {
				g.offered(0, 10)
				g.vanishedUnseen(0, 10)
				later(5 * time.Second)
				g.Confirm(peer)
				later(time.Hour)
			},
			log: []string{"5s changed b [0 1 2 3 4 5 6 7 8 9]"},
		},
		"confirmed without a loss": {
			run: func(g *runningGuard) {
				g.Confirm(peer)
				g.offered(0, 10)
				g.Confirm(peer)
				g.vanished(0, 6)
				later(time.Minute)
			},
			log:  []string{"1s b held 6 of 10"},
			kept: []int{0, 1, 2, 3, 4, 5},
		},
		"four of four are accepted": {
			run: func(g *runningGuard) {
				g.offered(0, 4)
				g.vanished(0, 4)
				later(time.Minute)
			},
			log: []string{"1s changed b [0 1 2 3]", "1s b accepted 4 of 4"},
		},
		"five of five are held": {
			run: func(g *runningGuard) {
				g.offered(0, 5)
				g.vanished(0, 5)
				later(time.Minute)
			},
			log:  []string{"1s b held 5 of 5"},
			kept: []int{0, 1, 2, 3, 4},
		},
		"withdrawn keys do not count as offered": {
			run: func(g *runningGuard) {
				g.offered(0, 20)
				g.withdrawn(0, 10)
				g.vanished(10, 16)
				later(time.Minute)
			},
			log:  []string{"1s b held 6 of 10"},
			kept: []int{10, 11, 12, 13, 14, 15},
		},
		"ten replaced by ten others": {
			run: func(g *runningGuard) {
				g.offered(0, 10)
				later(time.Minute)
				g.offered(10, 20)
				g.vanished(0, 10)
				later(time.Minute)
			},
			log:  []string{"1m1s b held 10 of 10"},
			kept: []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9},
		},
		"ten replaced by ten others, the new ones last": {
			run: func(g *runningGuard) {
				g.offered(0, 10)
				later(time.Minute)
				g.vanished(0, 10)
				g.offered(10, 20)
				later(time.Minute)
			},
			log:  []string{"1m1s b held 10 of 10"},
			kept: []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9},
		},
		"all keys of a new source count": {
			run: func(g *runningGuard) {
				g.offered(0, 20)
				later(time.Second)
				g.vanished(0, 6)
				later(time.Minute)
			},
			log: []string{"2s changed b [0 1 2 3 4 5]", "2s b accepted 6 of 20"},
		},
		"keys offered later count too": {
			run: func(g *runningGuard) {
				g.offered(0, 10)
				later(time.Hour)
				g.offered(10, 20)
				later(2 * time.Second)
				g.vanished(0, 6)
				later(time.Minute)
			},
			log: []string{"1h0m3s changed b [0 1 2 3 4 5]", "1h0m3s b accepted 6 of 20"},
		},
		"deleted one after the other is one step": {
			run: func(g *runningGuard) {
				g.offered(0, 10)
				for k := range 10 {
					g.vanished(k, k+1)
					later(900 * time.Millisecond)
				}
				later(time.Minute)
			},
			log:  []string{"9.1s b held 10 of 10"},
			kept: []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9},
		},
		"a step ends after ten windows": {
			run: func(g *runningGuard) {
				g.offered(0, 100)
				for k := range 20 {
					g.vanished(k, k+1)
					later(900 * time.Millisecond)
				}
			},
			log:  []string{"10s changed b [0 1 2 3 4 5 6 7 8 9 10 11]", "10s b accepted 12 of 100"},
			kept: []int{12, 13, 14, 15, 16, 17, 18, 19},
		},
		"a slow wipe stops at half": {
			run: func(g *runningGuard) {
				g.offered(0, 10)
				for k := range 10 {
					g.vanished(k, k+1)
					later(2 * time.Second)
				}
			},
			log: []string{
				"1s changed b [0]", "1s b accepted 1 of 10", "3s changed b [1]", "3s b accepted 1 of 10",
				"5s changed b [2]", "5s b accepted 1 of 10", "7s changed b [3]", "7s b accepted 1 of 10",
				"9s changed b [4]", "9s b accepted 1 of 10",
				"11s b held 1 of 10", "13s b held 2 of 10", "15s b held 3 of 10", "17s b held 4 of 10", "19s b held 5 of 10",
			},
			kept: []int{5, 6, 7, 8, 9},
		},
		"old losses no longer count": {
			cfg: Config[int]{Times: Times{Memory: time.Minute}},
			run: func(g *runningGuard) {
				g.offered(0, 12)
				g.vanished(0, 6)
				later(time.Minute + time.Second)
				g.vanished(6, 9)
				later(time.Minute)
			},
			log: []string{"1s changed b [0 1 2 3 4 5]", "1s b accepted 6 of 12", "1m2s changed b [6 7 8]", "1m2s b accepted 3 of 6"},
		},
		"recent losses count": {
			cfg: Config[int]{Times: Times{Memory: time.Minute}},
			run: func(g *runningGuard) {
				g.offered(0, 12)
				g.vanished(0, 6)
				later(time.Minute - time.Second)
				g.vanished(6, 7)
				later(time.Minute)
			},
			log:  []string{"1s changed b [0 1 2 3 4 5]", "1s b accepted 6 of 12", "1m0s b held 1 of 12"},
			kept: []int{6},
		},
		"new offers do not dilute a hold": {
			run: func(g *runningGuard) {
				g.offered(0, 10)
				g.vanished(0, 6)
				later(time.Minute)
				g.offered(20, 120)
				later(time.Minute)
				g.vanished(6, 9)
				later(time.Minute)
			},
			log:  []string{"1s b held 6 of 10", "2m1s b held 9 of 10"},
			kept: []int{0, 1, 2, 3, 4, 5, 6, 7, 8},
		},
		"a nearly resolved hold accepts small losses": {
			run: func(g *runningGuard) {
				g.offered(0, 10)
				g.vanished(0, 8)
				later(time.Minute)
				g.offered(0, 6)
				g.vanished(9, 10)
				later(time.Minute)
			},
			log:  []string{"1s b held 8 of 10", "1m1s changed b [9]", "1m1s b accepted 1 of 10"},
			kept: []int{6, 7},
		},
		"a hold ends when all is back": {
			run: func(g *runningGuard) {
				g.offered(0, 10)
				g.vanished(0, 10)
				later(time.Minute)
				g.offered(0, 10)
				g.vanished(0, 1)
				later(time.Minute)
			},
			log: []string{"1s b held 10 of 10", "1m0s b resolved 0 of 10", "1m1s changed b [0]", "1m1s b accepted 1 of 10"},
		},
		"a tombstone frees what is held": {
			run: func(g *runningGuard) {
				g.offered(0, 10)
				g.vanished(0, 10)
				later(time.Minute)
				g.withdrawn(0, 9)
			},
			log:  []string{"1s b held 10 of 10", "1m0s changed b [0 1 2 3 4 5 6 7 8]"},
			kept: []int{9},
		},
		"a hold ends when all is back or withdrawn": {
			run: func(g *runningGuard) {
				g.offered(0, 10)
				g.vanished(0, 10)
				later(time.Minute)
				g.offered(0, 5)
				g.withdrawn(5, 10)
			},
			log: []string{"1s b held 10 of 10", "1m0s changed b [5 6 7 8 9]", "1m0s b resolved 0 of 10"},
		},
		"a release includes the open step": {
			run: func(g *runningGuard) {
				g.offered(0, 20)
				g.vanished(0, 12)
				later(time.Minute)
				g.vanished(12, 14)
				g.Release(peer)
				later(time.Minute)
				g.vanished(14, 16)
				later(time.Minute)
			},
			log: []string{
				"1s b held 12 of 20", "1m0s changed b [0 1 2 3 4 5 6 7 8 9 10 11 12 13]", "1m0s b released 14 of 20",
				"2m1s changed b [14 15]", "2m1s b accepted 2 of 6",
			},
		},
		"a release without a hold does nothing": {
			run: func(g *runningGuard) {
				g.offered(0, 10)
				g.vanished(0, 10)
				g.Release(peer)
				later(time.Minute)
			},
			log:  []string{"1s b held 10 of 10"},
			kept: []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9},
		},
		"a forgotten source": {
			run: func(g *runningGuard) {
				g.offered(0, 10)
				g.vanished(0, 8)
				later(time.Minute)
				g.vanished(8, 9)
				g.Forget(peer)
				g.vanished(9, 10)
				later(2 * time.Hour)
			},
			log: []string{"1s b held 8 of 10", "1m0s changed b [0 1 2 3 4 5 6 7 8]", "1m0s b left 9 of 10"},
		},
		"keys never offered cannot vanish": {
			run: func(g *runningGuard) {
				g.vanished(0, 10)
				g.withdrawn(0, 10)
				g.Forget(peer)
				g.offered(0, 1)
				g.vanished(1, 10)
				later(time.Minute)
			},
		},
		"a key that vanishes twice counts once": {
			run: func(g *runningGuard) {
				g.offered(0, 10)
				g.vanished(0, 4)
				later(time.Minute)
				g.vanished(0, 4)
				later(time.Minute)
			},
			log: []string{"1s changed b [0 1 2 3]", "1s b accepted 4 of 10"},
		},
		"a flapping key counts once": {
			run: func(g *runningGuard) {
				g.offered(0, 10)
				for range 10 {
					g.vanished(0, 1)
					later(2 * time.Second)
					g.offered(0, 1)
				}
				g.log = nil
				g.vanished(0, 4)
				later(2 * time.Second)
			},
			log: []string{"21s changed b [0 1 2 3]", "21s b accepted 4 of 10"},
		},
		"custom config": {
			cfg: Config[int]{Times: Times{Window: time.Minute, HoldFor: 2 * time.Minute}, Least: 1, Share: 0.1},
			run: func(g *runningGuard) {
				g.offered(0, 10)
				g.vanished(0, 1)
				later(time.Minute)
				g.vanished(1, 2)
				later(time.Hour)
			},
			log: []string{
				"1m0s changed b [0]", "1m0s b accepted 1 of 10", "2m0s b held 1 of 10",
				"4m0s changed b [1]", "4m0s b expired 1 of 10",
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := startGuard(tc.cfg)
				defer g.stop()
				tc.run(g)
				if diff := gocmp.Diff(tc.log, g.log); diff != "" {
					t.Errorf("log (-want +have):\n%s", diff)
				}
				if diff := gocmp.Diff(tc.kept, g.keeps(20)); diff != "" {
					t.Errorf("kept (-want +have):\n%s", diff)
				}
			})
		})
	}
}

// Without Run, the Guard keeps everything.
func TestNotRunning(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := startGuard(Config[int]{})
		g.stop()
		g.offered(0, 10)
		g.vanished(0, 1)
		later(24 * time.Hour)
		if diff := gocmp.Diff([]int{0}, g.keeps(10)); diff != "" {
			t.Errorf("kept (-want +have):\n%s", diff)
		}
	})
}

func TestSourcesAreJudgedApart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := startGuard(Config[int]{})
		defer g.stop()
		for k := range 10 {
			for _, id := range []clusterset.ClusterID{"c", "b", "d"} {
				g.Offered(id, k)
			}
			g.Vanished("c", k)
			if k < 9 {
				g.Vanished("b", k)
			}
		}
		g.Vanished("d", 0)
		later(time.Second)
		t1 := time.Now()
		later(time.Minute)
		want := []Hold{{Source: "b", Count: 9, Of: 10, Since: t1}, {Source: "c", Count: 10, Of: 10, Since: t1}}
		if diff := gocmp.Diff(want, g.Holds()); diff != "" {
			t.Errorf("holds (-want +have):\n%s", diff)
		}
		g.Release("c")
		if diff := gocmp.Diff(want[:1], g.Holds()); diff != "" {
			t.Errorf("holds after a release (-want +have):\n%s", diff)
		}
		for k := range 10 {
			g.Offered("b", k)
		}
		if have := g.Holds(); len(have) > 0 {
			t.Errorf("every key is back, but these are held: %v", have)
		}
		g.Vanished("b", 1)
		if g.Keeps("c", 1) || !g.Keeps("b", 1) || g.Keeps("d", 0) || g.Keeps("e", 0) {
			t.Error("Keeps confuses sources")
		}
	})
}

// Callbacks may call the Guard.
func TestCallbacksMayCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g *Guard[string]
		kept := true
		g = New(Config[string]{
			Changed: func(id clusterset.ClusterID, keys []string) { kept = g.Keeps(id, keys[0]) },
			Decided: func(d Decision) { g.Forget(d.Source) },
		})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- g.Run(ctx) }()
		g.Offered(peer, "x")
		g.Vanished(peer, "x")
		later(time.Minute)
		cancel()
		if err := <-done; err != nil || kept {
			t.Errorf("Run: %v, kept after Changed named it: %t", err, kept)
		}
	})
}

// value returns the value of a metric of one source, 0 without one.
func value(t *testing.T, name, source string) float64 {
	t.Helper()
	families, err := metrics.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == name && m.GetLabel()[0].GetValue() == source {
				return m.GetGauge().GetValue() + m.GetCounter().GetValue()
			}
		}
	}
	return 0
}

// The gauge is the sum over all Guards of a process; a Guard that stops subtracts its contribution.
func TestMetrics(t *testing.T) {
	before := value(t, "isthmus_controller_withdrawals_held_total", "m")
	synctest.Test(t, func(t *testing.T) {
		one, two := startGuard(Config[int]{}), startGuard(Config[int]{})
		for k := range 10 {
			for _, g := range []*runningGuard{one, two} {
				g.Offered("m", k)
				g.Vanished("m", k)
			}
		}
		check := func(when string, wantHeld, wantTotal float64) {
			t.Helper()
			synctest.Wait()
			h, n := value(t, "isthmus_controller_held_services", "m"), value(t, "isthmus_controller_withdrawals_held_total", "m")-before
			if h != wantHeld || n != wantTotal {
				t.Errorf("%s: %v held, %v in total; want %v and %v", when, h, n, wantHeld, wantTotal)
			}
		}
		check("in the window", 0, 0)
		later(time.Second)
		check("held", 20, 20)
		one.Offered("m", 0)
		check("one is back", 19, 20)
		one.Forget("m")
		check("one member less", 10, 20)
		two.stop()
		check("stopped", 0, 20)
		one.stop()
	})
}

func TestConfigRefuses(t *testing.T) {
	if err := (Config[int]{}).Validate(); err != nil {
		t.Errorf("the zero config: %v", err)
	}
	bad := Config[int]{Times: Times{Window: -1, Grace: -1, Memory: -1, HoldFor: -1}, Least: -1, Share: 1}
	if n := strings.Count(fmt.Sprint(bad.Validate()), "\n") + 1; n != 6 {
		t.Errorf("the error names %d faults, want 6: %v", n, bad.Validate())
	}
}

// act is one event of a source, after a pause.
type act struct {
	verb  string
	key   int
	pause time.Duration
}

func acts(keys int, verbs ...string) *rapid.Generator[[]act] {
	return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) act {
		return act{
			verb:  rapid.SampledFrom(verbs).Draw(t, "verb"),
			key:   rapid.IntRange(0, keys-1).Draw(t, "key"),
			pause: rapid.SampledFrom([]time.Duration{0, 0, 100 * time.Millisecond, 999 * time.Millisecond, time.Second, 2 * time.Second, 7 * time.Second}).Draw(t, "pause"),
		}
	}), 1, 80)
}

func (g *runningGuard) act(a act) {
	later(a.pause)
	switch a.verb {
	case "offered":
		g.Offered(peer, a.key)
	case "vanished":
		g.Vanished(peer, a.key)
	case "vanishedUnseen":
		g.VanishedUnseen(peer, a.key)
	case "withdrawn":
		g.Withdrawn(peer, a.key)
	case "release":
		g.Release(peer)
	case "forget":
		g.Forget(peer)
	}
	synctest.Wait()
}

// At most half of the keys (or four) of a source that offers nothing new are accepted as gone, in whatever order and
// pace keys vanish, return or are withdrawn.
func TestNoSequenceOfLossesRemovesMoreThanHalf(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(1, 20).Draw(rt, "offered")
		all := acts(20, "vanished", "vanished", "vanished", "vanishedUnseen", "offered", "withdrawn").Draw(rt, "acts")
		rapid.SyncTest(rt, func(rt *rapid.T) {
			g := startGuard(Config[int]{})
			defer g.stop()
			g.offered(0, n)
			later(time.Minute)
			offered, lost := map[int]bool{}, map[int]bool{}
			for k := range n {
				offered[k] = true
			}
			total := time.Duration(0)
			for _, a := range all {
				if total += a.pause; a.key >= n || total > 4*time.Minute {
					continue
				}
				g.act(a)
				switch {
				case a.verb == "withdrawn":
					delete(offered, a.key)
					delete(lost, a.key)
				case (a.verb == "vanished" || a.verb == "vanishedUnseen") && offered[a.key]:
					lost[a.key] = true
				case a.verb == "offered":
					offered[a.key] = true
					delete(lost, a.key)
				}
				believed := 0
				for k := range lost {
					if !g.Keeps(peer, k) {
						believed++
					}
				}
				if believed > max(4, n/2) {
					rt.Fatalf("after %v of %d: %d are accepted as gone\n%s", a, n, believed, strings.Join(g.log, "\n"))
				}
			}
		})
	})
}

// Keeps is never true for an offered or withdrawn key; for a lost key it is true until Changed names the key; and no
// key is kept for ever.
func TestKeepsUntilChanged(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		all := acts(8, "offered", "offered", "vanished", "vanished", "vanishedUnseen", "withdrawn", "release", "forget").Draw(rt, "acts")
		rapid.SyncTest(rt, func(rt *rapid.T) {
			var mu sync.Mutex
			kept := map[int]bool{} // the caller's view
			g := startGuard(Config[int]{Times: Times{HoldFor: 20 * time.Second}, Changed: func(_ clusterset.ClusterID, keys []int) {
				mu.Lock()
				defer mu.Unlock()
				for _, k := range keys {
					delete(kept, k)
				}
			}})
			defer g.stop()
			g.offered(0, 8)
			later(time.Minute)
			offered := map[int]bool{}
			for k := range 8 {
				offered[k] = true
			}
			check := func(a any) {
				rt.Helper()
				synctest.Wait()
				mu.Lock()
				defer mu.Unlock()
				for k := range 8 {
					if g.Keeps(peer, k) != kept[k] {
						rt.Fatalf("after %v: key %d is kept: %t, the caller thinks %t", a, k, g.Keeps(peer, k), kept[k])
					}
					if offered[k] && kept[k] {
						rt.Fatalf("after %v: key %d is offered and kept", a, k)
					}
				}
			}
			for _, a := range all {
				g.act(a)
				mu.Lock()
				switch a.verb {
				case "offered":
					offered[a.key] = true
					delete(kept, a.key)
				case "vanished", "vanishedUnseen":
					if offered[a.key] {
						kept[a.key] = true
						delete(offered, a.key)
					}
				case "withdrawn":
					delete(offered, a.key)
				case "forget":
					clear(offered)
				}
				mu.Unlock()
				check(a)
			}
			later(time.Minute)
			check("the end")
			mu.Lock()
			defer mu.Unlock()
			if len(kept) > 0 || len(g.Holds()) > 0 {
				rt.Fatalf("kept for ever: %v, %v", kept, g.Holds())
			}
		})
	})
}

// The counters match the lost keys.
func TestCounts(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		all := acts(8, "offered", "vanished", "vanished", "vanishedUnseen", "withdrawn", "release").Draw(rt, "acts")
		rapid.SyncTest(rt, func(rt *rapid.T) {
			g := startGuard(Config[int]{Times: Times{HoldFor: 20 * time.Second, Memory: 10 * time.Second}})
			defer g.stop()
			g.offered(0, 8)
			for _, a := range all {
				g.act(a)
				g.mu.Lock()
				s := g.sources[peer]
				var want [accepted + 1]int
				for _, l := range s.lost {
					want[l.fate]++
				}
				count, hold := s.count, s.hold != nil
				g.mu.Unlock()
				if count != want || hold != (want[held] > 0) {
					rt.Fatalf("after %v: counts %v, want %v, hold %t", a, count, want, hold)
				}
			}
		})
	})
}

func TestOutcomesHaveNames(t *testing.T) {
	var names []string
	for o := Accepted; o <= Confirmed; o++ {
		names = append(names, o.String())
	}
	slices.SortFunc(names, cmp.Compare)
	if len(slices.Compact(names)) != int(Confirmed)+1 || names[0] == "" {
		t.Errorf("the outcomes' names are %q", names)
	}
}

func BenchmarkWipeOfTenThousand(b *testing.B) {
	for b.Loop() {
		g := New(Config[clusterset.ServiceName]{})
		now := time.Now()
		keys := make([]clusterset.ServiceName, 10_000)
		for i := range keys {
			keys[i] = clusterset.ServiceName{Namespace: "demo", Name: fmt.Sprint(i)}
			g.Offered(peer, keys[i])
		}
		for _, k := range keys {
			g.Vanished(peer, k)
		}
		g.judge(now.Add(time.Minute))
		for _, k := range keys {
			g.Offered(peer, k)
		}
	}
}

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A source offers and loses new keys without end. The Guard remembers a bounded number of them and frees the others, so
// that neither its memory nor the work of its callers grows.
func TestLostKeysAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		freed := 0
		g := startGuard(Config[int]{Most: 10, Changed: func(_ clusterset.ClusterID, keys []int) { freed += len(keys) }})
		defer g.stop()
		for key := range 1000 {
			g.Offered(peer, key)
			g.Vanished(peer, key)
		}
		synctest.Wait()
		g.mu.Lock()
		lost, offered := len(g.sources[peer].lost), len(g.sources[peer].offered)
		g.mu.Unlock()
		if lost != 10 || offered != 0 || freed != 990 {
			t.Errorf("%d keys are lost, %d offered, %d freed; want 10, 0, 990", lost, offered, freed)
		}
	})
}
