package policies

import (
	"context"
	"crypto/rand"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile/reconciletest"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
)

// cartPolicy admits clients of Service web to pods of its namespace, and lets these connect to cart and to a Service that is not there.
const cartPolicy = `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {namespace: NAMESPACE, name: shop, annotations: {federation.isthmus.dev/policy: "true"}}
spec:
  podSelector: {matchLabels: {app: shop}}
  policyTypes: [Ingress, Egress]
  ingress:
  - from: [{podSelector: {matchLabels: {federation.isthmus.dev/service: web}}}, {podSelector: {matchLabels: {app: other}}}]
    ports: [{port: 9090}]
  egress:
  - to: [{podSelector: {matchLabels: {federation.isthmus.dev/service: cart}}, namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: NAMESPACE}}}]
    ports: [{port: 80}, {port: dns, protocol: UDP}]
  - to: [{podSelector: {matchLabels: {federation.isthmus.dev/service: web}}}, {podSelector: {matchLabels: {federation.isthmus.dev/service: none}}}]
  - to: [{ipBlock: {cidr: 192.0.2.0/24}}]
`

// federatedService makes a federated Service with a slice for each of some texts, "PORTS ADDRESS...", where PORTS are those of the endpoints
// of its ports http, metrics and dns.
func federatedService(t *testing.T, m *reconciletest.Member, namespace, name string, slices ...string) {
	t.Helper()
	put(t, m, fmt.Sprintf(`
apiVersion: v1
kind: Service
metadata: {namespace: %s, name: %s, labels: {app.kubernetes.io/managed-by: federation.isthmus.dev}, annotations: {fed-svc.antreaplus.vmware-tanzu.com: "true"}}
spec: {ports: [{name: http, port: 80}, {name: metrics, port: 9100}, {name: dns, port: 53, protocol: UDP}]}
`, namespace, name))
	for i, text := range slices {
		put(t, m, slice(namespace, name, i, text))
	}
}

func slice(namespace, name string, i int, text string) string {
	fields := strings.Fields(text)
	ports, family := strings.Split(fields[0], ","), "IPv4"
	if strings.Contains(fields[1], ":") {
		family = "IPv6"
	}
	return fmt.Sprintf(`
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {namespace: %[1]s, name: %[2]s-%[3]d, labels: {kubernetes.io/service-name: %[2]s, endpointslice.kubernetes.io/managed-by: federation.isthmus.dev}}
addressType: %[4]s
ports: [{name: http, port: %[5]s}, {name: metrics, port: %[6]s}, {name: dns, port: %[7]s, protocol: UDP}]
endpoints: [{addresses: ["%[8]s"]}]
`, namespace, name, i, family, ports[0], ports[1], ports[2], strings.Join(fields[1:], `"]}, {addresses: ["`))
}

// admits returns the rules of the leaders' policy for cartPolicy in a member: for each "in" or "out", its addresses and ports.
func admits(t *testing.T, m *reconciletest.Member, policy *unstructured.Unstructured) (rules []string) {
	t.Helper()
	made := policy.DeepCopy()
	made.SetName(policy.GetName() + ".services")
	have := get(t, m, made)
	if have == nil {
		return nil
	}
	for _, direction := range []struct{ rules, peers, name string }{{"ingress", "from", "in"}, {"egress", "to", "out"}} {
		all, _, _ := unstructured.NestedSlice(have.Object, "spec", direction.rules)
		for _, r := range all {
			rule := r.(map[string]any) //nolint:forcetypeassert // the API server checks it
			text := direction.name
			for _, peer := range rule[direction.peers].([]any) { //nolint:forcetypeassert // as above
				cidr, _, _ := unstructured.NestedString(peer.(map[string]any), "ipBlock", "cidr") //nolint:forcetypeassert // as above
				text += " " + cidr
			}
			for _, p := range rule["ports"].([]any) { //nolint:forcetypeassert // as above
				port := p.(map[string]any) //nolint:forcetypeassert // as above
				text += fmt.Sprintf(" %v/%v", port["port"], port["protocol"])
			}
			rules = append(rules, text)
		}
	}
	return rules
}

// Leaders admit the endpoints of federated Services that a policy names, in every member, at the ports of the endpoints.
func TestServicesAsPeers(t *testing.T) {
	f, p, writes := guarded(t, time.Millisecond)
	a, b := f.Member("a"), f.Member("b")
	shop := "shop-" + strings.ToLower(rand.Text())
	for _, m := range []*reconciletest.Member{a, b} {
		namespace(t, m, shop)
		federatedService(t, m, shop, "web", "8080,9100,5353 10.1.0.1", "8080,9100,5353 fd00::1")
		federatedService(t, m, shop, "cart", "8080,9100,5353 10.1.0.3 10.1.0.2", "30080,30100,30053 10.2.0.1")
	}
	origin := put(t, a, strings.ReplaceAll(cartPolicy, "NAMESPACE", shop))
	want := []string{
		"in 10.1.0.1/32 fd00::1/128 9090/TCP",
		"out 10.2.0.1/32 30080/TCP 30053/UDP", "out 10.1.0.2/32 10.1.0.3/32 8080/TCP 5353/UDP",
		"out 10.1.0.1/32 fd00::1/128 8080/TCP 9100/TCP 5353/UDP",
	}
	check := func(when string, want []string) {
		t.Helper()
		for range 2 {
			settle(t, f)
		}
		for _, m := range []*reconciletest.Member{a, b} {
			if diff := cmp.Diff(want, admits(t, m, origin)); diff != "" {
				t.Errorf("%s: in %s (-want +got):\n%s", when, m.ID(), diff)
			}
		}
	}
	check("at first", want)
	if peers := ReadStatus(get(t, a, origin)).Peers; !slices.Equal(peers, []string{
		"spec.egress[1].to[1] names Service " + shop + "/none, which is not federated",
		"spec.egress[2].to[0].ipBlock is an address, which may belong to another workload in another cluster",
		"spec.ingress[0].from[1].podSelector selects pods of the cluster that enforces it",
	}) {
		t.Errorf("peers of its own cluster: %q", peers)
	}
	writes.Take()
	check("at rest", want)
	if asked := writes.Take(); len(asked) > 0 {
		t.Errorf("written without need: %q", asked)
	}

	// Endpoints come: the policy's key is reconciled again.
	var again []reconcile.Key
	var into []clusterset.ClusterID
	p.enqueue.Store(new(reconcile.Enqueue(func(key reconcile.Key, in ...clusterset.ClusterID) {
		again, into = append(again, key), append(into, in...)
	})))
	p.ServiceChanged("b", clusterset.ServiceName{Namespace: shop, Name: "cart"})
	p.ServiceChanged("b", clusterset.ServiceName{Namespace: shop, Name: "other"})
	p.ServiceChanged("c", clusterset.ServiceName{Namespace: shop, Name: "cart"})
	if len(again) != 1 || again[0].Name != "shop" || again[0].Namespace != shop || !slices.Equal(into, []clusterset.ClusterID{"b"}) {
		t.Errorf("a change of cart in b reconciles %v in %v", again, into)
	}
	for _, m := range []*reconciletest.Member{a, b} {
		put(t, m, slice(shop, "cart", 2, "8080,9100,5353 10.3.0.1"))
	}
	want[2] = "out 10.1.0.2/32 10.1.0.3/32 10.3.0.1/32 8080/TCP 5353/UDP"
	check("with one endpoint more", want)

	made := origin.DeepCopy()
	made.SetName("shop.services")
	kind := federationv1alpha1.PolicyKind{Group: "networking.k8s.io", Version: "v1", Kind: "NetworkPolicy"}
	if keys := p.keysOfPolicy(kind)(b, get(t, b, made)); !slices.Equal(keys, again) {
		t.Errorf("a change of what leaders wrote reconciles %v, want %v", keys, again)
	}
	change(t, b, made, func(o *unstructured.Unstructured) {
		o.Object["spec"] = map[string]any{"podSelector": map[string]any{}, "ingress": []any{map[string]any{}}}
	})
	check("after an edit", want)
	change(t, a, origin, func(o *unstructured.Unstructured) { o.SetAnnotations(nil) })
	check("when it is no longer federated", nil)
	if len(p.peers) > 0 {
		t.Errorf("Services of %v are remembered", p.peers)
	}
}

// When NetworkPolicy leaves the kinds of the Federation, what leaders wrote for its peers goes. The policies stay.
func TestServicesAsPeersLeave(t *testing.T) {
	f := federation(t)
	a, b := f.Member("a"), f.Member("b")
	shop := "shop-" + strings.ToLower(rand.Text())
	for _, m := range []*reconciletest.Member{a, b} {
		namespace(t, m, shop)
		federatedService(t, m, shop, "web", "8080,9100,5353 10.1.0.1")
	}
	origin := put(t, a, strings.ReplaceAll(cartPolicy, "NAMESPACE", shop))
	for range 2 {
		settle(t, f)
	}
	if len(admits(t, a, origin)) == 0 || len(admits(t, b, origin)) == 0 {
		t.Fatal("a or b does not admit the Services")
	}
	others, _, _ := replicating(t, time.Millisecond, federationv1alpha1.PoliciesSpec{Kinds: defaults[:1]})
	settle(t, others)
	for _, m := range []*reconciletest.Member{a, b} {
		if have := admits(t, m, origin); len(have) > 0 {
			t.Errorf("%s still admits %q", m.ID(), have)
		}
		if get(t, m, origin) == nil {
			t.Errorf("%s has not the policy any more", m.ID())
		}
	}
}

// Rules of a direction that the policy's policyTypes do not have are ignored, and so are their peers.
func TestPeersOfIgnoredRules(t *testing.T) {
	f := federation(t)
	a := f.Member("a")
	shop := "shop-" + strings.ToLower(rand.Text())
	namespace(t, a, shop)
	federatedService(t, a, shop, "web", "8080,9100,5353 10.1.0.1")
	origin := put(t, a, strings.NewReplacer("NAMESPACE", shop, "[Ingress, Egress]", "[Ingress]").Replace(cartPolicy))
	for range 2 {
		settle(t, f)
	}
	if diff := cmp.Diff([]string{"in 10.1.0.1/32 9090/TCP"}, admits(t, a, origin)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// An event says once that the API server refuses what leaders write.
func TestPeersRefused(t *testing.T) {
	f := federation(t)
	a := f.Member("a")
	shop := "shop-" + strings.ToLower(rand.Text())
	namespace(t, a, shop)
	put(t, a, strings.ReplaceAll(cartPolicy, "NAMESPACE", shop))
	settle(t, f)
	refusing(t, a).Close()
	federatedService(t, a, shop, "web", "8080,9100,5353 10.1.0.1")
	a.Events()
	for range 2 {
		settle(t, f)
	}
	told := slices.DeleteFunc(a.Events(), func(e string) bool { return !strings.Contains(e, "PeersNotAdmitted") })
	if len(told) != 1 || !strings.Contains(told[0], "the API server refuses NetworkPolicy shop.services") {
		t.Errorf("events: %q", told)
	}
}

// unread is a member in which leaders lack the right to policies.
type unread struct{ reconcile.Writer }

func (unread) Get(context.Context, client.ObjectKey, client.Object, ...client.GetOption) error {
	return objectcache.ErrNotSynced
}

// Where leaders may not read policies, nothing fails.
func TestPeersOfUnreadPolicies(t *testing.T) {
	f, r, _ := guarded(t, time.Millisecond)
	into := unread{f.Member("a").Lead(1)}
	if err := r.Reconcile(t.Context(), reconcile.Key{Kind: networkPolicy, Namespace: "demo", Name: "allow"}, into, []reconcile.Member{into}); err != nil {
		t.Error(err)
	}
}

// A policy without endpoints to admit has none beside it, and one whose name is taken says so.
func TestServicesAsPeersTaken(t *testing.T) {
	f := federation(t)
	a := f.Member("a")
	shop := "shop-" + strings.ToLower(rand.Text())
	namespace(t, a, shop)
	mine := put(t, a, strings.NewReplacer("NAMESPACE", shop, "name: shop", "name: shop.services", `annotations: {federation.isthmus.dev/policy: "true"}`, "labels: {whose: mine}").Replace(cartPolicy))
	origin := put(t, a, strings.ReplaceAll(cartPolicy, "NAMESPACE", shop))
	settle(t, f)
	if events := a.Events(); slices.ContainsFunc(events, func(e string) bool { return strings.Contains(e, "PeersNotAdmitted") }) {
		t.Errorf("without Services: %q", events)
	}
	federatedService(t, a, shop, "web", "8080,9100,5353 10.1.0.1")
	for range 3 {
		settle(t, f)
	}
	var told []string
	for _, e := range a.Events() {
		if strings.Contains(e, "PeersNotAdmitted") {
			told = append(told, e)
		}
	}
	if len(told) != 1 || !strings.Contains(told[0], "NetworkPolicy shop.services exists already") {
		t.Errorf("events: %q", told)
	}
	if have := get(t, a, mine); have == nil || have.GetLabels()["whose"] != "mine" {
		t.Error("the user's policy is gone")
	}
	if err := a.Client().Delete(t.Context(), mine); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		settle(t, f)
	}
	if len(admits(t, a, origin)) == 0 {
		t.Error("nothing is admitted when the name is free")
	}
}

// A Service may have more addresses than a policy can hold. The first ones are admitted, and an event says so once.
func TestManyPeers(t *testing.T) {
	f := federation(t)
	a := f.Member("a")
	shop := "shop-" + strings.ToLower(rand.Text())
	namespace(t, a, shop)
	var all []string
	for i := range 6 {
		text := "8080,9100,5353"
		for j := range 1000 {
			text += fmt.Sprintf(" 10.%d.%d.%d", i, j/250, j%250)
		}
		all = append(all, text)
	}
	federatedService(t, a, shop, "web", all...)
	origin := put(t, a, strings.ReplaceAll(cartPolicy, "NAMESPACE", shop))
	for range 3 {
		settle(t, f)
	}
	rules := admits(t, a, origin)
	if len(rules) == 0 || strings.Count(rules[0], "/32") != maxAdmitted {
		t.Errorf("of %d addresses %d are admitted, want %d", 6000, strings.Count(strings.Join(rules, ""), "/32"), maxAdmitted)
	}
	told := 0
	for _, e := range a.Events() {
		if strings.Contains(e, "more than 5000 addresses") {
			told++
		}
	}
	if told != 1 {
		t.Errorf("%d events", told)
	}
}

// A peer names a Service by the label alone; with more, it selects pods.
func TestNamedService(t *testing.T) {
	for text, want := range map[string]string{
		"{podSelector: {matchLabels: {federation.isthmus.dev/service: cart}}}":                                                                        "demo/cart",
		"{podSelector: {matchLabels: {federation.isthmus.dev/service: cart}}, namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: shop}}}": "shop/cart",
		"{podSelector: {matchLabels: {federation.isthmus.dev/service: cart}}, namespaceSelector: {}}":                                                 "",
		"{podSelector: {matchLabels: {federation.isthmus.dev/service: cart}}, namespaceSelector: {matchLabels: {team: x}}}":                           "",
		"{podSelector: {matchLabels: {federation.isthmus.dev/service: cart, app: x}}}":                                                                "",
		"{podSelector: {matchLabels: {federation.isthmus.dev/service: cart}, matchExpressions: [{key: app, operator: Exists}]}}":                      "",
		"{podSelector: {matchLabels: {federation.isthmus.dev/service: \"\"}}}":                                                                        "",
		"{podSelector: {}}":               "",
		"{ipBlock: {cidr: 192.0.2.0/24}}": "",
		"{podSelector: 7}":                "",
	} {
		peer := map[string]any{}
		if err := yaml.Unmarshal([]byte(text), &peer); err != nil {
			t.Fatal(err)
		}
		have := ""
		if name, ok := namedInCore("demo", peer); ok {
			have = name.String()
		}
		if have != want {
			t.Errorf("%s names %q, want %q", text, have, want)
		}
	}
}
