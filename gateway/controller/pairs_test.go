package controller

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/gateway/api/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/openstack"
	"github.com/isthmus-net/isthmus/gateway/openstack/openstacktest"
	"github.com/isthmus-net/isthmus/gateway/service"
)

// pairedWorld has a Service, and a foreign pair at each gateway's port.
func pairedTestbed(t *testing.T) (w *testbed, foreign netip.Prefix) {
	t.Helper()
	w, foreign = newTestbed(t), netip.MustParsePrefix("198.51.100.7/32")
	for _, port := range []string{openstacktest.Gateway1, openstacktest.Gateway2} {
		w.noError(w.cloud.SetAddressPairs(t.Context(), port, nil, []netip.Prefix{foreign}))
	}
	w.noError(w.Sync(t.Context()))
	w.create(w.newService("a", nil, 80))
	w.noError(w.converge())
	return w, foreign
}

// pairsAt verifies the number of pairs of a port, including the foreign one.
func (w *testbed) pairsAt(step, port string, foreign netip.Prefix, want int) {
	w.t.Helper()
	if pairs, err := w.cloud.AddressPairs(w.t.Context(), port); err != nil || len(pairs) != want || !slices.Contains(pairs, foreign) {
		w.t.Errorf("%s: port %s has the pairs %v, %v; want %d with %s", step, port, pairs, err, want, foreign)
	}
}

// When a GatewayNode is deleted, our pairs are removed after the gateway has withdrawn everything; foreign ones stay. The
// controller may be down at the deletion, and Neutron at the removal.
func TestPairsOfADeletedGateway(t *testing.T) {
	w, foreign := pairedTestbed(t)
	gone := func() bool {
		var n v1alpha1.GatewayNode
		return apierrors.IsNotFound(w.api.Get(t.Context(), types.NamespacedName{Name: "gw1"}, &n))
	}
	w.pairsAt("with a Service", openstacktest.Gateway1, foreign, 2)
	w.noError(w.api.Delete(t.Context(), w.gateway("gw1")))
	w.start() // a new one, which was down
	w.gateways.announced = map[string][]netip.Addr{"gw1": {netip.MustParseAddr("192.0.2.1")}}
	w.noError(errors.Join(w.Sync(t.Context()), w.converge(), w.Refresh(t.Context())))
	if s := w.gateways.states["gw1"]; !s.Cordoned || gone() {
		t.Errorf("while it announces: cordoned %v, deleted %v", s.Cordoned, gone())
	}
	w.pairsAt("while it announces", openstacktest.Gateway1, foreign, 2)

	w.gateways.announced = nil
	w.fake.Fault = first(1, openstacktest.Refuse)
	if err := w.Refresh(t.Context()); err == nil || gone() {
		t.Errorf("with Neutron down: %v, deleted %v", err, gone())
	}
	w.fake.Fault = nil
	w.noError(w.Refresh(t.Context()))
	w.pairsAt("after it went", openstacktest.Gateway1, foreign, 1)
	w.pairsAt("after it went", openstacktest.Gateway2, foreign, 2)
	if !gone() {
		t.Error("it is still there")
	}
	w.noError(w.Refresh(t.Context()))
	if _, ok := w.gateways.targets["gw1"]; ok {
		t.Error("it still receives a state")
	}
}

// While Neutron accepts no pairs, only Services whose VIPs need new pairs report it.
func TestPairsWhileNeutronIsAway(t *testing.T) {
	w, foreign := pairedTestbed(t)
	w.fake.Fault = func(r *http.Request) openstacktest.Fault {
		if r.Method == http.MethodPut {
			return openstacktest.Refuse
		}
		return openstacktest.None
	}
	w.events = nil
	w.create(w.newService("b", nil, 80))
	if err := w.converge(); err == nil {
		t.Error("a pair was set")
	}
	for name, want := range map[string]string{"a": service.ReasonApplied, "b": service.ReasonRefused} {
		if c := meta.FindStatusCondition(w.get(name).Status.Conditions, service.ConditionApplied); c == nil || c.Reason != want {
			t.Errorf("%s: %+v, want %s", name, c, want)
		}
	}
	if n := w.said(service.ReasonRefused); n != 1 {
		t.Errorf("%d events of 1 Service", n)
	}
	w.fake.Fault = nil
	w.noError(w.converge())
	w.pairsAt("when it is back", openstacktest.Gateway1, foreign, 3)
	if c := meta.FindStatusCondition(w.get("b").Status.Conditions, service.ConditionApplied); c == nil || c.Reason != service.ReasonApplied {
		t.Errorf("when it is back: %+v", c)
	}
}

// A gateway whose port is missing in Neutron, or that does not answer, is released as well.
func TestPairsOfADeadGateway(t *testing.T) {
	w, _ := pairedTestbed(t)
	clock := time.Now()
	w.now = func() time.Time { return clock }
	w.fake.Remove(openstacktest.Gateway1)
	w.gateways.away["gw1"] = errors.New("connection refused")
	w.noError(w.api.Delete(t.Context(), w.gateway("gw1")))
	var n v1alpha1.GatewayNode
	for _, passes := range []time.Duration{0, silenceTimeout - time.Second} { // its agent may come back and announce again
		clock = clock.Add(passes)
		w.noError(errors.Join(w.Refresh(t.Context()), w.Refresh(t.Context())))
		w.noError(w.api.Get(t.Context(), types.NamespacedName{Name: "gw1"}, &n))
	}
	clock = clock.Add(time.Second)
	w.noError(errors.Join(w.Refresh(t.Context()), w.Refresh(t.Context())))
	if err := w.api.Get(t.Context(), types.NamespacedName{Name: "gw1"}, &n); !apierrors.IsNotFound(err) {
		t.Errorf("it is there still: %v", err)
	}
}

// Our pairs follow a gateway to another port, whenever the controller notices.
func TestPairsOfAChangedPort(t *testing.T) {
	for name, restart := range map[string]bool{"seen": false, "while the controller was away": true} {
		t.Run(name, func(t *testing.T) {
			w, foreign := pairedTestbed(t)
			p, err := w.connect("theirs").CreatePort(t.Context(), openstack.PortRequest{Network: openstacktest.Network, Subnets: []string{openstacktest.Subnet4}, Purpose: "x"})
			w.noError(errors.Join(err, w.cloud.SetAddressPairs(t.Context(), p.ID, nil, []netip.Prefix{foreign})))
			n := w.gateway("gw1")
			n.Spec.NeutronPort = p.ID
			w.noError(w.api.Update(t.Context(), n))
			if restart {
				w.start()
				w.noError(w.Sync(t.Context()))
			}
			w.noError(w.Refresh(t.Context()))
			w.pairsAt("the port before", openstacktest.Gateway1, foreign, 1)
			w.pairsAt("the port now", p.ID, foreign, 2)
			n = w.gateway("gw1")
			n.Spec.NeutronPort = ""
			w.noError(w.api.Update(t.Context(), n))
			w.noError(w.Refresh(t.Context()))
			w.pairsAt("with no port", p.ID, foreign, 1)
			if s := w.gateway("gw1").Status; len(s.AddressPairs) > 0 || s.AddressPairsPort != "" {
				t.Errorf("the status says %v at %q", s.AddressPairs, s.AddressPairsPort)
			}
		})
	}
}

// A GatewayNode that names another gateway's port gets nothing, and takes nothing away when it is deleted: neither before nor after
// it has had pairs there, which an earlier controller set.
func TestPairsOfAnothersPort(t *testing.T) {
	w, foreign := pairedTestbed(t)
	had := w.gateway("gw1").Status
	n := gatewayNode("intruder") // younger than gw1
	n.Spec.NeutronPort = openstacktest.Gateway1
	w.noError(errors.Join(w.api.Create(t.Context(), n), w.Refresh(t.Context())))
	if _, ok := w.gateways.states["intruder"]; ok {
		t.Error("the second gateway of a port gets a state")
	}
	c := meta.FindStatusCondition(w.gateway("intruder").Status.Conditions, v1alpha1.ConditionApplied)
	if c == nil || c.Reason != v1alpha1.ReasonInvalid || !strings.Contains(c.Message, "spec.neutronPort is the port of gateway gw1") {
		t.Errorf("condition %+v", c)
	}
	n = w.gateway("intruder")
	n.Finalizers = []string{v1alpha1.Finalizer}
	w.noError(w.api.Update(t.Context(), n))
	n.Status.AddressPairs, n.Status.AddressPairsPort = had.AddressPairs, had.AddressPairsPort
	w.noError(errors.Join(w.api.Status().Update(t.Context(), n), w.api.Delete(t.Context(), n)))
	w.noError(errors.Join(w.Refresh(t.Context()), w.Refresh(t.Context())))
	w.pairsAt("after it went", openstacktest.Gateway1, foreign, 2)
	if err := w.api.Get(t.Context(), client.ObjectKeyFromObject(n), n); !apierrors.IsNotFound(err) {
		t.Errorf("it is still there: %v", err)
	}
}

// stale serves GatewayNodes that were read some time ago.
type stale struct {
	client.Client
	nodes []v1alpha1.GatewayNode
}

func (s stale) List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error {
	if nodes, ok := list.(*v1alpha1.GatewayNodeList); ok {
		for i := range s.nodes {
			nodes.Items = append(nodes.Items, *s.nodes[i].DeepCopy())
		}
		return nil
	}
	return s.Client.List(ctx, list, opts...)
}

// A pair of ours that is missing in the cache is not forgotten.
func TestPairsWithStaleCache(t *testing.T) {
	w, foreign := pairedTestbed(t)
	late := stale{Client: w.client}
	for _, name := range []string{"gw1", "gw2"} {
		late.nodes = append(late.nodes, *w.gateway(name))
	}
	w.create(w.newService("b", nil, 80))
	w.noError(w.converge())
	w.pairsAt("with two Services", openstacktest.Gateway1, foreign, 3)
	w.client = late
	w.create(w.newService("c", nil, 80))
	_ = w.converge() // the statuses of stale GatewayNodes are written for ever
	w.remove("b")
	_ = w.converge()
	w.client = late.Client
	for _, name := range []string{"a", "c"} {
		w.remove(name)
	}
	w.noError(w.converge())
	w.pairsAt("after all went", openstacktest.Gateway1, foreign, 1)
	w.pairsAt("after all went", openstacktest.Gateway2, foreign, 1)
}

// Nor is it when the gateway gets another port or is deleted meanwhile.
func TestChangedPairsWithStaleCache(t *testing.T) {
	for name, change := range map[string]func(*testbed){
		"another port": func(w *testbed) {
			n := w.gateway("gw1")
			n.Spec.NeutronPort = ""
			w.noError(w.api.Update(w.t.Context(), n))
		},
		"it is deleted": func(w *testbed) { w.noError(w.api.Delete(w.t.Context(), w.gateway("gw1"))) },
	} {
		t.Run(name, func(t *testing.T) {
			w, foreign := pairedTestbed(t)
			was := *w.gateway("gw1")
			w.create(w.newService("b", nil, 80))
			w.noError(w.converge())
			w.pairsAt("with two Services", openstacktest.Gateway1, foreign, 3)
			fresh := w.client
			change(w)
			is := w.gateway("gw1")
			is.Status = was.Status // it has the change, but not our last write
			w.client = stale{Client: fresh, nodes: []v1alpha1.GatewayNode{*is, *w.gateway("gw2")}}
			for range 3 {
				_ = w.Refresh(t.Context())
			}
			w.client = fresh
			w.noError(errors.Join(w.Refresh(t.Context()), w.Refresh(t.Context())))
			w.pairsAt("afterwards", openstacktest.Gateway1, foreign, 1)
		})
	}
}

// An address whose pair does not fit at the port of one gateway is announced by the other one alone, also by a controller that
// starts while Neutron is away.
func TestAddressWithoutRoom(t *testing.T) {
	w := newAPITestbed(t)
	w.noError(w.cloud.SetAddressPairs(t.Context(), openstacktest.Gateway1, nil, []netip.Prefix{netip.MustParsePrefix("198.51.100.7/32")}))
	w.noError(w.Sync(t.Context()))
	for i := range 9 { // as many as fit beside the foreign pair
		w.create(w.newService(fmt.Sprintf("s%d", i), nil, 80))
	}
	w.refresh()
	w.create(w.newService("last", nil, 80))
	_ = w.converge()
	check := func(step string, one, two int) {
		t.Helper()
		if a, b := w.servedAt("gw1", "last"), w.servedAt("gw2", "last"); len(a) != one || len(b) != two {
			t.Errorf("%s: the gateway without room serves %q, the other one %q", step, a, b)
		}
		if a, b := len(w.gateways.states["gw1"].VIPs), len(w.gateways.states["gw2"].VIPs); a != 9 || b != 9+two {
			t.Errorf("%s: the gateways have %d and %d VIPs", step, a, b)
		}
	}
	check("with one too many", 0, 1)
	w.start()
	w.fake.SetFaults(always(openstacktest.Refuse), nil)
	_ = errors.Join(w.Sync(t.Context()), w.converge())
	check("after a restart without Neutron", 0, 1)
	w.fake.SetFaults(nil, nil)
	w.remove("s3")
	w.refresh()
	_ = w.converge()
	if a, b := w.servedAt("gw1", "last"), w.servedAt("gw2", "last"); len(a) != 1 || len(b) != 1 {
		t.Errorf("with room they serve %q and %q", a, b)
	}
}

// Whatever an edit of the settings leaves of the CIDRs, each address that a gateway announces may pass at its port.
func TestPairsOfEditedCIDRs(t *testing.T) {
	for name, edit := range map[string]func(*Settings){
		"the same":         func(*Settings) {},
		"the pool removed": func(s *Settings) { s.Pools = s.Pools[1:] },
		"other CIDRs":      func(s *Settings) { s.Pools[0].CIDRs = []netip.Prefix{netip.MustParsePrefix("10.8.0.0/16")} },
		"pairs by address": func(s *Settings) { s.AddressPairs = PairPerVIP },
		"other addresses":  func(s *Settings) { s.Pools[1].Addresses = s.Pools[1].Addresses[1:] },
	} {
		t.Run(name, func(t *testing.T) {
			w := newTestbed(t)
			settings := func() Settings {
				s := testSettings()
				s.AddressPairs = PairPerCIDR
				s.Pools[0].CIDRs = []netip.Prefix{netip.MustParsePrefix("10.9.0.0/16"), netip.MustParsePrefix("fd09::/16")}
				return s
			}
			w.startWith(settings(), nil)
			w.noError(w.Sync(t.Context()))
			w.create(w.newService("public", nil, 80), w.newService("list", annotation(service.AnnotationPool, "list"), 80))
			w.refresh()
			edited := settings()
			edit(&edited)
			w.startWith(edited, nil)
			w.noError(w.Sync(t.Context()))
			w.refresh()
			pairs, err := w.cloud.AddressPairs(t.Context(), openstacktest.Gateway1)
			w.noError(err)
			if wide := netip.MustParsePrefix("10.9.0.0/16"); edited.AddressPairs == PairPerCIDR && !slices.Contains(pairs, wide) {
				t.Errorf("the port has the pairs %v, want still %s: it has room for few", pairs, wide)
			}
			vips := w.gateways.states["gw1"].VIPs
			if len(vips) != 2 {
				t.Errorf("the gateway has the VIPs %v, want one of each pool", vips)
			}
			for _, vip := range vips {
				if !slices.ContainsFunc(pairs, func(p netip.Prefix) bool { return p.Contains(vip.Addr) }) {
					t.Errorf("the gateway announces %s, and its port has the pairs %v", vip.Addr, pairs)
				}
			}
		})
	}
}
