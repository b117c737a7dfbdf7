package nft

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

// states draws a state with few VIPs, ports and backends, which often collide.
var states = rapid.Custom(func(t *rapid.T) *desired.State {
	s := &desired.State{}
	for n := range 3 {
		if !rapid.Bool().Draw(t, "vip") {
			continue
		}
		v := desired.VIP{
			Addr:     netip.AddrFrom4([4]byte{198, 51, 100, byte(n)}),
			Announce: rapid.SampledFrom([]desired.Announce{desired.ByBGP, desired.ByNone}).Draw(t, "announce"),
			Return:   rapid.SampledFrom([]desired.Return{desired.Routed, desired.SNAT, desired.Masquerade}).Draw(t, "return"),
		}
		for port := uint16(80); port < 82; port++ {
			if !rapid.Bool().Draw(t, "frontend") {
				continue
			}
			f := desired.Frontend{Service: "shop/web", Protocol: "TCP", Port: port, Affinity: rapid.Int32Range(0, 1).Draw(t, "affinity")}
			for b := byte(1); b < 4; b++ {
				if rapid.Bool().Draw(t, "backend") {
					f.Backends = append(f.Backends, desired.Backend{
						Addr: netip.AddrFrom4([4]byte{10, 1, 0, b}), Port: 8080, Weight: rapid.Uint16Range(1, 3).Draw(t, "weight"), Draining: rapid.Bool().Draw(t, "draining"),
					})
				}
				if rapid.Bool().Draw(t, "source") {
					f.Sources = append(f.Sources, netip.PrefixFrom(netip.AddrFrom4([4]byte{192, b, 0, 0}), 16))
				}
			}
			v.Frontends = append(v.Frontends, f)
		}
		s.VIPs = append(s.VIPs, v)
	}
	if rapid.Bool().Draw(t, "slots") {
		for i := range byte(2) {
			s.Peers = append(s.Peers, desired.PeerGateway{Address: netip.AddrFrom4([4]byte{10, 2, rapid.Byte().Draw(t, "address"), i})})
		}
		for range desired.SlotCount {
			s.Slots = append(s.Slots, desired.Slot{Owner: rapid.IntRange(0, 2).Draw(t, "owner"), Previous: rapid.IntRange(0, 2).Draw(t, "previous")})
		}
	}
	return s
})

// After any sequence of states, the writes, in parts of any size, lead to the contents of a fresh balancer with the last state.
func TestChangesLeadToState(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := newContents()
		have := map[familySet]map[string]string{}
		for range rapid.IntRange(1, 4).Draw(t, "changes") {
			s := states.Draw(t, "state")
			c, _ := b.replaceVIPs(s.VIPs)
			b.replaceGroup(groupElements(s, nil), c)
			most, writes, parts, ended := rapid.IntRange(1, 3000).Draw(t, "most"), 0, 0, false
			for part, last := range c.parts(most) {
				if ended {
					t.Fatal("a part follows the last one")
				}
				ended = last
				allowed := max(most, 2) // an element that is replaced
				if parts == 0 {
					for _, p := range []familySet{{sources, true}, {sources, false}} {
						allowed = max(allowed, len(c.remove[p])+len(c.add[p]))
					}
				}
				if size := part.size(); size > allowed {
					t.Fatalf("part %d has %d writes, and may have %d", parts, size, allowed)
				}
				parts++
				writes += part.size()
				apply(t, have, part)
			}
			if writes != c.size() || !ended {
				t.Fatalf("the parts have %d writes, want %d; the last one is said to be: %t", writes, c.size(), ended)
			}
			fresh := newContents()
			fresh.replaceVIPs(s.VIPs)
			fresh.replaceGroup(groupElements(s, nil), newChanges())
			if c := diff(have, fresh.all()); c.size() != 0 {
				t.Fatalf("have and want differ: %v", c)
			}
			if c, had := b.replaceVIPs(s.VIPs); c.size() != 0 || len(had) != 0 {
				t.Fatalf("the same state again is %d writes", c.size())
			}
		}
	})
}

// apply applies writes like the kernel, which refuses to remove a missing element and to add an existing one.
func apply(t *rapid.T, have map[familySet]map[string]string, c changes) {
	for p, elements := range c.remove {
		for _, e := range elements {
			if v, ok := have[p][e.key]; !ok || v != e.value {
				t.Fatalf("%s: %x is not there to be removed", p.name(), e.key)
			}
			delete(have[p], e.key)
		}
	}
	for p, elements := range c.add {
		if have[p] == nil {
			have[p] = map[string]string{}
		}
		for _, e := range elements {
			if _, ok := have[p][e.key]; ok {
				t.Fatalf("%s: %x is there already", p.name(), e.key)
			}
			have[p][e.key] = e.value
		}
	}
	maps.DeleteFunc(have, func(_ familySet, all map[string]string) bool { return len(all) == 0 })
}

// A removed backend changes few slots, and weights determine the shares.
func TestTable(t *testing.T) {
	v := &desired.VIP{Addr: netip.MustParseAddr("198.51.100.7")}
	f := &desired.Frontend{Protocol: "TCP", Port: 80}
	for n := byte(1); n <= 10; n++ {
		f.Backends = append(f.Backends, desired.Backend{Addr: netip.AddrFrom4([4]byte{10, 1, 0, n}), Port: 8080, Weight: 1})
	}
	f.Backends[3].Weight = 3
	before := tableOf(v, f)
	share := map[string]int{}
	for slot := range slots {
		share[before.element(slot).value]++
	}
	for i, b := range f.Backends {
		have := share[addrPort(netip.AddrPortFrom(b.Addr, b.Port))]
		if want := slots * int(b.Weight) / 12; have < want-2 || have > want+2 {
			t.Errorf("backend %d has %d slots, want %d", i, have, want)
		}
	}
	f.Backends = slices.Delete(slices.Clone(f.Backends), 5, 6)
	after, moved := tableOf(v, f), 0
	for slot := range slots {
		if before.element(slot) != after.element(slot) {
			moved++
		}
	}
	if moved > slots/12+slots/8 {
		t.Errorf("%d slots changed hands, of which %d had to", moved, slots/12)
	}
}

// Ranges of a frontend do not overlap, in any order of the sources, and cover the same addresses.
func TestCover(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var all []netip.Prefix
		for range rapid.IntRange(0, 6).Draw(t, "n") {
			b := rapid.SliceOfN(rapid.Byte(), 4, 4).Draw(t, "addr")
			all = append(all, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, b[2] & 3, b[3]}), rapid.IntRange(20, 32).Draw(t, "bits")).Masked())
		}
		covered := cover(all, true)
		for i, p := range covered {
			if !slices.Contains(all, p) {
				t.Fatalf("%v comes from nowhere", p)
			}
			for _, q := range covered[i+1:] {
				if p.Overlaps(q) {
					t.Fatalf("%v and %v overlap", p, q)
				}
			}
			if next := last(p).Next(); !p.Contains(last(p)) || p.Contains(next) {
				t.Fatalf("%v is the last of %v", last(p), p)
			}
		}
		for _, p := range all {
			if !slices.ContainsFunc(covered, func(q netip.Prefix) bool { return q.Bits() <= p.Bits() && q.Contains(p.Addr()) }) {
				t.Fatalf("%v was removed", p)
			}
		}
	})
}

// large returns n VIPs with ten backends each.
func large(n int) *desired.State {
	s := &desired.State{Balancer: desired.NFTables}
	for i := range n {
		v := desired.VIP{Addr: netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)}), Announce: desired.ByBGP, Return: desired.Routed}
		f := desired.Frontend{Service: fmt.Sprint("shop/", i), Protocol: "TCP", Port: 443}
		for b := byte(1); b <= 10; b++ {
			f.Backends = append(f.Backends, desired.Backend{Addr: netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), b}), Port: 8443, Weight: 1})
		}
		v.Frontends = []desired.Frontend{f}
		s.VIPs = append(s.VIPs, v)
	}
	return s
}

// BenchmarkOneChange removes and adds one backend of 1,000 VIPs with 10 each.
func BenchmarkOneChange(b *testing.B) {
	bench := newBench(b, 1000)
	i := 0
	for b.Loop() {
		i++
		bench.change(i%2 == 1)
	}
}
