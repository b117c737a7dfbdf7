package offers_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/services/internal/offers"
)

var (
	http  = clusterset.Port{Name: "http", Port: 80, Protocol: clusterset.TCP}
	https = clusterset.Port{Name: "https", Port: 443, Protocol: clusterset.TCP}
)

// at returns an offer of a cluster with one group: addrs serve the ports at numbers, in the order of targets.
func at(cluster clusterset.ClusterID, targets []offers.Target, addrs ...string) offers.Offer {
	o := offers.Offer{Export: clusterset.Export{Cluster: cluster}}
	g := offers.Group{Targets: targets}
	for _, a := range addrs {
		g.Endpoints = append(g.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}})
	}
	o.Groups = []offers.Group{g}
	return o
}

func target(p clusterset.Port, number int32) offers.Target {
	return offers.Target{Port: p, Number: number}
}

func TestReach(t *testing.T) {
	own, moved := []offers.Target{target(http, 80), target(https, 443)}, []offers.Target{target(http, 8080), target(https, 8443)}
	partly := []offers.Target{target(http, 80)}
	renamed := target(clusterset.Port{Name: "web", Port: 80, Protocol: clusterset.TCP}, 80)
	for name, c := range map[string]struct {
		gateways, members []offers.Offer
		ports             []clusterset.Port // http and https by default
		want              string
	}{
		"nobody":                {want: "[] []"},
		"own ports come first":  {members: []offers.Offer{at("a", moved, "10.1.0.1", "10.1.0.2"), at("b", own, "203.0.113.1")}, want: "[203.0.113.1] []"},
		"other ports":           {members: []offers.Offer{at("a", moved, "10.1.0.1"), at("b", moved, "10.2.0.1")}, want: "[10.1.0.1 10.2.0.1] [80=8080 443=8443]"},
		"most ports come first": {members: []offers.Offer{at("a", moved, "10.1.0.1"), at("b", partly, "203.0.113.1")}, want: "[203.0.113.1] [443=0]"},
		"then more ports":       {members: []offers.Offer{at("a", moved[:1], "10.1.0.1", "10.1.0.2"), at("b", moved, "10.2.0.1")}, want: "[10.2.0.1] [80=8080 443=8443]"},
		"then the first one":    {members: []offers.Offer{at("b", moved[1:], "10.2.0.1", "10.2.0.2"), at("a", moved[:1], "10.1.0.1")}, want: "[10.1.0.1] [80=8080 443=0]"},
		"names do not matter":   {members: []offers.Offer{at("a", []offers.Target{renamed, target(https, 443)}, "10.1.0.1")}, want: "[10.1.0.1] []"},
		"gateways":              {gateways: []offers.Offer{at("c", own, "192.0.2.1", "2001:db8::1")}, members: []offers.Offer{at("b", own, "203.0.113.1")}, want: "[192.0.2.1 2001:db8::1] []"},
		"a gateway's own port": {
			gateways: []offers.Offer{at("c", []offers.Target{target(clusterset.Port{Name: "http", Port: 8000, Protocol: clusterset.TCP}, 8000), target(https, 443)}, "192.0.2.1")},
			want:     "[192.0.2.1] [80=8000]",
		},
		"a gateway's port of that name": {
			gateways: []offers.Offer{at("c", []offers.Target{target(clusterset.Port{Name: "admin", Port: 9000, Protocol: clusterset.TCP}, 9000), target(http, 8000)}, "192.0.2.1")},
			ports:    []clusterset.Port{http}, want: "[192.0.2.1] [80=8000]",
		},
		"a gateway of no port": {
			gateways: []offers.Offer{at("c", []offers.Target{target(clusterset.Port{Name: "dns", Port: 53, Protocol: clusterset.UDP}, 53)}, "192.0.2.1")},
			members:  []offers.Offer{at("b", own, "203.0.113.1")}, want: "[203.0.113.1] []",
		},
	} {
		t.Run(name, func(t *testing.T) {
			if c.ports == nil {
				c.ports = []clusterset.Port{http, https}
			}
			got := offers.Reach(c.ports, c.gateways, c.members)
			ports := []string{}
			for _, p := range got.Ports {
				ports = append(ports, fmt.Sprintf("%d=%d", p.Port.Port, p.Number))
			}
			if text := fmt.Sprint(got.Addrs, ports); text != c.want {
				t.Errorf("got %s, want %s", text, c.want)
			}
		})
	}
}

// Each cluster gives its share of many addresses, and one that goes is replaced by one other.
func TestReachIsBounded(t *testing.T) {
	own := []offers.Target{target(http, 80)}
	var many []string
	for i := range 100 {
		many = append(many, fmt.Sprintf("10.1.0.%d", i+1), fmt.Sprintf("fd00::%x", i+1))
	}
	reach := func(addrs []string) []netip.Addr {
		return offers.Reach([]clusterset.Port{http}, nil, []offers.Offer{at("a", own, addrs...), at("b", own, "10.2.0.1", "fd01::1")}).Addrs
	}
	all := reach(many)
	has := func(text string) bool { return slices.Contains(all, netip.MustParseAddr(text)) }
	if len(all) != 32 || !has("10.2.0.1") || !has("fd01::1") {
		t.Errorf("got %v", all)
	}
	gone := all[0].String()
	left := reach(slices.DeleteFunc(many, func(a string) bool { return a == gone }))
	kept := slices.DeleteFunc(slices.Clone(all), func(a netip.Addr) bool { return !slices.Contains(left, a) })
	if len(left) != 32 || len(kept) != 31 {
		t.Errorf("without %s there are %v, before %v", gone, left, all)
	}
}

// Former addresses stay beside the present ones as far as there is room for their family.
func TestKeep(t *testing.T) {
	var now, former []netip.Addr
	for i := range 15 {
		now = append(now, netip.AddrFrom4([4]byte{10, 1, 0, byte(i)}))
		former = append(former, netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}))
	}
	former = append(former, now[0], netip.MustParseAddr("fd00::1"))
	kept := offers.Outside{Addrs: now}.Keep(former)
	want := slices.Concat([]netip.Addr{former[0]}, now, former[16:])
	if !slices.Equal(kept, want) {
		t.Errorf("%v; want %v", kept, want)
	}
}
