package membership

import (
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/fences"
)

// A cluster that joins reserves the labels of Isthmus, and one that leaves no longer does. The accounts of a broker may write
// these labels in the broker's namespace, and nowhere else.
func TestJoinReservesLabels(t *testing.T) {
	info, asAdmin := deploy(t, Broker{Namespace: "reserved", ClusterSetID: "prod", Ranges: cidrs("243.0.0.0/8")})
	member := cluster(t, &memberServer)
	r := request(info, "a", 1)
	if _, err := Join(t.Context(), asAdmin, member, r); err != nil {
		t.Fatal(err)
	}
	wanted, err := fences.Policies(r.Namespace)
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range wanted {
		if err := member.Get(t.Context(), client.ObjectKeyFromObject(o), o); err != nil {
			t.Errorf("after the join: %v", err)
		}
	}
	if _, err := Leave(t.Context(), asAdmin, member, r.Namespace); err != nil {
		t.Fatal(err)
	}
	for _, o := range wanted {
		if err := member.Get(t.Context(), client.ObjectKeyFromObject(o), &admissionv1.ValidatingAdmissionPolicy{}); !apierrors.IsNotFound(err) {
			t.Errorf("after leaving, %s: %v", o.GetName(), err)
		}
	}
	for namespace, want := range map[string]bool{"reserved": true, "default": false, "": false} {
		review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
			User: "system:serviceaccount:reserved:member-a", Groups: []string{"system:serviceaccounts", "system:serviceaccounts:reserved"},
			ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: "use", Group: "isthmus.dev", Resource: "reserved", Name: namespace},
		}}
		if err := asAdmin.Create(t.Context(), review); err != nil || review.Status.Allowed != want {
			t.Errorf("a member may use reserved labels in namespace %q: %t, %v", namespace, review.Status.Allowed, err)
		}
	}
}
