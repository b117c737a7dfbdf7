package services_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/gateway/service"
)

const (
	askHostname = "federation.isthmus.dev/hostname"
	outsideShop = "{{.Name}}.example.org"
)

// outside returns the annotations of the federated Service in a cluster that ExternalDNS reads, as "HOSTNAME TARGETS TTL".
func (w *testbed) outside(id clusterset.ClusterID, namespace, name string) string {
	w.t.Helper()
	svc, _ := get[corev1.Service](w, id, namespace, name)
	read := func(prefix string) string {
		return strings.Join([]string{svc.Annotations[prefix+"hostname"], svc.Annotations[prefix+"target"], svc.Annotations[prefix+"ttl"]}, " ")
	}
	now, before := read("external-dns.kubernetes.io/"), read("external-dns.alpha.kubernetes.io/")
	if now != before {
		w.t.Errorf("ExternalDNS reads %q since 0.22, and %q before", now, before)
	}
	return strings.TrimSpace(now)
}

// wants checks what ExternalDNS reads of the federated Service shop in all clusters, and the ports with other numbers.
func (w *testbed) wants(when, want, ports string) {
	w.t.Helper()
	w.sync()
	w.sync()
	for _, id := range []clusterset.ClusterID{"a", "b", "c"} {
		if got := w.outside(id, system, "shop"); got != want {
			w.t.Errorf("%s: cluster %s has %q, want %q", when, id, got, want)
		}
		if svc, _ := get[corev1.Service](w, id, system, "shop"); svc.Annotations["federation.isthmus.dev/hostname-ports"] != ports {
			w.t.Errorf("%s: cluster %s has the ports %q, want %q", when, id, svc.Annotations["federation.isthmus.dev/hostname-ports"], ports)
		}
	}
}

// balancer makes a Service one of type LoadBalancer that has addresses.
func balancer(addrs ...string) func(*corev1.Service) {
	return func(s *corev1.Service) {
		s.Spec.Type = corev1.ServiceTypeLoadBalancer
		for _, a := range addrs {
			s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: a})
		}
	}
}

// gateway creates a Service whose gateways balance a federated Service at an address.
func (w *testbed) gateway(id clusterset.ClusterID, namespace, of, address string) *corev1.Service {
	w.t.Helper()
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: of + "-outside", Annotations: map[string]string{service.AnnotationServiceImport: of}},
		Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, Ports: []corev1.ServicePort{{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP}}},
	}
	w.create(id, svc)
	svc.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: address}}
	if err := w.Member(id).Client().Status().Update(w.t.Context(), svc); err != nil {
		w.t.Fatal(err)
	}
	return svc
}

// A host name leads to where machines outside of the clusters reach the Service: to its gateways, else to endpoints of members, those
// with the Service's own ports first.
func TestHostname(t *testing.T) {
	w := newTestbed(t, v1alpha1.FederationSpec{HostnameTemplate: outsideShop})
	w.offer("a", "web", global, "shop", nil, "10.1.0.1", "10.1.0.2")
	w.wants("without a request", "", "")
	w.edit("a", w.namespace, "web", func(s *corev1.Service) { s.Annotations[askHostname] = "true" })
	w.wants("pods", "shop.example.org 10.1.0.1,10.1.0.2 30", "80/TCP=8080")
	if svc, _ := get[corev1.Service](w, "a", w.namespace, "web"); !strings.Contains(svc.Annotations[status], "its host name leads to other ports (80/TCP=8080)") {
		t.Errorf("it says %q", svc.Annotations[status])
	}
	w.offer("b", "lb", global, "shop", balancer("203.0.113.8"), "10.2.0.1")
	w.wants("a load balancer", "shop.example.org 203.0.113.8 30", "")
	if svc, _ := get[corev1.Service](w, "a", w.namespace, "web"); !strings.HasSuffix(svc.Annotations[status], "leads to clusters a, b") {
		t.Errorf("it says %q", svc.Annotations[status])
	}
	gateway := w.gateway("c", system, "shop", "192.0.2.5")
	w.gateway("b", system, "another", "192.0.2.6")
	w.wants("a gateway", "shop.example.org 192.0.2.5 30", "")
	w.delete("c", gateway)
	w.wants("without the gateway", "shop.example.org 203.0.113.8 30", "")
	w.edit("a", w.namespace, "web", func(s *corev1.Service) { delete(s.Annotations, askHostname) })
	w.wants("after the request", "", "")
}

// The addresses of a host name are those of endpoints that are ready, in clusters that are not dead. Without any, it has none, and the
// Service says so.
func TestHostnameFollowsHealth(t *testing.T) {
	w := newTestbed(t, v1alpha1.FederationSpec{HostnameTemplate: outsideShop})
	w.offer("a", "web", global, "shop", func(s *corev1.Service) { s.Annotations[askHostname] = "true" }, "10.1.0.1", "10.1.0.2")
	w.offer("b", "web", global, "shop", nil, "10.2.0.1")
	w.wants("all", "shop.example.org 10.1.0.1,10.1.0.2,10.2.0.1 30", "80/TCP=8080")
	ready := func(id clusterset.ClusterID, pod int, is bool) {
		es, _ := get[discoveryv1.EndpointSlice](w, id, w.namespace, "web-1")
		es.Endpoints[pod].Conditions.Ready = new(is)
		if err := w.Member(id).Client().Update(t.Context(), es); err != nil {
			t.Fatal(err)
		}
	}
	ready("a", 1, false)
	w.wants("one is not ready", "shop.example.org 10.1.0.1,10.2.0.1 30", "80/TCP=8080")
	w.Member("b").Silence()
	w.sync("a", "c")
	if got := w.outside("a", system, "shop"); got != "shop.example.org 10.1.0.1,10.2.0.1 30" {
		t.Errorf("while b is silent it has %q", got)
	}
	w.Member("b").Kill()
	w.sync("a", "c")
	if got := w.outside("a", system, "shop"); got != "shop.example.org 10.1.0.1 30" {
		t.Errorf("while b is dead it has %q", got)
	}
	w.Member("b").Back()
	ready("a", 0, false)
	ready("b", 0, false)
	w.wants("none is ready", "shop.example.org", "")
	if svc, _ := get[corev1.Service](w, "a", w.namespace, "web"); !strings.Contains(svc.Annotations[status], "its host name has no address: no endpoint is ready") {
		t.Errorf("it says %q", svc.Annotations[status])
	}
}

// A user's own host name on the federated Service gets the addresses too, and stays.
func TestOwnHostname(t *testing.T) {
	w := newTestbed(t, v1alpha1.FederationSpec{})
	w.offer("a", "web", global, "shop", func(s *corev1.Service) { s.Annotations[askHostname] = "true" }, "10.1.0.1")
	w.wants("without a template", "", "")
	if svc, _ := get[corev1.Service](w, "a", w.namespace, "web"); !strings.Contains(svc.Annotations[status], "the Federation has no spec.hostnameTemplate") {
		t.Errorf("it says %q", svc.Annotations[status])
	}
	for _, id := range []clusterset.ClusterID{"a", "b", "c"} {
		w.edit(id, system, "shop", func(s *corev1.Service) {
			for _, prefix := range v1alpha1.ExternalDNSPrefixes() {
				s.Annotations[prefix+"hostname"], s.Annotations[prefix+"ttl"] = "foo.my-org.com", "60"
			}
		})
	}
	w.wants("a name of its own", "foo.my-org.com 10.1.0.1 60", "80/TCP=8080")
}

// A process that has not read all clusters takes no address away.
func TestRestartKeepsAddresses(t *testing.T) {
	spec := v1alpha1.FederationSpec{HostnameTemplate: outsideShop}
	w := newTestbed(t, spec)
	w.offer("a", "web", global, "shop", func(s *corev1.Service) { s.Annotations[askHostname] = "true" }, "10.1.0.1")
	w.offer("b", "web", global, "shop", nil, "10.2.0.1")
	const all = "shop.example.org 10.1.0.1,10.2.0.1 30"
	w.wants("all", all, "80/TCP=8080")
	w.restart(spec)
	w.Member("b").Silence()
	w.sync("a", "c")
	if got := w.outside("a", system, "shop"); got != all {
		t.Errorf("after a restart without b it has %q", got)
	}
	w.Member("b").Back()
	w.wants("with b", all, "80/TCP=8080")
}

// A gateway whose host name is not resolved yet keeps its addresses.
func TestUnresolvedGatewayKeepsAddresses(t *testing.T) {
	spec := v1alpha1.FederationSpec{HostnameTemplate: outsideShop}
	w := newTestbed(t, spec)
	again := w.runs()
	w.offer("a", "web", global, "shop", func(s *corev1.Service) { s.Annotations[askHostname] = "true" }, "10.1.0.1")
	gateway := w.gateway("c", system, "shop", "192.0.2.5")
	gateway.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{Hostname: "gw.example.org"}}
	if err := w.Member("c").Client().Status().Update(t.Context(), gateway); err != nil {
		t.Fatal(err)
	}
	w.sync()
	again()
	const resolved = "shop.example.org 203.0.113.77 30"
	w.wants("resolved", resolved, "")
	w.resolve = func(context.Context, string) ([]netip.Addr, time.Duration, error) {
		return nil, 0, errors.New("no name server answers")
	}
	w.restart(spec)
	w.wants("not resolved", resolved, "")
}

// Gateways of a namespace count where its Services may join the federated Service.
func TestGatewaysOfNamespaces(t *testing.T) {
	w := newTestbed(t, v1alpha1.FederationSpec{
		HostnameTemplate: outsideShop, Grants: []v1alpha1.Grant{{Members: []string{"a", "b"}, Namespaces: []v1alpha1.Pattern{"*"}, Services: []v1alpha1.Pattern{"*"}}},
	})
	w.offer("a", "web", namespaced, "shop", func(s *corev1.Service) { s.Annotations[askHostname] = "true" }, "10.1.0.1")
	for id, address := range map[clusterset.ClusterID]string{"b": "192.0.2.5", "c": "192.0.2.6"} {
		w.gateway(id, w.namespace, "shop", address)
	}
	w.sync()
	if got := w.outside("a", w.namespace, "shop"); got != "shop.example.org 192.0.2.5 30" {
		t.Errorf("it has %q", got)
	}
}

// A change of a gateway's Service reconciles the federated Service that it balances.
func TestGatewayChanges(t *testing.T) {
	w := newTestbed(t, v1alpha1.FederationSpec{HostnameTemplate: outsideShop})
	w.offer("a", "web", global, "shop", nil, "10.1.0.1")
	w.sync()
	svc := w.gateway("c", system, "shop", "192.0.2.5")
	for _, watch := range w.reconciler.Watches() {
		if _, ok := watch.Object.(*corev1.Service); ok {
			if keys := watch.Keys(w.Member("c"), svc); !slices.Contains(keys, reconcile.Key{Kind: "Service", Namespace: system, Name: "shop"}) {
				t.Errorf("it reconciles %v", keys)
			}
		}
	}
}

// A host name goes with its template, and follows it. The name that a user gave stays.
func TestHostnameTemplateChanges(t *testing.T) {
	w := newTestbed(t, v1alpha1.FederationSpec{HostnameTemplate: outsideShop})
	w.offer("a", "web", global, "shop", func(s *corev1.Service) { s.Annotations[askHostname] = "true" }, "10.1.0.1")
	w.offer("a", "own", global, "own", nil, "10.1.0.2")
	w.wants("with a template", "shop.example.org 10.1.0.1 30", "80/TCP=8080")
	w.edit("a", system, "own", func(s *corev1.Service) {
		for _, prefix := range v1alpha1.ExternalDNSPrefixes() {
			s.Annotations[prefix+"hostname"] = "foo.my-org.com"
		}
	})
	w.restart(v1alpha1.FederationSpec{HostnameTemplate: "{{.Name}}.example.net"})
	w.wants("with another one", "shop.example.net 10.1.0.1 30", "80/TCP=8080")
	w.restart(v1alpha1.FederationSpec{})
	w.wants("without one", "", "")
	if got := w.outside("a", system, "own"); got != "foo.my-org.com 10.1.0.2 30" {
		t.Errorf("the user's own name is %q", got)
	}
}

// A Service whose class is that of another load balancer leads no machine to gateways.
func TestForeignLoadBalancer(t *testing.T) {
	w := newTestbed(t, v1alpha1.FederationSpec{HostnameTemplate: outsideShop})
	w.offer("a", "web", global, "shop", func(s *corev1.Service) { s.Annotations[askHostname] = "true" }, "10.1.0.1")
	for class, address := range map[string]string{"example.org/other": "192.0.2.5", service.Class: "192.0.2.6"} {
		svc := &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: system, GenerateName: "outside-", Annotations: map[string]string{service.AnnotationServiceImport: "shop"}},
			Spec: corev1.ServiceSpec{
				Type: corev1.ServiceTypeLoadBalancer, LoadBalancerClass: &class, Ports: []corev1.ServicePort{{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP}},
			},
		}
		w.create("b", svc)
		svc.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: address}}
		if err := w.Member("b").Client().Status().Update(t.Context(), svc); err != nil {
			t.Fatal(err)
		}
	}
	w.wants("of two load balancers", "shop.example.org 192.0.2.6 30", "")
}

// The names that federations look for are the gateways'.
func TestNamesOfGateways(t *testing.T) {
	if v1alpha1.AnnotationServiceImport != service.AnnotationServiceImport {
		t.Error(fmt.Sprint(v1alpha1.AnnotationServiceImport, " is not that of the gateways"))
	}
	if v1alpha1.GatewayClass != service.Class {
		t.Error(fmt.Sprint(v1alpha1.GatewayClass, " is not that of the gateways"))
	}
}
