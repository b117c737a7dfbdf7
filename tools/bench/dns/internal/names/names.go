// Package names defines the Services that the benchmark of DNS serves, and the queries.
package names

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Set is how many Services with a ClusterSetIP there are, 2^20 at most, each with one port. Beside them there is
// Wide, if it has endpoints.
type Set struct {
	Services  int
	Endpoints int // of Wide
}

// Wide is a headless Service with many endpoints, as Service 0 it is in namespace 0.
var Wide = clusterset.ServiceName{Namespace: namespace(0), Name: "wide"}

// namespaces is over how many namespaces the Services are spread.
const namespaces = 1000

func namespace(i int) string { return fmt.Sprintf("ns-%03d", i%namespaces) }

// Namespaces returns those of all Services.
func (s Set) Namespaces() []string {
	var all []string
	for i := range min(s.Services, namespaces) {
		all = append(all, namespace(i))
	}
	return all
}

// Name returns the name of Service i.
func Name(i int) clusterset.ServiceName {
	return clusterset.ServiceName{Namespace: namespace(i), Name: fmt.Sprintf("service-%06d", i)}
}

// Address returns the ClusterSetIP of Service i after it has changed so many times.
func Address(i, changes int) netip.Addr {
	return netip.AddrFrom4([4]byte{243, byte(i>>16) | byte(changes<<4), byte(i >> 8), byte(i)})
}

// Service returns Service i after it has changed so many times.
func Service(i, changes int) clusterset.Service {
	return clusterset.Service{Import: clusterset.Import{
		Service: Name(i), Type: clusterset.ClusterSetIP, IPs: []netip.Addr{Address(i, changes)},
		Families: []clusterset.Family{clusterset.IPv4}, Ports: []clusterset.Port{{Protocol: clusterset.TCP, Port: 80}},
	}}
}

// wide returns Wide with n endpoints.
func wide(n int) clusterset.Service {
	slice := clusterset.Slice{
		Name: "wide", Cluster: "a", Family: clusterset.IPv4,
		Ports: []clusterset.EndpointPort{{Name: "db", Protocol: clusterset.TCP, Port: 5432}},
	}
	for i := range n {
		slice.Endpoints = append(slice.Endpoints, clusterset.Endpoint{
			Addrs: []netip.Addr{netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})}, Ready: true, Serving: true,
		})
	}
	return clusterset.Service{
		Import: clusterset.Import{
			Service: Wide, Type: clusterset.Headless, Families: []clusterset.Family{clusterset.IPv4},
			Ports: []clusterset.Port{{Name: "db", Protocol: clusterset.TCP, Port: 5432}},
		},
		Slices: []clusterset.Slice{slice},
	}
}

// Snapshot returns the Services as an agent gets them.
func (s Set) Snapshot() *clusterset.Snapshot {
	snap := &clusterset.Snapshot{Services: make([]clusterset.Service, 0, s.Services+1)}
	for i := range s.Services {
		snap.Services = append(snap.Services, Service(i, 0))
	}
	if s.Endpoints > 0 {
		snap.Services = append(snap.Services, wide(s.Endpoints))
	}
	slices.SortFunc(snap.Services, func(a, b clusterset.Service) int { return a.Service.Compare(b.Service) })
	return snap
}

// Changed returns snap with Service i changed so many times. Only that Service is not shared.
func Changed(snap *clusterset.Snapshot, i, changes int) *clusterset.Snapshot {
	next := &clusterset.Snapshot{Services: slices.Clone(snap.Services)}
	name := Name(i)
	at, ok := slices.BinarySearchFunc(next.Services, name, func(s clusterset.Service, n clusterset.ServiceName) int { return s.Service.Compare(n) })
	if ok {
		next.Services[at] = Service(i, changes)
	}
	return next
}

// The types and codes of questions and answers here.
const (
	TypeA    = 1
	TypeAAAA = 28

	NoError  = 0
	NXDomain = 3
)

// Question is a message with the ID 0 and what its answer must be.
type Question struct {
	Wire    []byte
	Rcode   byte
	Answers uint16 // how many at least
}

// Ask returns the question for a name in the ClusterSet. With EDNS it says that 1232 bytes are welcome.
func Ask(n clusterset.ServiceName, qtype uint16, edns bool) []byte {
	b := []byte{0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0} // RD, one question: RFC 1035, section 4.1.1
	for _, label := range []string{n.Name, n.Namespace, "svc", "clusterset", "local"} {
		b = append(append(b, byte(len(label))), label...)
	}
	b = append(b, 0)
	b = binary.BigEndian.AppendUint16(b, qtype)
	b = append(b, 0, 1)
	if edns {
		b[11] = 1
		b = append(b, 0, 0, 41, 1232>>8, 1232&0xff, 0, 0, 0, 0, 0, 0) // RFC 6891, section 6.1.2
	}
	return b
}

// Plain are questions for the address of each Service, as most resolvers of pods ask: without EDNS.
func (s Set) Plain() []Question {
	all := make([]Question, s.Services)
	for i := range all {
		all[i] = Question{Ask(Name(i), TypeA, false), NoError, 1}
	}
	return shuffled(all)
}

// Mix is what pods ask that look names up in both families, with EDNS, half of them names that are not there.
func (s Set) Mix() []Question {
	var all []Question
	for i := range s.Services {
		n := Name(i)
		none := clusterset.ServiceName{Namespace: n.Namespace, Name: strings.Replace(n.Name, "service", "nothing", 1)}
		all = append(all,
			Question{Ask(n, TypeA, true), NoError, 1}, Question{Ask(n, TypeAAAA, true), NoError, 0},
			Question{Ask(none, TypeA, true), NXDomain, 0}, Question{Ask(none, TypeAAAA, true), NXDomain, 0})
	}
	return shuffled(all)
}

// Large is the question for all endpoints of Wide, with EDNS, whose answer has so many records at least.
func Large(answers int) []Question {
	return []Question{{Ask(Wide, TypeA, true), NoError, uint16(answers)}}
}

// shuffled orders questions so that neighbours have nothing in common, the same each time.
func shuffled(all []Question) []Question {
	const stride = 7919 // a prime: with any number of questions but its multiples, all come
	mixed := make([]Question, len(all))
	for i := range all {
		mixed[i] = all[i*stride%len(all)]
	}
	return mixed
}
