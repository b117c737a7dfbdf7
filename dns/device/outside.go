package device

import (
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
)

// Addresses of documentation (RFC 5737, RFC 3849): only a default route leads to them.
var (
	far4 = netip.MustParseAddr("192.0.2.1")
	far6 = netip.MustParseAddr("2001:db8::1")
)

// IsOutside reports whether packets to an address leave this network namespace by an uplink: a network card, or the device of
// the default route. It is false for addresses of pods and virtual machines that are behind devices of their own, and for those
// without a route.
func IsOutside(a netip.Addr) bool {
	index, ok := deviceTo(a)
	if !ok {
		return false
	}
	far := far4
	if a.Is6() {
		far = far6
	}
	if uplink, ok := deviceTo(far); ok && uplink == index {
		return true
	}
	link, err := netlink.LinkByIndex(index)
	return err == nil && link.Type() == "device" && link.Attrs().Flags&net.FlagLoopback == 0 // a card has no driver of another kind
}

// deviceTo returns the device by which packets to an address leave.
func deviceTo(a netip.Addr) (index int, ok bool) {
	routes, err := netlink.RouteGet(a.AsSlice())
	if err != nil || len(routes) == 0 {
		return 0, false
	}
	return routes[0].LinkIndex, true
}
