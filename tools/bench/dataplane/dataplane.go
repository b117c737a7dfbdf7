// Package dataplane measures what a VIP costs: the same traffic straight to a backend, by the ways of Isthmus
// and by those of others, from a client through two routers to a backend, all in network namespaces of this
// process.
//
// How it measures decides whether the numbers mean anything. Client and server are two threads on one
// CPU, since waking another CPU costs more than what is measured; so the time of an operation is the whole
// cost of its path. Every phase on a path has one on the direct path right beside it, and a row is the median of the
// ratios of such pairs, of all rounds: what else the machine does falls on both. Every path but those by which a socket
// itself finds the backend has a client and a first router of its own, alike but for what translates there: what one peer
// loads into a kernel's hooks, such as connection tracking, costs no other.
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

// sizes are how large and how long everything is.
type sizes struct {
	one, many services.Set
	// phase is how long one kind of traffic runs on one path at a stretch: short, because what else the machine does
	// comes and goes, and spoils the fewer of many pairs the shorter they are.
	phase time.Duration
	// turns is how often within a round each path is compared with the direct one, but for kinds that want more.
	turns int
}

// promised is what the bars are about.
var promised = sizes{
	one: services.Set{Services: 1, Endpoints: 10}, many: services.Set{Services: 10_000, Endpoints: 10},
	phase: 4 * time.Millisecond, turns: 60,
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

// sample is what one phase took, per operation.
type sample struct {
	cpu  time.Duration // of client and server together
	p50  time.Duration // of the round trip
	mean time.Duration // of the time between two operations' ends
}

// newSample is of a phase in which there must have been an operation. It sorts trips, the operations' times.
func newSample(cpu time.Duration, trips []time.Duration) sample {
	var sum time.Duration
	for _, d := range trips {
		sum += d
	}
	slices.Sort(trips)
	n := time.Duration(len(trips))
	return sample{cpu: cpu / n, p50: trips[n/2], mean: sum / n}
}

// pair is a phase on a path and one on the direct path, one right after the other.
type pair struct{ path, direct sample }

// pairs are indexed by kind of traffic and path.
type pairs map[string]map[string][]pair

// measure runs all kinds of traffic on all paths, round by round.
func (b *testbed) measure(ctx context.Context, rounds int) (pairs, error) {
	// One thread for each of two blocking loops, with a spare one so that the runtime leaves these two
	// alone; and no garbage collection in between.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(max(4, runtime.NumCPU())))
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	all := pairs{}
	for round := range rounds + 1 { // round 0 warms up: neighbours, routes, sockets' memory
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
			for _, r := range b.paths {
				if found[r.name] == nil {
					continue
				}
				all[k.name][r.name] = append(all[k.name][r.name], found[r.name]...)
				fmt.Fprintf(b.progress, "round %d/%d  %-24s %-42s / direct: cpu %.3f  p50 %.3f\n", round, rounds, k.name, r.name,
					medianRatio(found[r.name], cpu), medianRatio(found[r.name], p50))
			}
		}
		runtime.GC()
	}
	return all, nil
}

// compare runs one kind of traffic by turns on each path where it goes and on the direct one, which is the first of
// all. Which of them begins changes from turn to turn, and so does the order of the paths. The result is indexed by path.
func (b *testbed) compare(ctx context.Context, k kind) (map[string][]pair, error) {
	found := map[string][]pair{}
	base := b.paths[0]
	err := b.takeTurns(k, b.paths[1:], func(turn int, r path) error {
		var p pair
		for i := range 2 {
			on, took := r, &p.path
			if (i+turn)%2 == 0 {
				on, took = base, &p.direct
			}
			var err error
			if *took, err = b.travel(ctx, k, on); err != nil {
				return err
			}
		}
		found[r.name] = append(found[r.name], p)
		return nil
	})
	return found, err
}

// takeTurns calls do for each of paths where a kind of traffic goes, turn by turn, there and back.
func (b *testbed) takeTurns(k kind, paths []path, do func(turn int, r path) error) error {
	order := slices.DeleteFunc(slices.Clone(paths), func(r path) bool { return !k.goes(r) })
	for turn := range b.turns * k.often {
		for _, r := range order {
			if err := do(turn, r); err != nil {
				return fmt.Errorf("%s on the path %s: %w", k.name, r.name, err)
			}
		}
		slices.Reverse(order)
	}
	return nil
}

// travel is one phase: its sockets belong to the cgroup of the path, or to one that no program looks at. To be in one
// costs a connection about a hundredth, and every pod is.
func (b *testbed) travel(ctx context.Context, k kind, r path) (s sample, err error) {
	cgroup := cmp.Or(r.cgroup, b.bare)
	if err := cgroup.Enter(); err != nil {
		return sample{}, err
	}
	defer func() { err = errors.Join(err, cgroup.Leave()) }()
	err = r.lane.client.Do(func() error {
		s, err = k.run(ctx, r.to, b.phase)
		return err
	})
	return s, err
}
