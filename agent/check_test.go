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

// What somebody did to the maps is counted and put right, within one and a half intervals; maps that are as they
// should be cost no write.
func TestCheckPutsRight(t *testing.T) {
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
			t.Errorf("nobody meddled: %d differences, checked %s, %d writes", s.Differences, s.Checked, f.Writes()-writes)
		}
		a.syncing.Lock()
		f.Corrupt(func(s lb.State) {
			clear(s.Slots)
			delete(s.Backends, 2)
		})
		a.syncing.Unlock()
		<-time.After(DefaultCheckInterval * 3 / 2)
		synctest.Wait()
		if s := a.Status(); s.Differences != 7 && s.Differences != 0 { // the next check may have been already
			t.Errorf("%d differences, want 7: six slots and a backend", s.Differences)
		}
		if diff := cmp.Diff(withoutIDs(before), withoutIDs(text(t, f))); diff != "" {
			t.Errorf("not put right (-want +got):\n%s", diff)
		}
		if err := a.Status().Ready(); err != nil {
			t.Errorf("not ready after it was put right: %v", err)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// The count is that of the last check. Until what is wrong has been put right, the agent is not ready.
func TestCheckThatCannotPutRight(t *testing.T) {
	f := datapath.NewFake(lb.NewState())
	a := mustNew(t, f)
	if err := a.check(t.Context()); err != nil || !a.Status().Checked.IsZero() {
		t.Errorf("before the first snapshot there is nothing to compare with: %v", err)
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
	for i, want := range []int{1, 0} { // what was found is done, then there is nothing to be found
		if err := a.check(t.Context()); err != nil {
			t.Fatal(err)
		}
		if s := a.Status(); s.Differences != want || s.Ready() != nil {
			t.Errorf("check %d: %d differences, ready says %v; want %d", i, s.Differences, s.Ready(), want)
		}
	}
}
