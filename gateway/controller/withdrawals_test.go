package controller

import (
	"errors"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/gateway/api/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/service"
)

// While a gateway is cut off, an address that it may still serve goes to no other Service, also after a restart: it waits, and
// says for which gateway. It is free when the gateway has confirmed, or when an operator had it forgotten.
func TestFreedAddressOfACutOffGateway(t *testing.T) {
	for name, free := range map[string]func(w *testbed){
		"it answers again": func(w *testbed) { delete(w.gateways.away, "gw2") },
		"it is forgotten": func(w *testbed) {
			n := w.gateway("gw2")
			n.Annotations = map[string]string{v1alpha1.AnnotationForget: "true"}
			w.noError(w.api.Update(w.t.Context(), n))
		},
		"its GatewayNode is deleted": func(w *testbed) { w.deleteNode("gw2") },
	} {
		t.Run(name, func(t *testing.T) {
			w := newAPITestbed(t)
			settings := testSettings()
			settings.AddressPairs = PairNone
			settings.FloatingIPs = "none"
			w.startWith(settings, nil)
			w.noError(w.Sync(t.Context()))
			list := annotation(service.AnnotationPool, "list")
			w.create(w.newService("old", list, 80), w.newService("cloud", nil, 80))
			w.refresh()
			w.has("old", "192.0.2.9")
			w.gateways.away["gw2"] = errors.New("no route to host")
			w.remove("old")
			w.remove("cloud")
			w.refresh()
			w.create(
				w.newService("asks", func(s *corev1.Service) { list(s); annotation(service.AnnotationAddresses, "192.0.2.9")(s) }, 80),
				w.newService("by-port", func(s *corev1.Service) { list(s); annotation(service.AnnotationPort, "192.0.2.9")(s) }, 81),
				w.newService("any", list, 80),
			)
			_ = w.converge()
			w.has("any", "192.0.2.10")
			check := func(step string) {
				t.Helper()
				for _, name := range []string{"asks", "by-port"} {
					if c := w.condition(name, service.ConditionMapped); c.Reason != service.ReasonWithdrawing || !strings.Contains(c.Message, ": gw2; ") {
						t.Errorf("%s: %s has %v, %+v", step, name, addresses(w.get(name)), c)
					}
				}
				if len(w.servedAt("gw2", "old")) == 0 || len(w.servedAt("gw1", "old")) > 0 {
					t.Errorf("%s: the gateways serve the old one with %q and %q", step, w.servedAt("gw1", "old"), w.servedAt("gw2", "old"))
				}
				if ports, _ := w.fake.Objects(); len(ports) != 1 {
					t.Errorf("%s: ports %v, want that of the deleted Service", step, ports)
				}
			}
			check("cut off")
			w.refused("asks", service.ReasonWithdrawing, "192.0.2.9 was freed")
			w.create(w.newService("none-left", list, 80))
			_ = w.converge()
			w.refused("none-left", service.ReasonWithdrawing, "isthmusctl gateway forget")
			w.remove("none-left")
			w.startWith(settings, nil)
			_ = errors.Join(w.Sync(t.Context()), w.converge())
			check("after a restart")
			free(w)
			w.refresh()
			w.refresh()
			w.has("asks", "192.0.2.9")
			w.has("by-port", "192.0.2.9")
			if ports, _ := w.fake.Objects(); len(ports) != 0 {
				t.Errorf("in the end ports %v are left", ports)
			}
		})
	}
}

// A Service that asks for an address of Neutron waits for the gateways, too.
func TestFreedAddressOfNeutron(t *testing.T) {
	w := newAPITestbed(t)
	settings := testSettings()
	settings.AddressPairs, settings.FloatingIPs = PairNone, "none"
	w.startWith(settings, nil)
	w.noError(w.Sync(t.Context()))
	asks := annotation(service.AnnotationAddresses, "10.9.77.7")
	w.create(w.newService("old", asks, 80))
	w.refresh()
	w.has("old", "10.9.77.7")
	w.gateways.away["gw2"] = errors.New("no route to host")
	w.remove("old")
	w.refresh()
	w.create(w.newService("new", asks, 80))
	_ = w.converge()
	w.refused("new", service.ReasonWithdrawing, "10.9.77.7 was freed")
	delete(w.gateways.away, "gw2")
	w.refresh()
	w.refresh()
	w.has("new", "10.9.77.7")
}

// A gateway that is cut off from the controller is fenced by Neutron: without the pair, its port drops the packets of the
// address, which is free then.
func TestFreedAddressWithoutPair(t *testing.T) {
	w := newAPITestbed(t)
	w.noError(w.Sync(t.Context()))
	list := annotation(service.AnnotationPool, "list")
	w.create(w.newService("old", list, 80))
	w.refresh()
	w.gateways.away["gw2"] = errors.New("no route to host")
	w.remove("old")
	w.refresh()
	w.create(w.newService("new", func(s *corev1.Service) { list(s); annotation(service.AnnotationAddresses, "192.0.2.9")(s) }, 80))
	w.refresh()
	w.has("new", "192.0.2.9")
}
