package policies

import (
	"encoding/json"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// State is the state of a policy in one member.
type State string

// States of a policy in a member.
const (
	Applied          State = "applied"
	Drift            State = "drift" // applied again after an edit of the copy
	Pending          State = "pending"
	KindMissing      State = "kind missing"
	NamespaceMissing State = "namespace missing"
	Refused          State = "refused" // by the member's API server or one of its webhooks
	Taken            State = "taken"   // the name, by a user's object
	Unreachable      State = "unreachable"
	Removed          State = "removed" // by a user, who deleted the copy
	Denied           State = "denied"  // in the member itself: no grant of the Federation allows to replicate it
)

// Result is the state of a policy in one member, and its reason.
type Result struct {
	State   State  `json:"state"`
	Message string `json:"message,omitempty"`
}

// Status is the state of a federated policy in all members, written on its origin (AnnotationStatus).
type Status struct {
	// Origin is the cluster with an older policy of this name, which counts instead of this one.
	Origin clusterset.ClusterID `json:"origin,omitempty"`
	// Denied is why no member gets the policy: no grant of the Federation allows it.
	Denied string `json:"denied,omitempty"`
	// Members are the results in all other members, if this policy counts.
	Members map[clusterset.ClusterID]Result `json:"members,omitempty"`
	// Peers are the peers that are not federated Services and mean different objects in each cluster.
	Peers []string `json:"peers,omitempty"`
}

// ReadStatus returns the status of a federated policy, the zero Status if it has none yet.
func ReadStatus(o *unstructured.Unstructured) Status {
	var s Status
	if err := json.Unmarshal([]byte(o.GetAnnotations()[AnnotationStatus]), &s); err != nil {
		return Status{}
	}
	return s
}

// text returns the value of the annotation. It is equal for equal statuses.
func (s Status) text() string {
	text, err := json.Marshal(s)
	if err != nil {
		panic(err) // it consists of strings
	}
	return string(text)
}

// statusOf returns the status of the policy in h, one of all, that users asked to replicate.
func statusOf(h *observed, all []observed, peers []string) Status {
	if h.denial != nil {
		return Status{Denied: h.denial.Error(), Peers: peers}
	}
	from := origin(all)
	if from.member != h.member {
		return Status{Origin: from.member, Peers: peers}
	}
	s := Status{Members: map[clusterset.ClusterID]Result{}, Peers: peers}
	for i := range all {
		if other := &all[i]; other.member != h.member {
			s.Members[other.member] = result(other, from)
		}
	}
	return s
}
