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

// seldom is how many runs in a round are too few to say anything: of a program that the traffic does not meet.
const seldom = 10

// costs are nanoseconds per run of a BPF program, in each round: with all traffic but short connections, and with those,
// of whose packets a part begins a flow.
type costs struct{ known, short runCosts }

type runCosts map[program][]float64

// program is a BPF program of one of our dataplanes, or of what they are held against.
type program struct{ plane, name string }

// programCosts runs all kinds of traffic on our paths once more, round by round, while the kernel takes the time of
// every BPF program, which itself costs some tens of nanoseconds a run.
func (b *testbed) programCosts(ctx context.Context, rounds int) (c costs, err error) {
	stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		return c, fmt.Errorf("take the time of BPF programs: %w", err)
	}
	defer func() { err = errors.Join(err, stats.Close()) }()
	empty, bare, err := b.layFloor()
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
			return c, fmt.Errorf("program %s of the %s was not called", p.name, p.plane)
		}
	}
	return c, nil
}

// takeCosts adds what a run took of each program that kinds of traffic on paths met.
func (b *testbed) takeCosts(ctx context.Context, kinds []kind, paths []path, others map[program]*ebpf.Program, c runCosts) error {
	before, err := b.runTimes(others)
	if err != nil {
		return err
	}
	for _, k := range kinds {
		if err := b.takeTurns(k, paths, func(_ int, r path) error {
			_, err := b.travel(ctx, k, r)
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
		if runs := a.count - before[p].count; runs >= seldom {
			c[p] = append(c[p], (a.ns-before[p].ns)/runs)
		}
	}
	return nil
}

// withPrograms are the paths with programs of ours or of a reference.
func (b *testbed) withPrograms() []path {
	return slices.DeleteFunc(slices.Clone(b.paths), func(r path) bool {
		return !slices.ContainsFunc(b.planes, func(p plane) bool { return p.name == r.name }) &&
			!slices.Contains([]string{leastSocket, leastStorage, leastSlow, leastFast, redirected}, r.name)
	})
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

// least names the reference of a program of ours, or the empty program where ours leaves alone what it meets.
func least(p program) (program, bool) {
	socket := p.plane == socketOne || p.plane == socketMany
	switch {
	case socket && p.name == "connect4":
		return program{leastSocket, p.name}, true
	case socket && p.name == "recvmsg4":
		return program{floor, p.name}, true
	case p.plane == packetSlow && (p.name == reference.FromClient || p.name == reference.ToClient):
		return program{leastSlow, p.name}, true
	case p.plane == packetFast && (p.name == reference.FromClient || p.name == reference.FromNetwork):
		return program{leastFast, p.name}, true
	case p.plane == packetSlow || p.plane == packetFast:
		return program{floor, "classifier"}, true
	}
	return program{}, false
}

// The bars in nanoseconds were set on a machine on which a connect that remembers its VIP with the socket took 473 at
// least, and translating a packet about 90. What they allow over that holds on any machine.
const (
	connectBar, connectLeast = 500.0, 473.0
	packetBar, packetLeast   = 150.0, 90.0
)

// costRows are the rows about programs: of packets those of known flows, which the bars are about, and then those of
// short connections; of sockets only these, where they call the program at all.
func costRows(c costs) []metric.Metric {
	var rows, ratios []metric.Metric
	for _, p := range c.known.programs() {
		if p.ofSockets() && c.short[p] != nil {
			continue
		}
		row := c.known.row(p, "a run")
		if l, ok := least(p); ok && !p.ofSockets() {
			row.Bar, row.Why = new(packetBar), slower(c.known.packetFactor(), packetBar)
			if l.plane != floor {
				ratios = append(ratios, c.known.ratioRow(p, l, new(packetBar/packetLeast)))
			}
		}
		rows = append(rows, row)
	}
	for _, p := range c.short.programs() {
		switch {
		case p.plane == socketOne && p.name == "connect4":
			row := c.short.row(p, "a run")
			row.Bar, row.Why = new(connectBar), slower(c.short.connectFactor(), connectBar)
			rows = append(rows, row)
			ratios = append(ratios, c.short.ratioRow(p, program{leastStorage, p.name}, new(connectBar/connectLeast)), c.short.ratioRow(p, program{leastSocket, p.name}, nil))
		case p.ofSockets():
			rows = append(rows, c.short.row(p, "a run"))
		default:
			rows = append(rows, c.short.row(p, "a run with short connections"))
		}
	}
	return slices.Concat(rows, ratios, []metric.Metric{
		{Name: "BPF, this machine / that of the bars in ns: the least of connect4 with socket storage", Value: c.short.connectFactor(), Unit: "ratio", Better: metric.Lower},
		{Name: "BPF, this machine / that of the bars in ns: the least of a packet", Value: c.known.packetFactor(), Unit: "ratio", Better: metric.Lower},
	})
}

// ofSockets reports whether a program is called for operations of sockets, and not for packets.
func (p program) ofSockets() bool {
	return slices.Contains([]string{socketOne, socketMany, leastSocket, leastStorage}, p.plane) || p.plane == floor && p.name != "classifier"
}

// slower says what a bar in nanoseconds comes to on this machine, which takes factor times as long as that of the bar.
func slower(factor, bar float64) string {
	return fmt.Sprintf("for the least that can be done this machine takes %.1f times as long as that of the bar, so %.0f ns are its like here", factor, factor*bar)
}

// connectFactor is how much slower this machine is than the one that connect's bar was set on.
func (c runCosts) connectFactor() float64 {
	return c.of(program{leastStorage, "connect4"}) / connectLeast
}

// packetFactor is how much slower this machine is than the one that packets' bar was set on.
func (c runCosts) packetFactor() float64 {
	return metric.Median([]float64{
		c.of(program{leastSlow, reference.FromClient}), c.of(program{leastSlow, reference.ToClient}),
		c.of(program{leastFast, reference.FromClient}), c.of(program{leastFast, reference.FromNetwork}),
	}) / packetLeast
}

// programs returns all programs, sorted.
func (c runCosts) programs() []program {
	return slices.SortedFunc(maps.Keys(c), func(a, b program) int {
		return cmp.Or(strings.Compare(a.plane, b.plane), strings.Compare(a.name, b.name))
	})
}

// of is what a run takes.
func (c runCosts) of(p program) float64 { return metric.Median(slices.Clone(c[p])) }

// row is about one program; what says which runs are meant.
func (c runCosts) row(p program, what string) metric.Metric {
	row := metric.Metric{Name: "BPF, " + p.plane + ": " + p.name + ", " + what, Value: c.of(p), Unit: "ns", Better: metric.Lower}
	if l, ok := least(p); ok && c[l] != nil {
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
