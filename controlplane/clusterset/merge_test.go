package clusterset

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/isthmus-net/isthmus/tools/conformance"
)

var epoch = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// export returns a plain export of cluster, changed by edits; clusters named later are younger.
func export(cluster ClusterID, edits ...func(*Export)) Export {
	e := Export{
		Cluster:    cluster,
		Service:    ServiceName{"demo", "hello"},
		ExportedAt: epoch.Add(time.Duration(cluster[0]) * time.Minute),
		Type:       ClusterSetIP,
		Ports:      []Port{{Name: "http", Protocol: TCP, Port: 80}},
		Families:   []Family{IPv4},
	}
	for _, edit := range edits {
		edit(&e)
	}
	return e
}

// numbered returns n ports, such as old-1, 1/TCP.
func numbered(prefix string, n uint16) (ports []Port) {
	for i := range n {
		ports = append(ports, Port{Name: fmt.Sprintf("%s-%d", prefix, i+1), Protocol: TCP, Port: i + 1})
	}
	return ports
}

func TestMergeConflicts(t *testing.T) {
	affinity := func(timeout time.Duration) func(*Export) {
		return func(e *Export) { e.SessionAffinity = SessionAffinity{ClientIP: true, Timeout: timeout} }
	}
	for name, tc := range map[string]struct {
		exports []Export
		want    []string // messages
	}{
		"none": {
			exports: []Export{export("a"), export("b")},
		},
		"port order is no conflict": {
			exports: []Export{
				export("a", func(e *Export) { e.Ports = append(e.Ports, Port{Name: "dns", Protocol: UDP, Port: 53}) }),
				export("b", func(e *Export) { e.Ports = append([]Port{{Name: "dns", Protocol: UDP, Port: 53}}, e.Ports...) }),
			},
		},
		"an additional port": {
			exports: []Export{export("a"), export("b", func(e *Export) { e.Ports = append(e.Ports, Port{Name: "x", Protocol: SCTP, Port: 142}) })},
			want:    []string{"field ports differs in 1 of 2 clusters (b); the union is exposed, and the ports of cluster a win where they collide"},
		},
		"a port renamed in the oldest export": {
			exports: []Export{export("a", func(e *Export) { e.Ports[0].Name = "web" }), export("b"), export("c")},
			want: []string{"field ports differs in 2 of 3 clusters (b, c); the union is exposed, and the ports of cluster a win where they collide: " +
				"1 of 3 clusters get the traffic of port 80/TCP (web), and b, c none"},
		},
		"a port renumbered in a younger export": {
			exports: []Export{export("a"), export("b", func(e *Export) { e.Ports[0].Port = 8080 })},
			want: []string{"field ports differs in 1 of 2 clusters (b); the union is exposed, and the ports of cluster a win where they collide: " +
				"1 of 2 clusters get the traffic of port 80/TCP (http), and b none"},
		},
		"many ports without names in common": {
			exports: []Export{
				export("a", func(e *Export) { e.Ports = numbered("old", 5) }), export("b", func(e *Export) { e.Ports = numbered("new", 5) }),
			},
			want: []string{"field ports differs in 1 of 2 clusters (b); the union is exposed, and the ports of cluster a win where they collide: " +
				"1 of 2 clusters get the traffic of port 1/TCP (old-1), and b none; 1 of 2 clusters get the traffic of port 2/TCP (old-2), and b none; " +
				"1 of 2 clusters get the traffic of port 3/TCP (old-3), and b none; and more"},
		},
		"type": {
			exports: []Export{export("a"), export("b", func(e *Export) { e.Type = Headless })},
			want:    []string{"field type differs in 1 of 2 clusters (b); the oldest export, of cluster a, is used"},
		},
		"session affinity is not also its config": {
			exports: []Export{export("a"), export("b", affinity(time.Hour))},
			want:    []string{"field sessionAffinity differs in 1 of 2 clusters (b); the oldest export, of cluster a, is used"},
		},
		"session affinity config": {
			exports: []Export{export("a", affinity(time.Minute)), export("b", affinity(time.Hour))},
			want:    []string{"field sessionAffinityConfig differs in 1 of 2 clusters (b); the oldest export, of cluster a, is used"},
		},
		"policies": {
			exports: []Export{
				export("a", func(e *Export) { e.InternalTrafficPolicy = "Local" }),
				export("b", func(e *Export) { e.TrafficDistribution = "PreferClose" }),
				export("c", func(e *Export) { e.InternalTrafficPolicy = "Local" }),
			},
			want: []string{
				"field internalTrafficPolicy differs in 1 of 3 clusters (b); the oldest export, of cluster a, is used",
				"field trafficDistribution differs in 1 of 3 clusters (b); the oldest export, of cluster a, is used",
			},
		},
		"families, whatever their order": {
			exports: []Export{
				export("a", func(e *Export) { e.Families = []Family{IPv4, IPv6} }),
				export("b", func(e *Export) { e.Families = []Family{IPv6, IPv4} }),
				export("c"),
			},
			want: []string{"field ipFamilies differs in 1 of 3 clusters (c); the oldest export, of cluster a, is used"},
		},
		"labels and annotations": {
			exports: []Export{
				export("a", func(e *Export) { e.Labels = map[string]string{"x": "1"} }),
				export("b", func(e *Export) { e.Annotations = map[string]string{"x": "1"} }),
			},
			want: []string{
				"field exportedLabels differs in 1 of 2 clusters (b); the oldest export, of cluster a, is used",
				"field exportedAnnotations differs in 1 of 2 clusters (b); the oldest export, of cluster a, is used",
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, conflicts := Merge(tc.exports)
			var have []string
			for _, c := range conflicts {
				have = append(have, c.Message())
			}
			if diff := cmp.Diff(tc.want, have); diff != "" {
				t.Errorf("conflicts (-want +have):\n%s", diff)
			}
		})
	}
}

func TestMergePorts(t *testing.T) {
	tcp := func(name string, port uint16) Port { return Port{Name: name, Protocol: TCP, Port: port} }
	for name, tc := range map[string]struct {
		older, younger, want []Port
	}{
		"union, the older one's first": {[]Port{tcp("z", 9)}, []Port{tcp("a", 1)}, []Port{tcp("z", 9), tcp("a", 1)}},
		"same name, other number":      {[]Port{tcp("tcp", 42)}, []Port{tcp("tcp", 4242)}, []Port{tcp("tcp", 42)}},
		"same number, other name":      {[]Port{tcp("web", 80)}, []Port{tcp("http", 80)}, []Port{tcp("web", 80)}},
		"same number, other protocol": {
			[]Port{tcp("dns", 53)},
			[]Port{{Name: "dns-udp", Protocol: UDP, Port: 53}},
			[]Port{tcp("dns", 53), {Name: "dns-udp", Protocol: UDP, Port: 53}},
		},
		"unnamed on both sides": {[]Port{tcp("", 80)}, []Port{tcp("", 81)}, []Port{tcp("", 80)}},
	} {
		t.Run(name, func(t *testing.T) {
			imp, _ := Merge([]Export{
				export("b", func(e *Export) { e.Ports = tc.younger }),
				export("a", func(e *Export) { e.Ports = tc.older }),
			})
			if diff := cmp.Diff(tc.want, imp.Ports); diff != "" {
				t.Errorf("ports (-want +have):\n%s", diff)
			}
		})
	}
	conformance.Holds(t, "N28")
}

func TestMergePrecedence(t *testing.T) {
	same := func(e *Export) { e.ExportedAt = epoch }
	headless := func(e *Export) { e.Type = Headless }
	for name, tc := range map[string]struct {
		exports []Export
		want    ServiceType
	}{
		"the oldest":                 {[]Export{export("b", headless), export("a")}, ClusterSetIP},
		"a tie goes to the lower id": {[]Export{export("b", same, headless), export("a", same)}, ClusterSetIP},
		"a label before its dotted":  {[]Export{export("a.b", same, headless), export("a", same)}, ClusterSetIP},
	} {
		t.Run(name, func(t *testing.T) {
			if imp, _ := Merge(tc.exports); imp.Type != tc.want {
				t.Errorf("type = %s, want %s", imp.Type, tc.want)
			}
		})
	}
}

func TestMergeRemembersTheOldestVIP(t *testing.T) {
	ip := netip.MustParseAddr("243.0.0.9")
	remembers := func(e *Export) { e.IPs = []netip.Addr{ip} }
	other := func(e *Export) { e.IPs = []netip.Addr{netip.MustParseAddr("243.0.0.1")} }
	imp, _ := Merge([]Export{export("c", other), export("b", remembers), export("a")})
	if diff := cmp.Diff([]netip.Addr{ip}, imp.IPs, addrs); diff != "" {
		t.Errorf("IPs (-want +have):\n%s", diff)
	}
	imp, _ = Merge([]Export{export("a", func(e *Export) { e.Type = Headless }), export("b", remembers)})
	if imp.IPs != nil {
		t.Errorf("a headless import has the IPs %v", imp.IPs)
	}
}

func TestMergeOfNothing(t *testing.T) {
	imp, conflicts := Merge(nil)
	if diff := cmp.Diff(Import{}, imp, addrs); diff != "" || conflicts != nil {
		t.Errorf("Merge(nil) = %v, %v", imp, conflicts)
	}
}

// exports draws what up to five members may say about one Service: few values, so that they often agree.
func exports(t *rapid.T) []Export {
	ids := rapid.SliceOfNDistinct(rapid.SampledFrom([]ClusterID{"a", "b", "c", "a.b", "d"}), 1, 5, rapid.ID).Draw(t, "clusters")
	port := rapid.Custom(func(t *rapid.T) Port {
		return Port{
			Name:        rapid.SampledFrom([]string{"", "x", "y"}).Draw(t, "name"),
			Protocol:    rapid.SampledFrom([]Protocol{TCP, UDP}).Draw(t, "protocol"),
			Port:        rapid.SampledFrom([]uint16{1, 2}).Draw(t, "number"),
			AppProtocol: rapid.SampledFrom([]string{"", "h2c"}).Draw(t, "app"),
		}
	})
	set := rapid.SampledFrom([]map[string]string{nil, {"k": "1"}, {"k": "2"}})
	var es []Export
	for _, id := range ids {
		es = append(es, Export{
			Cluster:               id,
			Service:               ServiceName{"demo", "hello"},
			ExportedAt:            epoch.Add(time.Duration(rapid.IntRange(0, 2).Draw(t, "age")) * time.Second),
			Type:                  rapid.SampledFrom([]ServiceType{ClusterSetIP, Headless}).Draw(t, "type"),
			Ports:                 rapid.SliceOfN(port, 0, 3).Draw(t, "ports"),
			Families:              rapid.SampledFrom([][]Family{{IPv4}, {IPv6}, {IPv4, IPv6}, {IPv6, IPv4}}).Draw(t, "families"),
			InternalTrafficPolicy: rapid.SampledFrom([]string{"", "Local"}).Draw(t, "policy"),
			Labels:                set.Draw(t, "labels"),
			Annotations:           set.Draw(t, "annotations"),
		})
	}
	return es
}

func TestMergeIgnoresTheOrderOfItsInput(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		es := exports(t)
		imp, conflicts := Merge(es)
		imp2, conflicts2 := Merge(rapid.Permutation(es).Draw(t, "permutation"))
		if diff := cmp.Diff(imp, imp2, addrs); diff != "" {
			t.Fatalf("imports differ:\n%s", diff)
		}
		if diff := cmp.Diff(conflicts, conflicts2); diff != "" {
			t.Fatalf("conflicts differ:\n%s", diff)
		}
	})
}

func TestMergeLaws(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		es := exports(t)
		imp, conflicts := Merge(es)

		names, numbers := map[string]bool{}, map[Port]bool{}
		for _, p := range imp.Ports {
			number := Port{Protocol: p.Protocol, Port: p.Port}
			if names[p.Name] || numbers[number] {
				t.Fatalf("ports %v repeat a name, or a protocol and port", imp.Ports)
			}
			names[p.Name], numbers[number] = true, true
			if !slices.ContainsFunc(es, func(e Export) bool { return e.Exposes(p) }) {
				t.Fatalf("no member exposes %v", p)
			}
		}

		oldest := slices.MinFunc(es, func(a, b Export) int {
			if c := a.ExportedAt.Compare(b.ExportedAt); c != 0 {
				return c
			}
			return slices.Compare([]byte(a.Cluster), []byte(b.Cluster))
		})
		if imp.Type != oldest.Type || !maps.Equal(imp.Labels, oldest.Labels) {
			t.Fatalf("%v does not win: %v", oldest, imp)
		}
		if len(imp.Clusters) != len(es) || !slices.IsSorted(imp.Clusters) {
			t.Fatalf("clusters %v", imp.Clusters)
		}

		disagree := map[ConflictField]func(a, b Export) bool{
			ConflictType:                  func(a, b Export) bool { return a.Type != b.Type },
			ConflictInternalTrafficPolicy: func(a, b Export) bool { return a.InternalTrafficPolicy != b.InternalTrafficPolicy },
			ConflictLabels:                func(a, b Export) bool { return !maps.Equal(a.Labels, b.Labels) },
			ConflictAnnotations:           func(a, b Export) bool { return !maps.Equal(a.Annotations, b.Annotations) },
		}
		for field, differ := range disagree {
			want := slices.ContainsFunc(es, func(e Export) bool { return differ(oldest, e) })
			have := slices.ContainsFunc(conflicts, func(c Conflict) bool { return c.Field == field })
			if have != want {
				t.Fatalf("conflict in %s: %t, want %t", field, have, want)
			}
		}
		for _, c := range conflicts {
			if c.Winner != oldest.Cluster || slices.Contains(c.Losers, c.Winner) || len(c.Losers) == 0 || !slices.IsSorted(c.Losers) || c.Clusters != len(es) {
				t.Fatalf("conflict %+v", c)
			}
		}
	})
	conformance.Holds(t, "N28")
}
