// Package device gives the node-local DNS addresses a home in the node's network namespace: a dummy
// interface of our own, or the loopback interface where the kernel has no dummy driver.
//
// The addresses are the same on every node and leave none of them: pods of a node reach its own agent
// under them, whatever its name or address. They stay when the agent stops, like everything that makes
// traffic flow; [Remove] takes them away.
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

// Name is the interface that carries the addresses, where the kernel has dummy interfaces.
const Name = "isthmus-dns"

// The addresses that every agent answers on, unless it is told otherwise.
var (
	// IPv4 is link-local (RFC 3927), next to the one of NodeLocal DNSCache.
	IPv4 = netip.MustParseAddr("169.254.20.53")
	// IPv6 is a unique local address (RFC 4193, the 40 bits drawn at random once), because a
	// link-local one would need a zone, which no resolv.conf nor CoreDNS can carry to another namespace.
	IPv6 = netip.MustParseAddr("fd47:2d53:7698::53")
)

// prefix6 is what IPv6 was taken from. Nobody else draws it.
var prefix6 = netip.PrefixFrom(IPv6, 48).Masked()

// Owns reports whether a is an address that Ensure may assign: link-local IPv4, or of the prefix of
// [IPv6]. Every other address must stand on the node already.
func Owns(a netip.Addr) bool {
	a = a.Unmap()
	return a.Is4() && a.IsLinkLocalUnicast() || prefix6.Contains(a)
}

// Ensure assigns addrs, as /32 and /128. It returns the interface that carries them and the addresses
// that stand there now: all of addrs, or those of IPv4 alone where the node has IPv6 switched off, which
// is no error. What stands already is left as it is.
func Ensure(addrs []netip.Addr) (name string, assigned []netip.Addr, err error) {
	link, err := ensureLink()
	if err != nil {
		return "", nil, err
	}
	name = link.Attrs().Name
	var errs []error
	for _, a := range addrs {
		// No duplicate address detection: the address is the node's own business, and is needed now.
		err := netlink.AddrReplace(link, &netlink.Addr{IPNet: hostNet(a), Flags: unix.IFA_F_NODAD})
		switch {
		case err == nil:
			assigned = append(assigned, a)
		case a.Is6() && ipv6Off():
		default:
			errs = append(errs, fmt.Errorf("assign %s to %s: %w", a, name, explain(err)))
		}
	}
	return name, assigned, errors.Join(errs...)
}

// Remove takes the interface away, addrs from the loopback interface where they stood there, and what [Untrack] wrote.
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

// ensureLink returns our interface, up, or lo where the kernel cannot make one.
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

// ipv6Off reports whether new interfaces of this network namespace get no IPv6.
func ipv6Off() bool {
	all, err := os.ReadFile("/proc/sys/net/ipv6/conf/all/disable_ipv6")
	return err != nil || len(all) > 0 && all[0] == '1'
}

// explain adds what to do about an error that the operator can mend.
func explain(err error) error {
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("%w; give the process the capability NET_ADMIN", err)
	}
	return err
}
