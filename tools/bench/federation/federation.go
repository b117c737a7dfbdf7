// Package federation measures a federation without a broker: how soon a change in one member is in all others, and how
// much memory a supervisor takes that leads all members.
//
// API servers and supervisors are real processes of this machine (see tools/scale/world), and share its processors.
package federation

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/isthmus-net/isthmus/tools/bench/metric"
	"github.com/isthmus-net/isthmus/tools/scale/world"
)

// sizes are how large everything is.
type sizes struct {
	changing world.FederationConfig
	rate     float64       // of changes, a second
	turn     time.Duration // how long changes go on at a stretch
	rest     time.Duration // how long to look at a federation at rest

	small, large world.FederationConfig // of which the memory is measured
}

// promised is what the bars are about. The largest takes 12 GiB of memory.
var promised = sizes{
	changing: world.FederationConfig{Members: 3, Supervisors: 2, Services: 100, Endpoints: 10},
	rate:     20, turn: 20 * time.Second, rest: time.Minute,
	small: world.FederationConfig{Members: 10, Supervisors: 1, Services: 500, Endpoints: 20},
	large: world.FederationConfig{Members: 20, Supervisors: 1, Services: 500, Endpoints: 20},
}

// Run measures for the given number of rounds and returns the rows of the table. Nothing of it outlives the call.
func Run(ctx context.Context, rounds int, progress io.Writer) ([]metric.Metric, error) {
	return run(ctx, promised, rounds, progress)
}

func run(ctx context.Context, s sizes, rounds int, progress io.Writer) (rows []metric.Metric, err error) {
	klog.SetLogger(logr.Discard())
	ctrl.SetLogger(logr.Discard())
	assets, err := world.Assets(ctx, progress)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "isthmus-bench-")
	if err != nil {
		return nil, fmt.Errorf("make folder: %w", err)
	}
	defer os.RemoveAll(dir)
	controller, err := world.BuildController(ctx, dir)
	if err != nil {
		return nil, err
	}
	storage := world.DefaultStorage()
	fmt.Fprintln(progress, world.DescribeStorage(storage))
	var at *world.Federation
	defer func() { err = errors.Join(err, leave(at)) }()
	var of world.FederationConfig
	for _, measure := range []struct {
		cfg world.FederationConfig
		of  func(context.Context, *world.Federation, sizes, int) ([]metric.Metric, error)
	}{{s.changing, changes}, {s.small, memory}, {s.large, memory}} {
		cfg := measure.cfg
		cfg.Assets, cfg.Controller, cfg.Storage, cfg.Progress = assets, controller, storage, progress
		if at == nil || of != cfg {
			left := at
			at = nil
			if err := leave(left); err != nil {
				return nil, err
			}
			if at, err = world.NewFederation(ctx, cfg); err != nil {
				return nil, err
			}
			of = cfg
		}
		more, err := measure.of(ctx, at, s, rounds)
		if err != nil {
			return nil, err
		}
		rows = append(rows, more...)
	}
	small, large := &rows[len(rows)-2], &rows[len(rows)-1]
	large.Bar = new(200.0)
	return append(rows, metric.Metric{
		Name: fmt.Sprintf("the same for each member from %d to %d", s.small.Members, s.large.Members), Unit: "MiB", Better: metric.Lower,
		Value: max(0, large.Value-small.Value) / float64(max(1, s.large.Members-s.small.Members)),
	}), nil
}

// leave ends a federation, if there is one.
func leave(f *world.Federation) error {
	if f == nil {
		return nil
	}
	return f.Close()
}

// changes measures how soon changes are everywhere, and what is written when there are none.
func changes(ctx context.Context, f *world.Federation, s sizes, rounds int) ([]metric.Metric, error) {
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
			p50, p99 = append(p50, ms(p.P50)), append(p99, ms(p.P99))
		}
	}
	writes, err := f.Rest(ctx, s.rest)
	if err != nil {
		return nil, err
	}
	name := fmt.Sprintf("a member's watch event to the EndpointSlices of all %d members, %d services, %g changes/s", s.changing.Members, s.changing.Services, s.rate)
	return []metric.Metric{
		{Name: name + ": p50", Value: metric.Median(p50), Unit: "ms", Bar: new(100.0), Better: metric.Lower},
		{Name: name + ": p99", Value: metric.Median(p99), Unit: "ms", Bar: new(500.0), Better: metric.Lower},
		{
			Name: "writes at rest, to all API servers, Leases apart", Value: writes / s.rest.Minutes(),
			Unit: "1/min", Bar: new(0.0), Better: metric.Lower, Limit: new(0.0),
		},
	}, nil
}

// memory measures what the supervisor has taken at most: while everything was written for the first time, and when it
// finds everything written.
func memory(ctx context.Context, f *world.Federation, _ sizes, _ int) ([]metric.Metric, error) {
	first, err := f.Memory()
	if err != nil {
		return nil, err
	}
	if err := f.Restart(ctx); err != nil {
		return nil, err
	}
	again, err := f.Memory()
	return []metric.Metric{{
		Name:  fmt.Sprintf("RSS of a supervisor that leads %s, at most", f),
		Value: float64(max(first, again)) / (1 << 20), Unit: "MiB", Better: metric.Lower,
	}}, err
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
