package datapath

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/bpf/lb/lbtest"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Frontend returns the backends of a frontend and counts its broken slots, in the kernel and in the Fake.
func TestFrontend(t *testing.T) {
	tcp := func(a string) lb.Address {
		return lb.Address{AddrPort: netip.MustParseAddrPort(a), Protocol: clusterset.TCP}
	}
	web := clusterset.ServiceName{Namespace: "demo", Name: "web"}
	s := lb.NewState()
	s.Services[1] = web
	s.Backends[1], s.Backends[2] = lb.Backend{Address: tcp("10.1.0.1:8080")}, lb.Backend{Address: tcp("[fd00::1]:8080")}
	for i, id := range []lb.BackendID{1, 9, 2, 1} {
		s.Slots[lb.Slot{Frontend: 1, Index: uint32(i)}] = id
	}
	s.Frontends[tcp("243.0.0.5:80")] = lb.Frontend{ID: 1, Count: 5, Service: 1}
	s.Frontends[tcp("[fd01::5]:80")] = lb.Frontend{ID: 2}
	d := mustOpen(t, testConfig(t))
	if err := d.Apply(t.Context(), lbtest.Diff(lb.NewState(), s)); err != nil {
		t.Fatal(err)
	}
	for name, from := range map[string]interface {
		Frontend(lb.Address) (Entry, bool, error)
	}{"kernel": d, "fake": NewFake(s)} {
		for at, want := range map[string]Entry{
			"243.0.0.5:80": {Service: web, Backends: []lb.Address{tcp("10.1.0.1:8080"), tcp("[fd00::1]:8080"), tcp("10.1.0.1:8080")}, Broken: 2},
			"[fd01::5]:80": {},
		} {
			have, found, err := from.Frontend(tcp(at))
			if err != nil || !found {
				t.Fatalf("%s: %s: found %t, %v", name, at, found, err)
			}
			if diff := cmp.Diff(want, have, cmpopts.EquateComparable(netip.AddrPort{})); diff != "" {
				t.Errorf("%s: %s (-want +got):\n%s", name, at, diff)
			}
		}
		if _, found, err := from.Frontend(tcp("243.0.0.5:81")); found || err != nil {
			t.Errorf("%s: a port that is not there: found %t, %v", name, found, err)
		}
	}
	// Only another writer can have left a count beyond the map's size.
	if err := d.maps[bpf.MapFrontends].Put(encodeFrontendKey(tcp("243.0.0.6:80")), bpf.Frontend{Id: 3, Count: 1 << 31}); err != nil {
		t.Fatal(err)
	}
	if have, found, err := d.Frontend(tcp("243.0.0.6:80")); !found || err != nil || have.Broken != 1<<31 {
		t.Errorf("found %t, %v, %d slots that lead nowhere, want %d", found, err, have.Broken, 1<<31)
	}
}

// Entries that were added and are no longer in the map were evicted.
func TestEvictedUDPVIPs(t *testing.T) {
	d := mustOpen(t, testConfig(t))
	if err := d.maps[bpf.MapUDPVIPsAdded].Put(uint32(0), uint64(7)); err != nil {
		t.Fatal(err)
	}
	for i := range uint64(2) {
		if err := d.maps[bpf.MapUDPVIPs].Put(bpf.UDPVIPKey{Cookie: i}, bpf.UDPVIP{Port: 80}); err != nil {
			t.Fatal(err)
		}
	}
	if n, err := d.EvictedUDPVIPs(); n != 5 || err != nil {
		t.Errorf("%d had to make room, %v, want 5 of 7", n, err)
	}
}
