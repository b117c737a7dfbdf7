package agent

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/bpf/lb"
)

// Changes of the maps by another process are counted and repaired within one and a half intervals. Intact maps cost no
// write.
func TestCheckRepairsMaps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := datapath.NewFake(lb.NewState())
		a := mustNew(t, f)
		mustSync(t, a, snapshot(3, "10.1.0.1:8080", "10.1.0.2:8080"))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- a.checkMaps(ctx) }()

		before, writes := text(t, f), f.Writes()
		<-time.After(DefaultCheckInterval * 3 / 2)
		synctest.Wait()
		if s := a.Status(); s.Differences != 0 || s.Checked.IsZero() || f.Writes() != writes {
			t.Errorf("intact maps: %d differences, checked %s, %d writes", s.Differences, s.Checked, f.Writes()-writes)
		}
		a.syncing.Lock()
		f.Corrupt(func(s lb.State) {
			clear(s.Slots)
			delete(s.Backends, 2)
		})
		a.syncing.Unlock()
		<-time.After(DefaultCheckInterval * 3 / 2)
		synctest.Wait()
		if s := a.Status(); s.Differences != 7 && s.Differences != 0 { // the next check may have run already
			t.Errorf("%d differences, want 7: six slots and a backend", s.Differences)
		}
		if diff := cmp.Diff(withoutIDs(before), withoutIDs(text(t, f))); diff != "" {
			t.Errorf("not repaired (-want +got):\n%s", diff)
		}
		if err := a.Status().Ready(); err != nil {
			t.Errorf("not ready after the repair: %v", err)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// The count is that of the last check. The agent is not ready until the repair has succeeded.
func TestCheckThatCannotRepair(t *testing.T) {
	f := datapath.NewFake(lb.NewState())
	a := mustNew(t, f)
	if err := a.check(t.Context()); err != nil || !a.Status().Checked.IsZero() {
		t.Errorf("checked before the first snapshot: %v", err)
	}
	mustSync(t, a, snapshot(1, "10.1.0.1:8080"))
	f.Corrupt(func(s lb.State) { clear(s.Frontends) })
	none, full := 0, errors.New("map full")
	f.FailAfter, f.Err = &none, full
	if err := a.check(t.Context()); !errors.Is(err, full) {
		t.Errorf("check: %v, want %v", err, full)
	}
	if s := a.Status(); s.Differences != 1 || !errors.Is(s.Ready(), full) {
		t.Errorf("%d differences, ready says %v; want 1 and %v", s.Differences, s.Ready(), full)
	}
	f.FailAfter = nil
	for i, want := range []int{1, 0} { // the first check repairs, the second finds nothing
		if err := a.check(t.Context()); err != nil {
			t.Fatal(err)
		}
		if s := a.Status(); s.Differences != want || s.Ready() != nil {
			t.Errorf("check %d: %d differences, ready says %v; want %d", i, s.Differences, s.Ready(), want)
		}
	}
}
