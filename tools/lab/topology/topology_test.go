package topology_test

import (
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/isthmus-net/isthmus/tools/lab/topology"
)

func TestParse(t *testing.T) {
	have, err := topology.Parse("a:1,broker:0")
	if err != nil {
		t.Fatal(err)
	}
	want := topology.Topology{
		{Name: "a", Index: 1, Nodes: []topology.Node{{
			Name: "a1", Cluster: "a", Index: 1,
			IPv4: netip.MustParseAddr("10.200.0.11"), IPv6: netip.MustParseAddr("fd00:200::11"),
			PodIPv4: netip.MustParsePrefix("10.201.1.0/24"), PodIPv6: netip.MustParsePrefix("fd00:201:1::/64"),
		}}},
		{Name: "broker", Index: 2},
	}
	compare := cmp.Options{cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{}), cmpopts.EquateEmpty()}
	if diff := cmp.Diff(want, have, compare); diff != "" {
		t.Errorf("topology (-want +have):\n%s", diff)
	}
	if server := have[1].Server(); server != "https://10.200.0.20:6443" {
		t.Errorf("server of broker is %s", server)
	}
}

func TestParseRefuses(t *testing.T) {
	for name, tc := range map[string]struct{ text, fault string }{
		"nothing":           {"", "no cluster"},
		"no count":          {"a", "not CLUSTER:NODES"},
		"upper case":        {"A:1", "not CLUSTER:NODES"},
		"long name":         {"abcdefghijklm:1", "not CLUSTER:NODES"},
		"too many nodes":    {"a:10", "between 0 and 9"},
		"negative":          {"a:-1", "between 0 and 9"},
		"same name":         {"a:1 a:1", `two machines are called "a"`},
		"node and cluster":  {"a:1 a1:0", `two machines are called "a1"`},
		"unknown families":  {"a:1/ipv6-only", "ipv6-first or ipv4-only"},
		"too many clusters": {strings.Repeat("a:0 ", 10), "10 clusters"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := topology.Parse(tc.text)
			if err == nil || !strings.Contains(err.Error(), tc.fault) {
				t.Errorf("have %v, want %q", err, tc.fault)
			}
		})
	}
}

// TestFamilies: the preferred family comes first in all that a cluster and its nodes have, and there is none of another one.
func TestFamilies(t *testing.T) {
	const text = "a:1 b:1/ipv6-first c:1/ipv4-only"
	top, err := topology.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	if top.String() != text {
		t.Errorf("%q becomes %q", text, top)
	}
	for i, want := range []struct{ services, pods, node, dns, kubernetes, advertised string }{
		{"[10.101.0.0/16 fd00:101::/112]", "[10.201.1.0/24 fd00:201:1::/64]", "[10.200.0.11 fd00:200::11]", "10.101.0.10", "10.101.0.1", "10.200.0.10"},
		{"[fd00:102::/112 10.102.0.0/16]", "[fd00:202:1::/64 10.202.1.0/24]", "[fd00:200::21 10.200.0.21]", "fd00:102::a", "fd00:102::1", "fd00:200::20"},
		{"[10.103.0.0/16]", "[10.203.1.0/24]", "[10.200.0.31]", "10.103.0.10", "10.103.0.1", "10.200.0.30"},
	} {
		c := top[i]
		have := []any{c.ServiceCIDRs(), c.Nodes[0].PodCIDRs(), c.Nodes[0].Addresses(), c.DNSServiceIP(), c.KubernetesServiceIP(), c.Advertise()}
		for j, w := range []string{want.services, want.pods, want.node, want.dns, want.kubernetes, want.advertised} {
			if h := fmt.Sprint(have[j]); h != w {
				t.Errorf("%s has %s, want %s", c.Name, h, w)
			}
		}
	}
}

// TestGrow: a cluster gets the node that it would have had from the start, and loses it again.
func TestGrow(t *testing.T) {
	small, err := topology.Parse("a:1 b:0")
	if err != nil {
		t.Fatal(err)
	}
	big, err := topology.Parse("a:2 b:0")
	if err != nil {
		t.Fatal(err)
	}
	grown, n, err := small.Grow("a")
	if err != nil || !reflect.DeepEqual(grown, big) || n.Name != "a2" {
		t.Errorf("%s with node %s, %v, want %s", grown, n.Name, err, big)
	}
	shrunk, n, err := grown.Shrink("a")
	if err != nil || !reflect.DeepEqual(shrunk, small) || n.Name != "a2" {
		t.Errorf("%s without node %s, %v, want %s", shrunk, n.Name, err, small)
	}
	for name, fails := range map[string]func(string) (topology.Topology, topology.Node, error){"x": small.Grow, "b": small.Shrink} {
		if _, _, err := fails(name); err == nil {
			t.Errorf("%s has changed", name)
		}
	}
}

// TestAddressesNeverMeet: no address or range of a lab overlaps another, and no default
// ClusterSetIP range does.
func TestAddressesNeverMeet(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var words []string
		for i := range rapid.IntRange(1, 9).Draw(t, "clusters") {
			words = append(words, string(rune('a'+i))+":"+string(rune('0'+rapid.IntRange(0, 9).Draw(t, "nodes"))))
		}
		top, err := topology.Parse(strings.Join(words, " "))
		if err != nil {
			t.Fatal(err)
		}
		if again, err := topology.Parse(top.String()); err != nil || again.String() != top.String() {
			t.Fatalf("Parse(%q) is %q, %v", top, again, err)
		}
		ranges := []netip.Prefix{netip.MustParsePrefix("243.0.0.0/8")}
		for _, m := range top.Machines() {
			if !topology.FabricIPv4.Contains(m.IPv4) || !topology.FabricIPv6.Contains(m.IPv6) {
				t.Fatalf("%s is not on the fabric: %s %s", m.Name, m.IPv4, m.IPv6)
			}
			ranges = append(ranges, netip.PrefixFrom(m.IPv4, 32), netip.PrefixFrom(m.IPv6, 128))
		}
		for _, c := range top {
			services, pods := c.ServiceCIDRs(), c.PodCIDRs()
			ranges = append(ranges, services...)
			if !services[0].Contains(c.DNSServiceIP()) || !services[0].Contains(c.KubernetesServiceIP()) {
				t.Fatalf("ClusterIPs of %s are outside %s", c.Name, services[0])
			}
			for _, n := range c.Nodes {
				ranges = append(ranges, n.PodIPv4, n.PodIPv6)
				if !pods[0].Overlaps(n.PodIPv4) || !pods[1].Overlaps(n.PodIPv6) {
					t.Fatalf("pods of %s are outside %s", n.Name, pods)
				}
			}
		}
		for i, p := range ranges {
			for _, q := range ranges[:i] {
				if p.Overlaps(q) {
					t.Fatalf("%s and %s overlap in %q", p, q, top)
				}
			}
		}
	})
}
