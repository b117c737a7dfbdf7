package client

import (
	"slices"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// A member that changes more than its quota allows delays its own Services, each once and in their order. Another member is not
// delayed.
func TestPacer(t *testing.T) {
	t.Parallel()
	start := time.Unix(1_000_000, 0)
	p := newPacer()
	p.setLimit(60)
	var delayed []clusterset.ServiceName
	for n := range 100 {
		name := webService(n)
		if pass := p.pass("east", name, start); pass != (n < 60) {
			t.Fatalf("change %d passes: %t", n, pass)
		} else if !pass {
			delayed = append(delayed, name)
		}
	}
	for range 1000 { // one Service again and again
		if p.pass("east", webService(99), start) {
			t.Fatal("a delayed Service passes")
		}
	}
	if !p.pass("north", webService(99), start) {
		t.Error("another member is delayed")
	}
	var have []clusterset.ServiceName
	for second := range 41 {
		names, left := p.due(start.Add(time.Duration(second) * time.Second))
		if len(names) > 1 {
			t.Errorf("%d changes in second %d, want at most one", len(names), second)
		}
		have = append(have, names...)
		if left != (len(have) < len(delayed)) {
			t.Errorf("after second %d others are left: %t", second, left)
		}
	}
	if !slices.Equal(have, delayed) {
		t.Errorf("Services in the order %v, want %v", have, delayed)
	}
	if !p.pass("east", webService(0), start.Add(time.Hour)) {
		t.Error("a member that is no longer too fast is delayed")
	}
}

// The delayed Services of one member are bounded, and those of a member that left are handled at once.
func TestPacerIsBounded(t *testing.T) {
	t.Parallel()
	p, now := newPacer(), time.Unix(1_000_000, 0)
	p.setLimit(1)
	passed := 0
	for n := range 2 * maxDelayed {
		if p.pass("east", webService(n), now) {
			passed++
		}
	}
	if passed != maxDelayed {
		t.Errorf("%d changes pass, want %d: one at once, and those after %d delayed ones", passed, maxDelayed, maxDelayed)
	}
	if n := len(p.forget("east")); n != maxDelayed {
		t.Errorf("%d changes were delayed, want %d", n, maxDelayed)
	}
	if names, left := p.due(now.Add(time.Hour)); len(names) > 0 || left {
		t.Errorf("%d changes of a member that left are due, and others are left: %t", len(names), left)
	}
}
