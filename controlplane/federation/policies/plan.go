package policies

import (
	"fmt"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// observed is the state of one policy in one member.
type observed struct {
	member    clusterset.ClusterID
	read      bool                       // the member, and the kind of the policy, were read completely once
	reachable bool                       // the member is reachable now
	served    bool                       // the member has the kind
	namespace bool                       // the member has the policy's namespace, or the policy is cluster-scoped
	object    *unstructured.Unstructured // the object with the policy's name, nil if there is none
	denial    error                      // why the Federation does not replicate object, although users asked for it
	refusal   *refusal                   // the recorded refusal of the API server, nil if there is none
	removal   *removal                   // the recorded removal of the copy by a user, nil if there is none
}

// verb is the action of a leader on a policy.
type verb string

// The verbs.
const (
	leave   verb = "leave" // unchanged
	create  verb = "create"
	replace verb = "replace"
	remove  verb = "remove"
)

// step is the action of a leader in its member.
type step struct {
	verb   verb
	want   *unstructured.Unstructured // to create, or to replace the existing object
	edited bool                       // a user edited the existing object
}

// asks reports whether users asked to replicate the object, and the Federation grants it.
func (h *observed) asks() bool { return h.object != nil && federated(h.object) && h.denial == nil }

// origin returns the origin of a policy: the one that most copies have, as long as it asks to be replicated, because ages are by
// the clocks of other clusters. Otherwise it is the oldest object that asks, and of equally old ones that of the cluster that sorts
// first. It returns nil if there is none.
func origin(all []observed) *observed {
	if i := copied(all); i >= 0 {
		return &all[i]
	}
	var first *observed
	for i := range all {
		h := &all[i]
		if !h.asks() {
			continue
		}
		if first == nil || older(h, first) {
			first = h
		}
	}
	return first
}

// copied returns the index of the object that asks to be replicated and that most copies have, and of several the first one;
// -1 if there is no copy of any.
func copied(all []observed) int {
	copies := map[clusterset.ClusterID]int{}
	for i := range all {
		if all[i].object != nil {
			if cluster, ok := copyOf(all[i].object); ok {
				copies[clusterset.ClusterID(cluster)]++
			}
		}
	}
	most := -1
	for i := range all {
		if n := copies[all[i].member]; all[i].asks() && n > 0 && (most < 0 || n > copies[all[most].member]) {
			most = i
		}
	}
	return most
}

func older(a, b *observed) bool {
	at, bt := a.object.GetCreationTimestamp(), b.object.GetCreationTimestamp()
	if at.Equal(&bt) {
		return a.member < b.member
	}
	return at.Before(&bt)
}

// decide returns the action in one member of all. Only copies are ever replaced or removed.
func decide(into *observed, all []observed) step {
	from := origin(all)
	if from == nil {
		if into.object == nil {
			return step{verb: leave}
		}
		if cluster, ok := copyOf(into.object); ok && withdrawn(clusterset.ClusterID(cluster), all) {
			return step{verb: remove}
		}
		return step{verb: leave}
	}
	if from.member == into.member || !into.read || !into.served || !into.namespace {
		return step{verb: leave}
	}
	want := copyFrom(string(from.member), from.object)
	if into.object == nil && into.removal.of(from.object) {
		return step{verb: leave} // until the leader of its cluster has removed the origin
	}
	if into.object == nil {
		return step{verb: create, want: want}
	}
	if _, ok := copyOf(into.object); !ok || into.object.GetDeletionTimestamp() != nil || matches(into.object, want) {
		return step{verb: leave}
	}
	have := into.object.GetAnnotations()
	edited := isCopyOf(have, string(from.member), from.object) && have[annotationContent] == want.GetAnnotations()[annotationContent]
	return step{verb: replace, want: want, edited: edited}
}

// withdrawn reports whether a cluster certainly no longer asks for copies: it is reachable and has no such policy, or it is
// no longer a member. A cluster that is silent, was never read, or lost the kind has withdrawn nothing.
func withdrawn(cluster clusterset.ClusterID, all []observed) bool {
	for _, h := range all {
		if h.member == cluster {
			return h.read && h.reachable && h.served && !h.asks()
		}
	}
	return true
}

// result returns the state of the policy from in another member.
func result(h, from *observed) Result {
	switch {
	case !h.reachable:
		return Result{State: Unreachable, Message: "its API server does not respond; the policy there stays in its last state"}
	case !h.read:
		return Result{State: Pending, Message: "leaders have not read policies of this kind there; isthmusctl federation status shows whether they lack the right"}
	case !h.served:
		return Result{State: KindMissing, Message: "the member does not have the kind " + from.object.GroupVersionKind().String()}
	case !h.namespace:
		return Result{State: NamespaceMissing, Message: "the member does not have the namespace " + from.object.GetNamespace()}
	}
	want := copyFrom(string(from.member), from.object)
	if h.refusal != nil && h.refusal.content == want.GetAnnotations()[annotationContent] {
		return Result{State: Refused, Message: h.refusal.message}
	}
	if h.object == nil && h.removal.of(from.object) {
		return Result{State: Removed, Message: "a user deleted the copy there, so the policy is about to be removed everywhere"}
	}
	if h.object == nil {
		return Result{State: Pending}
	}
	if h.asks() {
		return Result{State: Taken, Message: "the member has a younger federated policy of this name, which stays; rename or delete that one"}
	}
	if _, ok := copyOf(h.object); !ok {
		return Result{State: Taken, Message: "the member has an object of this name that Isthmus did not create, which stays; rename or delete that one"}
	}
	if !matches(h.object, want) {
		return Result{State: Pending}
	}
	if at := h.object.GetAnnotations()[annotationRestored]; at != "" {
		return Result{State: Drift, Message: fmt.Sprintf("the copy was edited there, and restored at %s", at)}
	}
	return Result{State: Applied}
}
