package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Config says how the agent finds what it needs on its node. The zero value takes the defaults.
type Config struct {
	// CgroupRoot is where the node's cgroup v2 hierarchy is mounted, or the folder that holds it as
	// "unified". Default /sys/fs/cgroup. In a container it is the host's, mounted somewhere else.
	CgroupRoot string
	// BPFFS is the BPF filesystem in which programs and maps outlive the agent. Default /sys/fs/bpf.
	BPFFS string
}

// Validate reports all faults of c at once, or nil.
func (c Config) Validate() error { return c.datapath().Validate() }

func (c Config) datapath() datapath.Config {
	return datapath.Config{CgroupRoot: c.CgroupRoot, BPFFS: c.BPFFS}
}

// dataplane is the kernel, or what stands for it in a test.
type dataplane interface {
	Load(ctx context.Context) (lb.State, error)
	Apply(ctx context.Context, p lb.Plan) error
	Writes() uint64
	Refusals() (map[datapath.Refusal]uint64, error)
	Hooks() []datapath.HookStatus
	Close() error
}

// Agent serves the VIPs of one node. Its methods may be called from any goroutine.
type Agent struct {
	log *slog.Logger
	dp  dataplane

	syncing sync.Mutex  // one Sync at a time; taken before mu
	planner *lb.Planner // knows what the maps hold; nil when only the kernel does; guarded by syncing
	applied bool        // an Apply has succeeded: the dataplane waits for the first; guarded by syncing

	mu     sync.Mutex
	closed bool
	status Status // without Hooks, Writes and Refusals, which the kernel knows
}

// ErrClosed is returned by Sync after Close.
var ErrClosed = errors.New("agent is closed")

// New takes over the node's dataplane, or starts it when there is none: it attaches the programs, swaps
// them in place where another version runs, and reads what the maps hold, so that the first Sync writes
// only what has really changed. After an error the node is as it was.
func New(ctx context.Context, cfg Config, log *slog.Logger) (*Agent, error) {
	dp, err := datapath.Open(ctx, cfg.datapath(), log)
	if err != nil {
		return nil, fmt.Errorf("start dataplane: %w", err)
	}
	a, err := newAgent(ctx, dp, log)
	if err != nil {
		return nil, errors.Join(err, dp.Close())
	}
	return a, nil
}

func newAgent(ctx context.Context, dp dataplane, log *slog.Logger) (*Agent, error) {
	have, err := dp.Load(ctx)
	if err != nil {
		return nil, fmt.Errorf("read dataplane: %w", err)
	}
	a := &Agent{log: log, dp: dp, planner: lb.NewPlanner(have)}
	a.status.Frontends, a.status.Backends = len(have.Frontends), len(have.Backends)
	log.Info("dataplane taken over", "frontends", len(have.Frontends), "backends", len(have.Backends))
	return a, nil
}

// Sync makes the node serve exactly what snap says. Calling it again with the same snapshot writes
// nothing. After an error the node serves a mixture of the old and the new state, each part of it
// consistent; the next Sync reads the maps and goes on from there.
//
// What of snap cannot be served is no error: see Status.Problems.
func (a *Agent) Sync(ctx context.Context, snap *clusterset.Snapshot) error {
	a.syncing.Lock()
	defer a.syncing.Unlock()
	if a.isClosed() {
		return ErrClosed
	}
	before := a.dp.Writes()
	problems, err := a.sync(ctx, snap)
	a.record(problems, err)
	if err != nil {
		return err
	}
	if n := a.dp.Writes() - before; n > 0 {
		frontends, backends := a.planner.Counts()
		a.log.Info("dataplane changed", "frontends", frontends, "backends", backends, "writes", n)
	}
	return nil
}

// sync is Sync without the bookkeeping. The caller holds syncing.
func (a *Agent) sync(ctx context.Context, snap *clusterset.Snapshot) ([]lb.Problem, error) {
	planner := a.planner
	if planner == nil {
		have, err := a.dp.Load(ctx)
		if err != nil {
			return nil, fmt.Errorf("read dataplane: %w", err)
		}
		planner = lb.NewPlanner(have)
	}
	a.planner = nil // until Apply has succeeded
	plan, problems := planner.Plan(lb.Input{Snapshot: snap})
	if plan.Writes() > 0 {
		if err := a.dp.Apply(ctx, plan); err != nil {
			return nil, fmt.Errorf("program dataplane: %w", err)
		}
	}
	a.planner = planner
	return problems, nil
}

// record keeps the outcome of a Sync for Status, and logs problems that were not there before. The caller
// holds syncing.
func (a *Agent) record(problems []lb.Problem, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err != nil {
		a.status.LastError = err
		return
	}
	for _, p := range problems {
		if !slices.Contains(a.status.Problems, p) {
			a.log.Warn("service not fully programmed", "namespace", p.Service.Namespace, "service", p.Service.Name,
				"reason", p.Reason, "problem", p.Message)
		}
	}
	a.status.Frontends, a.status.Backends = a.planner.Counts()
	a.status.LastSync, a.status.LastError, a.status.Problems = time.Now(), nil, problems
}

// Status is what a person or a probe wants to know about an agent.
type Status struct {
	Hooks     []datapath.HookStatus     // every program of the socket path
	Frontends int                       // in the maps, by the last successful Load or Sync
	Backends  int                       // likewise
	LastSync  time.Time                 // of the last successful Sync; zero before it
	LastError error                     // of the last Sync; nil when it succeeded
	Problems  []lb.Problem              // of the last successful Sync
	Writes    uint64                    // map entries written or deleted since New
	Refusals  map[bpf.DropReason]uint64 // clients refused since the maps were made
}

// Ready returns nil when the dataplane equals the last accepted snapshot and every program is attached,
// else why not.
func (s Status) Ready() error {
	var errs []error
	for _, h := range s.Hooks {
		if !h.Attached {
			errs = append(errs, fmt.Errorf("program %s is not attached; restart the agent to attach it again", h.Name))
		}
	}
	if s.LastError != nil {
		errs = append(errs, fmt.Errorf("last sync: %w", s.LastError))
	} else if s.LastSync.IsZero() {
		errs = append(errs, errors.New("no snapshot received yet"))
	}
	return errors.Join(errs...)
}

// Status asks the kernel and returns what stands. Refusals is nil when they cannot be read, and after
// Close.
func (a *Agent) Status() Status {
	a.mu.Lock()
	defer a.mu.Unlock() // also against Close: a closed dataplane must not be asked
	s := a.status
	s.Problems = slices.Clone(s.Problems)
	s.Writes = a.dp.Writes()
	if a.closed {
		return s
	}
	s.Hooks = a.dp.Hooks()
	refusals, err := a.dp.Refusals()
	if err != nil {
		a.log.Error("read refusals", "err", err)
		return s
	}
	s.Refusals = map[bpf.DropReason]uint64{}
	for r := bpf.DropNone + 1; r < bpf.DropMax; r++ {
		s.Refusals[r] = 0
	}
	for r, n := range refusals {
		s.Refusals[r.Reason] += n
	}
	return s
}

// Close lets go of the dataplane and leaves it running: programs and maps stay, and so does traffic.
// It waits for a Sync under way. Closing twice is no error.
func (a *Agent) Close() error {
	a.syncing.Lock()
	defer a.syncing.Unlock()
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return nil
	}
	a.closed = true
	return a.dp.Close()
}

func (a *Agent) isClosed() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.closed
}

// Cleanup takes the dataplane off the node, programs, maps and pins. Stop the agent first; open
// connections go on, new ones to a VIP fail. Cleaning a clean node succeeds.
func Cleanup(cfg Config) error {
	if err := cfg.Validate(); err != nil {
		return err
	}
	return datapath.Remove(cfg.datapath())
}
