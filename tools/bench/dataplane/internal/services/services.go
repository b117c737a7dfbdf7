// Package services generates the Services of the dataplane benchmark. The first of them has a live backend.
package services

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// The ports of every Service and of its endpoints.
const (
	Port         = 80
	EndpointPort = 8080
)

// Range contains all VIPs. It is the default pool of Isthmus.
var Range = netip.PrefixFrom(netip.AddrFrom4([4]byte{243, 0, 0, 0}), 8)

// Answered is the address of the only live endpoint, which is the only one of Service 0.
var Answered = netip.AddrFrom4([4]byte{10, 98, 3, 2})

// Set is a number of Services and of endpoints of each. Service 0 has TCP and UDP, and one endpoint, so that every answer
// comes from the same address. The others have TCP only.
type Set struct{ Services, Endpoints int }

// VIP returns the address of Service i, which is in Range.
func VIP(i int) netip.Addr {
	if i == 0 {
		return netip.AddrFrom4([4]byte{243, 0, 0, 5})
	}
	return netip.AddrFrom4([4]byte{243, byte(1 + i>>16), byte(i >> 8), byte(i)})
}

// endpoints returns the addresses of Service i's endpoints.
func (s Set) endpoints(i int) []netip.Addr {
	if i == 0 {
		return []netip.Addr{Answered}
	}
	addrs := make([]netip.Addr, s.Endpoints)
	for j := range addrs {
		n := i*s.Endpoints + j
		addrs[j] = netip.AddrFrom4([4]byte{10, byte(64 + n>>16), byte(n >> 8), byte(n)})
	}
	return addrs
}

// protocols returns the protocols of Service i.
func protocols(i int) []clusterset.Protocol {
	if i == 0 {
		return []clusterset.Protocol{clusterset.TCP, clusterset.UDP}
	}
	return []clusterset.Protocol{clusterset.TCP}
}

// Snapshot returns the Services as an agent receives them.
func (s Set) Snapshot() *clusterset.Snapshot {
	snap := &clusterset.Snapshot{Services: make([]clusterset.Service, s.Services)}
	for i := range snap.Services {
		svc := clusterset.Service{Import: clusterset.Import{
			Service: clusterset.ServiceName{Namespace: "bench", Name: fmt.Sprintf("s%05d", i)},
			Type:    clusterset.ClusterSetIP,
			IPs:     []netip.Addr{VIP(i)},
		}}
		slice := clusterset.Slice{Name: svc.Service.Name, Cluster: "a", Family: clusterset.IPv4}
		for _, a := range s.endpoints(i) {
			slice.Endpoints = append(slice.Endpoints, ready(a))
		}
		for _, p := range protocols(i) {
			svc.Ports = append(svc.Ports, clusterset.Port{Name: strings.ToLower(p.String()), Protocol: p, Port: Port})
			slice.Ports = append(slice.Ports, clusterset.EndpointPort{Name: strings.ToLower(p.String()), Protocol: p, Port: EndpointPort})
		}
		svc.Slices = []clusterset.Slice{slice}
		snap.Services[i] = svc
	}
	return snap
}

// Move returns snap with the last endpoint of Service i moved to the n-th address of a range that no other endpoint uses. The
// unchanged parts are shared with snap.
func Move(snap *clusterset.Snapshot, i, n int) *clusterset.Snapshot {
	moved := &clusterset.Snapshot{Services: slices.Clone(snap.Services)}
	svc := &moved.Services[i]
	svc.Slices = slices.Clone(svc.Slices)
	slice := &svc.Slices[0]
	slice.Endpoints = slices.Clone(slice.Endpoints)
	slice.Endpoints[len(slice.Endpoints)-1] = ready(netip.AddrFrom4([4]byte{10, 200, byte(n >> 8), byte(n)}))
	return moved
}

func ready(a netip.Addr) clusterset.Endpoint {
	return clusterset.Endpoint{Addrs: []netip.Addr{a}, Ready: true, Serving: true}
}
