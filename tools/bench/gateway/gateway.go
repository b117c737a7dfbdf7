// Package gateway measures the gateways, in phases:
// - how soon traffic continues when a gateway dies;
// - what is lost when one is cordoned or drained, or its agent crashes or restarts;
// - the throughput of the balancers, each in turns with hand-written rules;
// - which open connections break when a gateway dies, and how long a change of a gateway with many VIPs takes;
// - what gateways that serve at once cost, and what is lost when one of four dies;
// - how soon a new Service answers, on a cluster with a real Neutron.
//
// The gateways, their router (FRR) and a client that sends a request to a VIP every 5 ms are network namespaces of this
// machine. A gateway dies when its cable is cut behind a switch, so that its router only notices the silence. The clock
// runs from the cut to the first answer of the other gateway.
package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/tools/bench/metric"
	"github.com/isthmus-net/isthmus/tools/compile"
	"github.com/isthmus-net/isthmus/tools/deps/debian"
	"github.com/isthmus-net/isthmus/tools/netlab/edge"
	"github.com/isthmus-net/isthmus/tools/netlab/frr"
)

// Phases are the parts of the table; each can be measured alone.
var Phases = []struct {
	Name string
	Run  func(ctx context.Context, rounds int, progress io.Writer) ([]metric.Metric, error)
}{{"failover", announcers}, {"planned", planned}, {"balancers", throughputs}, {"groups", groups}, {"active", active}, {"services", services}}

// Run measures for the given number of rounds and returns the rows of the table. It needs root, and leaves nothing
// behind.
func Run(ctx context.Context, rounds int, progress io.Writer) (rows []metric.Metric, err error) {
	for _, phase := range Phases {
		more, err := phase.Run(ctx, rounds, progress)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", phase.Name, err)
		}
		rows = append(rows, more...)
	}
	return rows, nil
}

// install installs missing packages.
func install(ctx context.Context, progress io.Writer, packages ...string) error {
	if os.Geteuid() != 0 {
		return errors.New("measuring needs root: it makes network namespaces")
	}
	return debian.Ensure(ctx, progress, packages...)
}

// announcers measures BGP and VRRP.
func announcers(ctx context.Context, rounds int, progress io.Writer) ([]metric.Metric, error) {
	if err := install(ctx, progress, frr.Package, "keepalived"); err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "isthmus-bench-")
	if err != nil {
		return nil, fmt.Errorf("make folder: %w", err)
	}
	defer os.RemoveAll(dir)
	program := filepath.Join(dir, "announcer")
	if err := build(ctx, "github.com/isthmus-net/isthmus/tools/bench/gateway/announcer", program); err != nil {
		return nil, err
	}
	byBGP, err := failovers(ctx, rounds, progress, func() (*testbed, error) { return newBGP(ctx, program) })
	if err != nil {
		return nil, fmt.Errorf("announced by BGP: %w", err)
	}
	byVRRP, err := failovers(ctx, rounds, progress, func() (*testbed, error) { return newVRRP(ctx, program, dir) })
	if err != nil {
		return nil, fmt.Errorf("announced by VRRP: %w", err)
	}
	return rows(byBGP, byVRRP), nil
}

func build(ctx context.Context, pkg, program string) error {
	if said, err := compile.Go(ctx, "build", "-o", program, pkg).CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", pkg, err, said)
	}
	return nil
}

// failover is the result of one announcer over all rounds.
type failover struct {
	deaths               []time.Duration // from the cut to the first answer
	cordon, drain, crash requests        // only with VRRP: the phase "planned" has complete gateways with BGP
}

// requests are the requests during one disturbance.
type requests struct{ asked, lost int }

func (q *requests) add(r edge.Result) {
	q.asked += r.Sent()
	q.lost += r.Lost()
}

// failovers measures one announcer. Gateway 0 has the traffic in each round. With VRRP, its agent first crashes and
// restarts, it is cordoned and uncordoned, and it is drained, dies and comes back. Then it dies and comes back.
func failovers(ctx context.Context, rounds int, progress io.Writer, make func() (*testbed, error)) (all failover, err error) {
	b, err := make()
	if err != nil {
		return all, err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	for i := range b.Gateways {
		if err := b.begin(ctx, i); err != nil {
			return all, err
		}
	}
	for round := range rounds {
		for _, planned := range []struct {
			name string
			do   func(context.Context) (edge.Result, error)
			all  *requests
		}{{"crash", b.crash, &all.crash}, {"cordon", b.cordon, &all.cordon}, {"drain", b.drain, &all.drain}} {
			if b.router != nil {
				break
			}
			r, err := planned.do(ctx)
			if err != nil {
				return all, fmt.Errorf("%s: %w", planned.name, err)
			}
			planned.all.add(r)
			fmt.Fprintf(progress, "round %d/%d  %-4s  %s: %s\n", round+1, rounds, b.name, planned.name, r)
		}
		death, err := b.death(ctx)
		if err != nil {
			return all, fmt.Errorf("death: %w", err)
		}
		all.deaths = append(all.deaths, death)
		fmt.Fprintf(progress, "round %d/%d  %-4s  death: %s\n", round+1, rounds, b.name, death.Round(time.Millisecond))
	}
	return all, nil
}

func rows(byBGP, byVRRP failover) []metric.Metric {
	quartiles := func(d []time.Duration) (median float64, middle *[2]float64) {
		values := make([]float64, len(d))
		for i := range d {
			values[i] = float64(d[i]) / float64(time.Millisecond)
		}
		median = metric.Median(values)
		return median, &[2]float64{values[len(values)/4], values[len(values)*3/4]}
	}
	bgp, middleBGP := quartiles(byBGP.deaths)
	vrrp, middleVRRP := quartiles(byVRRP.deaths)
	longest := slices.Max(byBGP.deaths)
	return []metric.Metric{
		{
			Name: "node death until the other gateway answers, BGP with BFD 3x100 ms; peer: VRRP, 100 ms", Value: bgp, Unit: "ms",
			Bar: new(500.0), Better: metric.Lower, Peer: &vrrp, Quartiles: middleBGP,
		},
		{
			Name: "the same, longest of all rounds", Value: float64(longest) / float64(time.Millisecond), Unit: "ms", Better: metric.Lower,
		},
		{
			Name: "node death until the other gateway answers, VRRP with an advertisement every 100 ms", Value: vrrp, Unit: "ms",
			Better: metric.Lower, Quartiles: middleVRRP,
		},
		lost("cordon and uncordon, VRRP", byVRRP.cordon),
		lost("planned drain, VRRP", byVRRP.drain),
		lost("agent crash and restart, VRRP", byVRRP.crash),
	}
}

// lost returns the row of an event that must lose no request.
func lost(what string, of requests) metric.Metric {
	return metric.Metric{
		Name: fmt.Sprintf("%s: requests lost, of %d", what, of.asked), Value: float64(of.lost), Unit: "requests", Bar: new(0.0), Better: metric.Lower,
	}
}
