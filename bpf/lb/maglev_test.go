package lb

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"pgregory.net/rapid"

	cs "github.com/isthmus-net/isthmus/controlplane/clusterset"
)

func addresses(n int) []Address {
	addrs := make([]Address, n)
	for i := range addrs {
		addrs[i] = Address{netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, byte(i / 250), byte(i%250 + 1)}), 8080), cs.TCP}
	}
	return addrs
}

func TestMaglevSizes(t *testing.T) {
	for _, m := range maglevSizes {
		for d := 2; d*d <= m; d++ {
			if m%d == 0 {
				t.Errorf("%d is no prime: a walk would not reach every slot", m)
			}
		}
	}
	for units, want := range map[int]int{1: 101, 10: 199, 11: 401, 1000: 25601, 25000: 51199, 26000: 0} {
		if got := maglevSize(units); got != want {
			t.Errorf("a table for %d has %d slots, want %d", units, got, want)
		}
	}
}

// All nodes, and all versions, must make the same table.
func TestMaglevTableNeverChanges(t *testing.T) {
	h := uint64(0)
	for _, i := range Maglev(addresses(7), nil, 251) {
		h = (h ^ uint64(i)) * 1099511628211
	}
	if want := uint64(0xde697a32d78a27d2); h != want {
		t.Errorf("the table of 7 backends has changed: %#x, want %#x; clients would get other backends on other nodes", h, want)
	}
}

func TestMaglevIsEven(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 60).Draw(t, "backends")
		var weights []uint32
		units := n
		if rapid.Bool().Draw(t, "weighted") {
			weights, units = make([]uint32, n), 0
			for i := range weights {
				weights[i] = rapid.Uint32Range(1, 5).Draw(t, "weight")
				units += int(weights[i])
			}
		}
		size := maglevSize(units)
		count := make([]int, n)
		for _, i := range Maglev(addresses(n), weights, size) {
			count[i]++
		}
		for i, have := range count {
			w := 1
			if weights != nil {
				w = int(weights[i])
			}
			want := float64(size) * float64(w) / float64(units)
			if float64(have) < want-float64(w)-1 || float64(have) > want+float64(w)+1 {
				t.Fatalf("backend %d of weight %d has %d of %d slots, want %.1f", i, w, have, size, want)
			}
		}
	})
}

// When one of n backends is removed, its slots change, and few others do: in the paper, fewer than 10 % of the others in
// tables of this relative size.
func TestMaglevDisruptsLittle(t *testing.T) {
	for _, n := range []int{5, 10, 20, 80, 150} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			size, all := maglevSize(n), addresses(n)
			before := Maglev(all, nil, size)
			for gone := range n {
				less := slices.Delete(slices.Clone(all), gone, gone+1)
				moved := 0
				for i, b := range Maglev(less, nil, size) {
					if was := before[i]; was != gone && all[was] != less[b] {
						moved++
					}
				}
				if limit := size / 8; moved > limit {
					t.Errorf("without backend %d, %d of %d slots of others change hands, want at most %d", gone, moved, size, limit)
				}
			}
		})
	}
}

// Nodes that learned of the backends in another order, over another history, make the same table.
func TestMaglevIsTheSameOnEveryNode(t *testing.T) {
	build := func(have State, ids *idAllocator, addrs ...string) State {
		svc := service("hello", "243.0.0.5", slice(addrs...))
		svc.Annotations = map[string]string{AnnotationBalancer: "maglev"}
		s, problems := build(snapshotOf(svc), have, ids)
		if len(problems) > 0 {
			t.Fatal(problems)
		}
		return s
	}
	one := build(NewState(), new(idAllocator), "10.1.0.1", "10.1.0.2", "10.1.0.3")
	ids := new(idAllocator)
	other := build(NewState(), ids, "10.1.0.9", "10.1.0.3")
	other = build(other, ids, "10.1.0.3", "10.1.0.2", "10.1.0.1")
	a := Address{netip.MustParseAddrPort("243.0.0.5:80"), cs.TCP}
	if !one.Frontends[a].Maglev || one.Frontends[a].Count != 101 {
		t.Errorf("frontend %+v, want a Maglev table of 101 slots", one.Frontends[a])
	}
	if !slices.Equal(one.slotTable(one.Frontends[a]), other.slotTable(other.Frontends[a])) {
		t.Error("two nodes have two tables")
	}
}
