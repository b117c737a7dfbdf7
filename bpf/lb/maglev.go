package lb

import "encoding/binary"

// maglevSizes are the sizes of Maglev tables: primes, each about twice its predecessor.
var maglevSizes = []int{101, 199, 401, 797, 1601, 3203, 6397, 12799, 25601, 51199}

// maglevShare is the least number of slots for each unit of weight, up to the largest size. With n slots each, the shares
// of two backends differ by less than one part in n. A larger number would not let the tables of 10,000 Services
// with 10 backends each fit into the map of slots.
const maglevShare = 19

// maglevSize returns the size of a table for so many units of weight, 0 when even the largest size has fewer than two slots
// for each.
func maglevSize(units int) int {
	for _, m := range maglevSizes {
		if m >= maglevShare*units {
			return m
		}
	}
	if largest := maglevSizes[len(maglevSizes)-1]; largest >= 2*units {
		return largest
	}
	return 0
}

// Maglev fills a table of size slots, a prime, with the indices of addrs. Each index occurs in proportion to its weight,
// or equally often if weights is nil. It implements section 3.4 of Eisenbud et al., "Maglev: A Fast and Reliable Software
// Network Load Balancer" (NSDI 2016): each backend walks the slots in an order that follows from its address alone, and
// the backends take turns. So all nodes with the same backends, sorted, have the same table, and few slots change when a
// backend is added or removed.
func Maglev(addrs []Address, weights []uint32, size int) []int {
	type walk struct{ at, step, credit uint64 }
	m := uint64(size)
	walks := make([]walk, len(addrs))
	heaviest := uint64(1)
	for i, a := range addrs {
		walks[i] = walk{at: hash(a, 0) % m, step: hash(a, 1)%(m-1) + 1}
		if weights != nil {
			heaviest = max(heaviest, uint64(weights[i]))
		}
	}
	table := make([]int, size)
	for i := range table {
		table[i] = -1
	}
	for filled := 0; filled < size; {
		for i := range walks {
			w := &walks[i]
			if weights == nil {
				w.credit += heaviest
			} else {
				w.credit += uint64(weights[i])
			}
			if w.credit < heaviest {
				continue // it skips this turn
			}
			w.credit -= heaviest
			for table[w.at] >= 0 {
				w.at = (w.at + w.step) % m
			}
			table[w.at] = i
			if filled++; filled == size {
				break
			}
		}
	}
	return table
}

// hash spreads addresses evenly. All nodes of a ClusterSet, and all gateways, must compute the same hash: never change it.
// It is FNV-1a over the bytes, then the finalizer of SplitMix64 for the high bits.
func hash(a Address, seed byte) uint64 {
	addr := a.AddrPort.Addr().As16()
	bytes := binary.BigEndian.AppendUint16(addr[:], a.AddrPort.Port())
	h := uint64(14695981039346656037)
	for _, b := range append(bytes, byte(a.Protocol), seed) {
		h = (h ^ uint64(b)) * 1099511628211
	}
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return h ^ h>>31
}
