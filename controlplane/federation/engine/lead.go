package engine

import (
	"context"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/federation/internal/fenced"
)

// syncTimeout limits how long a new leader waits for other members that are reachable and not read completely.
const syncTimeout = 10 * time.Second

// lead runs the Reconcilers in a member until ctx ends.
func (e *Engine) lead(ctx context.Context, m *managedMember, term fenced.Term) {
	log := e.cfg.Log.With("member", m.ID(), "epoch", term.Epoch)
	log.Info("this process leads the member")
	defer log.Info("this process no longer leads the member")
	led := memberLed.WithLabelValues(string(m.ID()))
	led.Set(1)
	defer led.Set(0)
	recording, stopRecording := context.WithCancel(ctx)
	defer stopRecording()
	if err := m.events.Run(recording, log); err != nil {
		log.Error("events cannot be written", "err", err)
	}
	recorder := m.events.NewRecorder(e.cfg.Scheme, "isthmus-federation")
	var working sync.WaitGroup
	working.Go(func() { e.proveFence(ctx, m) })
	for i, r := range e.cfg.Reconcilers {
		working.Go(func() {
			if !e.awaitSync(ctx, i, m) {
				return
			}
			q := newQueue(e, i, m, fenced.New(m.views[i], term, m.Client(), recorder), log.With("component", r.Name()))
			e.mu.Lock()
			e.queues[q] = true
			e.mu.Unlock()
			e.fill(q)
			q.run(ctx)
			e.mu.Lock()
			defer e.mu.Unlock()
			delete(e.queues, q)
		})
	}
	working.Wait()
	<-ctx.Done()
}

// awaitSync waits until Reconciler i has read the led member, and the other members as far as they can be read now. It
// returns false if ctx ends first. Reconcilers do not wait for one another, because a right may be missing for one.
func (e *Engine) awaitSync(ctx context.Context, i int, m *managedMember) bool {
	began := time.Now()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for !m.views[i].Synced() || time.Since(began) < syncTimeout && !e.othersSynced(i) {
		select {
		case <-ctx.Done():
			return false
		case <-tick.C:
		}
	}
	return true
}

// othersSynced reports whether Reconciler i has read every member that can be read.
func (e *Engine) othersSynced(i int) bool {
	for _, m := range e.all() {
		state, v := m.State(), m.views[i]
		if !state.Probed || state.Problem == "" && !v.Synced() && len(v.Forbidden()) == 0 {
			return false
		}
	}
	return true
}
