package policies

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/grants"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile/reconciletest"
)

// hostilePolicies are a federation in which grants let a replicate every policy, and child c those that are named own-….
type hostilePolicies struct {
	*reconciletest.Federation

	t      *testing.T
	shield *unstructured.Unstructured // of a, with copies in b and c
}

// copyIn returns the copy of shield in c.
func (w *hostilePolicies) copyIn() *unstructured.Unstructured {
	w.t.Helper()
	return get(w.t, w.Member("c"), w.shield)
}

// edit changes the copy of shield in c.
func (w *hostilePolicies) edit(how func(*unstructured.Unstructured)) {
	w.t.Helper()
	change(w.t, w.Member("c"), w.shield, how)
}

// policy makes a policy in c. edit is YAML of its metadata, beside namespace and name.
func (w *hostilePolicies) policy(namespace, name, metadata string) {
	w.t.Helper()
	put(w.t, w.Member("c"), `{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {namespace: `+namespace+`, name: `+name+`, `+metadata+`}, spec: {podSelector: {}, ingress: [{}]}}`)
}

// report makes a ConfigMap in c as leaders write them.
func (w *hostilePolicies) report(name, kind string, data map[string]string) {
	w.t.Helper()
	cm := &corev1.ConfigMap{Data: data}
	cm.Namespace, cm.Name = installed, name
	cm.Labels = map[string]string{"app.kubernetes.io/managed-by": federationv1alpha1.ManagedBy, labelReport: kind}
	c := w.Member("c").Client()
	if err := c.Create(w.t.Context(), cm); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = c.Delete(context.Background(), cm) }) // leaders may have deleted it
}

// all returns the rules of all policies of a member, by namespace and name.
func (w *hostilePolicies) all(m *reconciletest.Member) map[string]networkingv1.NetworkPolicySpec {
	w.t.Helper()
	var list networkingv1.NetworkPolicyList
	if err := m.Client().List(w.t.Context(), &list); err != nil {
		w.t.Fatal(err)
	}
	all := map[string]networkingv1.NetworkPolicySpec{}
	for _, p := range list.Items {
		all[p.Namespace+"/"+p.Name] = p.Spec
	}
	return all
}

// The users and the administrator of child c change no policy of another cluster, whatever they write in c, but by policies and removals that
// a grant lets them have.
func TestHostilePolicies(t *testing.T) {
	const replicate = `annotations: {federation.isthmus.dev/policy: "true"}`
	const forged = `labels: {app.kubernetes.io/managed-by: federation.isthmus.dev}, annotations: `
	core := reconcile.Key{Kind: networkPolicy, Namespace: "demo", Name: "allow"}
	for name, attack := range map[string]func(*hostilePolicies){
		"a policy that no grant allows": func(w *hostilePolicies) { w.policy("demo", "evil", replicate) },
		"one by Antrea's annotation": func(w *hostilePolicies) {
			w.policy("demo", "evil", `annotations: {federated.anp.antreaplus.vmware.com: "true"}`)
		},
		"one in kube-system": func(w *hostilePolicies) { w.policy("kube-system", "own-dns", replicate) },
		"a copy of a's": func(w *hostilePolicies) {
			w.policy("demo", "evil", forged+`{federation.isthmus.dev/origin: a/demo/evil}`)
		},
		"a copy of its own": func(w *hostilePolicies) {
			w.policy("demo", "evil", forged+`{federation.isthmus.dev/origin: c/demo/evil}`)
		},
		"a copy that asks": func(w *hostilePolicies) {
			w.policy("demo", "own-x", forged+`{federation.isthmus.dev/origin: c/demo/own-x, federation.isthmus.dev/policy: "true"}`)
		},
		"peers of a's policy": func(w *hostilePolicies) {
			w.policy("demo", "allow.services", forged+`{federation.isthmus.dev/admits-peers-of: allow}`)
		},
		"peers of no policy": func(w *hostilePolicies) {
			w.policy("demo", "evil", forged+`{federation.isthmus.dev/admits-peers-of: none}`)
		},
		"the copy asks":                  func(w *hostilePolicies) { w.edit(annotated(federationv1alpha1.AnnotationPolicy, "true")) },
		"the copy is c's":                func(w *hostilePolicies) { w.edit(annotated(annotationOrigin, "c/demo/allow")) },
		"the copy is b's":                func(w *hostilePolicies) { w.edit(annotated(annotationOrigin, "b/demo/allow")) },
		"the copy has another digest":    func(w *hostilePolicies) { w.edit(annotated(annotationContent, "0")) },
		"the copy has a status":          func(w *hostilePolicies) { w.edit(annotated(AnnotationStatus, `{"members":{"a":{"state":"refused"}}}`)) },
		"the copy is a user's, and asks": func(w *hostilePolicies) { w.edit(taken) },
		"the copy admits everybody": func(w *hostilePolicies) {
			w.edit(func(o *unstructured.Unstructured) {
				o.Object["spec"] = map[string]any{"podSelector": map[string]any{}, "ingress": []any{map[string]any{}}}
			})
		},
		"the copy goes": func(w *hostilePolicies) { deleted(w.t, w.Federation, "c", w.shield) },
		"the copy goes before it is a's": func(w *hostilePolicies) {
			w.edit(annotated(annotationOrigin, "c/demo/allow"))
			deleted(w.t, w.Federation, "c", w.shield)
		},
		"a removal without a deletion": func(w *hostilePolicies) {
			w.report(removalName(core), reportRemoval, map[string]string{"kind": core.Kind, "namespace": "demo", "name": "allow", "origin": "a", "uid": string(w.shield.GetUID()), "asked": askedBy(w.shield)})
		},
		"a removal and a deletion": func(w *hostilePolicies) {
			w.report(removalName(core), reportRemoval, map[string]string{"kind": core.Kind, "namespace": "demo", "name": "allow", "origin": "a", "uid": string(w.shield.GetUID()), "asked": askedBy(w.shield)})
			deleted(w.t, w.Federation, "c", w.shield)
		},
		"a refusal": func(w *hostilePolicies) {
			w.report(refusalName(core), reportRefusal, map[string]string{"kind": core.Kind, "namespace": "demo", "name": "allow", "content": w.copyIn().GetAnnotations()[annotationContent], "message": strings.Repeat("no ", 1000)})
		},
		"a report about a kind of nobody's": func(w *hostilePolicies) {
			w.report("federation-policy-0", reportRefusal, map[string]string{"kind": "Secret.v1.", "namespace": "kube-system", "name": "x"})
		},
		"a report about no kind": func(w *hostilePolicies) {
			w.report("federation-policy-0", reportRefusal, map[string]string{"kind": "..", "namespace": "demo", "name": "allow"})
		},
	} {
		t.Run(name, func(t *testing.T) {
			f, r, _ := guarded(t, time.Millisecond)
			r.config.Grants = grants.New(federationv1alpha1.FederationSpec{Grants: []federationv1alpha1.Grant{
				{Members: []string{"a"}, Namespaces: []federationv1alpha1.Pattern{"*"}, Policies: []federationv1alpha1.Pattern{"*"}},
				{Members: []string{"c"}, Namespaces: []federationv1alpha1.Pattern{"demo"}, Policies: []federationv1alpha1.Pattern{"own-*"}},
			}})
			w := &hostilePolicies{Federation: f, t: t}
			for _, id := range []string{"a", "b", "c"} {
				m := f.Member(clusterset.ClusterID(id))
				namespace(t, m, "demo")
				t.Cleanup(func() {
					ctx := context.WithoutCancel(t.Context())
					if err := errors.Join(
						m.Client().DeleteAllOf(ctx, &networkingv1.NetworkPolicy{}, client.InNamespace("demo")),
						m.Client().DeleteAllOf(ctx, &corev1.ConfigMap{}, client.InNamespace(installed), client.HasLabels{labelReport}),
					); err != nil {
						t.Error(err)
					}
				})
			}
			w.shield = put(t, f.Member("a"), allow)
			settle(t, f)
			before := map[string]map[string]networkingv1.NetworkPolicySpec{"a": w.all(f.Member("a")), "b": w.all(f.Member("b"))}
			if len(before["b"]) != 1 {
				t.Fatalf("b has %v", before["b"])
			}
			attack(w)
			for range 3 {
				settle(t, f)
			}
			for id, want := range before {
				if diff := cmp.Diff(want, w.all(f.Member(clusterset.ClusterID(id)))); diff != "" {
					t.Errorf("policies of %s (-before +after):\n%s", id, diff)
				}
			}
			if states := ReadStatus(get(t, f.Member("a"), w.shield)).Members; states["b"].State != Applied || len(states["c"].Message) > longest {
				t.Errorf("status: %v", states)
			}
		})
	}
}

// annotated sets an annotation.
func annotated(key, value string) func(*unstructured.Unstructured) {
	return func(o *unstructured.Unstructured) {
		annotations := o.GetAnnotations()
		annotations[key] = value
		o.SetAnnotations(annotations)
	}
}

// taken makes a copy a user's policy that is to be replicated.
func taken(o *unstructured.Unstructured) {
	o.SetLabels(nil)
	o.SetAnnotations(map[string]string{federationv1alpha1.AnnotationPolicy: "true"})
}
