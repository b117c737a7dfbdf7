package offers

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// Source is a member Service with the objects that hold its addresses. It is not modified.
type Source struct {
	Cluster clusterset.ClusterID
	Service *corev1.Service
	Slices  []*discoveryv1.EndpointSlice // of the Service
	Nodes   []*corev1.Node               // of the cluster; needed for node ports
	// External are the networks of the cluster's own addresses outside of it.
	External []netip.Prefix
	// Lookup returns the addresses of a load balancer's host name, and whether it was resolved.
	Lookup func(host string) (addrs []netip.Addr, known bool)
}

// Offer is the contribution of one member Service to a federated one: its properties and its endpoints.
type Offer struct {
	clusterset.Export // Service is the member Service; the oldest takes precedence

	Groups []Group
	// Unresolved are the host names that were not resolved. Groups for other clusters lack those of them, and Families may be incomplete.
	Unresolved []string
	// Sliceless states that the Service selects pods and has no EndpointSlice, not even an empty one. Its endpoints, and
	// whether its other addresses are ready, are then unknown.
	Sliceless bool
}

// Group is a set of endpoints of one family with the same target ports.
type Group struct {
	Name      string // unique in the offer, and stable
	Host      string // the host name whose addresses these are; empty: none
	Family    clusterset.Family
	Targets   []Target
	Endpoints []discoveryv1.Endpoint // of one address each
}

// Target is the port number at which endpoints serve a port of the member Service.
type Target struct {
	Port   clusterset.Port
	Number int32
}

// New returns the offer of a member Service to other clusters. The error is a permanent fault that the Service's owner has to
// correct.
//
//   - A ClusterIP Service, headless or not, offers its pods and their ports. With external IPs, it offers these and its
//     own ports. The owner of a Service can name any address there (CVE-2021-25740), so all have to lie in External.
//   - A NodePort Service offers the addresses of ready nodes, external ones first, and its node ports; with
//     externalTrafficPolicy Local only those of nodes that have a ready endpoint.
//   - A LoadBalancer Service offers the addresses in its status, with host names resolved, and the ports in its status,
//     or its own ports if there are none.
//   - A Service of virtual machines offers its slices, whatever its type.
//
// Addresses of other kinds than pods are ready when any endpoint of the Service is.
func New(src Source) (Offer, error) {
	o, err := offer(src)
	if err != nil {
		return Offer{}, err
	}
	switch svc := src.Service; {
	case isVM(svc):
		o.Groups = portable(podGroups(src, o.Ports))
	case svc.Spec.Type == corev1.ServiceTypeNodePort:
		o.Groups = nodeGroups(src, o.Export)
	case svc.Spec.Type == corev1.ServiceTypeLoadBalancer:
		o.Groups, o.Unresolved = balancerGroups(src, o.Ports)
	case len(svc.Spec.ExternalIPs) > 0:
		o.Groups, err = externalGroups(src, o.Ports)
	default:
		o.Groups = portable(podGroups(src, o.Ports))
	}
	if err != nil {
		return Offer{}, err
	}
	o.Families = families(o)
	o.Sliceless = len(src.Service.Spec.Selector) > 0 && len(src.Slices) == 0
	return o, nil
}

// IsReady reports whether an endpoint of o accepts new traffic.
func (o Offer) IsReady() bool {
	return slices.ContainsFunc(o.Groups, func(g Group) bool { return slices.ContainsFunc(g.Endpoints, ready) })
}

// Endpoints returns the endpoints of o that serve ports of a protocol: those that accept new traffic, and the others.
func (o Offer) Endpoints(protocol clusterset.Protocol) (accept, others []netip.AddrPort) {
	for _, g := range o.Groups {
		for i := range g.Endpoints {
			a, err := netip.ParseAddr(g.Endpoints[i].Addresses[0])
			if err != nil {
				continue
			}
			into := &others
			if ready(g.Endpoints[i]) {
				into = &accept
			}
			for _, target := range g.Targets {
				if target.Port.Protocol == protocol {
					*into = append(*into, netip.AddrPortFrom(a, uint16(target.Number)))
				}
			}
		}
	}
	return accept, others
}

// Local returns o as the cluster of src itself gets it: with its endpoints unchanged, whatever the type of the Service. Its
// properties stay, so that the federated Service is the same in all clusters.
func (o Offer) Local(src Source) Offer {
	o.Groups = podGroups(src, o.Ports)
	return o
}

// offer returns the properties of a member Service.
func offer(src Source) (Offer, error) {
	svc := src.Service
	e, _, err := mcs.Export(svc, &v1beta1.ServiceExport{ObjectMeta: metav1.ObjectMeta{
		Namespace: svc.Namespace, Name: svc.Name, CreationTimestamp: svc.CreationTimestamp,
	}}, src.Cluster)
	switch {
	case err != nil:
		return Offer{}, err
	case len(e.Ports) == 0:
		return Offer{}, fmt.Errorf("service %s has no spec.ports, and a federated Service needs at least one", e.Service)
	}
	return Offer{Export: e}, nil
}

// families returns the families of an offer: those of the Service, and those of its groups.
func families(o Offer) []clusterset.Family {
	all := o.Families
	for _, g := range o.Groups {
		if !slices.Contains(all, g.Family) {
			all = append(slices.Clip(all), g.Family)
		}
	}
	return all
}

// podGroups returns the slices of the Service unchanged.
func podGroups(src Source, ports []clusterset.Port) []Group {
	var groups []Group
	for _, es := range src.Slices {
		family, ok := familyOf(es.AddressType)
		if !ok {
			continue // host names cannot be endpoints of a Service
		}
		g := Group{Name: es.Name, Family: family, Endpoints: make([]discoveryv1.Endpoint, 0, len(es.Endpoints))}
		for _, p := range es.Ports {
			if i := slices.IndexFunc(ports, func(q clusterset.Port) bool {
				return p.Name != nil && q.Name == *p.Name || p.Name == nil && q.Name == ""
			}); i >= 0 && p.Port != nil {
				g.Targets = append(g.Targets, Target{Port: ports[i], Number: *p.Port})
			}
		}
		for i := range es.Endpoints {
			e := es.Endpoints[i].DeepCopy()
			a, err := netip.ParseAddr(cmp.Or(slices.Concat(e.Addresses, []string{""})...))
			if err != nil || !clusterset.IsUnicast(a) {
				continue
			}
			e.Addresses, e.TargetRef, e.DeprecatedTopology = []string{a.String()}, nil, nil // one counts, as the API says
			g.Endpoints = append(g.Endpoints, *e)
		}
		groups = append(groups, g)
	}
	slices.SortFunc(groups, func(a, b Group) int { return strings.Compare(a.Name, b.Name) })
	return groups
}

// portable removes the fields of endpoints that are meaningful only in their own cluster: nodes of two clusters may have the
// same name, and hints refer to the zones of one cluster.
func portable(groups []Group) []Group {
	for _, g := range groups {
		for i := range g.Endpoints {
			g.Endpoints[i].NodeName, g.Endpoints[i].Hints = nil, nil
		}
	}
	return groups
}

// externalGroups returns the external IPs of the Service.
func externalGroups(src Source, ports []clusterset.Port) ([]Group, error) {
	all := parseAddrs(src.Service.Spec.ExternalIPs)
	var outside []string
	for _, a := range all {
		if !slices.ContainsFunc(src.External, func(p netip.Prefix) bool { return p.Contains(a) }) {
			outside = append(outside, a.String())
		}
	}
	if len(outside) > 0 {
		return nil, fmt.Errorf("spec.externalIPs: %s: not in an external network of cluster %s; an administrator adds it to externalCIDRs of that member in the Federation",
			strings.Join(outside, ", "), src.Cluster)
	}
	return addressGroups("external", all, ownTargets(ports), backed(src)), nil
}

// balancerGroups returns the addresses of the Service's load balancers, grouped by their ports, and the host names that were not resolved.
// Each host name has a group of its own, so that one which is not resolved holds no other address.
func balancerGroups(src Source, ports []clusterset.Port) (groups []Group, unresolved []string) {
	type balancer struct {
		host    string
		targets []Target
		addrs   []netip.Addr
	}
	balancers := map[string]*balancer{}
	for _, in := range src.Service.Status.LoadBalancer.Ingress {
		at := ownTargets(ports)
		if len(in.Ports) > 0 {
			at = slices.DeleteFunc(at, func(t Target) bool {
				return !slices.ContainsFunc(in.Ports, func(p corev1.PortStatus) bool {
					return p.Error == nil && p.Port == t.Number && string(p.Protocol) == t.Port.Protocol.String()
				})
			})
		}
		words, host := []string{"balancer"}, ""
		if in.IP == "" && in.Hostname != "" {
			host = in.Hostname
			words = append(words, host)
		}
		for _, t := range at {
			words = append(words, fmt.Sprintf("%d/%s", t.Number, t.Port.Protocol))
		}
		name := strings.Join(words, " ")
		b := balancers[name]
		if b == nil {
			b = &balancer{host: host, targets: at}
			balancers[name] = b
		}
		if in.IP != "" {
			b.addrs = append(b.addrs, parseAddrs([]string{in.IP})...)
		} else if host != "" && src.Lookup != nil {
			found, known := src.Lookup(host)
			b.addrs = append(b.addrs, found...)
			if !known {
				unresolved = append(unresolved, host)
			}
		}
	}
	for name, b := range balancers {
		for _, g := range addressGroups(name, b.addrs, b.targets, backed(src)) {
			g.Host = b.host
			groups = append(groups, g)
		}
	}
	slices.SortFunc(groups, func(a, b Group) int {
		return cmp.Or(strings.Compare(a.Name, b.Name), cmp.Compare(a.Family, b.Family))
	})
	return groups, unresolved
}

// addressGroups returns addrs as one group for each family.
func addressGroups(name string, addrs []netip.Addr, targets []Target, ready bool) []Group {
	var groups []Group
	for _, f := range []clusterset.Family{clusterset.IPv4, clusterset.IPv6} {
		g := Group{Name: name, Family: f, Targets: targets}
		for _, a := range slices.Compact(slices.SortedFunc(slices.Values(addrs), netip.Addr.Compare)) {
			if clusterset.FamilyOf(a) == f && clusterset.IsUnicast(a) {
				g.Endpoints = append(g.Endpoints, endpoint(a, ready))
			}
		}
		if len(g.Endpoints) > 0 {
			groups = append(groups, g)
		}
	}
	return groups
}

// endpoint returns an endpoint that is not a pod.
func endpoint(a netip.Addr, ready bool) discoveryv1.Endpoint {
	return discoveryv1.Endpoint{
		Addresses:  []string{a.String()},
		Conditions: discoveryv1.EndpointConditions{Ready: new(ready), Serving: new(ready), Terminating: new(false)},
	}
}

// ownTargets returns ports as their own targets.
func ownTargets(ports []clusterset.Port) []Target {
	var targets []Target
	for _, p := range ports {
		targets = append(targets, Target{Port: p, Number: int32(p.Port)})
	}
	return targets
}

// backed reports whether any endpoint of the Service accepts traffic. Kubernetes has no endpoints of a Service without a
// selector and without slices; it is assumed to accept traffic.
func backed(src Source) bool {
	return len(src.Slices) == 0 && len(src.Service.Spec.Selector) == 0 ||
		slices.ContainsFunc(src.Slices, func(es *discoveryv1.EndpointSlice) bool { return slices.ContainsFunc(es.Endpoints, ready) })
}

// ready reports whether an endpoint accepts new traffic.
func ready(e discoveryv1.Endpoint) bool { return e.Conditions.Ready == nil || *e.Conditions.Ready }

func familyOf(t discoveryv1.AddressType) (clusterset.Family, bool) {
	switch t {
	case discoveryv1.AddressTypeIPv4:
		return clusterset.IPv4, true
	case discoveryv1.AddressTypeIPv6:
		return clusterset.IPv6, true
	default:
		return 0, false
	}
}

// parseAddrs returns the addresses among texts.
func parseAddrs(texts []string) []netip.Addr {
	var addrs []netip.Addr
	for _, text := range texts {
		if a, err := netip.ParseAddr(text); err == nil {
			addrs = append(addrs, a.Unmap())
		}
	}
	return addrs
}
