package dataplane

import (
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

// costs are nanoseconds per run of a BPF program, by its name.
type costs map[string]float64

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
	for name, a := range after {
		if runs := a.count - before[name].count; runs > 0 {
			c[name] = (a.ns - before[name].ns) / runs
		}
	}
	return c, nil
}

// runTime is what a program, or several of one name, took so far.
type runTime struct{ count, ns float64 }

// runTimes asks the kernel about the programs of all of our dataplanes.
func (b *testbed) runTimes() (map[string]runTime, error) {
	times := map[string]runTime{}
	for _, p := range b.planes {
		if err := eachPin(p.cfg.BPFFS, func(path string) error {
			prog, err := ebpf.LoadPinnedProgram(path, nil)
			if err != nil {
				return nil // a map or a link
			}
			defer prog.Close()
			stats, err := prog.Stats()
			if err != nil {
				return fmt.Errorf("ask for program %s: %w", path, err)
			}
			t := times[filepath.Base(path)]
			times[filepath.Base(path)] = runTime{t.count + float64(stats.RunCount), t.ns + float64(stats.Runtime)}
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
	for _, name := range slices.Sorted(maps.Keys(c)) {
		row := metric.Metric{Name: "BPF: " + name + ", a run", Value: c[name], Unit: "ns", Better: metric.Lower}
		switch {
		case strings.HasPrefix(name, "connect"):
			row.Bar = new(500.0)
		case strings.Contains(name, "client"): // the packet path's from_client and to_client
			row.Bar = new(150.0)
		}
		rows = append(rows, row)
	}
	return rows
}
