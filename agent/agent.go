package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/isthmus-net/isthmus/agent/evidence"
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
	// Proc and Namespaces are where the node's processes and its named network namespaces are seen, default /proc
	// and /run/netns: there UDP sockets of removed backends are closed.
	Proc, Namespaces string
	// Packets adds the packet path, for clients whose sockets are not translated; it is on Devices, names or
	// patterns such as "eth*", or on those that are found when there are none, in the given Order among the
	// programs of others.
	Packets bool
	Devices []string
	Order   datapath.Order
	// FastRoad lets flows between pods and uplinks pass the node's routing and netfilter, both ways, and with them
	// whatever policies others enforce there.
	FastRoad bool
	// CheckInterval is how long it takes, on average, until the maps are compared again with what they should hold.
	// Default a minute.
	CheckInterval time.Duration
	// Place is where the node is, as far as it is known at the start; Settle says it later.
	Place Place
	// Report, when not nil, is told what this node knows of each member's packets, once at the start and whenever
	// that changes. It is called from the goroutine of Run and must not wait. The map is the callee's.
	Report func(map[clusterset.ClusterID]evidence.State)
}

// Place is what a node knows of itself and its ClusterSet. Whatever is not known is left empty: then nobody is
// near, or no address is refused for want of a frontend.
type Place struct {
	Node lb.Node
	// ZonesSpanClusters says that a zone's name means the same in all members.
	ZonesSpanClusters bool
	// Ranges are where all ClusterSetIPs come from.
	Ranges []netip.Prefix
}

func (p Place) equal(o Place) bool {
	return p.Node == o.Node && p.ZonesSpanClusters == o.ZonesSpanClusters && slices.Equal(p.Ranges, o.Ranges)
}

// Validate reports all faults of c at once, or nil.
func (c Config) Validate() error { return c.datapath().Validate() }

func (c Config) datapath() datapath.Config {
	return datapath.Config{
		CgroupRoot: c.CgroupRoot, BPFFS: c.BPFFS, Proc: c.Proc, Namespaces: c.Namespaces,
		Packets: c.Packets, Devices: c.Devices, Order: c.Order, FastRoad: c.FastRoad,
	}
}

// dataplane is the kernel, or what stands for it in a test.
type dataplane interface {
	Load(ctx context.Context) (lb.State, error)
	Apply(ctx context.Context, p lb.Plan) error
	Limits() lb.Limits
	Writes() uint64
	Refusals() (map[datapath.Refusal]uint64, error)
	Hooks() []datapath.HookStatus
	Clusters() (map[clusterset.ClusterID]datapath.Evidence, error)
	CloseStale(ctx context.Context) (closed int, err error)
	Follow(ctx context.Context) error
	Differences(ctx context.Context, want *lb.Audit) (int, error)
	Observe(ctx context.Context, rate uint32, tell func(datapath.Event)) error
	Counters() (map[clusterset.ServiceName]datapath.Counters, error)
	Frontend(a lb.Address) (datapath.Entry, bool, error)
	EvictedUDPVIPs() (uint64, error)
	Missing() []string
	Findings() ([]datapath.Finding, error)
	Close() error
}

// Agent serves the VIPs of one node. Its methods may be called from any goroutine.
type Agent struct {
	log     *slog.Logger
	dp      dataplane
	report  func(map[clusterset.ClusterID]evidence.State)
	every   time.Duration // between two checks of the maps
	watched watched
	stale   chan struct{} // up when backends have gone whose sockets may be open
	spent   chan struct{} // up when the start, or a large plan, has left memory behind

	syncing sync.Mutex // one Sync at a time; taken before mu; guards what follows
	planner *lb.Planner
	lost    bool // the planner does not know what the maps hold: only the kernel does
	input   lb.Input

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
	a, err := newAgent(ctx, cfg, dp, log)
	if err != nil {
		return nil, errors.Join(err, dp.Close())
	}
	return a, nil
}

func newAgent(ctx context.Context, cfg Config, dp dataplane, log *slog.Logger) (*Agent, error) {
	have, err := dp.Load(ctx)
	if err != nil {
		return nil, fmt.Errorf("read dataplane: %w", err)
	}
	a := &Agent{
		log: log, dp: dp, report: cfg.Report, every: cmp.Or(cfg.CheckInterval, DefaultCheckInterval),
		stale: make(chan struct{}, 1), spent: make(chan struct{}, 1), planner: lb.NewPlanner(have),
	}
	raise(a.stale) // what went while no agent was there
	a.settle(cfg.Place)
	a.input.Limits = dp.Limits()
	a.status.Frontends, a.status.Backends = len(have.Frontends), len(have.Backends)
	log.Info("dataplane taken over", "frontends", len(have.Frontends), "backends", len(have.Backends))
	return a, nil
}

// Sync makes the node serve exactly what snap says. Calling it again with the same snapshot writes
// nothing. After an error the node serves a mixture of the old and the new state, each part of it
// consistent; the next Sync reads the maps and goes on from there.
//
// What of snap cannot be served is no error: see Status.Problems. Sync keeps snap, which nobody may change.
func (a *Agent) Sync(ctx context.Context, snap *clusterset.Snapshot) error {
	return a.change(ctx, func() { a.input.Snapshot = snap })
}

// Settle says where the node is from now on, and makes it serve the last snapshot as it looks from there. The
// same place again costs nothing.
func (a *Agent) Settle(ctx context.Context, p Place) error {
	a.syncing.Lock()
	same := a.place().equal(p)
	a.syncing.Unlock()
	if same {
		return nil
	}
	a.log.Info("this node has its place", "cluster", p.Node.Cluster, "zone", p.Node.Zone, "ranges", p.Ranges)
	return a.change(ctx, func() { a.settle(p) })
}

func (a *Agent) place() Place { return Place{a.input.Node, a.input.ZonesSpanClusters, a.input.Ranges} }

func (a *Agent) settle(p Place) {
	a.input.Node, a.input.ZonesSpanClusters, a.input.Ranges = p.Node, p.ZonesSpanClusters, slices.Clone(p.Ranges)
}

// Run does what is to be done beside Sync, until ctx is done; then it returns nil. It drains the members whose
// packets die and takes them back, asking nobody but the kernel and, in silence, backends; it closes the UDP
// sockets of backends that have gone; it follows the devices of the packet path; it checks the maps; and it tells
// events to whoever observes.
func (a *Agent) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		return evidence.Watcher{Source: a, Targets: a.targets, Drain: a.drain, Report: a.report, Log: a.log}.Run(ctx)
	})
	group.Go(func() error { return a.closeStale(ctx) })
	group.Go(func() error { return a.dp.Follow(ctx) })
	group.Go(func() error { return a.checkMaps(ctx) })
	group.Go(func() error { return a.watched.run(ctx, a.dp.Observe) })
	group.Go(func() error {
		for {
			select {
			case <-ctx.Done():
				return nil
			case <-a.spent:
				debug.FreeOSMemory() // the next plan of this size may be weeks away
			}
		}
	})
	return group.Wait()
}

// closeStale closes sockets of backends that have gone, at most once a second, for every network namespace of the
// node is visited.
func (a *Agent) closeStale(ctx context.Context) error {
	pause := time.NewTicker(time.Second)
	defer pause.Stop()
	var failed string
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-a.stale:
		}
		n, err := a.dp.CloseStale(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			failed = ""
		case err.Error() != failed:
			failed = err.Error()
			a.log.Error("close sockets of backends that have gone; will try again when others go", "err", err)
		}
		if n > 0 {
			a.log.Info("closed UDP sockets of backends that have gone", "sockets", n)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-pause.C:
		}
	}
}

// raise sets a flag that stays up until somebody receives from it.
func raise(flag chan struct{}) {
	select {
	case flag <- struct{}{}:
	default:
	}
}

// drain takes members out of service, or back, as package evidence says.
func (a *Agent) drain(ctx context.Context, drained map[clusterset.ClusterID]bool) error {
	return a.change(ctx, func() { a.input.Drained = drained })
}

// Clusters returns what the kernel has seen of each member's packets, nothing after Close.
func (a *Agent) Clusters() (map[clusterset.ClusterID]datapath.Evidence, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return nil, nil
	}
	return a.dp.Clusters()
}

// targets lists up to limit addresses of ready TCP backends of a member, beginning with any Service.
func (a *Agent) targets(c clusterset.ClusterID, limit int) []netip.AddrPort {
	a.syncing.Lock()
	snap := a.input.Snapshot
	a.syncing.Unlock()
	var found []netip.AddrPort
	if snap == nil || len(snap.Services) == 0 {
		return nil
	}
	first := rand.IntN(len(snap.Services))
	for i := range snap.Services {
		for _, s := range snap.Services[(first+i)%len(snap.Services)].Slices {
			port := slices.IndexFunc(s.Ports, func(p clusterset.EndpointPort) bool { return p.Protocol == clusterset.TCP && p.Port != 0 })
			if s.Cluster != c || port < 0 {
				continue
			}
			for _, e := range s.Endpoints {
				if len(found) == limit {
					return found
				}
				if !e.Ready || len(e.Addrs) == 0 {
					continue
				}
				if to := netip.AddrPortFrom(e.Addrs[0], s.Ports[port].Port); !slices.Contains(found, to) {
					found = append(found, to)
				}
			}
		}
	}
	return found
}

// change changes the input and makes the node follow, once there is a snapshot.
func (a *Agent) change(ctx context.Context, input func()) error {
	a.syncing.Lock()
	defer a.syncing.Unlock()
	if a.isClosed() {
		return ErrClosed
	}
	input()
	if a.input.Snapshot == nil {
		return nil
	}
	before := a.dp.Writes()
	problems, err := a.follow(ctx)
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

// largePlan is how many writes leave so much memory behind that it is given back to the node.
const largePlan = 50000

// follow brings the maps to what the input asks for. The caller holds syncing.
func (a *Agent) follow(ctx context.Context) ([]lb.Problem, error) {
	if a.lost {
		have, err := a.dp.Load(ctx)
		if err != nil {
			return nil, fmt.Errorf("read dataplane: %w", err)
		}
		a.planner.Reset(have)
		a.lost = false
	}
	plan, problems := a.planner.Plan(a.input)
	// Also a plan without writes: the dataplane waits for the first one.
	if err := a.dp.Apply(ctx, plan); err != nil {
		a.lost = true
		return nil, fmt.Errorf("program dataplane: %w", err)
	}
	if len(plan.Backends.Delete) > 0 {
		raise(a.stale)
	}
	if plan.Writes() >= largePlan {
		raise(a.spent)
	}
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
	if a.status.LastSync.IsZero() {
		raise(a.spent) // reading all there is leaves more behind than any plan
	}
	a.status.Frontends, a.status.Backends = a.planner.Counts()
	a.status.LastSync, a.status.LastError, a.status.Problems = time.Now(), nil, problems
	a.status.Drained = slices.Sorted(maps.Keys(a.input.Drained))
}

// Status is what a person or a probe wants to know about an agent.
type Status struct {
	Hooks     []datapath.HookStatus     // every program of the socket path
	Frontends int                       // in the maps, by the last successful Load or Sync
	Backends  int                       // likewise
	LastSync  time.Time                 // of the last successful Sync; zero before it
	LastError error                     // of the last Sync; nil when it succeeded
	Problems  []lb.Problem              // of the last successful Sync
	Drained   []clusterset.ClusterID    // members whose packets die, sorted
	Writes    uint64                    // map entries written or deleted since New
	Refusals  map[bpf.DropReason]uint64 // clients refused since the maps were made
	// Differences is how many entries of the maps the last check found, and put right, that were not as they should
	// be; Checked is when that was, zero before the first one.
	Differences int
	Checked     time.Time
	Missing     []string           // what the node does not have, and what comes of it, a sentence each
	Findings    []datapath.Finding // what stands in the packet path's way
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
	s.Problems, s.Drained = slices.Clone(s.Problems), slices.Clone(s.Drained)
	s.Writes = a.dp.Writes()
	if a.closed {
		return s
	}
	s.Hooks, s.Missing = a.dp.Hooks(), a.dp.Missing()
	findings, err := a.dp.Findings()
	if err != nil {
		a.log.Error("look for what stands in the packet path's way", "err", err)
	}
	s.Findings = findings
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
