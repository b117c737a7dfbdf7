package broker_test

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
	"github.com/isthmus-net/isthmus/tools/apitest"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

// same returns the difference of have and want in any order.
func same(what string, want, have []string) error {
	want, have = slices.Sorted(slices.Values(want)), slices.Sorted(slices.Values(have))
	if diff := cmp.Diff(want, have); diff != "" {
		return fmt.Errorf("%s (-want +have):\n%s", what, diff)
	}
	return nil
}

func dualStack(s *corev1.Service) {
	policy := corev1.IPFamilyPolicyRequireDualStack
	s.Spec.IPFamilyPolicy = &policy
}

func port(name string, protocol corev1.Protocol, number int32) func(*corev1.Service) {
	return func(s *corev1.Service) {
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: name, Protocol: protocol, Port: number})
	}
}

// helloOf is the import of service hello as member a exports it alone.
var helloOfA = expect{
	typ: v1beta1.ClusterSetIP, ips: 1, clusters: []string{"a"},
	ports: []string{"http/80"}, endpoints: []string{"10.97.0.1:8080"},
}

func TestExportIsImportedEverywhere(t *testing.T) {
	w := newTestbed(t).run()
	w.a.service("hello")
	w.a.export("hello")

	for _, m := range []*member{w.a, w.b} {
		si := m.wants("hello", helloOfA)
		if ip := netip.MustParseAddr(si.Spec.IPs[0]); !netip.MustParsePrefix(blocks["a"][0]).Contains(ip) {
			t.Errorf("the VIP %s is not of a's block", ip)
		}
		if diff := cmp.Diff([]corev1.IPFamily{corev1.IPv4Protocol}, si.Spec.IPFamilies); diff != "" {
			t.Errorf("families (-want +have):\n%s", diff)
		}
	}
	w.a.condition("hello", "Valid", metav1.ConditionTrue, "Valid")
	w.a.condition("hello", "Ready", metav1.ConditionTrue, "Exported")
	w.a.condition("hello", "Conflict", metav1.ConditionFalse, "NoConflicts")

	si, imported := w.b.imported("hello")
	es := imported[0]
	if es.Labels[discoveryv1.LabelServiceName] != "" || es.Labels[v1beta1.LabelSourceCluster] != "a" || es.Labels[discoveryv1.LabelManagedBy] != v1alpha1.ManagedBy {
		t.Errorf("labels of the imported slice: %v", es.Labels)
	}
	if len(es.OwnerReferences) != 1 || es.OwnerReferences[0].UID != si.UID {
		t.Errorf("owner of the imported slice: %v", es.OwnerReferences)
	}
	e := es.Endpoints[0]
	if e.TargetRef != nil || *e.Hostname != "hello-1" || *e.NodeName != "node-1" || *e.Zone != "zone-1" || e.Hints.ForZones[0].Name != "zone-1" || !*e.Conditions.Ready {
		t.Errorf("imported endpoint: %+v", e)
	}

	w.a.unexport("hello")
	w.a.wantsNone("hello")
	w.b.wantsNone("hello")
	w.brokerEmpty()
}

func TestEndpointsFollow(t *testing.T) {
	w := newTestbed(t).run()
	svc := w.a.service("hello")
	w.a.export("hello")
	w.b.wants("hello", helloOfA)

	second := w.a.slice(svc, corev1.IPv4Protocol, 2)
	both := helloOfA
	both.endpoints = []string{"10.97.0.1:8080", "10.97.0.2:8080"}
	w.b.wants("hello", both)

	second.Endpoints[0].Addresses = []string{"10.97.0.3"}
	w.noError(w.a.Update(t.Context(), second))
	both.endpoints = []string{"10.97.0.1:8080", "10.97.0.3:8080"}
	w.b.wants("hello", both)

	w.noError(w.a.Delete(t.Context(), second))
	w.b.wants("hello", helloOfA)

	// Without a selector, users write slices by hand, and class E is as good as any other.
	third := w.a.slice(svc, corev1.IPv4Protocol, 4)
	third.Endpoints = append(third.Endpoints, discoveryv1.Endpoint{Addresses: []string{"240.0.97.9"}})
	w.noError(w.a.Update(t.Context(), third))
	both.endpoints = []string{"10.97.0.1:8080", "10.97.0.4:8080", "240.0.97.9:8080"}
	w.b.wants("hello", both)
}

// The test writes the objects of a hostile member to the broker: a slice with an address that API servers accept but
// that is not valid as an endpoint, a slice with an address of another member, and a record that claims to be the
// oldest.
func TestForgedEndpointsAreNotImported(t *testing.T) {
	w := newTestbed(t).run()
	w.a.service("hello")
	w.a.export("hello")
	w.b.wants("hello", helloOfA)
	record := mcs.ExportRecord(hostile(w.ns))
	record.Namespace = w.brokerNS
	forged := mcs.BrokerSlice(&discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: w.ns, Name: "x", Labels: map[string]string{discoveryv1.LabelServiceName: "hello"}},
		AddressType: discoveryv1.AddressTypeIPv4,
	}, "evil")
	forged.Namespace = w.brokerNS
	forged.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{"10.66.0.1"}}, {Addresses: []string{"0.0.0.7"}}, {Addresses: []string{"10.97.0.9"}}}
	evil := registration("e")
	evil.ClusterID, evil.PodCIDRs = "evil", []string{"10.66.0.0/16", "0.0.0.0/8"}
	w.create(w.broker, &v1alpha1.Member{ObjectMeta: metav1.ObjectMeta{Namespace: w.brokerNS, Name: "evil"}, Spec: evil}, record, forged)
	want := helloOfA
	want.clusters = []string{"a", "evil"}
	want.endpoints = []string{"10.66.0.1:", "10.97.0.1:8080"}
	w.b.wants("hello", want)
	conformance.Holds(t, "L71")
}

func TestServiceRecreatedUnderItsExport(t *testing.T) {
	w := newTestbed(t).run()
	w.a.export("hello")
	w.a.condition("hello", "Valid", metav1.ConditionFalse, "NoService")
	w.a.condition("hello", "Ready", metav1.ConditionFalse, "Pending")

	svc := w.a.service("hello")
	w.a.condition("hello", "Valid", metav1.ConditionTrue, "Valid")
	w.b.wants("hello", helloOfA)

	w.noError(w.a.Delete(t.Context(), svc))
	w.a.condition("hello", "Valid", metav1.ConditionFalse, "NoService")
	w.b.wantsNone("hello")
	w.brokerEmpty()
	conformance.Holds(t, "N8")
}

func TestExternalNameIsNotExported(t *testing.T) {
	w := newTestbed(t).run()
	w.a.service("hello", func(s *corev1.Service) {
		s.Spec = corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "example.org"}
	})
	w.a.export("hello")
	w.a.condition("hello", "Valid", metav1.ConditionFalse, "InvalidServiceType")
	w.quiet()
	w.brokerEmpty()
	conformance.Holds(t, "N7")
}

func TestNodePortAndLoadBalancerAreExported(t *testing.T) {
	w := newTestbed(t).run()
	for _, typ := range []corev1.ServiceType{corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer} {
		name := strings.ToLower(string(typ))
		svc := w.a.service(name, func(s *corev1.Service) { s.Spec.Type = typ })
		if typ == corev1.ServiceTypeLoadBalancer {
			svc.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.7"}}
			w.noError(w.a.Status().Update(t.Context(), svc))
		}
		w.a.export(name)
		w.b.wants(name, helloOfA)
	}
	conformance.Holds(t, "N5")
}

func TestHeadlessHasNoVIP(t *testing.T) {
	w := newTestbed(t).run()
	w.a.service("hello", func(s *corev1.Service) { s.Spec.ClusterIP = corev1.ClusterIPNone })
	w.a.export("hello")
	want := helloOfA
	want.typ, want.ips = v1beta1.Headless, 0
	si := w.b.wants("hello", want)
	if len(si.Spec.IPFamilies) == 0 {
		t.Error("a headless import has no families")
	}
	w.quiet()
	for _, ips := range w.heldOnBroker() {
		if len(ips) > 0 {
			t.Errorf("the broker holds %v for a headless service", ips)
		}
	}
	conformance.Holds(t, "N6")
}

func TestDualStackHasTwoVIPs(t *testing.T) {
	w := newTestbed(t).run()
	w.a.service("hello", dualStack, func(s *corev1.Service) {
		s.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv6Protocol, corev1.IPv4Protocol}
	})
	w.a.export("hello")
	si := w.b.wants("hello", expect{
		typ: v1beta1.ClusterSetIP, ips: 2, clusters: []string{"a"}, ports: []string{"http/80"},
		endpoints: []string{"10.97.0.1:8080", "fd00:97::1:8080"},
	})
	if diff := cmp.Diff([]corev1.IPFamily{corev1.IPv6Protocol, corev1.IPv4Protocol}, si.Spec.IPFamilies); diff != "" {
		t.Errorf("families (-want +have):\n%s", diff)
	}
	for i, ip := range si.Spec.IPs {
		if !netip.MustParsePrefix(blocks["a"][1-i]).Contains(netip.MustParseAddr(ip)) {
			t.Errorf("VIP %d is %s", i, ip)
		}
	}
	conformance.Holds(t, "N19", "L36")
}

// A Service that becomes dual-stack gets a second address, wherever its exporters stand in the order of precedence, and keeps both
// when it is single-stack again.
func TestSecondFamilyGetsAnAddress(t *testing.T) {
	w := newTestbed(t).run()
	w.a.service("hello")
	w.a.export("hello")
	w.b.wants("hello", helloOfA)
	w.b.service("hello")
	w.b.export("hello")
	single := w.b.wants("hello", onBoth).Spec.IPs
	dual := onBoth
	dual.ips, dual.endpoints = 2, append(slices.Clone(onBoth.endpoints), "fd00:97::1:8080", "fd00:98::1:8080")

	// The younger export alone adds no address.
	become := func(m *member, policy corev1.IPFamilyPolicy) {
		t.Helper()
		m.editService("hello", func(s *corev1.Service) { s.Spec.IPFamilyPolicy = &policy })
	}
	become(w.b, corev1.IPFamilyPolicyRequireDualStack)
	w.b.slice(w.b.read("hello"), corev1.IPv6Protocol, 1)
	ready := string(v1beta1.ServiceExportConditionReady)
	if said := w.b.condition("hello", ready, metav1.ConditionTrue, string(mcs.ReasonFamilyNotServed)); !strings.Contains(said, "not by [IPv6]: cluster a allocates") {
		t.Errorf("b is told %s", said)
	}
	younger := onBoth
	younger.endpoints = append(slices.Clone(onBoth.endpoints), "fd00:98::1:8080")
	w.a.wants("hello", younger)

	become(w.a, corev1.IPFamilyPolicyRequireDualStack)
	w.a.slice(w.a.read("hello"), corev1.IPv6Protocol, 1)
	for _, m := range w.both() {
		si := m.wants("hello", dual)
		if si.Spec.IPs[0] != single[0] || !netip.MustParsePrefix(blocks["a"][1]).Contains(netip.MustParseAddr(si.Spec.IPs[1])) {
			t.Errorf("in %s the addresses were %v and are %v", m.id, single, si.Spec.IPs)
		}
		if diff := cmp.Diff([]corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}, si.Spec.IPFamilies); diff != "" {
			t.Errorf("families (-want +have):\n%s", diff)
		}
		m.condition("hello", ready, metav1.ConditionTrue, string(v1beta1.ServiceExportReasonExported))
		m.condition("hello", "Conflict", metav1.ConditionFalse, "NoConflicts")
	}

	become(w.a, corev1.IPFamilyPolicySingleStack)
	w.a.condition("hello", "Conflict", metav1.ConditionTrue, "IPFamilyConflict")
	for _, m := range w.both() {
		m.wants("hello", dual)
	}
	conformance.Holds(t, "N20")
}

// ownFamily makes a Service single-stack, of the given family.
func ownFamily(f corev1.IPFamily) func(*corev1.Service) {
	return func(s *corev1.Service) { s.Spec.IPFamilies = []corev1.IPFamily{f} }
}

// addressOf returns an error unless the import si of m has the given address first, and one of the given block second.
func addressOf(m *member, si *v1beta1.ServiceImport, first, block string) error {
	if len(si.Spec.IPs) != 2 || si.Spec.IPs[0] != first || !netip.MustParsePrefix(block).Contains(netip.MustParseAddr(si.Spec.IPs[1])) {
		return fmt.Errorf("in %s the addresses are %v, want %s and one of %s", m.id, si.Spec.IPs, first, block)
	}
	return nil
}

// The Service of the allocator is IPv6 alone, and that of the other exporter IPv4 alone. When the allocator unexports it, the other
// one adds an address of its own block, and both addresses stay from then on.
func TestAnotherExporterAddsTheFamily(t *testing.T) {
	w := newTestbed(t).run()
	six, four := []string{"fd00:97::1:8080"}, []string{"10.98.0.1:8080"}
	w.a.service("hello", ownFamily(corev1.IPv6Protocol))
	w.a.export("hello")
	onlyA := expect{typ: v1beta1.ClusterSetIP, ips: 1, clusters: []string{"a"}, ports: []string{"http/80"}, endpoints: six}
	first := w.b.wants("hello", onlyA).Spec.IPs[0]
	w.b.service("hello")
	w.b.export("hello")
	ready := string(v1beta1.ServiceExportConditionReady)
	if said := w.b.condition("hello", ready, metav1.ConditionTrue, string(mcs.ReasonFamilyNotServed)); !strings.Contains(said, "not by [IPv4]: cluster a allocates") {
		t.Errorf("b is told %s", said)
	}

	w.a.unexport("hello")
	onlyB, both := onlyA, onlyA
	onlyB.ips, onlyB.clusters, onlyB.endpoints = 2, []string{"b"}, four
	both.ips, both.clusters, both.endpoints = 2, []string{"a", "b"}, slices.Concat(six, four)
	second := ""
	for _, m := range w.both() {
		si := m.wants("hello", onlyB)
		w.noError(addressOf(m, si, first, blocks["b"][0]))
		second = si.Spec.IPs[1]
		if diff := cmp.Diff([]corev1.IPFamily{corev1.IPv6Protocol, corev1.IPv4Protocol}, si.Spec.IPFamilies); diff != "" {
			t.Errorf("families (-want +have):\n%s", diff)
		}
	}
	agreed := w.aggregate("hello").Annotations
	if agreed[v1alpha1.AnnotationAllocatedBy] != "a" || agreed[v1alpha1.AnnotationExtendedBy] != "b" {
		t.Errorf("the aggregate has the annotations %v", agreed)
	}
	if said := w.b.condition("hello", ready, metav1.ConditionTrue, string(v1beta1.ServiceExportReasonExported)); !strings.Contains(said, first+" and "+second) {
		t.Errorf("b is told %s", said)
	}
	w.eventually(func() error {
		have := w.b.eventsOn("hello")
		if slices.Contains(have, string(mcs.ReasonFamilyNotServed)) && slices.Contains(have, string(v1beta1.ServiceExportReasonExported)) {
			return nil
		}
		return fmt.Errorf("events of b: %v", have)
	})

	w.keepsBoth("hello", onlyB, first, second)
	w.a.export("hello") // changes nothing
	w.keeps("hello", both, first, second)
	w.quiet()
	w.keeps("hello", both, first, second)
	w.a.unexport("hello")
	w.b.unexport("hello")
	w.brokerEmpty()
}

// keeps waits until all imports match e, with the given addresses.
func (w *testbed) keeps(name string, e expect, addresses ...string) {
	w.t.Helper()
	for _, m := range w.both() {
		if si := m.wants(name, e); !slices.Equal(si.Spec.IPs, addresses) {
			w.t.Errorf("in %s the addresses were %v and are %v", m.id, addresses, si.Spec.IPs)
		}
	}
}

// keepsBoth checks that all imports match e, with the given addresses, also when the aggregate is lost. Each owner then restores
// its own address.
func (w *testbed) keepsBoth(name string, e expect, addresses ...string) {
	w.t.Helper()
	w.keeps(name, e, addresses...)
	w.quiet()
	w.noError(w.broker.Delete(w.t.Context(), w.aggregate(name)))
	w.eventually(func() error {
		si := &v1beta1.ServiceImport{}
		err := w.broker.Get(w.t.Context(), types.NamespacedName{Namespace: w.brokerNS, Name: name + "." + w.ns}, si)
		if err != nil || !slices.Equal(si.Spec.IPs, addresses) || si.Annotations[v1alpha1.AnnotationExtendedBy] != "b" {
			return fmt.Errorf("the aggregate is %v %v: %w", si.Spec.IPs, si.Annotations, err)
		}
		return nil
	})
	w.keeps(name, e, addresses...)
}

// The allocator has no block of a family that it exports, so another exporter with such a block adds the address. Without one, the
// condition of both says so.
func TestFamilyWithoutABlockOfTheAllocator(t *testing.T) {
	for name, ofB := range map[string][]string{"b has a block": blocks["b"], "nobody has one": blocks["b"][:1]} {
		t.Run(name, func(t *testing.T) {
			w := newTestbed(t, func(m *v1alpha1.MemberSpec) {
				m.ClusterSetIPCIDR = map[string][]string{"a": blocks["a"][:1], "b": ofB}[m.ClusterID]
			}).run()
			w.a.service("hello", dualStack)
			w.a.export("hello")
			ready, missing := string(v1beta1.ServiceExportConditionReady), string(mcs.ReasonFamilyNotServed)
			if said := w.a.condition("hello", ready, metav1.ConditionTrue, missing); !strings.Contains(said, "not by [IPv6]: no exporting cluster has a block") {
				t.Errorf("a is told %s", said)
			}
			w.b.service("hello", dualStack)
			w.b.export("hello")
			want := onBoth
			want.endpoints = append(slices.Clone(onBoth.endpoints), "fd00:97::1:8080", "fd00:98::1:8080")
			if len(ofB) == 1 {
				w.b.condition("hello", ready, metav1.ConditionTrue, missing)
				w.b.wants("hello", want)
				return
			}
			want.ips = 2
			for _, m := range w.both() {
				si := m.wants("hello", want)
				w.noError(addressOf(m, si, si.Spec.IPs[0], blocks["b"][1]))
				m.condition("hello", ready, metav1.ConditionTrue, string(v1beta1.ServiceExportReasonExported))
			}
		})
	}
}

func TestExportsOfTwoMembersAreOneImport(t *testing.T) {
	w := newTestbed(t).run()
	w.a.service("hello")
	w.a.export("hello")
	vip := w.b.wants("hello", helloOfA).Spec.IPs
	w.b.service("hello")
	w.b.export("hello")
	both := helloOfA
	both.clusters = []string{"a", "b"}
	both.endpoints = []string{"10.97.0.1:8080", "10.98.0.1:8080"}
	for _, m := range []*member{w.a, w.b} {
		m.wants("hello", both)
		m.condition("hello", "Conflict", metav1.ConditionFalse, "NoConflicts")
	}
	conformance.Holds(t, "N4", "N15", "L16")

	// The VIP outlives the member that allocated it, and goes with the last export.
	w.a.unexport("hello")
	onlyB := helloOfA
	onlyB.clusters, onlyB.endpoints = []string{"b"}, []string{"10.98.0.1:8080"}
	for _, m := range []*member{w.a, w.b} {
		if have := m.wants("hello", onlyB).Spec.IPs; !slices.Equal(have, vip) {
			t.Errorf("VIP in %s: %v, before %v", m.id, have, vip)
		}
	}
	conformance.Holds(t, "L31")
	w.b.unexport("hello")
	w.a.wantsNone("hello")
	w.b.wantsNone("hello")
	w.brokerEmpty()
	conformance.Holds(t, "N12")
}

func TestPortConflict(t *testing.T) {
	w := newTestbed(t).run()
	older, younger := port("tcp", corev1.ProtocolTCP, 42), port("tcp", corev1.ProtocolTCP, 4242)
	w.a.service("hello", older)
	w.a.export("hello")
	want := helloOfA
	want.ports, want.endpoints = []string{"http/80", "tcp/42"}, []string{"10.97.0.1:8080,8042"}
	w.b.wants("hello", want)
	w.laterThan(w.a, "hello")

	w.b.service("hello", younger, port("extra", corev1.ProtocolSCTP, 142))
	w.b.export("hello")
	want.clusters = []string{"a", "b"}
	want.ports = []string{"http/80", "tcp/42", "extra/142"}
	// b's port 4242 is not part of the import, so b has no endpoints for the port name tcp.
	want.endpoints = []string{"10.97.0.1:8080,8042", "10.98.0.1:8080,8142"}
	var messages []string
	for _, m := range []*member{w.a, w.b} {
		m.wants("hello", want)
		messages = append(messages, m.condition("hello", "Conflict", metav1.ConditionTrue, "PortConflict"))
	}
	if messages[0] != messages[1] {
		t.Errorf("a says %q, b says %q", messages[0], messages[1])
	}
	conformance.Holds(t, "N28", "N29", "L18")

	w.a.unexport("hello")
	w.b.condition("hello", "Conflict", metav1.ConditionFalse, "NoConflicts")
	want.clusters = []string{"b"}
	want.ports, want.endpoints = []string{"http/80", "tcp/4242", "extra/142"}, []string{"10.98.0.1:8080,12242,8142"}
	w.a.wants("hello", want)
}

// laterThan waits until an export created now is younger than m's: their times have whole seconds.
func (w *testbed) laterThan(m *member, name string) {
	w.t.Helper()
	var e v1beta1.ServiceExport
	w.noError(m.Get(w.t.Context(), types.NamespacedName{Namespace: w.ns, Name: name}, &e))
	w.eventually(func() error {
		if now := metav1.Now(); now.Unix() <= e.CreationTimestamp.Unix() {
			return fmt.Errorf("it is still %s", now)
		}
		return nil
	})
}

func TestTypeConflictKeepsBothMembers(t *testing.T) {
	w := newTestbed(t).run()
	w.a.service("hello")
	w.a.export("hello")
	w.b.wants("hello", helloOfA)
	w.laterThan(w.a, "hello")
	w.b.service("hello", func(s *corev1.Service) { s.Spec.ClusterIP = corev1.ClusterIPNone })
	w.b.export("hello")
	want := helloOfA
	want.clusters, want.endpoints = []string{"a", "b"}, []string{"10.97.0.1:8080", "10.98.0.1:8080"}
	for _, m := range []*member{w.a, w.b} {
		m.wants("hello", want)
		m.condition("hello", "Conflict", metav1.ConditionTrue, "TypeConflict")
	}

	// The type changes when the older export leaves.
	w.a.unexport("hello")
	want.typ, want.ips, want.clusters, want.endpoints = v1beta1.Headless, 0, []string{"b"}, []string{"10.98.0.1:8080"}
	w.a.wants("hello", want)
}

func TestHeadlessServiceBecomesClusterSetIP(t *testing.T) {
	w := newTestbed(t).run()
	w.a.service("hello", func(s *corev1.Service) { s.Spec.ClusterIP = corev1.ClusterIPNone })
	w.a.export("hello")
	want := helloOfA
	want.typ, want.ips = v1beta1.Headless, 0
	w.b.wants("hello", want)
	w.laterThan(w.a, "hello")
	w.b.service("hello")
	w.b.export("hello")
	w.b.condition("hello", "Conflict", metav1.ConditionTrue, "TypeConflict")

	w.a.unexport("hello")
	want = helloOfA
	want.clusters, want.endpoints = []string{"b"}, []string{"10.98.0.1:8080"}
	si := w.a.wants("hello", want)
	if !netip.MustParsePrefix(blocks["b"][0]).Contains(netip.MustParseAddr(si.Spec.IPs[0])) {
		t.Errorf("the VIP is %v", si.Spec.IPs)
	}
}

func TestExportedLabelsAndPolicies(t *testing.T) {
	w := newTestbed(t).run()
	distribution := corev1.ServiceTrafficDistributionPreferClose
	timeout := int32(10)
	w.a.service("hello", func(s *corev1.Service) {
		s.Labels = map[string]string{"not": "exported"}
		s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
		s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &timeout}}
		s.Spec.TrafficDistribution = &distribution
	})
	w.create(w.a, &v1beta1.ServiceExport{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "hello", Labels: map[string]string{"neither": "this"}},
		Spec:       v1beta1.ServiceExportSpec{ExportedLabels: map[string]string{"tier": "web"}, ExportedAnnotations: map[string]string{"note": "x"}},
	})
	si := w.b.wants("hello", helloOfA)
	if diff := cmp.Diff(map[string]string{"tier": "web", v1alpha1.LabelManagedBy: v1alpha1.ManagedBy}, si.Labels); diff != "" {
		t.Errorf("labels (-want +have):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]string{"note": "x"}, si.Annotations); diff != "" {
		t.Errorf("annotations (-want +have):\n%s", diff)
	}
	conformance.Holds(t, "N9")
	if si.Spec.SessionAffinity != corev1.ServiceAffinityClientIP || *si.Spec.SessionAffinityConfig.ClientIP.TimeoutSeconds != 10 ||
		*si.Spec.InternalTrafficPolicy != corev1.ServiceInternalTrafficPolicyCluster || *si.Spec.TrafficDistribution != distribution {
		t.Errorf("spec %+v", si.Spec)
	}
}

func TestNamespaceCreatedLater(t *testing.T) {
	w := newTestbed(t).run()
	late := w.ns + "-late"
	w.create(w.a, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: late}})
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: late, Name: "hello"}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}
	export := &v1beta1.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: late, Name: "hello"}}
	w.create(w.a, svc, export)
	w.eventually(func() error {
		if si, _ := w.a.importedIn(late, "hello"); si == nil {
			return fmt.Errorf("a has no import")
		}
		return nil
	})
	w.quiet()
	w.create(w.b, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: late}})
	w.eventually(func() error {
		if si, _ := w.b.importedIn(late, "hello"); si == nil {
			return fmt.Errorf("b has no import")
		}
		return nil
	})
	conformance.Holds(t, "N11", "L13")
	w.noError(w.a.Delete(t.Context(), export))
	w.eventually(func() error {
		if si, _ := w.b.importedIn(late, "hello"); si != nil {
			return fmt.Errorf("b still has %v", si)
		}
		return nil
	})
}

func TestTerminatingNamespaceDoesNotAffectOthers(t *testing.T) {
	w := newTestbed(t).run()
	gone := w.ns + "-gone"
	for _, m := range []*member{w.a, w.b} {
		w.create(m, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: gone}})
	}
	// Without a controller-manager, a deleted namespace stays in termination.
	w.noError(w.b.Delete(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: gone}}))
	w.create(w.a, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: gone, Name: "hello"}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}})
	export := &v1beta1.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: gone, Name: "hello"}}
	w.create(w.a, export)
	w.a.service("hello")
	w.a.export("hello")
	w.b.wants("hello", helloOfA)
	w.quiet()
	if si, _ := w.b.importedIn(gone, "hello"); si != nil {
		t.Errorf("imported into a terminating namespace: %v", si)
	}
	w.noError(w.a.Delete(t.Context(), export))
	w.quiet()
}

func TestBrokerInAMember(t *testing.T) {
	w := newTestbedOn(t, func(p *serverSet) *apitest.Server { return &p.a }).run()
	w.a.service("hello")
	w.a.export("hello")
	for _, m := range []*member{w.a, w.b} {
		m.wants("hello", helloOfA)
	}
	w.quiet()
	if held := w.heldOnBroker(); len(held) != 1 {
		t.Errorf("the broker's namespace holds the imports %v", held)
	}
	w.a.unexport("hello")
	w.b.wantsNone("hello")
	w.brokerEmpty()
}

func TestIDsOfTwoLabels(t *testing.T) {
	w := newTestbed(t, func(m *v1alpha1.MemberSpec) { m.ClusterID += ".example" }).run()
	w.a.service("hello")
	w.a.export("hello")
	w.b.service("hello")
	w.b.export("hello")
	want := helloOfA
	want.clusters = []string{"a.example", "b.example"}
	want.endpoints = []string{"10.97.0.1:8080", "10.98.0.1:8080"}
	w.b.wants("hello", want)
	conformance.Holds(t, "K3")
	w.a.unexport("hello")
	w.b.unexport("hello")
	w.brokerEmpty()
}

func TestSimilarNamesAreDistinct(t *testing.T) {
	w := newTestbed(t)
	// Service x-<ns> of namespace y and service x of namespace <ns>-y: joined by hyphens they are one.
	other := w.ns + "-y"
	for _, m := range []*member{w.a, w.b} {
		w.create(m, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: other}})
	}
	w.run()
	long := "x-" + strings.TrimPrefix(other, "demo-")
	short := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: other, Name: "x"}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}
	shortExport := &v1beta1.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: other, Name: "x"}}
	w.create(w.a, short, shortExport)
	w.a.service(long)
	w.a.export(long)
	vip := w.b.wants(long, helloOfA).Spec.IPs
	w.eventually(func() error {
		si, _ := w.b.importedIn(other, "x")
		if si == nil || len(si.Spec.IPs) == 0 {
			return fmt.Errorf("b has no import %s/x", other)
		}
		if slices.Equal(si.Spec.IPs, vip) {
			return fmt.Errorf("both have %v", vip)
		}
		return nil
	})
	w.noError(w.a.Delete(t.Context(), shortExport))
	w.eventually(func() error {
		if si, _ := w.b.importedIn(other, "x"); si != nil {
			return fmt.Errorf("%s/x is still there", other)
		}
		return nil
	})
	w.b.wants(long, helloOfA)
	conformance.Holds(t, "L10")
}

func TestSystemNamespacesAreNotShared(t *testing.T) {
	w := newTestbed(t).run()
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "hello"}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}
	export := &v1beta1.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "hello"}}
	w.create(w.a, svc, export)
	t.Cleanup(func() {
		for _, obj := range []client.Object{svc, export} {
			_ = w.a.Delete(contextAfter(t), obj)
		}
	})
	w.eventually(func() error {
		w.noError(w.a.Get(t.Context(), client.ObjectKeyFromObject(export), export))
		if len(export.Status.Conditions) == 0 || export.Status.Conditions[0].Reason != "RestrictedNamespace" {
			return fmt.Errorf("conditions %v", export.Status.Conditions)
		}
		return nil
	})
	w.quiet()
	w.brokerEmpty()

	// The export of a hostile member is ignored there, and elsewhere it is imported.
	w.guest("c", time.Unix(0, 0))
	w.says(w.exportOf("c", "hello", func(e *clusterset.Export) { e.Service.Namespace, e.Type = "kube-system", clusterset.Headless }), "10.99.0.1")
	w.says(w.exportOf("c", "probe", func(e *clusterset.Export) { e.Type = clusterset.Headless }), "10.99.0.1")
	w.eventually(func() error {
		if si, slices := w.b.imported("probe"); si == nil || len(slices) == 0 {
			return fmt.Errorf("the probe is %v with slices %v", si, slices)
		}
		return nil
	})
	w.quiet()
	if si, slices := w.b.importedIn("kube-system", "hello"); si != nil || len(slices) > 0 {
		t.Errorf("imported into kube-system: %v, %v", si, slices)
	}
	conformance.Holds(t, "L70")
}

// A namespace of OpenShift is exported only if an administrator allows it.
func TestSystemNamespaceAllowedExplicitly(t *testing.T) {
	w := newTestbed(t).run()
	system := "openshift-" + w.ns
	for _, m := range w.both() {
		ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: system}}
		w.create(m, ns)
		t.Cleanup(func() { _ = m.Delete(contextAfter(t), ns) })
	}
	export := &v1beta1.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: system, Name: "hello"}}
	w.create(w.a, &corev1.Service{ObjectMeta: export.ObjectMeta, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}, export)
	valid := func(want metav1.ConditionStatus) {
		t.Helper()
		w.eventually(func() error {
			w.noError(w.a.Get(t.Context(), client.ObjectKeyFromObject(export), export))
			if c := meta.FindStatusCondition(export.Status.Conditions, string(v1beta1.ServiceExportConditionValid)); c == nil || c.Status != want {
				return fmt.Errorf("condition Valid is %v, want %s", c, want)
			}
			return nil
		})
	}
	valid(metav1.ConditionFalse)
	for _, m := range w.both() {
		m.stop()
		m.settings.RestrictedNamespaces = []string{"kube-*"}
	}
	w.run()
	valid(metav1.ConditionTrue)
	w.eventually(func() error {
		if si, _ := w.b.importedIn(system, "hello"); si == nil {
			return errors.New("b does not import the allowed namespace")
		}
		return nil
	})
	conformance.Holds(t, "N10")
}

// An administrator restricts a namespace that has imports and exports. In that cluster the imports go, and its exports go
// everywhere. Other clusters keep what they share.
func TestNamespaceRestrictedLater(t *testing.T) {
	w := newTestbed(t).run()
	for _, m := range w.both() {
		m.service("hello")
		m.export("hello")
	}
	w.b.service("own")
	w.b.export("own")
	both := helloOfA
	both.endpoints, both.clusters = append(slices.Clone(helloOfA.endpoints), "10.98.0.1:8080"), []string{"a", "b"}
	w.a.wants("hello", both)
	w.b.wants("hello", both)

	w.b.stop()
	w.b.settings.RestrictedNamespaces = []string{w.ns}
	w.run(w.b)
	w.b.wantsNone("hello")
	w.b.condition("own", string(v1beta1.ServiceExportConditionValid), metav1.ConditionFalse, "RestrictedNamespace")
	w.a.wantsNone("own")
	w.a.wants("hello", helloOfA)

	w.b.stop()
	w.b.settings.RestrictedNamespaces = nil
	w.run(w.b)
	w.a.wants("hello", both)
	w.b.wants("hello", both)
}

// A value without effect is named in the condition Ready until it is corrected.
func TestIgnoredValues(t *testing.T) {
	w := newTestbed(t).run()
	svc := w.a.service("hello")
	w.a.exportWith("hello", "yes")
	w.b.wants("hello", helloOfA)
	ready := string(v1beta1.ServiceExportConditionReady)
	if said := w.a.condition("hello", ready, metav1.ConditionTrue, string(mcs.ReasonValueIgnored)); !strings.Contains(said, `"yes" is neither true nor false`) {
		t.Errorf("the condition says %s", said)
	}
	w.a.choose("hello", "true")
	w.a.condition("hello", ready, metav1.ConditionTrue, string(v1beta1.ServiceExportReasonExported))

	hosts := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: w.ns, Name: "hosts", Labels: map[string]string{discoveryv1.LabelServiceName: svc.Name}},
		AddressType: discoveryv1.AddressTypeFQDN, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"db.example.com"}}},
	}
	w.create(w.a, hosts)
	if said := w.a.condition("hello", ready, metav1.ConditionTrue, string(mcs.ReasonValueIgnored)); !strings.Contains(said, "EndpointSlice hosts: addressType FQDN") {
		t.Errorf("the condition says %s", said)
	}
	w.b.wants("hello", helloOfA)
}

// heldOnBroker returns the addresses on every aggregate of the broker, by name.
func (w *testbed) heldOnBroker() map[string][]string {
	w.t.Helper()
	var list v1beta1.ServiceImportList
	w.noError(w.broker.List(w.t.Context(), &list, client.InNamespace(w.brokerNS)))
	held := map[string][]string{}
	for _, si := range list.Items {
		held[si.Name] = si.Spec.IPs
	}
	return held
}

// Both members export the same Services at the same instant. Each Service gets one VIP, all VIPs differ, and no member
// holds an address that it did not allocate. The blocks have exactly as many addresses as needed if none leaks.
func TestConcurrentFirstExport(t *testing.T) {
	rounds, bits := 24, 27
	if fullLength() {
		rounds, bits = 200, 24
	}
	addresses := 1<<(32-bits) - 2
	w := newTestbed(t, func(m *v1alpha1.MemberSpec) {
		m.ClusterSetIPCIDR = []string{fmt.Sprintf("%s/%d", map[string]string{"a": "243.10.1.0", "b": "243.20.1.0"}[m.ClusterID], bits)}
	})
	w.a.settings.Quarantine, w.b.settings.Quarantine = time.Second, time.Second
	w.run()
	name := func(i int) string { return fmt.Sprintf("hello-%d", i) }
	for i := range rounds {
		w.a.service(name(i))
		w.b.service(name(i))
	}
	vips := map[string]string{}
	for i := range rounds {
		var both sync.WaitGroup
		for _, m := range []*member{w.a, w.b} {
			both.Go(func() {
				if err := m.Create(t.Context(), &v1beta1.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name(i)}}); err != nil {
					t.Error(err)
				}
			})
		}
		both.Wait()
	}
	for i := range rounds {
		want := helloOfA
		want.clusters, want.endpoints = []string{"a", "b"}, []string{"10.97.0.1:8080", "10.98.0.1:8080"}
		ips := w.a.wants(name(i), want).Spec.IPs
		w.eventually(func() error {
			return same("VIP of "+name(i)+" in b", ips, w.b.wants(name(i), want).Spec.IPs)
		})
		if other, ok := vips[ips[0]]; ok {
			t.Fatalf("%s and %s both have %v", other, name(i), ips)
		}
		vips[ips[0]] = name(i)
	}
	for i := range rounds {
		w.a.unexport(name(i))
		w.b.unexport(name(i))
	}
	w.brokerEmpty()

	// Nothing leaked: each member alone can fill its whole block.
	for _, m := range []*member{w.a, w.b} {
		for i := range addresses {
			n := fmt.Sprintf("%s-full-%d", m.id, i)
			m.service(n)
			m.export(n)
		}
		for i := range addresses {
			m.condition(fmt.Sprintf("%s-full-%d", m.id, i), "Ready", metav1.ConditionTrue, "Exported")
		}
	}
	conformance.Holds(t, "L34")
}

func TestFullPoolRecovers(t *testing.T) {
	w := newTestbed(t, func(m *v1alpha1.MemberSpec) {
		m.ClusterSetIPCIDR = map[string][]string{"a": {"243.10.2.0/30"}, "b": {"243.20.2.0/30"}}[m.ClusterID]
	})
	w.a.settings.Quarantine = time.Second
	w.run()
	for i := range 3 {
		w.a.service(fmt.Sprint("hello-", i))
	}
	w.a.export("hello-0")
	w.a.export("hello-1")
	w.a.condition("hello-0", "Ready", metav1.ConditionTrue, "Exported")
	w.a.condition("hello-1", "Ready", metav1.ConditionTrue, "Exported")
	w.a.export("hello-2")
	if message := w.a.condition("hello-2", "Ready", metav1.ConditionFalse, "Failed"); !strings.Contains(message, "exhausted") {
		t.Errorf("message %q", message)
	}
	w.a.unexport("hello-0")
	w.a.condition("hello-2", "Ready", metav1.ConditionTrue, "Exported")
	w.b.wants("hello-2", helloOfA)
	conformance.Holds(t, "L28")
}

func TestDeletedAggregateComesBackWithItsVIP(t *testing.T) {
	w := newTestbed(t).run()
	w.a.service("hello")
	w.a.export("hello")
	vip := w.b.wants("hello", helloOfA).Spec.IPs
	// The member that restores it did not allocate it: b's own block has other addresses.
	w.b.service("hello")
	w.b.export("hello")
	w.b.condition("hello", "Ready", metav1.ConditionTrue, "Exported")
	w.a.unexport("hello")
	want := helloOfA
	want.clusters, want.endpoints = []string{"b"}, []string{"10.98.0.1:8080"}
	w.a.wants("hello", want)
	w.quiet()
	for range 3 {
		w.noError(w.broker.DeleteAllOf(t.Context(), &v1beta1.ServiceImport{}, client.InNamespace(w.brokerNS)))
		w.eventually(func() error { return same("aggregate", vip, w.heldOnBroker()["hello."+w.ns]) })
	}
	w.quiet()
	if have := w.a.wants("hello", want).Spec.IPs; !slices.Equal(have, vip) {
		t.Errorf("VIP %v, before %v", have, vip)
	}
}

func TestRestartWritesNothing(t *testing.T) {
	w := newTestbed(t).run()
	for _, m := range []*member{w.a, w.b} {
		m.service("hello", dualStack)
		m.export("hello")
		m.service(m.id+"-headless", func(s *corev1.Service) { s.Spec.ClusterIP = corev1.ClusterIPNone })
		m.export(m.id + "-headless")
	}
	w.a.export("no-service")
	w.a.condition("no-service", "Valid", metav1.ConditionFalse, "NoService")
	want := expect{
		typ: v1beta1.ClusterSetIP, ips: 2, clusters: []string{"a", "b"}, ports: []string{"http/80"},
		endpoints: []string{"10.97.0.1:8080", "fd00:97::1:8080", "10.98.0.1:8080", "fd00:98::1:8080"},
	}
	for _, m := range []*member{w.a, w.b} {
		m.wants("hello", want)
	}
	w.quiet()
	for _, m := range []*member{w.a, w.b} {
		m.stop()
	}
	w.run()
	w.eventually(func() error {
		for _, m := range []*member{w.a, w.b} {
			if s := m.controller.State(); !s.Leader || s.Broker.Err != nil {
				return fmt.Errorf("%s: %+v", m.id, s)
			}
		}
		return nil
	})
	if writes := w.changesWithin(4 * settle); len(writes) > 0 {
		t.Errorf("after the restart: %v", writes)
	}
	conformance.Holds(t, "L45")

	// The pool does not allocate addresses again that it allocated before the restart.
	vips := map[string]string{}
	for name, ips := range w.heldOnBroker() {
		for _, ip := range ips {
			if other, ok := vips[ip]; ok {
				t.Errorf("%s and %s both have %s", name, other, ip)
			}
			vips[ip] = name
		}
	}
	conformance.Holds(t, "L32")
}

func TestUnexportWhileDown(t *testing.T) {
	w := newTestbed(t).run()
	w.a.service("hello")
	w.a.export("hello")
	w.b.wants("hello", helloOfA)
	w.quiet()
	w.a.stop()
	w.a.unexport("hello")
	w.b.wants("hello", helloOfA)
	w.run(w.a)
	w.b.wantsNone("hello")
	w.a.wantsNone("hello")
	w.brokerEmpty()
}

func TestBrokerAway(t *testing.T) {
	w := newTestbed(t).run()
	svc := w.a.service("hello")
	w.a.export("hello")
	before := w.b.wants("hello", helloOfA)
	w.quiet()

	w.a.gate.Shut()
	w.b.gate.Shut()
	w.a.service("later")
	w.a.export("later")
	w.a.condition("later", "Ready", metav1.ConditionFalse, "Pending")
	w.a.slice(svc, corev1.IPv4Protocol, 2)
	w.eventually(func() error {
		if s := w.b.controller.State(); s.Broker.Err == nil {
			return fmt.Errorf("b thinks that the broker answers: %+v", s)
		}
		return nil
	})
	outage := time.Second
	if fullLength() {
		outage = 10 * time.Minute
	}
	<-time.After(outage)
	if after := w.b.wants("hello", helloOfA); after.ResourceVersion != before.ResourceVersion {
		t.Errorf("the import changed while the broker was away: %v", after)
	}

	// A controller that starts now changes nothing either, and carries on when the broker is back.
	w.b.stop()
	w.quiet(w.b)
	w.run(w.b)
	w.eventually(func() error {
		if s := w.b.controller.State(); !s.Leader {
			return fmt.Errorf("b does not lead yet")
		}
		return nil
	})
	w.b.wants("hello", helloOfA)
	if writes := w.changesWithin(settle, w.b); len(writes) > 0 {
		t.Errorf("without having seen the broker: %v", writes)
	}
	w.a.gate.Open()
	w.b.gate.Open()
	both := helloOfA
	both.endpoints = []string{"10.97.0.1:8080", "10.97.0.2:8080"}
	w.b.wants("hello", both)
	w.b.wants("later", helloOfA)
	w.a.condition("later", "Ready", metav1.ConditionTrue, "Exported")
	conformance.Holds(t, "L50")
}

func TestForeignEditsAreReverted(t *testing.T) {
	w := newTestbed(t).run()
	w.a.service("hello")
	w.a.export("hello")
	w.b.wants("hello", helloOfA)
	w.quiet()

	for _, change := range []func(*v1beta1.ServiceImport){
		func(si *v1beta1.ServiceImport) { si.Spec.Ports[0].Port = 81 },
		func(si *v1beta1.ServiceImport) { si.Labels["foreign"] = "label" },
		func(si *v1beta1.ServiceImport) { si.Annotations = map[string]string{"foreign": "annotation"} },
	} {
		edit(w, w.b.Client, &v1beta1.ServiceImport{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "hello"}}, change)
		w.eventually(func() error {
			si, _ := w.b.imported("hello")
			if si.Labels["foreign"] != "" || len(si.Annotations) > 0 || si.Spec.Ports[0].Port != 80 {
				return fmt.Errorf("labels %v, annotations %v, ports %v", si.Labels, si.Annotations, si.Spec.Ports)
			}
			return nil
		})
	}
	si, imported := w.b.imported("hello")
	si.Status.Clusters = nil
	w.noError(w.b.Status().Update(t.Context(), si))
	es := &imported[0]
	es.Endpoints[0].Addresses = []string{"10.99.99.99"}
	delete(es.Labels, v1beta1.LabelSourceCluster)
	delete(es.Labels, discoveryv1.LabelManagedBy)
	w.noError(w.b.Update(t.Context(), es))
	w.b.wants("hello", helloOfA)
	_, imported = w.b.imported("hello")
	if imported[0].Labels[v1beta1.LabelSourceCluster] != "a" {
		w.eventually(func() error {
			_, imported = w.b.imported("hello")
			return same("source", []string{"a"}, []string{imported[0].Labels[v1beta1.LabelSourceCluster]})
		})
	}
	w.noError(w.b.Delete(t.Context(), si))
	w.b.wants("hello", helloOfA)

	// Likewise on the broker: a's objects there match a's cluster.
	w.quiet()
	w.noError(w.broker.DeleteAllOf(t.Context(), &v1alpha1.ExportRecord{}, client.InNamespace(w.brokerNS)))
	w.b.wants("hello", helloOfA)
	w.noError(w.broker.DeleteAllOf(t.Context(), &discoveryv1.EndpointSlice{}, client.InNamespace(w.brokerNS)))
	w.b.wants("hello", helloOfA)
	conformance.Holds(t, "N13")
}

func TestUnchangedObjectsCauseNoWrites(t *testing.T) {
	w := newTestbed(t).run()
	svc := w.a.service("hello")
	w.a.export("hello")
	w.b.wants("hello", helloOfA)
	w.quiet()
	// An irrelevant change causes a reconcile without a write.
	svc.Annotations = map[string]string{"unrelated": "annotation"}
	w.noError(w.a.Update(t.Context(), svc))
	if writes := w.changesWithin(3 * settle); len(writes) > 0 {
		t.Errorf("after an unrelated change: %v", writes)
	}
}

func TestForeignImportIsNotRemoved(t *testing.T) {
	w := newTestbed(t).run()
	mine := &v1beta1.ServiceImport{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "by-hand"},
		Spec:       v1beta1.ServiceImportSpec{Type: v1beta1.Headless, Ports: []v1beta1.ServicePort{}},
	}
	w.create(w.b, mine)
	w.a.service("hello")
	w.a.export("hello")
	w.b.wants("hello", helloOfA)
	if si, _ := w.b.imported("by-hand"); si == nil {
		t.Error("an import that is not ours was removed")
	}
}

// Another controller's ServiceImport has the name of an exported Service in b. Isthmus leaves it alone, adds no slices to
// it, and says so on it; it writes nothing more. The import follows when it is gone.
func TestForeignImportOfTheSameName(t *testing.T) {
	w := newTestbed(t).run()
	theirs := &v1beta1.ServiceImport{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "hello", Labels: map[string]string{"app.kubernetes.io/managed-by": "another"}},
		Spec:       v1beta1.ServiceImportSpec{Type: v1beta1.ClusterSetIP, IPs: []string{"241.1.0.1"}, Ports: []v1beta1.ServicePort{{Name: "http", Port: 8888}}},
	}
	w.create(w.b, theirs)
	w.a.service("hello")
	w.a.export("hello")
	w.a.wants("hello", helloOfA)
	w.eventually(func() error {
		if reasons := w.b.eventsAbout(v1beta1.ServiceImportKindName, "hello"); !slices.Contains(reasons, "ForeignServiceImport") {
			return fmt.Errorf("events: %v", reasons)
		}
		return nil
	})
	untouched := func() {
		t.Helper()
		si, imported := w.b.imported("hello")
		if si == nil || si.ResourceVersion != theirs.ResourceVersion || len(imported) > 0 {
			t.Errorf("the ServiceImport of another is %+v, with %d slices", si, len(imported))
		}
	}
	w.quiet()
	untouched()
	if writes := w.changesWithin(3*settle, w.b); len(writes) > 0 {
		t.Errorf("writes beside a ServiceImport of another: %v", writes)
	}
	w.a.unexport("hello")
	w.brokerEmpty()
	untouched()
	w.a.export("hello")
	w.a.wants("hello", helloOfA)
	untouched()
	w.noError(w.b.Delete(t.Context(), theirs))
	w.b.wants("hello", helloOfA)

	// It appears while an import exists, as after a race of two controllers: the slices go, and it stays.
	w.b.stop()
	si, _ := w.b.imported("hello")
	w.noError(w.b.Delete(t.Context(), si))
	theirs.ResourceVersion, theirs.UID = "", ""
	w.create(w.b, theirs)
	w.run(w.b)
	w.eventually(func() error {
		if _, imported := w.b.imported("hello"); len(imported) > 0 {
			return fmt.Errorf("it has %d slices of the former import", len(imported))
		}
		return nil
	})
	untouched()
}

// An EndpointSlice of another controller has the name of an imported one. It is left alone, the other slices arrive, and an event on
// the import says what is missing.
func TestForeignSliceOfTheSameName(t *testing.T) {
	w := newTestbed(t).run()
	svc := w.a.service("hello")
	w.a.export("hello")
	w.b.wants("hello", helloOfA)
	_, imported := w.b.imported("hello")
	w.b.stop()
	si, _ := w.b.imported("hello")
	w.noError(w.b.Delete(t.Context(), si))
	w.noError(w.b.Delete(t.Context(), &imported[0]))
	theirs := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: imported[0].Name, Labels: map[string]string{discoveryv1.LabelManagedBy: "another"}}, AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"192.0.2.1"}}},
	}
	w.create(w.b, theirs)
	w.a.slice(svc, corev1.IPv4Protocol, 2)
	w.run(w.b)
	want := helloOfA
	want.endpoints = []string{"10.97.0.2:8080"}
	w.b.wants("hello", want)
	have := &discoveryv1.EndpointSlice{}
	w.noError(w.b.Get(t.Context(), client.ObjectKeyFromObject(theirs), have))
	if have.ResourceVersion != theirs.ResourceVersion {
		t.Errorf("the slice of another was written: %+v", have)
	}
	w.eventually(func() error {
		if reasons := w.b.eventsAbout(v1beta1.ServiceImportKindName, "hello"); !slices.Contains(reasons, "ForeignEndpointSlice") {
			return fmt.Errorf("events: %v", reasons)
		}
		return nil
	})
	w.noError(w.b.Delete(t.Context(), theirs))
	want.endpoints = []string{"10.97.0.1:8080", "10.97.0.2:8080"}
	w.b.wants("hello", want)
}
