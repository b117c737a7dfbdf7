package federation_test

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"testing"

	admissionv1 "k8s.io/api/admission/v1"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/policies"
	"github.com/isthmus-net/isthmus/tools/await"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

// federatedPolicy returns an object of a kind that asks to be replicated.
func federatedPolicy(kind schema.GroupVersionKind, namespace, name string) *unstructured.Unstructured {
	o := &unstructured.Unstructured{}
	o.SetGroupVersionKind(kind)
	o.SetNamespace(namespace)
	o.SetName(name)
	o.SetAnnotations(map[string]string{federationv1alpha1.AnnotationPolicyAntrea: "true"})
	o.Object["spec"] = map[string]any{"podSelector": map[string]any{"matchLabels": map[string]any{"app": "shop"}}}
	return o
}

func networkPolicy(name string) *unstructured.Unstructured {
	return federatedPolicy(networkingv1.SchemeGroupVersion.WithKind("NetworkPolicy"), demo, name)
}

func clusterPolicy(name string) *unstructured.Unstructured {
	return federatedPolicy(schema.GroupVersionKind{Group: "crd.antrea.io", Version: "v1beta1", Kind: "ClusterNetworkPolicy"}, "", name)
}

// policyStates waits until a policy's status has the state want for all other members, and the states of except for those
// in it.
func (w *testbed) policyStates(id clusterset.ClusterID, o *unstructured.Unstructured, want policies.State, except map[clusterset.ClusterID]policies.State) {
	w.t.Helper()
	await.True(w.t, fmt.Sprintf("%s %s is %s, but for %v", o.GetKind(), o.GetName(), want, except), func() bool {
		have := o.DeepCopy()
		if err := w.admin[id].Get(w.t.Context(), client.ObjectKeyFromObject(o), have); err != nil {
			w.t.Fatal(err)
		}
		members := policies.ReadStatus(have).Members
		for of, result := range members {
			is := want
			if other, ok := except[of]; ok {
				is = other
			}
			if result.State != is {
				return false
			}
		}
		return len(members) == len(ids)-1
	})
}

// copies returns the writes to copies of a policy in members.
func copies(verb watch.EventType, o *unstructured.Unstructured, in ...clusterset.ClusterID) []string {
	var want []string
	for _, id := range in {
		want = append(want, fmt.Sprintf("%s %s %s", id, verb, describe(o)))
	}
	return want
}

// Replicated policies are created, changed and deleted in all other members, once each, by leaders with the rights of a
// real installation.
func TestReplicatedPolicies(t *testing.T) {
	w := newTestbed(t)
	w.supervise("a", "one")
	w.awaitLeader("a/one")
	w.supervise("b", "two")
	writes, before := w.audit(), w.epochs()
	allow, edge := networkPolicy("allow"), clusterPolicy("edge")
	everywhere := func(verb watch.EventType) []string {
		return slices.Concat(copies(verb, allow, "a", "b"), copies(verb, edge, "a", "b"))
	}
	for _, o := range []*unstructured.Unstructured{allow, edge} {
		w.create("c", o)
	}
	for _, o := range []*unstructured.Unstructured{allow, edge} {
		w.policyStates("c", o, policies.Applied, nil)
	}
	writes.take("for new policies", before, everywhere(watch.Added)...)

	for _, o := range []*unstructured.Unstructured{allow, edge} {
		patch := []byte(`{"spec":{"podSelector":{"matchLabels":{"app":"cart"}}}}`)
		if err := w.admin["c"].Patch(t.Context(), o, client.RawPatch(types.MergePatchType, patch)); err != nil {
			t.Fatal(err)
		}
	}
	for _, o := range []*unstructured.Unstructured{allow, edge} {
		for _, id := range ids[:2] {
			await.True(t, "the copy has the same content in "+string(id), func() bool {
				have := o.DeepCopy()
				err := w.admin[id].Get(t.Context(), client.ObjectKeyFromObject(o), have)
				return err == nil && reflect.DeepEqual(have.Object["spec"], o.Object["spec"])
			})
		}
	}
	writes.take("for changed policies", before, everywhere(watch.Modified)...)

	for _, o := range []*unstructured.Unstructured{allow, edge} {
		if err := w.admin["c"].Delete(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
	writes.take("for removed policies", before, everywhere(watch.Deleted)...)
	conformance.Holds(t, "F24", "F25")
}

// A user deletes the copies of policies in a member of which neither the origin's cluster nor the leader knows more than what it watches. The
// policies go in all members, and so does every trace of it.
func TestPoliciesRemovedInAnyMember(t *testing.T) {
	w := newTestbed(t)
	w.supervise("a", "one")
	w.awaitLeader("a/one")
	w.supervise("b", "two")
	all := []*unstructured.Unstructured{networkPolicy("allow"), clusterPolicy("edge")}
	for _, o := range all {
		w.create("c", o)
	}
	for _, o := range all {
		w.policyStates("c", o, policies.Applied, nil)
	}
	for _, o := range all {
		copied := o.DeepCopy()
		copied.SetResourceVersion("")
		copied.SetUID("")
		if err := w.admin["b"].Delete(t.Context(), copied); err != nil {
			t.Fatal(err)
		}
	}
	for _, o := range all {
		for _, id := range ids {
			await.True(t, o.GetName()+" is removed in "+string(id), func() bool {
				return apierrors.IsNotFound(w.admin[id].Get(t.Context(), client.ObjectKeyFromObject(o), o.DeepCopy()))
			})
		}
	}
	await.True(t, "the records of the removals are gone", func() bool {
		var left corev1.ConfigMapList
		if err := w.admin["b"].List(t.Context(), &left, client.MatchingLabels{"federation.isthmus.dev/report": "policy-removed"}); err != nil {
			t.Fatal(err)
		}
		return len(left.Items) == 0
	})
	conformance.Holds(t, "F26")
}

// A policy that a member's webhook refuses reaches the other members. The refusal is reported once, and the policy follows
// when the webhook accepts it.
func TestRefusedPolicy(t *testing.T) {
	w := newTestbed(t)
	w.refuses = true
	w.supervise("a", "one")
	w.awaitLeader("a/one")
	allow := w.refuseAll("c")
	writes, before := w.audit(), w.epochs()
	o := networkPolicy("allow")
	w.create("a", o)
	w.policyStates("a", o, policies.Applied, map[clusterset.ClusterID]policies.State{"c": policies.Refused})
	writes.take("with a member that refuses", before, append(copies(watch.Added, o, "b"), "c ADDED ConfigMap of allow", "a EVENT NotReplicated of NetworkPolicy allow")...)
	allow()
	w.policyStates("a", o, policies.Applied, nil)
	writes.take("with one that allows", before, append(copies(watch.Added, o, "c"), "c DELETED ConfigMap of allow")...)
}

// refuseAll installs a webhook in a member that refuses all NetworkPolicies, until the returned function is called or the
// test ends.
func (w *testbed) refuseAll(id clusterset.ClusterID) (allow func()) {
	w.t.Helper()
	server := httptest.NewTLSServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		var review admissionv1.AdmissionReview
		if err := json.NewDecoder(r.Body).Decode(&review); err != nil {
			http.Error(rw, err.Error(), http.StatusBadRequest)
			return
		}
		review.Response = &admissionv1.AdmissionResponse{
			UID: review.Request.UID, Result: &metav1.Status{Message: "not here", Code: http.StatusForbidden, Reason: metav1.StatusReasonForbidden},
		}
		_ = json.NewEncoder(rw).Encode(review)
	}))
	w.t.Cleanup(server.Close)
	url, never := server.URL, admissionregistrationv1.SideEffectClassNone
	hook := &admissionregistrationv1.ValidatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: "refusing"},
		Webhooks: []admissionregistrationv1.ValidatingWebhook{{
			Name: "refusing.example.org", SideEffects: &never, AdmissionReviewVersions: []string{"v1"},
			ClientConfig: admissionregistrationv1.WebhookClientConfig{
				URL: &url, CABundle: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}),
			},
			Rules: []admissionregistrationv1.RuleWithOperations{{
				Operations: []admissionregistrationv1.OperationType{admissionregistrationv1.Create, admissionregistrationv1.Update},
				Rule:       admissionregistrationv1.Rule{APIGroups: []string{networkingv1.GroupName}, APIVersions: []string{"*"}, Resources: []string{"networkpolicies"}},
			}},
		}},
	}
	w.create(id, hook)
	allow = func() {
		if err := w.admin[id].Delete(context.WithoutCancel(w.t.Context()), hook); client.IgnoreNotFound(err) != nil {
			w.t.Error(err)
		}
	}
	w.t.Cleanup(allow)
	await.True(w.t, "the webhook refuses", func() bool {
		return apierrors.IsForbidden(w.admin[id].Create(w.t.Context(), networkPolicy("probe"), client.DryRunAll))
	})
	return allow
}
