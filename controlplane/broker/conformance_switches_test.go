package broker_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

// The test covers the behaviour of Submariner Lighthouse, by its profile and by single settings, as flags and as
// registered.
func TestLighthouseProfile(t *testing.T) {
	switches := v1alpha1.Settings{PortMerge: "intersection", TypeConflict: "exclude", Endpoints: "service-vip"}
	for way, c := range map[string]struct {
		registered v1alpha1.Settings
		flags      broker.Settings
		addresses  int // of an import that has one if nothing is said
	}{
		"the profile as a flag": {flags: broker.Settings{Settings: v1alpha1.Settings{Profile: "lighthouse"}}},
		"every switch as a flag": {
			registered: v1alpha1.Settings{Endpoints: "service-vip"}, flags: broker.Settings{Settings: switches}, addresses: 1,
		},
		"every switch as it joins": {registered: switches, addresses: 1},
	} {
		t.Run(way, func(t *testing.T) {
			w := newTestbed(t, func(m *v1alpha1.MemberSpec) { m.Settings = c.registered })
			w.a.settings, w.b.settings = c.flags, c.flags
			w.run()
			w.serviceAddresses(c.addresses)
			conformance.Holds(t, "V4", "A3", "A32")
			w.portIntersection(c.addresses)
			conformance.Holds(t, "A10")
			w.typeExclusion(c.addresses)
			conformance.Holds(t, "L19")
		})
	}
}

// serviceAddresses checks that an exported Service offers its own address while a pod is ready, and a headless one its
// pods.
func (w *testbed) serviceAddresses(addresses int) {
	t := w.t
	t.Helper()
	svc := w.a.service("hello")
	second := w.a.slice(svc, corev1.IPv4Protocol, 2)
	w.a.export("hello")
	want := w.a.withoutAddress(svc)
	want.ips = addresses
	for _, m := range w.both() {
		m.wants("hello", want)
		if _, imported := m.imported("hello"); len(imported) != 1 {
			t.Errorf("%s imports %d slices of one service", m.id, len(imported))
		}
	}
	no, yes := false, true
	ready := func(es *discoveryv1.EndpointSlice, r *bool) {
		t.Helper()
		edit(w, w.a.Client, es, func(es *discoveryv1.EndpointSlice) { es.Endpoints[0].Conditions.Ready = r })
	}
	first := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "hello-ipv4-1"}}
	ready(first, &no)
	w.quiet()
	w.b.wants("hello", want) // one is left
	ready(second, &no)
	none := want
	none.endpoints = nil
	w.b.wants("hello", none)
	ready(first, &yes)
	w.b.wants("hello", want)

	w.a.service("headless", func(s *corev1.Service) { s.Spec.ClusterIP = corev1.ClusterIPNone })
	w.a.export("headless")
	w.b.wants("headless", expect{typ: v1beta1.Headless, clusters: []string{"a"}, ports: []string{"http/80"}, endpoints: []string{"10.97.0.1:8080"}})
}

// portIntersection checks that the import has the ports of both exporters, and those of the other one after one leaves.
func (w *testbed) portIntersection(addresses int) {
	w.t.Helper()
	ofA := w.a.service("ports", port("only-a", corev1.ProtocolTCP, 42), port("number", corev1.ProtocolTCP, 43))
	w.a.export("ports")
	w.a.condition("ports", "Ready", metav1.ConditionTrue, "Exported")
	w.laterThan(w.a, "ports")
	ofB := w.b.service("ports", port("number", corev1.ProtocolTCP, 4343), port("only-b", corev1.ProtocolUDP, 53))
	w.b.export("ports")
	want := expect{
		typ: v1beta1.ClusterSetIP, ips: addresses, clusters: []string{"a", "b"}, ports: []string{"http/80"},
		endpoints: []string{ofA.Spec.ClusterIP + ":80", ofB.Spec.ClusterIP + ":80"},
	}
	for _, m := range w.both() {
		m.wants("ports", want)
		// Each says it once it has seen both.
		if said := m.condition("ports", "Conflict", metav1.ConditionTrue, "PortConflict"); !strings.Contains(said, "only the ports that all of them have") {
			w.t.Errorf("%s is told %q", m.id, said)
		}
	}
	w.a.unexport("ports")
	want.clusters, want.ports = []string{"b"}, []string{"http/80", "number/4343", "only-b/53"}
	want.endpoints = []string{ofB.Spec.ClusterIP + ":80,4343,53"}
	for _, m := range w.both() {
		m.wants("ports", want)
	}
	w.b.condition("ports", "Conflict", metav1.ConditionFalse, "NoConflicts")
}

// typeExclusion checks that an exporter whose type differs from that of the oldest export is excluded, until they agree
// or the oldest one leaves.
func (w *testbed) typeExclusion(addresses int) {
	t := w.t
	t.Helper()
	headless := func(s *corev1.Service) { s.Spec.ClusterIP = corev1.ClusterIPNone }
	ordinary := map[string]*corev1.Service{}
	for _, name := range []string{"agrees", "leaves"} {
		ordinary[name] = w.a.service(name)
		w.a.export(name)
		w.a.condition(name, "Ready", metav1.ConditionTrue, "Exported")
	}
	w.laterThan(w.a, "leaves")
	for name, svc := range ordinary {
		w.b.service(name, headless)
		w.b.export(name)
		w.a.condition(name, "Conflict", metav1.ConditionTrue, "TypeConflict")
		w.b.condition(name, "Conflict", metav1.ConditionTrue, "TypeConflict")
		w.b.condition(name, "Valid", metav1.ConditionTrue, "Valid")
		w.b.condition(name, "Ready", metav1.ConditionFalse, "TypeExcluded")
		w.quiet()
		want := w.a.withoutAddress(svc)
		want.ips = addresses
		for _, m := range w.both() {
			m.wants(name, want)
		}
		var clusters []string
		for _, c := range w.aggregate(name).Status.Clusters {
			clusters = append(clusters, c.Cluster)
		}
		if !slices.Equal(clusters, []string{"a"}) {
			t.Errorf("%s: the aggregate lists %v", name, clusters)
		}
	}

	w.b.deleteService("agrees")
	svc := w.b.service("agrees")
	want := w.a.withoutAddress(ordinary["agrees"])
	want.ips, want.clusters, want.endpoints = addresses, []string{"a", "b"}, append(want.endpoints, svc.Spec.ClusterIP+":80")
	w.a.unexport("leaves")
	left := expect{typ: v1beta1.Headless, clusters: []string{"b"}, ports: []string{"http/80"}, endpoints: []string{"10.98.0.1:8080"}}
	for _, m := range w.both() {
		m.wants("agrees", want)
		m.wants("leaves", left)
	}
	for _, name := range []string{"agrees", "leaves"} {
		w.b.condition(name, "Ready", metav1.ConditionTrue, "Exported")
		w.b.condition(name, "Conflict", metav1.ConditionFalse, "NoConflicts")
	}
}

// Two clusters use the same service CIDRs, as most do. A Service that declined a ClusterSetIP, or that a cluster exports by
// its own address, is not imported where its address is another Service's. A condition says so on its export, and a third cluster with
// CIDRs of its own imports it. An unregistered --endpoints=service-vip is refused everywhere.
func TestOverlappingServiceCIDRs(t *testing.T) {
	for way, c := range map[string]struct {
		flags      broker.Settings
		registered string // endpoints
		annotated  bool
		refused    string // the reason on the export
	}{
		"the profile":               {flags: broker.Settings{Settings: v1alpha1.Settings{Profile: "lighthouse"}}, refused: "ServiceCIDRsOverlap"},
		"the annotation":            {annotated: true, refused: "ServiceCIDRsOverlap"},
		"service-vip":               {registered: "service-vip", refused: "ServiceCIDRsOverlap"},
		"service-vip, unregistered": {flags: broker.Settings{Settings: v1alpha1.Settings{Endpoints: "service-vip"}}, refused: "EndpointsRefused"},
	} {
		t.Run(way, func(t *testing.T) {
			w := newTestbed(t, func(m *v1alpha1.MemberSpec) { m.Endpoints = c.registered })
			w.a.settings, w.b.settings = c.flags, c.flags
			spec := w.b.spec
			setServices := func(cidr string) {
				t.Helper()
				edit(w, w.broker, &v1alpha1.Member{ObjectMeta: metav1.ObjectMeta{Namespace: w.brokerNS, Name: "b"}}, func(m *v1alpha1.Member) {
					m.Spec = spec
					m.Spec.ServiceCIDRs = []string{cidr}
				})
			}
			setServices("10.96.0.0/12") // contains a's
			w.run()
			w.guest("c", time.Unix(0, 0))
			svc := w.a.service("hello")
			export := &v1beta1.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "hello"}}
			if c.annotated {
				export.Annotations = map[string]string{v1alpha1.AnnotationUseClusterSetIP: "false"}
			}
			w.create(w.a, export)
			want := w.a.withoutAddress(svc)
			if c.registered != "" || c.refused == "EndpointsRefused" {
				want.ips = 1
			}
			here := want.endpoints
			if c.refused == "EndpointsRefused" {
				here = nil
			}
			message := w.a.condition("hello", "Ready", metav1.ConditionTrue, c.refused)
			if c.refused == "ServiceCIDRsOverlap" && !strings.Contains(message, svc.Spec.ClusterIP+" lies in the service CIDRs of b, c; export") {
				t.Errorf("the message is %q", message)
			}
			want.endpoints = nil
			w.b.wants("hello", want)
			want.endpoints = here
			w.a.wants("hello", want) // its own address is right at home
			w.eventually(func() error {
				if reasons := w.a.eventsOn("hello"); !slices.Contains(reasons, c.refused) {
					return fmt.Errorf("events: %v", reasons)
				}
				return nil
			})
			// b has CIDRs of its own after all.
			setServices("10.196.0.0/16")
			w.b.wants("hello", want)
			if c.registered == "" {
				return
			}
			// The address of a Service is on no node, so a policy that keeps clients on theirs refuses all of them.
			w.a.editService("hello", func(s *corev1.Service) { s.Spec.InternalTrafficPolicy = new(corev1.ServiceInternalTrafficPolicyLocal) })
			if message := w.a.condition("hello", "Ready", metav1.ConditionTrue, "NoLocalEndpoints"); !strings.Contains(message, "no client can use it: internalTrafficPolicy Local") {
				t.Errorf("the message is %q", message)
			}
		})
	}
}
