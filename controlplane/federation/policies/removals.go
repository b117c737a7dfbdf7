package policies

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
	"github.com/isthmus-net/isthmus/controlplane/internal/withdrawal"
)

// removalKept is how long the deletion of a copy counts that this process saw.
const removalKept = time.Minute

// removals tell the copies that users deleted from those that were lost. A copy was deleted if the leader of its member watched while
// it went, did not delete it itself, and its namespace stays. If many copies of a member go at a time, they were lost.
type removals struct {
	// guard judges by member what was deleted: its sources are the members, its keys the policies with copies there.
	guard   *withdrawal.Guard[reconcile.Key]
	enqueue func(reconcile.Key)

	mu      sync.Mutex
	deleted map[policyIn]deletion
	ours    map[policyIn]types.UID // copies that this process deletes
	terms   map[clusterset.ClusterID]term
}

// deletion is a copy that this process saw being deleted.
type deletion struct {
	uid   types.UID
	marks map[string]string // its annotations
	at    time.Time
}

// term is the time for which this process leads a member.
type term struct {
	epoch int64
	since time.Time
}

func newRemovals(times withdrawal.Times, enqueue func(reconcile.Key)) *removals {
	r := &removals{enqueue: enqueue, deleted: map[policyIn]deletion{}, ours: map[policyIn]types.UID{}, terms: map[clusterset.ClusterID]term{}}
	r.guard = withdrawal.New(withdrawal.Config[reconcile.Key]{
		Times: times,
		Changed: func(_ clusterset.ClusterID, keys []reconcile.Key) {
			for _, key := range keys {
				enqueue(key)
			}
		},
		Decided: func(d withdrawal.Decision) {
			if d.Outcome == withdrawal.Held {
				r.lost(d.Source)
			}
		},
	})
	return r
}

// seen returns a function that records that a copy was deleted.
func (r *removals) seen(kind federationv1alpha1.PolicyKind) func(reconcile.Member, client.Object) {
	return func(from reconcile.Member, o client.Object) {
		if _, ok := copyOf(o); !ok {
			return
		}
		key := keyOf(kind, o.GetNamespace(), o.GetName())
		of := policyIn{from.ID(), key}
		r.mu.Lock()
		defer r.mu.Unlock()
		uid, ours := r.ours[of]
		delete(r.ours, of)
		if ours && uid == o.GetUID() {
			return
		}
		for other, d := range r.deleted {
			if time.Since(d.at) > removalKept {
				delete(r.deleted, other)
			}
		}
		r.deleted[of] = deletion{o.GetUID(), o.GetAnnotations(), time.Now()}
		r.guard.Offered(from.ID(), key)
		r.guard.Vanished(from.ID(), key)
	}
}

// own records that this process is about to delete a copy.
func (r *removals) own(member clusterset.ClusterID, key reconcile.Key, uid types.UID) {
	r.guard.Withdrawn(member, key)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ours[policyIn{member, key}] = uid
}

// lost forgets the deletions in a member: they are so many that somebody lost the copies.
func (r *removals) lost(member clusterset.ClusterID) {
	r.mu.Lock()
	var keys []reconcile.Key
	for of := range r.deleted {
		if of.member == member {
			delete(r.deleted, of)
			keys = append(keys, of.key)
		}
	}
	r.mu.Unlock()
	for _, key := range keys {
		r.enqueue(key)
	}
}

// leads records that this process leads a member. At the beginning of a term it forgets what the guard knows of the member: without the
// Lease this process saw the deletions that users made, and not that the leader recorded them, so a few minutes of them look like a loss.
func (r *removals) leads(into reconcile.Writer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if t, led := r.terms[into.ID()]; !led || t.epoch != into.Epoch() {
		r.guard.Forget(into.ID())
		r.terms[into.ID()] = term{into.Epoch(), time.Now()}
	}
}

// isDeleted reports whether a user deleted the copy of from, the origin, in a member while this process led the member. The copy of an
// earlier origin of that name does not count: the user who created the new one did not know of the deletion.
func (r *removals) isDeleted(into reconcile.Writer, key reconcile.Key, from *observed) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	of, now := policyIn{into.ID(), key}, time.Now()
	d, ok := r.deleted[of]
	if t := r.terms[into.ID()]; ok && (!isCopyOf(d.marks, string(from.member), from.object) || d.at.Before(t.since) || now.Sub(d.at) > removalKept) {
		delete(r.deleted, of)
		ok = false
	}
	return ok
}

// done forgets a deletion.
func (r *removals) done(member clusterset.ClusterID, key reconcile.Key) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.deleted, policyIn{member, key})
}

// drop forgets a deletion that is neither a loss nor a removal that waits to be recorded. For example, six copies go with their kind; the copy
// that a user deletes a minute later is no loss.
func (r *removals) drop(member clusterset.ClusterID, key reconcile.Key) {
	r.guard.Withdrawn(member, key)
	r.done(member, key)
}

// there records that a member has a copy, unless that copy was deleted after the caller had read it.
func (r *removals) there(member clusterset.ClusterID, key reconcile.Key, uid types.UID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	of := policyIn{member, key}
	if d, ok := r.deleted[of]; ok && d.uid == uid {
		return
	}
	r.guard.Offered(member, key)
	delete(r.deleted, of)
}

// removal records in a member that a user deleted the copy of an origin there. The leader of the origin's cluster removes the origin then.
type removal struct {
	cluster clusterset.ClusterID // of the origin
	uid     types.UID            // of the origin
	asked   string               // by which annotations users asked to replicate the origin (see askedBy)
	stored  *corev1.ConfigMap
}

// of reports whether the removal is one of this origin. A user who has annotated it anew keeps it.
func (r *removal) of(origin *unstructured.Unstructured) bool {
	return r != nil && r.uid == origin.GetUID() && r.asked == askedBy(origin)
}

// took reports whether the removal is that of the origin of copied, a copy.
func (r *removal) took(copied *unstructured.Unstructured) bool {
	if r == nil || copied == nil {
		return false
	}
	cluster, ok := copyOf(copied)
	return ok && r.cluster == clusterset.ClusterID(cluster) && string(r.uid) == copied.GetAnnotations()[annotationOriginUID]
}

// ended reports whether the record of a removal in h has served: a user took the removal back, or the origin and its copies are gone. Leaders
// of other members see an origin vanish, and need the record to tell that from an accident, so it stays as long as any of them may have a copy.
func (h *observed) ended(all []observed) bool {
	if from := origin(all); from != nil {
		return h.object != nil || !h.removal.of(from.object)
	}
	if !withdrawn(h.removal.cluster, all) {
		return h.object != nil
	}
	return !slices.ContainsFunc(all, func(other observed) bool { return !other.read || h.removal.took(other.object) })
}

// removalName returns the name of the ConfigMap of a policy.
func removalName(key reconcile.Key) string { return "federation-removal-" + digest(key) }

func readRemoval(c *corev1.ConfigMap) *removal {
	return &removal{cluster: clusterset.ClusterID(c.Data["origin"]), uid: types.UID(c.Data["uid"]), asked: c.Data["asked"], stored: c}
}

// reports selects the reports of leaders about policies.
var reports = func() labels.Selector {
	values, err := labels.NewRequirement(labelReport, selection.In, []string{reportRefusal, reportRemoval})
	if err != nil {
		panic(err) // it is constant
	}
	return labels.NewSelector().Add(*values)
}()

// removeCopy records that a user deleted the copy in a member, which this process saw. done states that nothing else is to be done about the
// policy there now: s would create the copy again.
func (r *Reconciler) removeCopy(ctx context.Context, key reconcile.Key, into reconcile.Writer, here *observed, all []observed, s step) (done bool, err error) {
	from := origin(all)
	if here.object != nil {
		if _, ok := copyOf(here.object); ok {
			r.removals.there(into.ID(), key, here.object.GetUID())
		} else {
			r.removals.drop(into.ID(), key) // a user's object
		}
		return false, nil
	}
	if from == nil || !here.namespace || !here.served || here.removal.of(from.object) {
		// The copy was not one of an origin that comes later, went with its namespace or its kind, or its removal is recorded. A record
		// counts when it is in the cache: before, the copy would be created again.
		r.removals.drop(into.ID(), key)
	}
	if s.verb != create || !r.removals.isDeleted(into, key, from) {
		return false, nil
	}
	if denial := r.config.Grants.Policy(into.ID(), key.Namespace, key.Name); denial != nil || r.endings.Ended(into.ID(), key.Namespace) {
		r.removals.done(into.ID(), key)
		if denial != nil {
			into.Event(from.object, corev1.EventTypeWarning, "RemovalUndone", fmt.Sprintf("the copy was deleted in this cluster, and is written again: %v", denial))
		}
		return false, nil
	}
	// The API server is asked at once, and again when the guard has judged: a definition may be deleted and created within a second.
	switch takes, err := takesCopies(ctx, into, s.want); {
	case err != nil:
		return true, err
	case !takes:
		r.removals.drop(into.ID(), key)
		return false, nil
	case r.removals.guard.Keeps(into.ID(), key):
		return true, nil // it is judged in a moment
	}
	if err := into.Apply(ctx, r.record(key, from)); err != nil {
		return true, err
	}
	r.removals.guard.Withdrawn(into.ID(), key) // it is no loss
	return true, nil
}

// takesCopies reports whether the API server of a member still takes copies of the kind of want. When users uninstall a policy engine with its
// definitions, the API server deletes the objects first: leaders see copies go, and notice only later that the kind went.
func takesCopies(ctx context.Context, into reconcile.Writer, want *unstructured.Unstructured) (bool, error) {
	err := into.TryCreate(ctx, want.DeepCopy())
	switch {
	case ceases(err), terminating(err), apierrors.IsNotFound(err), errors.Is(err, objectcache.ErrKindMissing):
		return false, nil
	case refuses(err): // because of its content
		return true, nil
	}
	return err == nil, err
}

// record returns the record that a user deleted the copy of from.
func (r *Reconciler) record(key reconcile.Key, from *observed) *corev1.ConfigMap {
	return &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: r.config.Namespace, Name: removalName(key),
			Labels: map[string]string{v1alpha1.LabelManagedBy: federationv1alpha1.ManagedBy, labelReport: reportRemoval},
		},
		Data: map[string]string{
			"kind": key.Kind, "namespace": key.Namespace, "name": key.Name,
			"origin": string(from.member), "uid": string(from.object.GetUID()), "asked": askedBy(from.object),
		},
	}
}

// isRemoved reports whether the removal in h took the origin of copied, a copy in some member: a user deleted the copy in h, where a grant
// lets the policy be removed.
func (r *Reconciler) isRemoved(key reconcile.Key, h *observed, copied *unstructured.Unstructured) bool {
	return h.removal.took(copied) && r.config.Grants.Policy(h.member, key.Namespace, key.Name) == nil
}

// removeOrigin removes the policy in here, an origin, if a user deleted its copy in another member that may replicate such a policy.
func (r *Reconciler) removeOrigin(ctx context.Context, key reconcile.Key, into reconcile.Writer, here *observed, all []observed) (done bool, err error) {
	if from := origin(all); from == nil || from.member != here.member {
		return false, nil
	}
	for i := range all {
		h := &all[i]
		if h.member == here.member || h.object != nil || !h.removal.of(here.object) || r.config.Grants.Policy(h.member, key.Namespace, key.Name) != nil {
			continue
		}
		switch err := into.Delete(ctx, here.object); {
		case refuses(err):
			r.tellUnremoved(key, into, here.object, fmt.Sprintf(
				"a user deleted its copy in cluster %s, and leaders may not delete this object; run isthmusctl federation create again, or delete it: %v", h.member, err))
			return false, nil // its status says that it waits
		case err != nil:
			return true, err
		}
		r.unremoved.Delete(policyIn{into.ID(), key})
		into.Event(here.object, corev1.EventTypeNormal, "Removed", fmt.Sprintf("a user deleted its copy in cluster %s, so it is removed in all clusters", h.member))
		return true, r.allowed(ctx, into, here)
	}
	r.unremoved.Delete(policyIn{into.ID(), key})
	return false, nil
}

// tellUnremoved records an event when the reason changes why leaders cannot remove an origin.
func (r *Reconciler) tellUnremoved(key reconcile.Key, into reconcile.Writer, origin *unstructured.Unstructured, reason string) {
	if before, _ := r.unremoved.Swap(policyIn{into.ID(), key}, reason); before != reason {
		into.Event(origin, corev1.EventTypeWarning, "NotRemoved", reason)
	}
}
