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
// reason of the ServiceExport condition Conflict (KEP-1645, "Conflict resolution"); the last one is not of
// the KEP but of the annotation lighthouse.submariner.io/use-clusterset-ip.
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
	ConflictClusterSetIP
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
	ConflictClusterSetIP:          "use-clusterset-ip",
}

// String returns the name of the field as users write it in a manifest.
func (f ConflictField) String() string {
	if n, ok := conflictFieldNames[f]; ok {
		return n
	}
	return fmt.Sprintf("conflict(%d)", uint8(f))
}

// Conflict says that Losers of all Clusters exporting the Service disagree with Winner in Field. Of
// ConflictClusterSetIP all may be losers, because it is about what was agreed on before.
type Conflict struct {
	Field    ConflictField
	Winner   ClusterID
	Losers   []ClusterID // sorted, never empty
	Clusters int         // how many members export the Service
	Rule     string      // what is done about it, for users
}

// Message is a sentence for users. It is the same for the same conflict, so a condition that carries
// it does not flap.
func (c Conflict) Message() string {
	losers := make([]string, len(c.Losers))
	for i, l := range c.Losers {
		losers[i] = string(l)
	}
	return fmt.Sprintf("%s not the same in %d of %d clusters (%s); %s",
		c.Field, len(c.Losers), c.Clusters, strings.Join(losers, ", "), c.Rule)
}

// Policy is how exports that differ become one import. The zero value is KEP-1645; every member of a
// ClusterSet should have the same one.
type Policy struct {
	// IntersectPorts gives an import only the ports that all its exporters have, instead of the union.
	IntersectPorts bool
	// ExcludeTypes leaves out an exporter whose type is not the import's, instead of keeping its endpoints.
	ExcludeTypes bool
}

// Merge is Policy.Merge by the rules of KEP-1645.
func Merge(exports []Export) (Import, []Conflict) { return Policy{}.Merge(exports) }

// Merge says what the exports of one Service mean together. All exports must name the same Service,
// each member at most once. The order of the input does not matter: the oldest export takes precedence,
// ties go to the lower member id. Ports are the union, by name first and then by protocol and port; a
// port of a later export that collides with an earlier one in either is left out. Every other property is
// the oldest export's. Merging nothing gives the zero Import.
//
// Whether there is a ClusterSetIP is what any export remembers to be agreed on, the oldest first, or else
// what the oldest asks for. IPs are those of the oldest export that remembers any; who allocates them is
// decided elsewhere. Neither result shares memory with the input.
func (p Policy) Merge(exports []Export) (Import, []Conflict) {
	if len(exports) == 0 {
		return Import{}, nil
	}
	byAge := slices.SortedFunc(slices.Values(exports), func(a, b Export) int {
		return cmp.Or(a.ExportedAt.Compare(b.ExportedAt), strings.Compare(string(a.Cluster), string(b.Cluster)))
	})
	oldest := byAge[0]
	counted := byAge
	if p.ExcludeTypes {
		counted = slices.DeleteFunc(slices.Clone(byAge), func(e Export) bool { return e.Type != oldest.Type })
	}

	imp := Import{
		Service:               oldest.Service,
		Type:                  oldest.Type,
		UseIP:                 agreedChoice(byAge),
		Families:              slices.Clone(oldest.Families),
		Ports:                 p.mergePorts(counted),
		SessionAffinity:       oldest.SessionAffinity,
		InternalTrafficPolicy: oldest.InternalTrafficPolicy,
		TrafficDistribution:   oldest.TrafficDistribution,
		Labels:                maps.Clone(oldest.Labels),
		Annotations:           maps.Clone(oldest.Annotations),
	}
	for _, e := range counted {
		imp.Clusters = append(imp.Clusters, e.Cluster)
		if imp.IPs == nil && imp.Type == ClusterSetIP && imp.UseIP != Disabled && len(e.IPs) > 0 {
			imp.IPs = slices.Clone(e.IPs)
		}
	}
	slices.Sort(imp.Clusters)
	return imp, p.conflicts(byAge, imp.UseIP)
}

// agreedChoice returns whether the Service has a ClusterSetIP.
func agreedChoice(byAge []Export) Choice {
	for _, e := range byAge {
		if e.AgreedIP != Unknown {
			return e.AgreedIP
		}
	}
	for _, e := range byAge {
		if e.WantsIP != Unknown {
			return e.WantsIP
		}
	}
	return Unknown
}

// conflicts compares all exports with the oldest one, and with what was agreed on.
func (p Policy) conflicts(byAge []Export, agreed Choice) []Conflict {
	oldest := byAge[0]
	used := fmt.Sprintf("the oldest export, of cluster %s, is used", oldest.Cluster)
	ports, types := fmt.Sprintf("the union is exposed, and cluster %s wins where ports collide", oldest.Cluster), used
	if p.IntersectPorts {
		ports = "only ports that are the same in all of them are exposed"
	}
	if p.ExcludeTypes {
		types = used + ", and the others are not exported"
	}
	differs := []struct {
		field ConflictField
		rule  string
		from  func(Export) bool
	}{
		{ConflictPorts, ports, func(e Export) bool { return !slices.Equal(sortedPorts(e.Ports), sortedPorts(oldest.Ports)) }},
		{ConflictType, types, func(e Export) bool { return e.Type != oldest.Type }},
		{ConflictSessionAffinity, used, func(e Export) bool { return e.SessionAffinity.ClientIP != oldest.SessionAffinity.ClientIP }},
		{ConflictSessionAffinityConfig, used, func(e Export) bool {
			return e.SessionAffinity.ClientIP == oldest.SessionAffinity.ClientIP && e.SessionAffinity != oldest.SessionAffinity
		}},
		{ConflictInternalTrafficPolicy, used, func(e Export) bool { return e.InternalTrafficPolicy != oldest.InternalTrafficPolicy }},
		{ConflictTrafficDistribution, used, func(e Export) bool { return e.TrafficDistribution != oldest.TrafficDistribution }},
		{ConflictFamilies, used, func(e Export) bool { return !slices.Equal(sorted(e.Families), sorted(oldest.Families)) }},
		{ConflictLabels, used, func(e Export) bool { return !maps.Equal(e.Labels, oldest.Labels) }},
		{ConflictAnnotations, used, func(e Export) bool { return !maps.Equal(e.Annotations, oldest.Annotations) }},
		{ConflictClusterSetIP, fmt.Sprintf("%q was chosen first and stays until nobody exports the service", agreed), func(e Export) bool {
			return e.WantsIP != Unknown && agreed != Unknown && e.WantsIP != agreed
		}},
	}
	var conflicts []Conflict
	for _, d := range differs {
		var losers []ClusterID
		for _, e := range byAge {
			if d.from(e) {
				losers = append(losers, e.Cluster)
			}
		}
		if losers != nil {
			slices.Sort(losers)
			conflicts = append(conflicts, Conflict{Field: d.field, Winner: oldest.Cluster, Losers: losers, Clusters: len(byAge), Rule: d.rule})
		}
	}
	return conflicts
}

// mergePorts merges ports in order of precedence: no name and no protocol and port occurs twice
// (KEP-1645, "Service Port").
func (p Policy) mergePorts(byAge []Export) []Port {
	type number struct {
		protocol Protocol
		port     uint16
	}
	names, numbers := map[string]bool{}, map[number]bool{}
	var merged []Port
	for _, e := range byAge {
		for _, q := range e.Ports {
			n := number{q.Protocol, q.Port}
			if names[q.Name] || numbers[n] {
				continue
			}
			if p.IntersectPorts && slices.ContainsFunc(byAge, func(o Export) bool { return !o.Exposes(q) }) {
				continue
			}
			names[q.Name], numbers[n] = true, true
			merged = append(merged, q)
		}
	}
	return merged
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
