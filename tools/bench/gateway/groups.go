package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/tools/bench/metric"
	"github.com/isthmus-net/isthmus/tools/netlab/frr"
)

// whole is the result of a group over all rounds.
type whole struct {
	broken  map[string]int // connections, by return path
	opened  int            // per return path
	changes []time.Duration
	memory  []float64 // of the changed agent, in MiB
	loads   []float64 // times until a first state with many VIPs was applied, in seconds
	loaded  []float64 // memory of the agent with it, in MiB
}

// groups kills gateways and changes their states, with each balancer.
func groups(ctx context.Context, rounds int, progress io.Writer) ([]metric.Metric, error) {
	seen := map[desired.Balancer]*whole{}
	for _, b := range balancers {
		seen[b.kind] = &whole{broken: map[string]int{}}
	}
	if err := eachBalancer(ctx, rounds, progress, func(p *programs, kind desired.Balancer, say func(string, ...any)) error {
		if err := once(ctx, p, kind, seen[kind], say); err != nil {
			return err
		}
		took, memory, err := firstLoad(ctx, p, kind)
		if err != nil {
			return fmt.Errorf("first state: %w", err)
		}
		seen[kind].loads, seen[kind].loaded = append(seen[kind].loads, took.Seconds()), append(seen[kind].loaded, memory)
		say("first state: %s, %.0f MiB", took, memory)
		return nil
	}); err != nil {
		return nil, err
	}
	return slices.Concat(deathRows(seen), changeRows(seen)), nil
}

// eachBalancer calls do with each balancer, in every round. It installs the packages that groups need.
func eachBalancer(ctx context.Context, rounds int, progress io.Writer, do func(p *programs, kind desired.Balancer, say func(string, ...any)) error) error {
	if err := install(ctx, progress, frr.Package); err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "isthmus-bench-")
	if err != nil {
		return fmt.Errorf("make folder: %w", err)
	}
	defer os.RemoveAll(dir)
	p, err := newPrograms(ctx, dir)
	if err != nil {
		return err
	}
	for round := range rounds {
		for _, b := range balancers {
			if err := do(p, b.kind, func(format string, args ...any) {
				fmt.Fprintf(progress, "round %d/%d  %s: %s\n", round+1, rounds, b.name, fmt.Sprintf(format, args...))
			}); err != nil {
				return fmt.Errorf("%s: %w", b.name, err)
			}
		}
	}
	return nil
}

// once runs one round of one balancer.
func once(ctx context.Context, p *programs, balancer desired.Balancer, seen *whole, say func(string, ...any)) (err error) {
	g, err := newGroup(ctx, p, balancer, pair)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.close()) }()
	all, err := g.death(ctx)
	if err != nil {
		return fmt.Errorf("death of a gateway: %w", err)
	}
	for _, b := range all {
		if seen.broken[b.Name]++; seen.broken[b.Name] <= 3 {
			say("a connection is broken: %v", b)
		}
	}
	seen.opened += open
	say("death of a gateway: %d connections are broken", len(all))
	changes, err := g.changes(ctx)
	if err != nil {
		return fmt.Errorf("reconfigure: %w", err)
	}
	seen.changes = append(seen.changes, changes...)
	memory, err := g.agents[alive].Memory()
	if err != nil {
		return err
	}
	seen.memory = append(seen.memory, float64(memory)/(1<<20))
	say("reconfigure: %s to %s", changes[0], changes[len(changes)-1])
	return nil
}
