package server

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
)

// A set contains the same addresses as its prefixes, also at their borders, and where they touch or overlap.
func TestClientSet(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2))
	for round := range 300 {
		var prefixes []netip.Prefix
		var probes []netip.Addr
		for range random.IntN(12) {
			var a netip.Addr
			if bits := random.IntN(33); round%2 == 0 {
				a = netip.AddrFrom4([4]byte{10, byte(random.IntN(2)), byte(random.IntN(4)), byte(random.IntN(256))})
				prefixes = append(prefixes, netip.PrefixFrom(a, bits))
			} else {
				a = netip.AddrFrom16([16]byte{0xfd, 15: byte(random.IntN(256)), 14: byte(random.IntN(3))})
				prefixes = append(prefixes, netip.PrefixFrom(a, 96+bits))
			}
			r := rangeOf(prefixes[len(prefixes)-1])
			probes = append(probes, a, r.first, r.last, r.first.Prev(), r.last.Next(), netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("::1"))
		}
		set := newClientSet(prefixes)
		for _, a := range probes {
			want := slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
			if a.IsValid() && set.contains(a) != want {
				t.Fatalf("%v contains %s: %v, want %v", prefixes, a, !want, want)
			}
		}
		for i := 1; i < len(set.ranges); i++ {
			if before := set.ranges[i-1].last; !before.Less(set.ranges[i].first) || before.Next() == set.ranges[i].first {
				t.Errorf("ranges %v overlap or touch", set.ranges)
			}
		}
	}
	everyone := newClientSet([]netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")})
	mapped := newClientSet([]netip.Prefix{netip.MustParsePrefix("::ffff:10.0.0.0/104")})
	for text, want := range map[string]bool{"10.1.2.3": true, "11.0.0.0": false, "::1": false} {
		a := netip.MustParseAddr(text)
		if !everyone.contains(a) || mapped.contains(a) != want || (*clientSet)(nil).contains(a) {
			t.Errorf("%s: everyone %v, mapped %v", a, everyone.contains(a), mapped.contains(a))
		}
	}
}

// BenchmarkClientSet looks up clients among 5,000 nodes and some ranges.
func BenchmarkClientSet(b *testing.B) {
	var prefixes []netip.Prefix
	for i := range 5000 {
		prefixes = append(prefixes, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 7), byte(i << 1), 1}), 32))
	}
	for name, set := range map[string]*clientSet{
		"3 ranges":    newClientSet([]netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("fd00::/64")}),
		"5,000 nodes": newClientSet(prefixes),
	} {
		b.Run(name, func(b *testing.B) {
			client := netip.MustParseAddr("10.7.90.1")
			b.ReportAllocs()
			for b.Loop() {
				if !set.contains(client) {
					b.Fatal(client)
				}
			}
		})
	}
}
