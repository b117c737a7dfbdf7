package clusterset

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// ConflictField is the property in which exports of one Service differ.
type ConflictField uint8

// The properties that can conflict, in the order in which conflicts are reported. Each one maps to a
// reason of the ServiceExport condition Conflict (KEP-1645, "Conflict resolution").
const (
	ConflictPorts ConflictField = iota + 1
	ConflictType
	ConflictSessionAffinity
	ConflictSessionAffinityConfig
	ConflictInternalTrafficPolicy
	ConflictTrafficDistribution
	ConflictFamilies
	ConflictLabels
	ConflictAnnotations
)

var conflictFieldNames = map[ConflictField]string{
	ConflictPorts:                 "ports",
	ConflictType:                  "type",
	ConflictSessionAffinity:       "sessionAffinity",
	ConflictSessionAffinityConfig: "sessionAffinityConfig",
	ConflictInternalTrafficPolicy: "internalTrafficPolicy",
	ConflictTrafficDistribution:   "trafficDistribution",
	ConflictFamilies:              "ipFamilies",
	ConflictLabels:                "exportedLabels",
	ConflictAnnotations:           "exportedAnnotations",
}

// String returns the name of the field as users write it in a manifest.
func (f ConflictField) String() string {
	if n, ok := conflictFieldNames[f]; ok {
		return n
	}
	return fmt.Sprintf("conflict(%d)", uint8(f))
}

// Conflict says that Losers of all Clusters exporting the Service disagree with Winner in Field.
type Conflict struct {
	Field    ConflictField
	Winner   ClusterID
	Losers   []ClusterID // sorted, never empty
	Clusters int         // how many members export the Service
}

// Message is a sentence for users. It is the same for the same conflict, so a condition that carries
// it does not flap.
func (c Conflict) Message() string {
	losers := make([]string, len(c.Losers))
	for i, l := range c.Losers {
		losers[i] = string(l)
	}
	rule := fmt.Sprintf("the oldest export, of cluster %s, is used", c.Winner)
	if c.Field == ConflictPorts {
		rule = fmt.Sprintf("the union is exposed, and cluster %s wins where ports collide", c.Winner)
	}
	return fmt.Sprintf("%s not the same in %d of %d clusters (%s); %s",
		c.Field, len(c.Losers), c.Clusters, strings.Join(losers, ", "), rule)
}

// Merge says what the exports of one Service mean together. All exports must name the same Service,
// each member at most once. The order of the input does not matter: the oldest export takes precedence,
// ties go to the lower member id. Ports are the union, by name first and then by protocol and port; a
// port of a later export that collides with an earlier one in either is left out. Every other property is
// the oldest export's. Merging nothing gives the zero Import.
//
// IPs are those of the oldest export that remembers any; who allocates them is decided elsewhere.
// Neither result shares memory with the input.
func Merge(exports []Export) (Import, []Conflict) {
	if len(exports) == 0 {
		return Import{}, nil
	}
	byAge := slices.SortedFunc(slices.Values(exports), func(a, b Export) int {
		return cmp.Or(a.ExportedAt.Compare(b.ExportedAt), strings.Compare(string(a.Cluster), string(b.Cluster)))
	})
	oldest := byAge[0]

	imp := Import{
		Service:               oldest.Service,
		Type:                  oldest.Type,
		Families:              slices.Clone(oldest.Families),
		Ports:                 unionPorts(byAge),
		SessionAffinity:       oldest.SessionAffinity,
		InternalTrafficPolicy: oldest.InternalTrafficPolicy,
		TrafficDistribution:   oldest.TrafficDistribution,
		Labels:                maps.Clone(oldest.Labels),
		Annotations:           maps.Clone(oldest.Annotations),
	}
	for _, e := range byAge {
		imp.Clusters = append(imp.Clusters, e.Cluster)
		if imp.IPs == nil && imp.Type == ClusterSetIP && len(e.IPs) > 0 {
			imp.IPs = slices.Clone(e.IPs)
		}
	}
	slices.Sort(imp.Clusters)

	differs := []struct {
		field ConflictField
		from  func(Export) bool
	}{
		{ConflictPorts, func(e Export) bool { return !slices.Equal(sortedPorts(e.Ports), sortedPorts(oldest.Ports)) }},
		{ConflictType, func(e Export) bool { return e.Type != oldest.Type }},
		{ConflictSessionAffinity, func(e Export) bool { return e.SessionAffinity.ClientIP != oldest.SessionAffinity.ClientIP }},
		{ConflictSessionAffinityConfig, func(e Export) bool {
			return e.SessionAffinity.ClientIP == oldest.SessionAffinity.ClientIP && e.SessionAffinity != oldest.SessionAffinity
		}},
		{ConflictInternalTrafficPolicy, func(e Export) bool { return e.InternalTrafficPolicy != oldest.InternalTrafficPolicy }},
		{ConflictTrafficDistribution, func(e Export) bool { return e.TrafficDistribution != oldest.TrafficDistribution }},
		{ConflictFamilies, func(e Export) bool { return !slices.Equal(sorted(e.Families), sorted(oldest.Families)) }},
		{ConflictLabels, func(e Export) bool { return !maps.Equal(e.Labels, oldest.Labels) }},
		{ConflictAnnotations, func(e Export) bool { return !maps.Equal(e.Annotations, oldest.Annotations) }},
	}
	var conflicts []Conflict
	for _, d := range differs {
		var losers []ClusterID
		for _, e := range byAge[1:] {
			if d.from(e) {
				losers = append(losers, e.Cluster)
			}
		}
		if losers != nil {
			slices.Sort(losers)
			conflicts = append(conflicts, Conflict{Field: d.field, Winner: oldest.Cluster, Losers: losers, Clusters: len(exports)})
		}
	}
	return imp, conflicts
}

// unionPorts merges ports in order of precedence: no name and no protocol and port occurs twice
// (KEP-1645, "Service Port").
func unionPorts(byAge []Export) []Port {
	type number struct {
		protocol Protocol
		port     uint16
	}
	names, numbers := map[string]bool{}, map[number]bool{}
	var union []Port
	for _, e := range byAge {
		for _, p := range e.Ports {
			n := number{p.Protocol, p.Port}
			if names[p.Name] || numbers[n] {
				continue
			}
			names[p.Name], numbers[n] = true, true
			union = append(union, p)
		}
	}
	return union
}

// Exposes reports whether the export really offers port p of the merged Service: same name,
// protocol and number (KEP-1645: traffic goes only to Services that expose the port).
func (e Export) Exposes(p Port) bool {
	return slices.ContainsFunc(e.Ports, func(o Port) bool {
		return o.Name == p.Name && o.Protocol == p.Protocol && o.Port == p.Port
	})
}

func sortedPorts(ports []Port) []Port {
	return slices.SortedFunc(slices.Values(ports), func(a, b Port) int {
		return cmp.Or(strings.Compare(a.Name, b.Name), cmp.Compare(a.Protocol, b.Protocol),
			cmp.Compare(a.Port, b.Port), strings.Compare(a.AppProtocol, b.AppProtocol))
	})
}

func sorted(f []Family) []Family { return slices.Sorted(slices.Values(f)) }
