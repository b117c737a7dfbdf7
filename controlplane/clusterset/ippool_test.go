package clusterset

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

var addrs = cmp.Comparer(func(a, b netip.Addr) bool { return a == b })

func mustPool(t testing.TB, blocks ...string) *IPPool {
	t.Helper()
	var ps []netip.Prefix
	for _, b := range blocks {
		ps = append(ps, netip.MustParsePrefix(b))
	}
	p, err := NewIPPool(ps...)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestNewIPPoolRefuses(t *testing.T) {
	for name, blocks := range map[string][]string{
		"a host address":        {"243.0.0.1/16"},
		"two of one family":     {"243.0.0.0/16", "243.1.0.0/16"},
		"no room":               {"243.0.0.0/31"},
		"no room, second block": {"243.0.0.0/16", "fd00::/127"},
	} {
		t.Run(name, func(t *testing.T) {
			var ps []netip.Prefix
			for _, b := range blocks {
				ps = append(ps, netip.MustParsePrefix(b))
			}
			if _, err := NewIPPool(ps...); err == nil {
				t.Errorf("NewIPPool(%v) accepted", blocks)
			}
		})
	}
	if _, err := NewIPPool(netip.Prefix{}); err == nil {
		t.Error("the zero prefix is accepted")
	}
}

func TestPoolGivesEveryUsableAddressOnce(t *testing.T) {
	for name, tc := range map[string]struct {
		block string
		want  int
	}{
		"IPv4 without network and broadcast": {"243.0.0.0/28", 14},
		"smallest IPv4":                      {"243.0.0.252/30", 2},
		"IPv6 without the network address":   {"fd00::/124", 15},
		"smallest IPv6":                      {"fd00::4/126", 3},
	} {
		t.Run(name, func(t *testing.T) {
			p := mustPool(t, tc.block)
			block := netip.MustParsePrefix(tc.block)
			family := FamilyOf(block.Addr())
			seen := map[netip.Addr]bool{}
			for i := range tc.want {
				got, err := p.Allocate(ServiceName{"ns", fmt.Sprint("svc", i)}, []Family{family})
				if err != nil {
					t.Fatalf("allocation %d of %d: %v", i+1, tc.want, err)
				}
				if seen[got[0]] || !block.Contains(got[0]) || got[0] == block.Addr() {
					t.Fatalf("allocation %d gives %s", i+1, got[0])
				}
				seen[got[0]] = true
			}
			if _, err := p.Allocate(ServiceName{"ns", "one-more"}, []Family{family}); !errors.Is(err, ErrPoolExhausted) {
				t.Fatalf("the full pool says %v", err)
			}
			p.Release(ServiceName{"ns", "svc0"})
			if _, err := p.Allocate(ServiceName{"ns", "one-more"}, []Family{family}); err != nil {
				t.Fatalf("after a release: %v", err)
			}
		})
	}
}

func TestAllocateIsAllOrNothing(t *testing.T) {
	p := mustPool(t, "243.0.0.0/16", "fd00::/126")
	for i := range 3 {
		if _, err := p.Allocate(ServiceName{"ns", fmt.Sprint("v6-", i)}, []Family{IPv6}); err != nil {
			t.Fatal(err)
		}
	}
	name := ServiceName{"ns", "dual"}
	if got, err := p.Allocate(name, []Family{IPv4, IPv6}); !errors.Is(err, ErrPoolExhausted) {
		t.Fatalf("Allocate = %v, %v", got, err)
	}
	if held := p.Held(name); len(held) != 0 {
		t.Errorf("a refused allocation holds %v", held)
	}
	if _, err := mustPool(t, "243.0.0.0/16").Allocate(name, []Family{IPv6}); err == nil || errors.Is(err, ErrPoolExhausted) {
		t.Errorf("a pool without IPv6 says %v", err)
	}
}

func TestAllocateKeepsTheOrderOfFamilies(t *testing.T) {
	got, err := mustPool(t, "243.0.0.0/16", "fd00::/64").Allocate(ServiceName{"ns", "svc"}, []Family{IPv6, IPv4})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]Family{IPv6, IPv4}, []Family{FamilyOf(got[0]), FamilyOf(got[1])}); diff != "" {
		t.Error(diff)
	}
}

func TestReserveIsAllOrNothing(t *testing.T) {
	p := mustPool(t, "243.0.0.0/16")
	one, two := netip.MustParseAddr("243.0.0.1"), netip.MustParseAddr("243.0.0.2")
	if err := p.Reserve(ServiceName{"ns", "a"}, two, netip.MustParseAddr("10.0.0.1")); err != nil {
		t.Fatal(err)
	}
	b := ServiceName{"ns", "b"}
	if err := p.Reserve(b, one, two); err == nil {
		t.Fatal("an address is reserved for two names")
	}
	if held := p.Held(b); len(held) != 0 {
		t.Errorf("a refused reservation holds %v", held)
	}
}

// TestPoolLaws drives a pool with random calls: no address is held by two names, what is held lies in
// the blocks, and a pool restored from what the old one held behaves like it.
func TestPoolLaws(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		blocks := []netip.Prefix{netip.MustParsePrefix("243.7.0.0/28"), netip.MustParsePrefix("fd00:7::/124")}
		p, _ := NewIPPool(blocks...)
		names := rapid.SampledFrom([]ServiceName{{"x", "a"}, {"x", "b"}, {"x", "c"}, {"y", "a"}, {"y", "b"}, {"y", "c"}, {"z", "a"}, {"z", "b"}, {"z", "c"}})
		model := map[ServiceName][]netip.Addr{}
		t.Repeat(map[string]func(*rapid.T){
			"allocate": func(t *rapid.T) {
				name := names.Draw(t, "name")
				families := rapid.SampledFrom([][]Family{{IPv4}, {IPv6}, {IPv4, IPv6}, {IPv6, IPv4}}).Draw(t, "families")
				got, err := p.Allocate(name, families)
				if err != nil {
					t.Fatalf("allocate %s: %v", name, err)
				}
				again, err := p.Allocate(name, families)
				if err != nil || !slices.Equal(got, again) {
					t.Fatalf("allocate %s gives %v, then %v (%v)", name, got, again, err)
				}
				for _, a := range got {
					if !slices.Contains(model[name], a) {
						model[name] = append(model[name], a)
					}
				}
			},
			"release": func(t *rapid.T) {
				name := names.Draw(t, "name")
				p.Release(name)
				delete(model, name)
			},
			"restart": func(t *rapid.T) {
				p, _ = NewIPPool(blocks...)
				for name, held := range model {
					if err := p.Reserve(name, held...); err != nil {
						t.Fatal(err)
					}
				}
			},
			"": func(t *rapid.T) {
				owner := map[netip.Addr]ServiceName{}
				for name, want := range model {
					slices.SortFunc(want, netip.Addr.Compare)
					if diff := cmp.Diff(want, p.Held(name), addrs); diff != "" {
						t.Fatalf("%s holds (-want +have):\n%s", name, diff)
					}
					for _, a := range want {
						if other, ok := owner[a]; ok {
							t.Fatalf("%s is held by %s and %s", a, name, other)
						}
						owner[a] = name
						if !p.Contains(a) {
							t.Fatalf("%s is in no block", a)
						}
					}
				}
				if p.Len() != len(owner) {
					t.Fatalf("Len = %d, %d addresses are held", p.Len(), len(owner))
				}
			},
		})
	})
}
