package client

import (
	"slices"
	"testing"
	"time"

	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/isthmus-net/isthmus/controlplane/broker/internal/quota"
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

// Records that a member changes too fast are read at once and reconciled later. Those of a list, of another member and of this
// member itself are not delayed.
func TestFloodIsDelayed(t *testing.T) {
	q := newQuotaBroker(t, quota.Defaults())
	q.pacer.setLimit(60)
	queue := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[reconcile.Request]())
	defer queue.ShutDown()
	if err := q.changes.Source(func() []clusterset.ServiceName { return nil }).Start(t.Context(), queue); err != nil {
		t.Fatal(err)
	}
	const flood = 100
	var listed []any
	for n := range flood {
		listed = append(listed, q.record("east", n, 1, 1))
	}
	if err := q.records.Replace(listed, "1"); err != nil {
		t.Fatal(err)
	}
	if n := queue.Len(); n != flood {
		t.Errorf("of a list with %d Services %d are reconciled", flood, n)
	}
	for n := range flood {
		q.send(q.record("east", flood+n, 1, 1))
	}
	if n := queue.Len(); n != flood+60 {
		t.Errorf("of %d changes %d are handled at once, want 60", flood, n-flood)
	}
	if n := len(q.Exports(webService(2*flood - 1))); n != 1 {
		t.Errorf("a delayed record is not read")
	}
	q.send(q.record("north", 1000, 1, 1), q.record("west", 1001, 1, 1))
	if n := queue.Len(); n != flood+62 {
		t.Errorf("%d of two changes of other members are handled at once", n-flood-60)
	}
	if names, left := q.pacer.due(time.Now().Add(time.Hour)); len(names) != flood-60 || left {
		t.Errorf("%d Services are due after an hour, want %d; others are left: %t", len(names), flood-60, left)
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
