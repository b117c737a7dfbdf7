package controller

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	mcsv1beta1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/gateway/service"
)

// importSlice returns a slice of an import, of a cluster, with an endpoint for each address.
func (w *testbed) importSlice(name, cluster, port string, addrs ...string) *discoveryv1.EndpointSlice {
	s := w.endpointSlice(name, []int32{80}, addrs...)
	s.Name = name + "-" + cluster
	s.Labels = map[string]string{mcsv1beta1.LabelServiceName: name, mcsv1beta1.LabelSourceCluster: cluster, discoveryv1.LabelManagedBy: "isthmus.dev"}
	s.Ports[0].Name = &port
	return s
}

// A Service before a ServiceImport has an address like any other, with the import's endpoints of all clusters as
// backends.
func TestServiceBeforeAnImport(t *testing.T) {
	w := newTestbed(t)
	w.noError(w.Sync(t.Context()))
	imports := func(s *corev1.Service) {
		s.Spec.Selector = nil
		annotation(service.AnnotationServiceImport, "hello")(s)
	}
	w.create(w.endpointSlice("a", []int32{80}, "10.1.0.9")) // a slice with the label of Services
	w.create(w.newService("a", imports, 80), w.newService("other", nil, 443))
	has := func(step string, reason string, want ...string) {
		t.Helper()
		w.refresh()
		s := w.get("a")
		if _, fips := w.fake.Objects(); len(addresses(s)) != 1 || len(fips) != 1 || !slices.Equal(addresses(s), addresses(w.get("other"))) {
			t.Errorf("%s: it is reached at %v, the other one at %v; floating IPs %v", step, addresses(s), addresses(w.get("other")), fips)
		}
		for gateway, state := range w.gateways.states {
			var have []string
			for _, f := range state.VIPs[0].Frontends {
				for _, b := range f.Backends {
					have = append(have, fmt.Sprintf("%s %d %s:%d", f.Service, f.Port, b.Addr, b.Port))
				}
			}
			for i, addr := range want {
				if line := w.ns + "/a 80 " + addr; len(have) != len(want) || have[i] != line {
					t.Errorf("%s: gateway %s has %v, want %v", step, gateway, have, want)
				}
			}
			if len(want) == 0 && len(have) > 0 {
				t.Errorf("%s: gateway %s has %v", step, gateway, have)
			}
		}
		if c := meta.FindStatusCondition(s.Status.Conditions, service.ConditionApplied); c == nil || c.Reason != reason || (c.Status == metav1.ConditionTrue) != (reason == service.ReasonApplied) {
			t.Errorf("%s: %+v, want %s", step, c, reason)
		}
	}
	has("no import yet", service.ReasonApplied)
	b := w.importSlice("hello", "b", "p80", "10.2.0.1", "10.2.0.2")
	w.create(b)
	has("of one cluster", service.ReasonApplied, "10.2.0.1:8080", "10.2.0.2:8080")
	w.create(w.importSlice("hello", "c", "p80", "10.3.0.1"))
	has("of two clusters", service.ReasonApplied, "10.2.0.1:8080", "10.2.0.2:8080", "10.3.0.1:8080")
	w.recover()
	has("after a restart", service.ReasonApplied, "10.2.0.1:8080", "10.2.0.2:8080", "10.3.0.1:8080")

	w.edit("a", func(s *corev1.Service) { s.Spec.Ports[0].Name = "" })
	w.noError(w.converge())
	has("one port and one, of other names", service.ReasonApplied, "10.2.0.1:8080", "10.2.0.2:8080", "10.3.0.1:8080")
	w.events = nil
	b.Ports = append(b.Ports, discoveryv1.EndpointPort{Name: new("more"), Port: new(int32(9090)), Protocol: new(corev1.ProtocolTCP)})
	w.noError(w.api.Update(t.Context(), b))
	has("one port and two, of other names", service.ReasonNoSuchPort)
	said := slices.DeleteFunc(w.events, func(e string) bool {
		return !strings.HasPrefix(e, `NoSuchPort a: spec.ports: ServiceImport hello has no "" (TCP), but "more" (TCP), "p80" (TCP)`)
	})
	if len(said) != 1 {
		t.Errorf("%d events say so: %v", len(said), w.events)
	}
	w.edit("a", func(s *corev1.Service) { s.Spec.Ports[0].Name = "p80" })
	w.noError(w.converge())
	has("named again", service.ReasonApplied, "10.2.0.1:8080", "10.2.0.2:8080", "10.3.0.1:8080")
	w.checkInvariants()
}

// The EndpointSlices of an import count only if controllers of Isthmus wrote them, unless Config.ManagedBy admits all. A
// Service whose import has no others says so. Slices of Services count whichever controller wrote them.
func TestImportSlicesOfOtherControllers(t *testing.T) {
	w := newTestbed(t)
	w.noError(w.Sync(t.Context()))
	w.create(w.endpointSlice("own", []int32{80}, "10.1.0.1")) // without the label of its writer
	w.create(w.newService("own", nil, 80), w.newService("a", func(s *corev1.Service) {
		s.Spec.Selector = nil
		annotation(service.AnnotationServiceImport, "hello")(s)
	}, 443))
	slice := func(cluster, managedBy, addr string) *discoveryv1.EndpointSlice {
		s := w.importSlice("hello", cluster, "p443", addr)
		s.Labels[discoveryv1.LabelManagedBy] = managedBy
		if managedBy == "" {
			delete(s.Labels, discoveryv1.LabelManagedBy)
		}
		return s
	}
	has := func(step, reason string, want ...string) {
		t.Helper()
		w.refresh()
		want = append([]string{"own 10.1.0.1"}, want...)
		for gateway, state := range w.gateways.states {
			var have []string
			for _, f := range state.VIPs[0].Frontends {
				for _, b := range f.Backends {
					have = append(have, fmt.Sprintf("%s %s", strings.TrimPrefix(f.Service, w.ns+"/"), b.Addr))
				}
			}
			if !slices.Equal(have, want) {
				t.Errorf("%s: gateway %s has %v, want %v", step, gateway, have, want)
			}
		}
		s := w.get("a")
		if c := meta.FindStatusCondition(s.Status.Conditions, service.ConditionApplied); c == nil || c.Reason != reason || (c.Status == metav1.ConditionTrue) != (reason == service.ReasonApplied) {
			t.Errorf("%s: %+v, want %s", step, c, reason)
		}
	}
	foreign := slice("x", "another.example.org", "10.9.0.1")
	w.create(foreign)
	has("one of another controller", service.ReasonForeignSlices)
	const text = `ForeignSlices a: the annotation isthmus.dev/service-import: no controller of Isthmus wrote the EndpointSlices of ServiceImport hello, such as hello-x (managed by "another.example.org"); delete them, or set --imports=any`
	if !w.hasEvent(text) {
		t.Errorf("no event says so: %v", w.events)
	}
	w.create(slice("w", "", "10.9.0.2"))
	has("one without a writer", service.ReasonForeignSlices)
	if !w.hasEvent(strings.ReplaceAll(text, `hello-x (managed by "another.example.org")`, `hello-w (managed by "")`)) {
		t.Error("no event names the first one")
	}
	w.create(slice("b", "isthmus.dev", "10.2.0.1"))
	has("one of the ClusterSet", service.ReasonApplied, "a 10.2.0.1")
	w.create(slice("c", "federation.isthmus.dev", "10.3.0.1"))
	has("one of the federation", service.ReasonApplied, "a 10.2.0.1", "a 10.3.0.1")

	w.managedBy = nil
	has("any controller's", service.ReasonApplied, "a 10.2.0.1", "a 10.3.0.1", "a 10.9.0.1", "a 10.9.0.2")
	w.checkInvariants()
}
