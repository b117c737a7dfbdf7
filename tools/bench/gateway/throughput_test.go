package gateway

import (
	"slices"
	"testing"
)

// Each of our balancers is held against the rules by hand of the same turn.
func TestBalancerRows(t *testing.T) {
	seen := throughput{byHand: {}, withNFT: {}, withEBPF: {}}
	for _, k := range kinds {
		seen[byHand][k.name] = []float64{100, 200, 400}
		seen[withNFT][k.name] = []float64{90, 200, 380}
		seen[withEBPF][k.name] = []float64{120, 220, 500}
	}
	var have []float64
	for _, m := range balancerRows(seen) {
		have = append(have, m.Value)
		if m.Bar == nil {
			t.Errorf("%s has no bar", m.Name)
		}
	}
	if want := []float64{1.2, 1.2, 0.95, 0.95}; !slices.Equal(have, want) {
		t.Errorf("have %v, want %v", have, want)
	}
}
