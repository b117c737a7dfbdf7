// Package device assigns the node-local DNS addresses to an interface in the node's network namespace: a dummy interface
// named [Name], or the loopback interface if the kernel has no dummy driver.
//
// The addresses are the same on every node and are never routed off it: pods reach the agent of their own node at them,
// whatever its name or address. The addresses stay when the agent stops, like all of the dataplane; [Remove] removes them.
package device

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Name is the name of the dummy interface.
const Name = "isthmus-dns"

// The addresses that every agent answers on by default.
var (
	// IPv4 is link-local (RFC 3927). NodeLocal DNSCache uses 169.254.20.10.
	IPv4 = netip.MustParseAddr("169.254.20.53")
	// IPv6 is a unique local address (RFC 4193) whose 40-bit global ID was drawn at random. A link-local address would need
	// a zone index, which has no meaning in the network namespace of a pod.
	IPv6 = netip.MustParseAddr("fd47:2d53:7698::53")
)

// prefix6 is the prefix of IPv6.
var prefix6 = netip.PrefixFrom(IPv6, 48).Masked()

// Owns reports whether Ensure may assign a: a link-local IPv4 address, or one in the prefix of [IPv6]. The node must already
// have every other address that the agent listens on.
func Owns(a netip.Addr) bool {
	a = a.Unmap()
	return a.Is4() && a.IsLinkLocalUnicast() || prefix6.Contains(a)
}

// Ensure assigns addrs, as /32 and /128. It returns the name of the interface and the assigned addresses: all of addrs, or
// only the IPv4 ones if IPv6 is disabled on the node, which is not an error. A second call changes nothing.
func Ensure(addrs []netip.Addr) (name string, assigned []netip.Addr, err error) {
	link, err := ensureLink()
	if err != nil {
		return "", nil, err
	}
	name = link.Attrs().Name
	var errs []error
	for _, a := range addrs {
		// No duplicate address detection: no other host sees the address, and it is needed at once.
		err := netlink.AddrReplace(link, &netlink.Addr{IPNet: hostNet(a), Flags: unix.IFA_F_NODAD})
		switch {
		case err == nil:
			assigned = append(assigned, a)
		case a.Is6() && ipv6Disabled():
		default:
			errs = append(errs, fmt.Errorf("assign %s to %s: %w", a, name, explain(err)))
		}
	}
	return name, assigned, errors.Join(errs...)
}

// Remove removes the interface, addrs from the loopback interface if Ensure put them there, and the rules of [Untrack].
func Remove(addrs []netip.Addr) error {
	errs := []error{track()}
	if link, err := netlink.LinkByName(Name); err == nil {
		if err := netlink.LinkDel(link); err != nil {
			errs = append(errs, fmt.Errorf("remove interface %s: %w", Name, explain(err)))
		}
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return errors.Join(append(errs, fmt.Errorf("find interface lo: %w", err))...)
	}
	for _, a := range addrs {
		err := netlink.AddrDel(lo, &netlink.Addr{IPNet: hostNet(a)})
		if err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
			errs = append(errs, fmt.Errorf("remove %s from lo: %w", a, explain(err)))
		}
	}
	return errors.Join(errs...)
}

// ensureLink returns the dummy interface, up, or lo if the kernel cannot create one.
func ensureLink() (netlink.Link, error) {
	link, err := netlink.LinkByName(Name)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		err = netlink.LinkAdd(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: Name}})
		switch {
		case errors.Is(err, unix.EOPNOTSUPP):
			link, err = netlink.LinkByName("lo")
		case err == nil || errors.Is(err, unix.EEXIST):
			link, err = netlink.LinkByName(Name)
		default:
			return nil, fmt.Errorf("add interface %s: %w", Name, explain(err))
		}
	}
	if err != nil {
		return nil, fmt.Errorf("find interface %s: %w", Name, err)
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return nil, fmt.Errorf("bring up interface %s: %w", link.Attrs().Name, explain(err))
	}
	return link, nil
}

func hostNet(a netip.Addr) *net.IPNet {
	return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}
}

// ipv6Disabled reports whether IPv6 is disabled in this network namespace.
func ipv6Disabled() bool {
	all, err := os.ReadFile("/proc/sys/net/ipv6/conf/all/disable_ipv6")
	return err != nil || len(all) > 0 && all[0] == '1'
}

// explain adds the fix to an error that the operator can fix.
func explain(err error) error {
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("%w; give the process the capability NET_ADMIN", err)
	}
	return err
}
