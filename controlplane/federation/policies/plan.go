package policies

import (
	"fmt"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// held is what is known of one member, about one policy.
type held struct {
	member    clusterset.ClusterID
	read      bool                       // it was read completely once, and the policy's kind too
	reachable bool                       // it answers now
	served    bool                       // it has the kind
	namespace bool                       // it has the policy's namespace, or the policy needs none
	object    *unstructured.Unstructured // what has the policy's name; nil is nothing
	refusal   *refusal                   // what its leader was told; nil is nothing
}

// verb is what a leader does about a policy.
type verb string

// The verbs.
const (
	leave   verb = "leave" // as it is
	create  verb = "create"
	replace verb = "replace"
	remove  verb = "remove"
)

// step is what the leader of a member has to do there.
type step struct {
	verb   verb
	want   *unstructured.Unstructured // to create, or to put in place of what is there
	edited bool                       // what is there was edited by somebody
}

// origin returns whose policy counts: of all that people asked to replicate the oldest, and of those as old the one
// of the cluster that sorts first. It returns nil when there is none.
func origin(all []held) *held {
	var first *held
	for i := range all {
		h := &all[i]
		if h.object == nil || !federated(h.object) {
			continue
		}
		if first == nil || older(h, first) {
			first = h
		}
	}
	return first
}

func older(a, b *held) bool {
	at, bt := a.object.GetCreationTimestamp(), b.object.GetCreationTimestamp()
	if at.Equal(&bt) {
		return a.member < b.member
	}
	return at.Before(&bt)
}

// decide returns what has to be done in a member, one of all. Only what is a copy is ever written over or removed.
func decide(into *held, all []held) step {
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
	if into.object == nil {
		return step{verb: create, want: want}
	}
	if _, ok := copyOf(into.object); !ok || into.object.GetDeletionTimestamp() != nil || says(into.object, want) {
		return step{verb: leave}
	}
	have := into.object.GetAnnotations()
	edited := have[annotationOrigin] == want.GetAnnotations()[annotationOrigin] &&
		have[annotationContent] == want.GetAnnotations()[annotationContent]
	return step{verb: replace, want: want, edited: edited}
}

// withdrawn reports whether a cluster surely asks for copies no more: it answers and has no such policy, or it is no
// member any longer. A cluster that is silent, that was never read or that lost the kind has taken nothing back.
func withdrawn(cluster clusterset.ClusterID, all []held) bool {
	for _, h := range all {
		if h.member == cluster {
			return h.read && h.reachable && h.served && (h.object == nil || !federated(h.object))
		}
	}
	return true
}

// result says what became of the policy of from in another member.
func result(h, from *held) Result {
	switch {
	case !h.reachable:
		return Result{State: Away, Message: "its API server does not answer; the policy there is as it was seen last"}
	case !h.read:
		return Result{State: Pending, Message: "leaders have not read policies of this kind there; isthmusctl federation status says whether they lack the right"}
	case !h.served:
		return Result{State: KindMissing, Message: "it does not have the kind " + from.object.GroupVersionKind().String()}
	case !h.namespace:
		return Result{State: NamespaceMissing, Message: "it has no namespace " + from.object.GetNamespace()}
	}
	want := copyFrom(string(from.member), from.object)
	if h.refusal != nil && h.refusal.content == want.GetAnnotations()[annotationContent] {
		return Result{State: Refused, Message: h.refusal.message}
	}
	if h.object == nil {
		return Result{State: Pending}
	}
	if federated(h.object) {
		return Result{State: Taken, Message: "it has a younger federated policy of this name, which stays; rename or delete that one"}
	}
	if _, ok := copyOf(h.object); !ok {
		return Result{State: Taken, Message: "it has an object of this name that Isthmus did not make, which stays; rename or delete that one"}
	}
	if !says(h.object, want) {
		return Result{State: Pending}
	}
	if at := h.object.GetAnnotations()[annotationMended]; at != "" {
		return Result{State: Drift, Message: fmt.Sprintf("somebody edited it there, and it was put right at %s", at)}
	}
	return Result{State: Applied}
}
