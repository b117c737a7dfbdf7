// Package withdrawal decides whether a disappearance is believed.
//
// What a member offers may vanish for two reasons: the member took it back, or something went wrong on the
// way (an empty list, a wiped broker, objects restored from yesterday). The first says so, by a tombstone; the
// second does not, and then much vanishes at once. So goes in what each source offers, takes back and loses,
// and comes out what must stay as it is for now. Nothing else is asked: no network, no Kubernetes.
//
// # The rules
//
//   - What a source takes back openly ([Guard.Withdrew], [Guard.Forget]) is believed at once.
//   - What vanishes without a word ([Guard.Lost]) is kept until its source has lost nothing more for
//     Config.Window, but for ten windows at most: that is one step. A list that came back short is one step,
//     and so is somebody who deletes a hundred objects one after the other.
//   - What turned out to have vanished while nobody looked ([Guard.Missed]) is kept for Config.Grace at least:
//     most of what was lost may be back already, and its source about to offer the rest again.
//   - At the end of a step all that vanished in it is judged together. If what the source lost without a word
//     is at least Config.Least and more than Config.Share of what it had, the step is held; else it is
//     believed.
//   - "Lost" counts everything that vanished without a word within Config.Memory and is not back, believed
//     or not. Else a wipe that takes a Service every two seconds would pass one step at a time.
//   - "What it had" is that, and what it offers still and offered before the step began. What comes in the
//     same step does not count: a list in which ten names were replaced by ten others has lost ten of ten.
//     A source that is new here is an exception for one window, because all it has came just now.
//   - What is held stays until it is offered again, taken back, released by a person ([Guard.Release]), its
//     source is forgotten, or Config.HoldFor is over. As long as anything is held, the share is one of what
//     the source had when the hold began, so that a source which offers something new meanwhile does not
//     talk the guard into believing the rest.
//
// From this follows, for a source that offers nothing new: whatever the order and pace in which its keys
// vanish within Memory, never more of them are believed gone than Share of all, or Least-1 if that is more.
//
// # When in doubt
//
// The guard errs towards keeping: a hold costs entries that answer no more, which liveness and dataplane find
// by themselves, while believing a wipe costs every connection. It forgets all when its owner ends; whoever
// begins anew tells it first what was there (Has for everything that is imported already) and then what is
// missing (Missed), and comes to the same hold with a new HoldFor.
package withdrawal

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// The defaults of Config.
const (
	defaultWindow  = time.Second
	defaultGrace   = 30 * time.Second
	defaultMemory  = 5 * time.Minute
	defaultHoldFor = time.Hour
	defaultLeast   = 5
	defaultShare   = 0.5
)

// maxStep is how many windows a step may last while more and more vanishes.
const maxStep = 10

// The times of a Config, before a drill scales them.
const (
	Window  = time.Second
	Grace   = 30 * time.Second // who publishes anew after a fault of an API server does so within seconds
	Memory  = 5 * time.Minute
	HoldFor = time.Hour
)

// Config says what is believed. Zero fields get their defaults; Changed, Decided and Log may be nil.
type Config[K comparable] struct {
	Window  time.Duration // how long nothing more must vanish before a step is judged; Window
	Grace   time.Duration // how long a source has to offer again what vanished while nobody looked; Grace
	Memory  time.Duration // for how long a silent loss counts towards Least and Share; Memory
	HoldFor time.Duration // how long a step is held at most; HoldFor
	Least   int           // how many must have vanished for a hold; 5
	Share   float64       // of what share more must have vanished for a hold, in [0, 1); 0.5

	// Changed is told the keys, in no order, for which Keeps turned false otherwise than by Has: what the
	// caller left alone may go now, if it is still gone. It may name a key that is offered again meanwhile.
	Changed func(source clusterset.ClusterID, keys []K)
	// Decided is told every judgement about silent losses and every end of a hold: for events and conditions.
	Decided func(Decision)
	Log     *slog.Logger
	// Release is the command by which a person ends a hold, for the log; isthmusctl release-hold.
	Release string
}

// Validate reports all that is wrong with c. Zero is right everywhere.
func (c Config[K]) Validate() error {
	var errs []error
	for field, d := range map[string]time.Duration{"window": c.Window, "grace": c.Grace, "memory": c.Memory, "hold time": c.HoldFor} {
		if d < 0 {
			errs = append(errs, fmt.Errorf("guard config: %s %v is negative", field, d))
		}
	}
	if c.Least < 0 {
		errs = append(errs, fmt.Errorf("guard config: least number %d is negative", c.Least))
	}
	if c.Share < 0 || c.Share >= 1 {
		errs = append(errs, fmt.Errorf("guard config: share %v is not in [0, 1)", c.Share))
	}
	return errors.Join(errs...)
}

// Outcome is what became of losses.
type Outcome int

// The outcomes.
const (
	Believed Outcome = iota // a step was too small to doubt
	Held                    // a step was held, or one more joined what is held
	Settled                 // a hold ended because all of it was offered again or taken back
	Released                // a person ended a hold
	Expired                 // what was held for HoldFor is believed
	Left                    // the source of a hold left the ClusterSet
)

// String returns one lower-case word.
func (o Outcome) String() string {
	return [...]string{"believed", "held", "settled", "released", "expired", "left"}[o]
}

// Decision is a judgement, or the end of one.
type Decision struct {
	Source  clusterset.ClusterID
	Outcome Outcome
	Count   int       // Believed, Released, Expired, Left: how many are believed gone by this. Held: how many are held now
	Of      int       // of how many that the source had; for the end of a hold, when it began
	Since   time.Time // when the hold began; zero for Believed
}

// Hold is what is held of one source.
type Hold struct {
	Source clusterset.ClusterID
	Count  int // held now
	Of     int // what the source had when the hold began
	Since  time.Time
}

// Guard remembers what sources offer. Its methods may be called from any goroutine and never wait for
// Changed, Decided or a timer. Nothing is judged unless Run runs; until then everything is kept.
type Guard[K comparable] struct {
	cfg  Config[K]
	wake chan struct{} // holds a token while there is something for Run to do

	mu      sync.Mutex
	sources map[clusterset.ClusterID]*source[K]
	freed   map[clusterset.ClusterID]map[K]struct{} // for Changed
	decided []Decision                              // for Decided
}

// New returns a guard that knows of nothing. The config must be valid.
func New[K comparable](cfg Config[K]) *Guard[K] {
	cfg.Window = cmp.Or(cfg.Window, defaultWindow)
	cfg.Grace = cmp.Or(cfg.Grace, defaultGrace)
	cfg.Memory = cmp.Or(cfg.Memory, defaultMemory)
	cfg.HoldFor = cmp.Or(cfg.HoldFor, defaultHoldFor)
	cfg.Least = cmp.Or(cfg.Least, defaultLeast)
	cfg.Share = cmp.Or(cfg.Share, defaultShare)
	if cfg.Changed == nil {
		cfg.Changed = func(clusterset.ClusterID, []K) {}
	}
	if cfg.Decided == nil {
		cfg.Decided = func(Decision) {}
	}
	cfg.Release = cmp.Or(cfg.Release, "isthmusctl release-hold")
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Guard[K]{
		cfg:     cfg,
		wake:    make(chan struct{}, 1),
		sources: map[clusterset.ClusterID]*source[K]{},
		freed:   map[clusterset.ClusterID]map[K]struct{}{},
	}
}

// Has says that a source offers a key. Saying it again changes nothing; saying it of a lost one ends all
// doubt about that one.
func (g *Guard[K]) Has(id clusterset.ClusterID, key K) {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now()
	s := g.sources[id]
	if s == nil {
		s = newSource[K](now)
		g.sources[id] = s
	}
	s.has(key, now)
	g.endIfEmpty(id, s)
}

// Withdrew says that a source took a key back openly. It is believed at once, also of a key that was lost
// before. A key that nobody offers may be withdrawn.
func (g *Guard[K]) Withdrew(id clusterset.ClusterID, key K) {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.sources[id]
	if s == nil {
		return
	}
	if s.withdrew(key) {
		g.free(id, key)
	}
	g.endIfEmpty(id, s)
}

// Lost says that a key vanished while it still said something. A key that was never offered, or was
// withdrawn, cannot be lost.
func (g *Guard[K]) Lost(id clusterset.ClusterID, key K) { g.lose(id, key, 0) }

// Missed says that a key turned out to have vanished while nobody looked: before the owner of the guard began,
// or while it had no connection. It is Lost, but not judged before Config.Grace is over.
func (g *Guard[K]) Missed(id clusterset.ClusterID, key K) { g.lose(id, key, g.cfg.Grace) }

func (g *Guard[K]) lose(id clusterset.ClusterID, key K, grace time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now()
	if s := g.sources[id]; s != nil && s.lose(key, now, now.Add(grace)) {
		g.wakeRun()
	}
}

// Keeps reports whether a key is lost and its loss not believed, or not yet: the caller must leave alone
// what it has of it.
func (g *Guard[K]) Keeps(id clusterset.ClusterID, key K) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.sources[id]
	if s == nil {
		return false
	}
	l, ok := s.lost[key]
	return ok && l.fate != believed
}

// Release ends the hold of a source on the word of a person: all that it lost is believed, a step that is
// not over yet included. What it loses later is judged anew. Without a hold, nothing changes.
func (g *Guard[K]) Release(id clusterset.ClusterID) {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.sources[id]
	if s == nil || s.hold == nil {
		return
	}
	g.decide(Decision{Source: id, Outcome: Released, Count: s.kept(), Of: s.hold.of, Since: s.hold.since})
	g.freeAll(id, s, func(l loss) bool { return l.fate != believed })
	for key := range s.lost {
		s.drop(key)
	}
	s.hold = nil
}

// Forget says that a source left the ClusterSet: all that it offered is believed gone.
func (g *Guard[K]) Forget(id clusterset.ClusterID) {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.sources[id]
	if s == nil {
		return
	}
	if s.hold != nil {
		g.decide(Decision{Source: id, Outcome: Left, Count: s.kept(), Of: s.hold.of, Since: s.hold.since})
	}
	g.freeAll(id, s, func(l loss) bool { return l.fate != believed })
	delete(g.sources, id)
	g.wakeRun() // the gauge
}

// Holds returns what is held, sorted by source.
func (g *Guard[K]) Holds() []Hold {
	g.mu.Lock()
	defer g.mu.Unlock()
	var all []Hold
	for id, s := range g.sources {
		if s.hold != nil {
			all = append(all, Hold{Source: id, Count: s.count[held], Of: s.hold.of, Since: s.hold.since})
		}
	}
	slices.SortFunc(all, func(a, b Hold) int { return cmp.Compare(a.Source, b.Source) })
	return all
}

// endIfEmpty ends a hold of which nothing is left. g.mu is held.
func (g *Guard[K]) endIfEmpty(id clusterset.ClusterID, s *source[K]) {
	if s.hold == nil {
		return
	}
	if s.count[held] > 0 {
		g.wakeRun() // the gauge
		return
	}
	g.decide(Decision{Source: id, Outcome: Settled, Of: s.hold.of, Since: s.hold.since})
	s.hold = nil
}

// free notes for Changed that a key is kept no more, decide a decision for Decided; both wake Run. g.mu is
// held.
func (g *Guard[K]) free(id clusterset.ClusterID, key K) {
	if g.freed[id] == nil {
		g.freed[id] = map[K]struct{}{}
	}
	g.freed[id][key] = struct{}{}
	g.wakeRun()
}

func (g *Guard[K]) decide(d Decision) {
	g.decided = append(g.decided, d)
	g.wakeRun()
}

// freeAll frees the lost keys of a source that which chooses, and returns how many. It leaves s as it is.
func (g *Guard[K]) freeAll(id clusterset.ClusterID, s *source[K], which func(loss) bool) int {
	n := 0
	for key, l := range s.lost {
		if which(l) {
			g.free(id, key)
			n++
		}
	}
	return n
}

func (g *Guard[K]) wakeRun() {
	select {
	case g.wake <- struct{}{}:
	default: // there is a token already
	}
}

// Run judges, and calls Changed and Decided, until ctx ends; then it returns nil. Both are called by Run's
// goroutine alone, one at a time, without a lock, Changed before Decided. It may run on a replica that does
// not lead; else that replica judges at its first moment as one step what vanished since it began.
func (g *Guard[K]) Run(ctx context.Context) error {
	shown := gauge{}
	defer shown.show(nil)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-g.wake:
		case <-timer.C:
		}
		freed, decided, holding, next := g.judge(time.Now())
		shown.show(holding)
		for id, keys := range freed {
			g.cfg.Changed(id, keys)
		}
		for _, d := range decided {
			g.log(d)
			g.cfg.Decided(d)
		}
		timer.Stop()
		if next > 0 {
			timer.Reset(next)
		}
	}
}

// judge judges all steps that are over and all holds that last too long. It returns what Run must tell and
// show, and after how long it must look again; zero means when it is woken.
func (g *Guard[K]) judge(now time.Time) (freed map[clusterset.ClusterID][]K, decided []Decision, holding map[clusterset.ClusterID]int, next time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	holding = map[clusterset.ClusterID]int{}
	for id, s := range g.sources {
		g.expire(id, s, now)
		if end := s.stepEnds(g.cfg.Window); !end.IsZero() && !end.After(now) {
			g.judgeStep(id, s, now)
		}
		if s.hold != nil {
			holding[id] = s.count[held]
		}
		if due := s.due(g.cfg.Window, g.cfg.HoldFor); !due.IsZero() && (next == 0 || due.Sub(now) < next) {
			next = max(due.Sub(now), 1)
		}
	}
	freed = map[clusterset.ClusterID][]K{}
	for id, keys := range g.freed {
		for key := range keys {
			freed[id] = append(freed[id], key)
		}
	}
	clear(g.freed)
	decided, g.decided = g.decided, nil
	return freed, decided, holding, next
}

// expire believes what was held for long enough, and forgets losses that count no more. g.mu is held.
func (g *Guard[K]) expire(id clusterset.ClusterID, s *source[K], now time.Time) {
	overdue := func(l loss) bool { return l.fate == held && now.Sub(l.at) >= g.cfg.HoldFor }
	n := g.freeAll(id, s, overdue)
	for key, l := range s.lost {
		if overdue(l) || l.fate == believed && now.Sub(l.at) >= g.cfg.Memory {
			s.drop(key)
		}
	}
	if n == 0 {
		return
	}
	g.decide(Decision{Source: id, Outcome: Expired, Count: n, Of: s.hold.of, Since: s.hold.since})
	if s.count[held] == 0 {
		s.hold = nil
	}
}

// judgeStep ends the step of a source: what vanished in it is held or believed. g.mu is held.
func (g *Guard[K]) judgeStep(id clusterset.ClusterID, s *source[K], now time.Time) {
	waits := func(l loss) bool { return l.fate == waiting }
	lost, of := len(s.lost), len(s.lost)+s.settled(g.cfg.Window)
	if s.hold != nil {
		of = s.hold.of
	}
	s.began = time.Time{}
	if lost < g.cfg.Least || float64(lost) <= g.cfg.Share*float64(of) {
		if n := g.freeAll(id, s, waits); n > 0 { // else all of it is back
			s.turn(waiting, believed, now)
			g.decide(Decision{Source: id, Outcome: Believed, Count: n, Of: of})
		}
		return
	}
	n := s.turn(waiting, held, now)
	if n == 0 {
		return
	}
	if s.hold == nil {
		s.hold = &hold{of: of, since: now}
	}
	withdrawalsHeld.WithLabelValues(string(id)).Add(float64(n))
	g.decide(Decision{Source: id, Outcome: Held, Count: s.count[held], Of: of, Since: s.hold.since})
}

// log says what a person may want to know of a decision.
func (g *Guard[K]) log(d Decision) {
	log := g.cfg.Log.With("peer", string(d.Source), "count", d.Count, "of", d.Of)
	switch d.Outcome {
	case Believed:
		log.Info("services vanished without a word, few enough to be believed")
	case Held:
		log.Error("services of a member vanished at once and without a word; what is imported of them stays until they are back, "+
			"the member leaves, or somebody runs "+g.cfg.Release, "until", d.Since.Add(g.cfg.HoldFor))
	case Settled:
		log.Info("services that had vanished are back, or were taken back openly")
	case Released:
		log.Info("a person released services that had vanished; they are believed gone")
	case Expired:
		log.Warn("services that vanished without a word did not come back; they are believed gone")
	case Left:
		log.Info("the member of services that had vanished left")
	}
}
