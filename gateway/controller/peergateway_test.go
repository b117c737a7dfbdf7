package controller

import (
	"net/netip"
	"testing"
)

// Packets are handed over to the address in a gateway's URL, or else to the one in its spec, which may also be the one of the other family.
func TestPeerGateway(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ url, address, want, other string }{
		{"https://192.0.2.11:9479", "", "192.0.2.11", ""},
		{"https://192.0.2.11:9479", "192.0.2.12", "192.0.2.11", ""},
		{"https://[2001:db8::11]:9479/", "192.0.2.11", "2001:db8::11", "192.0.2.11"},
		{"https://gateway-1.example.org:9479", "192.0.2.11", "192.0.2.11", ""},
		{"https://gateway-1.example.org:9479", "", "", ""},
		{"https://127.0.0.1:9479", "", "", ""},
	} {
		n := gatewayNode("gateway-1")
		n.Spec.URL, n.Spec.Address = tc.url, tc.address
		if p := peerGateway(n); text(p.Address) != tc.want || text(p.OtherAddress) != tc.other {
			t.Errorf("%s and %q: %s and %s, want %q and %q", tc.url, tc.address, p.Address, p.OtherAddress, tc.want, tc.other)
		}
	}
}

// text returns an address, "" if there is none.
func text(a netip.Addr) string {
	if !a.IsValid() {
		return ""
	}
	return a.String()
}
