package view

import (
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/client-go/tools/cache"
	"pgregory.net/rapid"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// After any sequence of changes the Snapshot equals that of assemble; earlier Snapshots do not change.
func TestJoinedEqualsAssemble(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newJoined()
		imports, members := map[int]*clusterset.Import{}, map[string]*member{}
		assembled := func() *clusterset.Snapshot {
			var is []clusterset.Import
			var ms []member
			for _, i := range imports {
				if i != nil {
					is = append(is, *i)
				}
			}
			for _, m := range members {
				if m != nil {
					ms = append(ms, *m)
				}
			}
			return assemble(is, ms)
		}
		name := func(i int) clusterset.ServiceName {
			return clusterset.ServiceName{Namespace: fmt.Sprint("ns", i%2), Name: fmt.Sprint("s", i)}
		}
		var handed, copied []*clusterset.Snapshot
		for n := range rapid.IntRange(1, 40).Draw(t, "steps") {
			i, gone := rapid.IntRange(0, 4).Draw(t, "service"), rapid.IntRange(0, 2).Draw(t, "gone") == 0
			if rapid.Bool().Draw(t, "import") {
				var is *clusterset.Import
				if !gone {
					is = &clusterset.Import{Service: name(i), TrafficDistribution: fmt.Sprint(n)}
				}
				w.replaceImport(imports[i], is)
				imports[i] = is
			} else {
				object := fmt.Sprint("slice", rapid.IntRange(0, 6).Draw(t, "slice"))
				var is *member
				if !gone {
					cluster := clusterset.ClusterID(rapid.SampledFrom([]string{"a", "b", "a.b"}).Draw(t, "cluster"))
					is = &member{name(i), clusterset.Slice{Name: object, Cluster: cluster, Endpoints: []clusterset.Endpoint{{Hostname: fmt.Sprint(n)}}}}
				}
				w.replaceSlice(members[object], is)
				members[object] = is
			}
			if rapid.Bool().Draw(t, "look") {
				have, want := w.snapshot(), assembled()
				if diff := cmp.Diff(want, have); diff != "" {
					t.Fatalf("step %d (-want +got):\n%s", n, diff)
				}
				if w.snapshot() != have {
					t.Fatal("nothing changed, and the Snapshot is another one")
				}
				handed, copied = append(handed, have), append(copied, want)
			}
		}
		if diff := cmp.Diff(copied, handed); diff != "" {
			t.Fatalf("a Snapshot changed after it was handed out:\n%s", diff)
		}
	})
}

// Events hold objects of several types; cachedIn finds the cached one.
func TestCachedIn(t *testing.T) {
	good, bad := &cached[member]{}, &cached[member]{err: errors.New("no address")}
	tests := map[string]struct {
		event any
		want  *member
	}{
		"an object":                           {good, &good.value},
		"an invalid object":                   {bad, nil},
		"a missed deletion":                   {cache.DeletedFinalStateUnknown{Obj: good}, &good.value},
		"a missed deletion of an invalid one": {cache.DeletedFinalStateUnknown{Obj: bad}, nil},
		"nil":                                 {nil, nil},
		"another type":                        {"object", nil},
	}
	for name, test := range tests {
		if got := cachedIn[member](test.event).understood(); got != test.want {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
}
