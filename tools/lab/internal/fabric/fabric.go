// Package fabric is the network that connects the machines of one lab: a bridge in a network namespace of its own, one veth
// pair per machine, and plain routes to every node's pods. It does not change the host's own network namespace.
//
// Test drivers and kubectl run in the fabric's namespace, or dial from it, because every API server, node and pod is reachable
// from there.
package fabric

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/tools/lab/topology"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// netnsDir is the directory of ip-netns(8) for named namespaces.
const netnsDir = "/run/netns"

const (
	bridge = "br0"
	uplink = "eth0"
)

// Fabric is the network of the lab called Lab.
type Fabric struct {
	Lab string
}

// Name returns the name of the fabric's network namespace in ip-netns(8).
func (f Fabric) Name() string { return f.NameOf("fabric") }

// NameOf returns the name of a machine's network namespace.
func (f Fabric) NameOf(machine string) string { return f.prefix() + machine }

// Path returns the file of the fabric's network namespace.
func (f Fabric) Path() string { return filepath.Join(netnsDir, f.Name()) }

// PathOf returns the file of a machine's network namespace.
func (f Fabric) PathOf(machine string) string { return filepath.Join(netnsDir, f.NameOf(machine)) }

// prefix ends in a dot, which lab names cannot contain, so that lab "x" does not match the namespaces of lab "x-y".
func (f Fabric) prefix() string { return "isthmus." + f.Lab + "." }

// Up creates namespaces, links, addresses and routes, and keeps existing ones.
func (f Fabric) Up(ctx context.Context, t topology.Topology) error {
	if err := addNetns(ctx, f.Name()); err != nil {
		return err
	}
	hub, err := open(f.Path())
	if err != nil {
		return err
	}
	defer hub.close()
	if err := hub.makeBridge(); err != nil {
		return fmt.Errorf("bridge of the fabric: %w", err)
	}
	for _, m := range t.Machines() {
		if err := addNetns(ctx, f.NameOf(m.Name)); err != nil {
			return err
		}
		if err := f.connect(hub, m, t.Nodes()); err != nil {
			return fmt.Errorf("network of %s: %w", m.Name, err)
		}
	}
	return hub.routeToPods(t.Nodes(), topology.Machine{IPv4: topology.FabricIPv4.Addr(), IPv6: topology.FabricIPv6.Addr()})
}

// Attach adds the network of one more machine, which has no pods, to a fabric that is up. Its IPv6 address may be the zero Addr.
func (f Fabric) Attach(ctx context.Context, m topology.Machine, t topology.Topology) error {
	hub, err := open(f.Path())
	if err != nil {
		return err
	}
	defer hub.close()
	if err := addNetns(ctx, f.NameOf(m.Name)); err != nil {
		return err
	}
	if err := f.connect(hub, m, t.Nodes()); err != nil {
		return fmt.Errorf("network of %s: %w", m.Name, err)
	}
	return nil
}

// Detach removes the network of a machine. Its processes have to be over.
func (f Fabric) Detach(ctx context.Context, machine string) error {
	return runIP(ctx, "netns", "del", f.NameOf(machine))
}

// Down removes every namespace of the lab, and with them all links.
func (f Fabric) Down(ctx context.Context) error {
	entries, err := os.ReadDir(netnsDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), f.prefix()) {
			errs = append(errs, runIP(ctx, "netns", "del", e.Name()))
		}
	}
	return errors.Join(errs...)
}

// SetLink sets a machine's link to the fabric up or down.
func (f Fabric) SetLink(machine string, up bool) error {
	hub, err := open(f.Path())
	if err != nil {
		return err
	}
	defer hub.close()
	link, err := hub.LinkByName(port(machine))
	if err != nil {
		return fmt.Errorf("link of %s: %w", machine, err)
	}
	if up {
		return hub.LinkSetUp(link)
	}
	return hub.LinkSetDown(link)
}

// LinkUp reports whether a machine's link to the fabric is up.
func (f Fabric) LinkUp(machine string) (bool, error) {
	hub, err := open(f.Path())
	if err != nil {
		return false, err
	}
	defer hub.close()
	link, err := hub.LinkByName(port(machine))
	if err != nil {
		return false, fmt.Errorf("link of %s: %w", machine, err)
	}
	return link.Attrs().Flags&net.FlagUp != 0, nil
}

// DialContext connects from the fabric's namespace. A socket stays in the namespace in which it was created, so the caller can
// use the connection from any thread. Host names are not resolved.
func (f Fabric) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	if _, err := netip.ParseAddrPort(address); err != nil {
		return nil, fmt.Errorf("dial from the fabric: %w", err)
	}
	var conn net.Conn
	err := f.Do(func() (err error) {
		conn, err = new(net.Dialer).DialContext(ctx, network, address)
		return err
	})
	return conn, err
}

// Do runs fn on a thread in the fabric's namespace. Goroutines that fn starts do not run in it.
func (f Fabric) Do(fn func() error) error {
	ns, err := netlab.OpenNamespace(f.Path())
	if err != nil {
		return fmt.Errorf("the lab %q is not up: %w", f.Lab, err)
	}
	return errors.Join(ns.Do(fn), ns.Close())
}

// port is the fabric's end of a machine's veth pair.
func port(machine string) string { return "p-" + machine }

// connect creates a machine's link, addresses and routes.
func (f Fabric) connect(hub *namespace, m topology.Machine, nodes []topology.Node) error {
	own, err := open(f.PathOf(m.Name))
	if err != nil {
		return err
	}
	defer own.close()
	if _, err := own.LinkByName(uplink); err != nil {
		// Both ends are created in their namespaces; neither is ever in the host's.
		veth := &netlink.Veth{
			LinkAttrs:     netlink.LinkAttrs{Name: port(m.Name)},
			PeerName:      uplink,
			PeerNamespace: netlink.NsFd(own.fd),
		}
		if err := hub.LinkAdd(veth); err != nil {
			return fmt.Errorf("add veth: %w", err)
		}
	}
	outer, err := hub.LinkByName(port(m.Name))
	if err != nil {
		return err
	}
	br, err := hub.LinkByName(bridge)
	if err != nil {
		return err
	}
	if err := errors.Join(hub.LinkSetMaster(outer, br), hub.LinkSetUp(outer)); err != nil {
		return err
	}
	if err := own.up("lo"); err != nil {
		return err
	}
	addresses := []netip.Prefix{netip.PrefixFrom(m.IPv4, topology.FabricIPv4.Bits())}
	gateways := []netip.Addr{topology.FabricIPv4.Addr()}
	if m.IPv6.IsValid() {
		addresses = append(addresses, netip.PrefixFrom(m.IPv6, topology.FabricIPv6.Bits()))
		gateways = append(gateways, topology.FabricIPv6.Addr())
	}
	if err := own.address(uplink, addresses...); err != nil {
		return err
	}
	for _, gw := range gateways {
		if err := own.route(netip.PrefixFrom(unspecified(gw), 0), gw); err != nil {
			return err
		}
	}
	return own.routeToPods(nodes, m)
}

func unspecified(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// namespace is a netlink handle in one network namespace.
type namespace struct {
	*netlink.Handle
	fd int
}

func open(path string) (*namespace, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open network namespace %s: %w", path, err)
	}
	h, err := netlink.NewHandleAt(netns.NsHandle(fd))
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("netlink in %s: %w", path, err)
	}
	return &namespace{Handle: h, fd: fd}, nil
}

func (n *namespace) close() {
	n.Close()
	unix.Close(n.fd)
}

func (n *namespace) makeBridge() error {
	if _, err := n.LinkByName(bridge); err != nil {
		if err := n.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: bridge}}); err != nil {
			return err
		}
	}
	if err := n.up("lo"); err != nil {
		return err
	}
	return n.address(bridge, topology.FabricIPv4, topology.FabricIPv6)
}

func (n *namespace) up(name string) error {
	link, err := n.LinkByName(name)
	if err != nil {
		return err
	}
	return n.LinkSetUp(link)
}

func (n *namespace) address(name string, prefixes ...netip.Prefix) error {
	link, err := n.LinkByName(name)
	if err != nil {
		return err
	}
	if err := n.LinkSetUp(link); err != nil {
		return err
	}
	for _, p := range prefixes {
		addr := &netlink.Addr{IPNet: ipNet(p), Flags: unix.IFA_F_NODAD}
		if err := n.AddrReplace(link, addr); err != nil {
			return fmt.Errorf("add address %s to %s: %w", p, name, err)
		}
	}
	return nil
}

func (n *namespace) route(dst netip.Prefix, via netip.Addr) error {
	if err := n.RouteReplace(&netlink.Route{Dst: ipNet(dst), Gw: via.AsSlice()}); err != nil {
		return fmt.Errorf("add route %s via %s: %w", dst, via, err)
	}
	return nil
}

// routeToPods adds routes to the pods of every other node via that node.
func (n *namespace) routeToPods(nodes []topology.Node, self topology.Machine) error {
	for _, node := range nodes {
		if node.Name == self.Name {
			continue
		}
		err := n.route(node.PodIPv4, node.IPv4)
		if self.IPv6.IsValid() {
			err = errors.Join(err, n.route(node.PodIPv6, node.IPv6))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func addNetns(ctx context.Context, name string) error {
	if _, err := os.Stat(filepath.Join(netnsDir, name)); err == nil {
		return nil
	}
	return runIP(ctx, "netns", "add", name)
}

func runIP(ctx context.Context, args ...string) error {
	out, err := exec.CommandContext(ctx, "ip", args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}
