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
