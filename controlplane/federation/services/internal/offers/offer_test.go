package offers_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/services/internal/offers"
)

var born = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// service returns a Service demo/web with the ports http 80 and dns 53/UDP, changed by change.
func service(change func(*corev1.Service)) *corev1.Service {
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "demo", Name: "web", CreationTimestamp: metav1.NewTime(born)},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, Selector: map[string]string{"app": "web"}, IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			Ports: []corev1.ServicePort{
				{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP, NodePort: 30080},
				{Name: "dns", Port: 53, Protocol: corev1.ProtocolUDP, NodePort: 30053},
			},
		},
	}
	change(svc)
	return svc
}

// slice returns a slice with the target ports 8080 and 5353 and one endpoint for each address, on nodes n1, n2 and so on in
// the zone z. An address that ends in "!" is not ready.
func slice(name string, addresses ...string) *discoveryv1.EndpointSlice {
	es := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "demo", Name: name},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports: []discoveryv1.EndpointPort{
			{Name: new("http"), Protocol: new(corev1.ProtocolTCP), Port: new(int32(8080))},
			{Name: new("dns"), Protocol: new(corev1.ProtocolUDP), Port: new(int32(5353))},
		},
	}
	for i, a := range addresses {
		text, notReady := strings.CutSuffix(a, "!")
		if strings.Contains(text, ":") {
			es.AddressType = discoveryv1.AddressTypeIPv6
		}
		es.Endpoints = append(es.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{text}, Conditions: discoveryv1.EndpointConditions{Ready: new(!notReady)},
			NodeName: new(fmt.Sprint("n", i+1)), Zone: new("z"),
			Hints:     &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "z"}}},
			TargetRef: &corev1.ObjectReference{Kind: "Pod", Name: "p"},
		})
	}
	return es
}

// node returns a node in the zone z. A name that ends in "!" means that the node is not ready.
func node(name string, internal, external string) *corev1.Node {
	name, notReady := strings.CutSuffix(name, "!")
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelTopologyZone: "z"}}}
	for t, a := range map[corev1.NodeAddressType]string{corev1.NodeInternalIP: internal, corev1.NodeExternalIP: external} {
		for text := range strings.FieldsSeq(a) {
			n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: t, Address: text})
		}
	}
	ready := corev1.ConditionTrue
	if notReady {
		ready = corev1.ConditionUnknown
	}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: ready}}
	return n
}

// text returns groups as lines: family, "address[@zone][!]" of each endpoint, "number->port/protocol" of each target.
func text(o offers.Offer) []string {
	var lines []string
	for _, g := range o.Groups {
		line := g.Family.String()
		for _, e := range g.Endpoints {
			line += " " + e.Addresses[0]
			if e.Zone != nil {
				line += "@" + *e.Zone
			}
			if e.Conditions.Ready != nil && !*e.Conditions.Ready {
				line += "!"
			}
		}
		for _, t := range g.Targets {
			line += fmt.Sprintf(" %d->%d/%s", t.Number, t.Port.Port, t.Port.Protocol)
		}
		lines = append(lines, line)
	}
	return lines
}

func ofType(t corev1.ServiceType) func(*corev1.Service) {
	return func(s *corev1.Service) { s.Spec.Type = t }
}

func balanced(ingress ...corev1.LoadBalancerIngress) func(*corev1.Service) {
	return func(s *corev1.Service) {
		s.Spec.Type = corev1.ServiceTypeLoadBalancer
		s.Status.LoadBalancer.Ingress = ingress
	}
}

func TestOfferByServiceType(t *testing.T) {
	const ports, own = " 8080->80/TCP 5353->53/UDP", " 80->80/TCP 53->53/UDP"
	const nodePorts = " 30080->80/TCP 30053->53/UDP"
	pods := []*discoveryv1.EndpointSlice{slice("s1", "10.0.0.1", "10.0.0.2!")}
	nodes := []*corev1.Node{
		node("n1", "192.0.2.1 2001:db8::1", ""), node("n2", "192.0.2.2", "198.51.100.2"), node("n3!", "192.0.2.3", ""),
	}
	for name, tc := range map[string]struct {
		svc    *corev1.Service
		slices []*discoveryv1.EndpointSlice
		want   []string
	}{
		"pods and target ports": {service(ofType(corev1.ServiceTypeClusterIP)), pods, []string{"IPv4 10.0.0.1@z 10.0.0.2@z!" + ports}},
		"both families": {
			service(func(s *corev1.Service) {
				s.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv6Protocol, corev1.IPv4Protocol}
			}),
			[]*discoveryv1.EndpointSlice{slice("s2", "10.0.0.1"), slice("s1", "fd00::1")},
			[]string{"IPv6 fd00::1@z" + ports, "IPv4 10.0.0.1@z" + ports},
		},
		"a slice has one of the ports": {
			service(ofType(corev1.ServiceTypeClusterIP)),
			[]*discoveryv1.EndpointSlice{func() *discoveryv1.EndpointSlice {
				es := slice("s", "10.0.0.1", "127.0.0.1", "169.254.1.1")
				es.Ports = es.Ports[1:]
				return es
			}()},
			[]string{"IPv4 10.0.0.1@z 5353->53/UDP"},
		},
		"headless: its pods": {
			service(func(s *corev1.Service) { s.Spec.ClusterIP = corev1.ClusterIPNone }), pods,
			[]string{"IPv4 10.0.0.1@z 10.0.0.2@z!" + ports},
		},
		"external IPs and own ports": {
			service(func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"203.0.113.9", "2001:db8::9", "203.0.113.8"} }), pods,
			[]string{"IPv4 203.0.113.8 203.0.113.9" + own, "IPv6 2001:db8::9" + own},
		},
		"external IPs with nothing behind them": {
			service(func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"203.0.113.9"} }),
			[]*discoveryv1.EndpointSlice{slice("s", "10.0.0.1!")},
			[]string{"IPv4 203.0.113.9!" + own},
		},
		"external IPs of a Service of which Kubernetes knows no endpoints": {
			service(func(s *corev1.Service) { s.Spec.ExternalIPs, s.Spec.Selector = []string{"203.0.113.9"}, nil }),
			nil,
			[]string{"IPv4 203.0.113.9" + own},
		},
		"node ports of ready nodes, external addresses first": {
			service(ofType(corev1.ServiceTypeNodePort)), pods, []string{"IPv4 192.0.2.1@z 198.51.100.2@z" + nodePorts},
		},
		"node ports of both families": {
			service(func(s *corev1.Service) {
				s.Spec.Type = corev1.ServiceTypeNodePort
				s.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
			}), pods,
			[]string{"IPv4 192.0.2.1@z 198.51.100.2@z" + nodePorts, "IPv6 2001:db8::1@z" + nodePorts},
		},
		"node ports, local: nodes with a ready endpoint": {
			service(func(s *corev1.Service) {
				s.Spec.Type, s.Spec.ExternalTrafficPolicy = corev1.ServiceTypeNodePort, corev1.ServiceExternalTrafficPolicyLocal
			}), pods,
			[]string{"IPv4 192.0.2.1@z" + nodePorts},
		},
		"load balancer": {
			service(balanced(corev1.LoadBalancerIngress{IP: "203.0.113.1"})), pods, []string{"IPv4 203.0.113.1" + own},
		},
		"load balancer without an address yet": {service(balanced()), pods, nil},
		"load balancer by name": {
			service(balanced(corev1.LoadBalancerIngress{Hostname: "lb.example.org"})), pods,
			[]string{"IPv4 203.0.113.5 203.0.113.6" + own, "IPv6 2001:db8::5" + own},
		},
		"load balancer by a name without addresses": {
			service(balanced(corev1.LoadBalancerIngress{Hostname: "lb.example.net"})), pods, nil,
		},
		"load balancer that says its ports": {
			service(balanced(
				corev1.LoadBalancerIngress{IP: "203.0.113.1", Ports: []corev1.PortStatus{{Port: 80, Protocol: corev1.ProtocolTCP}}},
				corev1.LoadBalancerIngress{IP: "203.0.113.2", Ports: []corev1.PortStatus{
					{Port: 80, Protocol: corev1.ProtocolTCP, Error: new("no room")}, {Port: 53, Protocol: corev1.ProtocolUDP},
				}},
			)), pods,
			[]string{"IPv4 203.0.113.2 53->53/UDP", "IPv4 203.0.113.1 80->80/TCP"},
		},
		"virtual machines: their slices, whatever the type": {
			service(func(s *corev1.Service) {
				s.Spec.Type = corev1.ServiceTypeNodePort
				s.Annotations = map[string]string{"vm.antreaplus.vmware-tanzu.com": ""}
			}), pods,
			[]string{"IPv4 10.0.0.1@z 10.0.0.2@z!" + ports},
		},
	} {
		t.Run(name, func(t *testing.T) {
			src := offers.Source{Cluster: "a", Service: tc.svc, Slices: tc.slices, Nodes: nodes, External: external, Lookup: func(host string) ([]netip.Addr, bool) {
				if host != "lb.example.org" {
					return nil, true
				}
				return []netip.Addr{netip.MustParseAddr("203.0.113.6"), netip.MustParseAddr("2001:db8::5"), netip.MustParseAddr("203.0.113.5")}, true
			}}
			o, err := offers.New(src)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, text(o)); diff != "" {
				t.Error(diff)
			}
			for _, g := range o.Groups {
				for _, e := range g.Endpoints {
					if e.NodeName != nil || e.Hints != nil || e.TargetRef != nil {
						t.Errorf("%v has what means nothing in another cluster", e)
					}
				}
			}
			if !o.ExportedAt.Equal(born) || o.Service != (clusterset.ServiceName{Namespace: "demo", Name: "web"}) {
				t.Errorf("it says of itself %v, %v", o.Service, o.ExportedAt)
			}
		})
	}
}

// external are the networks of the external IPs of these tests.
var external = []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24"), netip.MustParsePrefix("2001:db8::/32")}

func TestLocalOfferHasTheSlices(t *testing.T) {
	pods := slice("s1", "10.0.0.1", "10.0.0.2!")
	for name, svc := range map[string]*corev1.Service{
		"ClusterIP":    service(ofType(corev1.ServiceTypeClusterIP)),
		"external IPs": service(func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"203.0.113.9"} }),
		"NodePort":     service(ofType(corev1.ServiceTypeNodePort)),
		"LoadBalancer": service(balanced(corev1.LoadBalancerIngress{IP: "203.0.113.1"})),
	} {
		t.Run(name, func(t *testing.T) {
			src := offers.Source{Cluster: "a", Service: svc, Slices: []*discoveryv1.EndpointSlice{pods}, External: external}
			o, err := offers.New(src)
			if err != nil {
				t.Fatal(err)
			}
			o = o.Local(src)
			all := offers.Merge([]offers.Offer{o}).Slices(clusterset.ServiceName{Namespace: "demo", Name: "fed"}, o)
			if len(all) != 1 {
				t.Fatalf("it leads there by %d slices", len(all))
			}
			want := pods.DeepCopy()
			for i := range want.Endpoints {
				want.Endpoints[i].TargetRef = nil
			}
			if diff := cmp.Diff(want.Endpoints, all[0].Endpoints); diff != "" {
				t.Error(diff)
			}
			if diff := cmp.Diff(want.Ports, all[0].Ports); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestUnreachableServiceIsAnError(t *testing.T) {
	for name, tc := range map[string]struct {
		svc  *corev1.Service
		want string
	}{
		"ExternalName": {service(ofType(corev1.ServiceTypeExternalName)), "ExternalName"},
		"no ports":     {service(func(s *corev1.Service) { s.Spec.Ports = nil }), "spec.ports"},
		"external IPs of somebody else": {
			service(func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"203.0.113.9", "192.0.2.1", "fd00::1"} }),
			"spec.externalIPs: 192.0.2.1, fd00::1: not in an external network of cluster a",
		},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := offers.New(offers.Source{Cluster: "a", Service: tc.svc, External: external}); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v does not speak of %s", err, tc.want)
			}
		})
	}
}

func TestNamesOfFederatedServices(t *testing.T) {
	const system = "isthmus-system"
	for name, tc := range map[string]struct {
		namespace   string
		annotations string // such as "KEY=VALUE KEY=VALUE"
		want        string // "" is none
		wrong       bool
	}{
		"none":                         {namespace: "demo"},
		"global":                       {"demo", "svc.global.federated.antreaplus.vmware-tanzu.com=foo", "isthmus-system/foo", false},
		"global, the other spelling":   {"demo", "svc.global.federated.antreaplus.vmware.com=foo", "isthmus-system/foo", false},
		"global, ours":                 {"demo", "federation.isthmus.dev/global-service=foo", "isthmus-system/foo", false},
		"namespaced":                   {"demo", "svc.federated.antreaplus.vmware.com=foo", "demo/foo", false},
		"namespaced, another spelling": {"demo", "svc.federated.antreaplus.vmware-tanzu.com=foo", "demo/foo", false},
		"namespaced, ours":             {"demo", "federation.isthmus.dev/service=foo", "demo/foo", false},
		"both":                         {"demo", "federation.isthmus.dev/service=foo federation.isthmus.dev/global-service=foo", "", true},
		"a name with a digit first":    {"demo", "svc.federated.antreaplus.vmware.com=9foo", "demo/9foo", false},
		"a global one, a number":       {"demo", "federation.isthmus.dev/global-service=42", "isthmus-system/42", false},
		"no name of a Service":         {"demo", "svc.federated.antreaplus.vmware.com=Foo.bar", "", true},
		"a name with a hyphen first":   {"demo", "svc.federated.antreaplus.vmware.com=-foo", "", true},
		"no name at all":               {"demo", "svc.global.federated.antreaplus.vmware-tanzu.com=", "", true},
		"a namespace of one's own":     {"kube-system", "svc.federated.antreaplus.vmware.com=foo", "", true},
		"and a global one":             {"kube-system", "svc.global.federated.antreaplus.vmware.com=foo", "", true},
		"a federated Service is none":  {"demo", "svc.federated.antreaplus.vmware.com=foo fed-svc.antreaplus.vmware-tanzu.com=true", "", false},
		"an annotation of others":      {"demo", "example.org/service=foo", "", false},
	} {
		t.Run(name, func(t *testing.T) {
			svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: tc.namespace, Name: "web", Annotations: map[string]string{}}}
			for a := range strings.FieldsSeq(tc.annotations) {
				key, value, _ := strings.Cut(a, "=")
				svc.Annotations[key] = value
			}
			got, ok, err := offers.Name(svc, system)
			if ok != (tc.want != "") || ok && got.String() != tc.want || (err != nil) != tc.wrong {
				t.Errorf("it is a member of %v (%v), error %v; want %q", got, ok, err, tc.want)
			}
		})
	}
}
