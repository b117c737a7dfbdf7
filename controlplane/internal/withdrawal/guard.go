// Package withdrawal protects imported Services from accidental mass withdrawal: a [Guard] decides whether something
// that vanished is accepted as gone or held.
//
// For example, member "east" exports 100 Services. When a person unexports one, east leaves a tombstone and the import
// goes at once. When a mistake wipes the broker, all 100 records vanish without a tombstone; the Guard holds them, and
// clients in the other members keep their connections.
//
// A caller reports what each source (a member cluster) offers, withdraws and loses, and asks what to keep. The package
// uses neither the network nor Kubernetes.
//
// # The rules
//
//   - A key that a source withdraws explicitly ([Guard.Withdrawn], [Guard.Forget]) is gone at once.
//   - A key that vanishes without a tombstone ([Guard.Vanished]) is kept until its source has lost nothing more for
//     Times.Window, but for ten windows at most: that is one step. A list that came back short is one step, and so
//     are a hundred objects deleted one after the other.
//   - A key that vanished while nothing watched ([Guard.VanishedUnseen]) is kept for Times.Grace at least: most of the
//     lost keys may be back already, and the source may be about to offer the rest again.
//   - The end of a step judges all that vanished in it together. The step is held if the source lost at least
//     Config.Least keys and more than Config.Share of what it had; else it is accepted.
//   - The count of lost keys includes every key that vanished without a tombstone within Times.Memory and is not
//     back, whether accepted or not. Otherwise a wipe that removes a Service every two seconds would pass one step at
//     a time.
//   - A source had those keys, plus what it still offers and already offered before the step began. Keys that arrive
//     during the step do not count: a list in which ten names were replaced by ten others has lost ten of ten. The
//     first window of a new source is an exception, because all of its keys have just arrived.
//   - A held key stays until it is offered again, is withdrawn, a person releases it ([Guard.Release]), its source states
//     what it offers ([Guard.Confirm]) or is forgotten, or Times.HoldFor has passed. During a hold the share is one of what the source had when the hold
//     began, so that new offers cannot shrink the share until the Guard accepts the rest.
//
// It follows for a source that offers nothing new: whatever the order and pace in which its keys vanish within
// Times.Memory, never more of them are accepted as gone than Config.Share of all, or Config.Least-1 if that is more.
//
// # When in doubt
//
// The Guard errs towards keeping. A wrong hold costs entries that no longer answer, which liveness and dataplanes find
// by themselves; a wrong withdrawal costs every connection. A Guard keeps its state in memory only. After a restart
// its caller reports first everything that was imported (Offered), then what is missing (VanishedUnseen), and arrives
// at the same hold with a new HoldFor.
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
	"github.com/isthmus-net/isthmus/controlplane/clusterset/signal"
	"github.com/isthmus-net/isthmus/controlplane/internal/timescale"
)

// The defaults of Config.
const (
	defaultLeast   = 5
	defaultShare   = 0.5
	defaultMost    = 100_000
	defaultRelease = "isthmusctl release-hold"
)

// maxStep is how many windows a step may last while more and more keys vanish.
const maxStep = 10

// Times are the timers of a Guard.
type Times struct {
	Window  time.Duration // a step ends when nothing more has vanished for this long
	Grace   time.Duration // a source has this long to offer again what vanished unseen
	Memory  time.Duration // a key lost without a tombstone counts towards Least and Share for this long
	HoldFor time.Duration // a step is held for at most this long
}

// DefaultTimes returns the times of a production Guard. Grace is 30 s because a member that publishes anew after a
// fault of an API server does so within seconds.
func DefaultTimes() Times {
	return Times{Window: time.Second, Grace: 30 * time.Second, Memory: 5 * time.Minute, HoldFor: time.Hour}
}

// Scale returns t multiplied by f.
func (t Times) Scale(f timescale.Factor) Times {
	return Times{Window: f.Scale(t.Window), Grace: f.Scale(t.Grace), Memory: f.Scale(t.Memory), HoldFor: f.Scale(t.HoldFor)}
}

// Config configures a Guard. Zero fields get their defaults; Changed, Decided and Log may be nil.
type Config[K comparable] struct {
	Times // the defaults are DefaultTimes

	Least int     // a hold needs at least this many lost keys; 5
	Share float64 // a hold needs more than this share of the source's keys lost, in [0, 1); 0.5
	// Most bounds the lost keys that a Guard remembers of one source: a key lost beyond it is gone at once. Only a source
	// that offers and loses new names without end gets there. The default is 100,000.
	Most int

	// Changed receives the keys, in no order, for which Keeps turned false otherwise than by Offered: the caller may
	// now remove what it kept of them, if they are still gone. A key may have been offered again meanwhile.
	Changed func(source clusterset.ClusterID, keys []K)
	// Decided receives every judgement of a step and every end of a hold, for events and conditions.
	Decided func(Decision)
	Log     *slog.Logger
	// Release is the command that ends a hold, for the log; isthmusctl release-hold.
	Release string
}

// Validate reports every fault of c. Zero fields are valid.
func (c Config[K]) Validate() error {
	var errs []error
	for field, d := range map[string]time.Duration{"window": c.Window, "grace": c.Grace, "memory": c.Memory, "hold time": c.HoldFor} {
		if d < 0 {
			errs = append(errs, fmt.Errorf("guard config: %s %v is negative", field, d))
		}
	}
	if c.Least < 0 {
		errs = append(errs, fmt.Errorf("guard config: least count %d is negative", c.Least))
	}
	if c.Most < 0 {
		errs = append(errs, fmt.Errorf("guard config: bound %d of lost keys is negative", c.Most))
	}
	if c.Share < 0 || c.Share >= 1 {
		errs = append(errs, fmt.Errorf("guard config: share %v is not in [0, 1)", c.Share))
	}
	return errors.Join(errs...)
}

// Outcome is the result of a judgement, or the reason why a hold ended.
type Outcome int

// The outcomes.
const (
	Accepted  Outcome = iota // a step was too small to be an accident
	Held                     // a step was held, or its keys joined a hold
	Resolved                 // a hold ended because every key was offered again or withdrawn
	Released                 // a person ended a hold
	Expired                  // a hold lasted HoldFor
	Left                     // the source of a hold left the ClusterSet
	Confirmed                // the source of a hold stated that it offers what it offers and no more
)

// String returns one lower-case word.
func (o Outcome) String() string {
	return [...]string{"accepted", "held", "resolved", "released", "expired", "left", "confirmed"}[o]
}

// Decision reports a judgement, or the end of a hold.
type Decision struct {
	Source  clusterset.ClusterID
	Outcome Outcome
	Count   int       // Held: the keys held now. Accepted, Released, Expired, Left, Confirmed: the keys accepted as gone by this
	Of      int       // the keys that the source had; for the end of a hold, when the hold began
	Since   time.Time // the beginning of the hold; zero for Accepted
}

// Hold describes the held keys of one source.
type Hold struct {
	Source clusterset.ClusterID
	Count  int // held now
	Of     int // the keys that the source had when the hold began
	Since  time.Time
}

// Guard tracks what sources offer. Any goroutine may call its methods, which never wait for Changed, Decided or a
// timer. Until Run runs, it judges nothing and keeps everything.
type Guard[K comparable] struct {
	cfg  Config[K]
	wake signal.Signal // Run has work

	mu      sync.Mutex
	sources map[clusterset.ClusterID]*source[K]
	freed   map[clusterset.ClusterID]map[K]struct{} // for Changed
	decided []Decision                              // for Decided
}

// New returns a Guard that knows no source. The config must be valid.
func New[K comparable](cfg Config[K]) *Guard[K] {
	times := DefaultTimes()
	cfg.Window = cmp.Or(cfg.Window, times.Window)
	cfg.Grace = cmp.Or(cfg.Grace, times.Grace)
	cfg.Memory = cmp.Or(cfg.Memory, times.Memory)
	cfg.HoldFor = cmp.Or(cfg.HoldFor, times.HoldFor)
	cfg.Least = cmp.Or(cfg.Least, defaultLeast)
	cfg.Share = cmp.Or(cfg.Share, defaultShare)
	cfg.Most = cmp.Or(cfg.Most, defaultMost)
	if cfg.Changed == nil {
		cfg.Changed = func(clusterset.ClusterID, []K) {}
	}
	if cfg.Decided == nil {
		cfg.Decided = func(Decision) {}
	}
	cfg.Release = cmp.Or(cfg.Release, defaultRelease)
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Guard[K]{
		cfg:     cfg,
		wake:    signal.New(),
		sources: map[clusterset.ClusterID]*source[K]{},
		freed:   map[clusterset.ClusterID]map[K]struct{}{},
	}
}

// Offered records that a source offers a key. A repeated call changes nothing; a lost key is no longer lost.
func (g *Guard[K]) Offered(id clusterset.ClusterID, key K) {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now()
	s := g.sources[id]
	if s == nil {
		s = newSource[K](now)
		g.sources[id] = s
	}
	s.offer(key, now)
	g.endIfEmpty(id, s)
}

// Withdrawn records that a source withdrew a key explicitly. The key is gone at once, also if it was lost before. A
// key that is not offered may be withdrawn.
func (g *Guard[K]) Withdrawn(id clusterset.ClusterID, key K) {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.sources[id]
	if s == nil {
		return
	}
	if s.withdraw(key) {
		g.free(id, key)
	}
	g.endIfEmpty(id, s)
}

// Vanished records that a key vanished without a tombstone. It ignores a key that was never offered or was withdrawn.
func (g *Guard[K]) Vanished(id clusterset.ClusterID, key K) { g.lose(id, key, 0) }

// VanishedUnseen records that a key vanished while nothing watched: before the process started, or while it had no
// connection. It is Vanished, but the step is not judged before Times.Grace has passed.
func (g *Guard[K]) VanishedUnseen(id clusterset.ClusterID, key K) { g.lose(id, key, g.cfg.Grace) }

func (g *Guard[K]) lose(id clusterset.ClusterID, key K, grace time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.sources[id]
	if s == nil {
		return
	}
	if _, offered := s.offered[key]; offered && len(s.lost) >= g.cfg.Most {
		delete(s.offered, key)
		g.free(id, key)
		return
	}
	if now := time.Now(); s.lose(key, now, now.Add(grace)) {
		g.wake.Notify()
	}
}

// Keeps reports whether a key vanished and is held or not judged yet: the caller must leave what it has of the key.
func (g *Guard[K]) Keeps(id clusterset.ClusterID, key K) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.sources[id]
	if s == nil {
		return false
	}
	l, ok := s.lost[key]
	return ok && l.fate != accepted
}

// Release ends the hold of a source on a person's request: all its lost keys are gone, including those of a step that
// is not over. Keys that vanish later are judged anew. Without a hold it does nothing.
func (g *Guard[K]) Release(id clusterset.ClusterID) {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.sources[id]
	if s == nil || s.hold == nil {
		return
	}
	g.accept(id, s, Released)
}

// Confirm records that a source itself has stated, since it lost its last key, that it offers what it still offers and nothing
// else. All its lost keys are gone, held or not. Keys that vanish later are judged anew.
func (g *Guard[K]) Confirm(id clusterset.ClusterID) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if s := g.sources[id]; s != nil && s.kept() > 0 {
		g.accept(id, s, Confirmed)
	}
}

// accept accepts all lost keys of a source as gone and ends its hold. g.mu is held.
func (g *Guard[K]) accept(id clusterset.ClusterID, s *source[K], why Outcome) {
	if s.hold != nil {
		g.decide(Decision{Source: id, Outcome: why, Count: s.kept(), Of: s.hold.of, Since: s.hold.since})
	}
	g.freeAll(id, s, func(l loss) bool { return l.fate != accepted })
	for key := range s.lost {
		s.drop(key)
	}
	s.hold = nil
}

// Forget records that a source left the ClusterSet: all that it offered is gone.
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
	g.freeAll(id, s, func(l loss) bool { return l.fate != accepted })
	delete(g.sources, id)
	g.wake.Notify() // the gauge
}

// Holds returns the current holds, sorted by source.
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

// endIfEmpty ends a hold that holds no key any more. g.mu is held.
func (g *Guard[K]) endIfEmpty(id clusterset.ClusterID, s *source[K]) {
	if s.hold == nil {
		return
	}
	if s.count[held] > 0 {
		g.wake.Notify() // the gauge
		return
	}
	g.decide(Decision{Source: id, Outcome: Resolved, Of: s.hold.of, Since: s.hold.since})
	s.hold = nil
}

// free queues a key that is no longer kept for Changed, and decide queues a decision for Decided. Both wake Run. g.mu
// is held.
func (g *Guard[K]) free(id clusterset.ClusterID, key K) {
	if g.freed[id] == nil {
		g.freed[id] = map[K]struct{}{}
	}
	g.freed[id][key] = struct{}{}
	g.wake.Notify()
}

func (g *Guard[K]) decide(d Decision) {
	g.decided = append(g.decided, d)
	g.wake.Notify()
}

// freeAll frees the lost keys of a source that match, and returns how many. It does not change s.
func (g *Guard[K]) freeAll(id clusterset.ClusterID, s *source[K], match func(loss) bool) int {
	n := 0
	for key, l := range s.lost {
		if match(l) {
			g.free(id, key)
			n++
		}
	}
	return n
}

// Run judges steps until ctx ends, then returns nil. Its goroutine alone calls Changed and Decided, one at a time,
// without a lock, Changed before Decided. Run also runs on a standby replica: otherwise a new leader would judge all
// that vanished since it started as one step.
func (g *Guard[K]) Run(ctx context.Context) error {
	exported := gauge{}
	defer exported.set(nil)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-g.wake.C():
		case <-timer.C:
		}
		freed, decided, holding, next := g.judge(time.Now())
		exported.set(holding)
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

// judge judges all steps that are over and all holds that last too long. It returns the arguments of Changed and
// Decided, the held keys of each source, and the time until the next judgement; zero means when Run is woken.
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

// expire accepts the losses that were held for HoldFor, and forgets accepted losses older than Memory. The caller holds
// g.mu.
func (g *Guard[K]) expire(id clusterset.ClusterID, s *source[K], now time.Time) {
	overdue := func(l loss) bool { return l.fate == held && now.Sub(l.at) >= g.cfg.HoldFor }
	n := g.freeAll(id, s, overdue)
	for key, l := range s.lost {
		if overdue(l) || l.fate == accepted && now.Sub(l.at) >= g.cfg.Memory {
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

// judgeStep ends the step of a source: the keys that vanished in it are held or accepted. g.mu is held.
func (g *Guard[K]) judgeStep(id clusterset.ClusterID, s *source[K], now time.Time) {
	waits := func(l loss) bool { return l.fate == waiting }
	lost, of := len(s.lost), len(s.lost)+s.established(g.cfg.Window)
	if s.hold != nil {
		of = s.hold.of
	}
	s.began = time.Time{}
	if lost < g.cfg.Least || float64(lost) <= g.cfg.Share*float64(of) {
		if n := g.freeAll(id, s, waits); n > 0 { // else every key is back
			s.turn(waiting, accepted, now)
			g.decide(Decision{Source: id, Outcome: Accepted, Count: n, Of: of})
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

// log logs a decision for the operator.
func (g *Guard[K]) log(d Decision) {
	log := g.cfg.Log.With("peer", string(d.Source), "count", d.Count, "of", d.Of)
	switch d.Outcome {
	case Accepted:
		log.Info("exports vanished without being withdrawn; they are few enough to be removed")
	case Held:
		log.Error("exports of a member vanished together without being withdrawn; their imports stay until they are back, "+
			"the member leaves, or an administrator runs "+g.cfg.Release, "until", d.Since.Add(g.cfg.HoldFor))
	case Resolved:
		log.Info("held exports are back or were withdrawn; the hold ended")
	case Released:
		log.Info("an administrator released held exports; their imports are removed")
	case Expired:
		log.Warn("held exports did not come back in time; their imports are removed")
	case Left:
		log.Info("the member of held exports left; their imports are removed")
	case Confirmed:
		log.Info("the member of held exports states that it exports them no more; their imports are removed")
	}
}
