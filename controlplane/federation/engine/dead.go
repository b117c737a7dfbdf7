package engine

import (
	"context"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/internal/liveness"
)

// newTracker returns the Tracker that tells which members are dead: an answer of a member's API server is a renewal, and the answers of
// its endpoints are evidence. While the API server of the own cluster does not answer, it judges no member.
func (e *Engine) newTracker() *liveness.Tracker {
	self, _, _ := strings.Cut(e.cfg.Identity, "/")
	return liveness.NewTracker(liveness.Config{
		Self: clusterset.ClusterID(self), Times: e.cfg.Times.Liveness, Evidence: witnesses{e}, Changed: e.livenessChanged,
		Unmetered: true, Log: e.cfg.Log,
	})
}

// livenessChanged reconciles in all led members what depends on a member that died or lives again.
func (e *Engine) livenessChanged(id clusterset.ClusterID) {
	e.cfg.Changed()
	e.mu.Lock()
	m := e.members[id]
	e.mu.Unlock()
	if m != nil {
		e.enqueueShared(m)
	}
}

// witnesses are the Reconcilers that know endpoints of members, as liveness.Evidence.
type witnesses struct{ engine *Engine }

// Answers is part of liveness.Evidence.
func (w witnesses) Answers(ctx context.Context, id clusterset.ClusterID) liveness.Verdict {
	for i, r := range w.engine.cfg.Reconcilers {
		if witness, ok := r.(reconcile.Witness); ok {
			return witness.Answers(ctx, id, w.engine.seenBy(i))
		}
	}
	return liveness.Unknown
}

// reachEndpoints lets the witnesses try after every few probes which members' endpoints can be reached from here.
func (e *Engine) reachEndpoints() {
	tick := time.NewTicker(4 * e.cfg.Times.Probe)
	defer tick.Stop()
	for {
		select {
		case <-e.ctx.Done():
			return
		case <-tick.C:
		}
		for i, r := range e.cfg.Reconcilers {
			witness, ok := r.(reconcile.Witness)
			if !ok {
				continue
			}
			all := e.seenBy(i)
			for _, m := range all {
				if m.Reachable() {
					witness.Reach(e.ctx, m.ID(), all)
				}
			}
		}
	}
}
