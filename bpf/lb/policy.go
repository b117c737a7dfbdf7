package lb

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// What a Service's owner may ask for with annotations of its ServiceImport, which come from the
// exportedAnnotations of its ServiceExports.
const (
	// AnnotationPrefer lists tiers in the order of preference, such as "node,zone,cluster,remote" or a part
	// of it. The first one with a ready endpoint serves; endpoints in none of them serve when there is none.
	// It takes the place of trafficDistribution.
	AnnotationPrefer = "isthmus.dev/prefer"
	// AnnotationClusterWeights says which share of the clients each source cluster has, such as "a=3,b=1",
	// however many endpoints it has. A cluster not listed weighs 1; one of weight 0 serves only when nobody
	// else is ready.
	AnnotationClusterWeights = "isthmus.dev/cluster-weights"
	// AnnotationBalancer is "random", the default, or "maglev": the same client gets the same backend on
	// every node, and most keep theirs when backends come and go.
	AnnotationBalancer = "isthmus.dev/balancer"
)

// maxWeight bounds a cluster's weight, and with it the table.
const maxWeight = 1000

// tier is a class of endpoints by their distance from the node.
type tier uint8

// The tiers, by the words of AnnotationPrefer.
const (
	tierNode    tier = iota // the same cluster and node
	tierZone                // the same zone
	tierCluster             // the same cluster
	tierRemote              // another cluster
)

var tierNames = []string{tierNode: "node", tierZone: "zone", tierCluster: "cluster", tierRemote: "remote"}

// policy is how a Service wants its clients spread.
type policy struct {
	local    bool   // only endpoints on the client's own node
	prefer   []tier // first choice first
	maglev   bool
	weights  map[clusterset.ClusterID]uint32 // nil: every endpoint has the same share
	affinity uint32                          // seconds
}

// trafficDistributions are the tiers behind each value of the field (KEP-3015: "the same zone, else any"; "the
// same node, else the same zone, else any"). Of any, the own cluster is nearer than the others.
var trafficDistributions = map[string][]tier{
	"PreferClose":    {tierZone, tierCluster, tierRemote},
	"PreferSameZone": {tierZone, tierCluster, tierRemote},
	"PreferSameNode": {tierNode, tierZone, tierCluster, tierRemote},
}

// policyOf reads what svc asks for. A wish that cannot be read is as if it was not there, and is part of the
// error, which joins all of them.
func policyOf(svc *clusterset.Service) (policy, []error) {
	p := policy{local: svc.InternalTrafficPolicy == "Local", prefer: trafficDistributions[svc.TrafficDistribution]}
	if svc.SessionAffinity.ClientIP {
		p.affinity = uint32(min(svc.SessionAffinity.Timeout/time.Second, math.MaxUint32))
		if p.affinity == 0 {
			p.affinity = 3 * 60 * 60 // the API's default
		}
	}
	var faults []error
	if text, ok := svc.Annotations[AnnotationPrefer]; ok {
		if tiers, err := parsePrefer(text); err != nil {
			faults = append(faults, fmt.Errorf("annotation %s=%q: %w; list some of node, zone, cluster and remote, each once, such as node,zone,cluster,remote",
				AnnotationPrefer, text, err))
		} else {
			p.prefer = tiers
		}
	}
	if text, ok := svc.Annotations[AnnotationClusterWeights]; ok {
		if weights, err := parseWeights(text); err != nil {
			faults = append(faults, fmt.Errorf("annotation %s=%q: %w; list cluster=weight with weights of 0 to %d, such as a=3,b=1",
				AnnotationClusterWeights, text, err, maxWeight))
		} else {
			p.weights = weights
		}
	}
	switch text, ok := svc.Annotations[AnnotationBalancer]; {
	case !ok || text == "random":
	case text == "maglev":
		p.maglev = true
	default:
		faults = append(faults, fmt.Errorf("annotation %s=%q is unknown; use maglev or random", AnnotationBalancer, text))
	}
	return p, faults
}

func parsePrefer(text string) ([]tier, error) {
	var tiers []tier
	for word := range strings.SplitSeq(text, ",") {
		i := slices.Index(tierNames, strings.TrimSpace(word))
		if i < 0 {
			return nil, fmt.Errorf("%q is no tier", strings.TrimSpace(word))
		}
		if slices.Contains(tiers, tier(i)) {
			return nil, fmt.Errorf("%s is there twice", tierNames[i])
		}
		tiers = append(tiers, tier(i))
	}
	return tiers, nil
}

func parseWeights(text string) (map[clusterset.ClusterID]uint32, error) {
	weights := map[clusterset.ClusterID]uint32{}
	for pair := range strings.SplitSeq(text, ",") {
		name, number, ok := strings.Cut(strings.TrimSpace(pair), "=")
		if !ok {
			return nil, fmt.Errorf("%q has no weight", strings.TrimSpace(pair))
		}
		id := clusterset.ClusterID(strings.TrimSpace(name))
		if err := id.Validate(); err != nil {
			return nil, err
		}
		if _, ok := weights[id]; ok {
			return nil, fmt.Errorf("%s is there twice", id)
		}
		n, err := strconv.ParseUint(strings.TrimSpace(number), 10, 32)
		if err != nil || n > maxWeight {
			return nil, errors.New("the weight of " + string(id) + " is not a number that can be used")
		}
		weights[id] = uint32(n)
	}
	return weights, nil
}

// weight returns what the share of a cluster is measured by.
func (p *policy) weight(c clusterset.ClusterID) uint32 {
	if w, ok := p.weights[c]; ok {
		return w
	}
	return 1
}

// rankDrained and what is above it does not serve: a client that is refused at once is better off than one that
// waits for packets that die.
const rankDrained uint8 = 8 << 2

// rank orders the endpoints of a Service by who is to serve, lowest first: those of equal rank share the
// clients. A terminating endpoint comes after all ready ones (as kube-proxy has it), and a cluster of weight 0 after
// those with a weight. Those of a member whose packets die are of rankDrained or above.
func (p *policy) rank(in *Input, c clusterset.ClusterID, e *clusterset.Endpoint) uint8 {
	r := uint8(len(p.prefer))
	for i, t := range p.prefer {
		if in.Node.inTier(t, in.ZonesSpanClusters, c, e) {
			r = uint8(i)
			break
		}
	}
	for bit, worse := range []bool{p.weights != nil && p.weight(c) == 0, !e.Ready} {
		if worse {
			r |= 8 << bit
		}
	}
	if in.Drained[c] {
		r |= rankDrained
	}
	return r
}

// inTier reports whether an endpoint of cluster c belongs to tier t, seen from n. Two clusters may well have
// nodes, and zones, of the same name.
func (n Node) inTier(t tier, zonesSpan bool, c clusterset.ClusterID, e *clusterset.Endpoint) bool {
	own := n.Cluster != "" && c == n.Cluster
	switch t {
	case tierNode:
		return own && n.Name != "" && e.NodeName.String() == n.Name
	case tierZone:
		return (own || zonesSpan) && n.Zone != "" && e.Zone.String() == n.Zone
	case tierCluster:
		return own
	default:
		return !own
	}
}
