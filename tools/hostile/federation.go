package hostile

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	federation "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

// FederationKinds returns the kinds of a child of a federation. Supervisors read them and write into all members.
func FederationKinds() []Kind {
	return []Kind{
		kindOf("federated ServiceImport", Child, federatedImport, append(importTwists(), federatedImportTwists()...)...),
		kindOf("member Service", Child, memberService, append(serviceTwists(), memberServiceTwists()...)...),
		kindOf("EndpointSlice of a member Service", Child, memberSlice, sliceTwists()...),
		kindOf("federated Service", Child, federatedService, serviceTwists()...),
		kindOf("federated EndpointSlice", Child, federatedSlice, append(sliceTwists(), federatedSliceTwists()...)...),
	}
}

// federated returns the metadata of an object that supervisors write into the namespace of global Services.
func (s *Source) federated(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: s.System, Name: name, Labels: map[string]string{v1alpha1.LabelManagedBy: federation.ManagedBy}}
}

// federatedImport returns an import for a federated Service, which the child's own Service asks for.
func federatedImport(s *Source) (*v1beta1.ServiceImport, []client.Object) {
	name := s.service()
	return &v1beta1.ServiceImport{
		ObjectMeta: s.federated(name),
		Spec: v1beta1.ServiceImportSpec{
			Type: v1beta1.ClusterSetIP, IPs: []string{s.Address(s.place.Cluster)},
			Ports: []v1beta1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80}},
		},
	}, s.memberOf(name)
}

// memberOf returns a Service of the child that is a member of a federated one, with its slice.
func (s *Source) memberOf(name string) []client.Object {
	svc := s.tenantService(s.fresh())
	svc.Annotations = map[string]string{federation.AnnotationGlobalService: name}
	return []client.Object{svc, s.tenantSlice(svc.Name)}
}

func memberService(s *Source) (*corev1.Service, []client.Object) {
	all := s.memberOf(s.service())
	return all[0].(*corev1.Service), all[1:] //nolint:forcetypeassert // memberOf returns it first
}

func memberSlice(s *Source) (*discoveryv1.EndpointSlice, []client.Object) {
	all := s.memberOf(s.service())
	return all[1].(*discoveryv1.EndpointSlice), all[:1] //nolint:forcetypeassert // memberOf returns it second
}

func federatedService(s *Source) (*corev1.Service, []client.Object) {
	name := s.service()
	svc := s.tenantService(name)
	svc.ObjectMeta, svc.Spec.Selector = s.federated(name), nil
	if s.oneIn(3) {
		svc.Labels = nil // a user's Service has the name
	}
	return svc, nil
}

func federatedSlice(s *Source) (*discoveryv1.EndpointSlice, []client.Object) {
	name := s.service()
	es := newSlice(s.federated(fmt.Sprintf("%.40s-federated-%d", name, s.number)), s.Address(s.place.Cluster))
	es.Labels = map[string]string{
		discoveryv1.LabelServiceName: name, v1beta1.LabelServiceName: name, discoveryv1.LabelManagedBy: federation.ManagedBy,
		federation.MarkCluster: Pick(s, append(slices.Clone(s.Others), s.place.Cluster)...),
	}
	return es, nil
}

func federatedImportTwists() []func(*Source, *v1beta1.ServiceImport) {
	return []func(*Source, *v1beta1.ServiceImport){
		func(s *Source, si *v1beta1.ServiceImport) { si.Spec.IPs = []string{s.within(s.Block).String()} },
		func(s *Source, si *v1beta1.ServiceImport) {
			si.Spec.IPs = []string{s.within(s.Block).String(), s.Address(s.place.Cluster)}
		},
		func(s *Source, si *v1beta1.ServiceImport) {
			si.Annotations = merged(si.Annotations, map[string]string{federation.MarkFederatedService: s.Value()})
		},
	}
}

func memberServiceTwists() []func(*Source, *corev1.Service) {
	return []func(*Source, *corev1.Service){
		func(s *Source, svc *corev1.Service) { svc.Annotations[federation.AnnotationGlobalService] = s.Name() },
		func(s *Source, svc *corev1.Service) {
			svc.Annotations = merged(svc.Annotations, map[string]string{federation.AnnotationService: s.service()})
		},
		func(s *Source, svc *corev1.Service) {
			svc.Annotations = merged(svc.Annotations, map[string]string{Pick(s,
				federation.MarkFederatedService, federation.MarkVirtualMachines, federation.AnnotationAskHostname): s.Value()})
		},
	}
}

func federatedSliceTwists() []func(*Source, *discoveryv1.EndpointSlice) {
	return []func(*Source, *discoveryv1.EndpointSlice){
		func(s *Source, es *discoveryv1.EndpointSlice) { es.Labels[federation.MarkCluster] = s.Value() },
		func(s *Source, es *discoveryv1.EndpointSlice) { delete(es.Labels, federation.MarkCluster) },
		func(s *Source, es *discoveryv1.EndpointSlice) {
			es.Annotations = map[string]string{"federation.isthmus.dev/source": s.Namespace + "/" + s.service()}
		},
	}
}
