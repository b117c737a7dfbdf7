package liveness

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

const self clusterset.ClusterID = "a"

// dataplane is Evidence with a settable verdict for each member: Answering comes at once, Silent after two seconds.
type dataplane struct {
	mu    sync.Mutex
	says  map[clusterset.ClusterID]Verdict
	asked map[clusterset.ClusterID]int
}

func (d *dataplane) Answers(ctx context.Context, id clusterset.ClusterID) Verdict {
	d.mu.Lock()
	v := d.says[id]
	d.asked[id]++
	d.mu.Unlock()
	if v != Silent {
		return v
	}
	select {
	case <-ctx.Done():
		return Unknown
	case <-time.After(DefaultTimes().Probe):
		return v
	}
}

func (d *dataplane) set(id clusterset.ClusterID, v Verdict) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.says[id] = v
}

// trackerTest runs a Tracker with its inputs, and logs its transitions. Each member in renewing renews every five seconds:
// this member at 0 s, b at 1 s, c at 2 s and so on.
type trackerTest struct {
	*Tracker
	dataplane
	t0       time.Time
	renewing map[clusterset.ClusterID]bool
	skew     map[clusterset.ClusterID]time.Duration // of clocks
	last     map[clusterset.ClusterID]time.Time     // renewal
	seen     map[clusterset.ClusterID]State
	log      []string                           // "1m20s b stale"
	calls    int                                // of Changed
	dead     map[clusterset.ClusterID]bool      // according to Changed
	here     func(id clusterset.ClusterID) bool // Config.Present
	paused   error
	stop     func()

	renewals time.Duration
}

// newTrackerTest starts a Tracker in a synctest bubble. The caller must stop it.
func newTrackerTest(mode Mode, renewing ...clusterset.ClusterID) *trackerTest {
	s := &trackerTest{
		t0: time.Now(), renewing: map[clusterset.ClusterID]bool{}, skew: map[clusterset.ClusterID]time.Duration{},
		last: map[clusterset.ClusterID]time.Time{}, seen: map[clusterset.ClusterID]State{}, dead: map[clusterset.ClusterID]bool{},
		here:      func(clusterset.ClusterID) bool { return true },
		dataplane: dataplane{says: map[clusterset.ClusterID]Verdict{}, asked: map[clusterset.ClusterID]int{}},
	}
	s.startRenewing(renewing...)
	s.Tracker = NewTracker(Config{
		Self: self, Times: DefaultTimes(), Mode: mode, Evidence: &s.dataplane, Log: slog.New(slog.DiscardHandler),
		Present: func(id clusterset.ClusterID) bool { return s.here(id) },
		Changed: func(id clusterset.ClusterID) {
			s.calls++
			s.dead[id] = s.Dead(id)
		},
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Start(ctx) }()
	s.stop = func() {
		cancel()
		if err := <-done; err != nil {
			panic(err)
		}
	}
	return s
}

func (s *trackerTest) startRenewing(ids ...clusterset.ClusterID) {
	for _, id := range ids {
		s.renewing[id] = true
	}
}

func (s *trackerTest) stopRenewing(ids ...clusterset.ClusterID) {
	for _, id := range ids {
		delete(s.renewing, id)
	}
}

// renew renews a Lease now.
func (s *trackerTest) renew(id clusterset.ClusterID) {
	s.renewals++ // no two renewals have the same time
	s.last[id] = time.Now().Add(s.skew[id] + s.renewals)
	s.Renewed(id, s.last[id])
}

// run lets d pass in steps of a second.
func (s *trackerTest) run(d time.Duration) {
	for end := time.Now().Add(d); time.Now().Before(end); {
		at := time.Since(s.t0)
		for _, id := range slices.Sorted(maps.Keys(s.renewing)) {
			if phase := time.Duration(id[0]-'a') * time.Second; (at-phase)%DefaultTimes().Renew == 0 {
				s.renew(id)
			}
		}
		s.logChanges()
		<-time.After(min(time.Second, time.Until(end)))
		s.logChanges()
	}
}

// logChanges logs changed states.
func (s *trackerTest) logChanges() {
	synctest.Wait()
	at := time.Since(s.t0)
	for _, id := range []clusterset.ClusterID{"b", "c", "d"} {
		if state, _ := s.State(id); state != s.seen[id] {
			s.seen[id] = state
			s.log = append(s.log, fmt.Sprintf("%v %s %v", at, id, state))
		}
	}
	if paused := s.Paused(); !errors.Is(paused, s.paused) {
		s.paused = paused
		switch {
		case errors.Is(paused, ErrMinimumLive):
			s.log = append(s.log, fmt.Sprintf("%v minimum", at))
		case errors.Is(paused, ErrOwnLeaseUnseen):
			s.log = append(s.log, fmt.Sprintf("%v unseen", at))
		default:
			s.log = append(s.log, fmt.Sprintf("%v judging", at))
		}
	}
}

// warmUp lets a healthy minute pass, and clears the log.
func (s *trackerTest) warmUp() {
	s.run(time.Minute)
	s.log = nil
}

func TestJudgement(t *testing.T) {
	const working = 8 * time.Hour
	for name, tc := range map[string]struct {
		mode     Mode
		renewing string // beside a
		run      func(s *trackerTest)
		log      []string
	}{
		"all members renew": {
			renewing: "bc",
			run: func(s *trackerTest) {
				s.set("b", Silent)
				s.run(time.Hour)
			},
		},
		"silent endpoints": { // last renewed at 56 s
			renewing: "bc",
			run: func(s *trackerTest) {
				s.set("b", Silent)
				s.stopRenewing("b")
				s.run(time.Hour)
			},
			log: []string{"1m20s b stale", "1m30s b dead"},
		},
		"silent endpoints of the only other member": {
			renewing: "b",
			run: func(s *trackerTest) {
				s.set("b", Silent)
				s.stopRenewing("b")
				s.run(time.Hour)
			},
			log: []string{"1m20s b stale", "1m30s b dead"},
		},
		"no evidence": {
			renewing: "bc",
			run: func(s *trackerTest) {
				s.stopRenewing("b")
				s.run(time.Hour)
			},
			log: []string{"1m20s b stale", "6m0s b dead"},
		},
		"answers without renewing": {
			renewing: "bc",
			run: func(s *trackerTest) {
				s.set("b", Answering)
				s.stopRenewing("b")
				s.run(59 * time.Minute)
			},
			log: []string{"1m20s b stale"},
		},
		"answers without renewing for an hour": {
			renewing: "bc",
			run: func(s *trackerTest) {
				s.set("b", Answering)
				s.stopRenewing("b")
				s.run(2 * time.Hour)
			},
			log: []string{"1m20s b stale", "1h1m0s b dead"},
		},
		"endpoints fall silent later": {
			renewing: "bc",
			run: func(s *trackerTest) {
				s.set("b", Answering)
				s.stopRenewing("b")
				s.run(9 * time.Minute) // asked at 10m0s, and next at 10m5s
				s.set("b", Silent)
				s.run(time.Minute)
			},
			log: []string{"1m20s b stale", "10m15s b dead"},
		},
		"evidence ends": {
			renewing: "bc",
			run: func(s *trackerTest) {
				s.set("b", Answering)
				s.stopRenewing("b")
				s.run(9 * time.Minute) // answered at 10m0s
				s.set("b", Unknown)
				s.run(time.Hour)
			},
			log: []string{"1m20s b stale", "15m0s b dead"},
		},
		"silent verdicts with answers between": {
			renewing: "bc",
			run: func(s *trackerTest) {
				s.stopRenewing("b")
				for _, other := range []Verdict{Unknown, Answering, Unknown} {
					for range 8 {
						s.set("b", Silent)
						s.run(5 * time.Second)
						s.set("b", other)
						s.run(5 * time.Second)
					}
				}
			},
			log: []string{"1m20s b stale"},
		},
		"one silent verdict in each stale period": { // it renews six seconds later, after two queries
			renewing: "bc",
			run: func(s *trackerTest) {
				s.set("b", Silent)
				s.stopRenewing("b")
				s.run(26 * time.Second)
				for range 3 {
					s.renew("b")
					s.run(30 * time.Second)
				}
			},
			log: []string{
				"1m20s b stale", "1m26s b live", "1m50s b stale", "1m56s b live", "2m20s b stale", "2m26s b live", "2m50s b stale",
			},
		},
		"one silent verdict": {
			renewing: "bc",
			run: func(s *trackerTest) {
				s.stopRenewing("b")
				s.set("b", Silent)
				s.run(23 * time.Second)
				s.set("b", Answering)
				s.run(time.Minute)
				s.set("b", Silent)
				s.run(3 * time.Second)
				s.set("b", Unknown)
				s.run(2 * time.Minute)
			},
			log: []string{"1m20s b stale"},
		},
		"renews in time": {
			renewing: "bc",
			run: func(s *trackerTest) {
				s.set("b", Silent)
				s.stopRenewing("b")
				s.run(26 * time.Second)
				s.startRenewing("b")
				s.run(time.Minute)
			},
			log: []string{"1m20s b stale", "1m26s b live"},
		},
		"dies and returns": {
			renewing: "bc",
			run: func(s *trackerTest) {
				s.set("b", Silent)
				s.stopRenewing("b")
				s.run(time.Minute)
				s.startRenewing("b")
				s.run(time.Hour)
			},
			log: []string{"1m20s b stale", "1m30s b dead", "2m1s b live"},
		},
		"lease mode": {
			mode: Lease, renewing: "bc",
			run: func(s *trackerTest) {
				s.set("b", Answering)
				s.stopRenewing("b")
				s.run(time.Hour)
			},
			log: []string{"1m20s b stale", "1m25s b dead"},
		},
		"lease mode, the only other member": {
			mode: Lease, renewing: "b",
			run: func(s *trackerTest) {
				s.stopRenewing("b")
				s.run(time.Hour)
			},
			log: []string{"1m20s b dead"},
		},
		"flapping every five seconds": {
			mode: Lease, renewing: "bc",
			run: func(s *trackerTest) {
				for range 100 {
					s.stopRenewing("b")
					s.run(5 * time.Second)
					s.startRenewing("b")
					s.run(5 * time.Second)
				}
			},
		},
		"flapping every half minute is damped": {
			mode: Lease, renewing: "bc",
			run: func(s *trackerTest) {
				for range 4 {
					s.stopRenewing("b")
					s.run(30 * time.Second)
					s.startRenewing("b")
					s.run(30 * time.Second)
				}
				s.run(time.Minute)
			},
			log: []string{
				"1m20s b stale", "1m25s b dead", "1m31s b live",
				"2m20s b stale", "2m25s b dead", "2m31s b unproven",
				"3m20s b dead", "3m31s b unproven",
				"4m20s b dead", "4m31s b unproven", "5m1s b live",
			},
		},
		"the broker is unreachable for ten minutes": {
			mode: Lease, renewing: "bc",
			run: func(s *trackerTest) {
				s.stopRenewing("a", "b", "c")
				s.run(10 * time.Minute)
				s.startRenewing("a")
				s.run(10 * time.Second)
				s.startRenewing("b", "c")
				s.run(time.Hour)
			},
			log: []string{"1m8s unseen", "11m0s judging"},
		},
		"one member does not return after a broker outage": {
			renewing: "bc",
			run: func(s *trackerTest) {
				s.set("b", Silent)
				s.stopRenewing("a", "b", "c")
				s.run(10 * time.Minute)
				s.startRenewing("a", "c")
				s.run(time.Hour)
			},
			log: []string{"1m8s unseen", "11m0s judging", "11m20s b stale", "11m30s b dead"},
		},
		"the broker is unreachable every other minute": { // 55 s count of each minute with the broker
			renewing: "bc",
			run: func(s *trackerTest) {
				s.stopRenewing("b")
				for range 6 {
					s.stopRenewing("a", "c")
					s.run(time.Minute)
					s.startRenewing("a", "c")
					s.run(time.Minute)
				}
			},
			log: []string{
				"1m8s unseen", "2m0s judging", "2m20s b stale", "3m8s unseen", "4m0s judging", "5m8s unseen", "6m0s judging",
				"7m8s unseen", "8m0s judging", "9m8s unseen", "10m0s judging", "11m8s unseen", "12m0s judging", "12m25s b dead",
			},
		},
		"a member was late when the broker became unreachable": {
			mode: Lease, renewing: "bc",
			run: func(s *trackerTest) {
				s.stopRenewing("b")
				s.run(15 * time.Second)
				s.stopRenewing("a", "c")
				s.run(10 * time.Minute)
				s.startRenewing("a", "c")
				s.run(11 * time.Second)
				s.startRenewing("b")
				s.run(time.Hour)
			},
			log: []string{"1m23s unseen", "11m15s judging"},
		},
		"evidence ends while the broker is unreachable": { // HardTTL after the last answer, without the ten minutes away
			renewing: "bc",
			run: func(s *trackerTest) {
				s.set("b", Answering)
				s.stopRenewing("b")
				s.run(9 * time.Minute)
				s.set("b", Unknown)
				s.run(2 * time.Minute)
				s.stopRenewing("a", "c")
				s.run(10 * time.Minute)
				s.startRenewing("a", "c")
				s.run(time.Hour)
			},
			log: []string{"1m20s b stale", "12m8s unseen", "22m0s judging", "25m5s b dead"},
		},
		"all other members, one later": {
			renewing: "bc",
			run: func(s *trackerTest) {
				s.stopRenewing("b")
				s.run(30 * time.Second)
				s.stopRenewing("c")
				s.run(working)
			},
			log: []string{"1m20s b stale", "1m50s c stale", "1m50s minimum"},
		},
		"all present members are dead, and another one is live": {
			renewing: "bcd",
			run: func(s *trackerTest) {
				s.here = func(id clusterset.ClusterID) bool { return id != "d" }
				s.set("b", Silent)
				s.stopRenewing("b", "c")
				s.run(working)
			},
			log: []string{"1m20s b stale", "1m20s c stale", "1m30s b dead", "6m0s c dead"},
		},
		"all other members at once": {
			renewing: "bc",
			run: func(s *trackerTest) {
				s.set("b", Silent)
				s.set("c", Silent)
				s.stopRenewing("b", "c")
				s.run(working)
			},
			log: []string{"1m20s b stale", "1m20s c stale", "1m20s minimum"},
		},
		"all other members within twenty seconds": {
			renewing: "bcd",
			run: func(s *trackerTest) {
				for _, id := range []clusterset.ClusterID{"b", "c", "d"} {
					s.set(id, Silent)
					s.stopRenewing(id)
					s.run(5 * time.Second)
				}
				s.run(working)
			},
			log: []string{"1m20s b stale", "1m25s c stale", "1m30s d stale", "1m30s minimum"},
		},
		"all other members, one after the other": {
			renewing: "bc",
			run: func(s *trackerTest) {
				s.set("b", Silent)
				s.set("c", Silent)
				s.stopRenewing("b")
				s.run(time.Minute)
				s.stopRenewing("c")
				s.run(time.Hour)
			},
			log: []string{"1m20s b stale", "1m30s b dead", "2m20s c stale", "2m30s c dead"},
		},
		"all are dead, one returns": {
			renewing: "bc",
			run: func(s *trackerTest) {
				s.set("b", Silent)
				s.stopRenewing("b", "c")
				s.run(time.Hour)
				s.startRenewing("c")
				s.run(time.Hour)
			},
			log: []string{
				"1m20s b stale", "1m20s c stale", "1m20s minimum", "1h1m2s c live", "1h1m5s judging", "1h1m25s b dead",
			},
		},
		"all are dead, an administrator removes one": {
			renewing: "bc",
			run: func(s *trackerTest) {
				s.set("b", Silent)
				s.stopRenewing("b", "c")
				s.run(time.Hour)
				s.Forget("c")
				s.run(time.Hour)
			},
			log: []string{
				"1m20s b stale", "1m20s c stale", "1m20s minimum", "1h1m0s c live", "1h1m0s judging", "1h1m20s b dead",
			},
		},
		"all are dead, one after a time of answers without renewals": { // its endpoints fall silent with the renewals of the other
			renewing: "bc",
			run: func(s *trackerTest) {
				s.set("b", Answering)
				s.stopRenewing("b")
				s.run(10 * time.Minute)
				s.set("b", Silent)
				s.set("c", Silent)
				s.stopRenewing("c")
				s.run(working)
			},
			log: []string{"1m20s b stale", "11m20s c stale", "11m20s minimum"},
		},
		"members that are not present do not count": {
			renewing: "bc",
			run: func(s *trackerTest) {
				s.here = func(id clusterset.ClusterID) bool { return id != "c" }
				s.set("b", Silent)
				s.stopRenewing("b", "c")
				s.run(time.Hour)
			},
			log: []string{"1m20s b stale", "1m20s c stale", "1m30s b dead", "6m0s c dead"},
		},
		"our own network is down for two silent verdicts": { // 12 s: one renewal may be lost and the next one late
			renewing: "b",
			run: func(s *trackerTest) {
				s.set("b", Answering)
				s.stopRenewing("b")
				s.run(5*time.Minute + time.Second)
				s.stopRenewing("a")
				s.set("b", Silent)
				s.run(11*time.Second + 400*time.Millisecond)
				s.renew("a")
				s.run(600 * time.Millisecond)
				s.set("b", Answering)
				s.startRenewing("a")
				s.run(10 * time.Minute)
			},
			log: []string{"1m20s b stale"},
		},
		"a member that never renewed confirms no death": {
			mode: Lease, renewing: "bc",
			run: func(s *trackerTest) {
				s.stopRenewing("b")
				s.run(10 * time.Second)
				s.stopRenewing("c")
				s.run(12 * time.Second)
				s.Expect("d")
				s.run(10 * time.Second)
			},
			log: []string{"1m20s b stale", "1m30s c stale", "1m30s minimum"},
		},
		"an unproven member confirms a death": {
			renewing: "bcd",
			run: func(s *trackerTest) {
				for _, id := range []clusterset.ClusterID{"b", "c", "d"} {
					s.set(id, Silent)
				}
				for range 2 {
					s.stopRenewing("d")
					s.run(time.Minute)
					s.startRenewing("d")
					s.run(time.Second)
					s.run(4 * time.Second)
				}
				s.stopRenewing("b", "c")
				s.run(25 * time.Second)
				s.log = nil
				s.run(15 * time.Second)
			},
			log: []string{"3m38s d live", "3m40s b dead", "3m40s c dead"},
		},
		"our own network is down for nine seconds": { // b answers, and cannot reach the broker
			renewing: "bc",
			run: func(s *trackerTest) {
				s.set("b", Answering)
				s.stopRenewing("b")
				s.run(5*time.Minute + time.Second)
				s.stopRenewing("a", "c")
				s.set("b", Silent)
				s.run(9 * time.Second)
				s.startRenewing("a", "c")
				s.set("b", Answering)
				s.run(10 * time.Minute)
			},
			log: []string{"1m20s b stale"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newTrackerTest(tc.mode, self)
				defer s.stop()
				for _, id := range tc.renewing {
					s.startRenewing(clusterset.ClusterID(id))
				}
				s.warmUp()
				tc.run(s)
				if diff := cmp.Diff(tc.log, s.log); diff != "" {
					t.Errorf("log (-want +have):\n%s", diff)
				}
				for id := range s.seen {
					if s.Dead(id) != s.dead[id] {
						t.Errorf("%s: Changed was not called, and Dead is %t", id, s.Dead(id))
					}
				}
			})
		})
	}
}

// A Lease delivered again with the same renewTime is no renewal.
func TestRepeats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTrackerTest(ByEvidence, "a", "b", "c")
		defer s.stop()
		s.warmUp()
		s.stopRenewing("b")
		for range 100 {
			s.run(5 * time.Second)
			s.Renewed("b", s.last["b"])
		}
		if diff := cmp.Diff([]string{"1m20s b stale", "6m0s b dead"}, s.log); diff != "" {
			t.Errorf("log (-want +have):\n%s", diff)
		}
	})
}

// A verdict queried before a renewal is ignored.
func TestLateVerdict(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTrackerTest(ByEvidence, "a", "b", "c")
		defer s.stop()
		s.warmUp()
		s.stopRenewing("b")
		s.run(time.Minute)
		before := *s.members["b"]
		s.recordVerdict("b", Answering, time.Now().Add(-time.Hour))
		s.recordVerdict("b", Silent, time.Now().Add(-time.Hour))
		s.recordVerdict("unheard-of", Silent, time.Now())
		if after := *s.members["b"]; after.answeredAt != before.answeredAt || after.silentVerdicts != before.silentVerdicts {
			t.Errorf("the late verdict changed answeredAt, silentVerdicts from %v, %d to %v, %d", before.answeredAt, before.silentVerdicts, after.answeredAt, after.silentVerdicts)
		}
	})
}

// Verdicts from before an outage on our side are discarded.
func TestOldEvidence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTrackerTest(ByEvidence, "a", "b", "c")
		defer s.stop()
		s.warmUp()
		s.set("b", Silent)
		s.stopRenewing("b")
		s.run(28 * time.Second)
		if s.members["b"].silentVerdicts == 0 {
			t.Error("there is no evidence")
		}
		s.stopRenewing("a", "c")
		s.run(time.Minute)
		s.set("b", Unknown)
		s.renew("a")
		if m := s.members["b"]; m.silentVerdicts != 0 || !m.provenAt.IsZero() || !m.askedAt.IsZero() {
			t.Errorf("silentVerdicts %d, provenAt %v, askedAt %v remain", m.silentVerdicts, m.provenAt, m.askedAt)
		}
	})
}

// Damping doubles with each death up to the hard TTL, and a long life clears it.
func TestDampingGrows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTrackerTest(Lease, "a", "b", "c")
		defer s.stop()
		s.warmUp()
		die := func() time.Duration {
			s.stopRenewing("b")
			s.run(time.Minute)
			if !s.Dead("b") {
				t.Fatal("b does not die")
			}
			s.startRenewing("b")
			defer s.run(30 * time.Second)
			for last := s.last["b"]; s.last["b"].Equal(last); {
				s.run(time.Second)
			}
			back := time.Now()
			for s.Dead("b") {
				s.run(time.Second)
			}
			return time.Since(back)
		}
		var took []time.Duration
		for range 7 {
			took = append(took, die())
		}
		s.run(5*time.Minute + 10*time.Second)
		took = append(took, die(), die())
		const m = time.Minute
		want := []time.Duration{0, m / 2, m, 2 * m, 4 * m, 5 * m, 5 * m, 0, m / 2}
		if diff := cmp.Diff(want, took); diff != "" {
			t.Errorf("time to become live again (-want +have):\n%s", diff)
		}
	})
}

// A member that does not see its own renewals declares no member dead, neither before the first one nor if its Lease
// is only delivered again.
func TestOwnRenewals(t *testing.T) {
	for name, own := range map[string]func(s *trackerTest){
		"no lease":          func(*trackerTest) {},
		"one old lease":     func(s *trackerTest) { s.renew("a") },
		"the same for ever": func(s *trackerTest) { s.Renewed("a", s.t0) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newTrackerTest(Lease)
				defer s.stop()
				if name == "one old lease" {
					own(s)
				}
				s.renew("b")
				for range 1000 {
					if name != "one old lease" {
						own(s)
					}
					s.run(5 * time.Second)
				}
				if diff := cmp.Diff([]string{"0s unseen"}, s.log); diff != "" {
					t.Errorf("log (-want +have):\n%s", diff)
				}
			})
		})
	}
}

// A Lease that exists at the start may belong to a member that died long ago.
func TestInherited(t *testing.T) {
	for name, tc := range map[string]struct {
		present bool
		run     func(s *trackerTest)
		log     []string
	}{
		"not present, renews": {
			run: func(s *trackerTest) { s.startRenewing("b"); s.run(time.Minute) },
			log: []string{"0s b unproven", "0s unseen", "1s b live", "5s judging"},
		},
		"not present, dead": {
			run: func(s *trackerTest) { s.run(time.Hour) },
			log: []string{"0s b unproven", "0s unseen", "5s judging", "35s b dead"},
		},
		"present, renews": {
			present: true,
			run:     func(s *trackerTest) { s.startRenewing("b"); s.run(time.Minute) },
			log:     []string{"0s unseen", "5s judging"},
		},
		"present, dead": {
			present: true,
			run:     func(s *trackerTest) { s.run(time.Hour) },
			log:     []string{"0s unseen", "5s judging", "25s b stale", "35s b dead"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newTrackerTest(ByEvidence, "a", "c")
				defer s.stop()
				s.here = func(id clusterset.ClusterID) bool { return id != "b" || tc.present }
				s.set("b", Silent)
				s.Renewed("b", s.t0.Add(-24*time.Hour))
				tc.run(s)
				if diff := cmp.Diff(tc.log, s.log); diff != "" {
					t.Errorf("log (-want +have):\n%s", diff)
				}
				if s.calls == 0 {
					t.Error("Changed was not called")
				}
			})
		})
	}
}

// A member that joins later is live from its first Lease on, whether it is present or not.
func TestNewMember(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTrackerTest(ByEvidence, "a", "c")
		defer s.stop()
		s.here = func(id clusterset.ClusterID) bool { return id != "b" }
		s.warmUp()
		s.Expect("b")
		s.startRenewing("b")
		s.run(time.Minute)
		if len(s.log) > 0 {
			t.Errorf("the log is %q", s.log)
		}
	})
}

// A member whose Lease was never seen.
func TestNeverLeased(t *testing.T) {
	for name, tc := range map[string]struct {
		mode     Mode
		expected bool
		says     Verdict
		log      []string
	}{
		"answers":         {expected: true, says: Answering, log: []string{"1m20s b stale"}},
		"is silent":       {expected: true, says: Silent, log: []string{"1m20s b stale", "6m0s b dead"}},
		"is unknown":      {expected: true, says: Unknown, log: []string{"1m20s b stale", "6m0s b dead"}},
		"lease mode":      {expected: true, mode: Lease, says: Answering, log: []string{"1m20s b stale", "6m0s b dead"}},
		"is not expected": {says: Silent},
		"confirms no death and needs no confirmation": {says: Unknown},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newTrackerTest(tc.mode, "a", "c")
				defer s.stop()
				s.warmUp()
				s.set("b", tc.says)
				if tc.expected {
					s.Expect("a")
					s.Expect("b")
				}
				s.run(30 * time.Minute)
				s.Expect("b")
				if !tc.expected {
					s.stopRenewing("c")
					s.set("c", Silent)
				}
				s.run(2 * time.Minute)
				if !tc.expected {
					tc.log = []string{"31m20s b stale", "31m20s c stale", "31m30s c dead"}
				}
				if diff := cmp.Diff(tc.log, s.log); diff != "" {
					t.Errorf("log (-want +have):\n%s", diff)
				}
			})
		})
	}
}

// A deleted Lease changes no state; Forget removes the member.
func TestLeaseDeletedAndForget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTrackerTest(ByEvidence, "a", "b", "c")
		defer s.stop()
		s.warmUp()
		s.LeaseDeleted("b")
		s.run(time.Minute)
		s.stopRenewing("b")
		s.LeaseDeleted("b")
		s.LeaseDeleted("unheard-of")
		s.run(10 * time.Minute)
		s.Forget("b")
		s.Forget("unheard-of")
		s.logChanges()
		if diff := cmp.Diff([]string{"2m20s b stale", "7m0s b dead", "12m0s b live"}, s.log); diff != "" {
			t.Errorf("log (-want +have):\n%s", diff)
		}
	})
}

func TestState(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTrackerTest(ByEvidence, "a", "b", "c")
		defer s.stop()
		s.warmUp()
		s.stopRenewing("b")
		s.Expect("a")
		s.run(time.Hour)
		for id, want := range map[clusterset.ClusterID]struct {
			state State
			since time.Time
		}{"a": {state: Live}, "b": {Dead, s.t0.Add(6 * time.Minute)}, "c": {state: Live}, "unheard-of": {state: Live}} {
			if state, since := s.State(id); state != want.state || !since.Equal(want.since) {
				t.Errorf("%s is %v since %v, want %v since %v", id, state, since, want.state, want.since)
			}
		}
	})
}

// Only stale members are queried, every five seconds, many of them concurrently.
func TestQueries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTrackerTest(ByEvidence, "a", "b", "c")
		defer s.stop()
		s.warmUp()
		s.run(time.Hour)
		if len(s.asked) > 0 {
			t.Errorf("live members were queried: %v", s.asked)
		}
		for i := range 100 {
			s.Renewed(clusterset.ClusterID(fmt.Sprint("m", i)), s.t0)
		}
		s.stopRenewing("b")
		s.run(4*time.Minute + time.Second)
		for id, n := range s.asked {
			if id == "c" || n < 44 || n > 45 {
				t.Errorf("%d queries about %s", n, id)
			}
		}
		if len(s.asked) != 101 {
			t.Errorf("queries about %d members, want 101", len(s.asked))
		}
		s.run(10 * time.Minute)
		clear(s.asked)
		s.run(time.Hour)
		if len(s.asked) > 0 {
			t.Errorf("dead members were queried: %v", s.asked)
		}
		s.stopRenewing("c")
		s.run(time.Minute)
		if s.asked["c"] == 0 {
			t.Error("not asked about the stale")
		}
		s.stopRenewing("a")
		s.run(13 * time.Second)
		clear(s.asked)
		s.run(time.Hour)
		if len(s.asked) > 0 {
			t.Errorf("queries while judging is paused: %v", s.asked)
		}
	})
}

// The offset is that of the fastest recent renewal, with any clock.
func TestOffset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTrackerTest(ByEvidence, "a")
		defer s.stop()
		s.run(10 * time.Second)
		if d, ok := s.Offset("b"); ok {
			t.Errorf("the offset of an unknown member is %v", d)
		}
		for _, tc := range []struct {
			transit []time.Duration
			behind  time.Duration // b's clock
			want    time.Duration
		}{
			{[]time.Duration{30, 10, 20}, 0, 10},
			{[]time.Duration{30, 40, 20}, 0, 10},
			{slices.Repeat([]time.Duration{40}, offsetSamples), 0, 40},
			{[]time.Duration{50}, -time.Hour, 50 - time.Hour}, // an hour ahead
			{slices.Repeat([]time.Duration{70}, offsetSamples), time.Hour, 70 + time.Hour},
		} {
			for _, d := range tc.transit {
				s.run(time.Second)
				s.Renewed("b", time.Now().Add(-tc.behind-d).Round(0))
			}
			if d, ok := s.Offset("b"); !ok || d != tc.want {
				t.Errorf("offset is %v, want %v", d, tc.want)
			}
		}
		s.Forget("b")
		if d, ok := s.Offset("b"); ok {
			t.Errorf("the offset of a forgotten member is %v", d)
		}
	})
}

// An old Lease yields no offset.
func TestOffsetIsNotInherited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTrackerTest(ByEvidence, "a")
		defer s.stop()
		s.Renewed("b", s.t0.Add(-24*time.Hour))
		if d, ok := s.Offset("b"); ok {
			t.Errorf("offset is %v", d)
		}
	})
}

// value returns the value of a metric for a source and a state, and whether it exists.
func value(t *testing.T, name, source string, state State) (float64, bool) {
	t.Helper()
	families, err := metrics.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			labels := ""
			for _, l := range m.GetLabel() {
				labels += l.GetValue() + " "
			}
			if f.GetName() == "isthmus_controller_"+name && (labels == "" || labels == fmt.Sprintf("%s %s ", source, state)) {
				return m.GetGauge().GetValue() + m.GetCounter().GetValue(), true
			}
		}
	}
	return 0, false
}

func TestMetrics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTrackerTest(Lease, "a", "b", "c")
		defer s.stop()
		s.warmUp()
		before, _ := value(t, "member_transitions_total", "b", Dead)
		check := func(when string, want map[string]float64) {
			t.Helper()
			have := map[string]float64{}
			for state := Live; state <= Dead; state++ {
				have[state.String()], _ = value(t, "member_state", "b", state)
			}
			n, _ := value(t, "member_transitions_total", "b", Dead)
			have["deaths"] = n - before
			have["heartbeat"], _ = value(t, "heartbeat_seen", "", 0)
			have["minimum"], _ = value(t, "minimum_live", "", 0)
			for name, v := range have {
				if v == 0 {
					delete(have, name)
				}
			}
			if diff := cmp.Diff(want, have); diff != "" {
				t.Errorf("%s (-want +have):\n%s", when, diff)
			}
		}
		check("all members renew", map[string]float64{"live": 1, "heartbeat": 1})
		s.stopRenewing("b")
		s.run(time.Minute)
		check("dead", map[string]float64{"dead": 1, "deaths": 1, "heartbeat": 1})
		s.startRenewing("b")
		s.run(time.Minute)
		s.stopRenewing("b", "c")
		s.run(time.Minute)
		check("on the minimum", map[string]float64{"stale": 1, "deaths": 1, "heartbeat": 1, "minimum": 1})
		s.startRenewing("b", "c")
		s.run(time.Minute)
		s.stopRenewing("a")
		s.run(time.Minute)
		check("own lease unseen", map[string]float64{"live": 1, "deaths": 1})
		s.Forget("b")
		if v, ok := value(t, "member_state", "b", Live); ok {
			t.Errorf("a forgotten member still has a state: %v", v)
		}
	})
}

// event is an event of the watch or of the dataplane.
type event struct {
	after time.Duration
	id    clusterset.ClusterID
	what  string // renew, again (the same Lease), gone, expect, forget, or a verdict
}

func events(ids ...clusterset.ClusterID) *rapid.Generator[[]event] {
	return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) event {
		return event{
			after: rapid.SampledFrom([]time.Duration{0, time.Second, 4 * time.Second, 5 * time.Second, 6 * time.Second, 30 * time.Second, 90 * time.Second}).Draw(t, "after"),
			id:    rapid.SampledFrom(ids).Draw(t, "id"),
			what:  rapid.SampledFrom([]string{"renew", "renew", "renew", "again", "gone", "expect", "forget", "silent", "silent", "answering"}).Draw(t, "what"),
		}
	}), 1, 40)
}

// apply applies an event.
func (s *trackerTest) apply(e event) {
	s.run(e.after)
	switch e.what {
	case "renew":
		s.renew(e.id)
	case "again":
		if last, ok := s.last[e.id]; ok {
			s.Renewed(e.id, last)
		}
	case "gone":
		s.LeaseDeleted(e.id)
	case "expect":
		s.Expect(e.id)
	case "forget":
		s.Forget(e.id)
		delete(s.dead, e.id)
	case "silent":
		s.set(e.id, Silent)
	case "answering":
		s.set(e.id, Answering)
	}
	s.logChanges()
}

var modes = rapid.SampledFrom([]Mode{ByEvidence, Lease})

// No member dies while our own renewals do not come back.
func TestNoDeathWithoutOwnRenewals(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		mode, all := modes.Draw(rt, "mode"), events("b", "c", "d").Draw(rt, "events")
		lease := rapid.Bool().Draw(rt, "an old lease of our own")
		rapid.SyncTest(rt, func(rt *rapid.T) {
			s := newTrackerTest(mode)
			defer s.stop()
			for _, id := range []clusterset.ClusterID{"b", "c", "d"} {
				s.set(id, Silent)
			}
			for _, e := range all {
				if lease {
					s.Renewed(self, s.t0)
				}
				s.apply(e)
				for id, state := range s.seen {
					if state != Live {
						rt.Fatalf("after %v: %s is %v", e, id, state)
					}
				}
			}
		})
	})
}

// The clocks of members do not affect the result.
func TestClocksDoNotMatter(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		mode, all := modes.Draw(rt, "mode"), events("a", "a", "a", "b", "c").Draw(rt, "events")
		// Whole seconds, like everything else: otherwise a clock set back could repeat a renewTime.
		skews := rapid.SliceOfN(rapid.Int64Range(-360_000, 360_000), len(all), len(all)).Draw(rt, "skews")
		one := rapid.Bool().Draw(rt, "one skew for ever")
		transitions := func(skewed bool) (log []string) {
			rapid.SyncTest(rt, func(*rapid.T) {
				s := newTrackerTest(mode, "a", "b", "c")
				defer s.stop()
				for i, e := range all {
					if skewed && (i == 0 || !one) {
						s.skew[e.id] = time.Duration(skews[i]) * time.Second
					}
					s.apply(e)
				}
				s.stopRenewing("b")
				s.run(10 * time.Minute)
				log = s.log
			})
			return log
		}
		if diff := cmp.Diff(transitions(false), transitions(true)); diff != "" {
			rt.Fatalf("transitions with true and skewed clocks:\n%s", diff)
		}
	})
}

// A member that renews often enough is never stale, whatever the others and our own renewals do.
func TestRenewingMemberStaysLive(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		mode, all := modes.Draw(rt, "mode"), events("a", "a", "b", "c").Draw(rt, "events")
		own := rapid.Bool().Draw(rt, "our own heartbeat returns")
		rapid.SyncTest(rt, func(rt *rapid.T) {
			s := newTrackerTest(mode, "b", "d")
			defer s.stop()
			if own {
				s.startRenewing(self)
			}
			for _, e := range all {
				s.apply(e)
				if state, _ := s.State("d"); state != Live {
					rt.Fatalf("after %v: d is %v", e, state)
				}
			}
		})
	})
}

// When all other members fall silent at once, none of them dies, whatever the evidence and whichever were silent, dead or
// unexpected before.
func TestMinimumLiveHolds(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		mode, all := modes.Draw(rt, "mode"), events("b", "c", "d").Draw(rt, "events")
		rapid.SyncTest(rt, func(rt *rapid.T) {
			s := newTrackerTest(mode, "a", "b", "c", "d")
			defer s.stop()
			for _, e := range all[:len(all)/2] {
				s.apply(e)
			}
			s.run(10 * time.Minute) // long enough for every member to be live again
			s.stopRenewing("b", "c", "d")
			for _, e := range all[len(all)/2:] {
				if !slices.Contains([]string{"renew", "forget"}, e.what) {
					s.apply(e)
				}
			}
			s.run(time.Hour)
			for id, state := range s.seen {
				if state != Stale {
					rt.Fatalf("%s is %v\n%s", id, state, strings.Join(s.log, "\n"))
				}
			}
		})
	})
}

// Changed receives every change of Dead, and a member that died was silent for Stale.
func TestChanged(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		mode, all := modes.Draw(rt, "mode"), events("a", "b", "b", "c", "d").Draw(rt, "events")
		rapid.SyncTest(rt, func(rt *rapid.T) {
			s := newTrackerTest(mode, "a", "c")
			defer s.stop()
			for _, e := range all {
				s.apply(e)
				for id, state := range s.seen {
					if s.Dead(id) != s.dead[id] {
						rt.Fatalf("after %v: %s is %v, and Changed was not called", e, id, state)
					}
				}
			}
		})
	})
}
