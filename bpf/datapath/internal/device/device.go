// Package device finds the network devices of a node on which the packet path must see packets, follows them as
// they come and go, and checks what the packet path needs of them.
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

// Device is a network device of this network namespace, cut down to what decides.
type Device struct {
	Index  int
	Name   string
	Kind   string // as `ip -d link` calls it: "veth", "bridge", "tuntap"; "device" for hardware
	MTU    int
	Master int // index of the bridge or bond it is a port of, 0 without one
	// PeerElsewhere is true for a veth whose other end is in another network namespace: a pod's.
	PeerElsewhere bool
	// Default is true when a default route leaves by it.
	Default bool
	// Addressed is true when it has an address that others can reach.
	Addressed bool
	// Bare is true when its packets do not begin with an Ethernet header: tun, WireGuard, PPP. The programs read none.
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

// defaultRoutes returns the devices by which default routes of the main table leave.
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

// hardware are the kinds of devices by which a node is connected to others.
var hardware = []string{"device", "vlan", "bond", "team"}

// Uplink reports whether d connects the node to others.
func (d Device) Uplink() bool { return d.Default || d.Addressed && slices.Contains(hardware, d.Kind) }

// Client reports whether a pod or a virtual machine is at the other end of d.
func (d Device) Client() bool { return d.PeerElsewhere || d.Kind == "tuntap" }

// Validate returns what is wrong with a pattern for names of devices, nil if nothing is.
func Validate(pattern string) error {
	if _, err := path.Match(pattern, ""); err != nil || pattern == "" {
		return fmt.Errorf("device %q is neither a name nor a pattern such as eth*: %w", pattern, path.ErrBadPattern)
	}
	return nil
}

// Select returns those of devices whose names match one of patterns. Without patterns it returns the uplinks, the
// veths of pods, the taps of virtual machines, and the bridges that have such ports. The loopback device, where
// every packet would be seen twice, only comes when it is named, and one that is Bare never.
//
// Patterns are those of path.Match and must be valid.
func Select(devices []Device, patterns []string) []Device {
	return slices.DeleteFunc(fitting(devices, patterns), func(d Device) bool { return d.Bare })
}

// CheckBare returns a Finding for every device that Select leaves out for being Bare alone.
func CheckBare(devices []Device, patterns []string) []Finding {
	var found []Finding
	for _, d := range fitting(devices, patterns) {
		if d.Bare {
			found = append(found, Finding{
				"device", Warning,
				fmt.Sprintf("packets of %s have no Ethernet header: the packet path is not on it, and does not serve clients behind it", d.Name),
				"use a device with Ethernet, a tap in place of a tun for instance; or name the others with --device",
			})
		}
	}
	return found
}

// fitting is Select, those that are Bare included.
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

// Watch calls changed after devices or default routes have changed, until ctx ends: then it returns nil. Changes
// that come together may be told as one. It calls changed once at the beginning, when no change can be
// missed any more.
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
		return fmt.Errorf("follow devices: %w", err)
	}
	for {
		changed()
		if err := next(ctx, links, routes, addrs, broken); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("follow devices: %w", err)
		}
	}
}

// next waits for something that matters, and takes everything that has come with it.
func next(ctx context.Context, links <-chan netlink.LinkUpdate, routes <-chan netlink.RouteUpdate, addrs <-chan netlink.AddrUpdate, broken <-chan error) error {
	for matters := false; !matters; {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-broken:
			return err
		case _, ok := <-links:
			if !ok {
				return errClosed
			}
			matters = true
		case r, ok := <-routes:
			if !ok {
				return errClosed
			}
			matters = r.Table == unix.RT_TABLE_MAIN && isDefault(r.Route)
		case _, ok := <-addrs:
			if !ok {
				return errClosed
			}
			matters = true
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
