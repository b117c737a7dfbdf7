package liveness

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// State is how another member looks from here.
type State int

// The states. Endpoints of members that are Live or Stale are used.
const (
	Live     State = iota // it renews its Lease, or nothing is known of it
	Stale                 // its Lease is old
	Unproven              // its Lease was there, or is renewed again, but it has not shown yet that it stays
	Dead
)

// String returns one lower-case word.
func (s State) String() string { return [...]string{"live", "stale", "unproven", "dead"}[s] }

// Mode is what it takes to be dead.
type Mode int

// The modes.
const (
	ByEvidence Mode = iota // an old Lease and endpoints that do not answer, or a hard TTL
	Lease                  // an old Lease: the simple form of KEP-1645, "EndpointSlice TTL"
)

// Why a Tracker judges nobody.
var (
	ErrBlind = errors.New("the renewals of this member's own lease do not come back from the broker, so no member is judged")
	ErrFloor = errors.New("all other members seem to be gone at once, so none of them is judged; if they are gone, run isthmusctl leave --force")
)

// Config says how to judge. Self, Times and Log are required.
type Config struct {
	Self  clusterset.ClusterID
	Times Times // valid
	Mode  Mode
	// Evidence is asked about stale members, except in mode Lease. nil knows nothing.
	Evidence Evidence
	// Present reports whether anything of a member is used here. nil means: of all. It must not call the
	// Tracker, and must be true while that is not known.
	Present func(clusterset.ClusterID) bool
	// Changed is told members of which Dead says something else now, by Start's goroutine, one at a time.
	Changed func(clusterset.ClusterID)
	Log     *slog.Logger
}

// Tracker judges the other members. Its methods may be called from any goroutine, and never wait for evidence
// or for Changed.
//
// # Time
//
// Nobody's clock is trusted, nor compared with ours: what counts is when a renewal arrives here, by a clock that
// only runs forward. A Lease that arrives again with the time it had is no renewal.
//
// A silence is proved by our own Lease: it takes the same way, through the same broker and the same watch. So
// judgement is passed at the very moment at which a renewal of our own comes back, and a member's silence is what
// passed until then. If ours does not come back for more than two Renew and a half (broker away, watch cut, API
// server restarting, this process stopped), that time is part of nobody's silence; and when it does come back,
// everybody has Stale anew to be heard. Whoever never saw his own heartbeat judges nobody.
//
// # Life and death
//
// A member that is silent for Stale is stale. In mode Lease it is dead by that. Else it is dead when
//
//   - evidence was Silent twice in a row, and our own heartbeat came back between and after that; or
//   - it was silent for HardTTL, a silence that an Answering ends as a renewal does: a member that merely cannot
//     reach the broker must not lose its traffic; or
//   - it did not renew for Frozen, whatever answers. Times.Frozen equal to Times.HardTTL makes the hard TTL
//     absolute.
//
// A member of which no Lease was ever seen ([Tracker.Expect]) is of a version that has none, or its Lease was lost.
// It is silent since it was expected; but only the hard TTL applies to it, so it stays as long as it answers.
// Of a member that was neither expected nor heard nothing is known, and it is live.
//
// The dead return by renewing. A member that died twice must renew for Damping before it is used again, and
// twice as long after each further death, HardTTL at most; meanwhile it is unproven. A silence of Stale ends the
// attempt. A life of HardTTL makes up for earlier deaths. A member that flaps faster than Stale is never stale.
//
// A Lease that is there when this Tracker begins may be of a member that died long ago and was removed by the
// process before this one. If nothing of it is present, it is unproven until its first renewal.
//
// # The floor
//
// Dying needs a witness: another member that was heard after the dying one had become stale, and after evidence
// was given against it. For if nobody else is heard either, the reason is probably none of theirs: our site is cut
// off and the broker stands in it; the broker refuses everybody but us; all credentials ran out on one day. Then
// all are kept, whatever the evidence and however long it takes, and [Tracker.Doubt] says so; when somebody is
// heard again, everybody begins with a new silence.
//
// A witness is needed while there is another member that could be one: that has a Lease, is not dead, and has
// something present here. With a single other member, its death and our isolation look alike, and to keep what
// nobody can reach would help in neither. So the other one of two clusters dies by evidence, or at the latest by
// the hard TTL; of several that die within one Stale all stay, until a person removes them.
type Tracker struct {
	cfg     Config
	changes chan struct{} // holds a token while something is changed
	suspect chan struct{} // holds a token when somebody became stale

	mu      sync.Mutex
	own     own
	members map[clusterset.ClusterID]*member
	floored bool
	changed map[clusterset.ClusterID]struct{} // for Config.Changed
}

// own is what is seen of our own heartbeat.
type own struct {
	known     bool      // its Lease was seen
	renewTime time.Time // as it says
	began     time.Time // when the Tracker began
	last      time.Time // when the last renewal came back; zero if none did
	fresh     time.Time // when renewals began to come back: from then on all have a new Stale
}

// member is what is known of another one.
type member struct {
	state State
	since time.Time // when it came into state; zero if it always was

	leased    bool      // a Lease of it was seen
	renewTime time.Time // as that says; compared with itself alone
	inherited bool      // that Lease was there at first, and no renewal was seen
	heard     time.Time // when it last renewed, or was first heard of
	silent    time.Time // heard, moved on by all time that is part of no silence
	answered  time.Time // when evidence was last Answering, moved on in the same way; zero if never
	asked     time.Time // when evidence was last asked; zero if not since it became stale
	silences  int       // how many verdicts in a row were Silent and count
	counted   time.Time // t.own.last when the last of them did
	convicted time.Time // when the one was asked for that made them enough
	staleAt   time.Time // when it became stale

	deaths   int       // that no long life has made up for
	living   time.Time // when it last came to life
	attempts time.Time // when it began to renew again after a death

	clock offset
}

// NewTracker returns a Tracker that has seen nothing.
func NewTracker(cfg Config) *Tracker {
	if cfg.Present == nil {
		cfg.Present = func(clusterset.ClusterID) bool { return true }
	}
	if cfg.Changed == nil {
		cfg.Changed = func(clusterset.ClusterID) {}
	}
	return &Tracker{
		cfg:     cfg,
		changes: make(chan struct{}, 1),
		suspect: make(chan struct{}, 1),
		own:     own{began: time.Now()},
		members: map[clusterset.ClusterID]*member{},
		changed: map[clusterset.ClusterID]struct{}{},
	}
}

// Expect says that a member is registered, so that it is judged even if no Lease of it is ever seen.
func (t *Tracker) Expect(id clusterset.ClusterID) {
	if id == t.cfg.Self {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.members[id] == nil {
		t.meet(id, time.Now())
	}
}

// Renewed says that the Lease of a member was seen, and what time it says. It is called with every Lease that
// the watch brings, this member's own included, and may be called with the same one again.
func (t *Tracker) Renewed(id clusterset.ClusterID, renewTime time.Time) {
	now := time.Now()
	if id == t.cfg.Self {
		t.beat(renewTime, now)
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	m := t.members[id]
	if m == nil {
		m = t.meet(id, now)
	}
	if !m.leased {
		m.leased, m.renewTime, m.heard, m.silent = true, renewTime, now, now
		if m.inherited = !t.sighted(now); m.inherited {
			return
		}
	} else if m.renewTime.Equal(renewTime) {
		return
	}
	m.renewTime, m.heard, m.silent = renewTime, now, now
	m.hush()
	m.clock.add(renewTime, now)
	if m.inherited {
		m.inherited = false
		t.tell(id)
	}
	t.revive(id, m, now)
}

// revive lets a member that was just heard live, if it may. t.mu is held.
func (t *Tracker) revive(id clusterset.ClusterID, m *member, now time.Time) {
	switch m.state {
	case Live:
		if now.Sub(m.living) >= t.cfg.Times.HardTTL {
			m.deaths = 0
		}
		return
	case Stale:
		t.become(id, m, Live, now)
		return
	case Dead:
		m.attempts = now
	case Unproven:
	}
	if now.Sub(m.attempts) < t.damping(m.deaths) {
		if m.state == Dead {
			t.become(id, m, Unproven, now)
		}
		return
	}
	m.living = now
	t.become(id, m, Live, now)
}

// damping returns for how long a member must renew after so many deaths.
func (t *Tracker) damping(deaths int) time.Duration {
	if deaths < 2 {
		return 0
	}
	d := t.cfg.Times.Damping
	for range deaths - 2 {
		if d *= 2; d >= t.cfg.Times.HardTTL {
			return t.cfg.Times.HardTTL
		}
	}
	return d
}

// Gone says that a Lease vanished. Nothing follows: its member writes it again, or its silence goes on.
func (t *Tracker) Gone(id clusterset.ClusterID) {
	t.cfg.Log.Info("the lease of a member vanished; it is judged by when it was last renewed", "peer", string(id))
}

// Forget says that a member left.
func (t *Tracker) Forget(id clusterset.ClusterID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.members, id)
	hide(id)
}

// Dead reports whether the endpoints of a member must not be used: it is dead, or unproven.
func (t *Tracker) Dead(id clusterset.ClusterID) bool {
	state, _ := t.State(id)
	return state == Dead || state == Unproven
}

// State returns how a member looks, and since when; zero means always.
func (t *Tracker) State(id clusterset.ClusterID) (State, time.Time) {
	t.mu.Lock()
	m := t.members[id]
	if m == nil {
		t.mu.Unlock()
		return Live, time.Time{}
	}
	state, since, inherited := m.state, m.since, m.inherited
	t.mu.Unlock()
	if inherited && state != Dead && !t.cfg.Present(id) {
		return Unproven, since
	}
	return state, since
}

// Offset returns what to add to a time by a member's clock to have it by ours, and whether that is known. It
// contains how long the fastest renewal lately was on its way, so what is computed with it is too short by that,
// and may come out negative.
func (t *Tracker) Offset(id clusterset.ClusterID) (time.Duration, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	m := t.members[id]
	if m == nil {
		return 0, false
	}
	return m.clock.least()
}

// Doubt returns why nobody is judged now: ErrBlind, ErrFloor, or nil.
func (t *Tracker) Doubt() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case !t.sighted(time.Now()):
		return ErrBlind
	case t.floored:
		return ErrFloor
	default:
		return nil
	}
}

// meet begins to know a member. t.mu is held.
func (t *Tracker) meet(id clusterset.ClusterID, now time.Time) *member {
	m := &member{heard: now, silent: now, living: now}
	t.members[id] = m
	show(id, Live)
	return m
}

// become changes the state of a member. t.mu is held.
func (t *Tracker) become(id clusterset.ClusterID, m *member, to State, now time.Time) {
	from := m.state
	m.state, m.since = to, now
	show(id, to)
	transitions.WithLabelValues(string(id), to.String()).Inc()
	if (from < Unproven) != (to < Unproven) {
		t.tell(id)
	}
	log := t.cfg.Log.With("peer", string(id))
	switch to {
	case Live:
		log.Info("member lives", "was", from.String())
	case Stale:
		log.Warn("member does not renew its lease; its endpoints stay for now", "silence", t.own.last.Sub(m.silent).Round(time.Millisecond))
		wake(t.suspect)
	case Unproven:
		log.Info("member renews its lease again; after so many deaths it must do so for a while before its endpoints return",
			"deaths", m.deaths, "while", t.damping(m.deaths))
	case Dead:
		log.Warn("member is dead; its endpoints are not used", "was", from.String(), "silence", t.own.last.Sub(m.silent).Round(time.Millisecond), "unanswered", m.silences)
	}
}

// tell notes that Dead says something else of a member. t.mu is held.
func (t *Tracker) tell(id clusterset.ClusterID) {
	t.changed[id] = struct{}{}
	wake(t.changes)
}

// wake puts a token into c, unless there is one.
func wake(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// NeedLeaderElection tells the manager that a standby judges too: when it takes over, it knows who is dead.
func (t *Tracker) NeedLeaderElection() bool { return false }

// Start asks for evidence and calls Changed until ctx ends; then it returns nil.
func (t *Tracker) Start(ctx context.Context) error {
	var loops sync.WaitGroup
	loops.Go(func() { t.deliver(ctx) })
	loops.Go(func() { t.investigate(ctx) })
	loops.Go(func() { t.listen(ctx) })
	loops.Wait()
	return nil
}

// deliver calls Changed.
func (t *Tracker) deliver(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.changes:
		}
		t.mu.Lock()
		changed := t.changed
		t.changed = map[clusterset.ClusterID]struct{}{}
		t.mu.Unlock()
		for id := range changed {
			t.cfg.Changed(id)
		}
	}
}

// listen says when our own heartbeat stops coming back, and when it does again.
func (t *Tracker) listen(ctx context.Context) {
	tick := time.NewTicker(t.cfg.Times.Renew)
	defer tick.Stop()
	for blind := false; ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		t.mu.Lock()
		last := later(t.own.last, t.own.began)
		t.mu.Unlock()
		was := blind
		blind = time.Since(last) >= t.cfg.Times.Stale
		switch {
		case blind && !was:
			flag(heartbeat, false)
			t.cfg.Log.Warn(ErrBlind.Error())
		case was && !blind:
			t.cfg.Log.Info("the renewals of this member's own lease come back from the broker; members are judged again")
		}
	}
}
