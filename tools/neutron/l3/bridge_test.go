package l3

import (
	"errors"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"

	"github.com/isthmus-net/isthmus/tools/netlab"
)

// bridged puts a gateway behind the bridge of a router, with inner as an additional address.
func bridged(router, gateway *netlab.Namespace) error {
	space, err := os.Open(gateway.Path())
	if err != nil {
		return err
	}
	defer space.Close()
	if err := router.Do(func() error {
		bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}}
		veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "p0"}, PeerName: "eth0", PeerNamespace: netlink.NsFd(space.Fd())}
		return errors.Join(netlink.LinkAdd(bridge), netlink.LinkAdd(veth), netlink.LinkSetMaster(veth, bridge),
			give("br0", "10.99.0.1/24"), netlink.LinkSetUp(veth))
	}); err != nil {
		return err
	}
	return gateway.Do(func() error {
		return errors.Join(give("eth0", "10.99.0.11/24"), give("eth0", inner.String()+"/32"),
			netlink.RouteAdd(&netlink.Route{Gw: netip.MustParseAddr("10.99.0.1").AsSlice()}))
	})
}

func give(device, address string) error {
	link, err := netlink.LinkByName(device)
	if err != nil {
		return err
	}
	a, err := netlink.ParseAddr(address)
	if err != nil {
		return err
	}
	return errors.Join(netlink.AddrAdd(link, a), netlink.LinkSetUp(link))
}
