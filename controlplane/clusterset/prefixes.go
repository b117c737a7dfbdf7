package clusterset

import (
	"net/netip"
	"slices"
	"strings"
)

// MaxExtended is the most CIDRs to which a member may extend itself.
const MaxExtended = 500

// Beyond returns those of cidrs that no CIDR of m's endpoints contains, with as few prefixes as possible: extends lie inside of its
// supernets, outside do not. For example, the pods of a new node have 10.128.7.0/24, m registered 10.128.0.0/22 and the supernet
// 10.128.0.0/10: then 10.128.7.0/24 extends m.
func (m Member) Beyond(cidrs []netip.Prefix) (extends, outside []netip.Prefix) {
	in := func(outer []netip.Prefix, p netip.Prefix) bool {
		return slices.ContainsFunc(outer, func(o netip.Prefix) bool { return Within(p, o) })
	}
	for _, p := range cidrs {
		switch {
		case in(m.Routed, p):
		case in(m.Supernets, p):
			extends = append(extends, p)
		default:
			outside = append(outside, p)
		}
	}
	return CompactPrefixes(extends), CompactPrefixes(outside)
}

// Within reports whether outer contains all of inner.
func Within(inner, outer netip.Prefix) bool {
	return outer.Bits() <= inner.Bits() && outer.Contains(inner.Addr())
}

// CompactPrefixes returns the fewest prefixes with the same addresses as ps, sorted.
func CompactPrefixes(ps []netip.Prefix) []netip.Prefix {
	var kept []netip.Prefix
	for _, p := range slices.SortedFunc(slices.Values(ps), ComparePrefixes) {
		if n := len(kept); n > 0 && Within(p, kept[n-1]) {
			continue
		}
		kept = append(kept, p)
		for n := len(kept); n > 1; n = len(kept) { // merge two halves
			whole := netip.PrefixFrom(kept[n-2].Addr(), kept[n-2].Bits()-1)
			if kept[n-1].Bits() != kept[n-2].Bits() || whole != whole.Masked() || !whole.Contains(kept[n-1].Addr()) {
				break
			}
			kept = append(kept[:n-2], whole)
		}
	}
	return kept
}

// ComparePrefixes orders prefixes by address, the wider one first.
func ComparePrefixes(a, b netip.Prefix) int {
	if c := a.Addr().Compare(b.Addr()); c != 0 {
		return c
	}
	return a.Bits() - b.Bits()
}

// FormatPrefixes returns prefixes as a list with commas, at most MaxExtended of them.
func FormatPrefixes(ps []netip.Prefix) string {
	var texts []string
	for _, p := range ps[:min(len(ps), MaxExtended)] {
		texts = append(texts, p.String())
	}
	return strings.Join(texts, ",")
}

// ParsePrefixes parses the result of FormatPrefixes. It ignores invalid parts, and those beyond MaxExtended.
func ParsePrefixes(text string) (ps []netip.Prefix) {
	n := 0
	for part := range strings.SplitSeq(text, ",") {
		if n++; n > MaxExtended {
			break
		}
		if p, err := netip.ParsePrefix(part); err == nil {
			ps = append(ps, p.Masked())
		}
	}
	return ps
}
