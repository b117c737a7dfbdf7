package simulation

import (
	"net/netip"
	"testing"
	"time"
)

func addr(text string) netip.Addr { return netip.MustParseAddr(text) }

// The second of three changes of one slice is overwritten before any watch observes it. It has arrived with the third. A change
// of another slice never arrives.
func TestTracker(t *testing.T) {
	t.Parallel()
	begin := time.Now()
	after := func(ms int) time.Time { return begin.Add(time.Duration(ms) * time.Millisecond) }
	tr, s, other := newTracker(), &source{}, &source{}
	for i, text := range []string{"10.0.0.1", "10.0.0.2", "10.0.0.3"} {
		tr.begin(s, addr(text))
		tr.from(addr(text), after(10*i))
		tr.from(addr(text), after(10*i+5)) // observed again: no effect
	}
	tr.begin(other, addr("10.0.1.1"))
	tr.from(addr("10.0.1.1"), begin)
	if open := tr.evaluate(); open != 4 {
		t.Errorf("%d open before anything arrived, want 4", open)
	}
	tr.to(addr("10.0.0.1"), after(8))
	if open := tr.evaluate(); open != 3 {
		t.Errorf("%d open after the first arrived, want 3", open)
	}
	tr.to(addr("10.0.0.3"), after(30))
	tr.to(addr("10.0.0.3"), after(50))
	tr.to(addr("10.9.9.9"), after(50)) // an unknown address
	took, missing := tr.take()
	p := propagation(took, missing, 2*time.Second)
	want := Propagation{Changes: 4, Missing: 1, Rate: 2, P50: 10 * time.Millisecond, P99: 20 * time.Millisecond, Max: 20 * time.Millisecond}
	if p != want {
		t.Errorf("have %v, want %v", p, want)
	}
	if took, missing := tr.take(); len(took) != 0 || missing != 0 {
		t.Errorf("taken twice: %v and %d missing", took, missing)
	}
}

// An arrival without a known start waits for it. An arrival before its start counts as no time.
func TestTrackerLateSource(t *testing.T) {
	t.Parallel()
	tr, s, now := newTracker(), &source{}, time.Now()
	tr.begin(s, addr("10.0.0.1"))
	tr.to(addr("10.0.0.1"), now)
	if open := tr.evaluate(); open != 1 {
		t.Errorf("%d open, want 1", open)
	}
	tr.from(addr("10.0.0.1"), now.Add(time.Microsecond))
	took, missing := tr.take()
	if len(took) != 1 || took[0] != 0 || missing != 0 {
		t.Errorf("took %v, %d missing; want 0s", took, missing)
	}
}

func TestQuantile(t *testing.T) {
	t.Parallel()
	var hundred []time.Duration
	for i := range 100 {
		hundred = append(hundred, time.Duration(i+1))
	}
	for _, tc := range []struct {
		sorted []time.Duration
		q      float64
		want   time.Duration
	}{
		{nil, 0.5, 0}, {hundred[:1], 0.99, 1}, {hundred[:2], 0.5, 1}, {hundred, 0.5, 50}, {hundred, 0.99, 99}, {hundred, 1, 100}, {hundred[:3], 0.5, 2},
	} {
		if have := quantile(tc.sorted, tc.q); have != tc.want {
			t.Errorf("quantile %v of %d is %d, want %d", tc.q, len(tc.sorted), have, tc.want)
		}
	}
}
