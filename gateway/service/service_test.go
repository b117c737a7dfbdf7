package service

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/gateway/portmap"
)

func balanced(change func(*corev1.Service)) *corev1.Service {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "demo", Name: "hello", Annotations: map[string]string{}},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, LoadBalancerClass: new(Class), IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			Ports:    []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80, NodePort: 30080}},
			Selector: map[string]string{"app": "hello"},
		},
	}
	if change != nil {
		change(s)
	}
	return s
}

func TestTakes(t *testing.T) {
	for name, tc := range map[string]struct {
		change                func(*corev1.Service)
		byClass, whereDefault bool
	}{
		"our class":             {nil, true, true},
		"no class":              {func(s *corev1.Service) { s.Spec.LoadBalancerClass = nil }, false, true},
		"another class":         {func(s *corev1.Service) { s.Spec.LoadBalancerClass = new("example.com/lb") }, false, false},
		"another type":          {func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeClusterIP }, false, false},
		"not managed by choice": {func(s *corev1.Service) { s.Annotations[AnnotationManaged] = "false" }, false, false},
		"already managed":       {func(s *corev1.Service) { s.Annotations[AnnotationManaged] = "true" }, true, true},
	} {
		t.Run(name, func(t *testing.T) {
			if got := (Config{}).Takes(balanced(tc.change)); got != tc.byClass {
				t.Errorf("taken: %v, want %v", got, tc.byClass)
			}
			if got := (Config{Default: true}).Takes(balanced(tc.change)); got != tc.whereDefault {
				t.Errorf("taken as the default class: %v, want %v", got, tc.whereDefault)
			}
		})
	}
}

var config = Config{Pools: []string{"public", "internal"}, Floating: FloatingIP{Allocate: true}, Backends: Pods}

func TestRead(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*corev1.Service)
		want   func(*Want)
	}{
		"as configured": {nil, nil},
		"no floating IP": {
			func(s *corev1.Service) { s.Annotations[AnnotationFloatingIP] = "none" },
			func(w *Want) { w.Floating = FloatingIP{} },
		},
		"retained": {
			func(s *corev1.Service) { s.Annotations[AnnotationFloatingIPAfterwards] = "retain" },
			func(w *Want) { w.Floating = FloatingIP{Allocate: true, Retain: true} },
		},
		"SCTP beside TCP": {
			func(s *corev1.Service) {
				s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "sctp", Protocol: corev1.ProtocolSCTP, Port: 5000})
			},
			func(w *Want) { w.Unserved = []portmap.L4{{Protocol: "SCTP", Port: 5000}} },
		},
		"a named floating IP, which stays the user's": {
			func(s *corev1.Service) { s.Annotations[AnnotationFloatingIP] = "203.0.113.9" },
			func(w *Want) { w.Floating = FloatingIP{Use: "203.0.113.9", Retain: true} },
		},
		"pool, node ports, external IPs": {
			func(s *corev1.Service) {
				s.Annotations = map[string]string{AnnotationPool: "internal", AnnotationBackends: "nodeports", AnnotationExternalIPs: "true"}
			},
			func(w *Want) { w.Pool, w.Backends, w.ExternalIPs = "internal", NodePorts, true },
		},
		"a ClusterSet service": {
			func(s *corev1.Service) {
				s.Spec.Selector = nil
				s.Annotations[AnnotationServiceImport] = "hello"
			},
			func(w *Want) { w.Import = "hello" },
		},
		"several ports, sorted": {
			func(s *corev1.Service) {
				s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "dns", Protocol: corev1.ProtocolUDP, Port: 53}, corev1.ServicePort{Name: "dns-tcp", Protocol: corev1.ProtocolTCP, Port: 53})
			},
			func(w *Want) {
				w.L4 = []portmap.L4{{Protocol: "TCP", Port: 53}, {Protocol: "UDP", Port: 53}, {Protocol: "TCP", Port: 80}}
			},
		},
		"source ranges": {
			func(s *corev1.Service) { s.Spec.LoadBalancerSourceRanges = []string{"192.0.2.7/24", " 2001:db8::/32 "} },
			func(w *Want) {
				w.Sources = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8::/32")}
			},
		},
		"affinity": {
			func(s *corev1.Service) { s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP },
			func(w *Want) { w.Affinity = 10800 },
		},
		"affinity of a minute": {
			func(s *corev1.Service) {
				s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
				s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: new(int32(60))}}
			},
			func(w *Want) { w.Affinity = 60 },
		},
		"local": {
			func(s *corev1.Service) {
				s.Spec.ExternalTrafficPolicy, s.Spec.HealthCheckNodePort = corev1.ServiceExternalTrafficPolicyLocal, 31000
			},
			func(w *Want) { w.Local, w.HealthCheckPort = true, 31000 },
		},
	} {
		t.Run(name, func(t *testing.T) {
			want := Want{
				L4: []portmap.L4{{Protocol: "TCP", Port: 80}}, Families: []corev1.IPFamily{corev1.IPv4Protocol},
				Floating: FloatingIP{Allocate: true}, Pool: "public", Backends: Pods,
			}
			if tc.want != nil {
				tc.want(&want)
			}
			got, err := config.Read(balanced(tc.change))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.Prefix{})); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestReadErrors(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*corev1.Service)
		want   []string
	}{
		"pool":         {func(s *corev1.Service) { s.Annotations[AnnotationPool] = "publik" }, []string{`annotation gateway.isthmus.dev/pool is "publik"; it can be "public" or "internal"`}},
		"external IPs": {func(s *corev1.Service) { s.Annotations[AnnotationExternalIPs] = "yes" }, []string{`annotation gateway.isthmus.dev/external-ips is "yes"; it can be "false" or "true"`}},
		"floating IP of IPv6": {
			func(s *corev1.Service) { s.Annotations[AnnotationFloatingIP] = "2001:db8::1" },
			[]string{"annotation gateway.isthmus.dev/floating-ip is 2001:db8::1; floating IPs are IPv4 only; IPv6 addresses are announced without one"},
		},
		"floating IP for IPv6": {
			func(s *corev1.Service) {
				s.Annotations[AnnotationFloatingIP] = "allocate"
				s.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv6Protocol}
			},
			[]string{`annotation gateway.isthmus.dev/floating-ip asks for a floating IP, which is IPv4, and spec.ipFamilies is IPv6 alone; add IPv4 there, or set the annotation to "none"`},
		},
		"empty floating IP": {
			func(s *corev1.Service) { s.Annotations[AnnotationFloatingIP] = "" },
			[]string{`annotation gateway.isthmus.dev/floating-ip is empty; it can be "none", "allocate", or the id or the address of a floating IP`},
		},
		"deletion of the user's floating IP": {
			func(s *corev1.Service) {
				s.Annotations = map[string]string{AnnotationFloatingIP: "203.0.113.9", AnnotationFloatingIPAfterwards: "delete"}
			},
			[]string{`annotation gateway.isthmus.dev/floating-ip-afterwards is "delete", but 203.0.113.9 was not allocated for this Service; only a user may delete it`},
		},
		"SCTP alone": {
			func(s *corev1.Service) { s.Spec.Ports[0].Protocol = corev1.ProtocolSCTP },
			[]string{"spec.ports: gateways balance TCP and UDP, and the Service has only [80/SCTP]"},
		},
		"no node port": {
			func(s *corev1.Service) {
				s.Annotations[AnnotationBackends] = "nodeports"
				s.Spec.Ports[0].NodePort = 0
			},
			[]string{"spec.ports[http] has no node port, which gateway.isthmus.dev/backends=nodeports needs; set spec.allocateLoadBalancerNodePorts to true"},
		},
		"two errors": {
			func(s *corev1.Service) {
				s.Annotations[AnnotationServiceImport] = "hello"
				s.Spec.LoadBalancerSourceRanges = []string{"192.0.2.0"}
			},
			[]string{
				`spec.loadBalancerSourceRanges: "192.0.2.0" is not a CIDR such as 192.0.2.0/24`,
				"spec.selector and the annotation isthmus.dev/service-import name two sets of backends; remove one of them",
			},
		},
		"node ports of other clusters": {
			func(s *corev1.Service) {
				s.Spec.Selector = nil
				s.Annotations = map[string]string{AnnotationServiceImport: "hello", AnnotationBackends: "nodeports"}
			},
			[]string{"the annotation isthmus.dev/service-import needs gateway.isthmus.dev/backends=pods: node ports of other clusters are not reachable"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := config.Read(balanced(tc.change))
			if err == nil {
				t.Fatal("no error")
			}
			if diff := cmp.Diff(tc.want, strings.Split(err.Error(), "\n")); diff != "" {
				t.Errorf("errors (-want +got):\n%s", diff)
			}
		})
	}
}
