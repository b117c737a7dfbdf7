package ebpf

import (
	"maps"
	"net/netip"
	"testing"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/gateway/desired"
)

// A VIP may be the gateway's own address, for example when a floating IP moves between gateways. It is masqueraded
// regardless of which other VIPs use that address, and of their order.
func TestOwnAddressAsVIP(t *testing.T) {
	t.Parallel()
	own := netip.MustParseAddr("10.0.0.11")
	masqueraded := func(addr netip.Addr, how desired.Announce) desired.VIP {
		return desired.VIP{Addr: addr, Announce: how, Return: desired.Masquerade, Frontends: []desired.Frontend{{
			Service: "shop/web", Protocol: "TCP", Port: 80, Backends: []desired.Backend{{Addr: netip.MustParseAddr("10.1.0.5"), Port: 8080, Weight: 1}},
		}}}
	}
	here := bpf.GatewayVIP{Source: bpf.Addr16(own), Flags: bpf.GatewayOwn}
	for _, how := range []desired.Announce{desired.ByNone, desired.ByBGP} {
		moved, other := masqueraded(own, how), masqueraded(netip.MustParseAddr("198.51.100.7"), desired.ByBGP)
		for name, all := range map[string][]desired.VIP{"alone": {moved}, "first": {moved, other}, "last": {other, moved}} {
			c, faults := build(&desired.State{VIPs: all}, environment{
				ids:     idsOf(newContent(), 1),
				table:   func(uint32, uint8, []desired.Backend, []uint32) uint64 { return 0 },
				address: func(netip.Addr) (netip.Addr, error) { return own, nil },
			})
			if have := c.vips[bpf.Addr16(own)]; have != here || len(faults) > 0 {
				t.Errorf("announced by %s, %s: %+v, %v, want %+v", how, name, have, faults, here)
			}
		}
	}
}

// A peer without an address has an entry too: the program looks for no peer after the first number without one.
func TestPeersWithoutAddress(t *testing.T) {
	t.Parallel()
	addr := netip.MustParseAddr("10.0.0.12")
	c, _ := build(&desired.State{Peers: []desired.PeerGateway{{Name: "new"}, {Name: "other", Address: addr}}}, environment{})
	if want := (map[uint32][16]byte{1: {}, 2: bpf.Addr16(addr)}); !maps.Equal(c.peers, want) {
		t.Errorf("peers %v, want %v", c.peers, want)
	}
}
