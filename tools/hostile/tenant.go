package hostile

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

// tenantKinds returns the kinds of a tenant in a member cluster.
func tenantKinds() []Kind {
	return []Kind{
		kindOf("Service", Tenant, func(s *Source) (*corev1.Service, []client.Object) { return s.tenantService(s.fresh()), nil }, serviceTwists()...),
		kindOf("exported Service", Tenant, exportedService, serviceTwists()...),
		kindOf("ServiceExport", Tenant, export, exportTwists()...),
		kindOf("exported EndpointSlice", Tenant, exportedSlice, sliceTwists()...),
		kindOf("ServiceImport", Tenant, tenantImport, importTwists()...),
		kindOf("imported EndpointSlice", Tenant, importedSlice, sliceTwists()...),
	}
}

func (s *Source) tenantMeta(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: s.place.Namespace, Name: name}
}

func (s *Source) tenantService(name string) *corev1.Service {
	return &corev1.Service{
		ObjectMeta: s.tenantMeta(name),
		Spec: corev1.ServiceSpec{
			Selector: map[string]string{"app": name},
			Ports:    []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80}},
		},
	}
}

func (s *Source) tenantExport(name string) *v1beta1.ServiceExport {
	return &v1beta1.ServiceExport{ObjectMeta: s.tenantMeta(name)}
}

// tenantSlice returns the slice that Kubernetes writes for a Service.
func (s *Source) tenantSlice(service string) *discoveryv1.EndpointSlice {
	es := newSlice(s.tenantMeta(fmt.Sprintf("%.40s-%d", service, s.number)), s.within(s.Pods[s.place.Cluster][0]).String())
	es.Labels = map[string]string{discoveryv1.LabelServiceName: service, discoveryv1.LabelManagedBy: "endpointslice-controller.k8s.io"}
	return es
}

// newSlice returns an IPv4 slice with one ready endpoint.
func newSlice(meta metav1.ObjectMeta, address string) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta:  meta,
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{address}, Conditions: discoveryv1.EndpointConditions{Ready: new(true)}}},
		Ports:       []discoveryv1.EndpointPort{{Name: new("http"), Protocol: new(corev1.ProtocolTCP), Port: new(int32(8080))}},
	}
}

func exportedService(s *Source) (*corev1.Service, []client.Object) {
	name := s.service()
	return s.tenantService(name), []client.Object{s.tenantExport(name), s.tenantSlice(name)}
}

func export(s *Source) (*v1beta1.ServiceExport, []client.Object) {
	name := s.service()
	return s.tenantExport(name), []client.Object{s.tenantService(name), s.tenantSlice(name)}
}

func exportedSlice(s *Source) (*discoveryv1.EndpointSlice, []client.Object) {
	name := s.service()
	return s.tenantSlice(name), []client.Object{s.tenantService(name), s.tenantExport(name)}
}

func tenantImport(s *Source) (*v1beta1.ServiceImport, []client.Object) {
	return &v1beta1.ServiceImport{
		ObjectMeta: s.tenantMeta(s.service()),
		Spec: v1beta1.ServiceImportSpec{
			Type: v1beta1.ClusterSetIP, IPs: []string{s.Address(s.place.Cluster)},
			Ports: []v1beta1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: Pick(s, int32(80), 443)}},
		},
	}, nil
}

// importedSlice returns a slice that an MCS implementation might have written.
func importedSlice(s *Source) (*discoveryv1.EndpointSlice, []client.Object) {
	name := s.service()
	es := newSlice(s.tenantMeta(fmt.Sprintf("%.40s-imported-%d", name, s.number)), s.Address(s.place.Cluster))
	es.Labels = map[string]string{
		v1beta1.LabelServiceName: name, v1beta1.LabelSourceCluster: Pick(s, append(slices.Clone(s.Others), s.Member)...),
		discoveryv1.LabelManagedBy: Pick(s, v1alpha1.ManagedBy, "example.org"),
	}
	return es, nil
}

func serviceTwists() []func(*Source, *corev1.Service) {
	return []func(*Source, *corev1.Service){
		Metadata[*corev1.Service],
		func(s *Source, svc *corev1.Service) { svc.Labels = merged(svc.Labels, s.Map(0)) },
		func(s *Source, svc *corev1.Service) { svc.Name = s.Name() },
		func(s *Source, svc *corev1.Service) {
			svc.Spec.Ports = nil
			for i := range min(s.ports(), 1000) { // the API server refuses a larger Service only after a long time
				svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{Name: fmt.Sprintf("p%d", i), Protocol: Pick(s, corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP), Port: int32(i + 1)})
			}
		},
		func(s *Source, svc *corev1.Service) {
			for i := range svc.Spec.Ports {
				svc.Spec.Ports[i].Port = s.Port()
			}
		},
		func(s *Source, svc *corev1.Service) { svc.Spec.ExternalIPs = []string{s.Address(s.place.Cluster)} },
		func(s *Source, svc *corev1.Service) {
			svc.Spec.Type = Pick(s, corev1.ServiceTypeExternalName, corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeNodePort)
			if svc.Spec.Type == corev1.ServiceTypeExternalName {
				svc.Spec.ExternalName = "example.org"
			}
		},
		func(_ *Source, svc *corev1.Service) { svc.Spec.ClusterIP = corev1.ClusterIPNone },
		func(s *Source, svc *corev1.Service) {
			svc.Spec.IPFamilyPolicy = new(Pick(s, corev1.IPFamilyPolicyPreferDualStack, corev1.IPFamilyPolicyRequireDualStack))
		},
		func(s *Source, svc *corev1.Service) {
			svc.Spec.IPFamilies = Pick(s, []corev1.IPFamily{corev1.IPv6Protocol}, []corev1.IPFamily{corev1.IPv6Protocol, corev1.IPv4Protocol})
		},
		func(s *Source, svc *corev1.Service) {
			svc.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
			svc.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: new(Pick(s, int32(0), 1, 86400, 86401))}}
		},
		func(s *Source, svc *corev1.Service) {
			svc.Spec.InternalTrafficPolicy = new(Pick(s, corev1.ServiceInternalTrafficPolicyLocal, "Elsewhere"))
			svc.Spec.TrafficDistribution = new(Pick(s, "PreferClose", "PreferSameNode", "Nowhere"))
		},
	}
}

func exportTwists() []func(*Source, *v1beta1.ServiceExport) {
	return []func(*Source, *v1beta1.ServiceExport){
		Metadata[*v1beta1.ServiceExport],
		func(s *Source, e *v1beta1.ServiceExport) { e.Spec.ExportedLabels = s.Map(0) },
		func(s *Source, e *v1beta1.ServiceExport) { e.Spec.ExportedAnnotations = s.Map(260 << 10) },
		func(s *Source, e *v1beta1.ServiceExport) { e.Spec.ExportedAnnotations = s.Weights() },
		func(s *Source, e *v1beta1.ServiceExport) {
			e.Annotations = merged(e.Annotations, map[string]string{v1alpha1.AnnotationUseClusterSetIP: Pick(s, "true", "false", "yes", "")})
		},
	}
}

func importTwists() []func(*Source, *v1beta1.ServiceImport) {
	return []func(*Source, *v1beta1.ServiceImport){
		Metadata[*v1beta1.ServiceImport],
		func(s *Source, si *v1beta1.ServiceImport) { si.Name = s.service() },
		func(s *Source, si *v1beta1.ServiceImport) {
			si.Spec.IPs = []string{s.Address(s.place.Cluster), s.Address(s.place.Cluster)}
		},
		func(s *Source, si *v1beta1.ServiceImport) { si.Spec.Ports = s.importPorts() },
		func(s *Source, si *v1beta1.ServiceImport) { twistSpec(s, &si.Spec) },
		func(_ *Source, si *v1beta1.ServiceImport) {
			si.Labels = merged(si.Labels, map[string]string{v1alpha1.LabelManagedBy: v1alpha1.ManagedBy})
		},
	}
}

// importPorts returns the ports of an import: many, wrong or repeated.
func (s *Source) importPorts() []v1beta1.ServicePort {
	if s.oneIn(2) {
		p := v1beta1.ServicePort{Name: Pick(s, "http", "", "x"), Protocol: Pick(s, corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP, "ICMP", ""), Port: s.Port()}
		return []v1beta1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80}, p, p}[s.IntN(2):]
	}
	var ports []v1beta1.ServicePort
	for i := range s.ports() {
		ports = append(ports, v1beta1.ServicePort{Name: fmt.Sprintf("p%d", i), Protocol: corev1.ProtocolTCP, Port: int32(i + 1)})
	}
	return ports
}

// twistSpec twists the part that records, aggregates and imports have in common.
func twistSpec(s *Source, spec *v1beta1.ServiceImportSpec) {
	switch s.IntN(6) {
	case 0:
		spec.Type = Pick(s, v1beta1.Headless, v1beta1.ClusterSetIP, "Other", "")
	case 1:
		spec.IPs = nil
	case 2:
		spec.IPFamilies = Pick(s, []corev1.IPFamily{corev1.IPv6Protocol}, []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv4Protocol}, []corev1.IPFamily{"IPv5"}, nil)
	case 3:
		spec.SessionAffinity = Pick(s, corev1.ServiceAffinityClientIP, "Cookie", "")
		spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: new(Pick(s, int32(0), 1, 86400, 1<<30))}}
	case 4:
		spec.InternalTrafficPolicy = new(Pick(s, corev1.ServiceInternalTrafficPolicyLocal, corev1.ServiceInternalTrafficPolicyCluster, "Elsewhere"))
	default:
		spec.TrafficDistribution = new(Pick(s, "PreferClose", "PreferSameNode", "Nowhere", ""))
	}
}

func sliceTwists() []func(*Source, *discoveryv1.EndpointSlice) {
	return []func(*Source, *discoveryv1.EndpointSlice){
		Metadata[*discoveryv1.EndpointSlice],
		func(s *Source, es *discoveryv1.EndpointSlice) {
			es.Labels = merged(es.Labels, map[string]string{Pick(s, reserved...): s.Value()})
		},
		func(s *Source, es *discoveryv1.EndpointSlice) {
			es.Endpoints = append(es.Endpoints, discoveryv1.Endpoint{Addresses: []string{s.Address(s.owner())}})
		},
		func(s *Source, es *discoveryv1.EndpointSlice) {
			es.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{s.Address(s.owner()), s.Address(s.owner())}}}
		},
		func(s *Source, es *discoveryv1.EndpointSlice) {
			for range Pick(s, 100, 999, 1001) {
				es.Endpoints = append(es.Endpoints, discoveryv1.Endpoint{Addresses: []string{s.within(s.Pods[s.owner()][0]).String()}})
			}
		},
		func(s *Source, es *discoveryv1.EndpointSlice) {
			es.AddressType = Pick(s, discoveryv1.AddressTypeIPv6, discoveryv1.AddressTypeFQDN, "IPv5")
		},
		func(s *Source, es *discoveryv1.EndpointSlice) {
			p := discoveryv1.EndpointPort{Name: Pick(s, nil, new("http"), new("x")), Protocol: Pick(s, nil, new(corev1.ProtocolTCP), new(corev1.ProtocolSCTP)), Port: Pick(s, nil, new(s.Port()))}
			es.Ports = Pick(s, []discoveryv1.EndpointPort{p}, append(es.Ports, p), []discoveryv1.EndpointPort{})
		},
		func(s *Source, es *discoveryv1.EndpointSlice) {
			for i := range es.Endpoints {
				e := &es.Endpoints[i]
				e.Hostname, e.NodeName, e.Zone = new(Pick(s, "www", "a-"+s.fresh(), "UPPER", "")), new(s.Value()), new(s.Value())
				e.Conditions = discoveryv1.EndpointConditions{Ready: new(s.oneIn(2)), Serving: new(s.oneIn(2)), Terminating: new(s.oneIn(2))}
			}
		},
	}
}

// owner returns the member whose addresses the author of the object may name.
func (s *Source) owner() string {
	if s.place.Cluster != "" {
		return s.place.Cluster
	}
	return s.Member
}
