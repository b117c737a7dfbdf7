package lb

import (
	"cmp"
	"fmt"
	"net/netip"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Address is the transport address of a frontend (VIP and Service port) or of a backend (pod and target port).
// IPv4 is never in its IPv6-mapped form.
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

// FrontendID identifies a frontend's slots. 0 never occurs.
type FrontendID uint32

// BackendID identifies a backend for as long as it exists. 0 never occurs.
type BackendID uint32

// ServiceID identifies a Service in counters and events for as long as it has frontends. 0 is no Service.
type ServiceID uint32

// ClusterIndex identifies a member cluster in counters and events for as long as it has backends. 0 is no member.
type ClusterIndex uint16

// MaxClusters is how many members can have an index, index 0 included.
const MaxClusters = 256

// Frontend serves the clients of one VIP, port and protocol from the slots 0 to Count-1 of ID. With Count 0 it
// refuses them.
type Frontend struct {
	ID       FrontendID
	Count    uint32
	Service  ServiceID
	Affinity uint32 // seconds for which a client keeps its backend; 0 without session affinity
	Maglev   bool   // the slots are a Maglev table, indexed by a hash of the client; else a client takes a random slot
}

// Backend is one endpoint that serves clients.
type Backend struct {
	Address

	Cluster  ClusterIndex
	Draining bool // it keeps its clients and gets no new ones
}

// Slot is one position in a frontend's table of backends.
type Slot struct {
	Frontend FrontendID
	Index    uint32
}

// Compare orders slots by frontend, then by index.
func (s Slot) Compare(o Slot) int {
	return cmp.Or(cmp.Compare(s.Frontend, o.Frontend), cmp.Compare(s.Index, o.Index))
}
