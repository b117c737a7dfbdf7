package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

// DefaultCheckEvery is the average time between two checks for drift.
const DefaultCheckEvery = 5 * time.Second

// Config holds the settings of an Agent. All but CheckEvery, Announcers and Flows must be set.
type Config struct {
	// Cluster is the id of the cluster whose controller the agent obeys.
	Cluster string
	// Balancer balances all VIPs of a state.
	Balancer Component
	// Announcers announce them to neighbours. The agent applies them in this order.
	Announcers []Announcer
	// StatePath is the file that keeps the last request. Its folder exists.
	StatePath string
	// CheckEvery is the average time between two checks for drift; 0 is DefaultCheckEvery.
	CheckEvery time.Duration
	// Flows answers the other gateways of the group, and authenticates them itself; see package flows.
	Flows   http.Handler
	Version string
	Log     *slog.Logger
}

// Agent runs the control loop of one gateway.
type Agent struct {
	cfg        Config
	components components
	store      store

	mu sync.Mutex // held while components change; guards what follows
	// last is the last request that was accepted; nil before the first one.
	last *desired.Request
	// serves is as much of its state as can be served, and refused has a fault for each Service of the rest. serves is
	// applied, or retried until it is.
	serves  *desired.State
	refused desired.Faults
	// unsettled says that components may differ from last: check applies it again.
	unsettled bool
	// diskFails says that the last state could not be saved. Until one can be, nothing changes before the disk has the next one.
	diskFails bool
	// closed is set before mu is taken to close the components. After that nothing is applied.
	closed atomic.Bool

	statsMu sync.Mutex // guards what follows; taken after mu
	stats   Stats
}

// Stats describe an agent at one moment.
type Stats struct {
	Status desired.Status
	// Ready says that all components match the last request.
	Ready bool
	// Reconfigurations counts requests by their HTTP status.
	Reconfigurations map[int]int
	// Drifts counts, by component, how often drift began, and Mended how often the next Apply removed it at once. Every
	// component has an entry.
	Drifts, Mended map[string]int
}

// New returns the agent of a gateway, with the request that an earlier process left on disk. A broken file is renamed and
// logged: the gateway then stays as it is until a controller sends a state.
func New(cfg Config) (*Agent, error) {
	if cfg.CheckEvery == 0 {
		cfg.CheckEvery = DefaultCheckEvery
	}
	a := &Agent{cfg: cfg, components: components{cfg.Balancer, cfg.Announcers}, store: store{cfg.StatePath, (*os.File).Sync, syncFolder}}
	a.stats = Stats{Reconfigurations: map[int]int{}, Drifts: map[string]int{}, Mended: map[string]int{}}
	for _, c := range a.components.balancerFirst() {
		a.stats.Drifts[c.Name()], a.stats.Mended[c.Name()] = 0, 0
	}
	a.stats.Status.Version = cfg.Version
	last, err := a.store.read()
	if err != nil {
		cfg.Log.Error("the gateway starts without a state", "err", err)
	}
	if last != nil && last.State.Cluster != cfg.Cluster {
		return nil, fmt.Errorf("%s belongs to cluster %q and this gateway to %q: remove the file if that is intended", cfg.StatePath, last.State.Cluster, cfg.Cluster)
	}
	if last != nil {
		a.last, a.serves, a.unsettled = last, &last.State, true
		a.stats.Status.Generation, a.stats.Status.Hash = last.Generation, last.Hash
	}
	return a, nil
}

// Run applies the last request, and then checks for drift until ctx is done. It does not close the components.
func (a *Agent) Run(ctx context.Context) {
	for {
		a.check(ctx)
		// The gateways of a group check at different moments.
		wait := time.NewTimer(a.cfg.CheckEvery*9/10 + rand.N(a.cfg.CheckEvery/5+1))
		select {
		case <-ctx.Done():
			wait.Stop()
			return
		case <-wait.C:
		}
	}
}

// Close closes all components, announcers first; see Component.Close. As soon as it begins, the controller gets no
// answer, as from a gateway that is gone: Close would undo what a request applies. Peers get answers as long as Serve
// runs.
func (a *Agent) Close(ctx context.Context, drain bool) error {
	a.closed.Store(true)
	a.mu.Lock()
	defer a.mu.Unlock()
	var errs []error
	for _, c := range a.components.balancerLast() {
		if err := c.Close(ctx, drain); err != nil {
			errs = append(errs, fmt.Errorf("close %s: %w", c.Name(), err))
		}
	}
	return errors.Join(errs...)
}

// errClosed is the error of Reconfigure after Close.
var errClosed = errors.New("the agent is closed")

// Reconfigure applies r. A Service that is wrong, or that a component has no room for, stays as it was, and Status.Refused
// names it. All others are applied, all or nothing. The error is a *Refused or errClosed.
func (a *Agent) Reconfigure(ctx context.Context, r desired.Request) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed.Load() {
		return errClosed
	}
	if again, err := a.admit(&r); again || err != nil {
		return err
	}
	if err := a.apply(ctx, &r); err != nil {
		return err
	}
	a.cfg.Log.Info("reconfigured", "generation", r.Generation, "vips", len(r.State.VIPs), "cordoned", r.State.Cordoned, "refused", len(a.refused))
	return nil
}

// apply makes the gateway serve r, as far as it can; r may be the last request again. After an error, which is a *Refused,
// nothing has changed.
func (a *Agent) apply(ctx context.Context, r *desired.Request) (err error) {
	have, before := empty(&r.State), (*desired.Request)(nil)
	if a.last != nil {
		have, before = a.serves, saved(a.last, a.serves, a.refused)
	}
	var file *prepared
	defer func() { file.drop() }()
	if r != a.last { // most full disks are found before anything changes
		file, err = a.store.prepare(*r)
		if err == nil && a.diskFails {
			err = file.written()
		}
		if err != nil {
			return applyFailed(err)
		}
	}
	serves, refused, err := a.components.change(ctx, have, &r.State)
	if err != nil {
		a.noteStuck(err)
		return applyFailed(err)
	}
	if r == a.last && refused.Error() == a.refused.Error() {
		return nil
	}
	if file == nil || len(refused) > 0 {
		file.drop()
		file, err = a.store.prepare(*saved(r, serves, refused))
	}
	if err == nil {
		err = file.commit(before)
	}
	a.diskFails = err != nil
	if err != nil {
		_, left, back := a.components.change(ctx, serves, have)
		if back == nil && len(left) > 0 { // there is no room any more
			back = left
		}
		if back != nil {
			err = errors.Join(err, errStuck, back)
			a.noteStuck(err)
		}
		return applyFailed(err)
	}
	a.last, a.serves, a.refused, a.unsettled = r, serves, refused, false
	a.applied()
	return nil
}

// saved returns the request that the disk has of one that was applied: what is served, so that a successor keeps it.
func saved(r *desired.Request, serves *desired.State, refused desired.Faults) *desired.Request {
	if len(refused) == 0 {
		return r
	}
	return new(desired.NewRequest(r.Generation, *serves))
}

// retry applies the last request again if Services of it are refused: there may be room for them now.
func (a *Agent) retry(ctx context.Context) {
	if len(a.refused) == 0 {
		return
	}
	if err := a.apply(ctx, a.last); err != nil {
		a.cfg.Log.Warn("cannot try refused Services again", "err", err)
	}
}

// current returns the last request.
func (a *Agent) current() *desired.Request {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.last
}

// noteStuck records the faults of components that may differ from the last request. All other errors of a request leave
// the machine as it was.
func (a *Agent) noteStuck(err error) {
	if errors.Is(err, errStuck) {
		a.unsettled = true
		a.publishDrift(allFaults(err))
	}
}

// admit reports whether r is the request applied last, and returns a *Refused when r cannot be applied.
func (a *Agent) admit(r *desired.Request) (again bool, err error) {
	switch last := a.last; {
	case r.State.Cluster != a.cfg.Cluster:
		return false, refuse(misdirected, "state.cluster is %q, but this gateway is of cluster %q", r.State.Cluster, a.cfg.Cluster)
	case last == nil || r.Generation > last.Generation:
		return false, nil
	case r.Generation < last.Generation:
		return false, refuse(conflict, "generation is %d, but this gateway has %d: read GET /v1/state and continue from there", r.Generation, last.Generation)
	case r.Hash != last.Hash:
		return false, refuse(conflict, "generation %d has another state here: send a new state with a higher generation", r.Generation)
	}
	return true, nil
}

// check applies the last request again to the components that drifted from it.
func (a *Agent) check(ctx context.Context) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.last == nil || a.closed.Load() {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, applyTimeout)
	defer cancel()
	var left desired.Faults
	first, refused := a.unsettled, len(a.refused)
	for _, c := range a.components.balancerFirst() {
		left = append(left, a.mend(ctx, c)...)
	}
	if ctx.Err() != nil {
		return
	}
	a.unsettled = len(left) > 0
	a.publishDrift(left)
	if first && !a.unsettled {
		a.cfg.Log.Info("the gateway matches its state again", "generation", a.last.Generation)
	}
	if !a.unsettled && (first || len(a.refused) > refused) {
		a.applied()
	}
	if !a.unsettled {
		a.retry(ctx)
	}
}

// mend applies the last request to a component that needs it, and returns the faults that remain: a session with a
// neighbour, for instance, comes up in its own time.
func (a *Agent) mend(ctx context.Context, c Component) desired.Faults {
	if !a.unsettled {
		drift, err := c.Drift(ctx)
		if err != nil {
			return faultsOf(c, fmt.Errorf("check for drift: %w", err))
		}
		if len(drift) == 0 {
			return nil
		}
		a.cfg.Log.Warn("component drifted from the applied state; applying it again", "component", c.Name(), "err", desired.Faults(drift))
		a.updateStats(func(s *Stats) { s.Drifts[c.Name()]++ })
	}
	// There may be less room than when the disk got this state.
	serves, refused, err := settle(a.serves, nil, func(s *desired.State) error { return c.Apply(ctx, s) })
	if err != nil {
		return faultsOf(c, err)
	}
	if len(refused) > 0 { // announcers, which follow, must not announce what is not balanced
		a.serves, a.refused, a.unsettled = serves, append(a.refused, refused...), true
	}
	left, err := c.Drift(ctx)
	if err != nil {
		return faultsOf(c, fmt.Errorf("check for drift: %w", err))
	}
	if !a.unsettled && len(left) == 0 {
		a.updateStats(func(s *Stats) { s.Mended[c.Name()]++ })
	}
	return left
}

// applied publishes that all components match the last request, but for the refused Services, and logs these when they change.
func (a *Agent) applied() {
	a.updateStats(func(s *Stats) {
		if text := a.refused.Error(); text != desired.Faults(s.Status.Refused).Error() {
			a.cfg.Log.Warn("refused Services changed", "refused", len(a.refused), "err", text)
		}
		s.Status.Generation, s.Status.Hash, s.Status.Since, s.Status.Refused = a.last.Generation, a.last.Hash, time.Now().UTC(), a.refused
	})
	a.publishDrift(nil)
}

// publishDrift publishes the remaining faults, and logs them when they change.
func (a *Agent) publishDrift(faults desired.Faults) {
	a.updateStats(func(s *Stats) {
		if text := faults.Error(); text != "" && text != desired.Faults(s.Status.Drift).Error() {
			a.cfg.Log.Error("the gateway does not match its state", "err", text)
		}
		s.Status.Drift = faults
		s.Ready = a.last != nil && !a.unsettled
	})
}

func (a *Agent) updateStats(f func(*Stats)) {
	a.statsMu.Lock()
	defer a.statsMu.Unlock()
	f(&a.stats)
}

// Stats returns the current statistics. It waits for no component.
func (a *Agent) Stats() Stats {
	a.statsMu.Lock()
	s := a.stats
	s.Reconfigurations, s.Drifts, s.Mended = maps.Clone(s.Reconfigurations), maps.Clone(s.Drifts), maps.Clone(s.Mended)
	a.statsMu.Unlock()
	for _, announcer := range a.components.announcers {
		s.Status.Announced = append(s.Status.Announced, announcer.Announced()...)
	}
	slices.SortFunc(s.Status.Announced, netip.Addr.Compare)
	return s
}
