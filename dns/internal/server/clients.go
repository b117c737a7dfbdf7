package server

import (
	"net/netip"
	"slices"
)

// clientSet is an immutable set of client addresses: ranges that are sorted and do not overlap. A lookup allocates nothing. The
// nil set is empty.
type clientSet struct{ ranges []addrRange }

// addrRange is the addresses from first to last, both included.
type addrRange struct{ first, last netip.Addr }

// newClientSet returns the set of all addresses in prefixes.
func newClientSet(prefixes []netip.Prefix) *clientSet {
	var all []addrRange
	for _, p := range prefixes {
		if p.IsValid() {
			all = append(all, rangeOf(p))
		}
	}
	slices.SortFunc(all, func(x, y addrRange) int { return x.first.Compare(y.first) })
	set := &clientSet{}
	for _, r := range all {
		n := len(set.ranges)
		if n > 0 {
			before := &set.ranges[n-1]
			if r.first.Compare(before.last) <= 0 || before.last.Next() == r.first { // netip orders all IPv4 addresses before IPv6
				if before.last.Less(r.last) {
					before.last = r.last
				}
				continue
			}
		}
		set.ranges = append(set.ranges, r)
	}
	return set
}

// rangeOf returns the addresses of a prefix. A range of mapped IPv4 addresses is one of IPv4 addresses, as clients are.
func rangeOf(p netip.Prefix) addrRange {
	const mapped = 96 // the bits before a mapped IPv4 address
	if p.Addr().Is4In6() && p.Bits() >= mapped {
		p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-mapped)
	}
	p = p.Masked()
	last := p.Addr().AsSlice()
	for bit := p.Bits(); bit < 8*len(last); bit++ {
		last[bit/8] |= 0x80 >> (bit % 8)
	}
	end, _ := netip.AddrFromSlice(last)
	return addrRange{p.Addr(), end}
}

// contains reports whether a client is in the set. The client must be neither a mapped IPv4 address nor have a zone.
func (s *clientSet) contains(client netip.Addr) bool {
	if s == nil {
		return false
	}
	low, high := 0, len(s.ranges) // slices.BinarySearchFunc takes 9 ns more for each question
	for low < high {              // the first range that ends at the client or behind it
		if middle := (low + high) / 2; s.ranges[middle].last.Less(client) {
			low = middle + 1
		} else {
			high = middle
		}
	}
	return low < len(s.ranges) && !client.Less(s.ranges[low].first)
}
