package policies

import (
	"crypto/rand"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/federation/grants"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
)

const allow = `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {namespace: demo, name: allow, annotations: {federated.anp.antreaplus.vmware.com: "true"}}
spec: {podSelector: {matchLabels: {app: shop}}, policyTypes: [Ingress]}
`

// selects makes a NetworkPolicy select another app.
func selects(app string) func(*unstructured.Unstructured) {
	return func(o *unstructured.Unstructured) {
		_ = unstructured.SetNestedField(o.Object, app, "spec", "podSelector", "matchLabels", "app") // of an object of JSON
	}
}

func appOf(o *unstructured.Unstructured) string {
	if o == nil {
		return "nothing"
	}
	app, _, _ := unstructured.NestedString(o.Object, "spec", "podSelector", "matchLabels", "app")
	return app
}

// A policy reaches the members with its namespace. Copies follow changes of the origin, edits of copies are undone, and
// copies go with the origin, also in a member that was silent then.
func TestPolicyLifecycle(t *testing.T) {
	f, _, writes := guarded(t, time.Millisecond)
	a, b, c := f.Member("a"), f.Member("b"), f.Member("c")
	demo := "demo-" + strings.ToLower(rand.Text()) // which no server has
	namespace(t, a, demo)
	namespace(t, b, demo)
	origin := put(t, a, strings.Replace(allow, "demo", demo, 1))
	settle(t, f)
	if have := states(t, a, origin); have != "b applied, c namespace missing" {
		t.Errorf("status: %s", have)
	}
	if have := appOf(get(t, b, origin)); have != "shop" {
		t.Errorf("b has %s", have)
	}

	namespace(t, c, demo)
	settle(t, f)
	if have := states(t, a, origin); have != "b applied, c applied" {
		t.Errorf("status with a namespace in c: %s", have)
	}

	// At rest nothing is written.
	writes.Take()
	settle(t, f)
	if asked := writes.Take(); len(asked) > 0 {
		t.Errorf("written without need: %q", asked)
	}

	change(t, a, origin, selects("cart"))
	settle(t, f)
	if b, c := appOf(get(t, b, origin)), appOf(get(t, c, origin)); b != "cart" || c != "cart" {
		t.Errorf("after the origin changed, b has %s and c %s", b, c)
	}

	// A rule or field that a user adds to a copy is removed.
	b.Events()
	change(t, b, origin, selects("mine"))
	change(t, c, origin, func(o *unstructured.Unstructured) {
		o.Object["spec"].(map[string]any)["ingress"] = []any{map[string]any{}}
	})
	settle(t, f)
	if have := appOf(get(t, b, origin)); have != "cart" {
		t.Errorf("an edit of b's copy stayed: %s", have)
	}
	if _, more, _ := unstructured.NestedSlice(get(t, c, origin).Object, "spec", "ingress"); more {
		t.Error("a rule that a user added to c's copy stayed")
	}
	if have := states(t, a, origin); have != "b drift, c drift" {
		t.Errorf("status after edits: %s", have)
	}
	if events := b.Events(); len(events) != 1 || !strings.HasPrefix(events[0], "Warning EditUndone "+demo+"/allow: ") {
		t.Errorf("events in b: %q", events)
	}

	c.Silence()
	settle(t, f)
	if have := states(t, a, origin); have != "b drift, c unreachable" {
		t.Errorf("status with c unreachable: %s", have)
	}
	change(t, a, origin, func(o *unstructured.Unstructured) { o.SetAnnotations(nil) })
	settle(t, f)
	if get(t, b, origin) != nil || get(t, c, origin) == nil {
		t.Error("a policy that travels no more is still in b, or gone from c, which is away")
	}
	c.Back()
	settle(t, f)
	if get(t, c, origin) != nil {
		t.Error("c is back, and still has the policy")
	}
	if get(t, a, origin) == nil {
		t.Error("the origin itself is gone")
	}
}

// Neither a silent member nor one that was never read withdraws its policies.
func TestSilenceRemovesNothing(t *testing.T) {
	f := federation(t)
	a, b := f.Member("a"), f.Member("b")
	namespace(t, a, "demo")
	namespace(t, b, "demo")
	origin := put(t, a, allow)
	settle(t, f)
	if err := a.Client().Delete(t.Context(), origin); err != nil {
		t.Fatal(err)
	}
	a.Silence()
	settle(t, f)
	anew := federation(t) // a process that was started just now
	anew.Member("a").Silence()
	for range 2 {
		_ = anew.Reconcile(t.Context()) // says that a was never read
	}
	if get(t, b, origin) == nil {
		t.Error("the copy is gone, although the origin was not withdrawn")
	}
	a.Back()
	gone(t, f, b, origin)
}

// When most policies of a cluster vanish at once without being withdrawn, their copies stay.
func TestMassWithdrawal(t *testing.T) {
	f, p, _ := guarded(t, time.Second)
	a, b := f.Member("a"), f.Member("b")
	namespace(t, a, "demo")
	namespace(t, b, "demo")
	var all []*unstructured.Unstructured
	for i := range 6 {
		all = append(all, put(t, a, strings.Replace(allow, "name: allow", fmt.Sprintf("name: allow-%d", i), 1)))
	}
	settle(t, f)
	for _, o := range all {
		if err := a.Client().Delete(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
	settle(t, f)
	if err := admin.Await(t.Context(), "nothing is held", func() (bool, error) { return len(p.Holds()) > 0, nil }); err != nil {
		t.Error(err)
	}
	settle(t, f)
	for _, o := range all {
		if get(t, b, o) == nil {
			t.Errorf("%s is gone, although it was not withdrawn", o.GetName())
		}
	}
	// A copy that a user deletes meanwhile is not created again.
	if err := b.Client().Delete(t.Context(), get(t, b, all[0])); err != nil {
		t.Fatal(err)
	}
	settle(t, f)
	if get(t, b, all[0]) != nil {
		t.Error("a copy without an origin was made again")
	}
	p.Release("a")
	settle(t, f)
	for _, o := range all {
		if get(t, b, o) != nil {
			t.Errorf("%s is still there after the hold was released", o.GetName())
		}
	}
}

// A user's object with the policy's name is never changed, and the status reports it. The same holds for the younger of two
// origins.
func TestUsersObjectsStay(t *testing.T) {
	f := federation(t)
	a, b, c := f.Member("a"), f.Member("b"), f.Member("c")
	namespace(t, a, "demo")
	namespace(t, b, "demo")
	namespace(t, c, "demo")
	mine := put(t, b, strings.NewReplacer("annotations: {federated.anp.antreaplus.vmware.com: \"true\"}", "labels: {whose: mine}", "shop", "mine").Replace(allow))
	origin := put(t, a, allow)
	settle(t, f)
	if have := states(t, a, origin); have != "b taken, c applied" {
		t.Errorf("status: %s", have)
	}
	if have := get(t, b, mine); appOf(have) != "mine" || have.GetResourceVersion() != mine.GetResourceVersion() {
		t.Errorf("a user's policy was written: %v", have.Object)
	}
	if events := a.Events(); len(events) != 1 || !strings.Contains(events[0], "Warning NotReplicated demo/allow: member b: taken") {
		t.Errorf("events in a: %q", events)
	}

	// The older object is annotated now.
	change(t, b, mine, func(o *unstructured.Unstructured) {
		o.SetAnnotations(map[string]string{federationv1alpha1.AnnotationPolicy: "true"})
	})
	settle(t, f)
	older, younger := b, a
	if states(t, b, mine) == "" { // made within one second of each other
		older, younger = a, b
	}
	if have := states(t, older, origin); strings.Count(have, "taken") != 1 || !strings.Contains(have, "c applied") {
		t.Errorf("status of the older one: %s", have)
	}
	if have := ReadStatus(get(t, younger, origin)); have.Origin != older.ID() || have.Members != nil {
		t.Errorf("status of the younger one: %+v", have)
	}
	if have, want := appOf(get(t, c, origin)), appOf(get(t, older, origin)); have != want {
		t.Errorf("c has %s, want that of the older one, %s", have, want)
	}
}

// Any tenant may annotate a policy. Without a grant no member gets it, and its owner reads why. A grant that ends takes the copies with it,
// and no grant is for a namespace of each cluster.
func TestGrants(t *testing.T) {
	f, r, _ := guarded(t, time.Millisecond)
	a, b := f.Member("a"), f.Member("b")
	namespace(t, a, "demo")
	namespace(t, b, "demo")
	rules := func(all ...federationv1alpha1.Grant) grants.Rules {
		return grants.New(federationv1alpha1.FederationSpec{Grants: append([]federationv1alpha1.Grant{}, all...)})
	}
	origin := put(t, a, allow)
	system := put(t, a, strings.Replace(allow, "demo", "kube-system", 1))
	denied := func(o *unstructured.Unstructured, want string) {
		t.Helper()
		if have := ReadStatus(get(t, a, o)); !strings.Contains(have.Denied, want) || have.Members != nil {
			t.Errorf("status: %+v, want one that says %q", have, want)
		}
		if get(t, b, o) != nil {
			t.Error("b has a copy")
		}
	}
	r.config.Grants = rules()
	settle(t, f)
	denied(origin, "no grant of the Federation lets namespace demo of cluster a replicate it")
	if events := a.Events(); !slices.ContainsFunc(events, func(e string) bool { return strings.HasPrefix(e, "Warning NotReplicated demo/allow: no grant") }) {
		t.Errorf("events in a: %q", events)
	}

	r.config.Grants = rules(federationv1alpha1.Grant{Namespaces: []federationv1alpha1.Pattern{"*"}, Policies: []federationv1alpha1.Pattern{"*"}})
	settle(t, f)
	if have := states(t, a, origin); !strings.Contains(have, "b applied") {
		t.Errorf("with a grant: %s", have)
	}
	denied(system, "namespace kube-system belongs to each cluster alone")

	r.config.Grants = rules()
	settle(t, f)
	denied(origin, "no grant")
}

// A member whose webhook refuses a policy reports the reason, and the other members get the policy. The report is deleted
// when the webhook accepts it.
func TestRefusedPolicy(t *testing.T) {
	f := federation(t)
	a, b, c := f.Member("a"), f.Member("b"), f.Member("c")
	namespace(t, a, "demo")
	namespace(t, b, "demo")
	namespace(t, c, "demo")
	webhook := refusing(t, b)
	origin := put(t, a, strings.Replace(allow, `"true"`, `"true", wanted: "no"`, 1))
	settle(t, f)
	if have := states(t, a, origin); have != "b refused, c applied" {
		t.Errorf("status: %s", have)
	}
	if have := ReadStatus(get(t, a, origin)).Members["b"].Message; !strings.Contains(have, "not here") {
		t.Errorf("the status does not say why: %q", have)
	}
	told := &corev1.ConfigMapList{}
	refusals := func() []string {
		if err := b.Client().List(t.Context(), told, client.InNamespace(installed), client.HasLabels{labelReport}); err != nil {
			t.Fatal(err)
		}
		var versions []string
		for _, o := range told.Items {
			versions = append(versions, o.ResourceVersion)
		}
		return versions
	}
	before := refusals()
	settle(t, f)
	if diff := cmp.Diff(before, refusals()); diff != "" || len(before) != 1 {
		t.Errorf("it was said again that b refuses (-want +have):\n%s", diff)
	}
	change(t, a, origin, annotate("wanted", "yes"))
	settle(t, f)
	if have := states(t, a, origin); have != "b applied, c applied" || len(refusals()) != 0 {
		t.Errorf("status when it is wanted: %s, and %d refusals are left", have, len(told.Items))
	}
	webhook.Close()
	change(t, a, origin, selects("cart"))
	settle(t, f)
	if have := ReadStatus(get(t, a, origin)).Members["b"]; have.State != Refused || !strings.Contains(have.Message, "failed calling webhook") {
		t.Errorf("with a webhook that is gone: %+v", have)
	}
	if have := appOf(get(t, c, origin)); have != "cart" {
		t.Errorf("c has %s, and did not refuse it", have)
	}
}

// One member lacks the kind, and another one stores more than it was given.
func TestKindsDiffer(t *testing.T) {
	f := federation(t)
	a, b := f.Member("a"), f.Member("b")
	origin := put(t, a, `
apiVersion: crd.antrea.io/v1beta1
kind: ClusterNetworkPolicy
metadata: {name: everywhere, annotations: {federation.isthmus.dev/policy: "true"}}
spec:
  priority: 5
  egress: [{toServices: [{namespace: isthmus-system, name: shop}]}, {to: [{podSelector: {}}]}]
`)
	settle(t, f)
	if have := states(t, a, origin); have != "b applied, c kind missing" {
		t.Errorf("status: %s", have)
	}
	have := get(t, b, origin)
	if tier, _, _ := unstructured.NestedString(have.Object, "spec", "tier"); tier != "application" {
		t.Errorf("the member's own default is gone: %v", have.Object)
	}
	version := have.GetResourceVersion()
	settle(t, f)
	if again := get(t, b, origin).GetResourceVersion(); again != version {
		t.Errorf("it was written again, from %s to %s", version, again)
	}
	if n := f.Count("b"); n != 1 {
		t.Errorf("%d copies are counted in b", n)
	}

	// One peer is not a federated Service yet, and another one never will be.
	peers := []string{
		"spec.egress[0].toServices[0] names Service isthmus-system/shop, which is not federated",
		"spec.egress[1].to[0].podSelector selects pods of the cluster that enforces it",
	}
	if diff := cmp.Diff(peers, ReadStatus(get(t, a, origin)).Peers); diff != "" {
		t.Errorf("peers (-want +have):\n%s", diff)
	}
	put(t, a, `
apiVersion: v1
kind: Service
metadata:
  namespace: isthmus-system
  name: shop
  labels: {app.kubernetes.io/managed-by: federation.isthmus.dev}
  annotations: {fed-svc.antreaplus.vmware-tanzu.com: ""}
spec: {ports: [{port: 80}]}
`)
	settle(t, f)
	if diff := cmp.Diff(peers[1:], ReadStatus(get(t, a, origin)).Peers); diff != "" {
		t.Errorf("peers when the Service is federated (-want +have):\n%s", diff)
	}
	if events := a.Events(); len(events) != 2 || !strings.Contains(events[0], "PeersDifferByCluster /everywhere: ") {
		t.Errorf("events in a: %q", events)
	}

	// The member's default is still distinguished from a field that a user adds.
	change(t, b, origin, func(o *unstructured.Unstructured) {
		_ = unstructured.SetNestedField(o.Object, "mine", "spec", "tier") // of an object of JSON
	})
	settle(t, f)
	if tier, _, _ := unstructured.NestedString(get(t, b, origin).Object, "spec", "tier"); tier != "application" {
		t.Errorf("an edit of b's copy stayed: tier %s", tier)
	}
	if have := states(t, a, origin); have != "b drift, c kind missing" {
		t.Errorf("status after an edit: %s", have)
	}
}

// Policies of a deleted namespace go with it, however many they are.
func TestDeletedNamespace(t *testing.T) {
	f, r, _ := guarded(t, 50*time.Millisecond)
	a, b := f.Member("a"), f.Member("b")
	shop := "shop-" + strings.ToLower(rand.Text()) // which stays, without a controller-manager
	namespace(t, a, shop)
	namespace(t, b, shop)
	var origins []*unstructured.Unstructured
	for i := range 8 {
		origins = append(origins, put(t, a, strings.NewReplacer("namespace: demo", "namespace: "+shop, "name: allow", fmt.Sprint("name: allow-", i)).Replace(allow)))
	}
	settle(t, f)
	for _, o := range origins {
		if get(t, b, o) == nil {
			t.Fatalf("b has no copy of %s", o.GetName())
		}
	}
	if err := a.Client().Delete(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: shop}}); err != nil {
		t.Fatal(err)
	}
	for _, o := range origins {
		if err := a.Client().Delete(t.Context(), o.DeepCopy()); err != nil {
			t.Fatal(err)
		}
	}
	settle(t, f)
	for _, o := range origins {
		if get(t, b, o) != nil {
			t.Errorf("b still has a copy of %s", o.GetName())
		}
	}
	if held := r.Holds(); len(held) > 0 {
		t.Errorf("held: %v", held)
	}
}
