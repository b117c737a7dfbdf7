package clusterset

import (
	"slices"
	"strings"
)

// Regions maps the zones of a slice to their regions. The zone "" stands for endpoints without a zone. The slices of a member
// have few different Regions, and equal ones are stored once. The zero value knows no region.
type Regions struct{ text Shared }

// NewRegions returns the Regions of zones with known regions; it leaves out zones whose region is "". No name contains '='
// or ','.
func NewRegions(byZone map[string]string) Regions {
	pairs := make([]string, 0, len(byZone))
	for zone, region := range byZone {
		if region != "" {
			pairs = append(pairs, zone+"="+region)
		}
	}
	slices.Sort(pairs)
	return Regions{Share(strings.Join(pairs, ","))}
}

// InZone returns the region of a zone, "" if it is unknown.
func (r Regions) InZone(zone string) string {
	for pair := range strings.SplitSeq(r.text.String(), ",") {
		if z, region, ok := strings.Cut(pair, "="); ok && z == zone {
			return region
		}
	}
	return ""
}

// String returns the pairs as zone=region, sorted and joined by commas.
func (r Regions) String() string { return r.text.String() }

// Equal is ==, for libraries that compare by method.
func (r Regions) Equal(o Regions) bool { return r == o }
