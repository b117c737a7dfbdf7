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

	"github.com/isthmus-net/isthmus/tools/bench/dataplane/internal/reference"
	"github.com/isthmus-net/isthmus/tools/bench/metric"
)

// minRuns is the smallest number of runs per round that counts. Fewer mean that the traffic does not pass the program.
const minRuns = 10

// costs are nanoseconds per run of a BPF program, one value per round. Short connections are counted apart, because a large
// share of their packets opens a flow.
type costs struct{ known, short runCosts }

type runCosts map[program][]float64

// program names a BPF program of a dataplane or of a baseline.
type program struct{ plane, name string }

// programCosts runs all kinds of traffic again on the paths with BPF programs, while the kernel measures the run time of
// every program. Measuring itself costs some tens of nanoseconds per run.
func (b *testbed) programCosts(ctx context.Context, rounds int) (c costs, err error) {
	stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		return c, fmt.Errorf("enable run time statistics of BPF programs: %w", err)
	}
	defer func() { err = errors.Join(err, stats.Close()) }()
	empty, bare, err := b.attachEmptyPrograms()
	if err != nil {
		return c, err
	}
	defer func() { err = errors.Join(err, empty.Close()) }()
	others := maps.Clone(b.references.programs)
	maps.Copy(others, empty.programs)
	paths := append(b.withPrograms(), bare)
	short := slices.DeleteFunc(slices.Clone(kinds), func(k kind) bool { return k.name != shortTCP })
	known := slices.DeleteFunc(slices.Clone(kinds), func(k kind) bool { return k.name == shortTCP })
	c = costs{runCosts{}, runCosts{}}
	for round := range rounds {
		if err := b.takeCosts(ctx, known, paths, others, c.known); err != nil {
			return c, err
		}
		if err := b.takeCosts(ctx, short, paths, others, c.short); err != nil {
			return c, err
		}
		fmt.Fprintf(b.progress, "round %d/%d  run times of %d programs\n", round+1, rounds, len(c.short))
	}
	for _, c := range []runCosts{c.known, c.short} {
		maps.DeleteFunc(c, func(_ program, ns []float64) bool { return len(ns) < rounds })
	}
	for p := range others {
		if c.known[p] == nil && c.short[p] == nil {
			return c, fmt.Errorf("program %s of %q was not called", p.name, p.plane)
		}
	}
	return c, nil
}

// takeCosts runs kinds of traffic on paths and appends the cost per run of each program that they passed to c.
func (b *testbed) takeCosts(ctx context.Context, kinds []kind, paths []path, others map[program]*ebpf.Program, c runCosts) error {
	before, err := b.runTimes(others)
	if err != nil {
		return err
	}
	for _, k := range kinds {
		if err := b.takeTurns(k, paths, func(_ int, via path) error {
			_, err := b.runPhase(ctx, k, via)
			return err
		}); err != nil {
			return err
		}
	}
	after, err := b.runTimes(others)
	if err != nil {
		return err
	}
	for p, a := range after {
		if runs := a.count - before[p].count; runs >= minRuns {
			c[p] = append(c[p], (a.ns-before[p].ns)/runs)
		}
	}
	return nil
}

// withPrograms returns the paths with programs of Isthmus or of a reference.
func (b *testbed) withPrograms() []path {
	return slices.DeleteFunc(slices.Clone(b.paths), func(via path) bool {
		return !slices.ContainsFunc(b.planes, func(p plane) bool { return p.name == via.name }) &&
			!slices.Contains([]string{referenceSocket, referenceStorage, referenceSlow, referenceFast, redirected}, via.name)
	})
}

// runTime is the number of runs of a program and their total time.
type runTime struct{ count, ns float64 }

// runTimes reads the statistics of the programs of all dataplanes, and of others.
func (b *testbed) runTimes(others map[program]*ebpf.Program) (map[program]runTime, error) {
	times := map[program]runTime{}
	for name, p := range others {
		stats, err := p.Stats()
		if err != nil {
			return nil, fmt.Errorf("read the statistics of program %s: %w", name.name, err)
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
				return fmt.Errorf("read the statistics of program %s: %w", path, err)
			}
			times[program{p.name, filepath.Base(path)}] = runTime{float64(stats.RunCount), float64(stats.Runtime)}
			return nil
		}); err != nil {
			return nil, err
		}
	}
	return times, nil
}

// referenceOf returns the reference of a program. It is the empty program for one that only passes traffic on.
func referenceOf(p program) (program, bool) {
	socket := p.plane == socketOne || p.plane == socketMany
	switch {
	case socket && p.name == "connect4":
		return program{referenceSocket, p.name}, true
	case socket && p.name == "recvmsg4":
		return program{emptyProgram, p.name}, true
	case p.plane == packetSlow && (p.name == reference.FromClient || p.name == reference.ToClient):
		return program{referenceSlow, p.name}, true
	case p.plane == packetFast && (p.name == reference.FromClient || p.name == reference.FromNetwork):
		return program{referenceFast, p.name}, true
	case p.plane == packetSlow || p.plane == packetFast:
		return program{emptyProgram, "classifier"}, true
	}
	return program{}, false
}

// The bars in nanoseconds were set on a machine whose references took 473 ns for a connect with socket storage, and about
// 90 ns for the translation of a packet. The ratio of bar and reference applies to any machine.
const (
	connectBar, connectReference = 500.0, 473.0
	packetBar, packetReference   = 150.0, 90.0
)

// costRows returns the rows about programs. Packet programs have rows with known flows, which the bars apply to, and rows with
// short connections. Socket programs have the latter only, unless short connections do not call them.
func costRows(c costs) []metric.Metric {
	var rows, ratios []metric.Metric
	for _, p := range c.known.programs() {
		if p.ofSockets() && c.short[p] != nil {
			continue
		}
		row := c.known.row(p, "per run")
		if l, ok := referenceOf(p); ok && !p.ofSockets() {
			row.Bar, row.Why = new(packetBar), slower(c.known.packetFactor(), packetBar)
			if l.plane != emptyProgram {
				ratios = append(ratios, c.known.ratioRow(p, l, new(packetBar/packetReference)))
			}
		}
		rows = append(rows, row)
	}
	for _, p := range c.short.programs() {
		switch {
		case p.plane == socketOne && p.name == "connect4":
			row := c.short.row(p, "per run")
			row.Bar, row.Why = new(connectBar), slower(c.short.connectFactor(), connectBar)
			rows = append(rows, row)
			ratios = append(ratios, c.short.ratioRow(p, program{referenceStorage, p.name}, new(connectBar/connectReference)), c.short.ratioRow(p, program{referenceSocket, p.name}, nil))
		case p.ofSockets():
			rows = append(rows, c.short.row(p, "per run"))
		default:
			rows = append(rows, c.short.row(p, "per run with short connections"))
		}
	}
	return slices.Concat(rows, ratios, []metric.Metric{
		{Name: "BPF, this machine / the machine that set the bars in ns: reference connect4 with socket storage", Value: c.short.connectFactor(), Unit: "ratio", Better: metric.Lower},
		{Name: "BPF, this machine / the machine that set the bars in ns: reference packet translation", Value: c.known.packetFactor(), Unit: "ratio", Better: metric.Lower},
	})
}

// ofSockets reports whether a program runs for socket operations rather than for packets.
func (p program) ofSockets() bool {
	return slices.Contains([]string{socketOne, socketMany, referenceSocket, referenceStorage}, p.plane) || p.plane == emptyProgram && p.name != "classifier"
}

// slower explains a missed bar in nanoseconds on a machine whose references take factor times as long.
func slower(factor, bar float64) string {
	return fmt.Sprintf("the reference takes %.1f times as long here as on the machine that set the bar, so the equivalent bar here is %.0f ns", factor, factor*bar)
}

// connectFactor returns how many times as long the connect reference takes here as on the machine that set the bar.
func (c runCosts) connectFactor() float64 {
	return c.of(program{referenceStorage, "connect4"}) / connectReference
}

// packetFactor returns how many times as long the packet references take here as on the machine that set the bar.
func (c runCosts) packetFactor() float64 {
	return metric.Median([]float64{
		c.of(program{referenceSlow, reference.FromClient}), c.of(program{referenceSlow, reference.ToClient}),
		c.of(program{referenceFast, reference.FromClient}), c.of(program{referenceFast, reference.FromNetwork}),
	}) / packetReference
}

// programs returns all programs, sorted.
func (c runCosts) programs() []program {
	return slices.SortedFunc(maps.Keys(c), func(a, b program) int {
		return cmp.Or(strings.Compare(a.plane, b.plane), strings.Compare(a.name, b.name))
	})
}

// of returns the median cost of a run.
func (c runCosts) of(p program) float64 { return metric.Median(slices.Clone(c[p])) }

// row returns the row of one program; what names the runs that it covers.
func (c runCosts) row(p program, what string) metric.Metric {
	row := metric.Metric{Name: "BPF, " + p.plane + ": " + p.name + ", " + what, Value: c.of(p), Unit: "ns", Better: metric.Lower}
	if l, ok := referenceOf(p); ok && c[l] != nil {
		row.Limit = new(c.of(l))
	}
	return row
}

// ratioRow compares a program with its reference, round by round.
func (c runCosts) ratioRow(p, l program, bar *float64) metric.Metric {
	ratios := make([]float64, len(c[p]))
	for i := range ratios {
		ratios[i] = c[p][i] / c[l][i]
	}
	return metric.Metric{
		Name: "BPF, " + p.plane + ": " + p.name + " / " + l.plane, Value: metric.Median(ratios), Unit: "ratio", Bar: bar,
		Better: metric.Lower, Limit: new(1.0),
	}
}
