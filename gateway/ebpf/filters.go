package ebpf

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
)

// Kernels before 6.6 have no TCX. There the program is a direct-action filter of the qdisc clsact. It has a name and
// a handle of its own, and a priority before that of an agent on the same machine.
const (
	filterName     = "isthmus_gateway"
	filterHandle   = 0x6157
	filterPriority = 2
)

// qdiscPath is the path that marks a device whose clsact this package added.
func (k *kernel) qdiscPath(index int) string {
	return filepath.Join(k.dir, "qdiscs", strconv.Itoa(index))
}

// attachFilter attaches the program to a device. It replaces an older one without a gap: the kernel exchanges the
// filter with the same handle in one step.
func (k *kernel) attachFilter(index int) error {
	if runs, err := k.runsFilter(index); err != nil || runs {
		return err
	}
	if err := k.makeQdisc(index); err != nil {
		return err
	}
	err := netlink.FilterReplace(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: index, Parent: netlink.HANDLE_MIN_INGRESS, Handle: filterHandle, Priority: filterPriority, Protocol: unix.ETH_P_ALL,
		},
		Fd: k.prog.FD(), Name: filterName, DirectAction: true,
	})
	if err != nil {
		return fmt.Errorf("set filter: %w", err)
	}
	return nil
}

// makeQdisc adds clsact to a device that has none.
func (k *kernel) makeQdisc(index int) error {
	q, err := clsact(index)
	if err != nil || q != nil {
		return err
	}
	mark := k.qdiscPath(index)
	if err := os.MkdirAll(mark, 0o700); err != nil {
		return fmt.Errorf("mark clsact as ours: %w", err)
	}
	err = netlink.QdiscAdd(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: index, Parent: netlink.HANDLE_CLSACT, Handle: netlink.MakeHandle(0xffff, 0),
	}})
	if errors.Is(err, unix.EEXIST) {
		return os.Remove(mark) // another process added it first
	}
	if err != nil {
		return fmt.Errorf("add clsact: %w", errors.Join(err, os.Remove(mark)))
	}
	return nil
}

// clsact returns the clsact qdisc of a device, nil if it has none.
func clsact(index int) (netlink.Qdisc, error) {
	qdiscs, err := netlink.QdiscList(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: index}})
	if err != nil {
		return nil, fmt.Errorf("list qdiscs: %w", err)
	}
	for _, q := range qdiscs {
		if q.Type() == "clsact" && q.Attrs().LinkIndex == index {
			return q, nil
		}
	}
	return nil, nil
}

// filtersOf returns our filter at the ingress of a device, nil if there is none, and the number of other filters on
// both sides.
func filtersOf(index int) (own *netlink.BpfFilter, others int, err error) {
	for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
		all, err := netlink.FilterList(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: index}}, parent)
		if err != nil && !errors.Is(err, unix.EINVAL) { // the device has no clsact
			return nil, 0, fmt.Errorf("list filters: %w", err)
		}
		for _, f := range all {
			if b, ok := f.(*netlink.BpfFilter); ok && b.Name == filterName && b.Handle == filterHandle {
				own = b
			} else {
				others++
			}
		}
	}
	return own, others, nil
}

// runsFilter reports whether a device runs our program as a filter.
func (k *kernel) runsFilter(index int) (bool, error) {
	own, _, err := filtersOf(index)
	if err != nil || own == nil {
		return false, err
	}
	id, err := bpf.ProgramID(k.prog)
	return err == nil && own.Id == int(id), err
}

// removeFilters removes our filters from all devices that are not in keep. It removes clsact too, if we added it and
// no other filter uses it.
func (k *kernel) removeFilters(keep map[int]string) error {
	links, err := netlink.LinkList()
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	there := map[int]bool{}
	var errs []error
	for _, l := range links {
		index := l.Attrs().Index
		there[index] = true
		if keep[index] == "" {
			errs = append(errs, k.removeFilter(index))
		}
	}
	marks, err := os.ReadDir(filepath.Dir(k.qdiscPath(0)))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		errs = append(errs, err)
	}
	for _, m := range marks {
		if index, err := strconv.Atoi(m.Name()); err != nil || !there[index] {
			errs = append(errs, os.Remove(filepath.Join(filepath.Dir(k.qdiscPath(0)), m.Name())))
		}
	}
	return errors.Join(errs...)
}

func (k *kernel) removeFilter(index int) error {
	own, others, err := filtersOf(index)
	if err != nil {
		return err
	}
	if own != nil {
		if err := netlink.FilterDel(own); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("delete filter: %w", err)
		}
	}
	mark := k.qdiscPath(index)
	if _, err := os.Stat(mark); err != nil || others > 0 {
		return nil //nolint:nilerr // nolint:nilerr // another process added it, or uses it
	}
	q, err := clsact(index)
	if err != nil {
		return err
	}
	if q != nil {
		if err := netlink.QdiscDel(q); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("remove clsact: %w", err)
		}
	}
	return os.Remove(mark)
}
