package clusterset

import (
	"net/netip"
	"unique"
)

// Snapshot is the complete, sorted and immutable view of the ClusterSet that a node works with. A receiver may keep it and
// must not change it. Equal objects give equal Snapshots.
type Snapshot struct {
	Services []Service // by Import.Service
}

// Service is one import and the endpoints behind it.
type Service struct {
	Import
	Slices []Slice // by Cluster, then by Name
}

// Slice is a group of endpoints of one source member and one address family that share their ports
// (the fields that Isthmus uses of a discovery.k8s.io/v1 EndpointSlice).
type Slice struct {
	Name      string
	Cluster   ClusterID
	Family    Family
	Ports     []EndpointPort // by Name, then Protocol
	Endpoints []Endpoint     // by first address
	Regions   Regions        // of the zones of Endpoints, as far as the member states them
}

// EndpointPort is a port on which the pods of a slice listen. It belongs to the Service port of the same name and
// protocol.
type EndpointPort struct {
	Name     string
	Protocol Protocol
	Port     uint16 // the target port
}

// Endpoint is one pod, or another backend of a Service without a selector.
type Endpoint struct {
	Addrs       []netip.Addr // one or more of the slice's family; the first one receives traffic
	Ready       bool         // it may receive new connections
	Serving     bool         // it answers, ready or terminating
	Terminating bool
	Hostname    string
	Pod         string // the name of its pod, for DNS, if it has no hostname
	NodeName    Shared // unique only within the slice's Cluster
	Zone        Shared
}

// Shared is a string that many values have in common, such as a node name: equal ones are stored once. The zero value is
// the empty string.
type Shared struct{ text unique.Handle[string] }

// Share returns the shared copy of s.
func Share(s string) Shared {
	if s == "" {
		return Shared{}
	}
	return Shared{unique.Make(s)}
}

// String returns the string.
func (s Shared) String() string {
	if s == (Shared{}) {
		return ""
	}
	return s.text.Value()
}

// Equal is ==, for libraries that compare by method.
func (s Shared) Equal(o Shared) bool { return s == o }
