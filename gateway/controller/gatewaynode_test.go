package controller

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-net/isthmus/gateway/api/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/desired"
)

// Every field of a GatewayNode's BGP is in the state of its gateway.
func TestBGPOfGatewayNode(t *testing.T) {
	t.Parallel()
	w := worker{secrets: map[string]string{"router": "s3cret"}}
	got, err := w.bgp(t.Context(), &v1alpha1.BGP{
		ASN: 64512, RouterID: "10.0.0.11", MED: new(int64(50)), LocalPreference: new(int64(200)), LinkBandwidth: 10_000,
		Communities: []string{"64512:1"}, GracefulRestart: 30,
		Peers: []v1alpha1.Peer{{
			Address: "10.0.0.1", Port: 1790, ASN: 65000, PasswordSecret: "router", HoldTime: 30, TTLSecurity: 1, MaxPrefixes: 100,
			BFD: &v1alpha1.BFD{IntervalMillis: 300, Multiplier: 3},
		}},
	})
	if err != nil {
		t.Fatal(err)
	}
	want := &desired.BGP{
		ASN: 64512, RouterID: netip.MustParseAddr("10.0.0.11"), MED: new(uint32(50)), LocalPreference: new(uint32(200)), LinkBandwidth: 10_000,
		Communities: []string{"64512:1"}, GracefulRestart: 30,
		Peers: []desired.Peer{{
			Addr: netip.MustParseAddr("10.0.0.1"), Port: 1790, ASN: 65000, Password: "s3cret", HoldTime: 30, TTLSecurity: 1, MaxPrefixes: 100,
			BFD: &desired.BFD{IntervalMillis: 300, Multiplier: 3},
		}},
	}
	if diff := cmp.Diff(want, got, sameAddr); diff != "" {
		t.Errorf("BGP differs (-want +got):\n%s", diff)
	}
}

// Every field of a GatewayNode's VRRP is in the state of its gateway.
func TestVRRPOfGatewayNode(t *testing.T) {
	t.Parallel()
	got := vrrp(&v1alpha1.VRRP{
		Interface: "eth0", Source: "10.0.0.11", Peers: []string{"10.0.0.12"}, RouterID: 51, Priority: 150,
		Routers: []v1alpha1.VirtualRouter{{RouterID: 52, Priority: 90}}, IntervalMillis: 100,
	})
	want := &desired.VRRP{
		Interface: "eth0", Source: netip.MustParseAddr("10.0.0.11"), Peers: []netip.Addr{netip.MustParseAddr("10.0.0.12")}, RouterID: 51, Priority: 150,
		Routers: []desired.VirtualRouter{{RouterID: 52, Priority: 90}}, IntervalMillis: 100,
	}
	if diff := cmp.Diff(want, got, sameAddr); diff != "" {
		t.Errorf("VRRP differs (-want +got):\n%s", diff)
	}
}

var sameAddr = cmp.Comparer(func(a, b netip.Addr) bool { return a == b })
