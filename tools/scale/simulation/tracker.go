package simulation

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// tracker times changes from where they begin to where they are seen. A change is known by the address
// that it brings, which no other change brings. Safe for concurrent use.
type tracker struct {
	mu    sync.Mutex
	open  map[netip.Addr]*change
	order map[*source][]*change // the open ones of a slice, oldest first
	took  []time.Duration
}

// change is one that has begun. The zero time means not yet.
type change struct {
	addr     netip.Addr
	from, to time.Time
}

func newTracker() *tracker {
	return &tracker{open: map[netip.Addr]*change{}, order: map[*source][]*change{}}
}

// begin says that s is about to get an endpoint with address a.
func (t *tracker) begin(s *source, a netip.Addr) {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := &change{addr: a}
	t.open[a] = c
	t.order[s] = append(t.order[s], c)
}

// from says when the change that brings a began.
func (t *tracker) from(a netip.Addr, at time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c := t.open[a]; c != nil && c.from.IsZero() {
		c.from = at
	}
}

// to says that a was seen where it should go. Changes of the same slice that began earlier have arrived
// with it, also when they were overwritten and nobody ever saw them.
func (t *tracker) to(a netip.Addr, at time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c := t.open[a]; c != nil && c.to.IsZero() {
		c.to = at
	}
}

// settle turns changes that have arrived into times, and returns how many have not.
func (t *tracker) settle() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	for s, changes := range t.order {
		var arrived time.Time // of the change or a later one, the earliest of these
		for i, c := range slices.Backward(changes) {
			if !c.to.IsZero() && (arrived.IsZero() || c.to.Before(arrived)) {
				arrived = c.to
			}
			if arrived.IsZero() || c.from.IsZero() {
				continue
			}
			// Two watches of one process may deliver in the wrong order, by microseconds.
			t.took = append(t.took, max(0, arrived.Sub(c.from)))
			delete(t.open, c.addr)
			changes = slices.Delete(changes, i, i+1)
		}
		t.order[s] = changes
		if len(changes) == 0 {
			delete(t.order, s)
		}
	}
	return len(t.open)
}

// take returns the times since the last call, and forgets changes that are open.
func (t *tracker) take() (took []time.Duration, missing int) {
	missing = t.settle()
	t.mu.Lock()
	defer t.mu.Unlock()
	took = t.took
	t.took = nil
	clear(t.open)
	clear(t.order)
	return took, missing
}

// Propagation is how long changes took.
type Propagation struct {
	Changes       int           // written
	Missing       int           // of these, not seen in a within the patience after the last one
	Rate          float64       // of changes, a second
	P50, P99, Max time.Duration // of those seen
}

// String says it in one line.
func (p Propagation) String() string {
	ms := func(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
	return fmt.Sprintf("%d changes at %.1f/s, %d missing: p50 %.1f ms, p99 %.1f ms, max %.1f ms", p.Changes, p.Rate, p.Missing, ms(p.P50), ms(p.P99), ms(p.Max))
}

// propagation reduces took, which it sorts.
func propagation(took []time.Duration, missing int, over time.Duration) Propagation {
	slices.Sort(took)
	p := Propagation{Changes: len(took) + missing, Missing: missing, P50: quantile(took, 0.5), P99: quantile(took, 0.99), Max: quantile(took, 1)}
	p.Rate = float64(p.Changes) / over.Seconds()
	return p
}

// quantile returns the smallest of sorted that is not exceeded by a share q of them (nearest rank), 0 of
// none.
func quantile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[max(0, int(math.Ceil(q*float64(len(sorted))))-1)]
}
