package policies

import (
	"encoding/json"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// State is what became of a policy in one member.
type State string

// The states.
const (
	Applied          State = "applied"
	Drift            State = "drift" // applied again, since somebody had edited it
	Pending          State = "pending"
	KindMissing      State = "kind missing"
	NamespaceMissing State = "namespace missing"
	Refused          State = "refused" // by the member's API server, or a webhook of it
	Taken            State = "taken"   // the name, by an object of somebody else
	Away             State = "away"    // the member does not answer
)

// Result is what became of a policy in one member, and why.
type Result struct {
	State   State  `json:"state"`
	Message string `json:"message,omitempty"`
}

// Status is what became of a federated policy. It stands on the object that people made (AnnotationStatus).
type Status struct {
	// Origin is the cluster whose policy of this name counts instead of this one, because it is older.
	Origin clusterset.ClusterID `json:"origin,omitempty"`
	// Members are all other members, when this one counts.
	Members map[clusterset.ClusterID]Result `json:"members,omitempty"`
	// Peers are those that are no federated Services, and do not mean the same in every cluster.
	Peers []string `json:"peers,omitempty"`
}

// ReadStatus returns the status of a federated policy; the zero value is one that nobody has looked at.
func ReadStatus(o *unstructured.Unstructured) Status {
	var s Status
	if err := json.Unmarshal([]byte(o.GetAnnotations()[AnnotationStatus]), &s); err != nil {
		return Status{}
	}
	return s
}

// text is s as it stands in the annotation: the same for what is equal.
func (s Status) text() string {
	text, err := json.Marshal(s)
	if err != nil {
		panic(err) // it is made of texts
	}
	return string(text)
}

// statusOf returns the status of the policy that h, one of all, asks to replicate.
func statusOf(h *held, all []held, peers []string) Status {
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
