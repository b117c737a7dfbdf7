package broker_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

// node adds a node with a pod CIDR to m's cluster until the test ends.
func (m *member) node(name, podCIDR string) *corev1.Node {
	t := m.testbed.t
	t.Helper()
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{PodCIDR: podCIDR, PodCIDRs: []string{podCIDR}}}
	m.testbed.create(m, n)
	t.Cleanup(func() { m.testbed.noError(client.IgnoreNotFound(m.Delete(context.WithoutCancel(t.Context()), n))) })
	return n
}

// podsAt adds a slice with endpoints at addresses to a Service.
func (m *member) podsAt(svc *corev1.Service, host int, addresses ...string) {
	m.testbed.t.Helper()
	es := m.slice(svc, corev1.IPv4Protocol, host)
	es.Endpoints = nil
	for _, a := range addresses {
		es.Endpoints = append(es.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}})
	}
	m.testbed.noError(m.Update(m.testbed.t.Context(), es))
}

// reportsPods waits until m's registration has the condition PodsRegistered with a reason, and a text in its message.
func (m *member) reportsPods(status metav1.ConditionStatus, reason, text string) {
	m.testbed.t.Helper()
	m.testbed.eventually(func() error {
		var self v1alpha1.Member
		m.testbed.noError(m.Get(m.testbed.t.Context(), types.NamespacedName{Namespace: m.install, Name: m.id}, &self))
		c := meta.FindStatusCondition(self.Status.Conditions, v1alpha1.ConditionPodsRegistered)
		if c == nil || c.Status != status || c.Reason != reason || !strings.Contains(c.Message, text) {
			return fmt.Errorf("condition %+v, want %s %s with %q", c, status, reason, text)
		}
		var list eventsv1.EventList
		m.testbed.noError(m.List(m.testbed.t.Context(), &list, client.InNamespace(m.install)))
		if !slices.ContainsFunc(list.Items, func(e eventsv1.Event) bool {
			return e.Regarding.Name == m.id && e.Reason == reason && strings.Contains(e.Note, text)
		}) {
			return fmt.Errorf("no event %s on the Member says %q", reason, text)
		}
		return nil
	})
}

// stated waits until annotations of m's Lease on the broker have values; "" is none.
func (m *member) stated(cidrs, refused string) {
	m.testbed.t.Helper()
	m.testbed.eventually(func() error {
		var l coordinationv1.Lease
		err := m.testbed.broker.Get(m.testbed.t.Context(), types.NamespacedName{Namespace: m.testbed.brokerNS, Name: v1alpha1.MemberLease(m.id)}, &l)
		if have := l.Annotations; err != nil || have[v1alpha1.AnnotationPodCIDRs] != cidrs || have[v1alpha1.AnnotationRefusedServices] != refused {
			return errors.Join(err, fmt.Errorf("the Lease has %v, want pod CIDRs %q and %q refused Services", have, cidrs, refused))
		}
		return nil
	})
}

func supernetOfA(s *v1alpha1.MemberSpec) {
	if s.ClusterID == "a" {
		s.PodSupernets = []string{"10.128.0.0/10"}
	}
}

// A node that comes after the join gets its pod CIDR inside of the member's supernet. The member extends itself, and its pods there
// are imported. An address of the supernet that is no node's is not, whatever EndpointSlice has it.
func TestMemberExtendsItself(t *testing.T) {
	w := newTestbed(t, supernetOfA).run()
	svc := w.a.service("hello")
	w.a.podsAt(svc, 2, "10.128.7.5")
	w.a.podsAt(svc, 3, "10.128.9.5")
	w.a.export("hello")
	w.b.wants("hello", helloOfA)
	w.a.condition("hello", "Ready", metav1.ConditionTrue, "EndpointsRefused")
	w.a.stated("", "1")

	n := w.a.node("later", "10.128.7.0/24")
	want := helloOfA
	want.endpoints = []string{"10.128.7.5:8080", "10.97.0.1:8080"}
	w.b.wants("hello", want)
	w.a.stated("10.128.7.0/24", "1")
	w.a.reportsPods(metav1.ConditionTrue, "PodsExtended", "10.128.7.0/24")
	if message := w.a.condition("hello", "Ready", metav1.ConditionTrue, "EndpointsRefused"); !strings.Contains(message, "10.128.9.5") || strings.Contains(message, "10.128.7.5") {
		t.Errorf("the export says %q", message)
	}

	w.a.stop()
	w.run(w.a) // and the extension stays meanwhile
	w.b.wants("hello", want)
	w.noError(w.a.Delete(t.Context(), n))
	w.b.wants("hello", helloOfA)
	w.a.stated("", "1")
	w.a.reportsPods(metav1.ConditionTrue, "PodsInside", "all nodes")
}

// A node's pod CIDR lies outside of the registration. That is reported at once in the member and, by its Lease, on the broker, and it
// ends when an administrator registers the CIDR.
func TestPodsOutsideAreReportedOnBothSides(t *testing.T) {
	w := newTestbed(t, supernetOfA).run()
	svc := w.a.service("hello")
	w.a.podsAt(svc, 2, "10.9.0.5")
	w.a.export("hello")
	w.a.node("outside", "10.9.0.0/24")
	w.a.reportsPods(metav1.ConditionFalse, "PodsOutside", "10.9.0.0/24")
	w.a.condition("hello", "Ready", metav1.ConditionTrue, "EndpointsRefused")
	w.a.stated("10.9.0.0/24", "1")
	w.b.wants("hello", helloOfA)

	registered := &v1alpha1.Member{ObjectMeta: metav1.ObjectMeta{Namespace: w.brokerNS, Name: "a"}}
	edit(w, w.broker, registered, func(m *v1alpha1.Member) { m.Spec.PodCIDRs = append(m.Spec.PodCIDRs, "10.9.0.0/16") })
	want := helloOfA
	want.endpoints = []string{"10.9.0.5:8080", "10.97.0.1:8080"}
	w.b.wants("hello", want)
	w.a.reportsPods(metav1.ConditionTrue, "PodsInside", "all nodes")
	w.a.condition("hello", "Ready", metav1.ConditionTrue, "Exported")
	w.a.stated("", "")
}
