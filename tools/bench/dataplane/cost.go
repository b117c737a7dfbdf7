package dataplane

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/tools/bench/metric"
)

// costs are nanoseconds per run of a BPF program.
type costs map[program]float64

// floor is the plane of programs that do nothing: what they cost, the kernel takes to call one and to take its time.
const floor = "empty program"

// program is a BPF program of one of our dataplanes.
type program struct{ plane, name string }

// programCosts runs all kinds of traffic on our roads once more while the kernel takes the time of every
// BPF program, which itself costs some tens of nanoseconds a run.
func (b *testbed) programCosts(ctx context.Context) (c costs, err error) {
	stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		return nil, fmt.Errorf("take the time of BPF programs: %w", err)
	}
	defer func() { err = errors.Join(err, stats.Close()) }()
	empty, undo, err := b.layFloor()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, undo()) }()
	before, err := b.runTimes(empty)
	if err != nil {
		return nil, err
	}
	for _, k := range kinds {
		if _, err := b.takeTurns(ctx, k); err != nil {
			return nil, err
		}
	}
	after, err := b.runTimes(empty)
	if err != nil {
		return nil, err
	}
	c = costs{}
	for p, a := range after {
		if runs := a.count - before[p].count; runs > 0 {
			c[p] = (a.ns - before[p].ns) / runs
		}
	}
	return c, nil
}

// layFloor puts programs that do nothing where the direct road passes, and adds a road for those of a cgroup. The
// returned function takes all of it away.
func (b *testbed) layFloor() (empty map[program]*ebpf.Program, undo func() error, err error) {
	empty = map[program]*ebpf.Program{}
	var open []io.Closer
	roads := b.roads
	undo = func() error {
		b.roads = roads
		var errs []error
		for _, o := range slices.Backward(open) {
			errs = append(errs, o.Close())
		}
		return errors.Join(errs...)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, undo())
		}
	}()
	load := func(name string, kind ebpf.ProgramType, at ebpf.AttachType) (*ebpf.Program, error) {
		const proceed = 1 // of a cgroup's program; to the others it says the same as to go on
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
			Type: kind, AttachType: at, License: "Dual BSD/GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, proceed), asm.Return()},
		})
		if err != nil {
			return nil, fmt.Errorf("load an empty program: %w", err)
		}
		empty[program{floor, name}] = p
		open = append(open, p)
		return p, nil
	}
	cgroup, err := b.newCgroup()
	if err != nil {
		return nil, nil, err
	}
	for name, at := range map[string]ebpf.AttachType{"connect4": ebpf.AttachCGroupInet4Connect, "recvmsg4": ebpf.AttachCGroupUDP4Recvmsg} {
		p, err := load(name, ebpf.CGroupSockAddr, at)
		if err != nil {
			return nil, nil, err
		}
		l, err := link.AttachCgroup(link.CgroupOptions{Path: cgroup.Path, Attach: at, Program: p})
		if err != nil {
			return nil, nil, fmt.Errorf("attach an empty program: %w", err)
		}
		open = append(open, l)
	}
	plain := b.roads[0]
	p, err := load("classifier", ebpf.SchedCLS, ebpf.AttachTCXIngress)
	if err != nil {
		return nil, nil, err
	}
	err = plain.lane.node.Do(func() error {
		device, err := net.InterfaceByName(plain.lane.devices[0])
		if err != nil {
			return err
		}
		l, err := link.AttachTCX(link.TCXOptions{Interface: device.Index, Program: p, Attach: ebpf.AttachTCXIngress})
		if err != nil {
			return fmt.Errorf("attach an empty program: %w", err)
		}
		open = append(open, l)
		return nil
	})
	if err != nil {
		return nil, nil, err
	}
	b.roads = append(slices.Clone(b.roads), road{floor, plain.lane, cgroup, plain.to})
	return empty, undo, nil
}

// runTime is what a program took so far.
type runTime struct{ count, ns float64 }

// runTimes asks the kernel about the programs of all of our dataplanes, and about others.
func (b *testbed) runTimes(others map[program]*ebpf.Program) (map[program]runTime, error) {
	times := map[program]runTime{}
	for name, p := range others {
		stats, err := p.Stats()
		if err != nil {
			return nil, fmt.Errorf("ask for program %s: %w", name.name, err)
		}
		times[name] = runTime{float64(stats.RunCount), float64(stats.Runtime)}
	}
	for _, p := range b.planes {
		if err := eachPin(p.bpffs, func(path string) error {
			prog, err := ebpf.LoadPinnedProgram(path, nil)
			if err != nil {
				return nil // a map or a link
			}
			defer prog.Close()
			stats, err := prog.Stats()
			if err != nil {
				return fmt.Errorf("ask for program %s: %w", path, err)
			}
			times[program{p.name, filepath.Base(path)}] = runTime{float64(stats.RunCount), float64(stats.Runtime)}
			return nil
		}); err != nil {
			return nil, err
		}
	}
	return times, nil
}

// costRows are the rows about programs.
func costRows(c costs) []metric.Metric {
	var rows []metric.Metric
	for _, p := range slices.SortedFunc(maps.Keys(c), func(a, b program) int {
		return cmp.Or(strings.Compare(a.plane, b.plane), strings.Compare(a.name, b.name))
	}) {
		row := metric.Metric{Name: "BPF, " + p.plane + ": " + p.name + ", a run", Value: c[p], Unit: "ns", Better: metric.Lower}
		switch {
		case p.plane == floor:
		case p.plane == packetSlow || p.plane == packetFast:
			row.Limit = new(c[program{floor, "classifier"}])
		case strings.HasPrefix(p.name, "connect"):
			row.Limit = new(c[program{floor, "connect4"}])
		case strings.HasPrefix(p.name, "recvmsg"):
			row.Limit = new(c[program{floor, "recvmsg4"}])
		}
		switch {
		case p.plane == socketOne && strings.HasPrefix(p.name, "connect"):
			row.Bar = new(500.0)
		case p.plane == packetSlow || p.plane == packetFast:
			row.Bar = new(150.0)
		}
		rows = append(rows, row)
	}
	return rows
}
