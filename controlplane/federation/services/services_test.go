package services_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/federation/services"
	"github.com/isthmus-net/isthmus/controlplane/internal/liveness"
	"github.com/isthmus-net/isthmus/tools/await"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

var all = []clusterset.ClusterID{"a", "b", "c"}

func TestMemberServicesOfDifferentTypes(t *testing.T) {
	w := newTestbed(t, v1alpha1.FederationSpec{})
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}
	w.create("b", node)
	node.Status = corev1.NodeStatus{
		Addresses:  []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.1"}},
		Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
	}
	if err := w.Member("b").Client().Status().Update(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	w.offer("a", "pods", global, "shop", nil, "10.1.0.1", "10.1.0.2")
	w.offer("b", "nodes", global, "shop", func(s *corev1.Service) {
		s.Spec.Type, s.Spec.Ports[0].NodePort = corev1.ServiceTypeNodePort, 30080
	}, "10.2.0.1")
	w.offer("c", "balancer", "svc.global.federated.antreaplus.vmware.com", "shop", func(s *corev1.Service) {
		s.Spec.Type = corev1.ServiceTypeLoadBalancer
		s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.1"}}
	}, "10.3.0.1")
	w.sync()

	pods, nodes, balancer := "a: 10.1.0.1:8080 10.1.0.2:8080", "b: 192.0.2.1:30080", "c: 203.0.113.1:80"
	for id, want := range map[clusterset.ClusterID][]string{
		"a": {pods, nodes, balancer}, "b": {pods, "b: 10.2.0.1:8080", balancer}, "c": {pods, nodes, "c: 10.3.0.1:8080"},
	} {
		if diff := cmp.Diff(want, w.slices(id, system, "shop")); diff != "" {
			t.Errorf("in cluster %s: %s", id, diff)
		}
		svc, _ := get[corev1.Service](w, id, system, "shop")
		if svc.Spec.Type != corev1.ServiceTypeClusterIP || svc.Spec.ClusterIP == "" || len(svc.Spec.Selector) > 0 ||
			svc.Annotations["fed-svc.antreaplus.vmware-tanzu.com"] == "" {
			t.Errorf("in cluster %s stands %+v", id, svc)
		}
		if n := w.Count(id); n != 0 {
			t.Errorf("%d federated Services are counted before any was read", n)
		}
	}

	before := w.versions()
	w.sync() // told of what became of it
	if n := w.Count("a"); n != 1 {
		t.Errorf("%d federated Services are counted, want 1", n)
	}
	w.restart(v1alpha1.FederationSpec{})
	w.sync()
	if diff := cmp.Diff(before, w.versions()); diff != "" {
		t.Errorf("something is written with nothing changed: %s", diff)
	}

	es, _ := get[discoveryv1.EndpointSlice](w, "a", w.namespace, "pods-1")
	es.Endpoints = es.Endpoints[:1]
	if err := w.Member("a").Client().Update(t.Context(), es); err != nil {
		t.Fatal(err)
	}
	node.Status.Conditions[0].Status = corev1.ConditionUnknown
	if err := w.Member("b").Client().Status().Update(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	w.sync()
	if diff := cmp.Diff([]string{"a: 10.1.0.1:8080", "c: 10.3.0.1:8080"}, w.slices("c", system, "shop")); diff != "" {
		t.Errorf("after a pod and a node went: %s", diff)
	}
	conformance.Holds(t, "F16", "F17", "F18")
}

func TestNamespacedFederatedService(t *testing.T) {
	w := newTestbed(t, v1alpha1.FederationSpec{})
	w.namespace = "only-there"
	w.create("a", &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.namespace}})
	w.offer("a", "web", namespaced, "shop", nil, "10.1.0.1")
	w.sync()
	if got := w.slices("a", w.namespace, "shop"); !slices.Equal(got, []string{"a: 10.1.0.1:8080"}) {
		t.Errorf("where the namespace is stands %q", got)
	}
	w.create("b", &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.namespace}})
	w.sync()
	if got := w.slices("b", w.namespace, "shop"); !slices.Equal(got, []string{"a: 10.1.0.1:8080"}) {
		t.Errorf("in a namespace that came later stands %q", got)
	}
	conformance.Holds(t, "F15")
}

func TestExplicitWithdrawal(t *testing.T) {
	w := newTestbed(t, v1alpha1.FederationSpec{})
	w.offer("a", "web", global, "shop", nil, "10.1.0.1")
	w.offer("b", "web", global, "shop", nil, "10.2.0.1")
	w.sync()
	w.edit("b", w.namespace, "web", func(s *corev1.Service) { delete(s.Annotations, global) })
	w.sync()
	if got := w.slices("c", system, "shop"); !slices.Equal(got, []string{"a: 10.1.0.1:8080"}) {
		t.Errorf("slices %q, want only those of a", got)
	}
	if svc, _ := get[corev1.Service](w, "b", w.namespace, "web"); svc.Annotations[status] != "" {
		t.Errorf("it still says %q", svc.Annotations[status])
	}
	w.edit("a", w.namespace, "web", func(s *corev1.Service) { delete(s.Annotations, global) })
	w.sync()
	for _, id := range all {
		if _, there := get[corev1.Service](w, id, system, "shop"); there || len(w.slices(id, system, "shop")) > 0 {
			t.Errorf("in cluster %s it stays without members", id)
		}
	}
}

func TestVanishedServiceGoesAfterTheWindow(t *testing.T) {
	w := newTestbed(t, v1alpha1.FederationSpec{})
	svc := w.offer("a", "web", global, "shop", nil, "10.1.0.1")
	w.offer("b", "web", global, "shop", nil, "10.2.0.1")
	w.sync()
	again := w.runs()
	w.delete("a", svc)
	w.sync()
	if got := w.slices("c", system, "shop"); len(got) != 2 {
		t.Errorf("slices %q before it is believed", got)
	}
	again()
	w.sync()
	if got := w.slices("c", system, "shop"); !slices.Equal(got, []string{"b: 10.2.0.1:8080"}) {
		t.Errorf("slices %q afterwards, want only those of b", got)
	}
}

func TestMassWithdrawalIsHeld(t *testing.T) {
	const many = 6
	w := newTestbed(t, v1alpha1.FederationSpec{})
	var made []*corev1.Service
	for i := range many {
		made = append(made, w.offer("a", fmt.Sprint("web-", i), global, fmt.Sprint("shop-", i), nil, "10.1.0.1"))
	}
	few := w.offer("b", "few", global, "few", nil, "10.2.0.1")
	w.sync()
	again := w.runs()
	for _, svc := range made {
		w.delete("a", svc)
	}
	w.delete("b", few)
	w.sync()
	again() // of few, whose step was judged with or after the other
	w.sync()
	if _, there := get[corev1.Service](w, "c", system, "few"); there {
		t.Error("one of few stays")
	}
	for i := range many {
		if got := w.slices("c", system, fmt.Sprint("shop-", i)); len(got) != 1 {
			t.Errorf("of shop-%d stands %q", i, got)
		}
	}
}

func TestSilentMemberKeepsItsEndpoints(t *testing.T) {
	w := newTestbed(t, v1alpha1.FederationSpec{})
	w.offer("a", "web", global, "shop", nil, "10.1.0.1")
	w.offer("b", "empty", global, "empty", nil)
	w.offer("b", "web", global, "shop", func(s *corev1.Service) {
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "metrics", Port: 9090})
	}, "10.2.0.1")
	w.sync()
	before := w.versions()
	w.Member("b").Silence()
	w.sync()
	w.restart(v1alpha1.FederationSpec{}) // by a process that never read b
	w.Member("b").Silence()
	w.sync()
	if diff := cmp.Diff(before, w.versions()); diff != "" {
		t.Errorf("something changes while b is away: %s", diff)
	}
	again := w.runs()
	other := w.offer("a", "other", global, "other", nil, "10.1.0.1")
	w.sync()
	w.delete("a", other)
	w.sync()
	again() // something is judged, and of b there is nothing to judge
	w.sync()
	if got := w.slices("c", system, "shop"); !slices.Equal(got, []string{"a: 10.1.0.1:8080", "b: 10.2.0.1:8080"}) {
		t.Errorf("slices %q while b is away", got)
	}
	w.Leave("b")
	w.sync()
	if got := w.slices("c", system, "shop"); !slices.Equal(got, []string{"a: 10.1.0.1:8080"}) {
		t.Errorf("after b left the Federation stands %q", got)
	}
	if svc, _ := get[corev1.Service](w, "c", system, "shop"); len(svc.Spec.Ports) != 1 {
		t.Errorf("it has ports of b: %v", svc.Spec.Ports)
	}
}

func TestMemberServiceChangesType(t *testing.T) {
	w := newTestbed(t, v1alpha1.FederationSpec{Members: []v1alpha1.MemberCluster{{ClusterID: "a", ExternalCIDRs: []string{"203.0.113.0/24"}}}})
	w.offer("a", "web", global, "shop", nil, "10.1.0.1")
	w.offer("b", "web", global, "shop", nil, "10.2.0.1")
	w.sync()
	w.edit("a", w.namespace, "web", func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"203.0.113.7"} })
	w.sync()
	if got := w.slices("b", system, "shop"); !slices.Equal(got, []string{"a: 203.0.113.7:80", "b: 10.2.0.1:8080"}) {
		t.Errorf("with an external IP: %q", got)
	}
	w.edit("a", w.namespace, "web", func(s *corev1.Service) {
		s.Spec = corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "www.example.org"}
	})
	w.sync()
	if got := w.slices("b", system, "shop"); !slices.Equal(got, []string{"b: 10.2.0.1:8080"}) {
		t.Errorf("as ExternalName: %q", got)
	}
	if svc, _ := get[corev1.Service](w, "a", w.namespace, "web"); !strings.Contains(svc.Annotations[status], "ExternalName") {
		t.Errorf("it says %q", svc.Annotations[status])
	}
	if events := w.Member("a").Events(); !slices.ContainsFunc(events, func(e string) bool { return strings.HasPrefix(e, "Warning NotFederated "+w.namespace+"/web") }) {
		t.Errorf("events: %q", events)
	}
	conformance.Holds(t, "F19")
}

func TestLoadBalancerHostName(t *testing.T) {
	w := newTestbed(t, v1alpha1.FederationSpec{})
	again := w.runs()
	w.offer("a", "web", global, "shop", func(s *corev1.Service) {
		s.Spec.Type = corev1.ServiceTypeLoadBalancer
		s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{Hostname: "lb.example.org"}}
	}, "10.1.0.1")
	w.sync()
	again()
	w.sync()
	if got := w.slices("b", system, "shop"); !slices.Equal(got, []string{"a: 203.0.113.77:80"}) {
		t.Errorf("slices %q", got)
	}
}

// A new process, or one with another spec, has not resolved the host name yet, and never does while no name server
// responds.
func TestUnresolvedHostNameKeepsSlices(t *testing.T) {
	w := newTestbed(t, v1alpha1.FederationSpec{})
	again := w.runs()
	web := w.offer("a", "web", global, "shop", func(s *corev1.Service) {
		s.Spec.Type = corev1.ServiceTypeLoadBalancer
		s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{Hostname: "lb.example.org"}}
	}, "10.1.0.1")
	w.sync()
	again()
	w.sync()
	w.sync() // told of what became of it
	before := w.versions()
	w.resolve = func(context.Context, string) ([]netip.Addr, time.Duration, error) {
		return nil, 0, errors.New("no name server answers")
	}
	w.restart(v1alpha1.FederationSpec{})
	w.sync()
	w.sync()
	if diff := cmp.Diff(before, w.versions()); diff != "" {
		t.Errorf("something changes while no name server responds: %s", diff)
	}
	web.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.8"}}
	web.ResourceVersion = ""
	if err := w.Member("a").Client().Status().Update(t.Context(), web); err != nil {
		t.Fatal(err)
	}
	w.sync()
	if got := w.slices("b", system, "shop"); !slices.Equal(got, []string{"a: 203.0.113.8:80"}) {
		t.Errorf("without a host name slices are %q", got)
	}
}

// While a host name is not resolved, its addresses stay, and the others of its Service change all the same.
func TestUnresolvedHostNameHoldsItself(t *testing.T) {
	w := newTestbed(t, v1alpha1.FederationSpec{})
	again := w.runs()
	web := w.offer("a", "web", global, "shop", func(s *corev1.Service) {
		s.Spec.Type = corev1.ServiceTypeLoadBalancer
		s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{Hostname: "lb.example.org"}, {IP: "203.0.113.8"}}
	}, "10.1.0.1")
	w.sync()
	again()
	w.sync()
	if got := w.slices("b", system, "shop"); !slices.Equal(got, []string{"a: 203.0.113.77:80", "a: 203.0.113.8:80"}) {
		t.Errorf("slices %q", got)
	}
	w.resolve = func(context.Context, string) ([]netip.Addr, time.Duration, error) {
		return nil, 0, errors.New("no name server answers")
	}
	w.restart(v1alpha1.FederationSpec{})
	w.sync()
	web.Status.LoadBalancer.Ingress[1].IP = "203.0.113.9"
	web.ResourceVersion = ""
	if err := w.Member("a").Client().Status().Update(t.Context(), web); err != nil {
		t.Fatal(err)
	}
	w.sync()
	if got := w.slices("b", system, "shop"); !slices.Equal(got, []string{"a: 203.0.113.77:80", "a: 203.0.113.9:80"}) {
		t.Errorf("with a new address slices are %q", got)
	}
}

// A slice that somebody takes the label of its Service from gets it again.
func TestSliceWithoutLabel(t *testing.T) {
	w := newTestbed(t, v1alpha1.FederationSpec{})
	w.offer("a", "web", global, "shop", nil, "10.1.0.1")
	w.sync()
	before := w.slices("b", system, "shop")
	var list discoveryv1.EndpointSliceList
	if err := w.Member("b").Client().List(t.Context(), &list, client.InNamespace(system)); err != nil || len(list.Items) != 1 {
		t.Fatalf("%d slices, %v", len(list.Items), err)
	}
	es := &list.Items[0]
	delete(es.Labels, discoveryv1.LabelServiceName)
	if err := w.Member("b").Client().Update(t.Context(), es); err != nil {
		t.Fatal(err)
	}
	w.sync()
	if got := w.slices("b", system, "shop"); len(before) != 1 || !slices.Equal(got, before) {
		t.Errorf("slices %q, want %q", got, before)
	}
	if err := w.Member("b").Client().List(t.Context(), &list, client.InNamespace(system)); err != nil || len(list.Items) != 1 || list.Items[0].UID != es.UID {
		t.Errorf("%d slices, %v", len(list.Items), err)
	}
}

func TestUsersServiceIsNotChanged(t *testing.T) {
	w := newTestbed(t, v1alpha1.FederationSpec{})
	own := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: system, Name: "shop"},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 443}}},
	}
	w.create("b", own)
	w.offer("a", "web", global, "shop", nil, "10.1.0.1")
	w.sync()
	w.sync()
	if now, _ := get[corev1.Service](w, "b", system, "shop"); now.ResourceVersion != own.ResourceVersion {
		t.Errorf("it is written: %+v", now)
	}
	if got := w.slices("b", system, "shop"); len(got) > 0 {
		t.Errorf("it leads to %q", got)
	}
	if events := w.Member("b").Events(); len(events) != 1 || !strings.HasPrefix(events[0], "Warning NameTaken isthmus-system/shop") {
		t.Errorf("events in b: %q, want one about it", events)
	}
	if svc, _ := get[corev1.Service](w, "a", w.namespace, "web"); !strings.Contains(svc.Annotations[status], "clusters b have a Service isthmus-system/shop") {
		t.Errorf("the member says %q", svc.Annotations[status])
	}
	w.delete("b", own)
	w.sync()
	if got := w.slices("b", system, "shop"); !slices.Equal(got, []string{"a: 10.1.0.1:8080"}) {
		t.Errorf("after it went stands %q", got)
	}
}

func TestConflictingMembersAreReported(t *testing.T) {
	w := newTestbed(t, v1alpha1.FederationSpec{})
	w.offer("a", "older", global, "shop", nil, "10.1.0.1")
	w.offer("a", "younger", global, "shop", func(s *corev1.Service) { s.Spec.Ports[0].Protocol = corev1.ProtocolUDP }, "10.1.0.9")
	w.sync()
	svc, _ := get[corev1.Service](w, "b", system, "shop")
	if len(svc.Spec.Ports) != 1 || svc.Spec.Ports[0].Protocol != corev1.ProtocolTCP {
		t.Errorf("ports: %v", svc.Spec.Ports)
	}
	if c := meta.FindStatusCondition(svc.Status.Conditions, "federation.isthmus.dev/Conflict"); c == nil || !strings.Contains(c.Message, "younger") {
		t.Errorf("conditions: %v", svc.Status.Conditions)
	}
	events := w.Member("a").Events()
	for _, name := range []string{"older", "younger"} {
		if !slices.ContainsFunc(events, func(e string) bool { return strings.HasPrefix(e, "Warning PortConflict "+w.namespace+"/"+name) }) {
			t.Errorf("%s is not told: %q", name, events)
		}
	}
	before := w.versions()
	w.sync()
	if diff := cmp.Diff(before, w.versions()); diff != "" {
		t.Errorf("something is written with nothing changed: %s", diff)
	}
	w.delete("a", &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "younger"}})
	w.sync()
	if svc, _ := get[corev1.Service](w, "b", system, "shop"); len(svc.Status.Conditions) > 0 {
		t.Errorf("conditions afterwards: %v", svc.Status.Conditions)
	}
	conformance.Holds(t, "F20")
}

func TestInvalidNameIsReported(t *testing.T) {
	w := newTestbed(t, v1alpha1.FederationSpec{})
	w.offer("a", "web", global, "Not_A_Name", nil, "10.1.0.1")
	w.sync()
	w.sync()
	if svc, _ := get[corev1.Service](w, "a", w.namespace, "web"); !strings.Contains(svc.Annotations[status], "Not_A_Name") {
		t.Errorf("it says %q", svc.Annotations[status])
	}
	if events := w.Member("a").Events(); len(events) != 1 {
		t.Errorf("events: %q, want one", events)
	}
}

func TestInvalidConfig(t *testing.T) {
	for field, spec := range map[string]v1alpha1.FederationSpec{
		"spec.hostnameTemplate":       {HostnameTemplate: "{{.Nam}}.example.org"},
		"spec.clusterSetIP.ranges[0]": {ClusterSetIP: v1alpha1.ClusterSetIPSpec{Enabled: true, Ranges: []string{"243.0.0.0"}}},
		"spec.clusterSetIP.ranges":    {ClusterSetIP: v1alpha1.ClusterSetIPSpec{Enabled: true, Ranges: []string{"243.0.0.1/16"}}},
	} {
		t.Run(field, func(t *testing.T) {
			_, err := services.New(services.Config{Federation: spec, Log: slog.New(slog.DiscardHandler)})
			if err == nil || !strings.Contains(err.Error(), field) {
				t.Errorf("error %v does not name %s", err, field)
			}
		})
	}
}

// Any tenant may annotate a Service. Without a grant it joins nothing, in no cluster, and its owner reads why.
func TestGrants(t *testing.T) {
	namespace := namespaceOf(t)
	spec := v1alpha1.FederationSpec{Grants: []v1alpha1.Grant{
		{Members: []string{"a"}, Namespaces: []v1alpha1.Pattern{v1alpha1.Pattern(namespace)}, GlobalServices: []v1alpha1.Pattern{"shop"}},
	}}
	w := newTestbed(t, spec)
	w.offer("a", "web", global, "shop", nil, "10.1.0.1")
	thief := w.offer("b", "thief", global, "shop", func(s *corev1.Service) { s.Annotations["federation.isthmus.dev/hostname"] = "true" }, "10.2.0.1")
	other := w.offer("a", "other", namespaced, "other", nil, "10.1.0.2")
	w.sync()
	for _, id := range []clusterset.ClusterID{"a", "b", "c"} {
		if got := w.slices(id, system, "shop"); !slices.Equal(got, []string{"a: 10.1.0.1:8080"}) {
			t.Errorf("%s: slices %q", id, got)
		}
		if _, ok := get[corev1.Service](w, id, w.namespace, "other"); ok != (id == "a") { // the member Service itself
			t.Errorf("%s: a federated Service that nobody granted exists: %v", id, ok)
		}
	}
	for svc, at := range map[*corev1.Service]clusterset.ClusterID{thief: "b", other: "a"} {
		have, _ := get[corev1.Service](w, at, w.namespace, svc.Name)
		if !strings.Contains(have.Annotations[status], "no grant of the Federation lets namespace "+w.namespace+" of cluster "+string(at)) {
			t.Errorf("%s in %s says %q", svc.Name, at, have.Annotations[status])
		}
	}
	spec.Grants[0].Members = nil
	w.restart(spec)
	w.sync()
	if got := w.slices("c", system, "shop"); !slices.Equal(got, []string{"a: 10.1.0.1:8080", "b: 10.2.0.1:8080"}) {
		t.Errorf("with a grant for all members: %q", got)
	}
	spec.Grants = []v1alpha1.Grant{}
	w.restart(spec)
	w.sync()
	for _, id := range []clusterset.ClusterID{"a", "b", "c"} {
		if got := w.slices(id, system, "shop"); len(got) > 0 {
			t.Errorf("%s: without grants stands %q", id, got)
		}
	}
}

// The owner of a Service can write any address into spec.externalIPs (CVE-2021-25740).
func TestExternalNetworks(t *testing.T) {
	w := newTestbed(t, v1alpha1.FederationSpec{Members: []v1alpha1.MemberCluster{{ClusterID: "a", ExternalCIDRs: []string{"203.0.113.0/24"}}}})
	at := func(ip string) func(*corev1.Service) {
		return func(s *corev1.Service) { s.Spec.ExternalIPs = []string{ip} }
	}
	w.offer("a", "own", global, "shop", at("203.0.113.7"), "10.1.0.1")
	w.offer("a", "foreign", global, "shop", at("192.0.2.1"), "10.1.0.2")
	w.offer("b", "none", global, "shop", at("203.0.113.8"), "10.2.0.1") // its cluster has no external network
	w.sync()
	if got := w.slices("c", system, "shop"); !slices.Equal(got, []string{"a: 203.0.113.7:80"}) {
		t.Errorf("slices %q", got)
	}
	for name, id := range map[string]clusterset.ClusterID{"foreign": "a", "none": "b"} {
		svc, _ := get[corev1.Service](w, id, w.namespace, name)
		if !strings.Contains(svc.Annotations[status], "spec.externalIPs: "+svc.Spec.ExternalIPs[0]+": not in an external network of cluster "+string(id)) {
			t.Errorf("%s says %q", name, svc.Annotations[status])
		}
	}
}

// Endpoints of a dead cluster are not used, unless nobody else serves. The properties of the Service stay.
func TestDeadCluster(t *testing.T) {
	w := newTestbed(t, v1alpha1.FederationSpec{})
	w.offer("a", "web", global, "shop", nil, "10.1.0.1")
	w.offer("b", "web", global, "shop", func(s *corev1.Service) {
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "metrics", Port: 9090})
	}, "10.2.0.1")
	w.offer("b", "alone", global, "alone", nil, "10.2.0.2")
	w.offer("c", "waiting", global, "alone", nil) // without a server
	w.sync()
	w.Member("b").Kill()
	w.sync()
	for _, id := range []clusterset.ClusterID{"a", "c"} {
		if got := w.slices(id, system, "shop"); !slices.Equal(got, []string{"a: 10.1.0.1:8080"}) {
			t.Errorf("%s: slices %q", id, got)
		}
		if svc, _ := get[corev1.Service](w, id, system, "shop"); len(svc.Spec.Ports) != 2 {
			t.Errorf("%s: its ports changed to %v", id, svc.Spec.Ports)
		}
		if got := w.slices(id, system, "alone"); !slices.Contains(got, "b: 10.2.0.2:8080") {
			t.Errorf("%s: the Service that nobody else serves has %q", id, got)
		}
	}
	w.Member("b").Back()
	w.sync()
	if got := w.slices("c", system, "shop"); !slices.Equal(got, []string{"a: 10.1.0.1:8080", "b: 10.2.0.1:8080"}) {
		t.Errorf("when it is back: %q", got)
	}
	w.restart(v1alpha1.FederationSpec{}) // by a process that never read b
	w.Member("b").Kill()
	w.sync()
	if got := w.slices("c", system, "shop"); !slices.Equal(got, []string{"a: 10.1.0.1:8080"}) {
		t.Errorf("of a cluster that was never read: %q", got)
	}
	if svc, _ := get[corev1.Service](w, "c", system, "shop"); svc.Annotations["federation.isthmus.dev/first"] != "a/"+w.namespace+"/web" {
		t.Errorf("first is %s", svc.Annotations["federation.isthmus.dev/first"])
	}
}

// Endpoints of Services that no grant allows are tried for nobody: anybody may make one, with an address that always answers.
func TestProbedEndpoints(t *testing.T) {
	namespace := v1alpha1.Pattern(namespaceOf(t))
	w := newTestbed(t, v1alpha1.FederationSpec{})
	w.offer("b", "web", global, "shop", nil, "10.2.0.1")
	w.offer("b", "thief", global, "other", nil, "10.2.0.66")
	var tried []netip.AddrPort
	w.probe = func(_ context.Context, endpoints []netip.AddrPort) liveness.Verdict {
		tried = endpoints
		return liveness.Silent
	}
	w.restart(v1alpha1.FederationSpec{Grants: []v1alpha1.Grant{{Namespaces: []v1alpha1.Pattern{namespace}, GlobalServices: []v1alpha1.Pattern{"shop"}}}})
	w.sync()
	all := []reconcile.Member{w.Member("a"), w.Member("b"), w.Member("c")}
	if got := w.reconciler.Answers(t.Context(), "b", all); got != liveness.Unknown { // no try has ever succeeded
		t.Errorf("verdict %v", got)
	}
	if want := []netip.AddrPort{netip.MustParseAddrPort("10.2.0.1:8080")}; !slices.Equal(tried, want) {
		t.Errorf("tried %v, want %v", tried, want)
	}
	if got := w.reconciler.Answers(t.Context(), "c", all); got != liveness.Unknown {
		t.Errorf("verdict %v of a cluster without endpoints", got)
	}
	es, _ := get[discoveryv1.EndpointSlice](w, "b", w.namespace, "web-1")
	es.Endpoints[0].Conditions.Ready = new(false)
	if err := w.Member("b").Client().Update(t.Context(), es); err != nil {
		t.Fatal(err)
	}
	w.sync()
	tried = nil
	w.reconciler.Answers(t.Context(), "b", all)
	if want := []netip.AddrPort{netip.MustParseAddrPort("10.2.0.1:8080")}; !slices.Equal(tried, want) {
		t.Errorf("without a ready endpoint it tried %v, want %v", tried, want)
	}
}

// Somebody deletes a namespace with many member Services. They go at once, while as many that merely vanish are held.
func TestDeletedNamespace(t *testing.T) {
	w := newTestbed(t, v1alpha1.FederationSpec{})
	const many = 8
	var all []*corev1.Service
	for i := range many {
		name := fmt.Sprint("web-", i)
		w.offer("a", name, global, name, nil, "10.1.0.1")
		all = append(all, w.offer("c", name, global, name, func(s *corev1.Service) { s.Spec.Selector = nil }, "10.3.0.1"))
	}
	w.runs()
	w.sync()
	if got := w.slices("b", system, "web-0"); !slices.Equal(got, []string{"a: 10.1.0.1:8080", "c: 10.3.0.1:8080"}) {
		t.Fatalf("slices %q", got)
	}
	w.delete("c", &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.namespace}}) // without a controller-manager it stays, marked
	for _, svc := range all {
		w.delete("c", svc)
	}
	w.sync()
	for i := range many {
		for _, id := range []clusterset.ClusterID{"a", "b", "c"} {
			if got := w.slices(id, system, fmt.Sprint("web-", i)); !slices.Equal(got, []string{"a: 10.1.0.1:8080"}) {
				t.Errorf("%s: web-%d leads to %q", id, i, got)
			}
		}
	}

	// In a the namespace stays.
	for i := range many {
		w.delete("a", &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: fmt.Sprint("web-", i)}})
	}
	w.sync()
	await.True(t, "they are held", func() bool {
		held := w.reconciler.Holds()
		return len(held) == 1 && held[0].Count == many
	})
	w.sync()
	if got := w.slices("b", system, "web-0"); !slices.Equal(got, []string{"a: 10.1.0.1:8080"}) {
		t.Errorf("what vanished without its namespace: %q", got)
	}
}

// The member Service that was first so far stays first, although another one is older by its cluster's clock.
func TestFirstStaysFirst(t *testing.T) {
	w := newTestbed(t, v1alpha1.FederationSpec{})
	w.offer("a", "web", global, "shop", nil, "10.1.0.1")
	w.sync()
	w.offer("b", "web", global, "shop", func(s *corev1.Service) { s.Spec.Ports[0].Name = "web" }, "10.2.0.1")
	w.sync()
	first := func(id clusterset.ClusterID) string {
		svc, _ := get[corev1.Service](w, id, system, "shop")
		return svc.Annotations["federation.isthmus.dev/first"] + " " + svc.Spec.Ports[0].Name
	}
	for _, id := range []clusterset.ClusterID{"a", "b", "c"} {
		if got, want := first(id), "a/"+w.namespace+"/web http"; got != want {
			t.Errorf("%s: %s, want %s", id, got, want)
		}
	}
	for _, id := range []clusterset.ClusterID{"b", "c"} { // as if the younger one had been first
		w.edit(id, system, "shop", func(s *corev1.Service) { s.Annotations["federation.isthmus.dev/first"] = "b/" + w.namespace + "/web" })
	}
	w.sync()
	w.sync()
	for _, id := range []clusterset.ClusterID{"a", "b", "c"} {
		if got, want := first(id), "b/"+w.namespace+"/web web"; got != want {
			t.Errorf("%s: %s, want %s", id, got, want)
		}
	}
	before := w.versions()
	w.sync()
	if diff := cmp.Diff(before, w.versions()); diff != "" {
		t.Errorf("at rest something is written: %s", diff)
	}
}
