// Package federation measures a federation without a broker: the propagation time of a change from one member to all others, and
// the cost of the leading supervisor at several sizes, which shows how that cost grows.
//
// API servers and supervisors are real processes of this machine (see tools/scale/simulation), and share its processors.
package federation

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/tools/bench/internal/setup"
	"github.com/isthmus-net/isthmus/tools/bench/metric"
	"github.com/isthmus-net/isthmus/tools/scale/simulation"
)

// sizes are the dimensions and durations of a run.
type sizes struct {
	changing simulation.FederationConfig
	rate     float64       // changes per second
	turn     time.Duration // the time of changes without a break
	rest     time.Duration // the time that a federation at rest is observed

	growing []simulation.FederationConfig // smallest first; the memory of the largest has a bar
	whole   simulation.FederationConfig   // with all features on; only its memory is measured
}

// promised are the sizes that the bars apply to. The largest needs 12 GiB of memory.
var promised = sizes{
	changing: simulation.FederationConfig{Members: 3, Supervisors: 2, Services: 100, Endpoints: 10},
	rate:     20, turn: 20 * time.Second, rest: time.Minute,
	growing: []simulation.FederationConfig{
		{Members: 5, Supervisors: 1, Services: 500, Endpoints: 20},
		{Members: 10, Supervisors: 1, Services: 500, Endpoints: 20},
		{Members: 20, Supervisors: 1, Services: 500, Endpoints: 20},
	},
	whole: simulation.FederationConfig{Members: 5, Supervisors: 1, Services: 500, Endpoints: 20, ClusterSetIPs: true, Policies: 50},
}

// Run measures for the given number of rounds and returns the rows of the table. It stops all processes and removes their files
// before it returns.
func Run(ctx context.Context, rounds int, progress io.Writer) ([]metric.Metric, error) {
	return run(ctx, promised, rounds, progress)
}

func run(ctx context.Context, s sizes, rounds int, progress io.Writer) (rows []metric.Metric, err error) {
	programs, err := setup.New(ctx, progress)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, programs.Close()) }()
	build := func(cfg simulation.FederationConfig, measure func(*simulation.Federation) error) error {
		cfg.Assets, cfg.Controller, cfg.Storage, cfg.Progress = programs.Assets, programs.Controller, programs.Storage, progress
		f, err := simulation.NewFederation(ctx, cfg)
		if err != nil {
			return err
		}
		return errors.Join(measure(f), f.Close())
	}
	if err := build(s.changing, func(f *simulation.Federation) (err error) {
		rows, err = changes(ctx, f, s, rounds)
		return err
	}); err != nil {
		return nil, err
	}
	var costs []cost
	for _, cfg := range append(slices.Clone(s.growing), s.whole) {
		if err := build(cfg, func(f *simulation.Federation) error {
			c, err := costOf(ctx, f, cfg.Members)
			costs = append(costs, c)
			return err
		}); err != nil {
			return nil, err
		}
	}
	return append(rows, grow(costs[:len(s.growing)], costs[len(s.growing)])...), nil
}

// cost is the cost of a federation.
type cost struct {
	name        string
	members     float64
	mib         float64 // peak RSS of the supervisor
	writes, cpu float64 // per member, until everything is written; cpu is the supervisor's, in seconds
}

// costOf measures a federation. The peak memory covers the first write of everything, and a restart that has nothing to write.
func costOf(ctx context.Context, f *simulation.Federation, members int) (cost, error) {
	first, err := f.Memory()
	if err != nil {
		return cost{}, err
	}
	if err := f.Restart(ctx); err != nil {
		return cost{}, err
	}
	restarted, err := f.Memory()
	total := f.Cost()
	return cost{
		name: f.String(), members: float64(members), mib: float64(max(first, restarted)) / (1 << 20),
		writes: total.Writes / float64(members), cpu: total.CPU.Seconds() / float64(members),
	}, err
}

// grow returns the rows of federations of increasing size, and of one with all features. Each step of size has rows with the
// cost of an additional member: the cost is linear if the steps agree.
func grow(costs []cost, whole cost) (rows []metric.Metric) {
	row := func(name, unit string, value float64) {
		rows = append(rows, metric.Metric{Name: name, Unit: unit, Value: value, Better: metric.Lower})
	}
	memory := func(c cost) { row("peak RSS of the leading supervisor, "+c.name, "MiB", c.mib) }
	for _, c := range costs {
		memory(c)
	}
	rows[len(rows)-1].Bar = new(150.0)
	for _, c := range costs {
		row("writes per member until converged, "+c.name, "writes", c.writes)
		row("supervisor CPU time per member until converged, "+c.name, "s", c.cpu)
	}
	for i, small := range costs[:len(costs)-1] {
		large := costs[i+1]
		more := max(1, large.members-small.members)
		for _, step := range []struct {
			name, unit string
			by         float64
		}{
			{"peak RSS of the supervisor", "MiB", large.mib - small.mib},
			{"writes per member", "writes", large.writes - small.writes},
			{"supervisor CPU time per member", "s", large.cpu - small.cpu},
		} {
			row(fmt.Sprintf("%s, per additional member from %g to %g", step.name, small.members, large.members), step.unit, max(0, step.by)/more)
		}
	}
	memory(whole)
	return rows
}

// changes measures the propagation of changes to all members, and counts the writes at rest.
func changes(ctx context.Context, f *simulation.Federation, s sizes, rounds int) ([]metric.Metric, error) {
	var p50, p99 []float64
	for round := range rounds + 1 { // round 0 warms up
		p, err := f.Churn(ctx, s.rate, s.turn)
		if err != nil {
			return nil, err
		}
		if p.Missing > 0 {
			return nil, fmt.Errorf("%d of %d changes never arrived", p.Missing, p.Changes)
		}
		if round > 0 {
			p50, p99 = append(p50, metric.Milliseconds(p.P50)), append(p99, metric.Milliseconds(p.P99))
		}
	}
	writes, err := f.Rest(ctx, s.rest)
	if err != nil {
		return nil, err
	}
	name := fmt.Sprintf("a member's watch event to the EndpointSlices of all %d members, %d services, %g changes/s", s.changing.Members, s.changing.Services, s.rate)
	return []metric.Metric{
		{Name: name + ": p50", Value: metric.Median(p50), Unit: "ms", Bar: new(40.0), Better: metric.Lower},
		{Name: name + ": p99", Value: metric.Median(p99), Unit: "ms", Bar: new(150.0), Better: metric.Lower},
		{
			Name: "writes at rest, to all API servers, Leases excluded", Value: writes / s.rest.Minutes(),
			Unit: "1/min", Bar: new(0.0), Better: metric.Lower, Limit: new(0.0),
		},
	}, nil
}
