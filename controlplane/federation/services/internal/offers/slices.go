package offers

import (
	"hash/fnv"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// AnnotationSource on a slice of a federated Service names the member Service that it leads to, as NAMESPACE/NAME in the
// cluster that another annotation of the slice names.
const AnnotationSource = "federation.isthmus.dev/source"

// AnnotationHost on such a slice is the host name of a load balancer whose addresses are the slice's endpoints.
const AnnotationHost = "federation.isthmus.dev/host"

// perSlice limits the endpoints of a slice, as in Kubernetes' own controllers.
const perSlice = 100

// Slices returns the EndpointSlices of the federated Service name that lead to the offer o. They have no owner and are
// sorted by name. Their content depends only on o and the ports of fed, so every leader computes the same slices, and one
// more endpoint changes one of them or splits it in two.
func (fed Federated) Slices(name clusterset.ServiceName, o Offer) []*discoveryv1.EndpointSlice {
	var all []*discoveryv1.EndpointSlice
	for _, g := range o.Groups {
		ports := fed.endpointPorts(g.Targets)
		if len(ports) == 0 {
			continue // all ports lost their conflicts
		}
		addressType := discoveryv1.AddressTypeIPv4
		if g.Family == clusterset.IPv6 {
			addressType = discoveryv1.AddressTypeIPv6
		}
		for part, endpoints := range split(g.Endpoints, 0, "") {
			annotations := map[string]string{v1alpha1.MarkCluster: string(o.Cluster), AnnotationSource: o.Service.String()}
			if g.Host != "" {
				annotations[AnnotationHost] = g.Host
			}
			source := o.Service.String() + " " + g.Name + " " + string(addressType) + " " + part
			all = append(all, &discoveryv1.EndpointSlice{
				ObjectMeta: metav1.ObjectMeta{
					Namespace: name.Namespace,
					Name:      mcs.ImportedSliceName(o.Cluster, name.Name, source),
					Labels: map[string]string{
						discoveryv1.LabelServiceName: name.Name,
						discoveryv1.LabelManagedBy:   v1alpha1.ManagedBy,
						v1alpha1.MarkCluster:         string(o.Cluster),
					},
					Annotations: annotations,
				},
				AddressType: addressType,
				Endpoints:   endpoints,
				Ports:       ports,
			})
		}
	}
	slices.SortFunc(all, func(a, b *discoveryv1.EndpointSlice) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// endpointPorts returns targets under the names of fed's ports, in the order of these.
func (fed Federated) endpointPorts(targets []Target) []discoveryv1.EndpointPort {
	var ports []discoveryv1.EndpointPort
	for _, p := range fed.Ports {
		for _, t := range targets {
			if numberOf(t.Port) != numberOf(p) {
				continue
			}
			q := discoveryv1.EndpointPort{Name: &p.Name, Protocol: new(corev1.Protocol(p.Protocol.String())), Port: &t.Number}
			if p.AppProtocol != "" {
				q.AppProtocol = &p.AppProtocol
			}
			ports = append(ports, q)
		}
	}
	return ports
}

// split returns endpoints in parts of at most perSlice, each sorted. While there are too many, a bit of the hash of each
// address selects its half; the bits so far are the name of a part.
func split(endpoints []discoveryv1.Endpoint, depth int, path string) map[string][]discoveryv1.Endpoint {
	const bits = 64
	if len(endpoints) == 0 {
		return nil
	}
	if len(endpoints) <= perSlice || depth == bits {
		sorted := slices.Clone(endpoints)
		slices.SortStableFunc(sorted, byAddress)
		return map[string][]discoveryv1.Endpoint{path: sorted}
	}
	var halves [2][]discoveryv1.Endpoint
	for _, e := range endpoints {
		bit := hash(e.Addresses[0]) >> depth & 1
		halves[bit] = append(halves[bit], e)
	}
	all := split(halves[0], depth+1, path+"0")
	if all == nil {
		all = map[string][]discoveryv1.Endpoint{}
	}
	maps.Copy(all, split(halves[1], depth+1, path+"1"))
	return all
}

func hash(address string) uint64 {
	h := fnv.New64a()
	h.Write([]byte(address))
	return h.Sum64()
}
