package vrrp

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// presentOn returns those of addrs that a device has.
func presentOn(device string, addrs []netip.Addr) ([]netip.Addr, error) {
	link, err := netlink.LinkByName(device)
	if err != nil {
		return nil, fmt.Errorf("find device %s: %w", device, err)
	}
	list, err := netlink.AddrList(link, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("addresses of %s: %w", device, err)
	}
	var have []netip.Addr
	for _, l := range list {
		if a, ok := netip.AddrFromSlice(l.IP); ok && slices.Contains(addrs, a.Unmap()) {
			have = append(have, a.Unmap())
		}
	}
	return have, nil
}

// removeFrom removes addrs from a device. Missing addresses and a missing device are no error.
func removeFrom(device string, addrs []netip.Addr) error {
	have, err := presentOn(device, addrs)
	if missing := (netlink.LinkNotFoundError{}); errors.As(err, &missing) {
		return nil
	}
	if err != nil {
		return err
	}
	link, err := netlink.LinkByName(device)
	if err != nil {
		return fmt.Errorf("find device %s: %w", device, err)
	}
	for _, a := range have {
		addr, err := netlink.ParseAddr(hostPrefix(a).String())
		if err != nil {
			return err
		}
		if err := netlink.AddrDel(link, addr); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
			return fmt.Errorf("remove %s from %s: %w", a, device, err)
		}
	}
	return nil
}

// addressFile lists the addresses that keepalived may have left on devices.
type addressFile string

// read returns the addresses by device; without a file there are none.
func (b addressFile) read() (map[string][]netip.Addr, error) {
	content, err := os.ReadFile(string(b))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the addresses of keepalived: %w", err)
	}
	all := map[string][]netip.Addr{}
	if err := json.Unmarshal(content, &all); err != nil {
		return nil, fmt.Errorf("read %s: %w; remove it, and stale VIPs by hand", string(b), err)
	}
	return all, nil
}

// add adds addresses before keepalived uses them.
func (b addressFile) add(more map[string][]netip.Addr) error {
	all, err := b.read()
	if err != nil {
		return err
	}
	if all == nil {
		all = map[string][]netip.Addr{}
	}
	for device, addrs := range more {
		for _, a := range addrs {
			if !slices.Contains(all[device], a) {
				all[device] = append(all[device], a)
			}
		}
	}
	return b.write(all)
}

func (b addressFile) write(all map[string][]netip.Addr) error {
	content, err := json.Marshal(all)
	if err != nil {
		return err
	}
	return writeFile(string(b), content)
}

// writeFile replaces a file atomically.
func writeFile(path string, content []byte) error {
	if err := os.WriteFile(path+".new", content, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}
