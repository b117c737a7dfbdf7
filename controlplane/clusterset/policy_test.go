package clusterset_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// of returns an export of cluster at an hour of one day, with ports.
func of(cluster clusterset.ClusterID, hour int, ports ...clusterset.Port) clusterset.Export {
	return clusterset.Export{
		Cluster: cluster, Service: clusterset.ServiceName{Namespace: "demo", Name: "hello"}, Type: clusterset.ClusterSetIP,
		ExportedAt: time.Date(2026, 11, 1, hour, 0, 0, 0, time.UTC), Families: []clusterset.Family{clusterset.IPv4}, Ports: ports,
	}
}

func TestPolicyOfPorts(t *testing.T) {
	t.Parallel()
	http, dns := clusterset.Port{Name: "http", Protocol: clusterset.TCP, Port: 80}, clusterset.Port{Name: "dns", Protocol: clusterset.UDP, Port: 53}
	other := clusterset.Port{Name: "http", Protocol: clusterset.TCP, Port: 8080}
	exports := []clusterset.Export{of("a", 1, http, dns), of("b", 2, other, dns)}
	for policy, want := range map[clusterset.Policy][]clusterset.Port{
		{}:                     {http, dns},
		{IntersectPorts: true}: {dns},
	} {
		imp, conflicts := policy.Merge(exports)
		if diff := cmp.Diff(want, imp.Ports); diff != "" {
			t.Errorf("%+v (-want +have):\n%s", policy, diff)
		}
		if len(conflicts) != 1 || conflicts[0].Field != clusterset.ConflictPorts {
			t.Errorf("%+v: conflicts %v", policy, conflicts)
		}
	}
}

func TestPolicyOfTypes(t *testing.T) {
	t.Parallel()
	older, younger := of("a", 1), of("b", 2)
	younger.Type = clusterset.Headless
	for policy, want := range map[clusterset.Policy][]clusterset.ClusterID{
		{}:                   {"a", "b"},
		{ExcludeTypes: true}: {"a"},
	} {
		imp, conflicts := policy.Merge([]clusterset.Export{younger, older})
		if diff := cmp.Diff(want, imp.Clusters); diff != "" {
			t.Errorf("%+v (-want +have):\n%s", policy, diff)
		}
		if len(conflicts) != 1 || conflicts[0].Field != clusterset.ConflictType || conflicts[0].Clusters != 2 {
			t.Errorf("%+v: conflicts %v", policy, conflicts)
		}
	}
}

func TestChoiceOfClusterSetIP(t *testing.T) {
	t.Parallel()
	const none, yes, no = clusterset.Unknown, clusterset.Enabled, clusterset.Disabled
	tests := map[string]struct {
		wants, agreed [2]clusterset.Choice // of the older export and of the younger one
		use           clusterset.Choice
		losers        string
	}{
		"both ask":                             {[2]clusterset.Choice{yes, yes}, [2]clusterset.Choice{}, yes, ""},
		"the older asks":                       {[2]clusterset.Choice{yes, no}, [2]clusterset.Choice{}, yes, "b"},
		"the older declines":                   {[2]clusterset.Choice{no, yes}, [2]clusterset.Choice{}, no, "b"},
		"agreed before, the older changes":     {[2]clusterset.Choice{no, yes}, [2]clusterset.Choice{yes, yes}, yes, "a"},
		"agreed before, both change":           {[2]clusterset.Choice{no, no}, [2]clusterset.Choice{yes, yes}, yes, "a, b"},
		"only the younger remembers":           {[2]clusterset.Choice{no, no}, [2]clusterset.Choice{none, yes}, yes, "a, b"},
		"the older is of a version before":     {[2]clusterset.Choice{none, no}, [2]clusterset.Choice{}, no, ""},
		"both are of a version before":         {[2]clusterset.Choice{}, [2]clusterset.Choice{}, none, ""},
		"a version before conflicts with none": {[2]clusterset.Choice{none, yes}, [2]clusterset.Choice{none, yes}, yes, ""},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			older, younger := of("a", 1), of("b", 2)
			older.WantsIP, younger.WantsIP = tt.wants[0], tt.wants[1]
			older.AgreedIP, younger.AgreedIP = tt.agreed[0], tt.agreed[1]
			imp, conflicts := clusterset.Merge([]clusterset.Export{younger, older})
			if imp.UseIP != tt.use {
				t.Errorf("the import uses an IP: %q, want %q", imp.UseIP, tt.use)
			}
			var losers []string
			for _, c := range conflicts {
				if c.Field != clusterset.ConflictClusterSetIP {
					t.Errorf("conflict in %s", c.Field)
				}
				for _, l := range c.Losers {
					losers = append(losers, string(l))
				}
			}
			if got := strings.Join(losers, ", "); got != tt.losers {
				t.Errorf("losers %q, want %q", got, tt.losers)
			}
		})
	}
}

// The choice in an aggregate counts if an export asks for the same and none remembers another: a member may write an aggregate
// without exporting the Service.
func TestSettle(t *testing.T) {
	t.Parallel()
	const none, yes, no = clusterset.Unknown, clusterset.Enabled, clusterset.Disabled
	for name, tt := range map[string]struct {
		recorded      clusterset.Choice
		wants, agreed [2]clusterset.Choice
		use           clusterset.Choice
		counts        bool
	}{
		"nobody asks to decline":           {no, [2]clusterset.Choice{yes, yes}, [2]clusterset.Choice{}, yes, false},
		"nobody asks for an IP":            {yes, [2]clusterset.Choice{no, no}, [2]clusterset.Choice{}, no, false},
		"the younger asked first":          {no, [2]clusterset.Choice{yes, no}, [2]clusterset.Choice{}, no, true},
		"no choice":                        {none, [2]clusterset.Choice{yes, no}, [2]clusterset.Choice{}, yes, true},
		"changed behind the exporters":     {yes, [2]clusterset.Choice{no, yes}, [2]clusterset.Choice{no, none}, no, true},
		"the younger remembers the choice": {yes, [2]clusterset.Choice{no, no}, [2]clusterset.Choice{none, yes}, yes, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			older, younger := of("a", 1), of("b", 2)
			older.WantsIP, younger.WantsIP = tt.wants[0], tt.wants[1]
			older.AgreedIP, younger.AgreedIP = tt.agreed[0], tt.agreed[1]
			exports := []clusterset.Export{older, younger}
			if counts := (clusterset.Aggregate{UseIP: tt.recorded}).Settle(exports); counts != tt.counts {
				t.Errorf("the choice counts: %t, want %t", counts, tt.counts)
			}
			if imp, _ := clusterset.Merge(exports); imp.UseIP != tt.use {
				t.Errorf("the import uses an IP: %q, want %q", imp.UseIP, tt.use)
			}
		})
	}
}

// Weights count among the exporters that state the same ones. What one cluster states alone changes nothing for the others.
func TestWeightsNeedAgreement(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		stated []string // by exporters a, b, c, the oldest first
		want   string
	}{
		"nobody":                         {[]string{"", ""}, ""},
		"all":                            {[]string{"a=3,b=1", "b=1, a=3"}, "a=3,b=1"},
		"all, of one that is not listed": {[]string{"a=3", "a=3"}, "a=3,b=1"},
		"the oldest alone takes all":     {[]string{"a=1000,b=0", ""}, ""},
		"the youngest alone takes all":   {[]string{"", "b=1000,a=0"}, ""},
		"two that differ":                {[]string{"a=3,b=1", "a=1,b=3"}, ""},
		"a third states nothing":         {[]string{"a=3,b=1", "a=3,b=1", ""}, "a=3,b=1;"},
		"a third wants all":              {[]string{"c=0,a=1000", "a=1,b=3,c=1", "a=1,b=3,c=1"}, "b=3,c=1;"},
		"two against two":                {[]string{"a=9", "a=9", "d=2", "d=2"}, "a=9,b=1;c=1,d=2;"},
		"one drains itself":              {[]string{"", "b=0"}, "b=0;"},
		"and not others":                 {[]string{"", "a=0,b=1"}, ""},
		"alone":                          {[]string{"a=3"}, ""},
		"not valid, for agents to tell":  {[]string{"a=many", ""}, "a=many"},
		"not valid beside an agreement":  {[]string{"a=many", "b=2", "b=2"}, "b=2,c=1;"},
		"groups are not for exporters":   {[]string{"a=3,b=1;", "a=3,b=1;"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var exports []clusterset.Export
			for i, text := range tt.stated {
				e := clusterset.Export{Cluster: clusterset.ClusterID(rune('a' + i)), ExportedAt: time.Unix(int64(i), 0), Type: clusterset.ClusterSetIP, Annotations: map[string]string{"note": "x"}}
				if text != "" {
					e.Annotations[clusterset.AnnotationClusterWeights] = text
				}
				exports = append(exports, e)
			}
			imp, _ := clusterset.Merge(exports)
			if have := imp.Annotations[clusterset.AnnotationClusterWeights]; have != tt.want || imp.Annotations["note"] != "x" {
				t.Errorf("annotations %v, want weights %q", imp.Annotations, tt.want)
			}
			if len(exports[0].Annotations) > 2 || tt.stated[0] != exports[0].Annotations[clusterset.AnnotationClusterWeights] {
				t.Errorf("Merge changed its input: %v", exports[0].Annotations)
			}
		})
	}
}
