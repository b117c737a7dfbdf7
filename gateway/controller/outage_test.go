package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/gateway/api/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/openstack"
	"github.com/isthmus-net/isthmus/gateway/openstack/openstacktest"
	"github.com/isthmus-net/isthmus/gateway/service"
)

// always injects one fault into every request.
func always(fault openstacktest.Fault) func(*http.Request) openstacktest.Fault {
	return func(*http.Request) openstacktest.Fault { return fault }
}

// backendsOf returns the backends of a Service in a state, as text; false if the state does not have the Service.
func backendsOf(s desired.State, name string) (all []string, ok bool) {
	for _, v := range s.VIPs {
		for _, f := range v.Frontends {
			if f.Service == name {
				ok = true
				for _, b := range f.Backends {
					all = append(all, b.Addr.String())
				}
			}
		}
	}
	return all, ok
}

// setEndpoints replaces the endpoints of a Service.
func (w *testbed) setEndpoints(name string, addrs ...string) {
	w.t.Helper()
	want := w.endpointSlice(name, []int32{80}, addrs...)
	is := want.DeepCopy()
	if err := w.api.Get(w.t.Context(), client.ObjectKeyFromObject(is), is); err != nil {
		w.create(want)
		return
	}
	is.Endpoints = want.Endpoints
	w.noError(w.api.Update(w.t.Context(), is))
}

// conditionOf returns a condition of a Service.
func (w *testbed) conditionOf(name, kind string) metav1.Condition {
	w.t.Helper()
	if c := meta.FindStatusCondition(w.get(name).Status.Conditions, kind); c != nil {
		return *c
	}
	return metav1.Condition{}
}

// remembering is a balancer that remembers the applied states.
type remembering struct {
	idleBalancer

	mu     sync.Mutex
	states []desired.State
}

func (r *remembering) Apply(_ context.Context, s *desired.State) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.states = append(r.states, *s)
	return nil
}

func (r *remembering) all() []desired.State {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.states)
}

func (r *remembering) last() desired.State {
	if all := r.all(); len(all) > 0 {
		return all[len(all)-1]
	}
	return desired.State{}
}

// TestOutage runs controllers as in pods while OpenStack hangs for ever, and then with a leader that never saw it. The
// endpoints of Services with addresses reach a gateway all the same, whose state never loses an address. Lists of addresses
// work as ever, and new addresses of Neutron wait with a condition.
func TestOutage(t *testing.T) {
	w := newAPITestbed(t)
	balancer := &remembering{}
	_, url, connect := realGatewayWith(t, "gw1", balancer)
	n := w.gateway("gw1")
	n.Spec.URL = url
	w.noError(w.api.Update(t.Context(), n))
	patient := func() Cloud {
		c, err := openstack.New(openstack.Config{Cloud: "test", File: w.fake.CloudsYAML(t), Cluster: "cluster-a", Timeout: time.Hour})
		w.noError(err)
		return c
	}
	listed := annotation(service.AnnotationPool, "list")
	w.create(w.newService("a", nil, 80), w.newService("b", listed, 80))
	w.setEndpoints("a", "10.1.0.1")
	w.setEndpoints("b", "10.1.0.1")
	first := w.runControllerOn(patient(), connect)
	follows := func(when, name, want string) {
		t.Helper()
		await(t, fmt.Sprintf("%s, the gateway has the endpoint %s of %s", when, want, name), func() bool {
			have, _ := backendsOf(balancer.last(), w.ns+"/"+name)
			return slices.Equal(have, []string{want})
		})
	}
	follows("with OpenStack", "a", "10.1.0.1")
	await(t, "the port is recorded", func() bool { return w.conditionOf("a", service.ConditionAllocated).Message != "" })
	has := slices.IndexFunc(balancer.all(), func(s desired.State) bool { _, ok := backendsOf(s, w.ns+"/a"); return ok })

	hang := always(openstacktest.Hang)
	w.fake.SetFaults(hang, hang)
	w.create(w.newService("new", nil, 80)) // its call hangs
	await(t, "the new Service says what it waits for", func() bool {
		c := w.conditionOf("new", service.ConditionMapped)
		return c.Reason == service.ReasonPending && strings.Contains(c.Message, "pool public")
	})
	w.setEndpoints("a", "10.1.0.2")
	follows("while Neutron hangs", "a", "10.1.0.2")

	w.fake.SetFaults(hang, always(openstacktest.Refuse))
	_ = first.stop() // its calls end with it; on a busy machine it may have lost the Lease
	second := w.runControllerOn(patient(), connect)
	await(t, "the second is elected", func() bool { return isElected(second) && second.Ready() == nil })
	w.setEndpoints("a", "10.1.0.3")
	follows("with a leader that never saw OpenStack", "a", "10.1.0.3")
	w.create(w.newService("c", listed, 80))
	w.setEndpoints("b", "10.1.0.4")
	w.setEndpoints("c", "10.1.0.5")
	follows("with Keystone down", "b", "10.1.0.4")
	follows("with Keystone down", "c", "10.1.0.5")
	w.remove("b")
	await(t, "the Service with an address of a list is deleted", func() bool { return len(w.names()) == 3 })
	for i, s := range balancer.all()[has:] {
		if _, ok := backendsOf(s, w.ns+"/a"); !ok {
			t.Errorf("state %d lacks the Service: %+v", i, s.VIPs)
		}
	}

	w.fake.SetFaults(nil, nil)
	await(t, "the new Service has an address", func() bool {
		return w.conditionOf("new", service.ConditionMapped).Status == metav1.ConditionTrue && len(addresses(w.get("new"))) == 1
	})
	w.noError(second.stop())
}

// A controller that starts without OpenStack serves what the Services' statuses record, with floating IPs and failover IPs,
// and takes nothing away: neither a VIP, nor a pair, nor a floating IP.
func TestStartWithoutCloud(t *testing.T) {
	for name, faults := range map[string][2]openstacktest.Fault{
		"Neutron refuses": {openstacktest.Refuse, openstacktest.None}, "Keystone refuses": {openstacktest.None, openstacktest.Refuse},
	} {
		t.Run(name, func(t *testing.T) {
			w := failoverTestbed(t)
			w.create(
				w.newService("a", nil, 80), w.newService("shares", nil, 443), w.newService("moving", annotation(service.AnnotationPool, "moving"), 80),
				w.newService("list", annotation(service.AnnotationPool, "list"), 80),
				w.newService("dual", func(s *corev1.Service) {
					annotation(service.AnnotationFloatingIP, "none")(s)
					s.Spec.IPFamilyPolicy, s.Spec.IPFamilies = new(corev1.IPFamilyPolicyRequireDualStack), []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
				}, 80),
			)
			w.setEndpoints("a", "10.1.0.1")
			w.noError(w.converge())
			w.checkInvariants()
			had, nodes := maps.Clone(w.gateways.states), map[string]v1alpha1.GatewayNodeStatus{}
			reached := map[string][]string{}
			for _, n := range w.names() {
				reached[n.Name] = addresses(w.get(n.Name))
			}
			for name := range had {
				nodes[name] = w.gateway(name).Status
			}
			w.fake.SetFaults(always(faults[0]), always(faults[1]))
			w.fake.Expire()
			w.gateways.states = map[string]desired.State{} // gateways that restarted at the same time
			w.startWith(failoverSettings(), nil)
			w.create(w.newService("new", nil, 80))
			w.setEndpoints("a", "10.1.0.2")
			_ = errors.Join(w.Sync(t.Context()), w.converge())
			w.now = func() time.Time { return time.Now().Add(waitingNotice) }
			_ = w.converge()
			for name, state := range w.gateways.states {
				have, _ := backendsOf(state, w.ns+"/a")
				if !slices.Equal(have, []string{"10.1.0.2"}) {
					t.Errorf("gateway %s has the endpoints %v", name, have)
				}
				if diff := cmp.Diff(vipsOf(had[name]), vipsOf(state)); diff != "" {
					t.Errorf("VIPs of gateway %s (-before +now):\n%s", name, diff)
				}
				now := w.gateway(name).Status
				if !slices.Equal(now.AddressPairs, nodes[name].AddressPairs) || !slices.Equal(now.FloatingIPs, nodes[name].FloatingIPs) {
					t.Errorf("gateway %s has the pairs %v and the floating IPs %v, before %+v", name, now.AddressPairs, now.FloatingIPs, nodes[name])
				}
			}
			if len(w.gateways.states) != 2 {
				t.Errorf("%d gateways have a state", len(w.gateways.states))
			}
			for name, want := range reached {
				if got := addresses(w.get(name)); !slices.Equal(got, want) {
					t.Errorf("service %s is reached at %v, before at %v", name, got, want)
				}
			}
			if c := w.conditionOf("new", service.ConditionMapped); c.Reason != service.ReasonPending || !strings.Contains(c.Message, "pool public") {
				t.Errorf("the new Service says %+v", c)
			}
			w.fake.SetFaults(nil, nil)
			w.noError(errors.Join(w.Sync(t.Context()), w.converge()))
			w.checkInvariants()
		})
	}
}

func vipsOf(s desired.State) (all []string) {
	for _, v := range s.VIPs {
		for _, f := range v.Frontends {
			all = append(all, fmt.Sprintf("%s %d/%s %s", v.Addr, f.Port, f.Protocol, f.Service))
		}
	}
	return all
}

// A Service whose address only the cloud knows, such as one of an older controller, keeps the gateways of its group at
// their state until the cloud answers. Other groups follow.
func TestUnknownAddressHoldsItsGroup(t *testing.T) {
	w := newTestbed(t)
	settings := testSettings()
	settings.Pools[1].Group = "edge"
	n := w.gateway("gw2")
	n.Spec.Group = "edge"
	w.noError(w.api.Update(t.Context(), n))
	w.startWith(settings, nil)
	w.noError(w.Sync(t.Context()))
	w.create(w.newService("a", nil, 80), w.newService("b", annotation(service.AnnotationPool, "list"), 80))
	w.noError(w.converge())
	s := w.get("a")
	meta.RemoveStatusCondition(&s.Status.Conditions, service.ConditionAllocated)
	w.noError(w.api.Status().Update(t.Context(), s))
	had := w.gateways.states["gw1"]
	w.fake.SetFaults(always(openstacktest.Refuse), nil)
	w.startWith(settings, nil)
	w.setEndpoints("a", "10.1.0.1")
	w.setEndpoints("b", "10.1.0.1")
	_ = errors.Join(w.Sync(t.Context()), w.converge())
	if is := w.gateways.states["gw1"]; is.Hash() != had.Hash() || !w.gateways.targets["gw1"].Hold {
		t.Errorf("its group: %+v, before %+v", is, had)
	}
	if have, _ := backendsOf(w.gateways.states["gw2"], w.ns+"/b"); len(have) != 1 {
		t.Errorf("the other group has the endpoints %v", have)
	}
	if c := meta.FindStatusCondition(w.gateway("gw1").Status.Conditions, v1alpha1.ConditionApplied); c == nil || c.Reason != v1alpha1.ReasonPending || !strings.Contains(c.Message, w.ns+"/a") {
		t.Errorf("the GatewayNode says %+v", c)
	}
	w.fake.SetFaults(nil, nil)
	w.noError(errors.Join(w.Sync(t.Context()), w.converge()))
	if have, _ := backendsOf(w.gateways.states["gw1"], w.ns+"/a"); len(have) != 1 {
		t.Errorf("with the cloud it has the endpoints %v", have)
	}
}

// Addresses of lists are given, changed and taken back without one request of OpenStack, also while objects of other
// Services cannot be deleted.
func TestListsNeedNoCloud(t *testing.T) {
	w := newTestbed(t)
	w.noError(w.Sync(t.Context()))
	w.create(w.newService("gone", nil, 80))
	w.noError(w.converge())
	w.fake.SetFaults(always(openstacktest.Refuse), nil)
	w.remove("gone")
	_ = w.converge()
	asked := 0
	w.fake.SetFaults(func(*http.Request) openstacktest.Fault { asked++; return openstacktest.Refuse }, nil)
	w.lanes.spawn = func(func()) {} // every call hangs
	w.create(w.newService("a", annotation(service.AnnotationPool, "list"), 80))
	_ = w.converge()
	w.edit("a", func(s *corev1.Service) { s.Spec.LoadBalancerSourceRanges = []string{"198.51.100.0/24"} })
	w.setEndpoints("a", "10.1.0.1")
	_ = errors.Join(w.converge(), w.worker.Refresh(t.Context()))
	if got := addresses(w.get("a")); !slices.Equal(got, []string{"192.0.2.9"}) {
		t.Errorf("it has %v", got)
	}
	for name, s := range w.gateways.states {
		if have, _ := backendsOf(s, w.ns+"/a"); len(have) != 1 {
			t.Errorf("gateway %s has the endpoints %v", name, have)
		}
	}
	w.remove("a")
	_ = w.converge()
	if names := w.names(); len(names) != 1 || names[0].Name != "gone" || asked > 0 {
		t.Errorf("left are %v, after %d requests", names, asked)
	}
}

// A new port with a floating IP costs two requests of Neutron, and none to look for anything.
func TestRequestsOfANewPort(t *testing.T) {
	w := newTestbed(t)
	settings := testSettings()
	settings.AddressPairs = PairNone // those of the gateways' ports
	w.startWith(settings, nil)
	w.noError(w.Sync(t.Context()))
	w.create(w.newService("a", nil, 80))
	w.noError(w.converge())
	var asked []string
	w.fake.SetFaults(func(r *http.Request) openstacktest.Fault {
		asked = append(asked, r.Method+" "+r.URL.Path)
		return openstacktest.None
	}, nil)
	w.create(w.newService("b", nil, 80))
	w.noError(w.converge())
	if diff := cmp.Diff([]string{"POST /network/v2.0/ports", "POST /network/v2.0/floatingips"}, asked); diff != "" {
		t.Errorf("requests (-want +have):\n%s", diff)
	}
	asked = nil
	w.create(w.newService("shares", nil, 443))
	w.noError(w.converge())
	if len(asked) > 0 {
		t.Errorf("a Service that shares an address took %v", asked)
	}
}

// A gateway gets a new VIP of Neutron when its port lets it pass. One without room there is announced by the others.
func TestNewVIPWaitsForItsPair(t *testing.T) {
	w := newTestbed(t)
	w.noError(w.Sync(t.Context()))
	w.create(w.newService("old", nil, 80))
	w.noError(w.converge())
	clock := time.Now()
	w.now = func() time.Time { return clock }
	w.lanes.now = w.now
	w.fake.SetFaults(func(r *http.Request) openstacktest.Fault {
		if r.Method == http.MethodPut && strings.HasSuffix(r.URL.Path, openstacktest.Gateway1) {
			return openstacktest.Refuse
		}
		return openstacktest.None
	}, nil)
	w.create(w.newService("new", nil, 80))
	_ = w.converge()
	for name, want := range map[string]bool{"gw1": false, "gw2": true} {
		if _, ok := backendsOf(w.gateways.states[name], w.ns+"/new"); ok != want {
			t.Errorf("gateway %s has the new Service: %v, want %v", name, ok, want)
		}
		if _, ok := backendsOf(w.gateways.states[name], w.ns+"/old"); !ok {
			t.Errorf("gateway %s lacks the old Service", name)
		}
	}
	w.fake.SetFaults(nil, nil)
	w.noError(w.converge())
	w.checkInvariants()
}

// Ports of other protocols than TCP and UDP are named as not served; the others are served. Connections of pods to an
// address before a ServiceImport go to a gateway.
func TestUnservedPorts(t *testing.T) {
	w := newTestbed(t)
	w.noError(w.Sync(t.Context()))
	w.create(w.newService("a", func(s *corev1.Service) {
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "sctp", Protocol: corev1.ProtocolSCTP, Port: 5000}, corev1.ServicePort{Name: "udp", Protocol: corev1.ProtocolUDP, Port: 53})
	}, 80), w.newService("import", func(s *corev1.Service) {
		annotation(service.AnnotationServiceImport, "hello")(s)
		s.Spec.Selector = nil
	}, 443))
	w.noError(w.converge())
	var served []string
	for _, v := range w.gateways.states["gw1"].VIPs {
		for _, f := range v.Frontends {
			served = append(served, fmt.Sprintf("%d/%s", f.Port, f.Protocol))
		}
	}
	slices.Sort(served)
	if diff := cmp.Diff([]string{"443/TCP", "53/UDP", "80/TCP"}, served); diff != "" {
		t.Errorf("served (-want +have):\n%s", diff)
	}
	is := w.get("a").Status.LoadBalancer.Ingress
	want := []corev1.PortStatus{
		{Port: 53, Protocol: corev1.ProtocolUDP},
		{Port: 80, Protocol: corev1.ProtocolTCP},
		{Port: 5000, Protocol: corev1.ProtocolSCTP, Error: new(service.ErrorUnservedProtocol)},
	}
	if len(is) != 1 || !cmp.Equal(is[0].Ports, want) || *is[0].IPMode != corev1.LoadBalancerIPModeVIP {
		t.Errorf("status %+v", is)
	}
	if is := w.get("import").Status.LoadBalancer.Ingress; len(is) != 1 || *is[0].IPMode != corev1.LoadBalancerIPModeProxy {
		t.Errorf("status before an import %+v", is)
	}
	c := w.conditionOf("a", service.ConditionMapped)
	if n := w.said("PortsNotServed"); c.Status != metav1.ConditionTrue || !strings.Contains(c.Message, "not served: 5000/SCTP") || n != 1 {
		t.Errorf("condition %+v, %d events", c, n)
	}
	w.recover()
	w.edit("a", func(s *corev1.Service) { s.Labels = map[string]string{"changed": "yes"} })
	w.noError(w.converge())
	if n := w.said("PortsNotServed"); n != 1 {
		t.Errorf("%d events of one port", n)
	}
	w.checkInvariants()
}

// A record reads as it was written.
func TestRecord(t *testing.T) {
	addr4 := rapid.Custom(func(t *rapid.T) netip.Addr {
		return netip.AddrFrom4([4]byte(rapid.SliceOfN(rapid.Byte(), 4, 4).Draw(t, "bytes")))
	})
	addr6 := rapid.Custom(func(t *rapid.T) netip.Addr {
		return netip.AddrFrom16([16]byte(append([]byte{0x20, 0x01}, rapid.SliceOfN(rapid.Byte(), 14, 14).Draw(t, "bytes")...)))
	})
	id := rapid.StringMatching(`[0-9a-f]{8}-[0-9a-f]{4}`)
	rapid.Check(t, func(t *rapid.T) {
		want := record{
			port:  port{ID: id.Draw(t, "id"), Pool: rapid.StringMatching(`[a-z0-9]([-a-z0-9]{0,9}[a-z0-9])?`).Draw(t, "pool")},
			group: "edge", announce: desired.ByBGP, returns: desired.SNAT, floats: rapid.Bool().Draw(t, "default"),
		}
		if rapid.Bool().Draw(t, "IPv4") {
			want.VIPs = append(want.VIPs, addr4.Draw(t, "address"))
			if rapid.Bool().Draw(t, "floating IP") {
				want.Floating = openstack.FloatingIP{ID: id.Draw(t, "id"), Addr: addr4.Draw(t, "address"), Port: want.ID, Fixed: want.VIPs[0]}
			}
		}
		if rapid.Bool().Draw(t, "peers") {
			want.peers = []netip.Addr{addr4.Draw(t, "peer"), addr6.Draw(t, "peer")}
		}
		if rapid.Bool().Draw(t, "virtual router") {
			want.router = uint8(rapid.IntRange(1, 254).Draw(t, "router"))
		}
		if len(want.VIPs) == 0 || rapid.Bool().Draw(t, "IPv6") {
			want.VIPs = append(want.VIPs, addr6.Draw(t, "address"))
		}
		s := &corev1.Service{}
		meta.SetStatusCondition(&s.Status.Conditions, writeRecord(want))
		have, ok := readRecord(s)
		if diff := cmp.Diff(fmt.Sprint(want), fmt.Sprint(have)); diff != "" || !ok {
			t.Fatalf("%v (-want +have):\n%s", ok, diff)
		}
	})
	for _, text := range []string{"", "port=x pool=y", "port=x pool=y group=z addresses=192.0.2.300", "pool=y group=z addresses=192.0.2.1", "port=x pool=y addresses=192.0.2.1", "port=x pool=y group=z addresses=192.0.2.1 floating-ip=z/", "addresses of pool public"} {
		s := &corev1.Service{}
		c := writeRecord(record{})
		c.Message = text
		meta.SetStatusCondition(&s.Status.Conditions, c)
		if p, ok := readRecord(s); ok {
			t.Errorf("%q reads as %+v", text, p)
		}
	}
}
