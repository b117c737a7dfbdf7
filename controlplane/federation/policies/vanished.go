package policies

import (
	"context"
	"slices"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/internal/withdrawal"
)

// policyIn is a policy in a member.
type policyIn struct {
	member clusterset.ClusterID
	key    reconcile.Key
}

// Run decides on origins that vanished, until ctx ends.
func (r *Reconciler) Run(ctx context.Context, enqueue reconcile.Enqueue) error {
	r.enqueue.Store(&enqueue)
	var running errgroup.Group
	running.Go(func() error { return r.guard.Run(ctx) })
	running.Go(func() error { return r.removals.guard.Run(ctx) })
	return running.Wait()
}

// note tells the guard which clusters ask to replicate a policy, and which have withdrawn it explicitly: those that still
// have the object without the annotation.
func (r *Reconciler) note(key reconcile.Key, all []observed) {
	for i := range all {
		switch h := &all[i]; {
		case h.object == nil:
		case h.asks():
			r.seen.Store(policyIn{h.member, key}, true)
			r.guard.Offered(h.member, key)
		default:
			r.guard.Withdrawn(h.member, key)
		}
	}
}

// keeps reports whether a copy stays although its origin is gone: the origin vanished a moment ago, or together with many
// others. There is no doubt if the object still exists without the annotation, if its namespace was deleted, if its cluster has left, or if a
// user removed the policy in another member.
func (r *Reconciler) keeps(key reconcile.Key, copied *unstructured.Unstructured, all []observed) bool {
	text, _ := copyOf(copied)
	from := clusterset.ClusterID(text)
	i := slices.IndexFunc(all, func(h observed) bool { return h.member == from })
	if i < 0 || all[i].object != nil {
		return false
	}
	removed := slices.ContainsFunc(all, func(h observed) bool { return r.isRemoved(key, &h, copied) })
	if removed || key.Namespace != "" && r.endings.Ended(from, key.Namespace) {
		r.guard.Withdrawn(from, key)
		return false
	}
	if _, before := r.seen.LoadOrStore(policyIn{from, key}, true); before {
		r.guard.Vanished(from, key)
	} else { // it vanished before this process started
		r.guard.Offered(from, key)
		r.guard.VanishedUnseen(from, key)
	}
	return r.guard.Keeps(from, key)
}

// Holds is part of reconcile.Guarded.
func (r *Reconciler) Holds() []withdrawal.Hold { return r.guard.Holds() }

// Release is part of reconcile.Guarded.
func (r *Reconciler) Release(of clusterset.ClusterID) { r.guard.Release(of) }
