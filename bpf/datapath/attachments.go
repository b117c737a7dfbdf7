package datapath

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/datapath/internal/device"
)

// Attachment is one of our programs and the place where the kernel runs it.
type Attachment struct {
	Hook  string // name of the program
	Kind  string // "cgroup", "tcx" or "clsact"
	Where string // the cgroup's path or the device's name; "" when it was removed
	// Program is the kernel's number of the program, as bpftool shows it.
	Program uint32
	// Runs and Time are the number and the total duration of the program's runs in all its places. The kernel counts them
	// only while kernel.bpf_stats_enabled is 1.
	Runs uint64
	Time time.Duration
}

// Attachments returns every attachment of ours on the node, of any version, by kind, place and hook. cgroupRoot is the
// mount of the node's cgroup v2 hierarchy; it serves to print a cgroup's path.
func (r *Reader) Attachments(cgroupRoot string) ([]Attachment, error) {
	devices, err := device.List()
	if err != nil {
		return nil, err
	}
	names, err := list(r.pins.linkPath(""))
	if err != nil {
		return nil, err
	}
	root, rootErr := findCgroup(cgroupRoot)
	var found []Attachment
	for _, name := range names {
		a, err := r.pins.attachment(name, devices)
		if err != nil {
			return nil, err
		}
		if a.cgroup != 0 {
			a.Where = fmt.Sprint("cgroup ", a.cgroup)
			if rootErr == nil && a.cgroup == root.id {
				a.Where = root.path
			}
		}
		found = append(found, a.Attachment)
	}
	for _, d := range devices {
		filters, err := r.pins.filtersOf(d)
		if err != nil {
			return nil, err
		}
		found = append(found, filters...)
	}
	slices.SortFunc(found, func(a, b Attachment) int {
		return cmp.Or(strings.Compare(a.Kind, b.Kind), strings.Compare(a.Where, b.Where), strings.Compare(a.Hook, b.Hook))
	})
	return found, nil
}

// placed is an Attachment whose cgroup is known by its number only.
type placed struct {
	Attachment

	cgroup uint64
}

// attachment reads a pinned link.
func (p pins) attachment(name string, devices []device.Device) (placed, error) {
	l, err := link.LoadPinnedLink(p.linkPath(name), nil)
	if err != nil {
		return placed{}, fmt.Errorf("open pinned link %s: %w", name, err)
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil {
		return placed{}, fmt.Errorf("ask for link %s: %w", name, err)
	}
	a := placed{Attachment: Attachment{Hook: strings.TrimSuffix(name, suffix), Kind: "cgroup", Program: uint32(info.Program)}}
	if cg := info.Cgroup(); cg != nil {
		a.cgroup = cg.CgroupId
	} else if t := info.TCX(); t != nil {
		a.Kind, a.Hook = "tcx", a.Hook[:strings.LastIndexByte(a.Hook, '_')]
		for _, d := range devices {
			if d.Index == int(t.Ifindex) {
				a.Where = d.Name
			}
		}
	}
	return a, p.addStats(&a.Attachment)
}

// filtersOf returns our filters on a device.
func (p pins) filtersOf(d device.Device) ([]Attachment, error) {
	var found []Attachment
	for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
		all, err := filters(d.Index, parent)
		if err != nil {
			return nil, err
		}
		for _, f := range all {
			hook, ours := hookOf(f)
			if !ours {
				continue
			}
			a := Attachment{Hook: hook, Kind: "clsact", Where: d.Name, Program: uint32(f.(*netlink.BpfFilter).Id)}
			if err := p.addStats(&a); err != nil {
				return nil, err
			}
			found = append(found, a)
		}
	}
	return found, nil
}

// addStats sets Runs and Time if the program is pinned: other programs can only be opened by their number, which needs
// SYS_ADMIN.
func (p pins) addStats(a *Attachment) error {
	for _, path := range []string{p.progPath(a.Hook), staged(p.progPath(a.Hook))} {
		prog, err := ebpf.LoadPinnedProgram(path, nil)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("open pinned program %s: %w", a.Hook, err)
		}
		id, idErr := bpf.ProgramID(prog)
		stats, statsErr := prog.Stats()
		if err := errors.Join(idErr, statsErr, prog.Close()); err != nil {
			return fmt.Errorf("ask for program %s: %w", a.Hook, err)
		}
		if uint32(id) == a.Program {
			a.Runs, a.Time = stats.RunCount, stats.Runtime
			return nil
		}
	}
	return nil
}
