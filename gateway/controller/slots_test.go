package controller

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/isthmus-net/isthmus/gateway/api/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/desired"
)

// owners returns owner and previous owner of each slot by name, as all gateways of a group must agree on them.
func owners(t *testing.T, count int) (all [desired.SlotCount][2]string) {
	t.Helper()
	var nodes []v1alpha1.GatewayNode
	for i := range count {
		nodes = append(nodes, *gatewayNode(fmt.Sprint("gateway-", i+1)))
	}
	for i := range nodes {
		peers := peersOf(&nodes[i], nodes)
		named := slices.Concat([]*v1alpha1.GatewayNode{&nodes[i]}, peers)
		var seen [desired.SlotCount][2]string
		for slot, is := range slots(&nodes[i], peers) {
			seen[slot] = [2]string{named[is.Owner].Name, named[is.Previous].Name}
		}
		if i > 0 && seen != all {
			t.Fatalf("%s has the slots %v, another gateway %v", nodes[i].Name, seen, all)
		}
		all = seen
	}
	return all
}

// Each gateway has enough slots. One that joins takes slots from their previous owners, and no other slot moves; read
// backwards, so does one that is removed.
func TestSlots(t *testing.T) {
	t.Parallel()
	if have := slots(gatewayNode("gateway-1"), nil); have != nil {
		t.Errorf("a gateway without peers has slots: %v", have)
	}
	before := owners(t, 2)
	for count := 3; count <= 8; count++ {
		now, shares := owners(t, count), map[string]int{}
		joined := fmt.Sprint("gateway-", count)
		for slot, is := range now {
			shares[is[0]]++
			switch {
			case is[0] == joined && is[1] != before[slot][0]:
				t.Errorf("%d gateways: slot %d was %s's, but its previous owner is %s", count, slot, before[slot][0], is[1])
			case is[0] != joined && is[0] != before[slot][0]:
				t.Errorf("%d gateways: slot %d moves from %s to %s", count, slot, before[slot][0], is[0])
			}
		}
		for name, n := range shares {
			if fair := desired.SlotCount / count; n < fair/4 || n > 2*fair {
				t.Errorf("%d gateways: %s has %d slots of a fair share of %d", count, name, n, fair)
			}
		}
		if len(shares) != count {
			t.Errorf("%d gateways: only these have slots: %v", count, shares)
		}
		before = now
	}
}

// Packets are handed over to the address in a gateway's URL, or else to the one in its spec.
func TestPeerAddress(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		url, address string
		want         netip.Addr
	}{
		{"https://192.0.2.11:9479", "", netip.MustParseAddr("192.0.2.11")},
		{"https://[2001:db8::11]:9479/", "192.0.2.11", netip.MustParseAddr("2001:db8::11")},
		{"https://gateway-1.example.org:9479", "192.0.2.11", netip.MustParseAddr("192.0.2.11")},
		{"https://gateway-1.example.org:9479", "", netip.Addr{}},
		{"https://127.0.0.1:9479", "", netip.Addr{}},
	} {
		n := gatewayNode("gateway-1")
		n.Spec.URL, n.Spec.Address = tc.url, tc.address
		if have := peerAddress(n); have != tc.want {
			t.Errorf("%s and %q: %s, want %s", tc.url, tc.address, have, tc.want)
		}
	}
}
