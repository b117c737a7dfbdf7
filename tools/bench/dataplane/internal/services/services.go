// Package services defines what the benchmark of the dataplane serves: as many Services as asked for,
// the first of which is answered.
package services

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// The ports of every Service and of its endpoints.
const (
	Port         = 80
	EndpointPort = 8080
)

// Range is where all VIPs are: the one that Isthmus gives out by default.
var Range = netip.PrefixFrom(netip.AddrFrom4([4]byte{243, 0, 0, 0}), 8)

// Answered is the address of the one endpoint that exists, the only one of Service 0.
var Answered = netip.AddrFrom4([4]byte{10, 98, 3, 2})

// Set is how many Services there are, and endpoints of each. Service 0 is the one that is answered: it speaks
// TCP and UDP and has one endpoint, so that an answer always comes from the same address. The others speak
// TCP alone.
type Set struct{ Services, Endpoints int }

// VIP returns the address of Service i. It lies in Range.
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

// protocols returns what Service i speaks.
func protocols(i int) []clusterset.Protocol {
	if i == 0 {
		return []clusterset.Protocol{clusterset.TCP, clusterset.UDP}
	}
	return []clusterset.Protocol{clusterset.TCP}
}

// Snapshot returns the Services as an agent gets them.
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
			svc.Ports = append(svc.Ports, clusterset.Port{Name: p.String(), Protocol: p, Port: Port})
			slice.Ports = append(slice.Ports, clusterset.EndpointPort{Name: p.String(), Protocol: p, Port: EndpointPort})
		}
		svc.Slices = []clusterset.Slice{slice}
		snap.Services[i] = svc
	}
	return snap
}

// Move returns snap with the last endpoint of Service i at another address, the n-th of a range that nobody
// else uses. It shares with snap what is the same.
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
