// Package liveness determines which members of the ClusterSet are live: a [Heartbeat] renews this member's Lease on the
// broker, and a [Tracker] watches the Leases of all members.
//
// Its inputs are renewals as they arrive and, for silent members, [Evidence] whether their endpoints answer. Its output
// is, for each member, whether its endpoints are used.
//
// An error in one direction costs connections to a dead cluster, which dataplanes detect by themselves. An error in the
// other direction removes healthy endpoints from every cluster. A Tracker that cannot trust its own view therefore
// declares no member dead; its comment has the rules.
package liveness

import (
	"errors"
	"fmt"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/internal/timescale"
)

// Times are the timers of liveness, all by clocks that do not jump:
//
//	Renew        5 s   interval between two renewals of a Lease, and the timeout of one
//	Stale       20 s   a member that did not renew for this long is stale: its endpoints stay, and evidence is queried;
//	                   with --liveness=lease it is dead
//	ProbeEvery   5 s   interval between two queries about a stale member; two Silent verdicts in a row prove its death
//	Probe        2 s   timeout of a TCP handshake with an endpoint
//	HardTTL      5 min a member that neither renewed nor answered for this long is dead
//	Frozen       1 h   a member that answers but did not renew for this long is dead: its list of endpoints is so old
//	                   that other pods may have their addresses by now
//	Damping     30 s   a member that died twice must renew for this long before it is live again; twice that after
//	                   the next death, and so on, at most HardTTL; HardTTL of life clears earlier deaths
//
// A Tracker judges when it sees a renewal of this member's own Lease, so each transition may come one Renew later.
type Times struct {
	Renew, Stale      time.Duration
	ProbeEvery, Probe time.Duration
	HardTTL, Frozen   time.Duration
	Damping           time.Duration
}

// DefaultTimes returns the times of the table.
//
// A crashed controller is replaced within about 15 s, so its member may become stale once, which changes no endpoint.
func DefaultTimes() Times {
	return Times{
		Renew: 5 * time.Second, Stale: 20 * time.Second,
		ProbeEvery: 5 * time.Second, Probe: 2 * time.Second,
		HardTTL: 5 * time.Minute, Frozen: time.Hour,
		Damping: 30 * time.Second,
	}
}

// Scale returns t multiplied by f.
func (t Times) Scale(f timescale.Factor) Times {
	return Times{
		Renew: f.Scale(t.Renew), Stale: f.Scale(t.Stale),
		ProbeEvery: f.Scale(t.ProbeEvery), Probe: f.Scale(t.Probe),
		HardTTL: f.Scale(t.HardTTL), Frozen: f.Scale(t.Frozen),
		Damping: f.Scale(t.Damping),
	}
}

// Validate reports every fault of t.
func (t Times) Validate() error {
	var errs []error
	refuse := func(wrong bool, format string, args ...any) {
		if wrong {
			errs = append(errs, fmt.Errorf("liveness times: "+format, args...))
		}
	}
	refuse(t.Renew <= 0, "renew %v is not positive", t.Renew)
	refuse(t.Stale < 3*t.Renew, "stale %v is less than three times renew %v, so one late renewal would make a member stale", t.Stale, t.Renew)
	refuse(t.Probe <= 0, "probe %v is not positive", t.Probe)
	refuse(t.ProbeEvery < t.Probe, "a probe every %v overlaps the next, because one takes up to %v", t.ProbeEvery, t.Probe)
	refuse(t.HardTTL < t.Stale, "hard TTL %v is less than stale %v", t.HardTTL, t.Stale)
	refuse(t.Frozen < t.HardTTL, "frozen %v is less than the hard TTL %v", t.Frozen, t.HardTTL)
	refuse(t.Damping < 0, "damping %v is negative", t.Damping)
	refuse(t.Damping > t.HardTTL, "damping %v is more than the hard TTL %v", t.Damping, t.HardTTL)
	return errors.Join(errs...)
}
