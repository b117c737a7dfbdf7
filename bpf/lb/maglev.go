package lb

import "encoding/binary"

// maglevSizes are the sizes of Maglev tables: primes, each about twice the one before.
var maglevSizes = []int{101, 199, 401, 797, 1601, 3203, 6397, 12799, 25601, 51199}

// maglevShare is how many slots there are at least for each unit of weight, as long as the sizes last: with
// n slots for each, the shares of two backends differ by less than one part in n. It is as much as lets tables of
// 10,000 Services with 10 backends each into the map of slots.
const maglevShare = 19

// maglevSize returns the size of the table for so many units, 0 when the largest one is too small for a
// table that would be worth its name.
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

// Maglev fills a table of a prime number of slots with the indices of addrs, each as often as its weight
// says, 1 for everybody when weights is nil. It is the population of section 3.4 of Eisenbud et al.,
// "Maglev: A Fast and Reliable Software Network Load Balancer" (NSDI 2016): each backend walks the slots in
// an order that follows from its own address alone, and they take turns. So nodes that know the same backends
// have the same table, in whatever order they heard of them as long as addrs is sorted, and few slots change
// hands when a backend comes or goes.
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
				continue // not its turn yet
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

// hash spreads addresses evenly. It is part of what all nodes of a ClusterSet, and all gateways, must have in
// common: never change it. FNV-1a over the bytes, then the finalizer of SplitMix64 for the high bits.
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
