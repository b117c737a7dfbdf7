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

// Severity says what comes of a Finding.
type Severity int

// A Warning costs some packets in some cases, a Fault all of a kind.
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

// Finding is something about a node that does not go well with what the dataplane does there.
type Finding struct {
	Name     string // what kind of thing, such as "rp_filter"
	Severity Severity
	Message  string // one sentence: what is so, and what comes of it
	Fix      string // what to do, a command where one does it
}

// Node is what Check looks at.
type Node struct {
	Devices []Device // all
	Served  []Device // those that the packet path is on; none without one
	Ways    []Way    // to backends
	Sysctl  string   // where the settings of the kernel's network stack are, /proc/sys/net but in tests
}

// Check returns what stands in the way of packets to backends and of their replies. Families and directions in which
// there are no backends are not looked at.
func (n Node) Check() ([]Finding, error) {
	found := n.checkRoutes()
	if len(n.Served) == 0 {
		return found, nil // what pods send to pods is the business of the cluster's own network
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
	for _, w := range n.Ways {
		if w.Device == 0 {
			found = append(found, Finding{
				"route", Fault,
				fmt.Sprintf("there is no route to %s, a backend of cluster %s: who is sent to it gets an error", w.To, w.Cluster),
				fmt.Sprintf("route the pod networks of cluster %s on this node", w.Cluster),
			})
		}
	}
	return found
}

// checkForwarding finds settings that keep the kernel from routing translated packets. For IPv4 that of the device
// they come by decides, for IPv6 that for all; see ip-sysctl, forwarding.
func (n Node) checkForwarding() ([]Finding, error) {
	type place struct{ name, file, key string }
	var places []place
	for _, d := range n.Devices {
		if d.Master == 0 && (n.serves(d) || n.leadsOut(d)) && n.uses(netip.Addr.Is4) {
			places = append(places, place{"ip_forward", filepath.Join("ipv4/conf", d.Name, "forwarding"), "net.ipv4.conf." + sysctlName(d) + ".forwarding"})
		}
	}
	if n.uses(netip.Addr.Is4) {
		const file, key = "ipv4/ip_forward", "net.ipv4.ip_forward"
		if on, err := n.setting(file); err != nil {
			return nil, err
		} else if on == "0" { // switching it on switches every device on
			places = []place{{"ip_forward", file, key}}
		}
	}
	if n.uses(netip.Addr.Is6) {
		places = append(places, place{"ipv6_forward", "ipv6/conf/all/forwarding", "net.ipv6.conf.all.forwarding"})
	}
	var found []Finding
	for _, p := range places {
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
	return slices.ContainsFunc(n.Ways, func(w Way) bool { return family(w.To) })
}

func (n Node) serves(d Device) bool {
	return slices.ContainsFunc(n.Served, func(s Device) bool { return s.Index == d.Index })
}

// leadsOut reports whether packets to backends leave the node by a device, or replies may come by it.
func (n Node) leadsOut(d Device) bool {
	if d.Uplink() {
		return true
	}
	local := d.Client() || d.Kind == "bridge" || d.Name == "lo"
	return !local && slices.ContainsFunc(n.Ways, func(w Way) bool { return w.Device == d.Index })
}

// checkReversePath finds devices by which replies may come that the kernel drops, because it would send by another one.
// The filter that holds is the stricter one of a device's own and that for all; see ip-sysctl, rp_filter.
func (n Node) checkReversePath() ([]Finding, error) {
	var out []Device
	for _, d := range n.Devices {
		if n.leadsOut(d) {
			out = append(out, d)
		}
	}
	if len(out) < 2 || !n.uses(netip.Addr.Is4) {
		return nil, nil // one road: what comes by it also goes by it; and IPv6 has no such filter
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
		if max(all, own) == "1" { // they are "", "0", "1" or "2", and the larger one holds
			found = append(found, Finding{
				"rp_filter", Warning,
				fmt.Sprintf("rp_filter is strict on %s and %d devices lead out of the node: a reply that comes by another one than its request left by is dropped", d.Name, len(out)),
				fmt.Sprintf("sysctl -w net.ipv4.conf.%s.rp_filter=2", sysctlName(d)),
			})
		}
	}
	return found, nil
}

// checkMTU finds ways that carry less than clients may send.
func (n Node) checkMTU() []Finding {
	var largest Device
	for _, d := range n.Served {
		if d.Client() && d.MTU > largest.MTU {
			largest = d
		}
	}
	var found []Finding
	for _, w := range n.Ways {
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

// sysctlName is the name of a device in the key of a setting, where dots and slashes change places.
func sysctlName(d Device) string { return strings.ReplaceAll(d.Name, ".", "/") }

// setting returns a setting of the kernel, "" when this kernel or device has none.
func (n Node) setting(file string) (string, error) {
	text, err := os.ReadFile(filepath.Join(n.Sysctl, file))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("read kernel setting: %w", err)
	}
	return strings.TrimSpace(string(text)), nil
}
