package lb

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Annotations for the traffic policy of a Service. Its owner sets them in the exportedAnnotations of a ServiceExport, and
// they arrive here on the ServiceImport.
const (
	// AnnotationPrefer lists tiers in the order of preference, such as "node,zone,region,cluster,remote" or some of these.
	// The first tier with a ready endpoint serves; endpoints in none of them serve when no tier has a ready one.
	// It takes the place of trafficDistribution.
	AnnotationPrefer = clusterset.AnnotationPrefer
	// AnnotationClusterWeights gives each source cluster its share of the clients, such as "a=3,b=1", however many
	// endpoints the cluster has. A cluster that is not listed weighs 1; a cluster of weight 0 serves only when no
	// other has a ready endpoint. Groups that end in a semicolon, such as "a=3,b=1;", divide only the share that the endpoints
	// of their clusters have together, and leave all others theirs.
	AnnotationClusterWeights = clusterset.AnnotationClusterWeights
	// AnnotationBalancer is "random", the default, or "maglev": a client gets the same backend on every node, and most
	// clients keep theirs when backends come and go.
	AnnotationBalancer = clusterset.AnnotationBalancer
)

// annotation is one policy annotation.
type annotation struct {
	key   string
	parse func(p *policy, value string) error // leaves p unchanged when it fails
	hint  string                              // for the owner whose annotation cannot be parsed
}

// annotations lists every policy annotation. A new one is a field of policy, a parser here, and the code that follows it.
var annotations = []annotation{
	{AnnotationPrefer, (*policy).parsePrefer, "list some of node, zone, region, cluster and remote, each once, such as node,zone,region,cluster,remote"},
	{AnnotationClusterWeights, (*policy).parseWeights, fmt.Sprintf("list cluster=weight with weights of 0 to %d, such as a=3,b=1", maxWeight)},
	{AnnotationBalancer, (*policy).parseBalancer, "use maglev or random"},
}

// maxWeight bounds a cluster's weight, and with it the table.
const maxWeight = clusterset.MaxWeight

// tier classifies endpoints by their distance from the node.
type tier uint8

// The tiers, under their names in AnnotationPrefer.
const (
	tierNode    tier = iota // the same cluster and node
	tierZone                // the same zone
	tierRegion              // the same region
	tierCluster             // the same cluster
	tierRemote              // another cluster
)

var tierNames = []string{tierNode: "node", tierZone: "zone", tierRegion: "region", tierCluster: "cluster", tierRemote: "remote"}

// policy is the traffic policy of a Service.
type policy struct {
	local    bool   // only endpoints on the client's own node
	prefer   []tier // first choice first
	maglev   bool
	weights  map[clusterset.ClusterID]uint32 // nil: every endpoint has the same share
	groups   map[clusterset.ClusterID]int    // of the weighted clusters; nil: all clusters are one group
	affinity uint32                          // seconds
}

// trafficDistributions are the tiers behind each value of the field (KEP-3015: "the same zone, else any"; "the
// same node, else the same zone, else any"). Among "any", the node's own cluster comes before the others. Regions have no part in
// it: in a cluster of several regions they would divide what the KEP calls "any".
var trafficDistributions = map[string][]tier{
	"PreferClose":    {tierZone, tierCluster, tierRemote},
	"PreferSameZone": {tierZone, tierCluster, tierRemote},
	"PreferSameNode": {tierNode, tierZone, tierCluster, tierRemote},
}

// policyFields are the fields of a Service that its policy follows from, beside its annotations.
type policyFields struct {
	SessionAffinity       clusterset.SessionAffinity
	InternalTrafficPolicy string
	TrafficDistribution   string
}

func policyFieldsOf(svc *clusterset.Service) policyFields {
	return policyFields{svc.SessionAffinity, svc.InternalTrafficPolicy, svc.TrafficDistribution}
}

// samePolicy reports whether a and b have the same policy and the same faults. It compares what policyOf makes of them,
// whichever annotations that reads.
func samePolicy(a, b *clusterset.Service) bool {
	if policyFieldsOf(a) == policyFieldsOf(b) && maps.Equal(a.Annotations, b.Annotations) {
		return true // equal input: nearly every Service of nearly every Snapshot
	}
	have, haveFaults := policyOf(policyFieldsOf(a), a.Annotations)
	want, wantFaults := policyOf(policyFieldsOf(b), b.Annotations)
	return reflect.DeepEqual(have, want) &&
		slices.EqualFunc(haveFaults, wantFaults, func(e, f error) bool { return e.Error() == f.Error() })
}

// policyOf returns the policy of a Service, and an error for each annotation that cannot be parsed; the policy ignores
// those.
func policyOf(f policyFields, set map[string]string) (policy, []error) {
	p := policy{local: f.InternalTrafficPolicy == "Local", prefer: trafficDistributions[f.TrafficDistribution]}
	if f.SessionAffinity.ClientIP {
		p.affinity = uint32(min(f.SessionAffinity.Timeout/time.Second, math.MaxUint32))
		if p.affinity == 0 {
			p.affinity = 3 * 60 * 60 // the API's default
		}
	}
	var faults []error
	for _, a := range annotations {
		value, ok := set[a.key]
		if !ok {
			continue
		}
		if err := a.parse(&p, value); err != nil {
			faults = append(faults, fmt.Errorf("annotation %s=%q: %w; %s", a.key, value, err, a.hint))
		}
	}
	return p, faults
}

func (p *policy) parsePrefer(value string) error {
	var tiers []tier
	for word := range strings.SplitSeq(value, ",") {
		i := slices.Index(tierNames, strings.TrimSpace(word))
		if i < 0 {
			return fmt.Errorf("%q is not a tier", strings.TrimSpace(word))
		}
		if slices.Contains(tiers, tier(i)) {
			return fmt.Errorf("%s occurs twice", tierNames[i])
		}
		tiers = append(tiers, tier(i))
	}
	p.prefer = tiers
	return nil
}

func (p *policy) parseWeights(value string) error {
	parsed, grouped, err := clusterset.ParseWeights(value)
	if err != nil {
		return err
	}
	p.weights = map[clusterset.ClusterID]uint32{}
	if grouped {
		p.groups = map[clusterset.ClusterID]int{}
	}
	for i, group := range parsed {
		for id, weight := range group {
			p.weights[id] = weight
			if grouped {
				p.groups[id] = i
			}
		}
	}
	return nil
}

func (p *policy) parseBalancer(value string) error {
	switch value {
	case "random":
		p.maglev = false
	case "maglev":
		p.maglev = true
	default:
		return errors.New("the balancer is unknown")
	}
	return nil
}

// weight returns the weight of a cluster.
func (p *policy) weight(c clusterset.ClusterID) uint32 {
	if w, ok := p.weights[c]; ok {
		return w
	}
	return 1
}

// rankDrained is the lowest rank that gets no clients. A client that is refused at once is better off than one whose
// packets get no answer.
const rankDrained uint8 = 8 << 2

// rank orders the endpoints of a Service, lowest first: the endpoints of the lowest rank share the clients. A
// terminating endpoint ranks after all ready ones (as in kube-proxy), and a cluster of weight 0 after those with a
// weight. The endpoints of a drained member have rankDrained or more.
func (p *policy) rank(in *Input, s *clusterset.Slice, e *clusterset.Endpoint) uint8 {
	r := uint8(len(p.prefer))
	for i, t := range p.prefer {
		if in.inTier(t, s, e) {
			r = uint8(i)
			break
		}
	}
	for bit, worse := range []bool{p.weights != nil && p.weight(s.Cluster) == 0, !e.Ready} {
		if worse {
			r |= 8 << bit
		}
	}
	if in.Drained[s.Cluster] {
		r |= rankDrained
	}
	return r
}

// inTier reports whether an endpoint of s belongs to tier t from the view of the node. Nodes, zones and regions of two
// clusters may have the same name.
func (in *Input) inTier(t tier, s *clusterset.Slice, e *clusterset.Endpoint) bool {
	n := &in.Node
	own := n.Cluster != "" && s.Cluster == n.Cluster
	switch t {
	case tierNode:
		return own && n.Name != "" && e.NodeName.String() == n.Name
	case tierZone:
		return (own || in.ZonesSpanClusters) && n.Zone != "" && e.Zone.String() == n.Zone
	case tierRegion:
		return (own || in.RegionsSpanClusters) && n.Region != "" && s.Regions.InZone(e.Zone.String()) == n.Region
	case tierCluster:
		return own
	default:
		return !own
	}
}
