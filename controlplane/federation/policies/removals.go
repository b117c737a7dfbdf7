package policies

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
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

// leads records that this process leads a member.
func (r *removals) leads(into reconcile.Writer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if t, led := r.terms[into.ID()]; !led || t.epoch != into.Epoch() {
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

// users records that a member has a user's object instead of a copy.
func (r *removals) users(member clusterset.ClusterID, key reconcile.Key) {
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
	stored  *corev1.ConfigMap
}

// of reports whether the removal is one of this origin.
func (r *removal) of(origin *unstructured.Unstructured) bool {
	return r != nil && r.uid == origin.GetUID()
}

// removalName returns the name of the ConfigMap of a policy.
func removalName(key reconcile.Key) string { return "federation-removal-" + digest(key) }

func readRemoval(c *corev1.ConfigMap) *removal {
	return &removal{cluster: clusterset.ClusterID(c.Data["origin"]), uid: types.UID(c.Data["uid"]), stored: c}
}

// reports selects the reports of leaders about policies.
var reports = func() labels.Selector {
	values, err := labels.NewRequirement(labelReport, selection.In, []string{reportRefusal, reportRemoval})
	if err != nil {
		panic(err) // it is constant
	}
	return labels.NewSelector().Add(*values)
}()

// removeCopy records that a user deleted the copy in a member, which this process saw, and deletes a record that has served. done states
// that nothing else is to be done about the policy there now: verb would create the copy again.
func (r *Reconciler) removeCopy(ctx context.Context, key reconcile.Key, into reconcile.Writer, here *observed, all []observed, verb verb) (done bool, err error) {
	from := origin(all)
	if here.removal != nil && (from != nil && !here.removal.of(from.object) || from == nil && withdrawn(here.removal.cluster, all)) {
		if err := into.Delete(ctx, here.removal.stored); err != nil {
			return false, err
		}
	}
	if here.object != nil {
		if _, ok := copyOf(here.object); ok {
			r.removals.there(into.ID(), key, here.object.GetUID())
		} else {
			r.removals.users(into.ID(), key)
		}
		return false, nil
	}
	if from == nil || !here.namespace || !here.served {
		r.removals.done(into.ID(), key) // it was no copy of an origin that comes later, or went with its namespace or its kind
	}
	if verb != create || !r.removals.isDeleted(into, key, from) {
		return false, nil
	}
	if denial := r.config.Grants.Policy(into.ID(), key.Namespace, key.Name); denial != nil || r.endings.Ended(into.ID(), key.Namespace) {
		r.removals.done(into.ID(), key)
		if denial != nil {
			into.Event(from.object, corev1.EventTypeWarning, "RemovalUndone", fmt.Sprintf("the copy was deleted in this cluster, and is written again: %v", denial))
		}
		return false, nil
	}
	if r.removals.guard.Keeps(into.ID(), key) {
		return true, nil // it is judged in a moment
	}
	if err := into.Apply(ctx, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: r.config.Namespace, Name: removalName(key),
			Labels: map[string]string{v1alpha1.LabelManagedBy: federationv1alpha1.ManagedBy, labelReport: reportRemoval},
		},
		Data: map[string]string{
			"kind": key.Kind, "namespace": key.Namespace, "name": key.Name, "origin": string(from.member), "uid": string(from.object.GetUID()),
		},
	}); err != nil {
		return true, err
	}
	r.removals.done(into.ID(), key)
	r.removals.guard.Withdrawn(into.ID(), key) // it is no loss
	return true, nil
}

// removeOrigin removes the policy in here, an origin, if a user deleted its copy in another member that may replicate such a policy.
func (r *Reconciler) removeOrigin(ctx context.Context, key reconcile.Key, into reconcile.Writer, here *observed, all []observed) (done bool, err error) {
	if from := origin(all); from == nil || from.member != here.member {
		return false, nil
	}
	for i := range all {
		h := &all[i]
		if h.member == here.member || !h.removal.of(here.object) || r.config.Grants.Policy(h.member, key.Namespace, key.Name) != nil {
			continue
		}
		switch err := into.Delete(ctx, here.object); {
		case refuses(err):
			into.Event(here.object, corev1.EventTypeWarning, "NotRemoved", fmt.Sprintf(
				"a user deleted its copy in cluster %s, and leaders may not delete this object; run isthmusctl federation create again, or delete it: %v", h.member, err))
			return false, nil // its status says that it waits
		case err != nil:
			return true, err
		}
		into.Event(here.object, corev1.EventTypeNormal, "Removed", fmt.Sprintf("a user deleted its copy in cluster %s, so it is removed in all clusters", h.member))
		return true, r.allowed(ctx, into, here)
	}
	return false, nil
}
