// Package device selects the network devices of a node that the packet path runs on, watches them for changes, and
// checks the node's configuration.
package device

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Device is a network device of this network namespace, reduced to the needed attributes.
type Device struct {
	Index  int
	Name   string
	Kind   string // as `ip -d link` calls it: "veth", "bridge", "tuntap"; "device" for hardware
	MTU    int
	Master int // index of the bridge or bond it is a port of, 0 without one
	// PeerElsewhere is true for the veth of a pod: its other end is in another network namespace.
	PeerElsewhere bool
	// Default is true when a default route uses it.
	Default bool
	// Addressed is true when it has an address that others can reach.
	Addressed bool
	// Bare is true when its packets have no Ethernet header (tun, WireGuard, PPP). The programs cannot read such packets.
	Bare bool
}

// List returns the devices of this network namespace, by index.
func List() ([]Device, error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	defaults, err := defaultRoutes()
	if err != nil {
		return nil, err
	}
	addrs, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	devices := make([]Device, 0, len(links))
	for _, l := range links {
		a := l.Attrs()
		devices = append(devices, Device{
			Index: a.Index, Name: a.Name, Kind: l.Type(), MTU: a.MTU, Master: a.MasterIndex,
			PeerElsewhere: l.Type() == "veth" && a.NetNsID >= 0,
			Default:       defaults[a.Index],
			Bare:          !slices.Contains([]string{"ether", "loopback"}, a.EncapType),
			Addressed: slices.ContainsFunc(addrs, func(addr netlink.Addr) bool {
				return addr.LinkIndex == a.Index && addr.IP.IsGlobalUnicast()
			}),
		})
	}
	slices.SortFunc(devices, func(a, b Device) int { return a.Index - b.Index })
	return devices, nil
}

// defaultRoutes returns the devices of the default routes of the main table.
func defaultRoutes() (map[int]bool, error) {
	found := map[int]bool{}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := netlink.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
		if err != nil {
			return nil, fmt.Errorf("list routes: %w", err)
		}
		for _, r := range routes {
			if !isDefault(r) {
				continue
			}
			if r.LinkIndex != 0 {
				found[r.LinkIndex] = true
			}
			for _, hop := range r.MultiPath {
				found[hop.LinkIndex] = true
			}
		}
	}
	return found, nil
}

// hardware lists the kinds of devices that connect a node to others.
var hardware = []string{"device", "vlan", "bond", "team"}

// Uplink reports whether d connects the node to others.
func (d Device) Uplink() bool { return d.Default || d.Addressed && slices.Contains(hardware, d.Kind) }

// Client reports whether a pod or a virtual machine is at the other end of d.
func (d Device) Client() bool { return d.PeerElsewhere || d.Kind == "tuntap" }

// Validate returns an error if a pattern for device names is invalid.
func Validate(pattern string) error {
	if _, err := path.Match(pattern, ""); err != nil || pattern == "" {
		return fmt.Errorf("device %q is neither a name nor a pattern such as eth*: %w", pattern, path.ErrBadPattern)
	}
	return nil
}

// Select returns the devices whose names match one of the patterns. Without patterns it returns uplinks, veths of pods,
// taps of virtual machines, and bridges that have such ports. The loopback device, where the programs would see every
// packet twice, must be named. Bare devices are never selected.
//
// Patterns have the syntax of path.Match and must be valid.
func Select(devices []Device, patterns []string) []Device {
	return slices.DeleteFunc(fitting(devices, patterns), func(d Device) bool { return d.Bare })
}

// CheckBare returns a Finding for every device that Select leaves out only because it is Bare.
func CheckBare(devices []Device, patterns []string) []Finding {
	var found []Finding
	for _, d := range fitting(devices, patterns) {
		if d.Bare {
			found = append(found, Finding{
				"device", Warning,
				fmt.Sprintf("packets of %s have no Ethernet header: the packet path does not run on it and does not serve clients behind it", d.Name),
				"use an Ethernet device, for instance a tap in place of a tun, or name the other devices with --device",
			})
		}
	}
	return found
}

// fitting is Select with Bare devices.
func fitting(devices []Device, patterns []string) []Device {
	bridged := map[int]bool{}
	for _, d := range devices {
		if d.Client() {
			bridged[d.Master] = true
		}
	}
	var chosen []Device
	for _, d := range devices {
		if len(patterns) == 0 {
			if d.Name != "lo" && (d.Uplink() || d.Client() || d.Kind == "bridge" && bridged[d.Index]) {
				chosen = append(chosen, d)
			}
		} else if slices.ContainsFunc(patterns, func(p string) bool { ok, _ := path.Match(p, d.Name); return ok }) {
			chosen = append(chosen, d)
		}
	}
	return chosen
}

// Watch calls changed after devices, addresses or default routes have changed, until ctx ends; then it returns nil.
// Changes that come together may cause one call. The first call comes once Watch has subscribed to changes, so that none
// is missed.
func Watch(ctx context.Context, changed func()) error {
	done := make(chan struct{})
	defer close(done)
	broken := make(chan error, 2)
	report := func(err error) {
		select {
		case broken <- err:
		default:
		}
	}
	links, routes, addrs := make(chan netlink.LinkUpdate, 64), make(chan netlink.RouteUpdate, 64), make(chan netlink.AddrUpdate, 64)
	err := errors.Join(
		netlink.LinkSubscribeWithOptions(links, done, netlink.LinkSubscribeOptions{ErrorCallback: report}),
		netlink.RouteSubscribeWithOptions(routes, done, netlink.RouteSubscribeOptions{ErrorCallback: report}),
		netlink.AddrSubscribeWithOptions(addrs, done, netlink.AddrSubscribeOptions{ErrorCallback: report}),
	)
	if err != nil {
		return fmt.Errorf("watch devices: %w", err)
	}
	for {
		changed()
		if err := next(ctx, links, routes, addrs, broken); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("watch devices: %w", err)
		}
	}
}

// next waits for a relevant change, and drains the changes that have come with it.
func next(ctx context.Context, links <-chan netlink.LinkUpdate, routes <-chan netlink.RouteUpdate, addrs <-chan netlink.AddrUpdate, broken <-chan error) error {
	for relevant := false; !relevant; {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-broken:
			return err
		case _, ok := <-links:
			if !ok {
				return errClosed
			}
			relevant = true
		case r, ok := <-routes:
			if !ok {
				return errClosed
			}
			relevant = r.Table == unix.RT_TABLE_MAIN && isDefault(r.Route)
		case _, ok := <-addrs:
			if !ok {
				return errClosed
			}
			relevant = true
		}
	}
	for len(links)+len(routes)+len(addrs) > 0 {
		select {
		case <-links:
		case <-routes:
		case <-addrs:
		}
	}
	return nil
}

var errClosed = errors.New("the kernel has closed the connection")

func isDefault(r netlink.Route) bool {
	if r.Dst == nil {
		return true
	}
	ones, _ := r.Dst.Mask.Size()
	return ones == 0
}
