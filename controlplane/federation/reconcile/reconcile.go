// Package reconcile defines what the engine of a federation and its Reconcilers share. The engine reads all members and
// elects a leader for each; a Reconciler decides what the leader writes: federated Services, policies. The engine takes the
// Watches of a Reconciler and calls Reconcile for each key that may have changed, in each member that this process leads.
//
// A Reconciler follows three rules. A silent member is not an empty one: its last known objects count. Nothing is removed
// because of a member that was never read, since its objects are unknown. An object with the right content is left alone,
// whatever the epoch that it was written in.
package reconcile

import (
	"context"
	"errors"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
	"github.com/isthmus-net/isthmus/controlplane/internal/liveness"
	"github.com/isthmus-net/isthmus/controlplane/internal/withdrawal"
)

// ErrNotLeader is returned by a write into a member while it is not certain that this process holds the member's Lease.
var ErrNotLeader = errors.New("this process does not lead the member")

// Reconciler is one task of a leader. Its constructor takes the settings from the Federation's spec; a changed spec needs a
// new Reconciler. All methods may be called concurrently.
type Reconciler interface {
	// Name is a short word for logs and metrics.
	Name() string
	// Watches returns the kinds that matter, each once. Every call returns the same.
	Watches() []Watch
	// Reconcile makes one object of one led member agree with all members. It is called after each change, coalesced; again
	// with backoff after an error; and for every key when this process becomes the leader or a member comes or goes. It is
	// never called concurrently for the same key and member. all is sorted by id and contains into. ctx ends with the
	// leadership.
	Reconcile(ctx context.Context, key Key, into Writer, all []Member) error
}

// Runner is a Reconciler with work besides Reconcile, such as a wait for something that is not a Watch.
type Runner interface {
	// Run works until ctx ends, also while this process leads no member. It calls enqueue to have keys reconciled again.
	Run(ctx context.Context, enqueue Enqueue) error
}

// Enqueue has a key reconciled again in the given members, as far as this process leads them. Without members it means all.
type Enqueue func(key Key, in ...clusterset.ClusterID)

// Guarded is a Reconciler that holds back withdrawals that look like an accident.
type Guarded interface {
	// Holds returns the withdrawals that are held back.
	Holds() []withdrawal.Hold
	// Release accepts all withdrawals of a member that are held back.
	Release(of clusterset.ClusterID)
}

// ReachabilityObserver is a Reconciler that reports in members whether another member is reachable.
type ReachabilityObserver interface {
	// ObservesReachability does nothing. When a member becomes unreachable or reachable, all its keys are reconciled again
	// in all led members.
	ObservesReachability()
}

// Witness is a Reconciler that knows endpoints of members.
type Witness interface {
	// Answers tells whether endpoints of a member whose API server does not answer do so. It may take a few seconds. all are
	// the members as for Reconcile.
	Answers(ctx context.Context, id clusterset.ClusterID, all []Member) liveness.Verdict
	// Reach tries now and then whether endpoints of a reachable member can be reached from here, for Answers.
	Reach(ctx context.Context, id clusterset.ClusterID, all []Member)
}

// Key names one object that a Reconciler maintains in all members: a federated Service, a policy. The Reconciler defines
// the meaning of the fields.
type Key struct{ Kind, Namespace, Name string }

// Watch is one kind whose changes matter to a Reconciler.
type Watch struct {
	objectcache.Kind

	// Keys returns the keys to reconcile after o was created, changed (it is called with the old and the new object) or
	// deleted. It may read from, which includes the change, but perhaps not yet others that were made with it.
	Keys func(from Member, o client.Object) []Key
	// Deleted, if not nil, is called before Keys when this process watched while o was deleted; o was its last state. An object that
	// is merely missing, such as after a restart of this process or the loss of a database, was not seen to be deleted.
	Deleted func(from Member, o client.Object)
	// Counted, if not nil, reports whether the Reconciler made o and the Federation's status counts it.
	Counted func(o client.Object) bool
}

// Kinds returns the kinds of watches.
func Kinds(watches []Watch) []objectcache.Kind {
	kinds := make([]objectcache.Kind, 0, len(watches))
	for _, w := range watches {
		kinds = append(kinds, w.Kind)
	}
	return kinds
}

// Member is a member cluster as this supervisor sees it. Reads come from a cache, which stays as it was while the member's
// API server is silent and Reachable is false. Before the cache is complete they fail with objectcache.ErrNotSynced. Get
// and List know only the kinds of the Reconciler's own Watches, and the caller owns the results. List knows the options
// client.InNamespace, client.MatchingLabels, client.MatchingLabelsSelector and objectcache.Local.
type Member interface {
	ID() clusterset.ClusterID
	client.Reader
	// Synced reports whether the member was read completely once. Reads then fail with objectcache.ErrNotSynced only for
	// kinds that are skipped because the API server denies them.
	Synced() bool
	// Reachable reports whether the member's API server answers now, and belongs to the member.
	Reachable() bool
	// Dead reports whether the member's API server has not answered for a while, and its endpoints do not answer either.
	Dead() bool
	// Supervisor reports whether the member claims to be a supervisor.
	Supervisor() bool
}

// Writer writes into the one member that this process leads. Each write carries the epoch, so the member refuses the writes
// of a former leader, and each fails with ErrNotLeader as soon as it is not certain that this process holds the Lease.
// Writes add the epoch's annotation to the given object. Callers do not compare it: an object with the right content is
// left alone, whatever its epoch.
type Writer interface {
	Member
	// Epoch counts how often the member's leader has changed.
	Epoch() int64
	// Live returns a reader that asks the member's API server, for what no Watch keeps.
	Live() client.Reader
	// Create creates obj. The error is AlreadyExists when any object has the name, also one that is not the federation's.
	Create(ctx context.Context, obj client.Object) error
	// TryCreate asks the API server whether it would create obj. Nothing is stored.
	TryCreate(ctx context.Context, obj client.Object) error
	// Apply creates or changes an object that belongs to the federation as a whole, by server-side apply. It removes the
	// fields of others, except for the labels and annotations in keep.
	Apply(ctx context.Context, obj client.Object, keep ...string) error
	// Replace replaces the object that was read by obj, including fields of others that Apply leaves. The resourceVersion
	// of obj is a precondition, and a difference is a conflict.
	Replace(ctx context.Context, obj client.Object) error
	// ApplyStatus sets the status of an existing object to that of obj, whose resourceVersion must be current.
	ApplyStatus(ctx context.Context, obj client.Object) error
	// Annotate sets annotations of an object of any owner; the value "" removes one. The uid and resourceVersion of obj are
	// preconditions, and a difference is a conflict: an event about the change is then recorded once. It does not create
	// the object, and an object that was deleted meanwhile is not an error.
	Annotate(ctx context.Context, obj client.Object, annotations map[string]string) error
	// Delete deletes obj if it is still the object that was read: its uid and resourceVersion are preconditions, and a
	// difference is a conflict. An object that was deleted meanwhile is not an error.
	Delete(ctx context.Context, obj client.Object) error
	// Event records an event on o. Callers record one only when something happened.
	Event(o client.Object, eventtype, reason, note string)
}
