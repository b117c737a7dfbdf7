package lb

import (
	"fmt"
	"net/netip"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Node is the node whose clients are served. Unknown fields are empty; then no endpoint is near.
type Node struct {
	Cluster clusterset.ClusterID
	Name    string // unique only within Cluster
	Zone    string
	Region  string
}

// Input is everything that decides what the maps of a node should hold.
type Input struct {
	Snapshot *clusterset.Snapshot
	Node     Node
	// ZonesSpanClusters says that a zone's name means the same zone in all members. Without it the zones of another
	// member are never near, whatever their names.
	ZonesSpanClusters bool
	// RegionsSpanClusters says the same of regions.
	RegionsSpanClusters bool
	// Ranges are the CIDRs of all ClusterSetIPs: an address in them without a frontend is refused. A range that contains
	// addresses of the cluster itself refuses none, because most of those have no frontend either.
	Ranges []netip.Prefix
	// VIPs decides which addresses get frontends; nil allows all.
	VIPs *VIPs
	// Drained are the members whose packets get no answer. They get no new clients; a Service that only they serve refuses.
	Drained map[clusterset.ClusterID]bool
	// Limits are the sizes of the maps to be written. No Plan exceeds them.
	Limits Limits
}

// ranges returns the valid ranges, as the map holds them.
func (in *Input) ranges() map[netip.Prefix]bool {
	valid := make(map[netip.Prefix]bool, len(in.Ranges))
	for _, r := range in.Ranges {
		if r.IsValid() && !in.VIPs.ownIn(r) {
			valid[r.Masked()] = true
		}
	}
	return valid
}

// Limits are how many entries the maps have room for; 0 means no limit.
type Limits struct{ Frontends, Slots, Backends, Services int }

// Reason classifies a Problem for conditions and metrics.
type Reason string

// The reasons of a Problem.
const (
	UnsupportedProtocol Reason = "UnsupportedProtocol" // sockets are translated for TCP and UDP only
	InvalidVIP          Reason = "InvalidVIP"          // an address or port that cannot be a frontend
	VIPTaken            Reason = "VIPTaken"            // another Service has this VIP, port and protocol
	VIPOfCluster        Reason = "VIPOfCluster"        // an address of the cluster's own Services, pods or nodes
	VIPOutsideRanges    Reason = "VIPOutsideRanges"    // an address outside of the ranges of the ClusterSetIPs
	VIPRangesUnknown    Reason = "VIPRangesUnknown"    // an address that may be the cluster's own, for no range is known
	InvalidEndpoint     Reason = "InvalidEndpoint"     // an address or port that cannot be a backend
	InvalidAnnotation   Reason = "InvalidAnnotation"   // an annotation that cannot be parsed, and is ignored
	NoRoom              Reason = "NoRoom"              // a map of the node is full
)

// Reasons returns every Reason.
func Reasons() []Reason {
	return []Reason{
		UnsupportedProtocol, InvalidVIP, VIPTaken, VIPOfCluster, VIPOutsideRanges, VIPRangesUnknown, InvalidEndpoint, InvalidAnnotation, NoRoom,
	}
}

// RefusesVIP reports whether r is the reason of VIPs that are not served.
func (r Reason) RefusesVIP() bool {
	return r == VIPOfCluster || r == VIPOutsideRanges || r == VIPRangesUnknown
}

// Problem is a part of a Service that could not be programmed as asked for, and why. The Service's owner has to fix
// it; it is not an error, and everything else is programmed.
type Problem struct {
	Service clusterset.ServiceName
	Reason  Reason
	Message string // one sentence, the same for the same problem
}

// String returns "namespace/name: Reason: message".
func (p Problem) String() string { return fmt.Sprintf("%s: %s: %s", p.Service, p.Reason, p.Message) }
