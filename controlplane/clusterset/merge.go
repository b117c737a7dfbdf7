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
// reason of the ServiceExport condition Conflict (KEP-1645, "Conflict resolution"). The last one is not in the KEP; it
// concerns the annotation lighthouse.submariner.io/use-clusterset-ip.
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

// Conflict describes a disagreement: Losers differ from Winner in Field. With ConflictClusterSetIP every exporter may
// be a loser, because they differ from an earlier agreement.
type Conflict struct {
	Field    ConflictField
	Winner   ClusterID
	Losers   []ClusterID // sorted, never empty
	Clusters int         // the number of members that export the Service
	Rule     string      // the resolution, for users
}

// Message returns a sentence for users. Equal conflicts give equal messages, so a condition does not flap.
func (c Conflict) Message() string {
	losers := make([]string, len(c.Losers))
	for i, l := range c.Losers {
		losers[i] = string(l)
	}
	return fmt.Sprintf("field %s differs in %d of %d clusters (%s); %s",
		c.Field, len(c.Losers), c.Clusters, strings.Join(losers, ", "), c.Rule)
}

// Policy selects how differing exports are merged. The zero value is KEP-1645. All members of a ClusterSet should use the
// same one.
type Policy struct {
	// IntersectPorts gives an import only the ports that all its exporters have, instead of the union.
	IntersectPorts bool
	// ExcludeTypes leaves out an exporter whose type is not the import's, instead of keeping its endpoints.
	ExcludeTypes bool
}

// Merge is Policy.Merge by the rules of KEP-1645.
func Merge(exports []Export) (Import, []Conflict) { return Policy{}.Merge(exports) }

// Merge combines the exports of one Service. All exports must name the same Service, and each member may occur once. The
// order of exports does not matter: the oldest one takes precedence, and ties go to the lower member id. Ports are the
// union; a port of a later export is left out if its name, or its protocol and number, collides with an earlier one. For
// example, east exports http/80 and west, later, http/8080: the import has http/80. Cluster weights are those on which
// exporters agree. Every other property is that of the oldest export. Merging no exports gives the zero Import.
//
// The import has a ClusterSetIP if the oldest export that remembers an agreement says so, or else if the oldest one with
// a preference asks for one. IPs are those of the oldest export that remembers any; their allocation is decided
// elsewhere. The results share no memory with the input.
func (p Policy) Merge(exports []Export) (Import, []Conflict) {
	if len(exports) == 0 {
		return Import{}, nil
	}
	byAge := ByAge(exports)
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
		Annotations:           mergeWeights(maps.Clone(oldest.Annotations), counted),
	}
	for _, e := range counted {
		imp.Clusters = append(imp.Clusters, e.Cluster)
		if imp.IPs == nil && imp.Type == ClusterSetIP && imp.UseIP != Disabled && len(e.IPs) > 0 {
			imp.IPs = slices.Clone(e.IPs)
		}
	}
	slices.Sort(imp.Clusters)
	return imp, p.conflicts(byAge, imp)
}

// ByAge returns exports in order of precedence: the oldest first, and of equally old ones that of the lower member id.
func ByAge(exports []Export) []Export {
	return slices.SortedFunc(slices.Values(exports), func(a, b Export) int {
		return cmp.Or(a.ExportedAt.Compare(b.ExportedAt), strings.Compare(string(a.Cluster), string(b.Cluster)))
	})
}

// agreedChoice returns the choice whether the Service has a ClusterSetIP.
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

// conflicts compares all exports with the oldest one and with the agreed choice in their merged import.
func (p Policy) conflicts(byAge []Export, merged Import) []Conflict {
	oldest, agreed := byAge[0], merged.UseIP
	used := fmt.Sprintf("the oldest export, of cluster %s, is used", oldest.Cluster)
	ports, types := fmt.Sprintf("the union is exposed, and the ports of cluster %s win where they collide", oldest.Cluster)+collisions(byAge, merged.Ports), used
	if p.IntersectPorts {
		ports = "only the ports that all of them have are exposed"
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
		{ConflictClusterSetIP, fmt.Sprintf("%q was chosen first and stays until no cluster exports the service", agreed), func(e Export) bool {
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

// mergePorts merges ports in order of precedence: no name, and no pair of protocol and port, occurs twice (KEP-1645,
// "Service Port").
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

// maxCollisions is how many ports a conflict describes.
const maxCollisions = 3

// collisions tells of the ports of an import that some exporters have with another number or name: these get none of the traffic,
// and the others all of it. It is "" if there are none.
func collisions(exports []Export, merged []Port) string {
	var told []string
	for _, p := range merged {
		serving := 0
		var without []string
		for _, e := range exports {
			switch {
			case e.Exposes(p):
				serving++
			case slices.ContainsFunc(e.Ports, func(o Port) bool { return o.Name == p.Name || o.Protocol == p.Protocol && o.Port == p.Port }):
				without = append(without, string(e.Cluster))
			}
		}
		if len(without) == 0 {
			continue
		}
		if len(told) == maxCollisions {
			told = append(told, "and more")
			break
		}
		slices.Sort(without)
		told = append(told, fmt.Sprintf("%d of %d clusters get the traffic of port %d/%s (%s), and %s none", serving, len(exports), p.Port, p.Protocol, cmp.Or(p.Name, "without a name"), strings.Join(without, ", ")))
	}
	if len(told) == 0 {
		return ""
	}
	return ": " + strings.Join(told, "; ")
}

// Exposes reports whether the export has port p of the merged Service, with the same name, protocol and number (KEP-1645:
// traffic goes only to Services that expose the port).
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
