package liveness

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Verdict is what evidence says about a member.
type Verdict int

// The verdicts.
const (
	Unknown   Verdict = iota // nothing follows
	Answering                // an endpoint of it serves
	Silent                   // where its endpoints were, nothing answers
)

// String returns one lower-case word.
func (v Verdict) String() string { return [...]string{"unknown", "answering", "silent"}[v] }

// Evidence is what the dataplane knows of a member beside its Lease. Answers may take a few seconds, is asked
// about stale members only, and about several at a time.
type Evidence interface {
	Answers(ctx context.Context, id clusterset.ClusterID) Verdict
}

// probed is how many endpoints of a member a Probe tries at a time.
const probed = 3

// Probe is evidence by TCP handshakes with a few endpoints of a member, others each time. It sends no data.
//
// One endpoint that accepts a connection proves that the member serves: Answering. One that refuses proves that
// some host is there, but not that anything of what the member said is still true: it is no silence, and no
// sign of life either, so the verdict is Unknown. So it is if one cannot be tried from here (no route, no such
// address family, not permitted), or if there is none. Only if all those tried do not answer in time, or the
// network says that their host cannot be reached, the member is Silent.
type Probe struct {
	// Endpoints returns TCP endpoints of a member that are said to be ready.
	Endpoints func(clusterset.ClusterID) []netip.AddrPort
	// Deadline is how long one handshake may take; 0 means that of DefaultTimes.
	Deadline time.Duration
}

// Answers returns when all handshakes are over, or the first one succeeds.
func (p *Probe) Answers(ctx context.Context, id clusterset.ClusterID) Verdict {
	deadline := p.Deadline
	if deadline == 0 {
		deadline = DefaultTimes().Probe
	}
	within, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	some := slices.Clone(p.Endpoints(id))
	rand.Shuffle(len(some), func(i, j int) { some[i], some[j] = some[j], some[i] })
	some = some[:min(len(some), probed)]
	verdicts := make([]Verdict, len(some))
	var dials sync.WaitGroup
	for i, endpoint := range some {
		dials.Go(func() {
			verdicts[i] = shake(within, endpoint)
			if verdicts[i] == Answering {
				cancel()
			}
		})
	}
	dials.Wait()
	switch {
	case slices.Contains(verdicts, Answering):
		return Answering
	case ctx.Err() != nil, len(verdicts) == 0, slices.Contains(verdicts, Unknown):
		return Unknown
	default:
		return Silent
	}
}

// shake tries one handshake until ctx ends.
func shake(ctx context.Context, endpoint netip.AddrPort) Verdict {
	conn, err := (&net.Dialer{KeepAlive: -1}).DialContext(ctx, "tcp", endpoint.String())
	if err != nil {
		return verdictOf(err)
	}
	_ = conn.Close() // nothing was sent that could be lost
	return Answering
}

// verdictOf returns what the error of a handshake says.
func verdictOf(err error) Verdict {
	var timeout interface{ Timeout() bool }
	switch {
	case errors.Is(err, syscall.EHOSTUNREACH), errors.As(err, &timeout) && timeout.Timeout():
		return Silent
	default: // ECONNREFUSED: a host; ENETUNREACH, EPERM, EADDRNOTAVAIL and others: our own network
		return Unknown
	}
}
