package datapath

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/datapath/internal/device"
)

// Kernels before 6.6 have no TCX: there a program is a filter of the qdisc clsact that returns its own actions
// ("direct action"). Our filters have a name prefix and a handle that no other program uses, and are found again by them.
const (
	filterPrefix = "isthmus_"
	filterHandle = 0x1517
	// Filters run in the order of their priority. 0 lets the kernel choose, downwards from 49152.
	filterFirst = 3
	filterLast  = 0xF517
)

// parent is the side of clsact that a hook belongs to.
func (h packetHook) parent() uint32 {
	if h.ingress {
		return netlink.HANDLE_MIN_INGRESS
	}
	return netlink.HANDLE_MIN_EGRESS
}

// attachFilter attaches our program to a device. It replaces an older one of ours without a gap: the kernel exchanges
// the filter of one handle in one step.
func (p *packets) attachFilter(d device.Device, h packetHook) error {
	if err := p.makeQdisc(d); err != nil {
		return err
	}
	priority := uint16(filterLast)
	if p.order.first(h.ingress) {
		priority = filterFirst
	}
	have, err := findFilter(d, h)
	if err != nil {
		return err
	}
	id, err := bpf.ProgramID(p.progs[h.name])
	if err != nil {
		return err
	}
	if have != nil && have.Priority == priority && have.Id == int(id) {
		return nil
	}
	err = netlink.FilterReplace(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: d.Index, Parent: h.parent(), Handle: filterHandle, Priority: priority, Protocol: unix.ETH_P_ALL,
		},
		Fd: p.progs[h.name].FD(), Name: filterPrefix + h.name, DirectAction: true,
	})
	if err != nil {
		return fmt.Errorf("set filter: %w", err)
	}
	if have != nil && have.Priority != priority {
		return deleteFilter(have) // it has the position of another Order
	}
	return nil
}

// makeQdisc adds clsact to a device, unless the device already has it.
func (p *packets) makeQdisc(d device.Device) error {
	_, has, err := clsact(d.Index)
	if err != nil || has {
		return err
	}
	mark := p.pins.qdiscPath(d.Index)
	if err := os.MkdirAll(mark, 0o700); err != nil {
		return fmt.Errorf("mark clsact as ours: %w", err)
	}
	err = netlink.QdiscAdd(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: d.Index, Parent: netlink.HANDLE_CLSACT, Handle: netlink.MakeHandle(0xffff, 0),
	}})
	if errors.Is(err, unix.EEXIST) {
		return os.Remove(mark) // another process has added it meanwhile
	}
	if err != nil {
		return fmt.Errorf("add clsact: %w", errors.Join(err, os.Remove(mark)))
	}
	return nil
}

// clsact returns the clsact qdisc of a device, and false if it has none.
func clsact(index int) (netlink.Qdisc, bool, error) {
	qdiscs, err := netlink.QdiscList(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: index}})
	if err != nil {
		return nil, false, fmt.Errorf("list qdiscs: %w", err)
	}
	for _, q := range qdiscs {
		if q.Type() == "clsact" && q.Attrs().LinkIndex == index {
			return q, true, nil
		}
	}
	return nil, false, nil
}

// filters returns the filters of one side of a device.
func filters(index int, parent uint32) ([]netlink.Filter, error) {
	found, err := netlink.FilterList(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: index}}, parent)
	if err != nil && !errors.Is(err, unix.EINVAL) { // EINVAL: the device has no clsact
		return nil, fmt.Errorf("list filters: %w", err)
	}
	return found, nil
}

// findFilter returns our filter for a hook, nil when there is none.
func findFilter(d device.Device, h packetHook) (*netlink.BpfFilter, error) {
	found, err := filters(d.Index, h.parent())
	if err != nil {
		return nil, err
	}
	for _, f := range found {
		if b, ok := f.(*netlink.BpfFilter); ok && b.Name == filterPrefix+h.name && b.Handle == filterHandle {
			return b, nil
		}
	}
	return nil, nil
}

// removeFilters removes our filters of any version from a device, except those of hooks to keep. It also removes clsact
// if we added it and no other filter uses it.
func removeFilters(p pins, d device.Device, keep func(hook string) bool) error {
	var errs []error
	others := 0
	for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
		found, err := filters(d.Index, parent)
		errs = append(errs, err)
		for _, f := range found {
			if hook, ours := hookOf(f); ours && !keep(hook) {
				errs = append(errs, deleteFilter(f))
			} else {
				others++
			}
		}
	}
	mark := p.qdiscPath(d.Index)
	if _, err := os.Stat(mark); err != nil || others > 0 || errors.Join(errs...) != nil {
		return errors.Join(errs...)
	}
	if q, has, err := clsact(d.Index); err != nil {
		return err
	} else if has {
		if err := netlink.QdiscDel(q); err != nil && !vanished(err) && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("remove clsact from %s: %w", d.Name, err)
		}
	}
	return removePin(mark)
}

// removeAllFilters removes our filters from every device.
func removeAllFilters(p pins) error {
	devices, err := device.List()
	if err != nil {
		return err
	}
	var errs []error
	for _, d := range devices {
		errs = append(errs, removeFilters(p, d, func(string) bool { return false }))
	}
	return errors.Join(append(errs, forgetQdiscs(p, devices))...)
}

// hookOf returns the hook of a filter, if the filter is ours.
func hookOf(f netlink.Filter) (hook string, ours bool) {
	b, ok := f.(*netlink.BpfFilter)
	if !ok || b.Handle != filterHandle {
		return "", false
	}
	return strings.CutPrefix(b.Name, filterPrefix)
}

func deleteFilter(f netlink.Filter) error {
	if err := netlink.FilterDel(f); err != nil && !vanished(err) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("delete filter: %w", err)
	}
	return nil
}

// qdiscPath is the folder that marks a device whose clsact we added.
func (p pins) qdiscPath(index int) string { return p.qdiscs() + "/" + strconv.Itoa(index) }

// forgetQdiscs removes the marks of removed devices.
func forgetQdiscs(p pins, devices []device.Device) error {
	names, err := list(p.qdiscs())
	errs := []error{err}
	for _, name := range names {
		removed := true
		for _, d := range devices {
			removed = removed && name != strconv.Itoa(d.Index)
		}
		if removed {
			errs = append(errs, removePin(p.qdiscs()+"/"+name))
		}
	}
	return errors.Join(errs...)
}
