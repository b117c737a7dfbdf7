package dataplane

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/tools/bench/metric"
)

// costs are nanoseconds per run of a BPF program.
type costs map[program]float64

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
	before, err := b.runTimes()
	if err != nil {
		return nil, err
	}
	for _, k := range kinds {
		if _, err := b.takeTurns(ctx, k); err != nil {
			return nil, err
		}
	}
	after, err := b.runTimes()
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

// runTime is what a program took so far.
type runTime struct{ count, ns float64 }

// runTimes asks the kernel about the programs of all of our dataplanes.
func (b *testbed) runTimes() (map[program]runTime, error) {
	times := map[program]runTime{}
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
		case p.plane == socketOne && strings.HasPrefix(p.name, "connect"):
			row.Bar = new(500.0)
		case p.plane == packetSlow || p.plane == packetFast:
			row.Bar = new(150.0)
		}
		rows = append(rows, row)
	}
	return rows
}
