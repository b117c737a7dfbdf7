package ebpf

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
)

// chosen returns the devices of this network namespace that the balancer belongs to, their names by index: those that are
// named, else all that speak Ethernet and have an address that others can reach.
func chosen(names []string) (map[int]string, error) {
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

func (k *kernel) linkPath(index int) string { return filepath.Join(k.links(), strconv.Itoa(index)) }

// attach makes a device run our program, in the place of an older one of ours without a gap.
func (k *kernel) attach(index int) error {
	if k.noTCX {
		return k.attachFilter(index)
	}
	path := k.linkPath(index)
	l, err := link.LoadPinnedLink(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return k.attachNew(index, path)
	}
	if err != nil {
		return fmt.Errorf("open pinned link: %w", err)
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil {
		return fmt.Errorf("ask for link: %w", err)
	}
	if t := info.TCX(); t == nil || int(t.Ifindex) != index {
		// The device it was for is gone, and its number was given anew; or somebody has detached it.
		if err := os.Remove(path); err != nil {
			return fmt.Errorf("remove pin: %w", err)
		}
		return k.attachNew(index, path)
	}
	if err := l.Update(k.prog); err != nil {
		return fmt.Errorf("replace program: %w", err)
	}
	return nil
}

func (k *kernel) attachNew(index int, path string) error {
	l, err := link.AttachTCX(link.TCXOptions{Interface: index, Program: k.prog, Attach: ebpf.AttachTCXIngress, Anchor: link.Head()})
	if err != nil {
		return err
	}
	defer l.Close()
	if err := l.Pin(path); err != nil {
		return fmt.Errorf("pin link: %w", err)
	}
	return nil
}

// detach takes the program off a device.
func (k *kernel) detach(path string) error {
	l, err := link.LoadPinnedLink(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open pinned link: %w", err)
	}
	if err := errors.Join(l.Detach(), l.Close(), os.Remove(path)); err != nil {
		return fmt.Errorf("detach %s: %w", path, err)
	}
	return nil
}

// place puts the program on these devices, and takes it off all others.
func (k *kernel) place(devices map[int]string) error {
	for index, name := range devices {
		if err := k.attach(index); err != nil {
			return fmt.Errorf("attach to device %s: %w", name, err)
		}
	}
	if k.noTCX {
		if err := k.removeFilters(devices); err != nil {
			return err
		}
	}
	pinned, err := os.ReadDir(k.links())
	if err != nil {
		return fmt.Errorf("list pins: %w", err)
	}
	for _, e := range pinned {
		if index, err := strconv.Atoi(e.Name()); err != nil || devices[index] == "" {
			if err := k.detach(filepath.Join(k.links(), e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

// runs reports whether a device runs our program.
func (k *kernel) runs(index int) (bool, error) {
	if k.noTCX {
		return k.runsFilter(index)
	}
	l, err := link.LoadPinnedLink(k.linkPath(index), nil)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("open pinned link: %w", err)
	}
	defer l.Close()
	have, err := l.Info()
	if err != nil {
		return false, fmt.Errorf("ask for link: %w", err)
	}
	id, err := k.programID()
	if err != nil {
		return false, err
	}
	t := have.TCX()
	return t != nil && int(t.Ifindex) == index && have.Program == id, nil
}

// addressTowards returns this machine's own address for packets to another.
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
