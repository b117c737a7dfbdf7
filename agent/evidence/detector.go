package evidence

import (
	"maps"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// silenceTimeout is how long a member must be silent before it is drained, counted from the first packet that got no
// answer. Linux retransmits a packet of an established connection after 200 ms or more (RFC 6298), and that of a handshake
// after 1 s. With another second for a probe, a member is drained 1 s to 2.5 s after its first lost packet.
const silenceTimeout = time.Second

// A drained member gets clients again after retryUnprobed if no probe has ever reached it. Behind a NetworkPolicy, for
// example, only clients can find out that it answers. After retryProbed it gets clients again even if probes have reached
// it before, for the policy may be new.
const (
	retryUnprobed = 30 * time.Second
	retryProbed   = 5 * time.Minute
)

// recent is how long a member counts as answering after its last packet.
const recent = time.Minute

// State is what a node knows of a member's packets.
type State uint8

// The states of a member. A drained member is silent.
const (
	Unknown   State = iota // no recent packets
	Answering              // a packet came from it within the last minute
	Silent
)

// String returns one lower-case word.
func (s State) String() string { return [...]string{"unknown", "answering", "silent"}[s] }

// states returns the state of each member, without those that are unknown.
func states(now time.Duration, seen map[clusterset.ClusterID]datapath.Evidence, drained map[clusterset.ClusterID]bool) map[clusterset.ClusterID]State {
	known := map[clusterset.ClusterID]State{}
	for id, e := range seen {
		switch {
		case drained[id]:
			known[id] = Silent
		case e.AnsweredAt > 0 && now-e.AnsweredAt <= recent:
			known[id] = Answering
		}
	}
	return known
}

// Change is a member that is drained, or no longer drained.
type Change struct {
	Cluster clusterset.ClusterID
	Drained bool
	Reason  string // one sentence
}

// Detector decides which members to drain. All times are of one clock, that of datapath.SinceBoot. The zero value is
// ready. Not safe for concurrent use.
type Detector struct {
	members map[clusterset.ClusterID]*member
	drained map[clusterset.ClusterID]bool // the last decision
}

// member is the history of one member.
type member struct {
	silentSince   time.Duration // the first packet without an answer since the last answer; 0 none
	probeFailedAt time.Duration // the start of a probe without an answer since the last answer; 0 none
	answeredAt    time.Duration // the last answer to a probe, or the last retry
	reached       bool          // a probe was answered once
	drainedAt     time.Duration // 0: not drained
	reason        string        // of the last change
}

// Evaluate takes what the kernel has seen until now. It returns the members to drain, those that changed, and those to
// probe now. The silence of one backend does not drain its member: any packet from any backend of the member ends the
// silence. Not all members are drained at once, for then the fault is more likely on this node. The caller owns the
// result.
func (d *Detector) Evaluate(now time.Duration, seen map[clusterset.ClusterID]datapath.Evidence) (drained map[clusterset.ClusterID]bool, changes []Change, probe []clusterset.ClusterID) {
	if d.members == nil {
		d.members = map[clusterset.ClusterID]*member{}
	}
	maps.DeleteFunc(d.members, func(id clusterset.ClusterID, _ *member) bool { _, ok := seen[id]; return !ok })
	ids := slices.Sorted(maps.Keys(seen))
	silent := map[clusterset.ClusterID]bool{}
	for _, id := range ids {
		m := d.members[id]
		if m == nil {
			m = &member{}
			d.members[id] = m
		}
		m.evaluate(now, seen[id])
		if m.drainedAt > 0 {
			silent[id] = true
		}
		if m.silentSince > 0 || m.drainedAt > 0 {
			probe = append(probe, id)
		}
	}
	reason := ""
	if len(silent) == len(seen) {
		clear(silent)
		reason = "all members are silent, so the fault is probably on this node: none is drained"
	}
	changes = d.compare(ids, silent, reason)
	d.drained = silent
	return maps.Clone(silent), changes, probe
}

// evaluate decides whether to drain one member.
func (m *member) evaluate(now time.Duration, e datapath.Evidence) {
	answered := max(e.AnsweredAt, m.answeredAt)
	if m.drainedAt > 0 {
		switch {
		case answered > m.drainedAt:
			*m = member{answeredAt: m.answeredAt, reached: m.reached, reason: "it answers"}
		case now-m.drainedAt >= m.retryAfter():
			*m = member{answeredAt: now, reached: m.reached, reason: "probes get no answer, but clients may: they try again"}
		default:
			return
		}
		answered = max(answered, m.answeredAt)
	}
	if e.SilentAt <= answered {
		m.silentSince, m.probeFailedAt = 0, 0
		return
	}
	if m.silentSince <= answered { // the first silence since the last answer
		m.silentSince, m.probeFailedAt = e.SilentAt, 0
	}
	if m.probeFailedAt > 0 && now-m.silentSince >= silenceTimeout {
		m.drainedAt, m.reason = now, "neither packets nor probes get an answer"
	}
}

// retryAfter is how long the member stays drained without an answer.
func (m *member) retryAfter() time.Duration {
	if m.reached {
		return retryProbed
	}
	return retryUnprobed
}

// ProbeResult takes the result of a probe that began at the given time: answered means that a backend accepted or
// refused the connection. A failed probe alone does not drain a member: a NetworkPolicy may keep the node from probing.
func (d *Detector) ProbeResult(id clusterset.ClusterID, began time.Duration, answered bool) {
	m := d.members[id]
	switch {
	case m == nil:
	case answered:
		m.answeredAt, m.reached = max(m.answeredAt, began), true
		if m.drainedAt > 0 { // also within one step of the clock
			m.answeredAt = max(m.answeredAt, m.drainedAt+1)
		}
	case m.silentSince > 0 && began >= m.silentSince:
		m.probeFailedAt = began
	}
}

// compare returns the changes from the last decision to silent. reason, if not empty, stands for those of the members.
func (d *Detector) compare(ids []clusterset.ClusterID, silent map[clusterset.ClusterID]bool, reason string) []Change {
	var changes []Change
	for _, id := range ids {
		if silent[id] == d.drained[id] {
			continue
		}
		c := Change{Cluster: id, Drained: silent[id], Reason: d.members[id].reason}
		if reason != "" {
			c.Reason = reason
		}
		changes = append(changes, c)
	}
	return changes
}
