package clusterset

import (
	"net/netip"
	"unique"
)

// Snapshot is everything a node needs to know about the ClusterSet: immutable, complete and sorted.
// Whoever receives one may keep it and must not change it. Two equal worlds give equal Snapshots.
type Snapshot struct {
	Services []Service // by Import.Service
}

// Service is one import and the endpoints behind it.
type Service struct {
	Import
	Slices []Slice // by Cluster, then by Name
}

// Slice is a group of endpoints of one source member and one address family that share their ports
// (an EndpointSlice of discovery.k8s.io/v1, reduced to what we use).
type Slice struct {
	Name      string
	Cluster   ClusterID
	Family    Family
	Ports     []EndpointPort // by Name, then Protocol
	Endpoints []Endpoint     // by first address
}

// EndpointPort is where the pods of a slice listen. It belongs to the Service port of the same
// name and protocol.
type EndpointPort struct {
	Name     string
	Protocol Protocol
	Port     uint16 // the target port
}

// Endpoint is one pod (or whatever stands behind a Service without a selector).
type Endpoint struct {
	Addrs       []netip.Addr // one or more of the slice's family; the first one takes traffic
	Ready       bool         // new traffic may be sent here
	Serving     bool         // it answers, ready or terminating
	Terminating bool
	Hostname    string
	Pod         string // its pod's name, where it has no hostname and DNS may want one
	NodeName    Shared // unique only within the slice's Cluster
	Zone        Shared
}

// Shared is a text that many values have in common, such as the name of a node: all that are equal take memory
// once. The zero value is the empty text.
type Shared struct{ text unique.Handle[string] }

// Share returns s in the memory that all equal texts share.
func Share(s string) Shared {
	if s == "" {
		return Shared{}
	}
	return Shared{unique.Make(s)}
}

// String returns the text.
func (s Shared) String() string {
	if s == (Shared{}) {
		return ""
	}
	return s.text.Value()
}

// Equal is ==, for those who compare by method.
func (s Shared) Equal(o Shared) bool { return s == o }
