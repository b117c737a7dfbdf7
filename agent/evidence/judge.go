package evidence

import (
	"maps"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Patience is how long nothing must have come from a member, from the first packet on that was waited for in
// vain, before it is drained. A lost packet of a connection that stands is sent again after 200 ms or more (RFC
// 6298, as Linux has it), that of a handshake after 1 s; with 1 s for a probe beside it, a member whose
// packets die is drained 1 s to 2.5 s after the first one.
const Patience = time.Second

// Retry is how long a member stays drained that no probe ever reached, such as behind a NetworkPolicy: then new
// clients are the only ones who can find out. Where probes were answered once they tell first, but a policy may be
// new: so clients try again after RetryReached all the same.
const (
	Retry        = 30 * time.Second
	RetryReached = 5 * time.Minute
)

// Lately is how long it is worth knowing that something came from a member.
const Lately = time.Minute

// State is what a node knows of a member's packets.
type State uint8

// The states of a member. One that is drained is silent.
const (
	Unknown   State = iota // nothing lately
	Answering              // something came from it, not longer ago than Lately
	Silent
)

// String returns one lower-case word.
func (s State) String() string { return [...]string{"unknown", "answering", "silent"}[s] }

// states sums up what was seen and decided; members of which nothing is known are left out.
func states(now time.Duration, seen map[clusterset.ClusterID]datapath.Evidence, drained map[clusterset.ClusterID]bool) map[clusterset.ClusterID]State {
	known := map[clusterset.ClusterID]State{}
	for id, e := range seen {
		switch {
		case drained[id]:
			known[id] = Silent
		case e.AnsweredAt > 0 && now-e.AnsweredAt <= Lately:
			known[id] = Answering
		}
	}
	return known
}

// Change is what became of one member.
type Change struct {
	Cluster clusterset.ClusterID
	Drained bool
	Reason  string // one sentence
}

// Judge remembers what is known of each member. All times are of one clock, that of datapath.SinceBoot. The
// zero value is ready. Not safe for concurrent use.
type Judge struct {
	members map[clusterset.ClusterID]*member
	drained map[clusterset.ClusterID]bool // the last verdict
}

// member is what is known of one.
type member struct {
	doubt   time.Duration // when the first packet was waited for in vain that nothing answered since; 0 none
	probed  time.Duration // when a probe began that nobody answered; 0 none since the last answer
	heard   time.Duration // when a probe was last answered, or the member forgiven
	reached bool          // a probe was answered once
	dead    time.Duration // since when; 0 not
	verdict string        // why
}

// Weigh takes what the kernel has seen by now and returns who is to be drained, what of that is new, and who
// should be probed now. Silence of one backend is not that of a member: anything that comes from any of its
// backends clears it. Not all members are ever drained, for then the fault is more likely here. The result
// belongs to the caller.
func (j *Judge) Weigh(now time.Duration, seen map[clusterset.ClusterID]datapath.Evidence) (drained map[clusterset.ClusterID]bool, changes []Change, probe []clusterset.ClusterID) {
	if j.members == nil {
		j.members = map[clusterset.ClusterID]*member{}
	}
	maps.DeleteFunc(j.members, func(id clusterset.ClusterID, _ *member) bool { _, ok := seen[id]; return !ok })
	ids := slices.Sorted(maps.Keys(seen))
	dead := map[clusterset.ClusterID]bool{}
	for _, id := range ids {
		m := j.members[id]
		if m == nil {
			m = &member{}
			j.members[id] = m
		}
		m.weigh(now, seen[id])
		if m.dead > 0 {
			dead[id] = true
		}
		if m.doubt > 0 || m.dead > 0 {
			probe = append(probe, id)
		}
	}
	why := ""
	if len(dead) == len(seen) {
		clear(dead)
		why = "all members are silent, so the fault may be here: none is drained"
	}
	changes = j.compare(ids, dead, why)
	j.drained = dead
	return maps.Clone(dead), changes, probe
}

// weigh decides about one member.
func (m *member) weigh(now time.Duration, e datapath.Evidence) {
	heard := max(e.AnsweredAt, m.heard)
	if m.dead > 0 {
		switch {
		case heard > m.dead:
			*m = member{heard: m.heard, reached: m.reached, verdict: "it answers"}
		case now-m.dead >= m.retry():
			*m = member{heard: now, reached: m.reached, verdict: "probes get no answer from here, perhaps they alone: clients try again"}
		default:
			return
		}
		heard = max(heard, m.heard)
	}
	if e.SilentAt <= heard {
		m.doubt, m.probed = 0, 0
		return
	}
	if m.doubt <= heard { // the first one since
		m.doubt, m.probed = e.SilentAt, 0
	}
	if m.probed > 0 && now-m.doubt >= Patience {
		m.dead, m.verdict = now, "packets to it are not answered, nor are probes"
	}
}

// retry is how long clients keep away.
func (m *member) retry() time.Duration {
	if m.reached {
		return RetryReached
	}
	return Retry
}

// Probed takes the outcome of a probe that began at the given time: answered when any backend accepted or
// refused the connection. A failed one says nothing by itself: a NetworkPolicy may keep the node from asking.
func (j *Judge) Probed(id clusterset.ClusterID, began time.Duration, answered bool) {
	m := j.members[id]
	switch {
	case m == nil:
	case answered:
		m.heard, m.reached = max(m.heard, began), true
		if m.dead > 0 { // whatever the clock's step
			m.heard = max(m.heard, m.dead+1)
		}
	case m.doubt > 0 && began >= m.doubt:
		m.probed = began
	}
}

// compare lists what is new in a verdict.
func (j *Judge) compare(ids []clusterset.ClusterID, dead map[clusterset.ClusterID]bool, why string) []Change {
	var changes []Change
	for _, id := range ids {
		if dead[id] == j.drained[id] {
			continue
		}
		c := Change{Cluster: id, Drained: dead[id], Reason: j.members[id].verdict}
		if why != "" {
			c.Reason = why
		}
		changes = append(changes, c)
	}
	return changes
}
