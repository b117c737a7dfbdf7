package controller

import (
	"net/netip"
	"testing"
)

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
