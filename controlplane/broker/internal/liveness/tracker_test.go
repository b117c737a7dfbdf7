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

// dataplane is evidence that says what it is told: an answer comes at once, a silence after two seconds.
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

func (d *dataplane) say(id clusterset.ClusterID, v Verdict) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.says[id] = v
}

// sky is a Tracker, what it sees, and what it made of that. Everybody in beats renews every five seconds, this
// member at 0 s, b at 1 s, c at 2 s and so on.
type sky struct {
	*Tracker
	dataplane
	t0    time.Time
	beats map[clusterset.ClusterID]bool
	skew  map[clusterset.ClusterID]time.Duration // of clocks
	last  map[clusterset.ClusterID]time.Time     // renewal
	seen  map[clusterset.ClusterID]State
	told  []string                           // "1m20s b stale"
	calls int                                // of Changed
	dead  map[clusterset.ClusterID]bool      // as whoever listens to Changed thinks
	here  func(id clusterset.ClusterID) bool // Config.Present
	doubt error
	stop  func()

	renewals time.Duration
}

// newSky starts a Tracker in a synctest bubble. It must be stopped.
func newSky(mode Mode, beating ...clusterset.ClusterID) *sky {
	s := &sky{
		t0: time.Now(), beats: map[clusterset.ClusterID]bool{}, skew: map[clusterset.ClusterID]time.Duration{},
		last: map[clusterset.ClusterID]time.Time{}, seen: map[clusterset.ClusterID]State{}, dead: map[clusterset.ClusterID]bool{},
		here:      func(clusterset.ClusterID) bool { return true },
		dataplane: dataplane{says: map[clusterset.ClusterID]Verdict{}, asked: map[clusterset.ClusterID]int{}},
	}
	s.beat(beating...)
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

func (s *sky) beat(ids ...clusterset.ClusterID) {
	for _, id := range ids {
		s.beats[id] = true
	}
}

func (s *sky) silence(ids ...clusterset.ClusterID) {
	for _, id := range ids {
		delete(s.beats, id)
	}
}

// renew says that a Lease was renewed just now.
func (s *sky) renew(id clusterset.ClusterID) {
	s.renewals++ // no two renewals say the same time
	s.last[id] = time.Now().Add(s.skew[id] + s.renewals)
	s.Renewed(id, s.last[id])
}

// run lets time pass, in steps of a second.
func (s *sky) run(d time.Duration) {
	for end := time.Now().Add(d); time.Now().Before(end); {
		at := time.Since(s.t0)
		for _, id := range slices.Sorted(maps.Keys(s.beats)) {
			if phase := time.Duration(id[0]-'a') * time.Second; (at-phase)%DefaultTimes().Renew == 0 {
				s.renew(id)
			}
		}
		s.look()
		<-time.After(min(time.Second, time.Until(end)))
		s.look()
	}
}

// look notes what changed.
func (s *sky) look() {
	synctest.Wait()
	at := time.Since(s.t0)
	for _, id := range []clusterset.ClusterID{"b", "c", "d"} {
		if state, _ := s.State(id); state != s.seen[id] {
			s.seen[id] = state
			s.told = append(s.told, fmt.Sprintf("%v %s %v", at, id, state))
		}
	}
	if doubt := s.Doubt(); !errors.Is(doubt, s.doubt) {
		s.doubt = doubt
		switch {
		case errors.Is(doubt, ErrFloor):
			s.told = append(s.told, fmt.Sprintf("%v floor", at))
		case errors.Is(doubt, ErrBlind):
			s.told = append(s.told, fmt.Sprintf("%v blind", at))
		default:
			s.told = append(s.told, fmt.Sprintf("%v sure", at))
		}
	}
}

// warm lets a minute pass in which all is well, and forgets what was told of it.
func (s *sky) warm() {
	s.run(time.Minute)
	s.told = nil
}

func TestJudgement(t *testing.T) {
	const working = 8 * time.Hour
	for name, tc := range map[string]struct {
		mode    Mode
		beating string // beside a
		run     func(s *sky)
		told    []string
	}{
		"all is well": {
			beating: "bc",
			run: func(s *sky) {
				s.say("b", Silent)
				s.run(time.Hour)
			},
		},
		"dead traffic ends it": { // last renewed at 56 s
			beating: "bc",
			run: func(s *sky) {
				s.say("b", Silent)
				s.silence("b")
				s.run(time.Hour)
			},
			told: []string{"1m20s b stale", "1m30s b dead"},
		},
		"dead traffic ends the other one of two": {
			beating: "b",
			run: func(s *sky) {
				s.say("b", Silent)
				s.silence("b")
				s.run(time.Hour)
			},
			told: []string{"1m20s b stale", "1m30s b dead"},
		},
		"nothing is known of its traffic": {
			beating: "bc",
			run: func(s *sky) {
				s.silence("b")
				s.run(time.Hour)
			},
			told: []string{"1m20s b stale", "6m0s b dead"},
		},
		"it serves and does not renew": {
			beating: "bc",
			run: func(s *sky) {
				s.say("b", Answering)
				s.silence("b")
				s.run(59 * time.Minute)
			},
			told: []string{"1m20s b stale"},
		},
		"it serves and does not renew for an hour": {
			beating: "bc",
			run: func(s *sky) {
				s.say("b", Answering)
				s.silence("b")
				s.run(2 * time.Hour)
			},
			told: []string{"1m20s b stale", "1h1m0s b dead"},
		},
		"its traffic dies later": {
			beating: "bc",
			run: func(s *sky) {
				s.say("b", Answering)
				s.silence("b")
				s.run(9 * time.Minute) // asked at 10m0s, and next at 10m5s
				s.say("b", Silent)
				s.run(time.Minute)
			},
			told: []string{"1m20s b stale", "10m15s b dead"},
		},
		"nothing is known any more of its traffic": {
			beating: "bc",
			run: func(s *sky) {
				s.say("b", Answering)
				s.silence("b")
				s.run(9 * time.Minute) // answered at 10m0s
				s.say("b", Unknown)
				s.run(time.Hour)
			},
			told: []string{"1m20s b stale", "15m0s b dead"},
		},
		"silences that are not in a row": {
			beating: "bc",
			run: func(s *sky) {
				s.silence("b")
				for _, other := range []Verdict{Unknown, Answering, Unknown} {
					for range 8 {
						s.say("b", Silent)
						s.run(5 * time.Second)
						s.say("b", other)
						s.run(5 * time.Second)
					}
				}
			},
			told: []string{"1m20s b stale"},
		},
		"one silence each time that it is stale": { // it renews six seconds after it became so, asked twice by then
			beating: "bc",
			run: func(s *sky) {
				s.say("b", Silent)
				s.silence("b")
				s.run(26 * time.Second)
				for range 3 {
					s.renew("b")
					s.run(30 * time.Second)
				}
			},
			told: []string{
				"1m20s b stale", "1m26s b live", "1m50s b stale", "1m56s b live", "2m20s b stale", "2m26s b live", "2m50s b stale",
			},
		},
		"one silence is none": {
			beating: "bc",
			run: func(s *sky) {
				s.silence("b")
				s.say("b", Silent)
				s.run(23 * time.Second)
				s.say("b", Answering)
				s.run(time.Minute)
				s.say("b", Silent)
				s.run(3 * time.Second)
				s.say("b", Unknown)
				s.run(2 * time.Minute)
			},
			told: []string{"1m20s b stale"},
		},
		"it comes back in time": {
			beating: "bc",
			run: func(s *sky) {
				s.say("b", Silent)
				s.silence("b")
				s.run(26 * time.Second)
				s.beat("b")
				s.run(time.Minute)
			},
			told: []string{"1m20s b stale", "1m26s b live"},
		},
		"it dies and returns": {
			beating: "bc",
			run: func(s *sky) {
				s.say("b", Silent)
				s.silence("b")
				s.run(time.Minute)
				s.beat("b")
				s.run(time.Hour)
			},
			told: []string{"1m20s b stale", "1m30s b dead", "2m1s b live"},
		},
		"an old lease is enough": {
			mode: Lease, beating: "bc",
			run: func(s *sky) {
				s.say("b", Answering)
				s.silence("b")
				s.run(time.Hour)
			},
			told: []string{"1m20s b stale", "1m25s b dead"},
		},
		"an old lease is enough for the other one of two": {
			mode: Lease, beating: "b",
			run: func(s *sky) {
				s.silence("b")
				s.run(time.Hour)
			},
			told: []string{"1m20s b dead"},
		},
		"flapping every five seconds": {
			mode: Lease, beating: "bc",
			run: func(s *sky) {
				for range 100 {
					s.silence("b")
					s.run(5 * time.Second)
					s.beat("b")
					s.run(5 * time.Second)
				}
			},
		},
		"flapping every half minute is damped": {
			mode: Lease, beating: "bc",
			run: func(s *sky) {
				for range 4 {
					s.silence("b")
					s.run(30 * time.Second)
					s.beat("b")
					s.run(30 * time.Second)
				}
				s.run(time.Minute)
			},
			told: []string{
				"1m20s b stale", "1m25s b dead", "1m31s b live",
				"2m20s b stale", "2m25s b dead", "2m31s b unproven",
				"3m20s b dead", "3m31s b unproven",
				"4m20s b dead", "4m31s b unproven", "5m1s b live",
			},
		},
		"the broker is away for ten minutes": {
			mode: Lease, beating: "bc",
			run: func(s *sky) {
				s.silence("a", "b", "c")
				s.run(10 * time.Minute)
				s.beat("a")
				s.run(10 * time.Second)
				s.beat("b", "c")
				s.run(time.Hour)
			},
			told: []string{"1m8s blind", "11m0s sure"},
		},
		"the broker is away and one member does not return": {
			beating: "bc",
			run: func(s *sky) {
				s.say("b", Silent)
				s.silence("a", "b", "c")
				s.run(10 * time.Minute)
				s.beat("a", "c")
				s.run(time.Hour)
			},
			told: []string{"1m8s blind", "11m0s sure", "11m20s b stale", "11m30s b dead"},
		},
		"away every other minute": { // of each minute that the broker is there, 55 s count
			beating: "bc",
			run: func(s *sky) {
				s.silence("b")
				for range 6 {
					s.silence("a", "c")
					s.run(time.Minute)
					s.beat("a", "c")
					s.run(time.Minute)
				}
			},
			told: []string{
				"1m8s blind", "2m0s sure", "2m20s b stale", "3m8s blind", "4m0s sure", "5m8s blind", "6m0s sure",
				"7m8s blind", "8m0s sure", "9m8s blind", "10m0s sure", "11m8s blind", "12m0s sure", "12m25s b dead",
			},
		},
		"one was late when the broker went away": {
			mode: Lease, beating: "bc",
			run: func(s *sky) {
				s.silence("b")
				s.run(15 * time.Second)
				s.silence("a", "c")
				s.run(10 * time.Minute)
				s.beat("a", "c")
				s.run(11 * time.Second)
				s.beat("b")
				s.run(time.Hour)
			},
			told: []string{"1m23s blind", "11m15s sure"},
		},
		"nothing can be known while the broker is away": { // five minutes after it answered, and ten that do not count
			beating: "bc",
			run: func(s *sky) {
				s.say("b", Answering)
				s.silence("b")
				s.run(9 * time.Minute)
				s.say("b", Unknown)
				s.run(2 * time.Minute)
				s.silence("a", "c")
				s.run(10 * time.Minute)
				s.beat("a", "c")
				s.run(time.Hour)
			},
			told: []string{"1m20s b stale", "12m8s blind", "22m0s sure", "25m5s b dead"},
		},
		"all other members, one later": {
			beating: "bc",
			run: func(s *sky) {
				s.silence("b")
				s.run(30 * time.Second)
				s.silence("c")
				s.run(working)
			},
			told: []string{"1m20s b stale", "1m50s c stale", "1m50s floor"},
		},
		"all that are used are gone, and another one lives": {
			beating: "bcd",
			run: func(s *sky) {
				s.here = func(id clusterset.ClusterID) bool { return id != "d" }
				s.say("b", Silent)
				s.silence("b", "c")
				s.run(working)
			},
			told: []string{"1m20s b stale", "1m20s c stale", "1m30s b dead", "6m0s c dead"},
		},
		"all other members at once": {
			beating: "bc",
			run: func(s *sky) {
				s.say("b", Silent)
				s.say("c", Silent)
				s.silence("b", "c")
				s.run(working)
			},
			told: []string{"1m20s b stale", "1m20s c stale", "1m20s floor"},
		},
		"all other members within twenty seconds": {
			beating: "bcd",
			run: func(s *sky) {
				for _, id := range []clusterset.ClusterID{"b", "c", "d"} {
					s.say(id, Silent)
					s.silence(id)
					s.run(5 * time.Second)
				}
				s.run(working)
			},
			told: []string{"1m20s b stale", "1m25s c stale", "1m30s d stale", "1m30s floor"},
		},
		"one after the other": {
			beating: "bc",
			run: func(s *sky) {
				s.say("b", Silent)
				s.say("c", Silent)
				s.silence("b")
				s.run(time.Minute)
				s.silence("c")
				s.run(time.Hour)
			},
			told: []string{"1m20s b stale", "1m30s b dead", "2m20s c stale", "2m30s c dead"},
		},
		"all are gone, then one is back": {
			beating: "bc",
			run: func(s *sky) {
				s.say("b", Silent)
				s.silence("b", "c")
				s.run(time.Hour)
				s.beat("c")
				s.run(time.Hour)
			},
			told: []string{
				"1m20s b stale", "1m20s c stale", "1m20s floor", "1h1m2s c live", "1h1m5s sure", "1h1m25s b dead",
			},
		},
		"all are gone, then a person removes one": {
			beating: "bc",
			run: func(s *sky) {
				s.say("b", Silent)
				s.silence("b", "c")
				s.run(time.Hour)
				s.Forget("c")
				s.run(time.Hour)
			},
			told: []string{
				"1m20s b stale", "1m20s c stale", "1m20s floor", "1h1m0s c live", "1h1m0s sure", "1h1m20s b dead",
			},
		},
		"all are gone while one only serves": { // its endpoints fall silent together with everybody's renewals
			beating: "bc",
			run: func(s *sky) {
				s.say("b", Answering)
				s.silence("b")
				s.run(10 * time.Minute)
				s.say("b", Silent)
				s.say("c", Silent)
				s.silence("c")
				s.run(working)
			},
			told: []string{"1m20s b stale", "11m20s c stale", "11m20s floor"},
		},
		"those with nothing here do not count": {
			beating: "bc",
			run: func(s *sky) {
				s.here = func(id clusterset.ClusterID) bool { return id != "c" }
				s.say("b", Silent)
				s.silence("b", "c")
				s.run(time.Hour)
			},
			told: []string{"1m20s b stale", "1m20s c stale", "1m30s b dead", "6m0s c dead"},
		},
		"our own network is away for two silences": { // twelve seconds and a bit, which may be one lost heartbeat and a late one
			beating: "b",
			run: func(s *sky) {
				s.say("b", Answering)
				s.silence("b")
				s.run(5*time.Minute + time.Second)
				s.silence("a")
				s.say("b", Silent)
				s.run(11*time.Second + 400*time.Millisecond)
				s.renew("a")
				s.run(600 * time.Millisecond)
				s.say("b", Answering)
				s.beat("a")
				s.run(10 * time.Minute)
			},
			told: []string{"1m20s b stale"},
		},
		"somebody who was never heard is no witness": {
			mode: Lease, beating: "bc",
			run: func(s *sky) {
				s.silence("b")
				s.run(10 * time.Second)
				s.silence("c")
				s.run(12 * time.Second)
				s.Expect("d")
				s.run(10 * time.Second)
			},
			told: []string{"1m20s b stale", "1m30s c stale", "1m30s floor"},
		},
		"somebody who is not proven yet is a witness": {
			beating: "bcd",
			run: func(s *sky) {
				for _, id := range []clusterset.ClusterID{"b", "c", "d"} {
					s.say(id, Silent)
				}
				for range 2 {
					s.silence("d")
					s.run(time.Minute)
					s.beat("d")
					s.run(time.Second)
					s.run(4 * time.Second)
				}
				s.silence("b", "c")
				s.run(25 * time.Second)
				s.told = nil
				s.run(15 * time.Second)
			},
			told: []string{"3m38s d live", "3m40s b dead", "3m40s c dead"},
		},
		"our own network blinks": { // b serves, and cannot reach the broker; we cannot reach anything for nine seconds
			beating: "bc",
			run: func(s *sky) {
				s.say("b", Answering)
				s.silence("b")
				s.run(5*time.Minute + time.Second)
				s.silence("a", "c")
				s.say("b", Silent)
				s.run(9 * time.Second)
				s.beat("a", "c")
				s.say("b", Answering)
				s.run(10 * time.Minute)
			},
			told: []string{"1m20s b stale"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newSky(tc.mode, self)
				defer s.stop()
				for _, id := range tc.beating {
					s.beat(clusterset.ClusterID(id))
				}
				s.warm()
				tc.run(s)
				if diff := cmp.Diff(tc.told, s.told); diff != "" {
					t.Errorf("told (-want +have):\n%s", diff)
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

// A Lease that the watch brings again, with the time it had, is no renewal.
func TestRepeats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSky(ByEvidence, "a", "b", "c")
		defer s.stop()
		s.warm()
		s.silence("b")
		for range 100 {
			s.run(5 * time.Second)
			s.Renewed("b", s.last["b"])
		}
		if diff := cmp.Diff([]string{"1m20s b stale", "6m0s b dead"}, s.told); diff != "" {
			t.Errorf("told (-want +have):\n%s", diff)
		}
	})
}

// A verdict that was asked for before something changed says nothing.
func TestLateVerdict(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSky(ByEvidence, "a", "b", "c")
		defer s.stop()
		s.warm()
		s.silence("b")
		s.run(time.Minute)
		before := *s.members["b"]
		s.weigh("b", Answering, time.Now().Add(-time.Hour))
		s.weigh("b", Silent, time.Now().Add(-time.Hour))
		s.weigh("unheard-of", Silent, time.Now())
		if after := *s.members["b"]; after.answered != before.answered || after.silences != before.silences {
			t.Errorf("it was answered %v and silent %d times, and is now: %v, %d", before.answered, before.silences, after.answered, after.silences)
		}
	})
}

// What evidence said before we lost sight of everything is not held against anybody.
func TestOldEvidence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSky(ByEvidence, "a", "b", "c")
		defer s.stop()
		s.warm()
		s.say("b", Silent)
		s.silence("b")
		s.run(28 * time.Second)
		if s.members["b"].silences == 0 {
			t.Error("there is no evidence")
		}
		s.silence("a", "c")
		s.run(time.Minute)
		s.say("b", Unknown)
		s.renew("a")
		if m := s.members["b"]; m.silences != 0 || !m.convicted.IsZero() || !m.asked.IsZero() {
			t.Errorf("it was silent %d times, convicted %v, asked %v", m.silences, m.convicted, m.asked)
		}
	})
}

// Each death costs twice as much, up to the hard TTL, and a long life makes up for all.
func TestDampingGrows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSky(Lease, "a", "b", "c")
		defer s.stop()
		s.warm()
		die := func() time.Duration {
			s.silence("b")
			s.run(time.Minute)
			if !s.Dead("b") {
				t.Fatal("b does not die")
			}
			s.beat("b")
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
			t.Errorf("it took to be believed again (-want +have):\n%s", diff)
		}
	})
}

// Whoever does not see his own heartbeat return judges nobody: neither before it ever did, nor if it only says
// what it said before.
func TestOwnHeartbeat(t *testing.T) {
	for name, own := range map[string]func(s *sky){
		"no lease":          func(*sky) {},
		"one old lease":     func(s *sky) { s.renew("a") },
		"the same for ever": func(s *sky) { s.Renewed("a", s.t0) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newSky(Lease)
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
				if diff := cmp.Diff([]string{"0s blind"}, s.told); diff != "" {
					t.Errorf("told (-want +have):\n%s", diff)
				}
			})
		})
	}
}

// A Lease that was there at first may be of a member that died long ago.
func TestInherited(t *testing.T) {
	for name, tc := range map[string]struct {
		present bool
		run     func(s *sky)
		told    []string
	}{
		"nothing of it is here, and it lives": {
			run:  func(s *sky) { s.beat("b"); s.run(time.Minute) },
			told: []string{"0s b unproven", "0s blind", "1s b live", "5s sure"},
		},
		"nothing of it is here, and it is dead": {
			run:  func(s *sky) { s.run(time.Hour) },
			told: []string{"0s b unproven", "0s blind", "5s sure", "35s b dead"},
		},
		"it is used here, and lives": {
			present: true,
			run:     func(s *sky) { s.beat("b"); s.run(time.Minute) },
			told:    []string{"0s blind", "5s sure"},
		},
		"it is used here, and is dead": {
			present: true,
			run:     func(s *sky) { s.run(time.Hour) },
			told:    []string{"0s blind", "5s sure", "25s b stale", "35s b dead"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newSky(ByEvidence, "a", "c")
				defer s.stop()
				s.here = func(id clusterset.ClusterID) bool { return id != "b" || tc.present }
				s.say("b", Silent)
				s.Renewed("b", s.t0.Add(-24*time.Hour))
				tc.run(s)
				if diff := cmp.Diff(tc.told, s.told); diff != "" {
					t.Errorf("told (-want +have):\n%s", diff)
				}
				if s.calls == 0 {
					t.Error("Changed was not called")
				}
			})
		})
	}
}

// A member that joins while we watch is live from its first Lease on, whether something of it is here or not.
func TestNewMember(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSky(ByEvidence, "a", "c")
		defer s.stop()
		s.here = func(id clusterset.ClusterID) bool { return id != "b" }
		s.warm()
		s.Expect("b")
		s.beat("b")
		s.run(time.Minute)
		if len(s.told) > 0 {
			t.Errorf("told %q", s.told)
		}
	})
}

// Members of which no Lease was ever seen.
func TestNeverLeased(t *testing.T) {
	for name, tc := range map[string]struct {
		mode     Mode
		expected bool
		says     Verdict
		told     []string
	}{
		"serves":                        {expected: true, says: Answering, told: []string{"1m20s b stale"}},
		"is silent":                     {expected: true, says: Silent, told: []string{"1m20s b stale", "6m0s b dead"}},
		"is unknown":                    {expected: true, says: Unknown, told: []string{"1m20s b stale", "6m0s b dead"}},
		"by leases alone":               {expected: true, mode: Lease, says: Answering, told: []string{"1m20s b stale", "6m0s b dead"}},
		"is not expected":               {says: Silent},
		"is no witness nor needs to be": {says: Unknown},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newSky(tc.mode, "a", "c")
				defer s.stop()
				s.warm()
				s.say("b", tc.says)
				if tc.expected {
					s.Expect("a")
					s.Expect("b")
				}
				s.run(30 * time.Minute)
				s.Expect("b")
				if !tc.expected {
					s.silence("c")
					s.say("c", Silent)
				}
				s.run(2 * time.Minute)
				if !tc.expected {
					tc.told = []string{"31m20s b stale", "31m20s c stale", "31m30s c dead"}
				}
				if diff := cmp.Diff(tc.told, s.told); diff != "" {
					t.Errorf("told (-want +have):\n%s", diff)
				}
			})
		})
	}
}

// A Lease that vanishes says nothing, and a person's word says all.
func TestGoneAndForget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSky(ByEvidence, "a", "b", "c")
		defer s.stop()
		s.warm()
		s.Gone("b")
		s.run(time.Minute)
		s.silence("b")
		s.Gone("b")
		s.Gone("unheard-of")
		s.run(10 * time.Minute)
		s.Forget("b")
		s.Forget("unheard-of")
		s.look()
		if diff := cmp.Diff([]string{"2m20s b stale", "7m0s b dead", "12m0s b live"}, s.told); diff != "" {
			t.Errorf("told (-want +have):\n%s", diff)
		}
	})
}

func TestState(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSky(ByEvidence, "a", "b", "c")
		defer s.stop()
		s.warm()
		s.silence("b")
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

// Evidence is asked about stale members alone, every five seconds, and about many of them at once.
func TestAsking(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSky(ByEvidence, "a", "b", "c")
		defer s.stop()
		s.warm()
		s.run(time.Hour)
		if len(s.asked) > 0 {
			t.Errorf("asked about the living: %v", s.asked)
		}
		for i := range 100 {
			s.Renewed(clusterset.ClusterID(fmt.Sprint("m", i)), s.t0)
		}
		s.silence("b")
		s.run(4*time.Minute + time.Second)
		for id, n := range s.asked {
			if id == "c" || n < 44 || n > 45 {
				t.Errorf("asked %d times about %s", n, id)
			}
		}
		if len(s.asked) != 101 {
			t.Errorf("asked about %d members, want 101", len(s.asked))
		}
		s.run(10 * time.Minute)
		clear(s.asked)
		s.run(time.Hour)
		if len(s.asked) > 0 {
			t.Errorf("asked about the dead: %v", s.asked)
		}
		s.silence("c")
		s.run(time.Minute)
		if s.asked["c"] == 0 {
			t.Error("not asked about the stale")
		}
		s.silence("a")
		s.run(13 * time.Second)
		clear(s.asked)
		s.run(time.Hour)
		if len(s.asked) > 0 {
			t.Errorf("asked while nobody is judged: %v", s.asked)
		}
	})
}

// The offset is that of the fastest renewal lately, whatever the clocks.
func TestOffset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSky(ByEvidence, "a")
		defer s.stop()
		s.run(10 * time.Second)
		if d, ok := s.Offset("b"); ok {
			t.Errorf("the offset of a member that was never heard is %v", d)
		}
		for _, tc := range []struct {
			transit []time.Duration
			behind  time.Duration // b's clock
			want    time.Duration
		}{
			{[]time.Duration{30, 10, 20}, 0, 10},
			{[]time.Duration{30, 40, 20}, 0, 10},
			{slices.Repeat([]time.Duration{40}, samples), 0, 40},
			{[]time.Duration{50}, -time.Hour, 50 - time.Hour}, // an hour ahead
			{slices.Repeat([]time.Duration{70}, samples), time.Hour, 70 + time.Hour},
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

// A Lease of long ago teaches nothing about a clock.
func TestOffsetIsNotInherited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSky(ByEvidence, "a")
		defer s.stop()
		s.Renewed("b", s.t0.Add(-24*time.Hour))
		if d, ok := s.Offset("b"); ok {
			t.Errorf("offset is %v", d)
		}
	})
}

// value returns the value of a metric of a source and a state, and whether there is one.
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
		s := newSky(Lease, "a", "b", "c")
		defer s.stop()
		s.warm()
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
			have["floor"], _ = value(t, "liveness_floor", "", 0)
			for name, v := range have {
				if v == 0 {
					delete(have, name)
				}
			}
			if diff := cmp.Diff(want, have); diff != "" {
				t.Errorf("%s (-want +have):\n%s", when, diff)
			}
		}
		check("all is well", map[string]float64{"live": 1, "heartbeat": 1})
		s.silence("b")
		s.run(time.Minute)
		check("dead", map[string]float64{"dead": 1, "deaths": 1, "heartbeat": 1})
		s.beat("b")
		s.run(time.Minute)
		s.silence("b", "c")
		s.run(time.Minute)
		check("on the floor", map[string]float64{"stale": 1, "deaths": 1, "heartbeat": 1, "floor": 1})
		s.beat("b", "c")
		s.run(time.Minute)
		s.silence("a")
		s.run(time.Minute)
		check("blind", map[string]float64{"live": 1, "deaths": 1})
		s.Forget("b")
		if v, ok := value(t, "member_state", "b", Live); ok {
			t.Errorf("a forgotten member still has a state: %v", v)
		}
	})
}

// event is something that the watch brings, or that a dataplane learns.
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

// see lets an event happen.
func (s *sky) see(e event) {
	s.run(e.after)
	switch e.what {
	case "renew":
		s.renew(e.id)
	case "again":
		if last, ok := s.last[e.id]; ok {
			s.Renewed(e.id, last)
		}
	case "gone":
		s.Gone(e.id)
	case "expect":
		s.Expect(e.id)
	case "forget":
		s.Forget(e.id)
		delete(s.dead, e.id)
	case "silent":
		s.say(e.id, Silent)
	case "answering":
		s.say(e.id, Answering)
	}
	s.look()
}

var modes = rapid.SampledFrom([]Mode{ByEvidence, Lease})

// While our own heartbeat does not return, nothing makes anybody dead.
func TestTheBlindKillNobody(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		mode, all := modes.Draw(rt, "mode"), events("b", "c", "d").Draw(rt, "events")
		lease := rapid.Bool().Draw(rt, "an old lease of our own")
		rapid.SyncTest(rt, func(rt *rapid.T) {
			s := newSky(mode)
			defer s.stop()
			for _, id := range []clusterset.ClusterID{"b", "c", "d"} {
				s.say(id, Silent)
			}
			for _, e := range all {
				if lease {
					s.Renewed(self, s.t0)
				}
				s.see(e)
				for id, state := range s.seen {
					if state != Live {
						rt.Fatalf("after %v: %s is %v", e, id, state)
					}
				}
			}
		})
	})
}

// Whatever the clocks of members say, and however they are set, judgement is the same.
func TestClocksDoNotMatter(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		mode, all := modes.Draw(rt, "mode"), events("a", "a", "a", "b", "c").Draw(rt, "events")
		// Of whole seconds, as all else is: else a clock that is set back could say the same time twice.
		skews := rapid.SliceOfN(rapid.Int64Range(-360_000, 360_000), len(all), len(all)).Draw(rt, "skews")
		one := rapid.Bool().Draw(rt, "one skew for ever")
		told := func(skewed bool) (told []string) {
			rapid.SyncTest(rt, func(*rapid.T) {
				s := newSky(mode, "a", "b", "c")
				defer s.stop()
				for i, e := range all {
					if skewed && (i == 0 || !one) {
						s.skew[e.id] = time.Duration(skews[i]) * time.Second
					}
					s.see(e)
				}
				s.silence("b")
				s.run(10 * time.Minute)
				told = s.told
			})
			return told
		}
		if diff := cmp.Diff(told(false), told(true)); diff != "" {
			rt.Fatalf("told with true clocks and with others:\n%s", diff)
		}
	})
}

// Whoever renews often enough is never even stale, whatever the others and our own heartbeat do.
func TestTheLivingLive(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		mode, all := modes.Draw(rt, "mode"), events("a", "a", "b", "c").Draw(rt, "events")
		own := rapid.Bool().Draw(rt, "our own heartbeat returns")
		rapid.SyncTest(rt, func(rt *rapid.T) {
			s := newSky(mode, "b", "d")
			defer s.stop()
			if own {
				s.beat(self)
			}
			for _, e := range all {
				s.see(e)
				if state, _ := s.State("d"); state != Live {
					rt.Fatalf("after %v: d is %v", e, state)
				}
			}
		})
	})
}

// When all others fall silent at once, none of them dies, whatever evidence says and whoever was silent, dead or
// unexpected before.
func TestTheFloorHolds(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		mode, all := modes.Draw(rt, "mode"), events("b", "c", "d").Draw(rt, "events")
		rapid.SyncTest(rt, func(rt *rapid.T) {
			s := newSky(mode, "a", "b", "c", "d")
			defer s.stop()
			for _, e := range all[:len(all)/2] {
				s.see(e)
			}
			s.run(10 * time.Minute) // long enough for everybody to be live again
			s.silence("b", "c", "d")
			for _, e := range all[len(all)/2:] {
				if !slices.Contains([]string{"renew", "forget"}, e.what) {
					s.see(e)
				}
			}
			s.run(time.Hour)
			for id, state := range s.seen {
				if state != Stale {
					rt.Fatalf("%s is %v\n%s", id, state, strings.Join(s.told, "\n"))
				}
			}
		})
	})
}

// Changed is told everything that Dead says anew, and whoever died was silent for Stale.
func TestChanged(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		mode, all := modes.Draw(rt, "mode"), events("a", "b", "b", "c", "d").Draw(rt, "events")
		rapid.SyncTest(rt, func(rt *rapid.T) {
			s := newSky(mode, "a", "c")
			defer s.stop()
			for _, e := range all {
				s.see(e)
				for id, state := range s.seen {
					if s.Dead(id) != s.dead[id] {
						rt.Fatalf("after %v: %s is %v, and Changed was not called", e, id, state)
					}
				}
			}
		})
	})
}
