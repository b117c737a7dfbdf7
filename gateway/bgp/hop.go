package bgp

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// nextHops returns the gateway's own addresses on the link to a peer, by family: the peer sends packets for VIPs there.
// An address that the link does not have is the zero Addr.
func nextHops(peer netip.Addr) (hops [2]netip.Addr, err error) {
	routes, err := netlink.RouteGet(peer.AsSlice())
	if err != nil || len(routes) == 0 {
		return hops, fmt.Errorf("no route to peer %s: %w", peer, err)
	}
	if source, ok := netip.AddrFromSlice(routes[0].Src); ok {
		source = source.Unmap()
		hops[family(source)] = source
	}
	link, err := netlink.LinkByIndex(routes[0].LinkIndex)
	if err != nil {
		return hops, fmt.Errorf("link to peer %s: %w", peer, err)
	}
	for i, of := range [2]int{ipv4: netlink.FAMILY_V4, ipv6: netlink.FAMILY_V6} {
		if hops[i].IsValid() {
			continue
		}
		addrs, err := netlink.AddrList(link, of)
		if err != nil {
			return hops, fmt.Errorf("addresses of %s: %w", link.Attrs().Name, err)
		}
		for _, a := range addrs {
			addr, ok := netip.AddrFromSlice(a.IP)
			if addr = addr.Unmap(); ok && addr.IsGlobalUnicast() && a.Flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_DEPRECATED|unix.IFA_F_DADFAILED) == 0 && !isHost(a) {
				hops[i] = addr
				break
			}
		}
	}
	return hops, nil
}

// isHost reports whether an address has a host prefix, as VIPs have. No peer could reach it as a next hop.
func isHost(a netlink.Addr) bool {
	ones, bits := a.Mask.Size()
	return ones == bits
}
