// Package dataplane measures the cost of a VIP. It sends the same traffic to a backend directly, through the dataplanes of
// Isthmus, and through those of other implementations. Traffic passes from a client through two routers to a backend, all in
// network namespaces of this process.
//
// Client and server are two threads on one CPU, because waking another CPU costs more than the difference to be measured. The
// time of an operation is therefore the whole cost of its path. Each phase on a path runs right beside a phase on the direct
// path. A row is the median of the ratios of these pairs over all rounds, so other load on the machine affects both sides.
//
// A path whose node translates packets has a client and a first router of its own. The modules that one peer loads into a
// network namespace's hooks, such as connection tracking, then slow down no other path.
package dataplane

import (
	"cmp"
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

// sizes are the dimensions and durations of a run.
type sizes struct {
	one, many services.Set
	// phase is the time that one kind of traffic runs on one path without a break. Short phases are better: other load on the
	// machine comes in bursts, and a burst spoils fewer pairs when pairs are short.
	phase time.Duration
	// turns is the number of pairs per path and round; kind.turnFactor multiplies it.
	turns int
}

// promised are the sizes that the bars apply to.
var promised = sizes{
	one: services.Set{Services: 1, Endpoints: 10}, many: services.Set{Services: 10_000, Endpoints: 10},
	phase: 4 * time.Millisecond, turns: 60,
}

// Run measures for the given number of rounds and returns the rows of the table. It needs root. It creates its own cgroups,
// BPF filesystems and network namespaces, and removes them before it returns. The first round starts after some minutes,
// which kube-proxy needs to program its rules.
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

// sample is the cost of one operation in a phase.
type sample struct {
	cpu  time.Duration // of client and server together
	p50  time.Duration // of the round trip
	mean time.Duration // of the time between two operations' ends
}

// newSample returns the sample of a phase from the times of its operations, of which there is at least one. It sorts trips.
func newSample(cpu time.Duration, trips []time.Duration) sample {
	var sum time.Duration
	for _, d := range trips {
		sum += d
	}
	slices.Sort(trips)
	n := time.Duration(len(trips))
	return sample{cpu: cpu / n, p50: trips[n/2], mean: sum / n}
}

// pair is a phase on a path and the phase on the direct path right beside it.
type pair struct{ path, direct sample }

// pairs are indexed by kind of traffic and path.
type pairs map[string]map[string][]pair

// measure runs all kinds of traffic on all paths, round by round.
func (b *testbed) measure(ctx context.Context, rounds int) (pairs, error) {
	// Two blocking loops need a thread each. Spare threads keep the runtime off these two. Garbage is collected only between
	// rounds.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(max(4, runtime.NumCPU())))
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	all := pairs{}
	for round := range rounds + 1 { // round 0 warms up neighbours, routes and socket memory
		for _, k := range kinds {
			found, err := b.compare(ctx, k)
			if err != nil {
				return nil, err
			}
			if round == 0 {
				continue
			}
			if all[k.name] == nil {
				all[k.name] = map[string][]pair{}
			}
			for _, via := range b.paths {
				if found[via.name] == nil {
					continue
				}
				all[k.name][via.name] = append(all[k.name][via.name], found[via.name]...)
				fmt.Fprintf(b.progress, "round %d/%d  %-24s %-42s / direct: cpu %.3f  p50 %.3f\n", round, rounds, k.name, via.name,
					medianRatio(found[via.name], cpu), medianRatio(found[via.name], p50))
			}
		}
		runtime.GC()
	}
	return all, nil
}

// compare runs one kind of traffic alternately on each path that it can take and on the direct path, which is the first of
// b.paths. Each turn swaps the order within a pair and reverses the order of the paths. The result is indexed by path.
func (b *testbed) compare(ctx context.Context, k kind) (map[string][]pair, error) {
	found := map[string][]pair{}
	base := b.paths[0]
	err := b.takeTurns(k, b.paths[1:], func(turn int, via path) error {
		var p pair
		for i := range 2 {
			on, took := via, &p.path
			if (i+turn)%2 == 0 {
				on, took = base, &p.direct
			}
			var err error
			if *took, err = b.runPhase(ctx, k, on); err != nil {
				return err
			}
		}
		found[via.name] = append(found[via.name], p)
		return nil
	})
	return found, err
}

// takeTurns calls do once per turn for each path that a kind of traffic can take. Each turn reverses the order of the paths.
func (b *testbed) takeTurns(k kind, paths []path, do func(turn int, via path) error) error {
	order := slices.DeleteFunc(slices.Clone(paths), func(via path) bool { return !k.reaches(via) })
	for turn := range b.turns * k.turnFactor {
		for _, via := range order {
			if err := do(turn, via); err != nil {
				return fmt.Errorf("%s on the path %q: %w", k.name, via.name, err)
			}
		}
		slices.Reverse(order)
	}
	return nil
}

// runPhase runs one phase with its sockets in the cgroup of the path, or in a cgroup without programs. Every pod is in a
// cgroup, and membership alone costs a connection about 1 %.
func (b *testbed) runPhase(ctx context.Context, k kind, via path) (s sample, err error) {
	cgroup := cmp.Or(via.cgroup, b.bare)
	if err := cgroup.Enter(); err != nil {
		return sample{}, err
	}
	defer func() { err = errors.Join(err, cgroup.Leave()) }()
	err = via.lane.client.Do(func() error {
		s, err = k.run(ctx, via.to, b.phase)
		return err
	})
	return s, err
}
