package lb

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Address is where a transport is reached: of a frontend (VIP and Service port) or of a backend (pod
// and target port). IPv4 is never in its IPv6-mapped form.
type Address struct {
	AddrPort netip.AddrPort
	Protocol clusterset.Protocol
}

// String returns "243.0.0.5:80/TCP".
func (a Address) String() string { return fmt.Sprintf("%s/%s", a.AddrPort, a.Protocol) }

// Compare orders by address, port and protocol, IPv4 first.
func (a Address) Compare(b Address) int {
	return cmp.Or(a.AddrPort.Compare(b.AddrPort), cmp.Compare(a.Protocol, b.Protocol))
}

// FrontendID names a frontend's slots. 0 never occurs.
type FrontendID uint32

// BackendID names a backend for as long as it exists. 0 never occurs.
type BackendID uint32

// ServiceID names a Service for as long as it has frontends, in counters and events. 0 is no Service.
type ServiceID uint32

// ClusterIndex names a member for as long as it has backends, in counters and events. 0 is no member.
type ClusterIndex uint16

// MaxClusters is how many members can have an index, index 0 included.
const MaxClusters = 256

// Frontend is what clients of one VIP, port and protocol meet: the slots 0 to Count-1 of ID. Count 0
// refuses them.
type Frontend struct {
	ID       FrontendID
	Count    uint32
	Service  ServiceID
	Affinity uint32 // for so many seconds a client keeps its backend; 0 without session affinity
	Maglev   bool   // the slots are a Maglev table, looked up by the client's hash; else one is taken at random
}

// Backend is a place that serves clients.
type Backend struct {
	Address

	Cluster  ClusterIndex
	Draining bool // it keeps the clients it has and gets no new ones
}

// Slot is one place of a frontend's table.
type Slot struct {
	Frontend FrontendID
	Index    uint32
}

// Compare orders slots by frontend, then by index.
func (s Slot) Compare(o Slot) int {
	return cmp.Or(cmp.Compare(s.Frontend, o.Frontend), cmp.Compare(s.Index, o.Index))
}

// State is the content of the maps, entry by entry: also of maps that were left half written.
type State struct {
	Frontends map[Address]Frontend
	Slots     map[Slot]BackendID
	Backends  map[BackendID]Backend
	Services  map[ServiceID]clusterset.ServiceName
	Clusters  map[ClusterIndex]clusterset.ClusterID
	// Ranges are where an address without a frontend is refused.
	Ranges map[netip.Prefix]bool
}

// NewState returns a state with nothing in it, ready to be written to.
func NewState() State {
	return State{
		Frontends: map[Address]Frontend{}, Slots: map[Slot]BackendID{}, Backends: map[BackendID]Backend{},
		Services: map[ServiceID]clusterset.ServiceName{}, Clusters: map[ClusterIndex]clusterset.ClusterID{}, Ranges: map[netip.Prefix]bool{},
	}
}

// Clone returns a copy that shares nothing with s.
func (s State) Clone() State {
	c := NewState()
	maps.Copy(c.Frontends, s.Frontends)
	maps.Copy(c.Slots, s.Slots)
	maps.Copy(c.Backends, s.Backends)
	maps.Copy(c.Services, s.Services)
	maps.Copy(c.Clusters, s.Clusters)
	maps.Copy(c.Ranges, s.Ranges)
	return c
}

// Apply carries the writes of p out on s.
func (s State) Apply(p Plan) {
	for _, w := range p.PutServices {
		s.Services[w.ID] = w.Name
	}
	for _, w := range p.PutClusters {
		s.Clusters[w.Index] = w.ID
	}
	for _, w := range p.PutBackends {
		s.Backends[w.ID] = w.Backend
	}
	for _, w := range p.PutSlots {
		s.Slots[w.Slot] = w.Backend
	}
	for _, w := range p.PutFrontends {
		s.Frontends[w.Address] = w.Frontend
	}
	for _, r := range p.PutRanges {
		s.Ranges[r] = true
	}
	remove(s.Ranges, p.DeleteRanges)
	remove(s.Frontends, p.DeleteFrontends)
	remove(s.Slots, p.DeleteSlots)
	remove(s.Backends, p.DeleteBackends)
	remove(s.Services, p.DeleteServices)
	remove(s.Clusters, p.DeleteClusters)
}

func remove[K comparable, V any](m map[K]V, gone []K) {
	for _, k := range gone {
		delete(m, k)
	}
}

// table returns the backends a client of fe can meet, in slot order. A slot or backend that is missing
// is the zero Address. A count beyond all slots there are, which only a foreign hand can have written,
// is cut to these.
func (s State) table(fe Frontend) []Address {
	t := make([]Address, min(int(fe.Count), len(s.Slots)))
	for i := range t {
		if id, ok := s.Slots[Slot{fe.ID, uint32(i)}]; ok {
			t[i] = s.Backends[id].Address
		}
	}
	return t
}
