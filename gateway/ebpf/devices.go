package ebpf

import (
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
)

// selectDevices returns the devices of this network namespace that are balanced, their names by index: the named
// ones, or else all Ethernet devices with a global unicast address.
func selectDevices(names []string) (map[int]string, error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	addrs, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	found := map[int]string{}
	for _, l := range links {
		a := l.Attrs()
		reachable := slices.ContainsFunc(addrs, func(addr netlink.Addr) bool { return addr.LinkIndex == a.Index && addr.IP.IsGlobalUnicast() })
		if slices.Contains(names, a.Name) || len(names) == 0 && a.EncapType == "ether" && reachable && a.Flags&net.FlagLoopback == 0 {
			found[a.Index] = a.Name
		}
	}
	for _, name := range names {
		if !slices.ContainsFunc(links, func(l netlink.Link) bool { return l.Attrs().Name == name }) {
			return nil, fmt.Errorf("there is no device %q: name one that `ip link` shows, or none for all", name)
		}
	}
	return found, nil
}

// attachAll attaches the program to these devices and detaches it from all others. It also attaches the XDP program
// to the drivers of those in fast. If a driver refuses, without holds the error by index: the ingress program then
// handles everything.
func (k *kernel) attachAll(devices, fast map[int]string) (without map[int]error, err error) {
	without, keep := map[int]error{}, map[string]bool{}
	ingress, driver := k.ingress(), k.driver()
	for index, name := range devices {
		keep[ingress.pin(index)] = !k.noTCX
		if err := k.attach(index); err != nil {
			return nil, fmt.Errorf("attach to device %s: %w", name, err)
		}
	}
	for index := range fast {
		if err := k.putXDP(index); err != nil {
			without[index] = err
			continue
		}
		keep[driver.pin(index)] = true
	}
	if k.noTCX {
		if err := k.removeFilters(devices); err != nil {
			return nil, err
		}
	}
	return without, k.detachOthers(keep)
}

// attach attaches our program to the ingress of a device.
func (k *kernel) attach(index int) error {
	if k.noTCX {
		return k.attachFilter(index)
	}
	return k.put(k.ingress(), index)
}

// runs reports whether a device runs our program at its ingress.
func (k *kernel) runs(index int) (bool, error) {
	if k.noTCX {
		return k.runsFilter(index)
	}
	return k.has(k.ingress(), index)
}

// addressTowards returns the address that this machine uses for packets to another.
func addressTowards(to netip.Addr) (netip.Addr, error) {
	routes, err := netlink.RouteGet(to.AsSlice())
	if err != nil || len(routes) == 0 {
		return netip.Addr{}, fmt.Errorf("there is no route to backend %s: %w", to, err)
	}
	own, ok := netip.AddrFromSlice(routes[0].Src)
	if !ok {
		return netip.Addr{}, fmt.Errorf("this gateway has no address towards backend %s", to)
	}
	return own.Unmap(), nil
}
