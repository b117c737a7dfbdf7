// Package liveness tells which members of the ClusterSet live, from what can be seen here: a [Heart] renews
// this member's Lease on the broker, and a [Tracker] watches the Leases of all. What goes in are renewals as
// they arrive and, of members that fell silent, [Evidence] whether their endpoints answer; what comes out is
// for each member whether its endpoints are to be used.
//
// Being wrong in one direction costs connections to a dead cluster, which dataplanes notice by themselves;
// being wrong in the other takes healthy endpoints away from everybody. So a Tracker that is in doubt about
// itself judges nobody. [Tracker] has the rules.
package liveness

import (
	"errors"
	"fmt"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/internal/timescale"
)

// Times are how long things take, all by clocks that do not jump:
//
//	Renew        5 s   a member renews its Lease this often, and waits as long for an answer
//	Stale       20 s   a member that was not seen to renew for so long is stale: its endpoints stay, and it is
//	                   asked for evidence; with --liveness=lease it is dead
//	ProbeEvery   5 s   a stale member is asked this often; two silences in a row are evidence of death
//	Probe        2 s   an endpoint answers a TCP handshake within this time, or is silent
//	HardTTL      5 min a member that neither renewed nor answered for so long is dead, whatever is not known of it
//	Frozen       1 h   a member that answers, but did not renew for so long, is dead: nobody keeps its list of
//	                   endpoints current, so what answers there may be something else by now
//	Damping     30 s   a member that died twice must renew for so long before it lives again; twice that after
//	                   the next death, and so on, at most HardTTL; a life of HardTTL makes up for everything
//
// Judgement is passed when the Lease of this member is seen renewed, so each may take one Renew longer.
type Times struct {
	Renew, Stale      time.Duration
	ProbeEvery, Probe time.Duration
	HardTTL, Frozen   time.Duration
	Damping           time.Duration
}

// DefaultTimes returns what stands in the table.
//
// A controller that crashes is replaced within 15 s or a little more, so its member may become stale once, which
// by itself changes nothing.
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
		Renew: f.Of(t.Renew), Stale: f.Of(t.Stale),
		ProbeEvery: f.Of(t.ProbeEvery), Probe: f.Of(t.Probe),
		HardTTL: f.Of(t.HardTTL), Frozen: f.Of(t.Frozen),
		Damping: f.Of(t.Damping),
	}
}

// Validate reports all that is wrong with t.
func (t Times) Validate() error {
	var errs []error
	refuse := func(wrong bool, format string, args ...any) {
		if wrong {
			errs = append(errs, fmt.Errorf("liveness times: "+format, args...))
		}
	}
	refuse(t.Renew <= 0, "renew %v is not positive", t.Renew)
	refuse(t.Stale < 3*t.Renew, "stale %v is less than three times renew %v, so one late renewal would count", t.Stale, t.Renew)
	refuse(t.Probe <= 0, "probe %v is not positive", t.Probe)
	refuse(t.ProbeEvery < t.Probe, "a probe every %v overtakes one of %v", t.ProbeEvery, t.Probe)
	refuse(t.HardTTL < t.Stale, "hard TTL %v is less than stale %v", t.HardTTL, t.Stale)
	refuse(t.Frozen < t.HardTTL, "frozen %v is less than the hard TTL %v", t.Frozen, t.HardTTL)
	refuse(t.Damping < 0, "damping %v is negative", t.Damping)
	refuse(t.Damping > t.HardTTL, "damping %v is more than the hard TTL %v", t.Damping, t.HardTTL)
	return errors.Join(errs...)
}
