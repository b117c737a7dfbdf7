package device

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Severity is the consequence of a Finding.
type Severity int

// A Warning loses some packets in some cases, a Fault loses all packets of a kind.
const (
	Warning Severity = iota
	Fault
)

// String returns "warning" or "fault".
func (s Severity) String() string {
	if s == Fault {
		return "fault"
	}
	return "warning"
}

// Finding is a fault of the node's configuration that affects the dataplane.
type Finding struct {
	Name     string // the kind of fault, such as "rp_filter"
	Severity Severity
	Message  string // one sentence: the fault and its consequence
	Fix      string // what to do, as a command if there is one
}

// Node is the input of Check.
type Node struct {
	Devices []Device // all devices
	Served  []Device // the devices of the packet path, none without one
	Routes  []Route  // to backends
	Sysctl  string   // the folder of the kernel's network settings: /proc/sys/net, except in tests
}

// Check returns the faults that affect packets to backends and their replies. It skips families and members without
// backends.
func (n Node) Check() ([]Finding, error) {
	found := n.checkRoutes()
	if len(n.Served) == 0 {
		return found, nil // without a packet path, packets go from pod to pod, which the cluster's own network carries
	}
	forwarding, err := n.checkForwarding()
	if err != nil {
		return nil, err
	}
	reverse, err := n.checkReversePath()
	if err != nil {
		return nil, err
	}
	return slices.Concat(found, forwarding, reverse, n.checkMTU()), nil
}

// checkRoutes finds members whose backends the node cannot reach.
func (n Node) checkRoutes() []Finding {
	var found []Finding
	for _, w := range n.Routes {
		if w.Device == 0 {
			found = append(found, Finding{
				"route", Fault,
				fmt.Sprintf("there is no route to %s, a backend of cluster %s: clients that are sent to it get an error", w.To, w.Cluster),
				fmt.Sprintf("route the pod networks of cluster %s on this node", w.Cluster),
			})
		}
	}
	return found
}

// checkForwarding finds settings that keep the kernel from routing translated packets. For IPv4 the setting of the device
// that they arrive at decides, for IPv6 the global one; see "forwarding" in the kernel's ip-sysctl.
func (n Node) checkForwarding() ([]Finding, error) {
	type sysctl struct{ name, file, key string }
	var sysctls []sysctl
	for _, d := range n.Devices {
		if d.Master == 0 && (n.serves(d) || n.leadsOut(d)) && n.uses(netip.Addr.Is4) {
			sysctls = append(sysctls, sysctl{"ip_forward", filepath.Join("ipv4/conf", d.Name, "forwarding"), "net.ipv4.conf." + sysctlName(d) + ".forwarding"})
		}
	}
	if n.uses(netip.Addr.Is4) {
		const file, key = "ipv4/ip_forward", "net.ipv4.ip_forward"
		if on, err := n.setting(file); err != nil {
			return nil, err
		} else if on == "0" { // enabling it enables every device
			sysctls = []sysctl{{"ip_forward", file, key}}
		}
	}
	if n.uses(netip.Addr.Is6) {
		sysctls = append(sysctls, sysctl{"ipv6_forward", "ipv6/conf/all/forwarding", "net.ipv6.conf.all.forwarding"})
	}
	var found []Finding
	for _, p := range sysctls {
		on, err := n.setting(p.file)
		if err != nil {
			return nil, err
		}
		if on == "0" {
			found = append(found, Finding{
				p.name, Fault, p.key + " is 0: the kernel drops translated packets that it must route", "sysctl -w " + p.key + "=1",
			})
		}
	}
	return found, nil
}

// uses reports whether there are backends of a family.
func (n Node) uses(family func(netip.Addr) bool) bool {
	return slices.ContainsFunc(n.Routes, func(w Route) bool { return family(w.To) })
}

func (n Node) serves(d Device) bool {
	return slices.ContainsFunc(n.Served, func(s Device) bool { return s.Index == d.Index })
}

// leadsOut reports whether packets to backends leave the node through a device, or replies may arrive at it.
func (n Node) leadsOut(d Device) bool {
	if d.Uplink() {
		return true
	}
	local := d.Client() || d.Kind == "bridge" || d.Name == "lo"
	return !local && slices.ContainsFunc(n.Routes, func(w Route) bool { return w.Device == d.Index })
}

// checkReversePath finds devices where the kernel drops replies because their requests left through another device. The
// setting that applies is the stricter of the device's own and the global one; see "rp_filter" in the kernel's ip-sysctl.
func (n Node) checkReversePath() ([]Finding, error) {
	var out []Device
	for _, d := range n.Devices {
		if n.leadsOut(d) {
			out = append(out, d)
		}
	}
	if len(out) < 2 || !n.uses(netip.Addr.Is4) {
		return nil, nil // a single device cannot be asymmetric, and IPv6 has no such filter
	}
	all, err := n.setting("ipv4/conf/all/rp_filter")
	if err != nil {
		return nil, err
	}
	var found []Finding
	for _, d := range out {
		own, err := n.setting(filepath.Join("ipv4/conf", d.Name, "rp_filter"))
		if err != nil {
			return nil, err
		}
		if max(all, own) == "1" { // each is "", "0", "1" or "2", and the larger one applies
			found = append(found, Finding{
				"rp_filter", Warning,
				fmt.Sprintf("rp_filter is strict on %s and %d devices lead out of the node: a reply is dropped if it arrives at another device than its request left through", d.Name, len(out)),
				fmt.Sprintf("sysctl -w net.ipv4.conf.%s.rp_filter=2", sysctlName(d)),
			})
		}
	}
	return found, nil
}

// checkMTU finds routes whose MTU is below that of clients' devices.
func (n Node) checkMTU() []Finding {
	var largest Device
	for _, d := range n.Served {
		if d.Client() && d.MTU > largest.MTU {
			largest = d
		}
	}
	var found []Finding
	for _, w := range n.Routes {
		if w.Device == 0 || w.MTU == 0 || w.MTU >= largest.MTU {
			continue
		}
		by := fmt.Sprint("device ", w.Device)
		if d := find(n.Devices, w.Device); d != nil {
			by = d.Name
		}
		found = append(found, Finding{
			"mtu", Warning,
			fmt.Sprintf("clients have an MTU of up to %d, and %s carries %d bytes to cluster %s (%s): large packets depend on ICMP errors reaching the client",
				largest.MTU, by, w.MTU, w.Cluster, w.To),
			fmt.Sprintf("set the MTU of the pod network to %d in its CNI's configuration", w.MTU),
		})
	}
	return found
}

// sysctlName is the name of a device in the key of a setting, where dots and slashes are swapped.
func sysctlName(d Device) string { return strings.ReplaceAll(d.Name, ".", "/") }

// setting returns a setting of the kernel, "" when the kernel or device does not have it.
func (n Node) setting(file string) (string, error) {
	text, err := os.ReadFile(filepath.Join(n.Sysctl, file))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("read kernel setting: %w", err)
	}
	return strings.TrimSpace(string(text)), nil
}
