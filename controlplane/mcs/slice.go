package mcs

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	discoveryv1 "k8s.io/api/discovery/v1"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Slice parses an imported EndpointSlice and returns its Service: the one in its namespace that its label
// multicluster.kubernetes.io/service-name names. The error names the object and the field. Missing conditions have the
// defaults of the API: ready, serving like ready, not terminating.
//
// It drops addresses that can never be a backend (loopback, link-local and the like), endpoints without another address,
// ports without a number, and regions whose annotation is not valid.
func Slice(es *discoveryv1.EndpointSlice) (clusterset.Slice, clusterset.ServiceName, error) {
	name := clusterset.ServiceName{Namespace: es.Namespace, Name: es.Labels[v1beta1.LabelServiceName]}
	s := clusterset.Slice{Name: es.Name, Cluster: clusterset.ClusterID(es.Labels[v1beta1.LabelSourceCluster])}
	var errs []error
	if name.Name == "" {
		errs = append(errs, fmt.Errorf("label %s is missing", v1beta1.LabelServiceName))
	}
	if err := s.Cluster.Validate(); err != nil {
		errs = append(errs, fmt.Errorf("label %s: %w", v1beta1.LabelSourceCluster, err))
	}
	var err error
	if s.Family, err = parseAddressType(es.AddressType); err != nil {
		errs = append(errs, err)
	}
	if s.Ports, err = parseEndpointPorts(es.Ports); err != nil {
		errs = append(errs, err)
	}
	s.Endpoints = make([]clusterset.Endpoint, 0, len(es.Endpoints))
	addrs := make([]netip.Addr, 0, len(es.Endpoints)) // of all endpoints, mostly one each
	for i := range es.Endpoints {
		var e clusterset.Endpoint
		var err error
		e, addrs, err = parseEndpoint(&es.Endpoints[i], s.Family, addrs)
		if err != nil {
			errs = append(errs, fmt.Errorf("endpoints[%d].%w", i, err))
			continue
		}
		if len(e.Addrs) > 0 {
			s.Endpoints = append(s.Endpoints, e)
		}
	}
	s.Regions = regionsOf(es)
	if len(errs) > 0 {
		return clusterset.Slice{}, clusterset.ServiceName{}, fmt.Errorf("endpoint slice %s/%s: %w", es.Namespace, es.Name, errors.Join(errs...))
	}
	slices.SortStableFunc(s.Endpoints, func(a, b clusterset.Endpoint) int { return a.Addrs[0].Compare(b.Addrs[0]) })
	return s, name, nil
}

func parseAddressType(t discoveryv1.AddressType) (clusterset.Family, error) {
	switch t {
	case discoveryv1.AddressTypeIPv4:
		return clusterset.IPv4, nil
	case discoveryv1.AddressTypeIPv6:
		return clusterset.IPv6, nil
	default:
		return 0, fmt.Errorf("addressType: %q is neither IPv4 nor IPv6", string(t))
	}
}

// parseEndpointPorts returns the ports that have a number, sorted.
func parseEndpointPorts(ports []discoveryv1.EndpointPort) ([]clusterset.EndpointPort, error) {
	var parsed []clusterset.EndpointPort
	for i, p := range ports {
		if p.Port == nil {
			continue
		}
		q, err := parsePort(deref(p.Name), deref(p.Protocol), nil, *p.Port)
		if err != nil {
			return nil, fmt.Errorf("ports[%d]: %w", i, err)
		}
		parsed = append(parsed, clusterset.EndpointPort{Name: q.Name, Protocol: q.Protocol, Port: q.Port})
	}
	slices.SortFunc(parsed, func(a, b clusterset.EndpointPort) int {
		return cmp.Or(strings.Compare(a.Name, b.Name), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Port, b.Port))
	})
	return parsed, nil
}

// parseEndpoint parses an endpoint; without addresses if none of them can be a backend. It appends its addresses to addrs,
// which backs them.
func parseEndpoint(e *discoveryv1.Endpoint, family clusterset.Family, addrs []netip.Addr) (clusterset.Endpoint, []netip.Addr, error) {
	from := len(addrs)
	ready := e.Conditions.Ready == nil || *e.Conditions.Ready
	parsed := clusterset.Endpoint{
		Ready:       ready,
		Serving:     ready,
		Terminating: deref(e.Conditions.Terminating),
		Hostname:    deref(e.Hostname),
		Pod:         podOf(e),
		NodeName:    clusterset.Share(deref(e.NodeName)),
		Zone:        clusterset.Share(deref(e.Zone)),
	}
	if e.Conditions.Serving != nil {
		parsed.Serving = *e.Conditions.Serving
	}
	for i, text := range e.Addresses {
		a, err := netip.ParseAddr(text)
		if err != nil {
			return clusterset.Endpoint{}, addrs, fmt.Errorf("addresses[%d]: %q is not an IP address", i, text)
		}
		a = a.Unmap()
		if !clusterset.IsUnicast(a) {
			continue
		}
		if clusterset.FamilyOf(a) != family {
			return clusterset.Endpoint{}, addrs, fmt.Errorf("addresses[%d]: %s is not %s", i, a, family)
		}
		addrs = append(addrs, a)
	}
	parsed.Addrs = slices.Clip(addrs[from:])
	return parsed, addrs, nil
}

// deref returns *p, or the zero value if p is nil.
func deref[T ~string | ~bool](p *T) T {
	if p == nil {
		var zero T
		return zero
	}
	return *p
}
