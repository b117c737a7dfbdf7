package mcs

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// The limits of RFC 1035, section 2.3.4, in characters of the textual form without the trailing dot.
const (
	maxName  = 253
	maxLabel = 63
)

// Unnamed returns a phrase for each part of an export whose DNS name would be too long, sorted: name servers omit those names.
// endpoints are those of a headless Service, each of which has a DNS name.
func Unnamed(e clusterset.Export, endpoints []*discoveryv1.EndpointSlice) []string {
	var unnamed []string
	for _, p := range e.Ports {
		if len("_"+p.Name) > maxLabel {
			unnamed = append(unnamed, fmt.Sprintf("port %s, which has more than %d characters with its leading underscore", p.Name, maxLabel))
		}
	}
	for _, es := range endpoints {
		for i := range es.Endpoints {
			name := fmt.Sprintf("%s.%s.%s.%s.svc.clusterset.local", hostOf(&es.Endpoints[i]), e.Cluster, e.Service.Name, e.Service.Namespace)
			if len(name) > maxName {
				unnamed = append(unnamed, fmt.Sprintf("endpoint %s, which would have %d characters of at most %d", name, len(name), maxName))
			}
		}
	}
	slices.Sort(unnamed)
	return slices.Compact(unnamed)
}

// hostOf returns the longest host label of an endpoint.
func hostOf(e *discoveryv1.Endpoint) string {
	if host := deref(e.Hostname); host != "" {
		return host
	}
	host := ""
	if len(e.Addresses) > 0 {
		if a, err := netip.ParseAddr(e.Addresses[0]); err == nil {
			host = strings.NewReplacer(".", "-", ":", "-").Replace(a.String())
		}
	}
	if pod := podOf(e); len(pod) > len(host) && len(pod) <= maxLabel && !strings.Contains(pod, ".") {
		return pod
	}
	return host
}
