package vrrp

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

// role is the part of a gateway in its virtual routers.
type role struct {
	config  desired.VRRP
	routers []router // those with VIPs, by id
}

// router is a virtual router.
type router struct {
	desired.VirtualRouter
	vips []netip.Addr // sorted
}

// newRole returns the role in a state, nil when there is none: no VIP is announced by VRRP and has backends, or the
// gateway is cordoned.
func newRole(s *desired.State) *role {
	if s == nil || s.VRRP == nil || s.Cordoned {
		return nil
	}
	vips := map[uint8][]netip.Addr{}
	for i := range s.VIPs {
		if v := &s.VIPs[i]; v.Announce == desired.ByVRRP && v.Serves() {
			id := cmp.Or(v.RouterID, s.VRRP.RouterID)
			vips[id] = append(vips[id], v.Addr)
		}
	}
	r := &role{config: *s.VRRP}
	for _, is := range s.VRRP.VirtualRouters() {
		if has := vips[is.RouterID]; len(has) > 0 {
			slices.SortFunc(has, netip.Addr.Compare)
			r.routers = append(r.routers, router{is, has})
		}
	}
	if len(r.routers) == 0 {
		return nil
	}
	slices.SortFunc(r.routers, func(a, b router) int { return cmp.Compare(a.RouterID, b.RouterID) })
	return r
}

// vips returns the VIPs of all virtual routers, sorted.
func (r *role) vips() (all []netip.Addr) {
	for _, is := range r.routers {
		all = append(all, is.vips...)
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return all
}

// least returns the role with the lowest priority in all virtual routers.
func (r *role) least() *role {
	is := &role{config: r.config, routers: slices.Clone(r.routers)}
	for i := range is.routers {
		is.routers[i].Priority = 1
	}
	return is
}

// anchor returns the only address in the advertisements of a virtual router. It is not a VIP, because gateways get their VIPs one after
// another, and a backup that receives an unknown address considers itself the master. The IPv4 anchor is from the reserved part of the
// link-local range (RFC 3927, 2.1); the IPv6 one has to be link-local (RFC 9568, 5.2.9).
func (r *role) anchor(id uint8) netip.Addr {
	if r.config.Source.Is4() {
		return netip.AddrFrom4([4]byte{169, 254, 255, id})
	}
	return netip.AddrFrom16([16]byte{0xfe, 0x80, 14: 0x33, 15: id})
}

// addresses returns all addresses of the virtual routers by device.
func (r *role) addresses() map[string][]netip.Addr {
	var anchors []netip.Addr
	for _, is := range r.routers {
		anchors = append(anchors, r.anchor(is.RouterID))
	}
	return map[string][]netip.Addr{loopback: anchors, r.config.Interface: r.vips()}
}

// loopback is the device with the anchors.
const loopback = "lo"

// render returns the configuration of keepalived.
func (r *role) render() []byte {
	var c configuration
	c.line("# Written by isthmus-gateway, which restores it after a change.")
	c.block("global_defs", func() {
		c.line("  vrrp_version 3")
		c.line("  vrrp_garp_master_delay 1") // seconds until a new master sends gratuitous ARP again
		c.line("  vrrp_garp_master_repeat 2")
		// Its backups miss it on a busy CPU otherwise. Real-time scheduling kills keepalived 2.2 at a reload (RLIMIT_RTTIME).
		c.line("  vrrp_priority -20")
	})
	for _, is := range r.routers {
		name := "isthmus"
		if is.RouterID != r.config.RouterID {
			name = fmt.Sprintf("isthmus_%d", is.RouterID)
		}
		c.block("vrrp_instance "+name, func() { r.renderRouter(&c, is) })
	}
	return []byte(c.String())
}

// renderRouter writes the lines of one virtual router.
func (r *role) renderRouter(c *configuration, is router) {
	c.line("  state BACKUP")
	c.line("  interface %s", r.config.Interface)
	c.line("  virtual_router_id %d", is.RouterID)
	c.line("  priority %d", is.Priority)
	c.line("  advert_int %d.%02d", r.config.IntervalMillis/1000, r.config.IntervalMillis%1000/10)
	if len(r.config.Peers) == 0 { // keepalived refuses unicast without peers; with multicast it receives every router with its id
		c.line("  mcast_src_ip %s", r.config.Source)
	} else {
		c.line("  unicast_src_ip %s", r.config.Source)
		c.block("  unicast_peer", func() {
			for _, p := range r.config.Peers { // which is on the link (RFC 9568, 5.1.1.3): nobody else has the name of a peer
				c.line("    %s min_ttl 255", p)
			}
		})
	}
	c.block("  virtual_ipaddress", func() { c.line("    %s dev %s", hostPrefix(r.anchor(is.RouterID)), loopback) })
	c.block("  virtual_ipaddress_excluded", func() { // may hold both families
		for _, a := range is.vips {
			c.line("    %s dev %s", hostPrefix(a), r.config.Interface)
		}
	})
}

// configuration is a configuration of keepalived that is being written.
type configuration struct{ strings.Builder }

func (c *configuration) line(format string, args ...any) { fmt.Fprintf(c, format+"\n", args...) }

// block writes a block. Its title is indented as the block is.
func (c *configuration) block(title string, lines func()) {
	c.line("%s {", title)
	lines()
	c.line("%s}", title[:len(title)-len(strings.TrimLeft(title, " "))])
}

func hostPrefix(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
