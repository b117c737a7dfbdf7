package policies

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"errors"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	admissionv1 "k8s.io/api/admission/v1"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/yaml"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile/reconciletest"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
	"github.com/isthmus-net/isthmus/controlplane/internal/withdrawal"
	"github.com/isthmus-net/isthmus/tools/apitest"
)

var serverA, serverB, serverC apitest.Server

func TestMain(m *testing.M) {
	ctrllog.SetLogger(logr.Discard())
	os.Exit(apitest.Run(m, &serverA, &serverB, &serverC))
}

// installed is the namespace of Isthmus in all members.
const installed = "isthmus-system"

// federation returns a, b and c: a has Antrea's kind, b has it with a default for spec.tier, so that its API server stores
// more than it was given, and c lacks it.
func federation(t *testing.T) *reconciletest.Federation {
	t.Helper()
	f, _, _ := guarded(t, time.Millisecond)
	return f
}

// guarded is federation with another window of the guard. It also returns the Reconciler and the write requests to a.
func guarded(t *testing.T, window time.Duration) (*reconciletest.Federation, *Reconciler, *apitest.Writes) {
	t.Helper()
	return replicating(t, window, federationv1alpha1.PoliciesSpec{})
}

// replicating is guarded for the kinds of a spec.
func replicating(t *testing.T, window time.Duration, spec federationv1alpha1.PoliciesSpec) (*reconciletest.Federation, *Reconciler, *apitest.Writes) {
	t.Helper()
	scheme := runtime.NewScheme()
	err := errors.Join(corev1.AddToScheme(scheme), networkingv1.AddToScheme(scheme), discoveryv1.AddToScheme(scheme), admissionregistrationv1.AddToScheme(scheme))
	if err != nil {
		t.Fatal(err)
	}
	servers := map[clusterset.ClusterID]*rest.Config{"a": serverA.Config(t), "b": serverB.Config(t), "c": serverC.Config(t)}
	antrea, err := os.ReadFile("../testdata/antrea.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range []clusterset.ClusterID{"a", "b"} {
		crd := &apiextensionsv1.CustomResourceDefinition{}
		if err := yaml.Unmarshal(antrea, crd); err != nil {
			t.Fatal(err)
		}
		if id == "b" {
			spec := crd.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["spec"]
			spec.Properties["tier"] = apiextensionsv1.JSONSchemaProps{Type: "string", Default: &apiextensionsv1.JSON{Raw: []byte(`"application"`)}}
		}
		if _, err := envtest.InstallCRDs(servers[id], envtest.CRDInstallOptions{CRDs: []*apiextensionsv1.CustomResourceDefinition{crd}}); err != nil {
			t.Fatal(err)
		}
	}
	p := New(Config{
		Kinds: Kinds(spec), Namespace: installed,
		Guard: withdrawal.Config[reconcile.Key]{Times: withdrawal.Times{Window: window, Grace: window}},
	})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx, func(reconcile.Key, ...clusterset.ClusterID) {}) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	writes := apitest.CountWrites(servers["a"])
	f := reconciletest.New(t, scheme, p, servers)
	for id := range servers {
		namespace(t, f.Member(id), installed)
	}
	return f, p, writes
}

// namespace creates a namespace unless it exists.
func namespace(t *testing.T, m *reconciletest.Member, name string) {
	t.Helper()
	ns := &corev1.Namespace{}
	ns.Name = name
	if err := m.Client().Create(t.Context(), ns); err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
}

// put creates an object as a user does, and deletes it when the test ends.
func put(t *testing.T, m *reconciletest.Member, text string) *unstructured.Unstructured {
	t.Helper()
	o := &unstructured.Unstructured{}
	if err := yaml.Unmarshal([]byte(text), &o.Object); err != nil {
		t.Fatal(err)
	}
	if err := m.Client().Create(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Client().Delete(context.WithoutCancel(t.Context()), o); client.IgnoreNotFound(err) != nil {
			t.Error(err)
		}
	})
	return o
}

// get returns the object of a member with the name of o, nil if there is none.
func get(t *testing.T, m *reconciletest.Member, o *unstructured.Unstructured) *unstructured.Unstructured {
	t.Helper()
	have := &unstructured.Unstructured{}
	have.SetGroupVersionKind(o.GroupVersionKind())
	err := m.Client().Get(t.Context(), client.ObjectKeyFromObject(o), have)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}
	return have
}

// change updates a member's o as a user does.
func change(t *testing.T, m *reconciletest.Member, o *unstructured.Unstructured, edit func(*unstructured.Unstructured)) {
	t.Helper()
	have := get(t, m, o)
	edit(have)
	if err := m.Client().Update(t.Context(), have); err != nil {
		t.Fatal(err)
	}
}

// settle reconciles all members until the statuses describe the copies. Only refused writes may fail.
func settle(t *testing.T, f *reconciletest.Federation) {
	t.Helper()
	for range 2 {
		if err := f.Reconcile(t.Context()); err != nil && !strings.Contains(err.Error(), "not here") && !strings.Contains(err.Error(), "failed calling webhook") {
			t.Fatal(err)
		}
	}
}

// gone reconciles until a member has no object with the name of o: the guard holds a withdrawal back for a moment.
func gone(t *testing.T, f *reconciletest.Federation, m *reconciletest.Member, o *unstructured.Unstructured) {
	t.Helper()
	err := admin.Await(t.Context(), "the copy is still there", func() (bool, error) {
		settle(t, f)
		return get(t, m, o) == nil, nil
	})
	if err != nil {
		t.Error(err)
	}
}

// states returns the status of o in m, as sorted "MEMBER STATE".
func states(t *testing.T, m *reconciletest.Member, o *unstructured.Unstructured) string {
	t.Helper()
	have := get(t, m, o)
	if have == nil {
		return "no policy"
	}
	var all []string
	members := ReadStatus(have).Members
	for _, id := range slices.Sorted(maps.Keys(members)) {
		all = append(all, string(id)+" "+string(members[id].State))
	}
	return strings.Join(all, ", ")
}

// refusing installs a webhook in a member that refuses policies with the annotation wanted=no until the test ends, and
// waits until it is effective. After the returned server is closed the member refuses all policies.
func refusing(t *testing.T, m *reconciletest.Member) *httptest.Server {
	t.Helper()
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var review admissionv1.AdmissionReview
		var o metav1.PartialObjectMetadata
		if err := errors.Join(json.NewDecoder(r.Body).Decode(&review), json.Unmarshal(review.Request.Object.Raw, &o)); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		review.Response = &admissionv1.AdmissionResponse{
			UID: review.Request.UID, Allowed: o.Annotations["wanted"] != "no", Result: &metav1.Status{Message: "not here", Code: http.StatusForbidden, Reason: metav1.StatusReasonForbidden},
		}
		_ = json.NewEncoder(w).Encode(review)
	}))
	t.Cleanup(server.Close)
	url, never := server.URL, admissionregistrationv1.SideEffectClassNone
	hook := &admissionregistrationv1.ValidatingWebhookConfiguration{Webhooks: []admissionregistrationv1.ValidatingWebhook{{
		Name: "refusing.example.org", SideEffects: &never, AdmissionReviewVersions: []string{"v1"},
		ClientConfig: admissionregistrationv1.WebhookClientConfig{
			URL: &url, CABundle: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}),
		},
		Rules: []admissionregistrationv1.RuleWithOperations{{
			Operations: []admissionregistrationv1.OperationType{admissionregistrationv1.Create, admissionregistrationv1.Update},
			Rule:       admissionregistrationv1.Rule{APIGroups: []string{"networking.k8s.io"}, APIVersions: []string{"*"}, Resources: []string{"networkpolicies"}},
		}},
	}}}
	hook.Name = "refusing"
	if err := m.Client().Create(t.Context(), hook); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Client().Delete(context.WithoutCancel(t.Context()), hook); err != nil {
			t.Error(err)
		}
	})
	probe := &networkingv1.NetworkPolicy{}
	probe.Namespace, probe.Name, probe.Annotations = "default", "probe", map[string]string{"wanted": "no"}
	err := admin.Await(t.Context(), "the webhook does not refuse", func() (bool, error) {
		return apierrors.IsForbidden(m.Client().Create(t.Context(), probe.DeepCopy(), client.DryRunAll)), nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return server
}
