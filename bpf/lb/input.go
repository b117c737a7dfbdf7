package lb

import (
	"fmt"
	"net/netip"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Node is the place for which backends are chosen. What is not known is left empty: nothing is near then.
type Node struct {
	Cluster clusterset.ClusterID
	Name    string // unique only within Cluster
	Zone    string
}

// Input is all that decides what the maps of a node should hold.
type Input struct {
	Snapshot *clusterset.Snapshot
	Node     Node
	// ZonesSpanClusters says that a zone's name means the same in all members. Without it another member's
	// zones are never near, whatever they are called.
	ZonesSpanClusters bool
	// Ranges are where all ClusterSetIPs come from: an address in them without a frontend is refused.
	Ranges []netip.Prefix
	// Drained are the members whose packets die. They get no new clients; a Service of theirs alone refuses.
	Drained map[clusterset.ClusterID]bool
	// Limits are of the maps that are to be written. No Plan goes beyond them.
	Limits Limits
}

// Limits are how many entries maps have room for; 0 is as many as there are.
type Limits struct{ Frontends, Slots, Backends, Services int }

// Reason classifies a Problem for conditions and metrics.
type Reason string

// The reasons of a Problem.
const (
	UnsupportedProtocol Reason = "UnsupportedProtocol" // sockets are translated for TCP and UDP alone
	InvalidVIP          Reason = "InvalidVIP"          // an address or port that cannot be a frontend
	VIPTaken            Reason = "VIPTaken"            // another Service has this VIP, port and protocol
	InvalidEndpoint     Reason = "InvalidEndpoint"     // an address or port that cannot be a backend
	InvalidAnnotation   Reason = "InvalidAnnotation"   // a wish that cannot be read, and is not followed
	NoRoom              Reason = "NoRoom"              // it does not fit into a map of the node
)

// Problem says what of a Service could not be programmed as asked for, and why. It is the user's to mend,
// not an error: everything else is programmed.
type Problem struct {
	Service clusterset.ServiceName
	Reason  Reason
	Message string // one sentence, the same for the same problem
}

// String returns "namespace/name: Reason: message".
func (p Problem) String() string { return fmt.Sprintf("%s: %s: %s", p.Service, p.Reason, p.Message) }
