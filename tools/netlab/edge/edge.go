// Package edge builds the edge of a cluster from network namespaces: a client, a router, and two to four gateways on one
// switch, so that the router does not notice when a gateway's cable is cut. Gateways can answer at VIPs; a probe counts what
// a client sees.
package edge

import (
	"errors"
	"fmt"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/tools/netlab"
)

// Addresses; each device has one of both families.
var (
	Router   = [2]netip.Addr{netip.MustParseAddr("10.99.0.1"), netip.MustParseAddr("fd99::1")} // on the side of the gateways
	Gateways = [4][2]netip.Addr{
		{netip.MustParseAddr("10.99.0.11"), netip.MustParseAddr("fd99::11")},
		{netip.MustParseAddr("10.99.0.12"), netip.MustParseAddr("fd99::12")},
		{netip.MustParseAddr("10.99.0.13"), netip.MustParseAddr("fd99::13")},
		{netip.MustParseAddr("10.99.0.14"), netip.MustParseAddr("fd99::14")},
	}
	// Device is the gateways' device towards the router.
	Device = "eth0"

	client   = [2]netip.Addr{netip.MustParseAddr("10.98.0.2"), netip.MustParseAddr("fd98::2")}
	upstream = [2]netip.Addr{netip.MustParseAddr("10.98.0.1"), netip.MustParseAddr("fd98::1")} // the router's address on the side of the client
)

// subnet is the prefix length of all networks.
var subnet = [2]int{24, 64}

// Lab is an edge. The caller closes it.
type Lab struct {
	Client, Router *netlab.Namespace
	Gateways       []*netlab.Namespace
}

// New builds an edge with two gateways, without announcements.
func New() (*Lab, error) { return NewWith(2) }

// NewWith builds an edge with up to four gateways, without announcements.
func NewWith(gateways int) (*Lab, error) {
	l := &Lab{Gateways: make([]*netlab.Namespace, gateways)}
	all := []**netlab.Namespace{&l.Client, &l.Router}
	for i := range l.Gateways {
		all = append(all, &l.Gateways[i])
	}
	for _, ns := range all {
		var err error
		if *ns, err = netlab.NewNamespace(); err != nil {
			return nil, errors.Join(err, l.Close())
		}
		if err = (*ns).Do(forwardIPv6); err != nil {
			return nil, errors.Join(err, l.Close())
		}
	}
	for _, step := range []func() error{l.connectClient, l.connectGateways} {
		if err := step(); err != nil {
			return nil, errors.Join(err, l.Close())
		}
	}
	return l, nil
}

// Close removes the edge.
func (l *Lab) Close() error {
	var errs []error
	for _, ns := range append([]*netlab.Namespace{l.Client, l.Router}, l.Gateways...) {
		if ns != nil {
			errs = append(errs, ns.Close())
		}
	}
	return errors.Join(errs...)
}

// forwardIPv6 enables IPv6 forwarding in the current namespace, with addresses that work at once.
func forwardIPv6() error {
	for path, value := range map[string]string{
		"all/forwarding": "1", "all/accept_dad": "0", "default/accept_dad": "0",
	} {
		if err := os.WriteFile("/proc/sys/net/ipv6/conf/"+path, []byte(value), 0); err != nil {
			return fmt.Errorf("set %s: %w", path, err)
		}
	}
	return nil
}

func (l *Lab) connectClient() error {
	if err := l.cable(l.Client, Device, "c0"); err != nil {
		return err
	}
	if err := l.Router.Do(func() error { return address("c0", upstream) }); err != nil {
		return err
	}
	return l.Client.Do(func() error { return errors.Join(address(Device, client), routeAll(upstream)) })
}

func (l *Lab) connectGateways() error {
	if err := l.Router.Do(func() error {
		bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}}
		if err := netlink.LinkAdd(bridge); err != nil {
			return fmt.Errorf("make the switch: %w", err)
		}
		return address("br0", Router)
	}); err != nil {
		return err
	}
	for i, gw := range l.Gateways {
		if err := l.cable(gw, Device, Port(i)); err != nil {
			return err
		}
		if err := l.Router.Do(func() error { return plug(Port(i)) }); err != nil {
			return err
		}
		if err := gw.Do(func() error { return errors.Join(address(Device, Gateways[i]), routeAll(Router)) }); err != nil {
			return err
		}
	}
	return nil
}

// Port is the switch's end of a gateway's cable.
func Port(gateway int) string { return fmt.Sprintf("p%d", gateway) }

// cable joins other to the router by a veth pair.
func (l *Lab) cable(other *netlab.Namespace, there, here string) error {
	return l.Router.Do(func() error {
		fd, err := os.Open(other.Path())
		if err != nil {
			return fmt.Errorf("open namespace: %w", err)
		}
		defer fd.Close()
		veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: here}, PeerName: there, PeerNamespace: netlink.NsFd(int(fd.Fd()))}
		if err := netlink.LinkAdd(veth); err != nil {
			return fmt.Errorf("make veth %s to %s: %w", here, there, err)
		}
		return nil
	})
}

// address adds addresses to a device and brings it up.
func address(device string, addrs [2]netip.Addr) error {
	link, err := netlink.LinkByName(device)
	if err != nil {
		return fmt.Errorf("find %s: %w", device, err)
	}
	for i, a := range addrs {
		addr, err := netlink.ParseAddr(netip.PrefixFrom(a, subnet[i]).String())
		if err != nil {
			return fmt.Errorf("address of %s: %w", device, err)
		}
		addr.Flags = unix.IFA_F_NODAD // otherwise the address is not usable at once
		if err := netlink.AddrAdd(link, addr); err != nil {
			return fmt.Errorf("give %s to %s: %w", a, device, err)
		}
	}
	return up(link)
}

func up(link netlink.Link) error {
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("bring %s up: %w", link.Attrs().Name, err)
	}
	return nil
}

func plug(device string) error {
	link, err := netlink.LinkByName(device)
	if err != nil {
		return fmt.Errorf("find %s: %w", device, err)
	}
	bridge, err := netlink.LinkByName("br0")
	if err != nil {
		return fmt.Errorf("find the switch: %w", err)
	}
	if err := netlink.LinkSetMaster(link, bridge); err != nil {
		return fmt.Errorf("plug %s in: %w", device, err)
	}
	return up(link)
}

func routeAll(via [2]netip.Addr) error {
	for _, a := range via {
		if err := netlink.RouteAdd(&netlink.Route{Gw: a.AsSlice()}); err != nil {
			return fmt.Errorf("route through %s: %w", a, err)
		}
	}
	return nil
}

// Cut cuts a gateway's cable at the switch: to the router the gateway is dead.
func (l *Lab) Cut(gateway int) error { return l.setPort(gateway, netlink.LinkSetDown) }

// Mend connects it again.
func (l *Lab) Mend(gateway int) error { return l.setPort(gateway, netlink.LinkSetUp) }

func (l *Lab) setPort(gateway int, set func(netlink.Link) error) error {
	return l.Router.Do(func() error {
		link, err := netlink.LinkByName(Port(gateway))
		if err != nil {
			return fmt.Errorf("find %s: %w", Port(gateway), err)
		}
		if err := set(link); err != nil {
			return fmt.Errorf("set %s: %w", Port(gateway), err)
		}
		return nil
	})
}

// Has reports whether a gateway has an address.
func (l *Lab) Has(gateway int, addr netip.Addr) (has bool, err error) {
	err = l.Gateways[gateway].Do(func() error {
		all, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
		for _, a := range all {
			have, _ := netip.AddrFromSlice(a.IP)
			has = has || have.Unmap() == addr
		}
		return err
	})
	return has, err
}

// take makes a gateway accept packets to an address that none of its devices has, as a balancer does, which translates
// them before routing. The gateway does not answer ARP or neighbour discovery for it.
func (l *Lab) take(gateway int, addr netip.Addr) error {
	return l.Gateways[gateway].Do(func() error {
		// A device answers only for its own addresses, not for all local ones.
		if err := os.WriteFile("/proc/sys/net/ipv4/conf/all/arp_ignore", []byte("1"), 0); err != nil {
			return fmt.Errorf("set arp_ignore: %w", err)
		}
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return fmt.Errorf("find loopback: %w", err)
		}
		local := &netlink.Route{
			LinkIndex: lo.Attrs().Index, Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST,
			Dst: netlink.NewIPNet(addr.AsSlice()),
		}
		if err := netlink.RouteAdd(local); err != nil {
			return fmt.Errorf("let gateway %d take %s: %w", gateway, addr, err)
		}
		return nil
	})
}
