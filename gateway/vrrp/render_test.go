package vrrp

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

func state(vips ...string) *desired.State {
	s := &desired.State{VRRP: &desired.VRRP{
		Interface: "eth0", Source: netip.MustParseAddr("10.99.0.11"), Peers: []netip.Addr{netip.MustParseAddr("10.99.0.12")},
		RouterID: 51, Priority: 150, IntervalMillis: 300,
	}}
	for _, v := range vips {
		s.VIPs = append(s.VIPs, desired.VIP{
			Addr: netip.MustParseAddr(v), Announce: desired.ByVRRP, Frontends: []desired.Frontend{{Backends: []desired.Backend{{Weight: 1}}}},
		})
	}
	return s
}

// The advertised address does not depend on the VIPs, and VIPs of both families move together.
func TestRender(t *testing.T) {
	t.Parallel()
	want := `# Written by isthmus-gateway, which restores it after a change.
global_defs {
  vrrp_version 3
  vrrp_garp_master_delay 1
  vrrp_garp_master_repeat 2
  vrrp_priority -20
}
vrrp_instance isthmus {
  state BACKUP
  interface eth0
  virtual_router_id 51
  priority 150
  advert_int 0.30
  unicast_src_ip 10.99.0.11
  unicast_peer {
    10.99.0.12 min_ttl 255
  }
  virtual_ipaddress {
    169.254.255.51/32 dev lo
  }
  virtual_ipaddress_excluded {
    10.99.0.100/32 dev eth0
    fd99::100/128 dev eth0
  }
}
`
	if diff := cmp.Diff(want, string(newRole(state("fd99::100", "10.99.0.100")).render())); diff != "" {
		t.Error(diff)
	}
}

// Each virtual router has an instance of its own, if it has VIPs. One that the gateway is not in has none.
func TestRenderRouters(t *testing.T) {
	t.Parallel()
	s := state("10.99.0.100", "10.99.0.101", "10.99.0.102", "10.99.0.103")
	s.VRRP.Routers = []desired.VirtualRouter{{RouterID: 52, Priority: 90}, {RouterID: 7, Priority: 80}}
	s.VIPs[1].RouterID, s.VIPs[2].RouterID, s.VIPs[3].RouterID = 52, 51, 9
	r := newRole(s)
	want := `vrrp_instance isthmus {
  virtual_router_id 51
  priority 150
    169.254.255.51/32 dev lo
    10.99.0.100/32 dev eth0
    10.99.0.102/32 dev eth0
vrrp_instance isthmus_52 {
  virtual_router_id 52
  priority 90
    169.254.255.52/32 dev lo
    10.99.0.101/32 dev eth0
`
	var have strings.Builder
	for line := range strings.Lines(string(r.render())) {
		if strings.Contains(line, "vrrp_instance") || strings.Contains(line, "virtual_router_id") || strings.Contains(line, " priority") || strings.Contains(line, " dev ") {
			have.WriteString(line)
		}
	}
	if diff := cmp.Diff(want, have.String()); diff != "" {
		t.Error(diff)
	}
	if low := string(r.least().render()); strings.Count(low, "  priority 1\n") != 2 || r.routers[0].Priority != 150 {
		t.Errorf("the lowest priorities: %s", low)
	}
}

// A gateway has a role while a VIP announced by VRRP has backends and the gateway is not cordoned.
func TestNewRole(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(*desired.State){
		"cordoned":     func(s *desired.State) { s.Cordoned = true },
		"no VRRP":      func(s *desired.State) { s.VRRP = nil },
		"by BGP":       func(s *desired.State) { s.VIPs[0].Announce = desired.ByBGP },
		"all draining": func(s *desired.State) { s.VIPs[0].Frontends[0].Backends[0].Draining = true },
		"no VIPs":      func(s *desired.State) { s.VIPs = nil },
	} {
		s := state("10.99.0.100")
		if newRole(s) == nil {
			t.Fatal("a gateway with a VIP has no role")
		}
		spoil(s)
		if r := newRole(s); r != nil {
			t.Errorf("%s: the role is %+v", name, r)
		}
	}
}

func TestAnchor(t *testing.T) {
	t.Parallel()
	r := newRole(state("10.99.0.100"))
	r.config.Source = netip.MustParseAddr("fd99::11")
	if have := r.anchor(51); have != netip.MustParseAddr("fe80::3333") {
		t.Errorf("the anchor of IPv6 is %s", have)
	}
}
