package agent

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/isthmus-net/isthmus/bpf/lb"
)

// mapAuditor counts the entries of the maps that differ from the intended ones.
type mapAuditor interface {
	Differences(ctx context.Context, want *lb.Audit) (int, error)
}

// DefaultCheckInterval is the average time between two checks of the maps if Config has none.
const DefaultCheckInterval = time.Minute

// checkMaps checks the maps again and again until ctx ends, at random intervals so that nodes do not check in step.
func (a *Agent) checkMaps(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(a.checkInterval/2 + rand.N(a.checkInterval)):
		}
		if err := a.check(ctx); err != nil && ctx.Err() == nil {
			a.log.Error("check the maps; will try again", "err", err)
		}
	}
}

// check counts the entries of the maps that are not as the agent wrote them, and repairs them. Only another process can
// have changed them: the agent is their only regular writer. It also completes a Sync that failed.
func (a *Agent) check(ctx context.Context) error {
	a.syncing.Lock()
	defer a.syncing.Unlock()
	if a.isClosed() || a.input.Snapshot == nil {
		return nil
	}
	if !a.plannerInvalid {
		n, err := a.auditor.Differences(ctx, a.planner.Audit())
		if err != nil {
			return err
		}
		a.mu.Lock()
		a.status.Differences, a.status.Checked = n, time.Now()
		a.mu.Unlock()
		if n == 0 {
			return nil
		}
		a.log.Warn("entries of the maps were not as the agent wrote them; repaired", "entries", n)
		a.plannerInvalid = true // read the maps again
	}
	problems, err := a.apply(ctx)
	a.record(problems, err)
	return err
}
