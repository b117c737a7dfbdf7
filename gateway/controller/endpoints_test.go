package controller

import (
	"cmp"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/isthmus-net/isthmus/gateway/controller/internal/probes"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/portmap"
	"github.com/isthmus-net/isthmus/gateway/service"
)

// endpoint returns an endpoint at an address and node; its flags set the conditions: r ready, s serving, t terminating.
func endpoint(addr, node, flags string) discoveryv1.Endpoint {
	is := func(flag rune) *bool {
		for _, f := range flags {
			if f == flag {
				return new(true)
			}
		}
		return new(false)
	}
	return discoveryv1.Endpoint{Addresses: []string{addr}, NodeName: new(node), Conditions: discoveryv1.EndpointConditions{Ready: is('r'), Serving: is('s'), Terminating: is('t')}}
}

func sliceOf(port int32, all ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{AddressType: discoveryv1.AddressTypeIPv4, Endpoints: all, Ports: []discoveryv1.EndpointPort{{Name: new("http"), Port: &port}}}
}

// node returns a node with an address; flags: r ready, x excluded from load balancers, d to be deleted.
func node(name, flags string) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{}}}
	n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeHostName, Address: name}, {Type: corev1.NodeInternalIP, Address: "10.0.0." + name[1:]}, {Type: corev1.NodeInternalIP, Address: "fd00::" + name[1:]}}
	status := corev1.ConditionUnknown
	for _, f := range flags {
		switch f {
		case 'r':
			status = corev1.ConditionTrue
		case 'x':
			n.Labels[corev1.LabelNodeExcludeBalancers] = ""
		case 'd':
			n.Spec.Taints = []corev1.Taint{{Key: taintToBeDeleted}}
		}
	}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: status}}
	return n
}

func TestBackends(t *testing.T) {
	port := corev1.ServicePort{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80, NodePort: 30080}
	key := types.NamespacedName{Namespace: "demo", Name: "a"}
	checked := service.Want{Backends: service.NodePorts, Local: true, HealthCheckPort: 31000}
	// local returns nodes with an endpoint each, and the answers of their health check ports.
	local := func(nodes string, answers ...probes.Answer) *endpoints {
		e := &endpoints{answers: map[netip.AddrPort]probes.Answer{}}
		var at []discoveryv1.Endpoint
		for i, name := range strings.Fields(nodes) {
			n := node(name[:2], "r"+name[2:])
			e.nodes, at = append(e.nodes, n), append(at, endpoint(fmt.Sprintf("10.1.0.%d", i+1), n.Name, "rs"))
			e.answers[netip.MustParseAddrPort("10.0.0."+n.Name[1:]+":31000")] = answers[i]
		}
		e.services = map[types.NamespacedName][]*discoveryv1.EndpointSlice{key: {sliceOf(8080, at...)}}
		return e
	}
	for name, tc := range map[string]struct {
		of     *endpoints
		want   service.Want
		family corev1.IPFamily
		port   string
		have   string
	}{
		"pods of two slices, sorted, each once": {
			of: &endpoints{services: map[types.NamespacedName][]*discoveryv1.EndpointSlice{key: {
				sliceOf(8080, endpoint("10.1.0.3", "n1", "rs"), endpoint("10.1.0.1", "n1", "rs")), sliceOf(8080, endpoint("10.1.0.1", "n1", "st"), endpoint("10.1.0.2", "n2", "")),
			}}},
			have: "10.1.0.1:8080 10.1.0.3:8080",
		},
		"a terminating pod drains": {
			of:   &endpoints{services: map[types.NamespacedName][]*discoveryv1.EndpointSlice{key: {sliceOf(8080, endpoint("10.1.0.1", "n1", "st"), endpoint("10.1.0.2", "n1", "rs"))}}},
			have: "10.1.0.1:8080(draining) 10.1.0.2:8080",
		},
		"if all are terminating, serving ones get connections": {
			of:   &endpoints{services: map[types.NamespacedName][]*discoveryv1.EndpointSlice{key: {sliceOf(8080, endpoint("10.1.0.1", "n1", "st"), endpoint("10.1.0.2", "n1", "t"))}}},
			have: "10.1.0.1:8080 10.1.0.2:8080(draining)",
		},
		"another port, an unroutable address": {
			of: &endpoints{services: map[types.NamespacedName][]*discoveryv1.EndpointSlice{key: {
				sliceOf(8080, endpoint("127.0.0.1", "n1", "rs"), endpoint("169.254.1.1", "n1", "rs")),
				{AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{endpoint("10.1.0.9", "n1", "rs")}, Ports: []discoveryv1.EndpointPort{{Name: new("https"), Port: new(int32(8443))}}},
			}}},
			have: "",
		},
		"another family": {
			of:     &endpoints{services: map[types.NamespacedName][]*discoveryv1.EndpointSlice{key: {sliceOf(8080, endpoint("10.1.0.1", "n1", "rs"))}}},
			family: corev1.IPv6Protocol, have: "",
		},
		"an imported Service": {
			of: &endpoints{
				services: map[types.NamespacedName][]*discoveryv1.EndpointSlice{key: {sliceOf(8080, endpoint("10.1.0.1", "n1", "rs"))}},
				imports:  map[types.NamespacedName][]*discoveryv1.EndpointSlice{{Namespace: "demo", Name: "hello"}: {sliceOf(8080, endpoint("10.2.0.1", "n1", "rs"))}},
			},
			want: service.Want{Import: "hello"},
			have: "10.2.0.1:8080",
		},
		"an imported Service whose only port has another name": {
			of:   &endpoints{imports: map[types.NamespacedName][]*discoveryv1.EndpointSlice{{Namespace: "demo", Name: "hello"}: {sliceOf(8080, endpoint("10.2.0.1", "n1", "rs"))}}},
			want: service.Want{Import: "hello"}, port: "web",
			have: "10.2.0.1:8080",
		},
		"a Service whose only port has another name than its endpoints'": {
			of:   &endpoints{services: map[types.NamespacedName][]*discoveryv1.EndpointSlice{key: {sliceOf(8080, endpoint("10.1.0.1", "n1", "rs"))}}},
			port: "web", have: "",
		},
		"node ports of ready nodes": {
			of:   &endpoints{nodes: []*corev1.Node{node("n3", "r"), node("n1", "r"), node("n2", ""), node("n4", "rx"), node("n5", "rd")}},
			want: service.Want{Backends: service.NodePorts},
			have: "10.0.0.1:30080 10.0.0.3:30080 10.0.0.5:30080(draining)",
		},
		"node ports, IPv6": {
			of:   &endpoints{nodes: []*corev1.Node{node("n1", "r")}},
			want: service.Want{Backends: service.NodePorts}, family: corev1.IPv6Protocol,
			have: "[fd00::1]:30080",
		},
		"no node is ready": {
			of:   &endpoints{nodes: []*corev1.Node{node("n1", ""), node("n2", ""), node("n3", "x")}},
			want: service.Want{Backends: service.NodePorts},
			have: "10.0.0.1:30080 10.0.0.2:30080",
		},
		"Local: nodes with endpoints, by their number": {
			of: &endpoints{
				nodes:    []*corev1.Node{node("n1", "r"), node("n2", "r"), node("n3", "r")},
				services: map[types.NamespacedName][]*discoveryv1.EndpointSlice{key: {sliceOf(8080, endpoint("10.1.0.1", "n1", "rs"), endpoint("10.1.0.2", "n1", "rs"), endpoint("10.1.0.3", "n2", "rs"), endpoint("10.1.0.4", "n3", "st"))}},
			},
			want: service.Want{Backends: service.NodePorts, Local: true},
			have: "10.0.0.1:30080*2 10.0.0.2:30080",
		},
		"Local: a refusing, a silent and an unprobed node beside a serving one": {
			of:   local("n1 n2 n3 n4", probes.Refusing, probes.Silent, probes.Unknown, probes.Serving),
			want: checked, have: "10.0.0.1:30080(draining) 10.0.0.2:30080(draining) 10.0.0.3:30080 10.0.0.4:30080",
		},
		"Local: no node serves": {
			of:   local("n1 n2 n3", probes.Refusing, probes.Silent, probes.Unknown),
			want: checked, have: "10.0.0.1:30080 10.0.0.2:30080 10.0.0.3:30080",
		},
		"Local: only a leaving node serves": {
			of:   local("n1 n2d", probes.Silent, probes.Serving),
			want: checked, have: "10.0.0.1:30080 10.0.0.2:30080(draining)",
		},
		"Local without a health check port": {
			of:   local("n1 n2", probes.Refusing, probes.Serving),
			want: service.Want{Backends: service.NodePorts, Local: true}, have: "10.0.0.1:30080 10.0.0.2:30080",
		},
	} {
		t.Run(name, func(t *testing.T) {
			if tc.family == "" {
				tc.family = corev1.IPv4Protocol
			}
			tc.of.wantedProbes = map[netip.AddrPort]bool{}
			have, port := "", port
			port.Name = cmp.Or(tc.port, port.Name)
			for _, b := range tc.of.backends(&mapped{name: key, want: tc.want, ports: []corev1.ServicePort{port}}, port, tc.family) {
				have += " " + netip.AddrPortFrom(b.Addr, b.Port).String()
				if b.Weight != 1 {
					have += fmt.Sprintf("*%d", b.Weight)
				}
				if b.Draining {
					have += "(draining)"
				}
			}
			if have != "" {
				have = have[1:]
			}
			if diff := gocmp.Diff(tc.have, have); diff != "" {
				t.Errorf("backends (-want +have):\n%s", diff)
			}
			if asks := len(tc.of.wantedProbes); tc.want.HealthCheckPort == 0 && asks != 0 || tc.want.HealthCheckPort != 0 && asks != len(tc.of.nodes) {
				t.Errorf("asks at %v", tc.of.wantedProbes)
			}
		})
	}
}

// A port of an import matches by name, or if both sides have a single port.
func TestImportPort(t *testing.T) {
	ports := func(names string) (of []*discoveryv1.EndpointSlice) {
		for name := range strings.FieldsSeq(names) {
			text, protocol, _ := strings.Cut(name, "/")
			s := sliceOf(8080)
			s.Ports[0].Name, s.Ports[0].Protocol = new(strings.Trim(text, "-")), new(corev1.Protocol(protocol))
			of = append(of, s)
		}
		return of
	}
	for name, tc := range map[string]struct{ of, has, lacks string }{
		"by name":                     {"http/TCP metrics/TCP", "http/TCP", ""},
		"one and one":                 {"http/TCP http/TCP", "-/TCP", ""},
		"one and one without a name":  {"-/TCP", "http/TCP", ""},
		"of two clusters, by name":    {"http/TCP web/TCP", "web/TCP", ""},
		"no endpoints":                {"", "http/TCP dns/UDP", ""},
		"one and one of another kind": {"http/UDP", "-/TCP", `has no "" (TCP), but "http" (UDP)`},
		"one of two":                  {"http/TCP metrics/TCP", "-/TCP", `has no "" (TCP), but "http" (TCP), "metrics" (TCP)`},
		"two of one":                  {"http/TCP", "http/TCP web/TCP dns/UDP", `has no "web" (TCP), "dns" (UDP), but "http" (TCP)`},
	} {
		m := &mapped{name: types.NamespacedName{Namespace: "demo", Name: "a"}, want: service.Want{Import: "hello"}}
		for i, s := range ports(tc.has) {
			m.ports = append(m.ports, corev1.ServicePort{Name: *s.Ports[0].Name, Protocol: *s.Ports[0].Protocol, Port: int32(80 + i)})
		}
		e := &endpoints{imports: map[types.NamespacedName][]*discoveryv1.EndpointSlice{{Namespace: "demo", Name: "hello"}: ports(tc.of)}}
		if got := e.missingPorts(m); (got == "") != (tc.lacks == "") || !strings.Contains(got, tc.lacks) {
			t.Errorf("%s: %q, want %q in it", name, got, tc.lacks)
		}
	}
}

// Each group of gateways has the VIPs of its pools with their Services.
func TestVIPs(t *testing.T) {
	s := Settings{Cluster: "c", Pools: []Pool{
		{Name: "one", Announce: desired.ByBGP, Return: desired.Routed, BGP: &desired.Route{Communities: []string{"no-export"}}, Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8::/64")}},
		{Name: "two", Group: "edge", Announce: desired.ByVRRP, Return: desired.SNAT, VRRP: &VRRPPool{RouterID: 52}, Addresses: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}},
	}}
	if err := s.Complete(); err != nil {
		t.Fatal(err)
	}
	dual, four := []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}, []corev1.IPFamily{corev1.IPv4Protocol}
	shared := port{ID: "p", Pool: "one", VIPs: []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}}
	services := []*mapped{
		mappedAt("a", shared, dual, 443), mappedAt("b", shared, four, 80),
		mappedAt("c", port{ID: "q", Pool: "two", VIPs: []netip.Addr{netip.MustParseAddr("198.51.100.1")}}, four, 80),
	}
	text := func(group string) (all []string) {
		for _, v := range vips(&s, services, &endpoints{}, group) {
			line := fmt.Sprintf("%s %s %s:", v.Addr, v.Announce, v.Return)
			if v.Route != nil {
				line = fmt.Sprintf("%v %s", v.Route.Communities, line)
			}
			if v.RouterID != 0 {
				line = fmt.Sprintf("%d %s", v.RouterID, line)
			}
			for _, f := range v.Frontends {
				line += fmt.Sprintf(" %d/%s=%s", f.Port, f.Protocol, f.Service)
			}
			all = append(all, line)
		}
		return all
	}
	if diff := gocmp.Diff([]string{"[no-export] 192.0.2.1 bgp routed: 80/TCP=demo/b 443/TCP=demo/a", "[no-export] 2001:db8::1 bgp routed: 443/TCP=demo/a"}, text(DefaultGroup)); diff != "" {
		t.Errorf("group default (-want +have):\n%s", diff)
	}
	if diff := gocmp.Diff([]string{"52 198.51.100.1 vrrp snat: 80/TCP=demo/c"}, text("edge")); diff != "" {
		t.Errorf("group edge (-want +have):\n%s", diff)
	}
}

func mappedAt(name string, at port, families []corev1.IPFamily, l4 uint16) *mapped {
	m := &mapped{name: types.NamespacedName{Namespace: "demo", Name: name}, port: at, want: service.Want{Families: families}}
	m.want.L4 = []portmap.L4{{Protocol: "TCP", Port: l4}}
	m.ports = []corev1.ServicePort{{Name: "p", Protocol: corev1.ProtocolTCP, Port: int32(l4)}}
	return m
}
