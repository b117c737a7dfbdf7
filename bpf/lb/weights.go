package lb

import (
	"math"
	"slices"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// maxSlots is the approximate limit of a table that repeats backends by weight. Every backend has at least one slot.
const maxSlots = 4096

// group is the backends of one source cluster.
type group struct {
	size   int    // number of backends
	weight uint32 // of the whole group
}

// shares returns weights of clusters for slotsByWeight, so that each group of the policy divides the share that its endpoints have together, and
// every other cluster has the share of its own endpoints. member holds the index of each cluster.
//
// For example, with 2 endpoints in each of a, b and c, "a=3,b=1;" gives a half of all clients, b a sixth, and c a third.
func (p *policy) shares(clusters []group, member map[clusterset.ClusterID]int) []uint64 {
	sizes, sums := map[int]uint64{}, map[int]uint64{}
	for id, i := range member {
		if g, ok := p.groups[id]; ok {
			sizes[g] += uint64(clusters[i].size)
			sums[g] += uint64(clusters[i].weight)
		}
	}
	common := uint64(1) // a multiple of all sums, or a large number for rounded weights
	for _, sum := range sums {
		if sum > 0 {
			common *= sum / gcd(common, sum)
		}
		if common > maxSlots*maxWeight {
			common = maxSlots * maxWeight
			break
		}
	}
	shares := make([]uint64, len(clusters))
	for id, i := range member {
		g, ok := p.groups[id]
		if c := clusters[i]; ok && sums[g] > 0 {
			shares[i] = sizes[g] * uint64(c.weight) * common / sums[g]
		} else {
			shares[i] = uint64(c.size) * common
		}
	}
	return shares
}

// slotsPerBackend returns how many slots each backend of each group gets, so that the groups' shares follow their weights:
// exactly if maxSlots are enough for that, else approximately. If all weights are 0, all groups weigh the same. Every size
// must be at least 1.
func slotsPerBackend(groups []group) []uint32 {
	weights := make([]uint64, len(groups))
	for i, g := range groups {
		weights[i] = uint64(g.weight)
	}
	return slotsByWeight(groups, weights)
}

// slotsByWeight is slotsPerBackend with other weights.
func slotsByWeight(groups []group, weights []uint64) []uint32 {
	each := make([]uint32, len(groups))
	any := slices.Max(weights) > 0
	multiple := uint64(1)
	for i, g := range groups {
		if !any {
			weights[i] = 1
		}
		if multiple <= maxSlots*maxWeight {
			multiple *= uint64(g.size) / gcd(multiple, uint64(g.size))
		}
	}
	if exact(groups, weights, multiple, each) {
		return each
	}
	var sum float64
	for _, w := range weights {
		sum += float64(w)
	}
	for i, g := range groups {
		each[i] = uint32(max(1, math.Round(float64(weights[i])/sum*maxSlots/float64(g.size))))
	}
	return each
}

// exact sets each to the smallest integers in the proportion of the weights, and reports whether maxSlots are enough for
// them. multiple is a common multiple of all sizes, or too large a number.
func exact(groups []group, weights []uint64, multiple uint64, each []uint32) bool {
	// Larger products could overflow.
	if multiple > maxSlots*maxWeight || slices.Max(weights) > math.MaxUint32 {
		return false
	}
	var common, total uint64
	for i, g := range groups {
		common = gcd(common, weights[i]*multiple/uint64(g.size))
	}
	for i, g := range groups {
		n := weights[i] * multiple / uint64(g.size) / common
		if total += n * uint64(g.size); total > maxSlots {
			return false
		}
		each[i] = uint32(n)
	}
	return true
}

func gcd(a, b uint64) uint64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
