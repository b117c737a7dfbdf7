// Package controlplane measures the control plane: the propagation time of a change from one member to another, the CPU that
// this costs in a large ClusterSet, the controller's memory and its restart time.
//
// Broker, members and controllers are real processes of this machine (see tools/scale/simulation). Only additional exporting members
// are simulated. All processes share the machine's processors, so absolute figures depend on the machine. Propagation is
// therefore measured alternately with a bare relay, which copies objects from one API server to another and does nothing else.
package controlplane

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/tools/bench/internal/setup"
	"github.com/isthmus-net/isthmus/tools/bench/metric"
	"github.com/isthmus-net/isthmus/tools/scale/simulation"
)

// sizes are the dimensions and durations of a run.
type sizes struct {
	pair     simulation.Config // b exports, a imports
	pairRate float64           // changes per second
	many     simulation.Config // simulated members with the same Services
	manyRate float64
	large    simulation.Config // many Services
	wide     simulation.Config // as many endpoints in few Services

	// quotas bound a hostile member, which floods the broker of wide for a turn.
	quotas v1alpha1.Quotas

	turn time.Duration // the time of changes without a break
	rest time.Duration // the time that a ClusterSet at rest is observed
	// imports is the largest number of imports into an empty member. One takes a minute.
	imports int
}

// promised are the sizes that the bars apply to.
var promised = sizes{
	pair: simulation.Config{Exports: 100, Endpoints: 10, Exporter: true}, pairRate: 20,
	many: simulation.Config{Members: 9, Exports: 1000, Endpoints: 20}, manyRate: 50,
	large: simulation.Config{Members: 10, Exports: 1000, Endpoints: 10, Distinct: true},
	wide:  simulation.Config{Members: 10, Exports: 100, Endpoints: 100, Distinct: true},
	// The hostile member has 100 Services with 10,000 endpoints before the flood.
	quotas: v1alpha1.Quotas{Services: 1000, Slices: 1000, Endpoints: 20_000, MetadataBytes: 8 << 20, StorageBytes: 32 << 20},
	turn:   20 * time.Second, rest: time.Minute, imports: 3,
}

// Run measures for the given number of rounds and returns the rows of the table. Six rounds take half an hour. It stops all
// processes and removes their files before it returns.
func Run(ctx context.Context, rounds int, progress io.Writer) ([]metric.Metric, error) {
	return run(ctx, promised, rounds, progress)
}

func run(ctx context.Context, s sizes, rounds int, progress io.Writer) (rows []metric.Metric, err error) {
	programs, err := setup.New(ctx, progress)
	if err != nil {
		return nil, err
	}
	var current *testbed
	defer func() { err = errors.Join(err, current.close(), programs.Close()) }()
	for _, part := range []struct {
		cfg     simulation.Config
		measure func(context.Context, *testbed, sizes, int) ([]metric.Metric, error)
	}{{s.pair, pair}, {s.many, many}, {s.large, large}, {s.wide, wide}, {s.wide, worst}} {
		cfg := part.cfg
		cfg.Assets, cfg.Controller, cfg.Storage, cfg.Progress = programs.Assets, programs.Controller, programs.Storage, progress
		if current == nil || current.cfg != cfg {
			last := current
			current = nil
			if err := last.close(); err != nil {
				return nil, err
			}
			if current, err = newTestbed(ctx, cfg); err != nil {
				return nil, err
			}
		}
		more, err := part.measure(ctx, current, s, rounds)
		if err != nil {
			return nil, err
		}
		rows = append(rows, more...)
	}
	return rows, nil
}

// testbed is a ClusterSet whose importer has imported everything. Parts of the table with the same configuration share it.
type testbed struct {
	*simulation.ClusterSet
	cfg   simulation.Config
	first simulation.FirstImport
}

// newTestbed starts a ClusterSet and waits until its importer has imported everything.
func newTestbed(ctx context.Context, cfg simulation.Config) (*testbed, error) {
	w, err := simulation.NewClusterSet(ctx, cfg)
	if err != nil {
		return nil, err
	}
	b := &testbed{ClusterSet: w, cfg: cfg}
	if b.first, err = w.FirstImport(ctx); err != nil {
		return nil, errors.Join(err, w.Close())
	}
	return b, nil
}

// close stops the ClusterSet. A nil testbed has none.
func (b *testbed) close() error {
	if b == nil {
		return nil
	}
	return b.Close()
}

// pair measures the propagation from a real exporter to a real importer, alternately with the bare relay.
func pair(ctx context.Context, b *testbed, s sizes, rounds int) ([]metric.Metric, error) {
	churns := []func(context.Context, float64, time.Duration) (simulation.Propagation, error){b.Churn, b.ChurnRelay}
	order := []int{0, 1}
	var all [2][]simulation.Propagation
	for round := range rounds + 1 { // round 0 warms up connections, caches and the relay's first copies
		turn := s.turn
		if round == 0 {
			turn = min(turn, 5*time.Second)
		}
		for _, i := range order {
			p, err := churns[i](ctx, s.pairRate, turn)
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
		{Name: name + ": p50", Value: metric.MedianOf(ours, p50), Unit: "ms", Bar: new(50.0), Better: metric.Lower, Limit: new(metric.MedianOf(relay, p50))},
		{Name: name + ": p99", Value: metric.MedianOf(ours, p99), Unit: "ms", Bar: new(250.0), Better: metric.Lower, Limit: new(metric.MedianOf(relay, p99))},
		{Name: "the same p50 / that of a bare relay", Value: metric.MedianRatio(ours, relay, p50), Unit: "ratio", Better: metric.Lower, Limit: new(1.0)},
		{Name: "the same p99 / that of a bare relay", Value: metric.MedianRatio(ours, relay, p99), Unit: "ratio", Better: metric.Lower, Limit: new(1.0)},
	}, nil
}

// many measures one importer of many members with continuous changes.
func many(ctx context.Context, b *testbed, s sizes, rounds int) ([]metric.Metric, error) {
	var times []simulation.Propagation
	var loads []simulation.Load
	for range rounds {
		var p simulation.Propagation
		load, err := b.Load(ctx, func(ctx context.Context) (err error) {
			p, err = b.Churn(ctx, s.manyRate, s.turn)
			return errors.Join(err, arrived(p))
		})
		if err != nil {
			return nil, err
		}
		times, loads = append(times, p), append(loads, load)
	}
	name := fmt.Sprintf("%d members, %d services x %d endpoints each, %g changes/s: ", s.many.Members, s.many.Exports, s.many.Endpoints, s.manyRate)
	return []metric.Metric{
		{Name: name + "p50", Value: metric.MedianOf(times, p50), Unit: "ms", Better: metric.Lower},
		{Name: name + "p99", Value: metric.MedianOf(times, p99), Unit: "ms", Bar: new(1000.0), Better: metric.Lower},
		{Name: name + "controller", Value: metric.MedianOf(loads, cpu), Unit: "CPU", Better: metric.Lower},
		{Name: name + "broker, etcd included", Value: metric.MedianOf(loads, brokerCPU), Unit: "CPU", Better: metric.Lower},
		{Name: name + "broker to controller", Value: metric.MedianOf(loads, received), Unit: "kB/s", Better: metric.Lower},
		{Name: name + "controller RSS", Value: metric.MedianOf(loads, rss), Unit: "MiB", Better: metric.Lower},
	}, nil
}

// large measures the cost of many Services and endpoints: their first import, the memory at rest, and a restart.
func large(ctx context.Context, b *testbed, s sizes, rounds int) ([]metric.Metric, error) {
	imports, peaks := []simulation.FirstImport{b.first}, []float64{mib(b.first.Load.Peak)}
	for range min(rounds, s.imports) - 1 {
		if err := b.ReplaceImporter(ctx); err != nil {
			return nil, err
		}
		first, err := b.FirstImport(ctx)
		if err != nil {
			return nil, err
		}
		imports, peaks = append(imports, first), append(peaks, mib(first.Load.Peak))
	}
	rest, err := b.Rest(ctx, s.rest)
	if err != nil {
		return nil, err
	}
	var synced, written, held []float64
	for range rounds {
		r, err := b.Restart(ctx)
		if err != nil {
			return nil, err
		}
		synced, written = append(synced, r.Synced.Seconds()), append(written, r.Writes)
		peaks, held = append(peaks, mib(r.Peak)), append(held, mib(r.RSS))
	}
	services, endpoints := s.large.Services(), s.large.RemoteEndpoints()
	minutes := rest.Took.Minutes()
	return []metric.Metric{
		{Name: fmt.Sprintf("controller peak RSS with %d remote endpoints of %d services", endpoints, services), Value: slices.Max(peaks), Unit: "MiB", Bar: new(150.0), Better: metric.Lower},
		{Name: "the same, RSS after a restart", Value: metric.Median(held), Unit: "MiB", Better: metric.Lower},
		{Name: fmt.Sprintf("first import of %d services, until all are usable", services), Value: metric.MedianOf(imports, usable), Unit: "s", Bar: new(60.0), Better: metric.Lower},
		{Name: "the same, until all statuses are written", Value: metric.MedianOf(imports, reported), Unit: "s", Better: metric.Lower},
		{Name: fmt.Sprintf("restart to synced with %d services, nothing to write", services), Value: metric.Median(synced), Unit: "s", Bar: new(10.0), Better: metric.Lower},
		{Name: "writes of a restart, to both API servers", Value: slices.Max(written), Unit: "writes", Better: metric.Lower},
		{
			Name: "writes at rest, to both API servers, Leases excluded", Value: (simulation.Writes(rest.Importer.Requests) + simulation.Writes(rest.Broker.Requests)) / minutes,
			Unit: "1/min", Bar: new(0.0), Better: metric.Lower, Limit: new(0.0),
		},
		{Name: "controller at rest", Value: cpu(rest), Unit: "CPU", Better: metric.Lower},
	}, nil
}

// wide measures the memory of the same number of endpoints in fewer Services.
func wide(ctx context.Context, b *testbed, s sizes, _ int) ([]metric.Metric, error) {
	r, err := b.Restart(ctx)
	if err != nil {
		return nil, err
	}
	name := fmt.Sprintf("controller peak RSS with %d remote endpoints of %d services", s.wide.RemoteEndpoints(), s.wide.Services())
	return []metric.Metric{{Name: name, Value: mib(max(b.first.Load.Peak, r.Peak)), Unit: "MiB", Better: metric.Lower}}, nil
}

// worst measures how much a member that sends its worst costs the broker, without and with the quota controller, and an importer.
func worst(ctx context.Context, b *testbed, s sizes, _ int) ([]metric.Metric, error) {
	if err := b.SetQuotas(ctx, s.quotas); err != nil {
		return nil, err
	}
	free, err := b.Flood(ctx, s.turn, false)
	if err != nil {
		return nil, err
	}
	stop, err := b.StartQuotaController(ctx)
	if err != nil {
		return nil, err
	}
	bounded, err := b.Flood(ctx, s.turn, true)
	if err := errors.Join(err, stop()); err != nil {
		return nil, err
	}
	quota := float64(s.quotas.StorageBytes) / (1 << 20)
	name := fmt.Sprintf("a member sends its worst for %s, storageBytes %g MiB: ", s.turn, quota)
	return []metric.Metric{
		{Name: name + "growth of the broker's etcd without the quota controller", Value: mib(free.Settled), Unit: "MiB", Better: metric.Lower},
		{Name: name + "the same with it, at the end of the flood", Value: mib(bounded.End), Unit: "MiB", Better: metric.Lower},
		{Name: name + "the same, after its deletions", Value: mib(bounded.Settled), Unit: "MiB", Bar: new(2*quota + 4), Better: metric.Lower, Limit: new(2 * quota)},
		{Name: name + "growth of the importer's etcd", Value: mib(max(0, free.Imported, bounded.Imported)), Unit: "MiB", Bar: new(quota), Better: metric.Lower},
		{Name: name + "growth of the importing controller's memory, at its peak", Value: mib(max(0, free.Memory, bounded.Memory)), Unit: "MiB", Bar: new(quota), Better: metric.Lower},
		{Name: name + "objects without the quota controller", Value: float64(free.Objects), Unit: "objects", Better: metric.Lower},
		{Name: name + "objects with it, after its deletions", Value: float64(bounded.Objects), Unit: "objects", Better: metric.Lower},
		{Name: name + "refused creations with it", Value: float64(bounded.Refused), Unit: "requests", Better: metric.Higher},
	}, nil
}

// arrived returns an error if a change never arrived. The times of the others would then mean nothing.
func arrived(p simulation.Propagation) error {
	if p.Missing > 0 {
		return fmt.Errorf("%d of %d changes never arrived", p.Missing, p.Changes)
	}
	return nil
}

// The values of rows.
func p50(p simulation.Propagation) float64 { return metric.Milliseconds(p.P50) }
func p99(p simulation.Propagation) float64 { return metric.Milliseconds(p.P99) }
func mib(bytes int64) float64              { return float64(bytes) / (1 << 20) }
func rss(l simulation.Load) float64        { return mib(l.Peak) }
func cpu(l simulation.Load) float64        { return l.Controller.Seconds() / l.Took.Seconds() }

func usable(f simulation.FirstImport) float64   { return f.Usable.Seconds() }
func reported(f simulation.FirstImport) float64 { return f.Reported.Seconds() }

func brokerCPU(l simulation.Load) float64 {
	return (l.Broker.API + l.Broker.Etcd).Seconds() / l.Took.Seconds()
}
func received(l simulation.Load) float64 { return float64(l.Received) / 1e3 / l.Took.Seconds() }
