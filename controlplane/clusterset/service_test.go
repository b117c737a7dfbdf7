package clusterset

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-net/isthmus/tools/conformance"
)

func TestClusterIDValidate(t *testing.T) {
	for name, tc := range map[string]struct {
		id   ClusterID
		want bool
	}{
		"label":                {"east-1", true},
		"two labels":           {"east.example", true},
		"one letter":           {"a", true},
		"63 characters":        {ClusterID(strings.Repeat("a", 63)), true},
		"empty":                {"", false},
		"64 characters":        {ClusterID(strings.Repeat("a", 64)), false},
		"64 in two labels":     {ClusterID(strings.Repeat("a", 31) + "." + strings.Repeat("b", 32)), false},
		"three labels":         {"a.b.c", false},
		"empty second label":   {"a.", false},
		"upper case":           {"East", false},
		"begins with a hyphen": {"-a", false},
		"ends with a hyphen":   {"a.b-", false},
		"underscore":           {"a_b", false},
		"not ASCII":            {"ä", false},
	} {
		t.Run(name, func(t *testing.T) {
			if err := tc.id.Validate(); (err == nil) != tc.want {
				t.Errorf("Validate(%q) = %v", tc.id, err)
			}
		})
	}
	conformance.Holds(t, "K3")
}

func TestIsUnicast(t *testing.T) {
	for addr, want := range map[string]bool{
		"10.0.0.1": true, "243.0.0.1": true, "fd00::1": true, "2001:db8::1": true, "::ffff:10.0.0.1": true,
		"127.0.0.1": false, "::1": false, "::ffff:127.0.0.1": false,
		"169.254.169.254": false, "fe80::1": false, "fd00::1%eth0": false,
		"224.0.0.1": false, "ff02::1": false,
		"0.0.0.0": false, "::": false, "0.1.2.3": false, "255.255.255.255": false,
	} {
		if have := IsUnicast(netip.MustParseAddr(addr)); have != want {
			t.Errorf("IsUnicast(%s) = %t", addr, have)
		}
	}
	if IsUnicast(netip.Addr{}) {
		t.Error("the zero address is unicast")
	}
}

func TestWithIPs(t *testing.T) {
	v4, v6 := netip.MustParseAddr("243.0.0.1"), netip.MustParseAddr("fd00::1")
	for name, tc := range map[string]struct {
		in   Import
		ips  []netip.Addr
		want Import
	}{
		"families follow the IPs": {
			in:   Import{Type: ClusterSetIP, Families: []Family{IPv4, IPv6}},
			ips:  []netip.Addr{v6},
			want: Import{Type: ClusterSetIP, Families: []Family{IPv6}, IPs: []netip.Addr{v6}},
		},
		"no IP yet": {
			in:   Import{Type: ClusterSetIP, Families: []Family{IPv4}, IPs: []netip.Addr{v4}},
			want: Import{Type: ClusterSetIP, Families: []Family{IPv4}},
		},
		"headless has none": {
			in:   Import{Type: Headless, Families: []Family{IPv4, IPv6}},
			ips:  []netip.Addr{v4},
			want: Import{Type: Headless, Families: []Family{IPv4, IPv6}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, tc.in.WithIPs(tc.ips), addrs); diff != "" {
				t.Errorf("(-want +have):\n%s", diff)
			}
		})
	}
}

func TestIsShared(t *testing.T) {
	for namespace, want := range map[string]bool{
		"demo": true, "default": true, "kube": true, "kubeflow": true, "my-kube-system": true,
		"kube-system": false, "kube-public": false, "kube-node-lease": false,
	} {
		if have := IsShared(namespace); have != want {
			t.Errorf("IsShared(%s) = %t", namespace, have)
		}
	}
}
