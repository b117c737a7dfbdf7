package hostile

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	gateway "github.com/isthmus-net/isthmus/gateway/api/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/service"
)

// GatewayKinds returns the kinds of a cluster with gateways: those of a tenant, and GatewayNodes, of which an administrator gets
// one wrong.
func GatewayKinds() []Kind {
	return []Kind{
		kindOf("Service of gateways", Tenant, balancedService, append(serviceTwists(), balancedServiceTwists()...)...),
		kindOf("annotated Service of gateways", Tenant, balancedService, balancedServiceTwists()...),
		kindOf("EndpointSlice of gateways", Tenant, balancedSlice, append(sliceTwists(), balancedSliceTwists()...)...),
		kindOf("GatewayNode", Child, gatewayNode, gatewayNodeTwists()...),
	}
}

// balancedService returns a Service for the gateways, with a slice.
func balancedService(s *Source) (*corev1.Service, []client.Object) {
	svc := s.tenantService(s.fresh())
	svc.Spec.Type, svc.Spec.LoadBalancerClass = corev1.ServiceTypeLoadBalancer, new(service.Class)
	return svc, []client.Object{s.tenantSlice(svc.Name)}
}

func balancedSlice(s *Source) (*discoveryv1.EndpointSlice, []client.Object) {
	svc, slices := balancedService(s)
	return slices[0].(*discoveryv1.EndpointSlice), []client.Object{svc} //nolint:forcetypeassert // balancedService returns a slice
}

// balancedServiceTwists are twists of the fields and annotations that gateways honour.
func balancedServiceTwists() []func(*Source, *corev1.Service) {
	annotate := func(svc *corev1.Service, name, value string) {
		svc.Annotations = merged(svc.Annotations, map[string]string{name: value})
	}
	return []func(*Source, *corev1.Service){
		func(s *Source, svc *corev1.Service) { annotate(svc, service.AnnotationPort, s.portID()) },
		func(s *Source, svc *corev1.Service) { annotate(svc, service.AnnotationPort, s.portID()) },
		func(s *Source, svc *corev1.Service) {
			annotate(svc, Pick(s, service.AnnotationPool, service.AnnotationBackends, service.AnnotationExternalIPs, service.AnnotationManaged,
				service.AnnotationServiceImport, service.AnnotationFloatingIPAfterwards), Pick(s, "list", "public", "nodeports", "pods", "true", "false", "retain", s.Value()))
		},
		func(s *Source, svc *corev1.Service) { annotate(svc, service.AnnotationPool, "list") },
		func(s *Source, svc *corev1.Service) { annotate(svc, service.AnnotationAddresses, s.addresses()) },
		func(s *Source, svc *corev1.Service) {
			annotate(svc, service.AnnotationAddresses, s.addresses())
			annotate(svc, service.AnnotationSharing, Pick(s, "web", "", s.Value()))
		},
		func(s *Source, svc *corev1.Service) { annotate(svc, service.AnnotationAgree, s.addresses()) },
		func(s *Source, svc *corev1.Service) {
			annotate(svc, service.AnnotationFloatingIP, Pick(s, "none", "allocate", "", s.Address(s.place.Cluster)))
		},
		func(s *Source, svc *corev1.Service) {
			annotate(svc, service.AnnotationOwnExternalIPs, s.Address(s.place.Cluster))
			svc.Spec.ExternalIPs = []string{s.Address(s.place.Cluster)}
		},
		func(s *Source, svc *corev1.Service) {
			for range Pick(s, 1, 2, 1000) {
				svc.Spec.LoadBalancerSourceRanges = append(svc.Spec.LoadBalancerSourceRanges, s.Address(s.place.Cluster)+Pick(s, "/32", "/24", "/128", "/0", "", "/33"))
			}
		},
		func(s *Source, svc *corev1.Service) { svc.Finalizers = []string{service.Finalizer} },
		func(_ *Source, svc *corev1.Service) {
			svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
		},
		func(s *Source, svc *corev1.Service) { svc.Spec.LoadBalancerIP = s.Address(s.place.Cluster) },
	}
}

// portID returns a port annotation: an address of another owner, or two, in some spelling.
func (s *Source) portID() string {
	id := Pick(s, s.Foreign...).String()
	if s.oneIn(2) {
		id += "_" + Pick(s, s.Foreign...).String()
	}
	return Pick(s, id, id, strings.ToUpper(id), "::ffff:"+id, strings.Replace(id, "::", ":0::", 1), id+"_", " "+id, s.Value())
}

// addresses returns an annotation with the addresses of other owners or any, in some spelling.
func (s *Source) addresses() string {
	one := func() string { return Pick(s, Pick(s, s.Foreign...).String(), s.Address(s.place.Cluster)) }
	return Pick(s, one(), one()+","+one(), " "+one(), one()+",", "", s.Value())
}

// balancedSliceTwists twist what no schema checks.
func balancedSliceTwists() []func(*Source, *discoveryv1.EndpointSlice) {
	return []func(*Source, *discoveryv1.EndpointSlice){
		func(s *Source, es *discoveryv1.EndpointSlice) {
			for i := range es.Ports {
				es.Ports[i].Port = new(s.Port())
			}
		},
		func(s *Source, es *discoveryv1.EndpointSlice) {
			for i := range es.Ports {
				es.Ports[i].Port = new(Pick(s, int32(0), -1, 65536, 65616))
			}
		},
	}
}

func gatewayNode(s *Source) (*gateway.GatewayNode, []client.Object) {
	name := s.fresh()
	return &gateway.GatewayNode{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: gateway.GatewayNodeSpec{
		URL: "https://" + name + ".example.org:9479", Group: "default", Balancer: "nftables",
		BGP: &gateway.BGP{ASN: 65001, RouterID: "192.0.2.1", Peers: []gateway.Peer{{Address: "192.0.2.254", ASN: 65000}}},
	}}, nil
}

func gatewayNodeTwists() []func(*Source, *gateway.GatewayNode) {
	return []func(*Source, *gateway.GatewayNode){
		Metadata[*gateway.GatewayNode],
		func(s *Source, n *gateway.GatewayNode) {
			n.Spec.URL = Pick(s, "", "http://a", "https://", "https://:9479", "https://[::1", "https://a b", "https://"+s.Value()+":0")
		},
		func(_ *Source, n *gateway.GatewayNode) { n.Spec.Balancer = "ebpf" },
		func(s *Source, n *gateway.GatewayNode) { n.Spec.Group = s.Value() },
		func(s *Source, n *gateway.GatewayNode) { n.Spec.CertificateName = Pick(s, "gw1", s.Value()) },
		func(s *Source, n *gateway.GatewayNode) { n.Spec.Address = s.Address(s.place.Cluster) },
		func(s *Source, n *gateway.GatewayNode) { n.Spec.NeutronPort = fmt.Sprintf("port-%d", s.number) },
		func(_ *Source, n *gateway.GatewayNode) { n.Spec.BGP = nil },
		func(s *Source, n *gateway.GatewayNode) {
			if n.Spec.BGP != nil {
				n.Spec.BGP.RouterID, n.Spec.BGP.Communities = s.Address(s.place.Cluster), []string{s.Value()}
				n.Spec.BGP.Peers[0].Address, n.Spec.BGP.Peers[0].Port, n.Spec.BGP.Peers[0].PasswordSecret = s.Address(s.place.Cluster), s.Port(), s.Value()
			}
		},
		func(s *Source, n *gateway.GatewayNode) {
			n.Spec.VRRP = &gateway.VRRP{Interface: s.Value(), Source: s.Address(s.place.Cluster), Peers: []string{s.Address(s.place.Cluster)}, RouterID: Pick(s, int32(0), 7, 255), Priority: 100, IntervalMillis: Pick(s, int32(0), 15, 100)}
		},
		func(_ *Source, n *gateway.GatewayNode) { n.Spec.Cordoned = true },
	}
}
