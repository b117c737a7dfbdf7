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

// yard is a guard that runs, and what it told.
type yard struct {
	*Guard[int]
	t0   time.Time
	told []string // "1s changed b [3 4]", "1s b held 6 of 10"
	stop func()
}

// newYard starts a guard inside a synctest bubble. It must be stopped.
func newYard(cfg Config[int]) *yard {
	y := &yard{t0: time.Now()}
	if cfg.Changed == nil {
		var at time.Time // of the last call, its keys, and where in told it stands
		var all []int
		last := -1
		cfg.Changed = func(id clusterset.ClusterID, keys []int) {
			// Run may wake at any of several calls that are made in one moment: what it tells in one counts.
			if now := time.Now(); now.Equal(at) && last == len(y.told)-1 && strings.Contains(y.told[last], fmt.Sprintf(" changed %s ", id)) {
				y.told = y.told[:last]
			} else {
				at, all = now, nil
			}
			all = append(all, keys...)
			slices.Sort(all)
			last = len(y.told)
			y.tell("changed %s %v", id, all)
		}
	}
	cfg.Decided = func(d Decision) { y.tell("%s %v %d of %d", d.Source, d.Outcome, d.Count, d.Of) }
	y.Guard = New(cfg)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- y.Run(ctx) }()
	y.stop = func() {
		cancel()
		if err := <-done; err != nil {
			panic(err) // Run returns nil
		}
	}
	return y
}

func (y *yard) tell(format string, args ...any) {
	y.told = append(y.told, fmt.Sprintf("%v ", time.Since(y.t0))+fmt.Sprintf(format, args...))
}

// later lets d pass, and everything that is due happen.
func later(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

// has, lost, missed and withdrew say so of the keys from, from+1, ... to-1.
func (y *yard) has(from, to int) {
	for k := from; k < to; k++ {
		y.Has(peer, k)
	}
	synctest.Wait()
}

func (y *yard) lost(from, to int) {
	for k := from; k < to; k++ {
		y.Lost(peer, k)
	}
	synctest.Wait()
}

func (y *yard) missed(from, to int) {
	for k := from; k < to; k++ {
		y.Missed(peer, k)
	}
	synctest.Wait()
}

func (y *yard) withdrew(from, to int) {
	for k := from; k < to; k++ {
		y.Withdrew(peer, k)
	}
	synctest.Wait()
}

// keeps returns which of the keys below n are kept.
func (y *yard) keeps(n int) []int {
	var kept []int
	for k := range n {
		if y.Keeps(peer, k) {
			kept = append(kept, k)
		}
	}
	return kept
}

func TestJudgement(t *testing.T) {
	for name, tc := range map[string]struct {
		cfg  Config[int]
		run  func(y *yard)
		told []string
		kept []int // of keys below 20, at the end
	}{
		"one loss is believed after the window": {
			run: func(y *yard) {
				y.has(0, 10)
				later(time.Minute)
				y.lost(0, 1)
				later(5 * time.Second)
			},
			told: []string{"1m1s changed b [0]", "1m1s b believed 1 of 10"},
		},
		"a loss is kept until the window ends": {
			run: func(y *yard) {
				y.has(0, 10)
				later(time.Minute)
				y.lost(0, 1)
				later(time.Second - 1)
			},
			kept: []int{0},
		},
		"missed, and back before the grace is over": {
			run: func(y *yard) {
				y.has(0, 10)
				y.missed(0, 2)
				later(30*time.Second - 1)
				y.has(0, 2)
				later(time.Minute)
			},
		},
		"missed, and not back": {
			run: func(y *yard) {
				y.has(0, 10)
				y.missed(0, 2)
				later(time.Minute)
			},
			told: []string{"30s changed b [0 1]", "30s b believed 2 of 10"},
		},
		"lost while there is grace for others": {
			run: func(y *yard) {
				y.has(0, 10)
				y.missed(0, 2)
				later(10 * time.Second)
				y.lost(2, 4)
				later(20*time.Second - 1)
			},
			kept: []int{0, 1, 2, 3},
		},
		"back within the window": {
			run: func(y *yard) {
				y.has(0, 10)
				y.lost(0, 10)
				later(time.Second / 2)
				y.has(0, 10)
				later(time.Minute)
			},
		},
		"taken back openly": {
			run: func(y *yard) {
				y.has(0, 10)
				y.withdrew(0, 10)
				y.lost(0, 10)
				later(time.Minute)
			},
		},
		"taken back openly within the window": {
			run: func(y *yard) {
				y.has(0, 10)
				y.lost(0, 10)
				y.withdrew(0, 10)
				later(time.Minute)
			},
			told: []string{"0s changed b [0 1 2 3 4 5 6 7 8 9]"},
		},
		"half is no mass": {
			run: func(y *yard) {
				y.has(0, 10)
				y.lost(0, 5)
				later(time.Minute)
			},
			told: []string{"1s changed b [0 1 2 3 4]", "1s b believed 5 of 10"},
		},
		"over half is held": {
			run: func(y *yard) {
				y.has(0, 10)
				y.lost(0, 6)
				later(time.Hour)
			},
			told: []string{"1s b held 6 of 10"},
			kept: []int{0, 1, 2, 3, 4, 5},
		},
		"an hour later it is believed": {
			run: func(y *yard) {
				y.has(0, 10)
				y.lost(0, 6)
				later(2 * time.Hour)
			},
			told: []string{"1s b held 6 of 10", "1h0m1s changed b [0 1 2 3 4 5]", "1h0m1s b expired 6 of 10"},
		},
		"four is no mass, were it all": {
			run: func(y *yard) {
				y.has(0, 4)
				y.lost(0, 4)
				later(time.Minute)
			},
			told: []string{"1s changed b [0 1 2 3]", "1s b believed 4 of 4"},
		},
		"five that are all": {
			run: func(y *yard) {
				y.has(0, 5)
				y.lost(0, 5)
				later(time.Minute)
			},
			told: []string{"1s b held 5 of 5"},
			kept: []int{0, 1, 2, 3, 4},
		},
		"what was taken back is no part of what it had": {
			run: func(y *yard) {
				y.has(0, 20)
				y.withdrew(0, 10)
				y.lost(10, 16)
				later(time.Minute)
			},
			told: []string{"1s b held 6 of 10"},
			kept: []int{10, 11, 12, 13, 14, 15},
		},
		"ten replaced by ten others": {
			run: func(y *yard) {
				y.has(0, 10)
				later(time.Minute)
				y.has(10, 20)
				y.lost(0, 10)
				later(time.Minute)
			},
			told: []string{"1m1s b held 10 of 10"},
			kept: []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9},
		},
		"ten replaced by ten others, the new ones last": {
			run: func(y *yard) {
				y.has(0, 10)
				later(time.Minute)
				y.lost(0, 10)
				y.has(10, 20)
				later(time.Minute)
			},
			told: []string{"1m1s b held 10 of 10"},
			kept: []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9},
		},
		"a new source counts whole": {
			run: func(y *yard) {
				y.has(0, 20)
				later(time.Second)
				y.lost(0, 6)
				later(time.Minute)
			},
			told: []string{"2s changed b [0 1 2 3 4 5]", "2s b believed 6 of 20"},
		},
		"what came since counts too": {
			run: func(y *yard) {
				y.has(0, 10)
				later(time.Hour)
				y.has(10, 20)
				later(2 * time.Second)
				y.lost(0, 6)
				later(time.Minute)
			},
			told: []string{"1h0m3s changed b [0 1 2 3 4 5]", "1h0m3s b believed 6 of 20"},
		},
		"deleted one after the other is one step": {
			run: func(y *yard) {
				y.has(0, 10)
				for k := range 10 {
					y.lost(k, k+1)
					later(900 * time.Millisecond)
				}
				later(time.Minute)
			},
			told: []string{"9.1s b held 10 of 10"},
			kept: []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9},
		},
		"a step ends after ten windows": {
			run: func(y *yard) {
				y.has(0, 100)
				for k := range 20 {
					y.lost(k, k+1)
					later(900 * time.Millisecond)
				}
			},
			told: []string{"10s changed b [0 1 2 3 4 5 6 7 8 9 10 11]", "10s b believed 12 of 100"},
			kept: []int{12, 13, 14, 15, 16, 17, 18, 19},
		},
		"a slow wipe stops at half": {
			run: func(y *yard) {
				y.has(0, 10)
				for k := range 10 {
					y.lost(k, k+1)
					later(2 * time.Second)
				}
			},
			told: []string{
				"1s changed b [0]", "1s b believed 1 of 10", "3s changed b [1]", "3s b believed 1 of 10",
				"5s changed b [2]", "5s b believed 1 of 10", "7s changed b [3]", "7s b believed 1 of 10",
				"9s changed b [4]", "9s b believed 1 of 10",
				"11s b held 1 of 10", "13s b held 2 of 10", "15s b held 3 of 10", "17s b held 4 of 10", "19s b held 5 of 10",
			},
			kept: []int{5, 6, 7, 8, 9},
		},
		"what was lost long ago counts no more": {
			cfg: Config[int]{Memory: time.Minute},
			run: func(y *yard) {
				y.has(0, 12)
				y.lost(0, 6)
				later(time.Minute + time.Second)
				y.lost(6, 9)
				later(time.Minute)
			},
			told: []string{"1s changed b [0 1 2 3 4 5]", "1s b believed 6 of 12", "1m2s changed b [6 7 8]", "1m2s b believed 3 of 6"},
		},
		"what was lost a moment ago counts": {
			cfg: Config[int]{Memory: time.Minute},
			run: func(y *yard) {
				y.has(0, 12)
				y.lost(0, 6)
				later(time.Minute - time.Second)
				y.lost(6, 7)
				later(time.Minute)
			},
			told: []string{"1s changed b [0 1 2 3 4 5]", "1s b believed 6 of 12", "1m0s b held 1 of 12"},
			kept: []int{6},
		},
		"a hold is not talked down by new offers": {
			run: func(y *yard) {
				y.has(0, 10)
				y.lost(0, 6)
				later(time.Minute)
				y.has(20, 120)
				later(time.Minute)
				y.lost(6, 9)
				later(time.Minute)
			},
			told: []string{"1s b held 6 of 10", "2m1s b held 9 of 10"},
			kept: []int{0, 1, 2, 3, 4, 5, 6, 7, 8},
		},
		"a hold that nearly healed lets small losses pass": {
			run: func(y *yard) {
				y.has(0, 10)
				y.lost(0, 8)
				later(time.Minute)
				y.has(0, 6)
				y.lost(9, 10)
				later(time.Minute)
			},
			told: []string{"1s b held 8 of 10", "1m1s changed b [9]", "1m1s b believed 1 of 10"},
			kept: []int{6, 7},
		},
		"a hold ends when all is back": {
			run: func(y *yard) {
				y.has(0, 10)
				y.lost(0, 10)
				later(time.Minute)
				y.has(0, 10)
				y.lost(0, 1)
				later(time.Minute)
			},
			told: []string{"1s b held 10 of 10", "1m0s b settled 0 of 10", "1m1s changed b [0]", "1m1s b believed 1 of 10"},
		},
		"a tombstone frees what is held": {
			run: func(y *yard) {
				y.has(0, 10)
				y.lost(0, 10)
				later(time.Minute)
				y.withdrew(0, 9)
			},
			told: []string{"1s b held 10 of 10", "1m0s changed b [0 1 2 3 4 5 6 7 8]"},
			kept: []int{9},
		},
		"a hold ends when all is back or taken back": {
			run: func(y *yard) {
				y.has(0, 10)
				y.lost(0, 10)
				later(time.Minute)
				y.has(0, 5)
				y.withdrew(5, 10)
			},
			told: []string{"1s b held 10 of 10", "1m0s changed b [5 6 7 8 9]", "1m0s b settled 0 of 10"},
		},
		"a person releases all, the open step too": {
			run: func(y *yard) {
				y.has(0, 20)
				y.lost(0, 12)
				later(time.Minute)
				y.lost(12, 14)
				y.Release(peer)
				later(time.Minute)
				y.lost(14, 16)
				later(time.Minute)
			},
			told: []string{
				"1s b held 12 of 20", "1m0s changed b [0 1 2 3 4 5 6 7 8 9 10 11 12 13]", "1m0s b released 14 of 20",
				"2m1s changed b [14 15]", "2m1s b believed 2 of 6",
			},
		},
		"a release without a hold is nothing": {
			run: func(y *yard) {
				y.has(0, 10)
				y.lost(0, 10)
				y.Release(peer)
				later(time.Minute)
			},
			told: []string{"1s b held 10 of 10"},
			kept: []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9},
		},
		"a member that left is believed": {
			run: func(y *yard) {
				y.has(0, 10)
				y.lost(0, 8)
				later(time.Minute)
				y.lost(8, 9)
				y.Forget(peer)
				y.lost(9, 10)
				later(2 * time.Hour)
			},
			told: []string{"1s b held 8 of 10", "1m0s changed b [0 1 2 3 4 5 6 7 8]", "1m0s b left 9 of 10"},
		},
		"what was never offered cannot be lost": {
			run: func(y *yard) {
				y.lost(0, 10)
				y.withdrew(0, 10)
				y.Forget(peer)
				y.has(0, 1)
				y.lost(1, 10)
				later(time.Minute)
			},
		},
		"lost twice is lost once": {
			run: func(y *yard) {
				y.has(0, 10)
				y.lost(0, 4)
				later(time.Minute)
				y.lost(0, 4)
				later(time.Minute)
			},
			told: []string{"1s changed b [0 1 2 3]", "1s b believed 4 of 10"},
		},
		"what flickers does not add up": {
			run: func(y *yard) {
				y.has(0, 10)
				for range 10 {
					y.lost(0, 1)
					later(2 * time.Second)
					y.has(0, 1)
				}
				y.told = nil
				y.lost(0, 4)
				later(2 * time.Second)
			},
			told: []string{"21s changed b [0 1 2 3]", "21s b believed 4 of 10"},
		},
		"other numbers": {
			cfg: Config[int]{Window: time.Minute, HoldFor: 2 * time.Minute, Least: 1, Share: 0.1},
			run: func(y *yard) {
				y.has(0, 10)
				y.lost(0, 1)
				later(time.Minute)
				y.lost(1, 2)
				later(time.Hour)
			},
			told: []string{
				"1m0s changed b [0]", "1m0s b believed 1 of 10", "2m0s b held 1 of 10",
				"4m0s changed b [1]", "4m0s b expired 1 of 10",
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				y := newYard(tc.cfg)
				defer y.stop()
				tc.run(y)
				if diff := gocmp.Diff(tc.told, y.told); diff != "" {
					t.Errorf("told (-want +have):\n%s", diff)
				}
				if diff := gocmp.Diff(tc.kept, y.keeps(20)); diff != "" {
					t.Errorf("kept (-want +have):\n%s", diff)
				}
			})
		})
	}
}

// Nothing is believed while nobody judges.
func TestNotRunning(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		y := newYard(Config[int]{})
		y.stop()
		y.has(0, 10)
		y.lost(0, 1)
		later(24 * time.Hour)
		if diff := gocmp.Diff([]int{0}, y.keeps(10)); diff != "" {
			t.Errorf("kept (-want +have):\n%s", diff)
		}
	})
}

func TestSourcesAreJudgedApart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		y := newYard(Config[int]{})
		defer y.stop()
		for k := range 10 {
			for _, id := range []clusterset.ClusterID{"c", "b", "d"} {
				y.Has(id, k)
			}
			y.Lost("c", k)
			if k < 9 {
				y.Lost("b", k)
			}
		}
		y.Lost("d", 0)
		later(time.Second)
		t1 := time.Now()
		later(time.Minute)
		want := []Hold{{Source: "b", Count: 9, Of: 10, Since: t1}, {Source: "c", Count: 10, Of: 10, Since: t1}}
		if diff := gocmp.Diff(want, y.Holds()); diff != "" {
			t.Errorf("holds (-want +have):\n%s", diff)
		}
		y.Release("c")
		if diff := gocmp.Diff(want[:1], y.Holds()); diff != "" {
			t.Errorf("holds after a release (-want +have):\n%s", diff)
		}
		for k := range 10 {
			y.Has("b", k)
		}
		if have := y.Holds(); len(have) > 0 {
			t.Errorf("all is back, and still held: %v", have)
		}
		y.Lost("b", 1)
		if y.Keeps("c", 1) || !y.Keeps("b", 1) || y.Keeps("d", 0) || y.Keeps("e", 0) {
			t.Error("Keeps mixes sources up")
		}
	})
}

// Callbacks may call the guard.
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
		g.Has(peer, "x")
		g.Lost(peer, "x")
		later(time.Minute)
		cancel()
		if err := <-done; err != nil || kept {
			t.Errorf("Run: %v, kept when told otherwise: %t", err, kept)
		}
	})
}

// value returns the value of a metric of one source, 0 when there is none.
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

// The gauges of all guards of a process add up, and what ends takes its part away.
func TestMetrics(t *testing.T) {
	before := value(t, "isthmus_controller_withdrawals_held_total", "m")
	synctest.Test(t, func(t *testing.T) {
		one, two := newYard(Config[int]{}), newYard(Config[int]{})
		for k := range 10 {
			for _, y := range []*yard{one, two} {
				y.Has("m", k)
				y.Lost("m", k)
			}
		}
		check := func(when string, wantHeld, wantTotal float64) {
			t.Helper()
			synctest.Wait()
			h, n := value(t, "isthmus_controller_held_services", "m"), value(t, "isthmus_controller_withdrawals_held_total", "m")-before
			if h != wantHeld || n != wantTotal {
				t.Errorf("%s: %v held, %v in all; want %v and %v", when, h, n, wantHeld, wantTotal)
			}
		}
		check("in the window", 0, 0)
		later(time.Second)
		check("held", 20, 20)
		one.Has("m", 0)
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
	bad := Config[int]{Window: -1, Grace: -1, Memory: -1, HoldFor: -1, Least: -1, Share: 1}
	if n := strings.Count(fmt.Sprint(bad.Validate()), "\n") + 1; n != 6 {
		t.Errorf("%d faults of 6 are named: %v", n, bad.Validate())
	}
}

// act is one thing that happens to a source, after a pause.
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

func (y *yard) act(a act) {
	later(a.pause)
	switch a.verb {
	case "has":
		y.Has(peer, a.key)
	case "lost":
		y.Lost(peer, a.key)
	case "missed":
		y.Missed(peer, a.key)
	case "withdrew":
		y.Withdrew(peer, a.key)
	case "release":
		y.Release(peer)
	case "forget":
		y.Forget(peer)
	}
	synctest.Wait()
}

// Whatever the order and pace of silent losses, and whatever returns or is taken back meanwhile: of a source
// that offers nothing new, at most half, or four, is believed gone.
func TestNoSequenceOfLossesRemovesMoreThanHalf(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(1, 20).Draw(rt, "offered")
		all := acts(20, "lost", "lost", "lost", "missed", "has", "withdrew").Draw(rt, "acts")
		rapid.SyncTest(rt, func(rt *rapid.T) {
			y := newYard(Config[int]{})
			defer y.stop()
			y.has(0, n)
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
				y.act(a)
				switch {
				case a.verb == "withdrew":
					delete(offered, a.key)
					delete(lost, a.key)
				case (a.verb == "lost" || a.verb == "missed") && offered[a.key]:
					lost[a.key] = true
				case a.verb == "has":
					offered[a.key] = true
					delete(lost, a.key)
				}
				believed := 0
				for k := range lost {
					if !y.Keeps(peer, k) {
						believed++
					}
				}
				if believed > max(4, n/2) {
					rt.Fatalf("after %v of %d: %d are believed gone\n%s", a, n, believed, strings.Join(y.told, "\n"))
				}
			}
		})
	})
}

// Whatever happens, Keeps says what the caller can know: never of what is offered or taken back; of what is
// lost until Changed named it; and nothing is kept for ever.
func TestKeepsUntilChanged(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		all := acts(8, "has", "has", "lost", "lost", "missed", "withdrew", "release", "forget").Draw(rt, "acts")
		rapid.SyncTest(rt, func(rt *rapid.T) {
			var mu sync.Mutex
			kept := map[int]bool{} // as a caller would believe it is
			y := newYard(Config[int]{HoldFor: 20 * time.Second, Changed: func(_ clusterset.ClusterID, keys []int) {
				mu.Lock()
				defer mu.Unlock()
				for _, k := range keys {
					delete(kept, k)
				}
			}})
			defer y.stop()
			y.has(0, 8)
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
					if y.Keeps(peer, k) != kept[k] {
						rt.Fatalf("after %v: key %d is kept: %t, the caller thinks %t", a, k, y.Keeps(peer, k), kept[k])
					}
					if offered[k] && kept[k] {
						rt.Fatalf("after %v: key %d is offered and kept", a, k)
					}
				}
			}
			for _, a := range all {
				y.act(a)
				mu.Lock()
				switch a.verb {
				case "has":
					offered[a.key] = true
					delete(kept, a.key)
				case "lost", "missed":
					if offered[a.key] {
						kept[a.key] = true
						delete(offered, a.key)
					}
				case "withdrew":
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
			if len(kept) > 0 || len(y.Holds()) > 0 {
				rt.Fatalf("kept for ever: %v, %v", kept, y.Holds())
			}
		})
	})
}

// The counts that the guard keeps are those of what it remembers.
func TestCounts(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		all := acts(8, "has", "lost", "lost", "missed", "withdrew", "release").Draw(rt, "acts")
		rapid.SyncTest(rt, func(rt *rapid.T) {
			y := newYard(Config[int]{HoldFor: 20 * time.Second, Memory: 10 * time.Second})
			defer y.stop()
			y.has(0, 8)
			for _, a := range all {
				y.act(a)
				y.mu.Lock()
				s := y.sources[peer]
				var want [believed + 1]int
				for _, l := range s.lost {
					want[l.fate]++
				}
				count, hold := s.count, s.hold != nil
				y.mu.Unlock()
				if count != want || hold != (want[held] > 0) {
					rt.Fatalf("after %v: counts %v, want %v, hold %t", a, count, want, hold)
				}
			}
		})
	})
}

func TestOutcomesHaveNames(t *testing.T) {
	var names []string
	for o := Believed; o <= Left; o++ {
		names = append(names, o.String())
	}
	slices.SortFunc(names, cmp.Compare)
	if len(slices.Compact(names)) != int(Left)+1 || names[0] == "" {
		t.Errorf("outcomes are named %q", names)
	}
}

func BenchmarkWipeOfTenThousand(b *testing.B) {
	for b.Loop() {
		g := New(Config[clusterset.ServiceName]{})
		now := time.Now()
		keys := make([]clusterset.ServiceName, 10_000)
		for i := range keys {
			keys[i] = clusterset.ServiceName{Namespace: "demo", Name: fmt.Sprint(i)}
			g.Has(peer, keys[i])
		}
		for _, k := range keys {
			g.Lost(peer, k)
		}
		g.judge(now.Add(time.Minute))
		for _, k := range keys {
			g.Has(peer, k)
		}
	}
}

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
