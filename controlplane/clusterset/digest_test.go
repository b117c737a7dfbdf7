package clusterset

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// Digests are equal exactly when the sets are, whatever was added and removed on the way.
func TestDigest(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var have [2]Digest
		sets := [2]map[string]bool{{}, {}}
		for range rapid.IntRange(0, 40).Draw(t, "steps") {
			i, name := rapid.IntRange(0, 1).Draw(t, "set"), fmt.Sprintf("demo/%d", rapid.IntRange(0, 4).Draw(t, "name"))
			if sets[i][name] {
				delete(sets[i], name)
				have[i].Remove(name)
				continue
			}
			sets[i][name] = true
			have[i].Add(name)
		}
		if equal := maps.Equal(sets[0], sets[1]); equal != (have[0] == have[1]) || equal != (have[0].String() == have[1].String()) {
			t.Errorf("%v and %v have the digests %s and %s", slices.Sorted(maps.Keys(sets[0])), slices.Sorted(maps.Keys(sets[1])), have[0], have[1])
		}
	})
}
