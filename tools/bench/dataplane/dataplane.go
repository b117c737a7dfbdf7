// Package dataplane measures what a VIP costs: the same traffic straight to a backend, by the ways of Isthmus
// and by those of others, from a client through two routers to a backend, all in network namespaces of this
// process.
//
// How it measures decides whether the numbers mean anything. Client and server are two threads on one
// CPU, since waking another CPU costs more than what is measured; so the time of an operation is the whole
// cost of its path. All roads take turns within a round, there and back, and a row is the median of the
// rounds' ratios: what else the machine does falls on all of them. Every road but those by which a socket
// itself finds the backend has a client and a first router of its own, alike but for what translates there: what one peer
// loads into a kernel's hooks, such as connection tracking, costs no other.
package dataplane

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/tools/bench/dataplane/internal/services"
	"github.com/isthmus-net/isthmus/tools/bench/metric"
)

// sizes are how large and how long everything is.
type sizes struct {
	one, many services.Set
	// phase is how long one kind of traffic runs on one road at a stretch.
	phase time.Duration
	// turns is how often the roads take turns within a round, there and back: A B C, C B A. Short and many,
	// because what else the machine does comes and goes within a second. It only ever adds to what a phase takes, so
	// the lower quartile of a road's phases counts.
	turns int
}

// promised is what the bars are about.
var promised = sizes{
	one: services.Set{Services: 1, Endpoints: 10}, many: services.Set{Services: 10_000, Endpoints: 10},
	phase: 25 * time.Millisecond, turns: 24,
}

// Run measures for the given number of rounds and returns the rows of the table. It needs root. Nothing
// of it outlives the call: cgroups, BPF filesystems and namespaces are its own. Before the first round it
// takes some minutes, which are kube-proxy's.
func Run(ctx context.Context, rounds int, progress io.Writer) (rows []metric.Metric, err error) {
	return run(ctx, promised, rounds, progress)
}

func run(ctx context.Context, s sizes, rounds int, progress io.Writer) (rows []metric.Metric, err error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("measuring needs root: it makes network namespaces and loads BPF programs")
	}
	b, err := newTestbed(ctx, s, progress)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	all, err := b.measure(ctx, rounds)
	if err != nil {
		return nil, err
	}
	costs, err := b.programCosts(ctx, rounds)
	if err != nil {
		return nil, err
	}
	return slices.Concat(trafficRows(all), costRows(costs), b.sizeRows()), nil
}

// sample is what one round gave on one road, per operation.
type sample struct {
	cpu  time.Duration // of client and server together
	p50  time.Duration // of the round trip
	mean time.Duration // of the time between two operations' ends
	ops  int
}

// tally is what one or more phases took.
type tally struct {
	cpu   []time.Duration // of client and server together for an operation, in each phase
	mean  []time.Duration // of the time between two operations' ends, in each phase
	trips []time.Duration // of each operation
}

// newTally is what one phase took, in which there must have been an operation.
func newTally(cpu time.Duration, trips []time.Duration) tally {
	var sum time.Duration
	for _, d := range trips {
		sum += d
	}
	n := time.Duration(len(trips))
	return tally{cpu: []time.Duration{cpu / n}, mean: []time.Duration{sum / n}, trips: trips}
}

func (t *tally) add(o tally) {
	t.cpu = append(t.cpu, o.cpu...)
	t.mean = append(t.mean, o.mean...)
	t.trips = append(t.trips, o.trips...)
}

// sample reduces t, which must hold a phase, and sorts what it holds.
func (t *tally) sample() sample {
	return sample{cpu: quantile(t.cpu, 1, 4), p50: quantile(t.trips, 1, 2), mean: quantile(t.mean, 1, 4), ops: len(t.trips)}
}

// quantile returns the value below which a/b of all values are. It sorts them.
func quantile(values []time.Duration, a, b int) time.Duration {
	slices.Sort(values)
	return values[len(values)*a/b]
}

// samples are indexed by kind of traffic, road and round.
type samples map[string]map[string][]sample

// measure runs all kinds of traffic on all roads, round by round.
func (b *testbed) measure(ctx context.Context, rounds int) (samples, error) {
	// One thread for each of two blocking loops, with a spare one so that the runtime leaves these two
	// alone; and no garbage collection in between.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(max(4, runtime.NumCPU())))
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	all := samples{}
	for round := range rounds + 1 { // round 0 warms up: neighbours, routes, sockets' memory
		for _, k := range kinds {
			tallies, err := b.takeTurns(ctx, k, b.roads)
			if err != nil {
				return nil, err
			}
			if round == 0 {
				continue
			}
			if all[k.name] == nil {
				all[k.name] = map[string][]sample{}
			}
			for _, r := range b.roads {
				if !k.goes(r) {
					continue
				}
				s := tallies[r.name].sample()
				all[k.name][r.name] = append(all[k.name][r.name], s)
				fmt.Fprintf(b.progress, "round %d/%d  %-24s %-20s %6d ops  cpu %8s  p50 %8s\n", round, rounds, k.name, r.name, s.ops, s.cpu, s.p50)
			}
		}
		runtime.GC()
	}
	return all, nil
}

// takeTurns runs one kind of traffic on those of roads where it goes, in short turns. The result is indexed by road.
func (b *testbed) takeTurns(ctx context.Context, k kind, roads []road) (map[string]*tally, error) {
	tallies := map[string]*tally{}
	order := slices.DeleteFunc(slices.Clone(roads), func(r road) bool { return !k.goes(r) })
	for range b.turns {
		for _, r := range order {
			t, err := b.travel(ctx, k, r)
			if err != nil {
				return nil, fmt.Errorf("%s on the road %s: %w", k.name, r.name, err)
			}
			if tallies[r.name] == nil {
				tallies[r.name] = &tally{}
			}
			tallies[r.name].add(t)
		}
		slices.Reverse(order)
	}
	return tallies, nil
}

// travel is one phase: its sockets belong to the cgroup of the road, or else to none that a program looks at.
func (b *testbed) travel(ctx context.Context, k kind, r road) (t tally, err error) {
	if r.cgroup != nil {
		if err := r.cgroup.Enter(); err != nil {
			return tally{}, err
		}
		defer func() { err = errors.Join(err, r.cgroup.Leave()) }()
	}
	err = r.lane.client.Do(func() error {
		t, err = k.run(ctx, r.to, b.phase)
		return err
	})
	return t, err
}
