// Package dns compares the node's name server with CoreDNS and with a UDP echo. CoreDNS has its multicluster option, the usual
// Corefile of a cluster, and a real API server. The echo is the upper limit for a Go program.
//
// Servers are separate processes on one CPU; their client is this process, on another CPU. All servers alternate within a round,
// and a row is the median of the rounds' ratios, so other load on the machine affects all of them. The cost of an answer is the
// CPU time of the server's process.
//
// The name server runs alone, with the settings of isthmus-agent. Restarts are those of isthmus-agent itself.
package dns

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/isthmus-net/isthmus/tools/bench/dns/internal/names"
	"github.com/isthmus-net/isthmus/tools/bench/metric"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// sizes are the dimensions and durations of a run.
type sizes struct {
	some, many names.Set
	// phase is the time that one server is queried without a break. Each server has two phases per turn of a round.
	phase time.Duration
	turns int
}

// promised are the sizes that the bars apply to.
var promised = sizes{
	some: names.Set{Services: 10_000, Endpoints: 200}, many: names.Set{Services: 100_000, Endpoints: 200},
	phase: 200 * time.Millisecond, turns: 2,
}

// Run measures for the given number of rounds and returns the rows of the table. Six rounds take some minutes, mostly to fill the
// API server. It stops all processes and removes their files before it returns.
func Run(ctx context.Context, rounds int, progress io.Writer) ([]metric.Metric, error) {
	return run(ctx, promised, rounds, progress)
}

// The servers besides CoreDNS.
const (
	isthmus = "isthmus"
	goEcho  = "echo"
)

// The kinds of traffic.
const (
	plainSome = "10,000 names, A"
	plainMany = "100,000 names, A"
	mixed     = "pod-like mix"
	largeUDP  = "headless of 200, truncated"
	largeTCP  = "headless of 200, TCP"
)

// kind is a kind of traffic.
type kind struct {
	name      string
	questions []names.Question
	tcp       bool // without the echo
}

// bench holds everything that a run needs.
type bench struct {
	sizes
	rounds   int
	progress io.Writer
	dir      string
	program  string // nameserver
	cpus     struct{ server, client int }
	samples  map[string]map[string][]sample // by kind and server, one per round
}

func run(ctx context.Context, s sizes, rounds int, progress io.Writer) (rows []metric.Metric, err error) {
	klog.SetLogger(logr.Discard())
	ctrl.SetLogger(logr.Discard())
	b := &bench{sizes: s, rounds: rounds, progress: progress, samples: map[string]map[string][]sample{}}
	if b.cpus.server, b.cpus.client, err = outerCPUs(); err == nil && b.cpus.server == b.cpus.client {
		err = errors.New("measuring needs two CPUs, one for the server and one for its clients")
	}
	if err != nil {
		return nil, err
	}
	if b.dir, err = os.MkdirTemp("", "isthmus-bench-"); err != nil {
		return nil, fmt.Errorf("make folder: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(b.dir)) }()
	b.program = filepath.Join(b.dir, "nameserver")
	if err := build(ctx, ".", "github.com/isthmus-net/isthmus/tools/bench/dns/nameserver", b.program); err != nil {
		return nil, err
	}
	peer, err := newCluster(ctx, b.dir, progress)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, peer.close()) }()
	var size size
	for _, step := range []struct {
		set   names.Set
		kinds []kind
		then  func(context.Context, *cluster, map[string]*server) error
	}{
		{s.some, []kind{{name: plainSome, questions: s.some.Plain()}}, nil},
		{s.many, []kind{
			{name: plainMany, questions: s.many.Plain()},
			{name: mixed, questions: s.many.Mix()},
			{name: largeUDP, questions: names.Large(min(s.many.Endpoints, 60))},
			{name: largeTCP, questions: names.Large(s.many.Endpoints), tcp: true},
		}, func(ctx context.Context, c *cluster, all map[string]*server) error {
			var err error
			size, err = b.measureSize(ctx, c, all)
			return err
		}},
	} {
		if err := peer.fill(ctx, step.set, progress); err != nil {
			return nil, err
		}
		if err := b.compare(ctx, peer, step.set, step.kinds, step.then); err != nil {
			return nil, err
		}
	}
	kernel, err := b.measureKernel(ctx)
	if err != nil {
		return nil, fmt.Errorf("answers from the kernel: %w", err)
	}
	return slices.Concat(b.trafficRows(), sizeRows(size), kernel), nil
}

// compare measures kinds of traffic on servers of a set, then calls then.
func (b *bench) compare(ctx context.Context, c *cluster, set names.Set, kinds []kind, then func(context.Context, *cluster, map[string]*server) error) (err error) {
	all := map[string]*server{}
	defer func() {
		for _, s := range all {
			err = errors.Join(err, s.stop())
		}
	}()
	peer, err := c.serve(ctx, b.cpus.server, set)
	if err != nil {
		return err
	}
	all[coreDNS] = peer
	for name, mode := range map[string]string{isthmus: "serve", goEcho: "echo"} {
		if all[name], err = b.nameserver(ctx, name, b.cpus.server, "-mode", mode, "-services", fmt.Sprint(set.Services), "-endpoints", fmt.Sprint(set.Endpoints)); err != nil {
			delete(all, name)
			return err
		}
		if _, err := all[name].await(ctx, kinds[0].questions[0]); err != nil {
			return err
		}
	}
	for round := range b.rounds + 1 { // round 0 warms up caches and socket memory
		for _, k := range kinds {
			if err := b.takeTurns(ctx, k, all, round); err != nil {
				return fmt.Errorf("%s: %w", k.name, err)
			}
		}
	}
	if then == nil {
		return nil
	}
	return then(ctx, c, all)
}

// nameserver starts the program nameserver.
func (b *bench) nameserver(ctx context.Context, name string, cpu int, args ...string) (*server, error) {
	ports, err := netlab.FreePorts(1)
	if err != nil {
		return nil, err
	}
	at := ports[0]
	s, err := start(ctx, name, at, cpu, b.program, append(args, "-listen", at.String())...)
	if err != nil {
		return nil, err
	}
	s.attached, s.echo = true, name == goEcho
	return s, nil
}

// takeTurns queries all servers with one kind of traffic, in short turns. The other servers are stopped meanwhile, so that no
// server collects garbage during another's turn. Nor does this process: it holds all objects in memory, and a collection would
// count as round-trip time.
func (b *bench) takeTurns(ctx context.Context, k kind, all map[string]*server, round int) (err error) {
	runtime.GC()
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	order := []string{isthmus, coreDNS}
	if !k.tcp {
		order = append(order, goEcho)
	}
	askers := map[string]*asker{}
	tallies := map[string]*tally{}
	for _, name := range order {
		c, err := newAsker(all[name].at, k.questions, name != goEcho)
		if err != nil {
			return err
		}
		defer func() { _ = c.close() }()
		askers[name], tallies[name] = c, new(tally)
	}
	defer func() { err = errors.Join(err, letRun(all, func(string) bool { return true })) }()
	for range 2 * b.turns {
		for _, name := range order {
			if err := letRun(all, func(other string) bool { return other == name }); err != nil {
				return err
			}
			t, err := b.ask(ctx, k, all[name], askers[name])
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			tallies[name].add(t)
		}
		slices.Reverse(order)
	}
	if round == 0 {
		return nil
	}
	if b.samples[k.name] == nil {
		b.samples[k.name] = map[string][]sample{}
	}
	for _, name := range order {
		if tallies[name].answers == 0 {
			return fmt.Errorf("no answer from %s: %s", name, all[name].log)
		}
		s := tallies[name].sample()
		b.samples[k.name][name] = append(b.samples[k.name][name], s)
		fmt.Fprintf(b.progress, "round %d/%d  %-22s %-8s %8.0f/s  cpu %9s  p99 %9s  lost %d\n", round, b.rounds, k.name, name, s.rate, s.cpu, s.p99, s.lost)
	}
	return nil
}

// ask runs one phase of one server.
func (b *bench) ask(ctx context.Context, k kind, s *server, c *asker) (t tally, err error) {
	before, err := s.cpuTime()
	if err != nil {
		return tally{}, err
	}
	err = onCPU(b.cpus.client, func() error {
		if k.tcp {
			t, err = overTCP(ctx, s.at, k.questions, b.phase)
		} else {
			t, err = c.run(ctx, b.phase)
		}
		return err
	})
	if err != nil {
		return tally{}, err
	}
	after, err := s.cpuTime()
	t.cpu = after - before
	return t, err
}
