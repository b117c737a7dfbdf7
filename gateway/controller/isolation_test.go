package controller

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/isthmus-net/isthmus/gateway/api/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/service"
)

// served returns what the gateways serve a Service with, at its addresses. It fails the test if they differ.
func (w *testbed) served(name string) []string {
	w.t.Helper()
	one, two := w.servedAt("gw1", name), w.servedAt("gw2", name)
	if !slices.Equal(one, two) {
		w.t.Errorf("the gateways serve %s with %q and %q", name, one, two)
	}
	return one
}

// servedAt returns what a gateway serves a Service with: a line for each address and port.
func (w *testbed) servedAt(gateway, name string) []string {
	return w.servedBy(w.gateways.states[gateway].VIPs, name)
}

func (w *testbed) servedBy(vips []desired.VIP, name string) (all []string) {
	for _, v := range vips {
		for _, f := range v.Frontends {
			if f.Service != w.ns+"/"+name {
				continue
			}
			line := fmt.Sprintf("%s %d/%s", v.Addr, f.Port, f.Protocol)
			for _, b := range f.Backends {
				line += fmt.Sprintf(" %s", netip.AddrPortFrom(b.Addr, b.Port))
			}
			all = append(all, line)
		}
	}
	return all
}

// condition returns a condition of a Service.
func (w *testbed) condition(name, kind string) metav1.Condition {
	w.t.Helper()
	c := meta.FindStatusCondition(w.get(name).Status.Conditions, kind)
	if c == nil {
		return metav1.Condition{}
	}
	return *c
}

// inList gives a Service addresses of both families of the pool list.
func inList(s *corev1.Service) {
	annotation(service.AnnotationPool, "list")(s)
	s.Spec.IPFamilyPolicy = new(corev1.IPFamilyPolicyRequireDualStack)
	s.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
}

// A port of an EndpointSlice that does not exist costs the endpoints behind it, and nothing else: not the other ports of its
// Service, and no other Service, whose new endpoint arrives.
func TestInvalidPortOfASlice(t *testing.T) {
	w := newAPITestbed(t)
	w.noError(w.Sync(t.Context()))
	for _, port := range []int32{0, -1, 65536, 65616} {
		name := fmt.Sprintf("bad%d", port)
		name = strings.ReplaceAll(name, "-", "x")
		slice := w.endpointSlice(name, []int32{80, 443}, "10.1.0.1")
		slice.Ports[0].Port = new(port)
		w.create(w.newService(name, nil, 80, 443), slice)
	}
	w.create(w.newService("victim", nil, 80), w.endpointSlice("victim", []int32{80}, "10.1.0.2"))
	w.refresh()
	ports := func(name string) (all []string) {
		for _, line := range w.served(name) {
			_, rest, _ := strings.Cut(line, " ")
			all = append(all, rest)
		}
		return all
	}
	slice := w.endpointSlice("victim", []int32{80}, "10.1.0.3")
	slice.Name = "victim-2"
	w.create(slice)
	w.refresh()
	if diff := cmp.Diff([]string{"80/TCP 10.1.0.2:8080 10.1.0.3:8080"}, ports("victim")); diff != "" {
		t.Errorf("the victim (-want +have):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"80/TCP", "443/TCP 10.1.0.1:8443"}, ports("bad65536")); diff != "" {
		t.Errorf("the Service with the slice (-want +have):\n%s", diff)
	}
	if c := w.condition("bad65536", service.ConditionApplied); c.Reason != service.ReasonInvalidEndpoint || c.Message != `EndpointSlice bad65536-1: port "p80" is 65536; gateways send nothing there` {
		t.Errorf("its condition: %+v", c)
	}
	if !w.hasEvent(`InvalidEndpoint bad65536: EndpointSlice bad65536-1: port "p80" is 65536`) {
		t.Error("no event says so")
	}
	if c := w.condition("victim", service.ConditionApplied); c.Reason != service.ReasonApplied {
		t.Errorf("the victim: %+v", c)
	}
	if n := gauges(t)["isthmus_gateway_services_refused InvalidEndpoint"]; n != 4 {
		t.Errorf("%v Services are counted", n)
	}
	fixed := w.endpointSlice("bad65536", nil)
	w.noError(w.api.Delete(t.Context(), fixed))
	w.refresh()
	if c := w.condition("bad65536", service.ConditionApplied); c.Reason != service.ReasonApplied {
		t.Errorf("without the slice: %+v", c)
	}
}

// Addresses of endpoints to which gateways cannot send are left out, whatever their spelling.
func TestInvalidAddressOfASlice(t *testing.T) {
	key := types.NamespacedName{Namespace: "demo", Name: "a"}
	for _, addr := range []string{"10.1.0", "010.1.0.1", "::ffff:10.1.0.1", "127.0.0.1", "224.0.0.1", "255.255.255.255", "fd00::1", ""} {
		slice := sliceOf(8080, endpoint(addr, "n1", "rs"), endpoint("10.1.0.2", "n1", "rs"))
		slice.Name = "a-1"
		e := &endpoints{services: map[types.NamespacedName][]*discoveryv1.EndpointSlice{key: {slice}}}
		m := &mapped{name: key}
		port := corev1.ServicePort{Name: "http", Port: 80}
		have := e.backends(m, port, corev1.IPv4Protocol)
		if len(have) != 1 || have[0].Addr.String() != "10.1.0.2" {
			t.Errorf("%q: backends %v", addr, have)
		}
		if want := (verdict{service.ReasonInvalidEndpoint, fmt.Sprintf("EndpointSlice a-1: address %q of an endpoint is not one of IPv4 that gateways can route to; gateways send nothing there", addr)}); m.fault != want {
			t.Errorf("%q: %+v", addr, m.fault)
		}
	}
}

// A tenant names an address of another Service by half of its pair, in another spelling, or by the id of its port with the same
// port number. The tenant's Service alone is refused or gets another address; the other Service keeps what it has and is
// served, also after a restart, and if the tenant's is older.
func TestNamedPortOfAnotherService(t *testing.T) {
	const pair = "192.0.2.9_2001:db8::9"
	for name, tc := range map[string]struct {
		id      string
		refused bool
	}{
		"the first half":                 {"192.0.2.9", true},
		"the second half":                {"2001:db8::9", true},
		"another spelling":               {"2001:DB8::9", true},
		"another spelling of the pair":   {"192.0.2.9_2001:db8:0::9", true},
		"the other order":                {"2001:db8::9_192.0.2.9", true},
		"IPv4 in IPv6":                   {"::ffff:192.0.2.9", true},
		"with another address":           {"192.0.2.9_2001:db8::a", true},
		"the id itself":                  {pair, false},
		"an id that is none":             {"192.0.2.9,2001:db8::9", false},
		"an address that nobody has":     {"192.0.2.10", false},
		"an address outside of any pool": {"203.0.113.1", false},
	} {
		for _, kind := range []string{"a new Service", "a new Service of one family", "an older Service of one family"} {
			t.Run(name+", "+kind, func(t *testing.T) {
				t.Parallel()
				w := newTestbed(t)
				w.noError(w.Sync(t.Context()))
				tenant := w.newService("tenant", inList, 80)
				older := strings.HasPrefix(kind, "an older")
				if strings.HasSuffix(kind, "one family") {
					tenant.Spec.IPFamilies, tenant.Spec.IPFamilyPolicy = tenant.Spec.IPFamilies[:1], new(corev1.IPFamilyPolicySingleStack)
				}
				w.create(w.newService("victim", inList, 80), w.endpointSlice("victim", []int32{80}, "10.1.0.1"))
				w.noError(w.converge())
				if id := w.get("victim").Annotations[service.AnnotationPort]; id != pair {
					t.Fatalf("the victim has the port %s", id)
				}
				if older {
					tenant.CreationTimestamp = metav1.NewTime(w.get("victim").CreationTimestamp.Add(-1e12))
				} else {
					annotation(service.AnnotationPort, tc.id)(tenant)
				}
				w.create(tenant)
				w.refresh()
				if older {
					w.edit("tenant", annotation(service.AnnotationPort, tc.id))
				}
				w.refresh()
				wanted := []string{"192.0.2.9 80/TCP 10.1.0.1:8080", "2001:db8::9 80/TCP"}
				check := func(step string) {
					t.Helper()
					w.refresh()
					if diff := cmp.Diff(wanted, w.served("victim")); diff != "" {
						t.Errorf("%s: the victim is served with (-want +have):\n%s", step, diff)
					}
					victim := w.get("victim")
					if diff := cmp.Diff([]string{"192.0.2.9", "2001:db8::9"}, addresses(victim)); diff != "" || victim.Annotations[service.AnnotationPort] != pair {
						t.Errorf("%s: the victim has port %s and addresses (-want +have):\n%s", step, victim.Annotations[service.AnnotationPort], diff)
					}
					if c := w.condition("victim", service.ConditionApplied); c.Reason != service.ReasonApplied {
						t.Errorf("%s: the victim says %+v", step, c)
					}
					if slices.ContainsFunc(w.served("tenant"), func(line string) bool {
						return strings.HasPrefix(line, "192.0.2.9 ") || strings.HasPrefix(line, "2001:db8::9 ")
					}) {
						t.Errorf("%s: the tenant is served with %q", step, w.served("tenant"))
					}
					if c := w.condition("tenant", service.ConditionMapped); (c.Reason == service.ReasonInvalid) != tc.refused || tc.refused && !strings.Contains(c.Message, "of the port "+pair+" of another Service") {
						t.Errorf("%s: the tenant says %+v", step, c)
					}
				}
				check("at once")
				w.noError(w.Sync(t.Context()))
				check("after a sync")
				w.create(func() *discoveryv1.EndpointSlice {
					s := w.endpointSlice("victim", []int32{80}, "10.1.0.2")
					s.Name = "victim-2"
					return s
				}())
				wanted[0] += " 10.1.0.2:8080"
				check("with another endpoint")
				w.recover()
				check("after a restart")
			})
		}
	}
}

// A Service that a gateway refuses is named on itself and on the gateway. The others are applied.
func TestServiceRefusedByAGateway(t *testing.T) {
	w := newTestbed(t)
	w.noError(w.Sync(t.Context()))
	w.create(w.newService("large", nil, 80), w.newService("other", nil, 443))
	w.refresh()
	w.gateways.without["gw2"] = []desired.Fault{{Component: desired.ComponentBalancer, Services: []string{w.ns + "/large"}, Message: "there is no room"}}
	w.refresh()
	if c := w.condition("large", service.ConditionApplied); c.Reason != service.ReasonRefused || c.Message != "gateway gw2: there is no room" || !w.hasEvent("Refused large: gateway gw2: there is no room") {
		t.Errorf("the Service says %+v", c)
	}
	if c := w.condition("other", service.ConditionApplied); c.Reason != service.ReasonApplied {
		t.Errorf("another Service says %+v", c)
	}
	c := meta.FindStatusCondition(w.gateway("gw2").Status.Conditions, v1alpha1.ConditionApplied)
	if c == nil || c.Status != metav1.ConditionTrue || c.Reason != v1alpha1.ReasonServicesRefused || !strings.Contains(c.Message, "without refused Services (1), which stay as they were or are left out: "+w.ns+"/large: there is no room") {
		t.Errorf("the gateway says %+v", c)
	}
	if n := gauges(t)["isthmus_gateway_services_refused Refused"]; n != 1 {
		t.Errorf("%v Services are counted", n)
	}
	w.gateways.without = nil
	w.refresh()
	if c := w.condition("large", service.ConditionApplied); c.Reason != service.ReasonApplied {
		t.Errorf("when there is room, the Service says %+v", c)
	}
}

// A gateway that cannot announce the addresses of one pool serves the others. The Services of that pool say why.
func TestGatewayWithoutAnAnnouncer(t *testing.T) {
	w := newTestbed(t)
	w.noError(w.Sync(t.Context()))
	w.create(w.newService("bgp", nil, 80), w.newService("vrrp", annotation(service.AnnotationPool, "list"), 80))
	w.refresh()
	n := w.gateway("gw2")
	n.Spec.BGP = nil
	w.noError(w.api.Update(t.Context(), n))
	w.create(w.newService("new", annotation(service.AnnotationPool, "list"), 443))
	w.refresh()
	var have []string
	for _, v := range w.gateways.states["gw2"].VIPs {
		for _, f := range v.Frontends {
			have = append(have, strings.TrimPrefix(f.Service, w.ns+"/"))
		}
	}
	if diff := cmp.Diff([]string{"vrrp", "new"}, have, cmpopts.SortSlices(strings.Compare)); diff != "" {
		t.Errorf("gw2 serves (-want +have):\n%s", diff)
	}
	for name, says := range map[string]string{"bgp": `gateway gw2: is "bgp", but bgp is missing`, "vrrp": "the gateways of group default have applied it", "new": "the gateways of group default have applied it"} {
		if c := w.condition(name, service.ConditionApplied); c.Message != says {
			t.Errorf("%s says %+v", name, c)
		}
	}
}

// If no gateway of a group has a state, the Services say why.
func TestNoGatewaySaysWhy(t *testing.T) {
	w := newTestbed(t)
	w.noError(w.Sync(t.Context()))
	for _, name := range []string{"gw1", "gw2"} {
		n := w.gateway(name)
		n.Spec.BGP.Peers[0].PasswordSecret = "missing"
		w.noError(w.api.Update(t.Context(), n))
	}
	w.create(w.newService("a", nil, 80))
	w.refresh()
	if c := w.condition("a", service.ConditionApplied); c.Reason != service.ReasonNoGateway || !strings.Contains(c.Message, "gateway gw1: spec.bgp.peers[0].passwordSecret: ") {
		t.Errorf("the Service says %+v", c)
	}
}

// A message that is too long for the API server is cut.
func TestShorten(t *testing.T) {
	long := strings.Repeat("ä", 2000)
	if have := shorten(long); len(have) > messageLimit || !strings.HasPrefix(long, strings.TrimSuffix(have, " …")) {
		t.Errorf("%d bytes: %q", len(have), have)
	}
	if have := shorten("short"); have != "short" {
		t.Errorf("%q", have)
	}
}

// FuzzSettings: settings that are accepted give every Service of their pools a state that gateways accept.
func FuzzSettings(f *testing.F) {
	seed, err := json.Marshal(testSettings())
	f.Add(seed)
	f.Add([]byte(`{"cluster":"a","pools":[{"name":"a","announce":"none","return":"snat","addresses":["127.0.0.0/31","fe80::/64"]}]}`))
	f.Add([]byte(`{"cluster":"a","pools":[{"name":"a","announce":"none","return":"snat","addresses":["10.0.0.0/31"]},{"name":"b","announce":"bgp","return":"routed","addresses":["10.0.0.0/30"]}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		var s Settings
		if errors.Join(err, json.Unmarshal(text, &s)) != nil || s.Complete() != nil {
			return
		}
		list := &static{}
		var services []*mapped
		for i := range s.Pools {
			if len(s.Pools[i].Addresses) > 0 {
				list.pools = append(list.pools, &s.Pools[i])
			}
		}
		var held []string
		for i, pool := range list.pools {
			p, err := list.create(request{Pool: pool, Families: pool.families()}, held, nil)
			if err != nil {
				continue
			}
			if again, ok := list.parse(p.ID); !ok || !cmp.Equal(p, again, cmp.AllowUnexported(netip.Addr{}), cmpopts.EquateComparable(netip.Addr{})) {
				t.Fatalf("port %+v is read as %+v", p, again)
			}
			held = append(held, p.ID)
			services = append(services, mappedAt(fmt.Sprint("s", i), p, pool.families(), 80))
		}
		node := gatewayNode("gw1")
		w := &worker{settings: s}
		for _, pool := range list.pools {
			state, faults, err := w.state(t.Context(), node, nil, vips(&s, services, &endpoints{}, pool.Group))
			if err != nil || len(faults) > 0 {
				t.Errorf("%s: state %+v, %v, %v", text, state, faults, err)
			}
		}
	})
}
