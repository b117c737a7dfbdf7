package offers

import (
	"slices"

	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// elsewhere is a zone that no node has. Endpoints of other clusters are for clients there: kube-proxy uses hints only if every ready endpoint
// has one, and uses all endpoints if none is for its node's zone.
const elsewhere = "elsewhere.federation.isthmus.dev"

// maxZones is how many zones Kubernetes allows in the hints of an endpoint.
const maxZones = 8

// AsksForNear reports whether a member Service of a cluster asks for near endpoints and has a ready one. With spec.trafficDistribution,
// Kubernetes gives its endpoints hints (KEP-4444).
func AsksForNear(all []Offer, cluster clusterset.ClusterID) (asks bool) {
	each(all, func(of clusterset.ClusterID, e *discoveryv1.Endpoint) {
		asks = asks || of == cluster && ready(*e) && e.Hints != nil && len(e.Hints.ForZones) > 0
	})
	return asks
}

// PreferLocal makes kube-proxy of a cluster that [AsksForNear] prefer the cluster's own endpoints among all, while one of them is ready.
// zones are those of the cluster's nodes; clients in a zone without a ready endpoint are led to all of the cluster's own, not to other
// clusters. It changes the hints of all in place.
func PreferLocal(all []Offer, cluster clusterset.ClusterID, zones []string) {
	uncovered := slices.Clone(zones)
	each(all, func(of clusterset.ClusterID, e *discoveryv1.Endpoint) {
		if of == cluster && ready(*e) && e.Hints != nil {
			uncovered = slices.DeleteFunc(uncovered, func(zone string) bool { return slices.Contains(e.Hints.ForZones, discoveryv1.ForZone{Name: zone}) })
		}
	})
	each(all, func(of clusterset.ClusterID, e *discoveryv1.Endpoint) {
		switch {
		case of != cluster:
			e.Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: elsewhere}}}
		case e.Hints == nil || len(e.Hints.ForZones) == 0: // of another member Service, which does not ask
			e.Hints = forZones(nil, zones)
		default:
			e.Hints = forZones(e.Hints, uncovered)
		}
	})
}

// forZones returns hints with more zones, as far as they have room.
func forZones(hints *discoveryv1.EndpointHints, zones []string) *discoveryv1.EndpointHints {
	result := &discoveryv1.EndpointHints{}
	if hints != nil {
		result = hints.DeepCopy()
	}
	for _, zone := range zones {
		if z := (discoveryv1.ForZone{Name: zone}); len(result.ForZones) < maxZones && !slices.Contains(result.ForZones, z) {
			result.ForZones = append(result.ForZones, z)
		}
	}
	return result
}

func each(all []Offer, do func(clusterset.ClusterID, *discoveryv1.Endpoint)) {
	for i := range all {
		for _, g := range all[i].Groups {
			for j := range g.Endpoints {
				do(all[i].Cluster, &g.Endpoints[j])
			}
		}
	}
}
