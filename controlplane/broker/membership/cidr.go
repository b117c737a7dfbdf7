package membership

import (
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	mathbits "math/bits"
	"net/netip"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Errors that other addresses correct.
var (
	ErrOverlap = errors.New("addresses overlap")
	ErrNoBlock = errors.New("no free block of ClusterSetIPs")
)

// defaultRange4 is the default range of IPv4 ClusterSetIPs. It is class E, which is not routed; a ClusterSetIP never leaves
// a node.
var defaultRange4 = netip.MustParsePrefix("243.0.0.0/8")

// defaultClusterSize is the default number of addresses of an IPv4 block: a /16.
const defaultClusterSize = 1 << 16

// blockBits returns the prefix length of a member's block in a range: 64 for IPv6, and for IPv4 the smallest block with size
// addresses (0 is the default). A block is never larger than half of the range.
func blockBits(r netip.Prefix, size int64) int {
	bits := 64
	if r.Addr().Is4() {
		bits = 32 - bitsFor(cmp.Or(size, defaultClusterSize))
	}
	return max(bits, r.Bits()+1)
}

// bitsFor returns the least n with 1<<n >= size.
func bitsFor(size int64) int { return mathbits.Len64(uint64(size - 1)) }

// checkSize returns the reason why blocks in ranges cannot have size addresses, or nil.
func checkSize(size int64, ranges []netip.Prefix) error {
	if size < 4 {
		return fmt.Errorf("a block of %d addresses is too small; it needs at least 4", size)
	}
	for _, r := range ranges {
		if r.Addr().Is4() && (size > 1<<31 || 32-bitsFor(size) <= r.Bits()) {
			return fmt.Errorf("a block of %d addresses is more than half of range %s; choose at most %d", size, r, uint64(1)<<(31-r.Bits()))
		}
	}
	return nil
}

// randomULA draws a range of unique local addresses (RFC 4193, section 3.2.1: 40 random bits).
func randomULA() netip.Prefix {
	a := [16]byte{0xfd}
	rand.Read(a[1:6]) // never fails
	return netip.PrefixFrom(netip.AddrFrom16(a), 48)
}

// ParseCIDRs parses prefixes in CIDR notation. Its error names each invalid text and a correct form.
func ParseCIDRs(texts []string) ([]netip.Prefix, error) {
	var prefixes []netip.Prefix
	var faults []error
	for _, text := range texts {
		p, err := netip.ParsePrefix(strings.TrimSpace(text))
		switch {
		case err != nil:
			faults = append(faults, fmt.Errorf("%q is not a CIDR, such as 10.1.0.0/16 or fd00:1::/64", text))
		case p != p.Masked():
			faults = append(faults, fmt.Errorf("%s is not a network address; write %s", p, p.Masked()))
		default:
			prefixes = append(prefixes, p)
		}
	}
	if len(faults) > 0 {
		return nil, errors.Join(faults...)
	}
	return prefixes, nil
}

// checkRanges returns the reason why prefixes cannot be the ranges of ClusterSetIPs, of which a member gets at most half,
// or nil.
func checkRanges(prefixes []netip.Prefix) error {
	for _, p := range prefixes {
		if p.Addr().BitLen()-p.Bits() < 3 {
			return fmt.Errorf("%s is too small; it needs at least 8 addresses, because a member gets at most half of them", p)
		}
	}
	return checkVIPs(prefixes)
}

// checkVIPs returns the reason why ClusterSetIPs cannot come from prefixes, or nil: two of one family, or addresses with
// another meaning on every machine.
func checkVIPs(prefixes []netip.Prefix) error {
	special := []string{"0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "255.255.255.255/32", "::/128", "::1/128", "fe80::/10", "ff00::/8"}
	seen := map[clusterset.Family]netip.Prefix{}
	for _, p := range prefixes {
		f := clusterset.FamilyOf(p.Addr())
		if other, ok := seen[f]; ok {
			return fmt.Errorf("%s and %s are both %s; give one CIDR per family", other, p, f)
		}
		seen[f] = p
		for _, s := range special {
			if bad := netip.MustParsePrefix(s); bad.Overlaps(p) {
				return fmt.Errorf("%s contains unspecified, loopback, link-local, multicast or broadcast addresses (%s); choose another CIDR", p, bad)
			}
		}
		if p.Addr().BitLen()-p.Bits() < 2 {
			return fmt.Errorf("%s is too small; it needs at least 4 addresses", p)
		}
	}
	return nil
}

// firstFree returns the lowest block of the given length in r that overlaps none of taken.
func firstFree(r netip.Prefix, bits int, taken []netip.Prefix) (netip.Prefix, error) {
	for a := r.Addr(); bits >= r.Bits() && r.Contains(a); {
		block := netip.PrefixFrom(a, bits)
		i := slices.IndexFunc(taken, block.Overlaps)
		if i < 0 {
			return block, nil
		}
		// Continue behind the larger of the two.
		if over := taken[i]; over.Bits() < bits {
			block = over
		}
		a = lastOf(block).Next()
	}
	return netip.Prefix{}, fmt.Errorf("%w of /%d in %s; give a smaller one with --clusterset-ip-cidr, or let a member leave", ErrNoBlock, bits, r)
}

// lastOf returns the highest address of p.
func lastOf(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for i := p.Bits(); i < 8*len(b); i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// texts formats prefixes, sorted and without duplicates.
func texts(prefixes []netip.Prefix) []string {
	sorted := slices.SortedFunc(slices.Values(prefixes), clusterset.ComparePrefixes)
	var ts []string
	for _, p := range slices.Compact(sorted) {
		ts = append(ts, p.String())
	}
	return ts
}

// parsed parses prefixes that this package wrote, and skips invalid ones.
func parsed(ts []string) []netip.Prefix {
	var prefixes []netip.Prefix
	for _, t := range ts {
		if p, err := netip.ParsePrefix(t); err == nil {
			prefixes = append(prefixes, p.Masked())
		}
	}
	return prefixes
}
