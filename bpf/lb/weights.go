package lb

import "math"

// maxSlots is about how many slots a table has at most that repeats backends by weight; a backend always has
// one.
const maxSlots = 4096

// group is the backends of one source cluster.
type group struct {
	size   int    // how many there are
	weight uint32 // of all of them together
}

// slotsPerBackend returns how many slots each backend of each group gets, so that groups have shares as their weights
// say: exactly where that takes at most maxSlots, else as near as these allow. Groups without any weight
// weigh the same. Every size is at least 1.
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

// exact sets each to the smallest whole numbers in the proportion of the weights, and reports whether they
// need few enough slots. multiple is one of all sizes, or a number too large.
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
