package simulation

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// tracker measures the time from the start of a change to its arrival. It recognizes a change by its address, which is unique.
// It is safe for concurrent use.
type tracker struct {
	mu    sync.Mutex
	open  map[netip.Addr]*change
	order map[*source][]*change // the open changes of a slice, oldest first
	took  []time.Duration
}

// change is a started change. A zero time means not yet.
type change struct {
	addr     netip.Addr
	from, to time.Time
}

func newTracker() *tracker {
	return &tracker{open: map[netip.Addr]*change{}, order: map[*source][]*change{}}
}

// begin records that s is about to receive an endpoint with address a.
func (t *tracker) begin(s *source, a netip.Addr) {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := &change{addr: a}
	t.open[a] = c
	t.order[s] = append(t.order[s], c)
}

// from records the start of the change to address a.
func (t *tracker) from(a netip.Addr, at time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c := t.open[a]; c != nil && c.from.IsZero() {
		c.from = at
	}
}

// to records the arrival of address a at its destination. Earlier changes of the same slice have arrived with it, even if they
// were overwritten and never observed.
func (t *tracker) to(a netip.Addr, at time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c := t.open[a]; c != nil && c.to.IsZero() {
		c.to = at
	}
}

// evaluate turns arrived changes into times, and returns the number of open ones.
func (t *tracker) evaluate() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	for s, changes := range t.order {
		var arrived time.Time // the earliest arrival of this change or a later one
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

// take returns the times since the last call, and drops open changes.
func (t *tracker) take() (took []time.Duration, missing int) {
	missing = t.evaluate()
	t.mu.Lock()
	defer t.mu.Unlock()
	took = t.took
	t.took = nil
	clear(t.open)
	clear(t.order)
	return took, missing
}

// Propagation summarizes the latencies of changes.
type Propagation struct {
	Changes       int           // written
	Missing       int           // not observed in a within arrivalTimeout after the last one
	Rate          float64       // changes per second
	P50, P99, Max time.Duration // of the observed ones
}

// String formats p in one line.
func (p Propagation) String() string {
	ms := func(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
	return fmt.Sprintf("%d changes at %.1f/s, %d missing: p50 %.1f ms, p99 %.1f ms, max %.1f ms", p.Changes, p.Rate, p.Missing, ms(p.P50), ms(p.P99), ms(p.Max))
}

// propagation summarizes took, which it sorts.
func propagation(took []time.Duration, missing int, over time.Duration) Propagation {
	slices.Sort(took)
	p := Propagation{Changes: len(took) + missing, Missing: missing, P50: quantile(took, 0.5), P99: quantile(took, 0.99), Max: quantile(took, 1)}
	p.Rate = float64(p.Changes) / over.Seconds()
	return p
}

// quantile returns the smallest value of sorted that a share q of the values does not exceed (nearest rank), or 0 if there is
// none.
func quantile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[max(0, int(math.Ceil(q*float64(len(sorted))))-1)]
}
