// Package dataplane measures what a VIP costs: the same traffic straight to a backend and through the
// socket path, from a client through two routers to a backend, all in network namespaces of this process.
//
// How it measures decides whether the numbers mean anything. Client and server are two threads on one
// CPU, since waking another CPU costs more than what is measured; so the time of an operation is the whole
// cost of its path. Direct and VIP take turns within a round, in changing order, and a row is the median
// of the rounds' ratios: what else the machine does falls on both.
package dataplane

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/agent"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/tools/bench/metric"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

const (
	// phase is how long one kind of traffic runs on one road at a stretch.
	phase = 100 * time.Millisecond
	// turns is how often the two roads take turns within a round, there and back: A B, B A, A B. Short
	// and many, because what else the machine does comes and goes within a second.
	turns = 6
)

// The addresses of the run. The VIP lies in the range that Isthmus gives out by default.
var (
	vip     = netip.MustParseAddrPort("243.0.0.5:80")
	backend = netip.MustParseAddrPort("10.98.3.2:8080")
)

// Run measures for the given number of rounds and returns the rows of the table. It needs root. Nothing
// of it outlives the call: cgroup, BPF filesystem and namespaces are its own.
func Run(ctx context.Context, rounds int, progress io.Writer) (rows []metric.Metric, err error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("measuring needs root: it makes network namespaces and loads BPF programs")
	}
	// One thread for each of two blocking loops, with a spare one so that the runtime leaves these two
	// alone; and no garbage collection in between.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(max(4, runtime.NumCPU())))
	defer debug.SetGCPercent(debug.SetGCPercent(-1))

	b, err := newTestbed(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	samples, err := b.measure(ctx, rounds, progress)
	if err != nil {
		return nil, err
	}
	return table(samples), nil
}

// road is a way to the backend.
type road struct {
	name string
	to   netip.AddrPort
}

var direct, viaVIP = road{"direct", backend}, road{"VIP", vip}

// testbed is everything a run needs.
type testbed struct {
	client, routerA, routerB, server *netlab.Namespace
	cgroup                           *netlab.Cgroup
	agent                            *agent.Agent
	undo                             []func() error
}

func newTestbed(ctx context.Context) (*testbed, error) {
	b := &testbed{}
	for _, step := range []func(context.Context) error{b.makeNetwork, b.startServer, b.startAgent} {
		if err := step(ctx); err != nil {
			return nil, errors.Join(err, b.close())
		}
	}
	return b, nil
}

func (b *testbed) close() error {
	var errs []error
	for _, undo := range slices.Backward(b.undo) {
		errs = append(errs, undo())
	}
	return errors.Join(errs...)
}

// makeNetwork joins client, two nodes and the backend by veth.
func (b *testbed) makeNetwork(context.Context) error {
	for _, n := range []**netlab.Namespace{&b.client, &b.routerA, &b.routerB, &b.server} {
		ns, err := netlab.NewNamespace()
		if err != nil {
			return err
		}
		*n = ns
		b.undo = append(b.undo, ns.Close)
	}
	prefix := netip.MustParsePrefix
	return errors.Join(
		b.client.Connect(b.routerA, prefix("10.98.1.2/24"), prefix("10.98.1.1/24")),
		b.routerA.Connect(b.routerB, prefix("10.98.2.1/24"), prefix("10.98.2.2/24")),
		b.routerB.Connect(b.server, prefix("10.98.3.1/24"), prefix("10.98.3.2/24")),
		b.client.Route(netip.MustParseAddr("10.98.1.1")),
		b.routerA.Route(netip.MustParseAddr("10.98.2.2")),
		b.routerB.Route(netip.MustParseAddr("10.98.2.1")),
		b.server.Route(netip.MustParseAddr("10.98.3.1")),
	)
}

// startAgent makes the VIP work in a cgroup of its own; this process enters it when it takes that road.
func (b *testbed) startAgent(ctx context.Context) error {
	cgroup, err := netlab.NewCgroup()
	if err != nil {
		return err
	}
	b.cgroup = cgroup
	b.undo = append(b.undo, cgroup.Close)
	dir, err := os.MkdirTemp("", "isthmus-bench-")
	if err != nil {
		return fmt.Errorf("make folder: %w", err)
	}
	b.undo = append(b.undo, func() error { return os.Remove(dir) })
	unmount, err := netlab.MountBPFFS(dir)
	if err != nil {
		return err
	}
	b.undo = append(b.undo, unmount)

	cfg := agent.Config{CgroupRoot: cgroup.Path, BPFFS: dir}
	b.agent, err = agent.New(ctx, cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	b.undo = append(b.undo, func() error { return errors.Join(b.agent.Close(), agent.Cleanup(cfg)) })
	return b.agent.Sync(ctx, world())
}

// world is one Service with one backend, for TCP and UDP.
func world() *clusterset.Snapshot {
	svc := clusterset.Service{Import: clusterset.Import{
		Service: clusterset.ServiceName{Namespace: "bench", Name: "echo"},
		Type:    clusterset.ClusterSetIP,
		IPs:     []netip.Addr{vip.Addr()},
	}}
	slice := clusterset.Slice{
		Name: "echo", Cluster: "a", Family: clusterset.IPv4,
		Endpoints: []clusterset.Endpoint{{Addrs: []netip.Addr{backend.Addr()}, Ready: true, Serving: true}},
	}
	for _, proto := range []clusterset.Protocol{clusterset.TCP, clusterset.UDP} {
		svc.Ports = append(svc.Ports, clusterset.Port{Name: proto.String(), Protocol: proto, Port: vip.Port()})
		slice.Ports = append(slice.Ports, clusterset.EndpointPort{Name: proto.String(), Protocol: proto, Port: backend.Port()})
	}
	svc.Slices = []clusterset.Slice{slice}
	return &clusterset.Snapshot{Services: []clusterset.Service{svc}}
}

// sample is what one round gave on one road, per operation.
type sample struct {
	cpu time.Duration // of client and server together
	p50 time.Duration // of the round trip
	ops int
}

// tally is what one or more phases took.
type tally struct {
	cpu   time.Duration   // of client and server together
	trips []time.Duration // of each operation
}

func (t *tally) add(o tally) {
	t.cpu += o.cpu
	t.trips = append(t.trips, o.trips...)
}

// sample reduces t, which must hold an operation, and sorts its trips.
func (t *tally) sample() sample {
	slices.Sort(t.trips)
	n := len(t.trips)
	return sample{cpu: t.cpu / time.Duration(n), p50: t.trips[n/2], ops: n}
}

// samples are indexed by kind of traffic, road and round.
type samples map[string]map[string][]sample

// measure runs all kinds of traffic on both roads, round by round.
func (b *testbed) measure(ctx context.Context, rounds int, progress io.Writer) (samples, error) {
	all := samples{}
	for round := range rounds + 1 { // round 0 warms up: neighbours, routes, sockets' memory
		for _, k := range kinds {
			both, err := b.takeTurns(ctx, k)
			if err != nil {
				return nil, err
			}
			if round == 0 {
				continue
			}
			if all[k.name] == nil {
				all[k.name] = map[string][]sample{}
			}
			for _, r := range []road{direct, viaVIP} {
				s := both[r].sample()
				all[k.name][r.name] = append(all[k.name][r.name], s)
				fmt.Fprintf(progress, "round %d/%d  %-24s %-6s %6d ops  cpu %8s  p50 %8s\n", round, rounds, k.name, r.name, s.ops, s.cpu, s.p50)
			}
		}
		runtime.GC()
	}
	return all, nil
}

// takeTurns runs one kind of traffic on both roads, in short turns.
func (b *testbed) takeTurns(ctx context.Context, k kind) (map[road]*tally, error) {
	both := map[road]*tally{direct: {}, viaVIP: {}}
	order := []road{direct, viaVIP}
	for range turns {
		for _, r := range order {
			t, err := b.run(ctx, k, r)
			if err != nil {
				return nil, fmt.Errorf("%s on the road %s: %w", k.name, r.name, err)
			}
			both[r].add(t)
		}
		slices.Reverse(order)
	}
	return both, nil
}

// run is one phase. Direct traffic is made outside of the agent's cgroup: no program sees it.
func (b *testbed) run(ctx context.Context, k kind, r road) (t tally, err error) {
	if r == viaVIP {
		if err := b.cgroup.Enter(); err != nil {
			return tally{}, err
		}
		defer func() { err = errors.Join(err, b.cgroup.Leave()) }()
	}
	err = b.client.Do(func() error {
		t, err = k.run(ctx, r.to)
		return err
	})
	return t, err
}

// table turns samples into the rows of the result.
func table(all samples) []metric.Metric {
	cpu := func(s sample) float64 { return float64(s.cpu) / float64(time.Microsecond) }
	p50 := func(s sample) float64 { return float64(s.p50) / float64(time.Microsecond) }
	var rows []metric.Metric
	for _, row := range []struct {
		name, kind string
		of         func(sample) float64
		bar        *float64
	}{
		{"socket path: CPU per short TCP connection / direct", shortTCP, cpu, new(1.03)},
		{"socket path: TCP request-response p50 / direct", rrTCP, p50, new(1.02)},
		{"socket path: UDP request-response p50, connected / direct", rrUDP, p50, nil},
		{"socket path: UDP request-response p50, unconnected / direct", rrUDPUnconnected, p50, nil},
	} {
		ratio := medianRatio(all[row.kind][viaVIP.name], all[row.kind][direct.name], row.of)
		rows = append(rows, metric.Metric{Name: row.name, Value: ratio, Unit: "ratio", Bar: row.bar, Better: metric.Lower, Limit: new(1.0)})
	}
	for _, row := range []struct {
		name, kind string
		of         func(sample) float64
	}{
		{"direct: CPU per short TCP connection", shortTCP, cpu},
		{"direct: TCP request-response p50", rrTCP, p50},
		{"direct: UDP request-response p50, unconnected", rrUDPUnconnected, p50},
	} {
		value := medianOf(all[row.kind][direct.name], row.of)
		rows = append(rows, metric.Metric{Name: row.name, Value: value, Unit: "us", Better: metric.Lower})
	}
	return rows
}

// medianRatio returns the median over the rounds of a/b.
func medianRatio(a, b []sample, of func(sample) float64) float64 {
	ratios := make([]float64, len(a))
	for i := range a {
		ratios[i] = of(a[i]) / of(b[i])
	}
	return median(ratios)
}

func medianOf(s []sample, of func(sample) float64) float64 {
	values := make([]float64, len(s))
	for i := range s {
		values[i] = of(s[i])
	}
	return median(values)
}

// median returns the middle of values, the mean of the two middle ones when their number is even. It
// sorts them. There must be one.
func median(values []float64) float64 {
	slices.Sort(values)
	n := len(values)
	return (values[(n-1)/2] + values[n/2]) / 2
}
