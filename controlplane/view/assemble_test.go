package view

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

func TestAssembleJoinsImportsAndSlices(t *testing.T) {
	web, db := clusterset.ServiceName{Namespace: "shop", Name: "web"}, clusterset.ServiceName{Namespace: "shop", Name: "db"}
	tests := map[string]struct {
		imports []clusterset.Import
		members []member
		want    []clusterset.Service
	}{
		"an empty snapshot has an empty list, not nil": {want: []clusterset.Service{}},
		"an import without slices has no endpoints": {
			imports: []clusterset.Import{{Service: web}},
			want:    []clusterset.Service{{Import: clusterset.Import{Service: web}}},
		},
		"a slice without an import is left out": {
			members: []member{{web, clusterset.Slice{Name: "web-1", Cluster: "a"}}},
			want:    []clusterset.Service{},
		},
		"services are sorted by name, slices by cluster and name": {
			imports: []clusterset.Import{{Service: web}, {Service: db}},
			members: []member{
				{web, clusterset.Slice{Name: "web-1", Cluster: "b"}},
				{web, clusterset.Slice{Name: "web-3", Cluster: "a"}},
				{web, clusterset.Slice{Name: "web-2", Cluster: "a"}},
			},
			want: []clusterset.Service{
				{Import: clusterset.Import{Service: db}},
				{Import: clusterset.Import{Service: web}, Slices: []clusterset.Slice{
					{Name: "web-2", Cluster: "a"}, {Name: "web-3", Cluster: "a"}, {Name: "web-1", Cluster: "b"},
				}},
			},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			got := assemble(tc.imports, tc.members)
			if diff := cmp.Diff(tc.want, got.Services); diff != "" {
				t.Errorf("services (-want +got):\n%s", diff)
			}
		})
	}
}

func TestAssembleIgnoresOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var imports []clusterset.Import
		var members []member
		for i := range rapid.IntRange(0, 6).Draw(t, "services") {
			name := clusterset.ServiceName{Namespace: fmt.Sprint("ns", i%2), Name: fmt.Sprint("svc", i)}
			if rapid.Bool().Draw(t, "imported") {
				imports = append(imports, clusterset.Import{Service: name})
			}
			for j := range rapid.IntRange(0, 4).Draw(t, "slices") {
				cluster := clusterset.ClusterID(rapid.SampledFrom([]string{"a", "b", "a.b"}).Draw(t, "cluster"))
				members = append(members, member{name, clusterset.Slice{Name: fmt.Sprintf("s%d-%d", i, j), Cluster: cluster}})
			}
		}
		want := assemble(imports, members)

		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		imports, members = slices.Clone(imports), slices.Clone(members)
		r.Shuffle(len(imports), func(i, j int) { imports[i], imports[j] = imports[j], imports[i] })
		r.Shuffle(len(members), func(i, j int) { members[i], members[j] = members[j], members[i] })
		if diff := cmp.Diff(want, assemble(imports, members)); diff != "" {
			t.Fatalf("another order gives another snapshot (-want +got):\n%s", diff)
		}
	})
}
