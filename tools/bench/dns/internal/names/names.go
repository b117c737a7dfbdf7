// Package names generates the Services of the DNS benchmark, and the questions about them.
package names

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Set is a number of Services with a ClusterSetIP, at most 2^20, each with one port. With Endpoints it also contains Wide.
type Set struct {
	Services  int
	Endpoints int // of Wide
}

// Wide is a headless Service with many endpoints. Like Service 0 it is in namespace 0.
var Wide = clusterset.ServiceName{Namespace: namespace(0), Name: "wide"}

// namespaces is the number of namespaces that the Services are spread over.
const namespaces = 1000

func namespace(i int) string { return fmt.Sprintf("ns-%03d", i%namespaces) }

// Namespaces returns the namespaces of all Services.
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

// Address returns the ClusterSetIP of Service i after the given number of changes.
func Address(i, changes int) netip.Addr {
	return netip.AddrFrom4([4]byte{243, byte(i>>16) | byte(changes<<4), byte(i >> 8), byte(i)})
}

// Service returns Service i after the given number of changes.
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

// Snapshot returns the Services as an agent receives them.
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

// Changed returns snap with Service i after the given number of changes. All other Services are shared with snap.
func Changed(snap *clusterset.Snapshot, i, changes int) *clusterset.Snapshot {
	next := &clusterset.Snapshot{Services: slices.Clone(snap.Services)}
	name := Name(i)
	at, ok := slices.BinarySearchFunc(next.Services, name, func(s clusterset.Service, n clusterset.ServiceName) int { return s.Service.Compare(n) })
	if ok {
		next.Services[at] = Service(i, changes)
	}
	return next
}

// The record types and response codes in use.
const (
	TypeA    = 1
	TypeAAAA = 28

	NoError  = 0
	NXDomain = 3
)

// Question is a message with ID 0, and the expected answer.
type Question struct {
	Wire    []byte
	Rcode   byte
	Answers uint16 // at least
}

// Ask returns the question for a name in the ClusterSet. With EDNS it advertises a UDP payload size of 1232 bytes.
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

// Plain returns questions for the address of each Service without EDNS, as most resolvers in pods send them.
func (s Set) Plain() []Question {
	all := make([]Question, s.Services)
	for i := range all {
		all[i] = Question{Ask(Name(i), TypeA, false), NoError, 1}
	}
	return shuffled(all)
}

// Mix returns the questions of pods that look up names in both families with EDNS. Half of the names do not exist.
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

// Large returns the question for all endpoints of Wide with EDNS. Its answer has at least the given number of records.
func Large(answers int) []Question {
	return []Question{{Ask(Wide, TypeA, true), NoError, uint16(answers)}}
}

// shuffled spreads neighbouring questions, in the same order on each call.
func shuffled(all []Question) []Question {
	const stride = 7919 // a prime: it visits all questions unless their number is a multiple
	mixed := make([]Question, len(all))
	for i := range all {
		mixed[i] = all[i*stride%len(all)]
	}
	return mixed
}
