package client

import (
	"fmt"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

func imported(service string, n int) ImportedSlice {
	return ImportedSlice{clusterset.ServiceName{Namespace: "shop", Name: service}, fmt.Sprint("slice-", n)}
}

// size counts everything that is remembered.
func (e *sliceEvents) size() int {
	n := len(e.members)
	for _, m := range e.members {
		n += len(m.seen)
		for _, of := range m.vanished {
			n += 1 + len(of)
		}
	}
	return n
}

// A member creates and deletes slices under ever new names. The events stay bounded, cost the same for the last name as for
// the first, and go with the member; another member's are untouched.
func TestSliceEventsAreBounded(t *testing.T) {
	var e sliceEvents
	e.added("west", imported("other", 0), false)
	e.removed("west", imported("other", 1), true)
	began := time.Now()
	for n := range 3 * maxSliceEvents {
		e.added("east", imported("web", n), false)
		e.removed("east", imported("web", n), true)
	}
	for n := range 3 * maxSliceEvents {
		e.added("east", imported("web", -n), false)
	}
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("%d events took %v", 9*maxSliceEvents, took)
	}
	if n := e.size(); n > 2*maxSliceEvents+10 {
		t.Errorf("%d entries are remembered, want at most %d", n, 2*maxSliceEvents+10)
	}
	e.left("east")
	if n := e.size(); n != 4 {
		t.Errorf("%d entries are left beside the present member's 4", n)
	}
	if _, ok := e.take("west", imported("other", 0)); !ok {
		t.Error("the arrival of another member's slice is forgotten")
	}
	if got := e.takeVanished("west", imported("other", 1).Service); len(got) != 1 {
		t.Errorf("another member's vanished slices are %v, want one", got)
	}
}

// A slice that the guard no longer keeps, or that comes back, is not remembered as vanished.
func TestVanishedSlicesAreForgotten(t *testing.T) {
	var e sliceEvents
	for n := range 4 {
		e.removed("east", imported("web", n), true)
		e.removed("east", imported("web", n), true)
	}
	e.settled("east", imported("web", 0))
	e.added("east", imported("web", 1), true)
	if got := e.takeVanished("east", imported("web", 0).Service); len(got) != 2 {
		t.Errorf("the vanished slices are %v, want slice-2 and slice-3", got)
	}
	if m := e.members["east"]; m.count != 0 || len(m.vanished) != 0 {
		t.Errorf("%d are counted in %v after all were taken", m.count, m.vanished)
	}
}

// Warnings about one member's objects neither repeat another's nor outlive the member.
func TestWarningsAreBoundedByMember(t *testing.T) {
	r := registry{log: discard}
	r.warnOnce("west", "v1", errTest)
	for n := range 5 * maxWarned {
		r.warnOnce("east", fmt.Sprint(n), errTest)
	}
	if n := len(r.warned["east"]); n > maxWarned {
		t.Errorf("%d warnings are remembered of one member, want at most %d", n, maxWarned)
	}
	if r.warnOnce("west", "v1", errTest) {
		t.Error("a warning about another member is repeated")
	}
}
