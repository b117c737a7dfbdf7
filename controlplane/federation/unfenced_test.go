package federation_test

import (
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/federation/admission"
	"github.com/isthmus-net/isthmus/tools/await"
)

// A member lacks the policies that keep former leaders out, such as one whose federation somebody formed by hand. Its leader
// finds out by a trial, and says so until they are there.
func TestUnfencedMember(t *testing.T) {
	w := newTestbed(t)
	config := rest.CopyConfig(servers["c"].Config(t))
	config.Impersonate.UserName = "system:serviceaccount:" + namespace + ":federation-a"
	supervisor, err := client.New(config, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	rejects := func() bool {
		return supervisor.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: "trial", Annotations: map[string]string{federationv1alpha1.AnnotationEpoch: "former"},
			Labels: map[string]string{"app.kubernetes.io/managed-by": federationv1alpha1.ManagedBy},
		}}, client.DryRunAll) != nil
	}
	// The policy compares with a Lease. Nobody leads yet.
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "c"}, Spec: coordinationv1.LeaseSpec{HolderIdentity: new("nobody")}}
	if err := w.admin["c"].Create(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	await.True(t, "the policy is enforced", rejects)
	binding := &admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: admission.FenceName}}
	for _, o := range []client.Object{binding, lease} {
		if err := w.admin["c"].Delete(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		await.True(t, "the policy is enforced no longer", func() bool { return !rejects() })
	}
	w.supervise("a", "one")
	w.awaitLeader("a/one")
	await.True(t, "a says that c is not fenced", func() bool {
		c := w.condition("a", federationv1alpha1.ConditionReady)
		return strings.Contains(w.status("a", "c").Message, "does not reject writes of former leaders") && c.Reason == "MembersUnfenced" && strings.Contains(c.Message, "out of: c;")
	})
	if have := w.status("a", "b").Message; have != "" {
		t.Errorf("of b is said %q", have)
	}
	if err := w.form(w.clusters(ids...)...); err != nil {
		t.Fatal(err)
	}
	await.True(t, "nothing is wrong any more", func() bool {
		return w.status("a", "c").Message == "" && w.condition("a", federationv1alpha1.ConditionReady).Status == metav1.ConditionTrue
	})
}
