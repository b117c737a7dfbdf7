package offers

import (
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// nodeGroups returns the addresses of the nodes that serve the node ports of a Service, in the families of the Service.
func nodeGroups(src Source, e clusterset.Export) []Group {
	var targets []Target
	for i, p := range src.Service.Spec.Ports {
		if p.NodePort != 0 {
			targets = append(targets, Target{Port: e.Ports[i], Number: p.NodePort})
		}
	}
	local := src.Service.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
	serving := readyNodes(src.Slices)
	var groups []Group
	for _, f := range e.Families {
		g := Group{Name: "nodes", Family: f, Targets: targets}
		for _, node := range src.Nodes {
			a, ok := nodeAddr(node, f)
			if !ok || !NodeReady(node) || local && !serving[node.Name] {
				continue
			}
			at := endpoint(a, backed(src))
			if zone := node.Labels[corev1.LabelTopologyZone]; zone != "" {
				at.Zone = &zone
			}
			g.Endpoints = append(g.Endpoints, at)
		}
		slices.SortFunc(g.Endpoints, byAddress)
		g.Endpoints = slices.CompactFunc(g.Endpoints, func(a, b discoveryv1.Endpoint) bool { return byAddress(a, b) == 0 })
		if len(g.Endpoints) > 0 {
			groups = append(groups, g)
		}
	}
	return groups
}

// NodeReady reports whether a node is ready.
func NodeReady(node *corev1.Node) bool {
	return node.DeletionTimestamp == nil && slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

// nodeAddr returns the first external address of a node in a family, or else the first internal one.
func nodeAddr(node *corev1.Node, family clusterset.Family) (netip.Addr, bool) {
	for _, t := range []corev1.NodeAddressType{corev1.NodeExternalIP, corev1.NodeInternalIP} {
		for _, at := range node.Status.Addresses {
			a, err := netip.ParseAddr(at.Address)
			if at.Type == t && err == nil && clusterset.FamilyOf(a) == family && clusterset.IsUnicast(a) {
				return a.Unmap(), true
			}
		}
	}
	return netip.Addr{}, false
}

// readyNodes returns the names of the nodes with a ready endpoint.
func readyNodes(all []*discoveryv1.EndpointSlice) map[string]bool {
	names := map[string]bool{}
	for _, es := range all {
		for _, e := range es.Endpoints {
			if e.NodeName != nil && ready(e) {
				names[*e.NodeName] = true
			}
		}
	}
	return names
}

func byAddress(a, b discoveryv1.Endpoint) int { return strings.Compare(a.Addresses[0], b.Addresses[0]) }
