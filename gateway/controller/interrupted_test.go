package controller

import (
	"errors"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"

	"github.com/isthmus-net/isthmus/gateway/openstack"
	"github.com/isthmus-net/isthmus/gateway/openstack/openstacktest"
	"github.com/isthmus-net/isthmus/gateway/service"
)

// One test for each "If interrupted" of the design, with its words; TestKilledAtEveryCall covers all moments between.

// interrupt crashes the worker after the first call of a kind took effect, while it reconciles a change.
func (w *testbed) interrupt(kind string, change func()) *crasher {
	w.t.Helper()
	k := &crasher{crashMode: crashMode{kind: kind, after: true}}
	w.startWith(testSettings(), k)
	w.noError(w.Sync(w.t.Context()))
	k.armed = true
	change()
	if err := w.converge(); !errors.Is(err, errKilled) && !k.dead {
		w.t.Fatalf("there was no %s to be killed at: %v", kind, err)
	}
	return k
}

// AddFunc, managed and can not be managed, UnmapService: "initial sync will clear the managed flag and the usual recovery of an
// interrupted UnmapService will clean up the rest". A controller that starts finds a Service which became so meanwhile.
func TestInterruptedAddOfUnmanageableService(t *testing.T) {
	w := newTestbed(t)
	w.create(w.newService("a", nil, 80))
	w.recover()
	w.edit("a", annotation(service.AnnotationManaged, "false"))
	k := &crasher{crashMode: crashMode{kind: "Patch", after: true}, armed: true}
	w.startWith(testSettings(), k)
	_ = errors.Join(w.Sync(t.Context()), w.converge())
	w.unmappedAndManaged("a", k)
}

// UpdateFunc, managed and can not be managed, UnmapService: the same words. The controller was running when it became so.
func TestInterruptedUpdateOfUnmanageableService(t *testing.T) {
	w := newTestbed(t)
	w.create(w.newService("a", nil, 80))
	w.recover()
	k := w.interrupt("Patch", func() { w.edit("a", annotation(service.AnnotationManaged, "false")) })
	w.unmappedAndManaged("a", k)
}

// unmappedAndManaged recovers with another controller, which finds a Service without a port and with the finalizer.
func (w *testbed) unmappedAndManaged(name string, k *crasher) {
	w.t.Helper()
	if s := w.get(name); !k.dead || !managed(s) || s.Annotations[service.AnnotationPort] != "" {
		w.t.Fatalf("it was killed elsewhere: %v", s.Annotations)
	}
	w.recover()
	if s := w.get(name); managed(s) || len(addresses(s)) > 0 {
		w.t.Errorf("it is managed on: %v %v", s.Finalizers, s.Annotations)
	}
	w.checkInvariants()
}

// MapService 1, check the current L2 port: "initial sync will treat new ports of the Service as well as old L2 port mapping
// as authoritative. This may cause the service to hop to a different IP address if a conflict arises." Here it is the one that
// asks for more.
func TestInterruptedCheckOfThePort(t *testing.T) {
	w := newTestbed(t)
	w.noError(w.Sync(t.Context()))
	w.create(w.newService("a", nil, 80)) // the older one
	w.noError(w.converge())
	w.create(w.newService("b", nil, 443))
	w.noError(w.converge())
	had := addresses(w.get("b"))
	w.interrupt("CreatePort", func() { // which follows the check
		w.edit("a", func(s *corev1.Service) {
			s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "more", Port: 443, Protocol: corev1.ProtocolTCP})
		})
	})
	w.recover()
	w.checkInvariants()
	if got := addresses(w.get("b")); !slices.Equal(got, had) {
		t.Errorf("who asked for nothing hopped from %v to %v", had, got)
	}
	if got := addresses(w.get("a")); slices.Equal(got, had) {
		t.Errorf("two Services have 443/TCP of %v", got)
	}
}

// MapService 2, look for an L2 port: "service will be re-discovered on sync and will be re-mapped".
func TestInterruptedSearchForAPort(t *testing.T) {
	w := newTestbed(t)
	w.create(w.newService("old", nil, 80))
	w.recover()
	s := w.newService("new", annotation(service.AnnotationManaged, "true"), 443)
	s.Finalizers = []string{service.Finalizer} // already taken over
	k := &crasher{crashMode: crashMode{kind: "Patch"}}
	w.startWith(testSettings(), k)
	w.noError(w.Sync(t.Context()))
	k.armed = true // before the port is assigned
	w.create(s)
	if err := w.converge(); !errors.Is(err, errKilled) || w.get("new").Annotations[service.AnnotationPort] != "" {
		t.Fatalf("it was killed elsewhere: %v", err)
	}
	w.recover()
	w.checkInvariants()
	if a, b := addresses(w.get("old")), addresses(w.get("new")); !slices.Equal(a, b) {
		t.Errorf("they could share an address and have %v and %v", a, b)
	}
}

// MapService 3, assign by annotation: "service will have annotation, initial sync will recover the state based on that".
func TestInterruptedAssignment(t *testing.T) {
	w := newTestbed(t)
	w.create(w.newService("old", nil, 80))
	w.recover()
	w.interrupt("Patch", func() {
		s := w.newService("new", annotation(service.AnnotationManaged, "true"), 443)
		s.Finalizers = []string{service.Finalizer} // already taken over
		w.create(s)
	})
	port := w.get("new").Annotations[service.AnnotationPort]
	if port == "" || len(addresses(w.get("new"))) > 0 {
		t.Fatal("it was killed elsewhere")
	}
	w.recover()
	w.checkInvariants()
	if got := w.get("new").Annotations[service.AnnotationPort]; got != port {
		t.Errorf("its port was %s and is %s", port, got)
	}
}

// CreateAndAssignPort 1, create the port: "port will be cleaned up by CleanUnusedPorts".
func TestInterruptedCreationOfAPort(t *testing.T) {
	w := newTestbed(t)
	w.interrupt("CreatePort", func() { w.create(w.newService("a", nil, 80)) })
	w.remove("a") // no other Service will ask for it
	w.recover()
	w.checkInvariants()
	if ports, fips := w.fake.Objects(); len(ports)+len(fips) > 0 {
		t.Errorf("left: %v %v", ports, fips)
	}
}

// CreateAndAssignPort 2, assign a floating IP: "port will be cleaned up by CleanUnusedPorts, floating IP will too".
func TestInterruptedAssignmentOfAFloatingIP(t *testing.T) {
	w := newTestbed(t)
	w.interrupt("CreateFloatingIP", func() { w.create(w.newService("a", nil, 80)) })
	w.remove("a")
	w.recover()
	w.checkInvariants()
	if ports, fips := w.fake.Objects(); len(ports)+len(fips) > 0 {
		t.Errorf("left: %v %v", ports, fips)
	}
}

// UnmapService 1, remove the annotation: "no annotated service will be there, L4 mappings and L2 ports will be cleaned up,
// config will be regenerated".
func TestInterruptedUnmapService(t *testing.T) {
	w := newTestbed(t)
	w.create(w.newService("a", nil, 80), w.newService("b", nil, 80))
	w.recover()
	w.interrupt("Patch", func() { w.remove("a") })
	w.recover()
	w.checkInvariants()
	if ports, _ := w.fake.Objects(); len(ports) != 1 || len(w.names()) != 1 {
		t.Errorf("ports %v for the Services %v", ports, w.names())
	}
}

// CleanUnusedPorts 3, delete the ports: "initial sync calls this and unused ports will be cleaned up appropriately".
func TestInterruptedDeletionOfPorts(t *testing.T) {
	w := newTestbed(t)
	w.noError(w.Sync(t.Context()))
	for _, purpose := range []string{"public.x", "public.y"} {
		_, err := w.cloud.CreatePort(t.Context(), openstack.PortRequest{Network: openstacktest.Network, Subnets: []string{openstacktest.Subnet4}, Purpose: purpose})
		w.noError(err)
	}
	w.create(w.newService("a", nil, 80))
	w.noError(w.converge())
	k := &crasher{crashMode: crashMode{kind: "DeletePort", after: true}, armed: true}
	w.startWith(testSettings(), k)
	_ = w.Sync(t.Context())
	if ports, _ := w.fake.Objects(); !k.dead || len(ports) != 2 {
		t.Fatalf("it was killed elsewhere: ports %v", ports)
	}
	w.recover()
	w.checkInvariants()
}

// CleanUnusedPorts 5, remove floating IPs: "initial sync calls this and unused floating IPs will be cleaned up appropriately".
func TestInterruptedDeletionOfFloatingIPs(t *testing.T) {
	w := newTestbed(t)
	w.create(w.newService("a", nil, 80), w.newService("b", nil, 80))
	w.recover()
	w.interrupt("DeletePort", func() { w.remove("a") }) // its floating IP is left
	if _, fips := w.fake.Objects(); len(fips) != 2 {
		t.Fatalf("it was killed elsewhere: %v", fips)
	}
	w.recover()
	w.checkInvariants()
	if _, fips := w.fake.Objects(); len(fips) != 1 {
		t.Errorf("floating IPs %v", fips)
	}
}

// UpdateAgents 2, send the request: "initial sync calls this".
func TestInterruptedUpdateOfAgents(t *testing.T) {
	w := newTestbed(t)
	k := &crasher{crashMode: crashMode{kind: "Set"}}
	w.startWith(testSettings(), k)
	w.noError(w.Sync(t.Context()))
	k.armed = true // before it takes effect
	w.create(w.newService("a", nil, 80))
	_ = w.converge()
	if !k.dead || len(w.gateways.states["gw1"].VIPs) > 0 {
		t.Fatal("it was killed elsewhere")
	}
	w.recover()
	w.checkInvariants()
}

// UpdateAgents 3, tell Services what is wrong: "initial sync calls this".
func TestInterruptedReportToServices(t *testing.T) {
	w := newTestbed(t)
	w.create(w.newService("a", nil, 80))
	w.recover()
	reason := func() string {
		return meta.FindStatusCondition(w.get("a").Status.Conditions, service.ConditionApplied).Reason
	}
	had := reason()
	k := &crasher{crashMode: crashMode{kind: "Status"}}
	w.startWith(testSettings(), k)
	w.noError(w.Sync(t.Context()))
	w.noError(w.converge())
	k.armed = true // before it takes effect
	w.gateways.refuse["gw2"] = w.refusal("a")
	w.requeued = append(w.requeued, gatewaysKey)
	_ = w.converge()
	if got := reason(); !k.dead || had != service.ReasonApplied || got != had {
		t.Fatalf("it was killed elsewhere: the Service says %s, before %s", got, had)
	}
	w.start()
	w.noError(w.Sync(t.Context()))
	w.noError(w.converge())
	if got := reason(); got != service.ReasonRefused {
		t.Errorf("the Service says %s", got)
	}
	w.checkInvariants()
}
