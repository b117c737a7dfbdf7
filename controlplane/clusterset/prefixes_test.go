package clusterset_test

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// The result has the same addresses, without duplicates, and without two prefixes that one could replace.
func TestCompactPrefixesLaws(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var in []netip.Prefix
		for range rapid.IntRange(0, 12).Draw(t, "n") {
			a := netip.AddrFrom4([4]byte{10, 0, 0, rapid.Byte().Draw(t, "addr")})
			in = append(in, netip.PrefixFrom(a, rapid.IntRange(24, 32).Draw(t, "bits")).Masked())
		}
		out := clusterset.CompactPrefixes(slices.Clone(in))
		contains := func(ps []netip.Prefix, a netip.Addr) int {
			n := 0
			for _, p := range ps {
				if p.Contains(a) {
					n++
				}
			}
			return n
		}
		for i := range 256 {
			a := netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})
			if n := contains(out, a); n > 1 || (n == 1) != (contains(in, a) > 0) {
				t.Fatalf("%v became %v: %s is there %d times", in, out, a, n)
			}
		}
		for i := 1; i < len(out); i++ {
			whole := netip.PrefixFrom(out[i-1].Addr(), out[i-1].Bits()-1)
			if out[i].Bits() == out[i-1].Bits() && whole.Masked() == whole && whole.Contains(out[i].Addr()) {
				t.Fatalf("%v became %v: %s says two of them", in, out, whole)
			}
		}
	})
}

// A node's CIDR is judged by itself, also beside another one with which it would be one prefix.
func TestMemberBeyond(t *testing.T) {
	t.Parallel()
	m := clusterset.Member{Routed: prefixes("10.128.0.0/22", "192.0.2.0/24"), Supernets: prefixes("10.128.0.0/10", "fd00:1::/48")}
	for name, tc := range map[string]struct{ cidrs, extends, outside []netip.Prefix }{
		"registered":              {cidrs: prefixes("10.128.1.0/24", "192.0.2.0/28")},
		"inside of a supernet":    {cidrs: prefixes("10.128.7.0/24"), extends: prefixes("10.128.7.0/24")},
		"of both families":        {cidrs: prefixes("10.128.7.0/24", "fd00:1:0:7::/64"), extends: prefixes("10.128.7.0/24", "fd00:1:0:7::/64")},
		"two halves":              {cidrs: prefixes("10.130.1.0/24", "10.130.0.0/24"), extends: prefixes("10.130.0.0/23")},
		"beside a registered one": {cidrs: prefixes("10.128.3.0/24", "10.128.4.0/24"), extends: prefixes("10.128.4.0/24")},
		"at the supernet's end":   {cidrs: prefixes("10.191.255.0/24", "10.192.0.0/24"), extends: prefixes("10.191.255.0/24"), outside: prefixes("10.192.0.0/24")},
		"more than the supernet":  {cidrs: prefixes("10.0.0.0/8", "0.0.0.0/0"), outside: prefixes("0.0.0.0/0")},
		"the whole supernet":      {cidrs: prefixes("10.128.0.0/10"), extends: prefixes("10.128.0.0/10")},
		"outside":                 {cidrs: prefixes("10.1.0.0/24"), outside: prefixes("10.1.0.0/24")},
	} {
		extends, outside := m.Beyond(tc.cidrs)
		if diff := cmp.Diff([][]netip.Prefix{tc.extends, tc.outside}, [][]netip.Prefix{extends, outside}, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
			t.Errorf("%s (-want +have):\n%s", name, diff)
		}
	}
}

// A member states few CIDRs, and readers take no more.
func TestStatedPrefixesAreBounded(t *testing.T) {
	t.Parallel()
	var many []netip.Prefix
	for i := range clusterset.MaxExtended + 10 {
		many = append(many, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 7), byte(i << 1), 0}), 24))
	}
	text := clusterset.FormatPrefixes(many)
	if got := clusterset.ParsePrefixes(text); !slices.Equal(got, many[:clusterset.MaxExtended]) {
		t.Errorf("%d CIDRs are stated as %d", len(many), len(got))
	}
	if got := clusterset.ParsePrefixes(text + ",10.255.0.0/24"); len(got) != clusterset.MaxExtended {
		t.Errorf("%d CIDRs are taken", len(got))
	}
	if got := clusterset.ParsePrefixes("10.1.0.7/24,x,,fd00::/64"); !slices.Equal(got, prefixes("10.1.0.0/24", "fd00::/64")) {
		t.Errorf("of invalid parts remains %v", got)
	}
}
