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

// Verdict is the result of a query about a member.
type Verdict int

// The verdicts.
const (
	Unknown   Verdict = iota // it proves nothing
	Answering                // an endpoint of the member serves
	Silent                   // no endpoint of the member answers
)

// String returns one lower-case word.
func (v Verdict) String() string { return [...]string{"unknown", "answering", "silent"}[v] }

// Evidence tells whether the endpoints of a stale member answer. Answers may take a few seconds, and is called for
// several members concurrently.
type Evidence interface {
	Answers(ctx context.Context, id clusterset.ClusterID) Verdict
}

// probedEndpoints is how many endpoints of a member a Probe tries at a time.
const probedEndpoints = 3

// Probe is Evidence by TCP handshakes with a few endpoints of a member, chosen at random each time. It sends no data.
//
// The verdict is Answering if an endpoint accepts a connection. It is Unknown if an endpoint refuses (its host is up,
// but another pod may have its address by now), if an endpoint cannot be tried from here (no route, no such address
// family, not permitted), or if there is none. It is Silent only if every endpoint tried times out, or the network
// reports its host as unreachable.
type Probe struct {
	// Endpoints returns ready TCP endpoints of a member.
	Endpoints func(clusterset.ClusterID) []netip.AddrPort
	// Deadline bounds one handshake; 0 means DefaultTimes().Probe.
	Deadline time.Duration
}

// Answers tries the handshakes, and returns at the first success or when all are over.
func (p *Probe) Answers(ctx context.Context, id clusterset.ClusterID) Verdict {
	deadline := p.Deadline
	if deadline == 0 {
		deadline = DefaultTimes().Probe
	}
	within, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	chosen := slices.Clone(p.Endpoints(id))
	rand.Shuffle(len(chosen), func(i, j int) { chosen[i], chosen[j] = chosen[j], chosen[i] })
	chosen = chosen[:min(len(chosen), probedEndpoints)]
	verdicts := make([]Verdict, len(chosen))
	var dials sync.WaitGroup
	for i, endpoint := range chosen {
		dials.Go(func() {
			verdicts[i] = handshake(within, endpoint)
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

// handshake tries one handshake until ctx ends.
func handshake(ctx context.Context, endpoint netip.AddrPort) Verdict {
	conn, err := (&net.Dialer{KeepAlive: -1}).DialContext(ctx, "tcp", endpoint.String())
	if err != nil {
		return verdictOf(err)
	}
	_ = conn.Close() // no data was sent
	return Answering
}

// verdictOf maps the error of a handshake to a verdict.
func verdictOf(err error) Verdict {
	var timeout interface{ Timeout() bool }
	switch {
	case errors.Is(err, syscall.EHOSTUNREACH), errors.As(err, &timeout) && timeout.Timeout():
		return Silent
	default: // ECONNREFUSED: the host is up; ENETUNREACH, EPERM, EADDRNOTAVAIL and others: our own network
		return Unknown
	}
}
