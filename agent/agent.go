package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/netip"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/isthmus-net/isthmus/agent/evidence"
	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/clusterset/signal"
)

// kernel is what newAgent needs of a datapath: the sum of the interfaces that each part of the agent declares. A test
// passes a datapath.Fake.
type kernel interface {
	Limits() lb.Limits
	mapWriter
	mapAuditor
	staleSocketCloser
	deviceFollower
	eventSource
	programStatus
	nodeStatus
	frontendReader
	counters
	io.Closer
}

// deviceFollower keeps the packet path on the node's devices until ctx ends.
type deviceFollower interface {
	Follow(ctx context.Context) error
}

// Agent serves the VIPs of one node. Its methods may be called from any goroutine.
type Agent struct {
	log     *slog.Logger
	report  func(map[clusterset.ClusterID]evidence.State)
	refused func() // may be nil

	// The datapath, by what each part of the agent needs of it.
	maps      mapWriter
	auditor   mapAuditor
	sockets   staleSocketCloser
	devices   deviceFollower
	programs  programStatus
	node      nodeStatus
	frontends frontendReader
	counters  counters
	datapath  io.Closer

	events        eventHub
	checkInterval time.Duration
	staleSockets  signal.Signal // backends were removed, whose sockets may be open
	unusedMemory  signal.Signal // the start, or a large plan, has left garbage behind

	syncing        sync.Mutex // one update of the maps at a time; taken before mu; guards what follows
	planner        *lb.Planner
	plannerInvalid bool // the planner does not know what the maps hold: read them first
	input          lb.Input
	own            []lb.Own                              // the cluster's own addresses
	served         map[netip.Addr]clusterset.ServiceName // VIPs of the last agent, while no range is known

	mu     sync.Mutex
	closed bool
	status Status // without what Status asks the kernel for
}

// ErrClosed is returned by Sync after Close.
var ErrClosed = errors.New("agent is closed")

// New takes over the node's dataplane, or installs it when there is none. It attaches the programs, replaces those of
// another version in place, and reads the maps, so that the first Sync writes only what has changed. After an error the
// node is as before.
func New(ctx context.Context, cfg Config, log *slog.Logger) (*Agent, error) {
	dp, err := datapath.Open(ctx, cfg.datapath(), log)
	if err != nil {
		return nil, fmt.Errorf("start dataplane: %w", err)
	}
	a, err := newAgent(ctx, cfg, dp, log)
	if err != nil {
		return nil, errors.Join(err, dp.Close())
	}
	return a, nil
}

func newAgent(ctx context.Context, cfg Config, k kernel, log *slog.Logger) (*Agent, error) {
	have, err := k.Load(ctx)
	if err != nil {
		return nil, fmt.Errorf("read dataplane: %w", err)
	}
	a := &Agent{
		log: log, report: cfg.Report, refused: cfg.Refused,
		maps: k, auditor: k, sockets: k, devices: k, programs: k, node: k, frontends: k, counters: k, datapath: k,
		events:        eventHub{source: k},
		checkInterval: cmp.Or(cfg.CheckInterval, DefaultCheckInterval),
		staleSockets:  signal.New(), unusedMemory: signal.New(), planner: lb.NewPlanner(have),
	}
	a.staleSockets.Notify() // backends may have been removed while no agent ran
	a.input.Ranges = slices.SortedFunc(maps.Keys(have.Ranges), netip.Prefix.Compare)
	a.served = have.VIPs()
	a.setTopology(cfg.Topology)
	a.input.Limits = k.Limits()
	a.status.Frontends, a.status.Backends = len(have.Frontends), len(have.Backends)
	log.Info("dataplane taken over", "frontends", len(have.Frontends), "backends", len(have.Backends))
	return a, nil
}

// Run does the agent's background work until ctx ends; then it returns nil. It drains members whose packets get no
// answer and restores them, closes the UDP sockets of removed backends, follows the devices of the packet path, checks
// the maps, and passes events to observers. Everything that it decides on comes from the kernel and from probes of
// backends; it asks no API server.
func (a *Agent) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	watcher := evidence.Watcher{Source: a, Targets: a.targets, Drain: a.drain, Report: a.report, Log: a.log}
	group.Go(func() error { return watcher.Run(ctx) })
	group.Go(func() error { return a.closeStaleSockets(ctx) })
	group.Go(func() error { return a.devices.Follow(ctx) })
	group.Go(func() error { return a.checkMaps(ctx) })
	group.Go(func() error { return a.events.run(ctx) })
	group.Go(func() error { return a.freeMemory(ctx) })
	return group.Wait()
}

// freeMemory returns unused memory to the node after large plans: the next one may be weeks away.
func (a *Agent) freeMemory(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-a.unusedMemory.C():
			debug.FreeOSMemory()
		}
	}
}

// Close closes the agent and leaves the dataplane running: programs, maps and traffic stay. It waits for a Sync under
// way. Closing twice is no error.
func (a *Agent) Close() error {
	a.syncing.Lock()
	defer a.syncing.Unlock()
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return nil
	}
	a.closed = true
	return a.datapath.Close()
}

func (a *Agent) isClosed() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.closed
}

// Cleanup uninstalls the dataplane from the node: programs, maps and pins. Stop the agent first. Open connections go
// on; new ones to a VIP fail. Cleaning a clean node succeeds.
func Cleanup(cfg Config) error {
	if err := cfg.Validate(); err != nil {
		return err
	}
	return datapath.Remove(cfg.datapath())
}
