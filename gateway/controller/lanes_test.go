package controller

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/isthmus-net/isthmus/gateway/openstack"
)

// lanesTestbed has lanes whose calls wait to be run, and a clock.
type lanesTestbed struct {
	*lanes
	clock time.Time
	calls []func()
	woken []string
	later []time.Duration
}

func newLanesTestbed(t *testing.T) *lanesTestbed {
	t.Helper()
	b := &lanesTestbed{clock: time.Unix(1e9, 0)}
	b.lanes = newLanes(t.Context(), func(n types.NamespacedName) { b.woken = append(b.woken, n.Name) }, func(call func()) { b.calls = append(b.calls, call) }, slog.New(slog.DiscardHandler))
	b.now = func() time.Time { return b.clock }
	b.lanes.later = func(d time.Duration, wake func()) { b.later = append(b.later, d); wake() }
	return b
}

// begin starts a call that returns err, and reports whether it was started.
func (b *lanesTestbed) begin(lane, key string, err error) bool {
	return b.start(lane, types.NamespacedName{Name: key}, func(context.Context) (func(), error) { return nil, err })
}

// end lets the oldest call return, and stores its result.
func (b *lanesTestbed) end() {
	b.calls[0]()
	b.calls = b.calls[1:]
	_ = b.collect()
}

// A lane makes one call at a time, also while the result of the last one is not stored. It wakes the keys that wait.
func TestLanes(t *testing.T) {
	b := newLanesTestbed(t)
	if !b.begin("ports", "a", nil) || b.begin("ports", "b", nil) || b.begin("ports", "b", nil) || !b.begin("pairs/gw1", "c", nil) {
		t.Error("a lane makes two calls at a time, or waits for another")
	}
	if !b.wait("pairs/", types.NamespacedName{Name: "d"}) || b.wait("quota", types.NamespacedName{Name: "d"}) {
		t.Error("the busy lane is unknown")
	}
	b.calls[0]()
	if b.begin("ports", "b", nil) {
		t.Error("a call began before the last result was stored")
	}
	b.end()
	if want := []string{"results", "results", "a", "b"}; !slices.Equal(b.woken, want) || len(b.later) > 0 {
		t.Errorf("woken %v after pauses %v, want %v", b.woken, b.later, want)
	}
	b.woken = nil
	b.end()
	if want := []string{"results", "c", "d"}; !slices.Equal(b.woken, want) {
		t.Errorf("woken %v, want %v", b.woken, want)
	}
}

// After failures a lane pauses, longer each time, or as long as the cloud asks for. Its work ages meanwhile.
func TestLanesPause(t *testing.T) {
	b := newLanesTestbed(t)
	began := b.clock
	fail := func(err error) (pause time.Duration) {
		t.Helper()
		if !b.begin("ports", "a", err) {
			t.Fatal("it pauses for too long")
		}
		b.end()
		pause = b.later[len(b.later)-1]
		b.clock = b.clock.Add(pause - time.Millisecond)
		if b.begin("ports", "a", err) {
			t.Errorf("it did not pause for %v", pause)
		}
		b.clock = b.clock.Add(time.Millisecond)
		return pause
	}
	var pauses []time.Duration
	for range 10 {
		pauses = append(pauses, fail(errors.New("503")))
	}
	if pauses[0] != firstRetry || pauses[1] != 2*firstRetry || pauses[9] != lastRetry {
		t.Errorf("pauses %v", pauses)
	}
	if got := fail(&openstack.Paused{Until: b.clock.Add(7 * time.Minute)}); got != 7*time.Minute {
		t.Errorf("Retry-After: %v", got)
	}
	if got, want := b.ages()["ports"], b.clock.Sub(began); got != want {
		t.Errorf("the work is %v old, want %v", got, want)
	}
	if !b.begin("ports", "a", nil) {
		t.Fatal("it pauses for too long")
	}
	b.end()
	if got := b.ages()["ports"]; got != 0 {
		t.Errorf("finished work is %v old", got)
	}
	if got := fail(errors.New("503")); got != firstRetry {
		t.Errorf("after a success it pauses for %v", got)
	}
}
