package gateway

import (
	"slices"
	"strings"
	"testing"
)

// Each balancer is compared with the hand-written rules of the same turn.
func TestBalancerRows(t *testing.T) {
	seen := throughput{byHand: {}, withNFT: {}, withEBPF: {}, withXDP: {}}
	for _, k := range kinds {
		for _, n := range [][3]float64{{100, 90, 120}, {200, 200, 220}, {400, 380, 500}} {
			seen[byHand][k.name] = append(seen[byHand][k.name], pace{perSecond: n[0], done: 7, reset: 1})
			seen[withNFT][k.name] = append(seen[withNFT][k.name], pace{perSecond: n[1], done: 7})
			seen[withXDP][k.name] = append(seen[withXDP][k.name], pace{perSecond: n[0] / 2, done: 7})
			seen[withEBPF][k.name] = append(seen[withEBPF][k.name], pace{perSecond: n[2], done: 5, reset: 2})
		}
	}
	var have []float64
	for _, m := range balancerRows(seen) {
		have = append(have, m.Value)
		if open := strings.HasPrefix(m.Name, withXDP); (m.Bar != nil) != (m.Unit == "ratio" && !open) {
			t.Errorf("%s: bar %v", m.Name, m.Bar)
		}
		if m.Peer != nil && (*m.Peer != 6 || !strings.Contains(m.Name, "of 42;")) {
			t.Errorf("%s: peer %v, want 6 resets of 42 connections", m.Name, *m.Peer)
		}
	}
	if want := []float64{1.2, 220, 1.2, 220, 12, 0.95, 200, 0.95, 200, 0, 0.5, 100, 0.5, 100, 0}; !slices.Equal(have, want) {
		t.Errorf("have %v, want %v", have, want)
	}
}
