package vrrp

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

// role is the part of a gateway in its virtual router.
type role struct {
	config desired.VRRP
	vips   []netip.Addr // sorted
}

// newRole returns the role in a state, nil when there is none: no VIP is announced by VRRP and has backends, or the
// gateway is cordoned.
func newRole(s *desired.State) *role {
	if s == nil || s.VRRP == nil || s.Cordoned {
		return nil
	}
	r := &role{config: *s.VRRP}
	for i := range s.VIPs {
		if v := &s.VIPs[i]; v.Announce == desired.ByVRRP && v.Serves() {
			r.vips = append(r.vips, v.Addr)
		}
	}
	if len(r.vips) == 0 {
		return nil
	}
	slices.SortFunc(r.vips, netip.Addr.Compare)
	return r
}

// anchor returns the only address in advertisements. It is not a VIP, because gateways get their VIPs one after another,
// and a backup that receives an unknown address considers itself the master. The IPv4 anchor is from the reserved part of
// the link-local range (RFC 3927, 2.1); the IPv6 one has to be link-local (RFC 9568, 5.2.9).
func (r *role) anchor() netip.Addr {
	if r.config.Source.Is4() {
		return netip.AddrFrom4([4]byte{169, 254, 255, r.config.RouterID})
	}
	return netip.AddrFrom16([16]byte{0xfe, 0x80, 14: 0x33, 15: r.config.RouterID})
}

// addresses returns all addresses of the virtual router by device.
func (r *role) addresses() map[string][]netip.Addr {
	return map[string][]netip.Addr{loopback: {r.anchor()}, r.config.Interface: r.vips}
}

// loopback is the device with the anchor.
const loopback = "lo"

// render returns the configuration of keepalived.
func (r *role) render() []byte {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	block := func(indent, name string, lines func()) {
		line("%s%s {", indent, name)
		lines()
		line("%s}", indent)
	}
	line("# Written by isthmus-gateway, which restores it after a change.")
	block("", "global_defs", func() {
		line("  vrrp_version 3")
		line("  vrrp_garp_master_delay 1") // seconds until a new master sends gratuitous ARP again
		line("  vrrp_garp_master_repeat 2")
		// Its backups miss it on a busy CPU otherwise. Real-time scheduling kills keepalived 2.2 at a reload (RLIMIT_RTTIME).
		line("  vrrp_priority -20")
	})
	c := r.config
	block("", "vrrp_instance isthmus", func() {
		line("  state BACKUP")
		line("  interface %s", c.Interface)
		line("  virtual_router_id %d", c.RouterID)
		line("  priority %d", c.Priority)
		line("  advert_int %d.%02d", c.IntervalMillis/1000, c.IntervalMillis%1000/10)
		if len(c.Peers) == 0 { // keepalived refuses unicast without peers; with multicast it receives every router with its id
			line("  mcast_src_ip %s", c.Source)
		} else {
			line("  unicast_src_ip %s", c.Source)
			block("  ", "unicast_peer", func() {
				for _, p := range c.Peers { // which is on the link (RFC 9568, 5.1.1.3): nobody else has the name of a peer
					line("    %s min_ttl 255", p)
				}
			})
		}
		block("  ", "virtual_ipaddress", func() { line("    %s dev %s", hostPrefix(r.anchor()), loopback) })
		block("  ", "virtual_ipaddress_excluded", func() { // may hold both families
			for _, a := range r.vips {
				line("    %s dev %s", hostPrefix(a), c.Interface)
			}
		})
	})
	return []byte(b.String())
}

func hostPrefix(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
