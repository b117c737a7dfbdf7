package liveness

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/clusterset/signal"
)

// State is the liveness of another member as this one sees it.
type State int

// The states. The endpoints of Live and Stale members are used.
const (
	Live     State = iota // it renews its Lease, or was never seen
	Stale                 // its Lease is old
	Unproven              // its Lease exists or is renewed again, but not for long enough yet
	Dead                  // its endpoints are not used
)

// String returns one lower-case word.
func (s State) String() string { return [...]string{"live", "stale", "unproven", "dead"}[s] }

// Mode selects the rule by which a stale member is dead.
type Mode int

// The modes.
const (
	ByEvidence Mode = iota // an old Lease and silent endpoints, or the hard TTL
	Lease                  // an old Lease: the simple form of KEP-1645, "EndpointSlice TTL"
)

// The reasons why a Tracker declares no member dead.
var (
	ErrOwnLeaseUnseen = errors.New("this member does not see the renewals of its own lease on the broker, so it declares no member dead")
	ErrMinimumLive    = errors.New("all other members are silent at once, so none of them is declared dead; if they are gone, run isthmusctl leave --force")
)

// Config configures a Tracker. Self, Times and Log are required.
type Config struct {
	Self  clusterset.ClusterID
	Times Times // valid
	Mode  Mode
	// Evidence is queried about stale members, except in mode Lease. Nil answers Unknown.
	Evidence Evidence
	// Present reports whether this cluster imports anything from a member, and true while that is unknown. It must not
	// call the Tracker. Nil means every member.
	Present func(clusterset.ClusterID) bool
	// Changed receives each member whose Dead changed. Start's goroutine calls it, one member at a time.
	Changed func(clusterset.ClusterID)
	// Unmetered leaves the metrics of this package alone: they are of one Tracker in a process.
	Unmetered bool
	Log       *slog.Logger
}

// Tracker decides which other members are dead. Any goroutine may call its methods, which never wait for evidence or
// for Changed.
//
// For example, the controller of member "east" crashes and its replacement does not start. After 20 s east is stale;
// its endpoints stay. If they do not answer two probes either, east is dead and its endpoints go. If they answer, they
// stay for an hour.
//
// # Time
//
// A Tracker compares no clock with another: it counts when a renewal arrives here, by a monotonic clock. A Lease that
// arrives again with the same renewTime is no renewal.
//
// Our own Lease proves a silence, because it takes the same way, through the same broker and the same watch. The
// Tracker therefore judges only when a renewal of our own comes back, and a member's silence is the time that passed
// until then. If ours does not come back for more than 2.5 Renew (broker away, watch cut, API server restarting, this
// process stopped), that time counts as silence of no member, and after it every member has Stale again to renew. A
// Tracker that never saw its own renewal judges no member.
//
// # Life and death
//
// A member that is silent for Stale is stale. In mode Lease it is then dead. Otherwise it is dead when
//
//   - evidence was Silent twice in a row, and our own renewal came back between and after the two; or
//   - it was silent for HardTTL, and an Answering ends that silence as a renewal does: a member that merely cannot
//     reach the broker must keep its traffic; or
//   - it did not renew for Frozen, whatever answers. Times.Frozen equal to Times.HardTTL makes the hard TTL absolute.
//
// A registered member whose Lease was never seen ([Tracker.Expect]) runs a version without Leases, or lost its Lease.
// Its silence starts at Expect, and only the hard TTL applies, so it stays while it answers. A member that is neither
// expected nor seen is live.
//
// A dead member returns by renewing. After its second death it must renew for Damping before its endpoints are used
// again, and after each further death for twice as long, HardTTL at most; meanwhile it is unproven. A silence of Stale
// ends the attempt. HardTTL of life clears earlier deaths. A member that flaps faster than Stale is never stale.
//
// A Lease that exists when the Tracker starts may belong to a member that died long ago, and whose endpoints the
// previous process removed. If nothing of it is Present, the member is unproven until its first renewal.
//
// # The minimum of live members
//
// A death needs confirmation: another member that renewed after the silent one became stale and evidence spoke against
// it. If no other member renews either, the cause is probably on our side: our site is cut off together with the broker,
// the broker refuses every member but us, or all credentials expired on one day. Then all members are kept, however long
// it takes and whatever the evidence, and [Tracker.Paused] says so. When any member renews again, every silence starts
// anew.
//
// Confirmation is required while another member could give it: one that has a Lease, is not dead, and is Present. With a
// single other member, its death and our isolation look alike, and keeping unreachable endpoints helps in neither case.
// So the other one of two clusters dies by evidence, or at the latest by the hard TTL. Of several members that die
// within one Stale all stay, until an administrator removes them.
type Tracker struct {
	cfg        Config
	changes    signal.Signal // changed has members
	newlyStale signal.Signal // a member became stale

	mu        sync.Mutex
	own       own
	members   map[clusterset.ClusterID]*member
	atMinimum bool
	changed   map[clusterset.ClusterID]struct{} // for Config.Changed
}

// own tracks the renewals of our own Lease.
type own struct {
	known       bool      // the Lease was seen
	renewTime   time.Time // of the Lease
	startedAt   time.Time // when the Tracker started
	seenAt      time.Time // when the last renewal came back; zero before the first
	recoveredAt time.Time // when renewals came back after an outage: every member has Stale from then
}

// member tracks another member.
type member struct {
	state State
	since time.Time // when state changed; zero if it never did

	leased         bool      // its Lease was seen
	renewTime      time.Time // of that Lease; compared with itself alone
	inherited      bool      // the Lease existed when the Tracker started, and no renewal was seen
	renewedAt      time.Time // when it last renewed, or was first seen
	silentSince    time.Time // renewedAt, moved forward by outages of our own
	answeredAt     time.Time // when evidence was last Answering, moved forward likewise; zero if never
	askedAt        time.Time // when evidence was last queried; zero if not since it became stale
	silentVerdicts int       // how many counted verdicts in a row were Silent
	countedAt      time.Time // t.own.seenAt when the last of them counted
	provenAt       time.Time // when the query was sent whose verdict completed silentVerdictsNeeded
	staleAt        time.Time // when it became stale

	deaths        int       // since its last long life
	liveSince     time.Time // when it last became live
	retryingSince time.Time // when it began to renew again after a death

	clock offset
}

// NewTracker returns a Tracker that knows no member.
func NewTracker(cfg Config) *Tracker {
	if cfg.Present == nil {
		cfg.Present = func(clusterset.ClusterID) bool { return true }
	}
	if cfg.Changed == nil {
		cfg.Changed = func(clusterset.ClusterID) {}
	}
	return &Tracker{
		cfg:        cfg,
		changes:    signal.New(),
		newlyStale: signal.New(),
		own:        own{startedAt: time.Now()},
		members:    map[clusterset.ClusterID]*member{},
		changed:    map[clusterset.ClusterID]struct{}{},
	}
}

// Expect records that a member is registered, so that it is judged even if its Lease is never seen.
func (t *Tracker) Expect(id clusterset.ClusterID) {
	if id == t.cfg.Self {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.members[id] == nil {
		t.add(id, time.Now())
	}
}

// Renewed records the renewTime of a member's Lease. The caller passes every Lease that the watch delivers, this
// member's own included; a Lease may be passed again.
func (t *Tracker) Renewed(id clusterset.ClusterID, renewTime time.Time) {
	now := time.Now()
	if id == t.cfg.Self {
		t.renewedOwn(renewTime, now)
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	m := t.members[id]
	if m == nil {
		m = t.add(id, now)
	}
	if !m.leased {
		m.leased, m.renewTime, m.renewedAt, m.silentSince = true, renewTime, now, now
		if m.inherited = !t.ownLeaseSeen(now); m.inherited {
			return
		}
	} else if m.renewTime.Equal(renewTime) {
		return
	}
	m.renewTime, m.renewedAt, m.silentSince = renewTime, now, now
	m.resetEvidence()
	m.clock.add(renewTime, now)
	if m.inherited {
		m.inherited = false
		t.notifyChanged(id)
	}
	t.revive(id, m, now)
}

// revive makes a member that just renewed live, if damping permits. t.mu is held.
func (t *Tracker) revive(id clusterset.ClusterID, m *member, now time.Time) {
	switch m.state {
	case Live:
		if now.Sub(m.liveSince) >= t.cfg.Times.HardTTL {
			m.deaths = 0
		}
		return
	case Stale:
		t.setState(id, m, Live, now)
		return
	case Dead:
		m.retryingSince = now
	case Unproven:
	}
	if now.Sub(m.retryingSince) < t.damping(m.deaths) {
		if m.state == Dead {
			t.setState(id, m, Unproven, now)
		}
		return
	}
	m.liveSince = now
	t.setState(id, m, Live, now)
}

// damping returns how long a member must renew after a number of deaths.
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

// LeaseDeleted logs that the Lease of a member was deleted. It changes no state: the member writes the Lease again, or
// its silence continues.
func (t *Tracker) LeaseDeleted(id clusterset.ClusterID) {
	t.cfg.Log.Info("the lease of a member was deleted; its last renewal still counts", "peer", string(id))
}

// Forget removes a member that left the ClusterSet.
func (t *Tracker) Forget(id clusterset.ClusterID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.members, id)
	t.deleteStateMetric(id)
}

// Dead reports whether the endpoints of a member must not be used: it is dead, or unproven.
func (t *Tracker) Dead(id clusterset.ClusterID) bool {
	state, _ := t.State(id)
	return state == Dead || state == Unproven
}

// State returns the state of a member and when it changed; zero if it never did.
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

// Offset returns the difference between our clock and a member's (ours minus theirs), and whether it is known. It
// includes the transit time of the fastest recent renewal, so durations computed with it are too short by that, and may
// be negative.
func (t *Tracker) Offset(id clusterset.ClusterID) (time.Duration, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	m := t.members[id]
	if m == nil {
		return 0, false
	}
	return m.clock.least()
}

// Paused returns the reason why no member is declared dead now: ErrOwnLeaseUnseen, ErrMinimumLive, or nil.
func (t *Tracker) Paused() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case !t.ownLeaseSeen(time.Now()):
		return ErrOwnLeaseUnseen
	case t.atMinimum:
		return ErrMinimumLive
	default:
		return nil
	}
}

// add starts tracking a member. t.mu is held.
func (t *Tracker) add(id clusterset.ClusterID, now time.Time) *member {
	m := &member{renewedAt: now, silentSince: now, liveSince: now}
	t.members[id] = m
	t.setStateMetric(id, Live)
	return m
}

// setState changes the state of a member. t.mu is held.
func (t *Tracker) setState(id clusterset.ClusterID, m *member, to State, now time.Time) {
	from := m.state
	m.state, m.since = to, now
	t.setStateMetric(id, to)
	if !t.cfg.Unmetered {
		transitions.WithLabelValues(string(id), to.String()).Inc()
	}
	if (from < Unproven) != (to < Unproven) {
		t.notifyChanged(id)
	}
	log := t.cfg.Log.With("peer", string(id))
	switch to {
	case Live:
		log.Info("member is live", "was", from.String())
	case Stale:
		log.Warn("member does not renew its lease; its endpoints stay while they may still answer", "silence", t.own.seenAt.Sub(m.silentSince).Round(time.Millisecond))
		t.newlyStale.Notify()
	case Unproven:
		log.Info("member renews its lease again; it died before, so its endpoints return only after it has renewed for a while",
			"deaths", m.deaths, "damping", t.damping(m.deaths))
	case Dead:
		log.Warn("member is dead; its endpoints are removed from imports", "was", from.String(), "silence", t.own.seenAt.Sub(m.silentSince).Round(time.Millisecond), "silentVerdicts", m.silentVerdicts)
	}
}

// notifyChanged queues a member whose Dead changed. t.mu is held.
func (t *Tracker) notifyChanged(id clusterset.ClusterID) {
	t.changed[id] = struct{}{}
	t.changes.Notify()
}

// NeedLeaderElection tells the manager that a standby judges too: when it takes over, it knows the dead members.
func (t *Tracker) NeedLeaderElection() bool { return false }

// Start queries evidence and calls Changed until ctx ends; then it returns nil.
func (t *Tracker) Start(ctx context.Context) error {
	var loops sync.WaitGroup
	loops.Go(func() { t.deliver(ctx) })
	loops.Go(func() { t.queryEvidence(ctx) })
	loops.Go(func() { t.watchOwnLease(ctx) })
	loops.Wait()
	return nil
}

// deliver calls Changed.
func (t *Tracker) deliver(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.changes.C():
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

// watchOwnLease reports when our own renewals stop coming back, and when they return.
func (t *Tracker) watchOwnLease(ctx context.Context) {
	tick := time.NewTicker(t.cfg.Times.Renew)
	defer tick.Stop()
	for unseen := false; ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		t.mu.Lock()
		last := later(t.own.seenAt, t.own.startedAt)
		t.mu.Unlock()
		was := unseen
		unseen = time.Since(last) >= t.cfg.Times.Stale
		switch {
		case unseen && !was:
			t.flag(heartbeat, false)
			t.cfg.Log.Warn(ErrOwnLeaseUnseen.Error())
		case was && !unseen:
			t.cfg.Log.Info("this member sees the renewals of its own lease again; members are judged again")
		}
	}
}
