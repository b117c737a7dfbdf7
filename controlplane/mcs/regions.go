package mcs

import (
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// MaxRegionBytes bounds the annotation that maps the zones of a slice to regions. The broker's admission policies have the same
// number.
const MaxRegionBytes = 4096

// SetRegions records the region of each zone in which es has endpoints, and no others. of returns the region of a zone, "" if it
// is unknown; of("") is the region of endpoints without a zone. Of more zones than the annotation has room for, it records the
// first ones by name.
func SetRegions(es *discoveryv1.EndpointSlice, of func(zone string) string) {
	zones := func(yield func(string) bool) {
		for i := range es.Endpoints {
			if !yield(deref(es.Endpoints[i].Zone)) {
				return
			}
		}
	}
	writeRegions(es, regionsIn(zones, of))
}

// DropRegions removes the regions from a slice, and reports whether it had any.
func DropRegions(es *discoveryv1.EndpointSlice) (dropped bool) {
	_, dropped = es.Annotations[v1alpha1.AnnotationRegions]
	delete(es.Annotations, v1alpha1.AnnotationRegions)
	return dropped
}

func writeRegions(es *discoveryv1.EndpointSlice, regions clusterset.Regions) {
	DropRegions(es)
	if text := regions.String(); text != "" {
		metav1.SetMetaDataAnnotation(&es.ObjectMeta, v1alpha1.AnnotationRegions, text)
	}
}

// regionsIn returns the regions of zones, which may repeat, in at most MaxRegionBytes.
func regionsIn(zones iter.Seq[string], of func(zone string) string) clusterset.Regions {
	byZone := map[string]string{}
	for zone := range zones {
		if _, done := byZone[zone]; !done {
			byZone[zone] = of(zone)
		}
	}
	size := 0
	for _, zone := range slices.Sorted(maps.Keys(byZone)) {
		if n := len(zone) + len(byZone[zone]) + len("=,"); byZone[zone] != "" && size+n <= MaxRegionBytes {
			size += n
			continue
		}
		delete(byZone, zone)
	}
	return clusterset.NewRegions(byZone)
}

// regionsOf returns the regions that a slice states; none if it states them wrongly.
func regionsOf(es *discoveryv1.EndpointSlice) clusterset.Regions {
	byZone, _ := parseRegions(es.Annotations[v1alpha1.AnnotationRegions])
	return clusterset.NewRegions(byZone)
}

// regions returns the regions by zone that an annotation states; none if any part of it is not valid.
func (v *sliceVetter) regions(text string) map[string]string {
	byZone, fault := parseRegions(text)
	if fault != "" {
		v.omitted.add(entry("metadata.annotations", v1alpha1.AnnotationRegions), "%s", fault)
	}
	return byZone
}

// parseRegions parses the annotation. It returns either the regions by zone or the fault of the annotation; neither for "".
func parseRegions(text string) (byZone map[string]string, fault string) {
	if text == "" {
		return nil, ""
	}
	if len(text) > MaxRegionBytes {
		return nil, fmt.Sprintf("%d bytes of at most %d", len(text), MaxRegionBytes)
	}
	byZone = map[string]string{}
	for pair := range strings.SplitSeq(text, ",") {
		zone, region, _ := strings.Cut(pair, "=")
		if _, twice := byZone[zone]; twice || region == "" || !isLabelValue(zone) || !isLabelValue(region) {
			return nil, fmt.Sprintf("%q is not valid", shorten(pair))
		}
		byZone[zone] = region
	}
	return byZone, ""
}
