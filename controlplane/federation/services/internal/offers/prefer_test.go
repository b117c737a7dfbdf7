package offers_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/services/internal/offers"
)

// Each endpoint is CLUSTER ADDRESS ZONES; "!" at the end of the address is one that is not ready.
func TestPreferLocal(t *testing.T) {
	for name, tc := range map[string]struct {
		endpoints string
		zones     string // of the nodes
		want      string
		used      map[string]string // by clients in a zone, as kube-proxy chooses
	}{
		"nobody asks": {
			"a 10.1.0.1 -; b 10.2.0.1 -", "x", "a 10.1.0.1 -; b 10.2.0.1 -",
			map[string]string{"x": "10.1.0.1 10.2.0.1"},
		},
		"the local one asks": {
			"a 10.1.0.1 x; b 10.2.0.1 -", "x", "a 10.1.0.1 x; b 10.2.0.1 elsewhere",
			map[string]string{"x": "10.1.0.1", "": "10.1.0.1 10.2.0.1"},
		},
		"another cluster's asks": {
			"a 10.1.0.1 -; b 10.2.0.1 y", "x", "a 10.1.0.1 -; b 10.2.0.1 y", // Portable took them already
			map[string]string{"x": "10.1.0.1 10.2.0.1"},
		},
		"a zone without an endpoint": {
			"a 10.1.0.1 x; a 10.1.0.2 y; b 10.2.0.1 -", "x,y,z", "a 10.1.0.1 x,z; a 10.1.0.2 y,z; b 10.2.0.1 elsewhere",
			map[string]string{"x": "10.1.0.1", "y": "10.1.0.2", "z": "10.1.0.1 10.1.0.2"},
		},
		"only one that is not ready": {
			"a 10.1.0.1! x; b 10.2.0.1 -", "x", "a 10.1.0.1! x; b 10.2.0.1 -",
			map[string]string{"x": "10.2.0.1"},
		},
		"one of two is not ready": {
			"a 10.1.0.1! x; a 10.1.0.2 y; b 10.2.0.1 -", "x,y", "a 10.1.0.1! x; a 10.1.0.2 y,x; b 10.2.0.1 elsewhere",
			map[string]string{"x": "10.1.0.2", "y": "10.1.0.2"},
		},
		"a local one without hints beside": {
			"a 10.1.0.1 x; a 10.1.0.2 -; b 10.2.0.1 -", "x,y", "a 10.1.0.1 x,y; a 10.1.0.2 x,y; b 10.2.0.1 elsewhere",
			map[string]string{"x": "10.1.0.1 10.1.0.2", "y": "10.1.0.1 10.1.0.2"},
		},
		"more zones than hints": {
			"a 10.1.0.1 z0; b 10.2.0.1 -", "z0,z1,z2,z3,z4,z5,z6,z7,z8", "a 10.1.0.1 z0,z1,z2,z3,z4,z5,z6,z7; b 10.2.0.1 elsewhere",
			map[string]string{"z7": "10.1.0.1", "z8": "10.1.0.1 10.2.0.1"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			all := hinted(tc.endpoints)
			if offers.AsksForNear(all, "a") {
				offers.PreferLocal(all, "a", strings.Split(tc.zones, ","))
			}
			if diff := cmp.Diff(tc.want, hints(all)); diff != "" {
				t.Error(diff)
			}
			for zone, want := range tc.used {
				if got := strings.Join(chosen(all, zone), " "); got != want {
					t.Errorf("clients in zone %q use %s, want %s", zone, got, want)
				}
			}
		})
	}
}

// hinted returns one offer for each endpoint of a text.
func hinted(text string) []offers.Offer {
	var all []offers.Offer
	for part := range strings.SplitSeq(text, "; ") {
		fields := strings.Fields(part)
		address, down := strings.CutSuffix(fields[1], "!")
		e := discoveryv1.Endpoint{Addresses: []string{address}, Conditions: discoveryv1.EndpointConditions{Ready: new(!down)}}
		if fields[2] != "-" {
			e.Hints = &discoveryv1.EndpointHints{}
			for zone := range strings.SplitSeq(fields[2], ",") {
				e.Hints.ForZones = append(e.Hints.ForZones, discoveryv1.ForZone{Name: zone})
			}
		}
		o := offers.Offer{Groups: []offers.Group{{Endpoints: []discoveryv1.Endpoint{e}}}}
		o.Cluster = clusterset.ClusterID(fields[0])
		all = append(all, o)
	}
	return all
}

// hints is the opposite of hinted.
func hints(all []offers.Offer) string {
	var parts []string
	for _, o := range all {
		e := o.Groups[0].Endpoints[0]
		var zones []string
		if e.Hints != nil {
			for _, z := range e.Hints.ForZones {
				zones = append(zones, strings.TrimSuffix(z.Name, ".federation.isthmus.dev"))
			}
		}
		address := e.Addresses[0]
		if !*e.Conditions.Ready {
			address += "!"
		}
		parts = append(parts, fmt.Sprintf("%s %s %s", o.Cluster, address, map[bool]string{true: strings.Join(zones, ","), false: "-"}[e.Hints != nil]))
	}
	return strings.Join(parts, "; ")
}

// chosen are the endpoints that kube-proxy on a node of a zone uses (CategorizeEndpoints in pkg/proxy/topology.go of Kubernetes 1.36): all
// ready ones, unless each has a hint and one is for the zone.
func chosen(all []offers.Offer, zone string) []string {
	var every, near []string
	usable := zone != ""
	for _, o := range all {
		e := o.Groups[0].Endpoints[0]
		if !*e.Conditions.Ready {
			continue
		}
		every = append(every, e.Addresses[0])
		usable = usable && e.Hints != nil && len(e.Hints.ForZones) > 0
		if e.Hints != nil && slices.Contains(e.Hints.ForZones, discoveryv1.ForZone{Name: zone}) {
			near = append(near, e.Addresses[0])
		}
	}
	if usable && len(near) > 0 {
		return near
	}
	return every
}
