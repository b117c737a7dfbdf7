// Package engine runs Reconcilers against the members of a federation.
//
// For each member it keeps a connection and a cache, and takes part in the election of a leader. While this process leads
// the member, it calls every Reconciler for each key that may have changed. For example, a pod of member c becomes ready:
// the connection to c (internal/member) delivers the EndpointSlice to the cache (internal/kube/objectcache), the Watch of
// federated Services maps it to the key of the Service, and the Reconciler writes the new slice into every led member
// through a fenced writer (internal/fenced).
package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/internal/election"
	"github.com/isthmus-net/isthmus/controlplane/federation/internal/member"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/internal/liveness"
)

// Times are the times of elections and the interval between two probes of a member.
type Times struct {
	election.Times

	Probe time.Duration
	// Liveness are the times of package liveness, in which an answer of a member's API server is a renewal.
	Liveness liveness.Times
}

// Config describes an Engine. All fields are required, but for LastingReasons.
type Config struct {
	// Scheme has every kind that is read or written in members.
	Scheme *runtime.Scheme
	// Namespace is the namespace of Isthmus, with the Leases, in every member.
	Namespace string
	// Identity names this process in Leases, as CLUSTER/POD_UNIQUE. No other process ever has the same.
	Identity    string
	Times       Times
	Reconcilers []reconcile.Reconciler
	// LastingReasons are the reasons of events that describe a state and not a change.
	LastingReasons []string
	// Changed is called when the result of States may have changed.
	Changed func()
	Log     *slog.Logger
}

// Engine runs one set of Reconcilers. A changed Federation spec needs a new Engine.
type Engine struct {
	cfg      Config
	limiter  syncLimiter
	liveness *liveness.Tracker

	running sync.WaitGroup
	ctx     context.Context //nolint:containedctx // members come and go while it runs
	cancel  context.CancelFunc

	mu      sync.Mutex
	members map[clusterset.ClusterID]*managedMember
	queues  map[*queue]bool // of the members that this process leads
}

// New starts an Engine without members. It runs until Stop, or until ctx ends.
func New(ctx context.Context, cfg Config) *Engine {
	e := &Engine{cfg: cfg, limiter: newSyncLimiter(), members: map[clusterset.ClusterID]*managedMember{}, queues: map[*queue]bool{}}
	e.ctx, e.cancel = context.WithCancel(ctx)
	e.liveness = e.newTracker()
	e.running.Go(func() { _ = e.liveness.Start(e.ctx) }) // which never fails
	e.running.Go(e.reachEndpoints)
	for i, r := range cfg.Reconcilers {
		if runner, ok := r.(reconcile.Runner); ok {
			e.running.Go(func() {
				if err := runner.Run(e.ctx, func(key reconcile.Key, in ...clusterset.ClusterID) { e.enqueueIn(i, key, in) }); err != nil && e.ctx.Err() == nil {
					cfg.Log.Error("a reconciler of the federation ended", "component", r.Name(), "err", err)
				}
			})
		}
	}
	return e
}

// Stop ends the Engine and waits for all its goroutines. The objects that it wrote stay.
func (e *Engine) Stop() {
	e.cancel()
	for _, m := range e.all() {
		<-m.ended
	}
	e.running.Wait()
}

// SetMembers sets the members to those of the Federation. targets are the addresses and credentials of the members, pinned
// the uids of the clusters that were last seen under their ids.
func (e *Engine) SetMembers(members []federationv1alpha1.MemberCluster, targets map[string]*member.Target, pinned map[string]string) error {
	e.removeExcept(members)
	var errs []error
	for _, spec := range members {
		e.mu.Lock()
		m := e.members[clusterset.ClusterID(spec.ClusterID)]
		e.mu.Unlock()
		if m == nil {
			var err error
			if m, err = e.add(spec, pinned[spec.ClusterID]); err != nil {
				errs = append(errs, fmt.Errorf("spec.members[clusterID=%s]: %w", spec.ClusterID, err))
				continue
			}
		}
		m.Set(spec, targets[spec.ClusterID])
	}
	return errors.Join(errs...)
}

// removeExcept removes the members that are not in wanted, and reconciles everything elsewhere that depends on them.
func (e *Engine) removeExcept(wanted []federationv1alpha1.MemberCluster) {
	want := map[clusterset.ClusterID]bool{}
	for _, spec := range wanted {
		want[clusterset.ClusterID(spec.ClusterID)] = true
	}
	var removed []*managedMember
	e.mu.Lock()
	for id, m := range e.members {
		if !want[id] {
			removed = append(removed, m)
			delete(e.members, id)
		}
	}
	e.mu.Unlock()
	for _, m := range removed {
		m.cancel()
		<-m.ended
		e.liveness.Forget(m.ID())
		memberReachable.DeleteLabelValues(string(m.ID()))
		memberLed.DeleteLabelValues(string(m.ID()))
		e.enqueueShared(m)
	}
}

// enqueueShared reconciles in all led members everything that depends on a member.
func (e *Engine) enqueueShared(m *managedMember) {
	for i := range e.cfg.Reconcilers {
		e.enqueue(i, m.views[i].sharedKeys()...)
	}
}

// ReachableConfig returns the configuration of clients of a member, which stays valid when its address or credentials change. It is nil
// if the member is unknown or cannot be reached.
func (e *Engine) ReachableConfig(id clusterset.ClusterID) *rest.Config {
	e.mu.Lock()
	m := e.members[id]
	e.mu.Unlock()
	if m == nil || !m.Reachable() {
		return nil
	}
	return m.Config()
}

// Release releases everything that the withdrawal guards of the Reconcilers hold back for a member.
func (e *Engine) Release(id clusterset.ClusterID) {
	for _, r := range e.cfg.Reconcilers {
		if g, ok := r.(reconcile.Guarded); ok {
			g.Release(id)
		}
	}
}

// all returns the members, in no order.
func (e *Engine) all() []*managedMember {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Collect(maps.Values(e.members))
}

// seenBy returns the members as Reconciler i sees them, sorted by id.
func (e *Engine) seenBy(i int) []reconcile.Member {
	e.mu.Lock()
	defer e.mu.Unlock()
	var all []reconcile.Member
	for _, m := range e.members {
		all = append(all, m.views[i])
	}
	slices.SortFunc(all, func(a, b reconcile.Member) int { return cmp.Compare(a.ID(), b.ID()) })
	return all
}

// enqueue adds keys of Reconciler i to the queues of all led members.
func (e *Engine) enqueue(i int, keys ...reconcile.Key) { e.enqueueAt(i, nil, keys...) }

// enqueueAt adds keys to the queue of one member, if this process leads it; nil stands for all members.
func (e *Engine) enqueueAt(i int, m *member.Member, keys ...reconcile.Key) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for q := range e.queues {
		if q.index == i && (m == nil || q.member.Member == m) {
			q.add(keys...)
		}
	}
}

// enqueueIn adds a key to the queues of the given members, as far as this process leads them. Without members it means all.
func (e *Engine) enqueueIn(i int, key reconcile.Key, in []clusterset.ClusterID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for q := range e.queues {
		if q.index == i && (len(in) == 0 || slices.Contains(in, q.member.ID())) {
			q.add(key)
		}
	}
}

// queuesOf returns the queues of a member, one for each Reconciler. There are none while another process leads it.
func (e *Engine) queuesOf(m *member.Member) (queues []*queue) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for q := range e.queues {
		if q.member.Member == m {
			queues = append(queues, q)
		}
	}
	return queues
}

// fill adds every key to a queue: those of objects in its own member, and those that other members share.
func (e *Engine) fill(q *queue) {
	for _, m := range e.all() {
		v := m.views[q.index]
		if m == q.member {
			q.add(v.keysOf(v.Each)...)
		} else {
			q.add(v.sharedKeys()...)
		}
	}
}

// reachabilityChanged reconciles everything in a member that is reachable again, and in other members what reports
// reachability.
func (e *Engine) reachabilityChanged(changed *member.Member) {
	e.cfg.Changed()
	memberReachable.WithLabelValues(string(changed.ID())).Set(number(changed.Reachable()))
	e.mu.Lock()
	m := e.members[changed.ID()]
	e.mu.Unlock()
	for i, r := range e.cfg.Reconcilers {
		if _, ok := r.(reconcile.ReachabilityObserver); ok && m != nil {
			e.enqueue(i, m.views[i].sharedKeys()...)
		}
	}
	if !changed.Reachable() {
		return
	}
	for _, q := range e.queuesOf(changed) {
		e.fill(q)
	}
}
