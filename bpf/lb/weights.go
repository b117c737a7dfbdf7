package lb

import "math"

// maxSlots is the approximate limit of a table that repeats backends by weight. Every backend has at least one slot.
const maxSlots = 4096

// group is the backends of one source cluster.
type group struct {
	size   int    // number of backends
	weight uint32 // of the whole group
}

// slotsPerBackend returns how many slots each backend of each group gets, so that the groups' shares follow their weights:
// exactly if maxSlots are enough for that, else approximately. If all weights are 0, all groups weigh the same. Every size
// must be at least 1.
func slotsPerBackend(groups []group) []uint32 {
	each := make([]uint32, len(groups))
	weights := make([]uint64, len(groups))
	var any bool
	for i, g := range groups {
		weights[i] = uint64(g.weight)
		any = any || g.weight > 0
	}
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
	if multiple > maxSlots*maxWeight {
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
