package controller

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/service"
)

// decide returns the decision about a Service, and fails the test if that writes anything.
func (w *testbed) decide(settings *Settings, name string) Decision {
	w.t.Helper()
	reading := interceptor.NewClient(w.api, interceptor.Funcs{
		Patch: func(context.Context, client.WithWatch, client.Object, client.Patch, ...client.PatchOption) error {
			return errors.New("a decision writes")
		},
		SubResourcePatch: func(context.Context, client.Client, string, client.Object, client.Patch, ...client.SubResourcePatchOption) error {
			return errors.New("a decision writes")
		},
	})
	d, err := Decide(w.t.Context(), reading, settings, isthmusControllers, types.NamespacedName{Namespace: w.ns, Name: name})
	w.noError(err)
	return d
}

// Decide comes to the decisions of the running controller, from the objects alone: the same addresses, frontends, refusals and
// faults, also without the settings for what Services have.
func TestDecide(t *testing.T) {
	w := newTestbed(t)
	settings := testSettings()
	settings.AddressPairs, settings.Pools[1].AddressesPerNamespace = PairNone, 2
	settings.Pools = append(settings.Pools, Pool{Name: "other", Announce: desired.ByBGP, Return: desired.SNAT, Addresses: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/28")}, Services: &metav1.LabelSelector{MatchLabels: map[string]string{"team": "blue"}}})
	w.startWith(settings, nil)
	w.noError(w.Sync(t.Context()))
	list := annotation(service.AnnotationPool, "list")
	w.create(
		w.newService("floating", nil, 80),
		w.newService("list", func(s *corev1.Service) {
			list(s)
			s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "sctp", Protocol: corev1.ProtocolSCTP, Port: 9})
		}, 80),
		w.newService("list-2", list, 80), w.newService("quota", list, 80),
		w.newService("foreign", annotation(service.AnnotationPool, "other"), 80),
		w.newService("invalid", annotation(service.AnnotationPool, "none"), 80),
		w.newService("internal", func(s *corev1.Service) { s.Spec.Type, s.Spec.LoadBalancerClass = corev1.ServiceTypeClusterIP, nil }, 80),
		w.endpointSlice("floating", []int32{80}, "10.1.0.1", "10.1.0.2"), w.endpointSlice("list", []int32{80}, "10.1.0.3", "127.0.0.1"),
	)
	_ = w.converge() // the quota is retried
	w.noError(w.Refresh(t.Context()))
	_ = w.converge()

	check := func(names ...string) {
		t.Helper()
		for _, name := range names {
			w.agrees(nil, name)
			w.agrees(&w.configured, name)
		}
	}
	check("floating", "list", "list-2", "quota", "foreign", "invalid")
	w.gateways.away["gw2"] = errors.New("no route to host")
	w.remove("list-2")
	_ = w.converge()
	if c := w.condition("quota", service.ConditionMapped); c.Reason != service.ReasonWithdrawing {
		t.Errorf("quota: %+v, want it to wait for gw2", c)
	}
	check("quota")

	if d := w.decide(nil, "internal"); !strings.HasPrefix(d.NotTaken, "spec.type is ClusterIP") {
		t.Errorf("internal: %q", d.NotTaken)
	}
	d := w.decide(&w.configured, "list")
	want := []PoolVerdict{
		{"public", false, "the Service keeps what it has of pool list"},
		{"list", true, "the Service has addresses of it"},
		{"other", false, "it does not select the Service, by the labels of its namespace or its own"},
	}
	if !slices.Equal(d.Pools, want) || len(d.Gateways) != 2 || len(d.Ports) != 2 || d.Ports[0].NotServed != "" || d.Ports[1].NotServed == "" {
		t.Errorf("list: %+v", d)
	}
}

// agrees fails the test unless the decision about a Service is what its status and the gateways have.
func (w *testbed) agrees(settings *Settings, name string) {
	w.t.Helper()
	d := w.decide(settings, name)
	if have, want := joined(d.Addresses, " "), strings.Join(addresses(w.get(name)), " "); have != want {
		w.t.Errorf("%s has %q in the decision, and %q", name, have, want)
	}
	if diff := cmp.Diff(w.servedAt("gw1", name), w.servedBy(d.VIPs, name)); diff != "" {
		w.t.Errorf("served of %s (-gateway +decision):\n%s", name, diff)
	}
	if c := w.condition(name, service.ConditionApplied); (c.Reason == service.ReasonInvalidEndpoint || d.Fault != "") && d.Fault != c.Message {
		w.t.Errorf("%s: fault %q, condition %+v", name, d.Fault, c)
	}
	refused, c := "", w.condition(name, service.ConditionMapped)
	if d.Refused != nil {
		refused = d.Refused.Error()
	}
	if settings != nil && (c.Status == metav1.ConditionFalse || refused != "") && refused != c.Message {
		w.t.Errorf("%s: refused %q, condition %+v", name, refused, c)
	}
}
