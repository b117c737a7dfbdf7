// Package controlplane measures the control plane: how soon a change in one member is in another, what that
// takes of a large ClusterSet, how much memory the controller needs and how soon it is back.
//
// Brokers, members and controllers are real processes of this machine (see tools/scale/simulation); what is
// simulated is only who else exports. All of them share its processors, so an absolute figure is the
// machine's as well. That is why propagation is measured in turns with a bare relay, which does nothing but
// write in one API server what it was told by another: the least that anybody could do.
package controlplane

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/isthmus-net/isthmus/tools/bench/metric"
	"github.com/isthmus-net/isthmus/tools/scale/simulation"
)

// sizes are how large everything is.
type sizes struct {
	pair     simulation.Config // b exports, a imports
	pairRate float64           // of changes, a second
	many     simulation.Config // simulated members with the same Services
	manyRate float64
	large    simulation.Config // many Services
	wide     simulation.Config // as many endpoints in few Services

	turn time.Duration // how long changes go on at a stretch
	rest time.Duration // how long to look at a ClusterSet at rest
	// imports is how often at most an empty member imports everything, which takes a minute.
	imports int
}

// promised is what the bars are about.
var promised = sizes{
	pair: simulation.Config{Exports: 100, Endpoints: 10, Exporter: true}, pairRate: 20,
	many: simulation.Config{Members: 9, Exports: 1000, Endpoints: 20}, manyRate: 50,
	large: simulation.Config{Members: 10, Exports: 1000, Endpoints: 10, Distinct: true},
	wide:  simulation.Config{Members: 10, Exports: 100, Endpoints: 100, Distinct: true},
	turn:  20 * time.Second, rest: time.Minute, imports: 3,
}

// Run measures for the given number of rounds and returns the rows of the table. Six rounds take half an
// hour. Nothing of it outlives the call.
func Run(ctx context.Context, rounds int, progress io.Writer) ([]metric.Metric, error) {
	return run(ctx, promised, rounds, progress)
}

func run(ctx context.Context, s sizes, rounds int, progress io.Writer) (rows []metric.Metric, err error) {
	klog.SetLogger(logr.Discard())
	ctrl.SetLogger(logr.Discard())
	assets, err := simulation.Assets(ctx, progress)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "isthmus-bench-")
	if err != nil {
		return nil, fmt.Errorf("make folder: %w", err)
	}
	defer os.RemoveAll(dir)
	controller, err := simulation.BuildController(ctx, dir)
	if err != nil {
		return nil, err
	}
	storage := simulation.DefaultStorage()
	fmt.Fprintln(progress, simulation.DescribeStorage(storage))
	var at *place
	defer func() { err = errors.Join(err, at.close()) }()
	for _, part := range []struct {
		cfg     simulation.Config
		measure func(context.Context, *place, sizes, int) ([]metric.Metric, error)
	}{{s.pair, pair}, {s.many, many}, {s.large, large}, {s.wide, wide}} {
		cfg := part.cfg
		cfg.Assets, cfg.Controller, cfg.Storage, cfg.Progress = assets, controller, storage, progress
		if at == nil || at.cfg != cfg {
			left := at
			at = nil
			if err := left.close(); err != nil {
				return nil, err
			}
			if at, err = arrive(ctx, cfg); err != nil {
				return nil, err
			}
		}
		more, err := part.measure(ctx, at, s, rounds)
		if err != nil {
			return nil, err
		}
		rows = append(rows, more...)
	}
	return rows, nil
}

// place is a ClusterSet in which everything is imported. Parts of the table with the same configuration share it.
type place struct {
	*simulation.ClusterSet
	cfg   simulation.Config
	first simulation.FirstImport
}

// arrive simulates a ClusterSet and lets its importer import everything.
func arrive(ctx context.Context, cfg simulation.Config) (*place, error) {
	w, err := simulation.NewClusterSet(ctx, cfg)
	if err != nil {
		return nil, err
	}
	p := &place{ClusterSet: w, cfg: cfg}
	if p.first, err = w.FirstImport(ctx); err != nil {
		return nil, errors.Join(err, w.Close())
	}
	return p, nil
}

// close ends the ClusterSet, if there is one.
func (p *place) close() error {
	if p == nil {
		return nil
	}
	return p.Close()
}

// pair measures from a real exporter to a real importer, in turns with the bare relay.
func pair(ctx context.Context, w *place, s sizes, rounds int) ([]metric.Metric, error) {
	paths := []func(context.Context, float64, time.Duration) (simulation.Propagation, error){w.Churn, w.ChurnRelay}
	order := []int{0, 1}
	var all [2][]simulation.Propagation
	for round := range rounds + 1 { // round 0 warms up: connections, caches, the relay's first copies
		turn := s.turn
		if round == 0 {
			turn = min(turn, 5*time.Second)
		}
		for _, i := range order {
			p, err := paths[i](ctx, s.pairRate, turn)
			if err := errors.Join(err, arrived(p)); err != nil {
				return nil, err
			}
			if round > 0 {
				all[i] = append(all[i], p)
			}
		}
		slices.Reverse(order)
	}
	ours, relay := all[0], all[1]
	name := fmt.Sprintf("exporter's watch event to importer's EndpointSlice, %d services, %g changes/s", s.pair.Exports, s.pairRate)
	return []metric.Metric{
		{Name: name + ": p50", Value: over(ours, p50), Unit: "ms", Bar: new(50.0), Better: metric.Lower, Limit: new(over(relay, p50))},
		{Name: name + ": p99", Value: over(ours, p99), Unit: "ms", Bar: new(250.0), Better: metric.Lower, Limit: new(over(relay, p99))},
		{Name: "the same p50 / that of a bare relay", Value: ratio(ours, relay, p50), Unit: "ratio", Better: metric.Lower, Limit: new(1.0)},
		{Name: "the same p99 / that of a bare relay", Value: ratio(ours, relay, p99), Unit: "ratio", Better: metric.Lower, Limit: new(1.0)},
	}, nil
}

// many measures one importer of many members that change all the time.
func many(ctx context.Context, w *place, s sizes, rounds int) ([]metric.Metric, error) {
	var times []simulation.Propagation
	var loads []simulation.Load
	for range rounds {
		var p simulation.Propagation
		load, err := w.Load(ctx, func(ctx context.Context) (err error) {
			p, err = w.Churn(ctx, s.manyRate, s.turn)
			return errors.Join(err, arrived(p))
		})
		if err != nil {
			return nil, err
		}
		times, loads = append(times, p), append(loads, load)
	}
	name := fmt.Sprintf("%d members, %d services x %d endpoints each, %g changes/s: ", s.many.Members, s.many.Exports, s.many.Endpoints, s.manyRate)
	return []metric.Metric{
		{Name: name + "p50", Value: over(times, p50), Unit: "ms", Better: metric.Lower},
		{Name: name + "p99", Value: over(times, p99), Unit: "ms", Bar: new(1000.0), Better: metric.Lower},
		{Name: name + "controller", Value: over(loads, cpu), Unit: "CPU", Better: metric.Lower},
		{Name: name + "broker, etcd included", Value: over(loads, brokerCPU), Unit: "CPU", Better: metric.Lower},
		{Name: name + "broker to controller", Value: over(loads, received), Unit: "kB/s", Better: metric.Lower},
		{Name: name + "controller RSS", Value: over(loads, rss), Unit: "MiB", Better: metric.Lower},
	}, nil
}

// large measures what the number of Services and endpoints costs: to import them, to hold them at rest, and
// to look at them again after a restart.
func large(ctx context.Context, w *place, s sizes, rounds int) ([]metric.Metric, error) {
	imports, peaks := []simulation.FirstImport{w.first}, []float64{mib(w.first.Load.Peak)}
	for range min(rounds, s.imports) - 1 {
		if err := w.ReplaceImporter(ctx); err != nil {
			return nil, err
		}
		first, err := w.FirstImport(ctx)
		if err != nil {
			return nil, err
		}
		imports, peaks = append(imports, first), append(peaks, mib(first.Load.Peak))
	}
	rest, err := w.Rest(ctx, s.rest)
	if err != nil {
		return nil, err
	}
	var synced, written, held []float64
	for range rounds {
		r, err := w.Restart(ctx)
		if err != nil {
			return nil, err
		}
		synced, written = append(synced, r.Synced.Seconds()), append(written, r.Writes)
		peaks, held = append(peaks, mib(r.Peak)), append(held, mib(r.RSS))
	}
	services, endpoints := s.large.Services(), s.large.RemoteEndpoints()
	minutes := rest.Took.Minutes()
	return []metric.Metric{
		{Name: fmt.Sprintf("controller RSS with %d remote endpoints of %d services, at most", endpoints, services), Value: slices.Max(peaks), Unit: "MiB", Bar: new(150.0), Better: metric.Lower},
		{Name: "the same, after a restart", Value: metric.Median(held), Unit: "MiB", Better: metric.Lower},
		{Name: fmt.Sprintf("first import of %d services, until all can be used", services), Value: over(imports, usable), Unit: "s", Bar: new(60.0), Better: metric.Lower},
		{Name: "the same, until all statuses say so", Value: over(imports, reported), Unit: "s", Better: metric.Lower},
		{Name: fmt.Sprintf("restart to synced with %d services, nothing to write", services), Value: metric.Median(synced), Unit: "s", Bar: new(10.0), Better: metric.Lower},
		{Name: "writes of a restart, to both API servers", Value: slices.Max(written), Unit: "writes", Better: metric.Lower},
		{
			Name: "writes at rest, to both API servers, Leases apart", Value: (simulation.Writes(rest.Importer.Requests) + simulation.Writes(rest.Broker.Requests)) / minutes,
			Unit: "1/min", Bar: new(0.0), Better: metric.Lower, Limit: new(0.0),
		},
		{Name: "controller at rest", Value: cpu(rest), Unit: "CPU", Better: metric.Lower},
	}, nil
}

// wide measures the memory of as many endpoints in fewer Services.
func wide(ctx context.Context, w *place, s sizes, _ int) ([]metric.Metric, error) {
	r, err := w.Restart(ctx)
	if err != nil {
		return nil, err
	}
	name := fmt.Sprintf("controller RSS with %d remote endpoints of %d services, at most", s.wide.RemoteEndpoints(), s.wide.Services())
	return []metric.Metric{{Name: name, Value: mib(max(w.first.Load.Peak, r.Peak)), Unit: "MiB", Better: metric.Lower}}, nil
}

// arrived makes it an error that changes never arrived: the times of the others would be worth nothing.
func arrived(p simulation.Propagation) error {
	if p.Missing > 0 {
		return fmt.Errorf("%d of %d changes never arrived", p.Missing, p.Changes)
	}
	return nil
}

// p50, p99 and the functions below take one figure of a measurement for a row.
func p50(p simulation.Propagation) float64 { return ms(p.P50) }
func p99(p simulation.Propagation) float64 { return ms(p.P99) }
func ms(d time.Duration) float64           { return float64(d) / float64(time.Millisecond) }
func mib(bytes int64) float64              { return float64(bytes) / (1 << 20) }
func rss(l simulation.Load) float64        { return mib(l.Peak) }
func cpu(l simulation.Load) float64        { return l.Controller.Seconds() / l.Took.Seconds() }

func usable(f simulation.FirstImport) float64   { return f.Usable.Seconds() }
func reported(f simulation.FirstImport) float64 { return f.Reported.Seconds() }

func brokerCPU(l simulation.Load) float64 {
	return (l.Broker.API + l.Broker.Etcd).Seconds() / l.Took.Seconds()
}
func received(l simulation.Load) float64 { return float64(l.Received) / 1e3 / l.Took.Seconds() }

// over returns the median over the rounds.
func over[T any](rounds []T, of func(T) float64) float64 {
	var values []float64
	for _, r := range rounds {
		values = append(values, of(r))
	}
	return metric.Median(values)
}

// ratio returns the median over the rounds of a/b.
func ratio[T any](a, b []T, of func(T) float64) float64 {
	var values []float64
	for i := range a {
		values = append(values, of(a[i])/of(b[i]))
	}
	return metric.Median(values)
}
