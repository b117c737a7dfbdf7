package mcs

import (
	"net/netip"
	"slices"

	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// BrokerSlice returns a member's EndpointSlice as an object of the broker, without a namespace. Addresses,
// conditions, hostname, node, zone and hints are kept; references to objects of the member are not.
func BrokerSlice(source *discoveryv1.EndpointSlice, cluster clusterset.ClusterID) *discoveryv1.EndpointSlice {
	name := clusterset.ServiceName{Namespace: source.Namespace, Name: source.Labels[discoveryv1.LabelServiceName]}
	return &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name:   BrokerSliceName(cluster, name, source.Name, source.AddressType),
			Labels: withManagedBy(ownerLabels(cluster, name)),
		},
		AddressType: source.AddressType,
		Endpoints:   portable(source.Endpoints),
		Ports:       slices.Clone(source.Ports),
	}
}

// ImportedSlice returns a slice of the broker as every member sees it, in imp's namespace and without an
// owner. from is what the slice's member exports: only ports of imp that it really exposes are kept
// (KEP-1645, "Service Port": no traffic for a port to a Service that does not expose it). It never carries
// the label kubernetes.io/service-name, by which remote pods would leak into the member's own Service.
func ImportedSlice(broker *discoveryv1.EndpointSlice, imp clusterset.Import, from clusterset.Export) *discoveryv1.EndpointSlice {
	es := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: imp.Service.Namespace,
			Name:      ImportedSliceName(from.Cluster, imp.Service.Name, broker.Name),
			Labels: withManagedBy(map[string]string{
				v1beta1.LabelServiceName:   imp.Service.Name,
				v1beta1.LabelSourceCluster: string(from.Cluster),
			}),
		},
		AddressType: broker.AddressType,
		Endpoints:   portable(broker.Endpoints),
	}
	for _, p := range broker.Ports {
		if exposed(p, imp, from) {
			es.Ports = append(es.Ports, p)
		}
	}
	return es
}

// exposed reports whether the endpoint port stands behind a port of imp that from exposes too.
func exposed(p discoveryv1.EndpointPort, imp clusterset.Import, from clusterset.Export) bool {
	protocol, err := parseProtocol(deref(p.Protocol))
	if err != nil {
		return false
	}
	return slices.ContainsFunc(imp.Ports, func(q clusterset.Port) bool {
		return q.Name == deref(p.Name) && q.Protocol == protocol && from.Exposes(q)
	})
}

// portable returns copies of endpoints without addresses that can never be a backend, and without what
// means something only inside their own cluster.
func portable(endpoints []discoveryv1.Endpoint) []discoveryv1.Endpoint {
	kept := make([]discoveryv1.Endpoint, 0, len(endpoints)) // never nil: the API requires the field
	for i := range endpoints {
		e := endpoints[i].DeepCopy()
		e.Addresses = slices.DeleteFunc(e.Addresses, func(text string) bool {
			a, err := netip.ParseAddr(text)
			return err != nil || !clusterset.IsUnicast(a)
		})
		if len(e.Addresses) == 0 {
			continue
		}
		e.TargetRef, e.DeprecatedTopology = nil, nil
		kept = append(kept, *e)
	}
	return kept
}

// withManagedBy adds the label that tells everybody, the member's own EndpointSlice controllers among
// them, whose slice it is.
func withManagedBy(labels map[string]string) map[string]string {
	labels[discoveryv1.LabelManagedBy] = v1alpha1.ManagedBy
	return labels
}

// SameSlice reports whether two slices say the same, apart from what the API server adds.
func SameSlice(have, want *discoveryv1.EndpointSlice) bool {
	return have.AddressType == want.AddressType &&
		equality.Semantic.DeepEqual(have.Labels, want.Labels) &&
		equality.Semantic.DeepEqual(have.Endpoints, want.Endpoints) &&
		equality.Semantic.DeepEqual(have.Ports, want.Ports) &&
		equality.Semantic.DeepEqual(have.OwnerReferences, want.OwnerReferences)
}
