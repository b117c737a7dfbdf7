// Package manifests converts the Services of the benchmarks into the objects of a member's API server.
package manifests

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// Objects returns the ServiceImport and the IPv4 EndpointSlices of a Service. Endpoints are spread over nodes and three zones.
func Objects(svc *clusterset.Service) []client.Object {
	si := mcs.ServiceImport(svc.Import)
	si.TypeMeta = metav1.TypeMeta{APIVersion: v1beta1.GroupVersion.String(), Kind: "ServiceImport"}
	objects := []client.Object{si}
	for _, s := range svc.Slices {
		es := &discoveryv1.EndpointSlice{
			TypeMeta: metav1.TypeMeta{APIVersion: discoveryv1.SchemeGroupVersion.String(), Kind: "EndpointSlice"},
			ObjectMeta: metav1.ObjectMeta{Namespace: svc.Service.Namespace, Name: s.Name, Labels: map[string]string{
				v1beta1.LabelServiceName: svc.Service.Name, v1beta1.LabelSourceCluster: string(s.Cluster),
			}},
			AddressType: discoveryv1.AddressTypeIPv4,
		}
		for _, p := range s.Ports {
			es.Ports = append(es.Ports, discoveryv1.EndpointPort{
				Name: new(p.Name), Protocol: new(corev1.Protocol(p.Protocol.String())), Port: new(int32(p.Port)),
			})
		}
		for n, e := range s.Endpoints {
			es.Endpoints = append(es.Endpoints, discoveryv1.Endpoint{
				Addresses: []string{e.Addrs[0].String()}, Conditions: discoveryv1.EndpointConditions{Ready: new(e.Ready), Serving: new(e.Serving)},
				NodeName: new(fmt.Sprintf("node-%03d.example.internal", n)), Zone: new(fmt.Sprintf("zone-%d", n%3)),
			})
		}
		objects = append(objects, es)
	}
	return objects
}
