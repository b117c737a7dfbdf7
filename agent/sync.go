package agent

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// mapWriter reads and writes the maps of the node.
type mapWriter interface {
	Load(ctx context.Context) (lb.State, error)
	Apply(ctx context.Context, p lb.Plan) error
	Writes() uint64
}

// Sync makes the node serve exactly the Services of snap. The same snapshot again costs no write. After an error the
// node serves some Services from their old and some from their new state; the next Sync reads the maps and completes
// the update.
//
// Services that cannot be served as asked are no error: see Status.Problems. Sync keeps snap, which must not change.
func (a *Agent) Sync(ctx context.Context, snap *clusterset.Snapshot) error {
	return a.update(ctx, func() { a.input.Snapshot = snap })
}

// SetTopology sets the node's place in the ClusterSet and makes the node serve the last snapshot accordingly. An equal
// topology costs nothing.
func (a *Agent) SetTopology(ctx context.Context, t Topology) error {
	a.syncing.Lock()
	same := a.topology().equal(a.withRanges(t))
	a.syncing.Unlock()
	if same {
		return nil
	}
	a.log.Info("topology changed", "cluster", t.Node.Cluster, "zone", t.Node.Zone, "region", t.Node.Region, "ranges", t.Ranges, "own", len(t.Own))
	return a.update(ctx, func() { a.setTopology(t) })
}

func (a *Agent) topology() Topology {
	return Topology{a.input.Node, a.input.ZonesSpanClusters, a.input.RegionsSpanClusters, a.input.Ranges, a.own}
}

// withRanges returns t with the last known ranges if it has none: a source that cannot be read clears nothing.
func (a *Agent) withRanges(t Topology) Topology {
	if len(t.Ranges) == 0 {
		t.Ranges = a.input.Ranges
	}
	return t
}

func (a *Agent) setTopology(t Topology) {
	t = a.withRanges(t)
	a.input.Node, a.input.ZonesSpanClusters, a.input.RegionsSpanClusters = t.Node, t.ZonesSpanClusters, t.RegionsSpanClusters
	a.input.Ranges, a.own = slices.Clone(t.Ranges), slices.Clone(t.Own)
	if len(t.Ranges) > 0 {
		a.served = nil
	}
	a.input.VIPs = lb.NewVIPs(a.input.Ranges, a.own, a.served)
}

// drain drains exactly these members.
func (a *Agent) drain(ctx context.Context, drained map[clusterset.ClusterID]bool) error {
	return a.update(ctx, func() { a.input.Drained = drained })
}

// update changes the input and brings the maps there, unless there is no snapshot yet.
func (a *Agent) update(ctx context.Context, change func()) error {
	a.syncing.Lock()
	defer a.syncing.Unlock()
	if a.isClosed() {
		return ErrClosed
	}
	change()
	if a.input.Snapshot == nil {
		return nil
	}
	before := a.maps.Writes()
	problems, err := a.apply(ctx)
	a.record(problems, err)
	if err != nil {
		return err
	}
	if n := a.maps.Writes() - before; n > 0 {
		frontends, backends := a.planner.Counts()
		a.log.Info("dataplane changed", "frontends", frontends, "backends", backends, "writes", n)
	}
	return nil
}

// largePlan is the number of writes from which on unused memory is returned to the node.
const largePlan = 50000

// apply brings the maps to what the input asks for. The caller holds syncing.
func (a *Agent) apply(ctx context.Context) ([]lb.Problem, error) {
	if a.plannerInvalid {
		have, err := a.maps.Load(ctx)
		if err != nil {
			return nil, fmt.Errorf("read dataplane: %w", err)
		}
		a.planner.Reset(have)
		a.plannerInvalid = false
	}
	plan, problems := a.planner.Plan(a.input)
	// A plan without writes is applied too: the datapath waits for the first Apply.
	if err := a.maps.Apply(ctx, plan); err != nil {
		a.plannerInvalid = true
		return nil, fmt.Errorf("program dataplane: %w", err)
	}
	if len(plan.Backends.Delete) > 0 {
		a.staleSockets.Notify()
	}
	if plan.Writes() >= largePlan {
		a.unusedMemory.Notify()
	}
	return problems, nil
}

// record keeps the outcome of an update for Status, and logs new problems. The caller holds syncing.
func (a *Agent) record(problems []lb.Problem, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err != nil {
		a.status.LastError = err
		return
	}
	a.noteProblems(problems)
	if a.status.LastSync.IsZero() {
		a.unusedMemory.Notify() // the first snapshot leaves more garbage behind than any plan
	}
	a.status.Frontends, a.status.Backends = a.planner.Counts()
	a.status.LastSync, a.status.LastError, a.status.Problems = time.Now(), nil, problems
	a.status.Drained = slices.Sorted(maps.Keys(a.input.Drained))
}

// noteProblems logs the new ones of problems. The caller holds syncing and mu.
func (a *Agent) noteProblems(problems []lb.Problem) {
	known := make(map[lb.Problem]bool, len(a.status.Problems))
	for _, p := range a.status.Problems {
		known[p] = true
	}
	refused := false
	for _, p := range problems {
		if known[p] {
			continue
		}
		a.log.Warn("service not fully programmed", "namespace", p.Service.Namespace, "service", p.Service.Name,
			"reason", p.Reason, "problem", p.Message)
		refused = refused || p.Reason == lb.VIPOutsideRanges || p.Reason == lb.VIPRangesUnknown
	}
	if refused && a.refused != nil {
		a.refused()
	}
}
