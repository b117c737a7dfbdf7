package agent

import (
	"context"
	"math/rand/v2"
	"time"
)

// DefaultCheckInterval is how often the maps are compared with what they should hold, where Config says nothing.
const DefaultCheckInterval = time.Minute

// checkMaps compares the kernel with what is wanted until ctx ends, at times that differ from node to node.
func (a *Agent) checkMaps(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(a.every/2 + rand.N(a.every)):
		}
		if err := a.check(ctx); err != nil && ctx.Err() == nil {
			a.log.Error("check the maps; will try again", "err", err)
		}
	}
}

// check counts what is not as it should be in the maps and puts it right. Somebody must have meddled with them: the
// agent is their only writer. What a Sync left undone is done again too.
func (a *Agent) check(ctx context.Context) error {
	a.syncing.Lock()
	defer a.syncing.Unlock()
	if a.isClosed() || a.input.Snapshot == nil {
		return nil
	}
	if !a.lost {
		n, err := a.dp.Differences(ctx, a.planner.Audit())
		if err != nil {
			return err
		}
		a.mu.Lock()
		a.status.Differences, a.status.Checked = n, time.Now()
		a.mu.Unlock()
		if n == 0 {
			return nil
		}
		a.log.Warn("entries of the maps were not as the agent wrote them; put right", "entries", n)
		a.lost = true // what the maps hold is to be read anew
	}
	problems, err := a.follow(ctx)
	a.record(problems, err)
	return err
}
