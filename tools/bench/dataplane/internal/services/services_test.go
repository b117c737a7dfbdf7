package services

import (
	"net/netip"
	"testing"
)

// Addresses are unique at the size of the benchmark.
func TestAddressesDiffer(t *testing.T) {
	t.Parallel()
	s := Set{Services: 10_000, Endpoints: 10}
	seen := map[netip.Addr]bool{}
	take := func(a netip.Addr) {
		if seen[a] {
			t.Fatalf("%s is assigned twice", a)
		}
		seen[a] = true
	}
	for i := range s.Services {
		take(VIP(i))
		for _, a := range s.endpoints(i) {
			take(a)
		}
	}
}

func TestMoveLeavesTheOriginal(t *testing.T) {
	t.Parallel()
	s := Set{Services: 3, Endpoints: 2}
	snap := s.Snapshot()
	moved := Move(snap, 1, 7)
	if have, want := snap.Services[1].Slices[0].Endpoints[1].Addrs[0], s.endpoints(1)[1]; have != want {
		t.Errorf("the original's endpoint is at %s, want %s", have, want)
	}
	if have, want := moved.Services[1].Slices[0].Endpoints[1].Addrs[0], netip.MustParseAddr("10.200.0.7"); have != want {
		t.Errorf("the endpoint moved to %s, want %s", have, want)
	}
	if have, want := moved.Services[1].Slices[0].Endpoints[0].Addrs[0], s.endpoints(1)[0]; have != want {
		t.Errorf("the other endpoint is at %s, want %s", have, want)
	}
}
