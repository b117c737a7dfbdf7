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
	// last is the last request that was accepted; nil before the first one. It is applied, or retried until it is.
	last *desired.Request
	// unsettled says that components may differ from last: check applies it again.
	unsettled bool
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
	a := &Agent{cfg: cfg, components: components{cfg.Balancer, cfg.Announcers}, store: store{cfg.StatePath, syncFolder}}
	a.stats = Stats{Reconfigurations: map[int]int{}, Drifts: map[string]int{}, Mended: map[string]int{}}
	for _, c := range a.components.balancerFirst() {
		a.stats.Drifts[c.Name()], a.stats.Mended[c.Name()] = 0, 0
	}
	a.stats.Status.Version = cfg.Version
	last, err := a.store.read()
	if err != nil {
		cfg.Log.Error("start without a state", "err", err)
	}
	if last != nil && last.State.Cluster != cfg.Cluster {
		return nil, fmt.Errorf("%s is of cluster %q and this gateway of %q: remove the file if that is meant", cfg.StatePath, last.State.Cluster, cfg.Cluster)
	}
	if last != nil {
		a.last, a.unsettled = last, true
		a.stats.Status.Generation, a.stats.Status.Hash = last.Generation, last.Hash
	}
	return a, nil
}

// Run applies what was on disk, and then mends what drifts, until ctx is done. It does not Close the parts.
func (a *Agent) Run(ctx context.Context) {
	for {
		a.check(ctx)
		// Gateways of a group do not look at the same moment.
		wait := time.NewTimer(a.cfg.CheckEvery*9/10 + rand.N(a.cfg.CheckEvery/5+1))
		select {
		case <-ctx.Done():
			wait.Stop()
			return
		case <-wait.C:
		}
	}
}

// Close ends all parts, announcers first; see Part.Close. From its beginning on a controller gets no answer, as from a
// gateway that is gone: what it says would be undone. Other gateways get theirs as long as Serve runs.
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

// errClosed is why an agent does nothing after Close.
var errClosed = errors.New("the agent is closed")

// Reconfigure makes the gateway as r says, all or nothing. The error is a *Refused, or that the agent is closed.
func (a *Agent) Reconfigure(ctx context.Context, r desired.Request) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed.Load() {
		return errClosed
	}
	if again, err := a.admit(&r); again || err != nil {
		return err
	}
	have := empty(&r.State)
	if a.last != nil {
		have = &a.last.State
	}
	file, err := a.store.prepare(r)
	if err != nil {
		return applyFailed(err)
	}
	if err := a.components.change(ctx, have, &r.State); err != nil {
		file.drop()
		a.noteStuck(err)
		return applyFailed(err)
	}
	if err := file.commit(a.last); err != nil {
		file.drop()
		if back := a.components.change(ctx, &r.State, have); back != nil {
			err = errors.Join(err, errStuck, back)
			a.noteStuck(err)
		}
		return applyFailed(err)
	}
	a.last, a.unsettled = &r, false
	a.cfg.Log.Info("reconfigured", "generation", r.Generation, "vips", len(r.State.VIPs), "cordoned", r.State.Cordoned)
	a.applied()
	return nil
}

// current is what was asked for last.
func (a *Agent) current() *desired.Request {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.last
}

// stuck takes note of parts that are perhaps not as they were. Whatever else is wrong with a request is no news of the machine.
func (a *Agent) noteStuck(err error) {
	if errors.Is(err, errStuck) {
		a.unsettled = true
		a.publishDrift(allFaults(err))
	}
}

// admit reports whether a request is the one that was applied last, and returns why it is none that can be applied.
func (a *Agent) admit(r *desired.Request) (again bool, err error) {
	switch last := a.last; {
	case r.State.Cluster != a.cfg.Cluster:
		return false, refuse(misdirected, "state.cluster is %q, but this gateway is of cluster %q", r.State.Cluster, a.cfg.Cluster)
	case last == nil || r.Generation > last.Generation:
		return false, nil
	case r.Generation < last.Generation:
		return false, refuse(conflict, "generation is %d, but this gateway has %d: read GET /v1/state and go on from there", r.Generation, last.Generation)
	case r.Hash != last.Hash:
		return false, refuse(conflict, "generation %d is of another state here: what is new needs a higher one", r.Generation)
	}
	return true, nil
}

// check tells the parts again what they are to be where they are not.
func (a *Agent) check(ctx context.Context) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.last == nil || a.closed.Load() {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, applyTimeout)
	defer cancel()
	var left desired.Faults
	for _, c := range a.components.balancerFirst() {
		left = append(left, a.mend(ctx, c)...)
	}
	if ctx.Err() != nil {
		return
	}
	first := a.unsettled
	a.unsettled = len(left) > 0
	a.publishDrift(left)
	if first && !a.unsettled {
		a.cfg.Log.Info("as wanted", "generation", a.last.Generation)
		a.applied()
	}
}

// mend tells one part again, where that is needed, and returns what is still wrong: a neighbour that is away comes back in
// its own time.
func (a *Agent) mend(ctx context.Context, c Component) desired.Faults {
	if !a.unsettled {
		drift, err := c.Drift(ctx)
		if err != nil {
			return faultsOf(c, fmt.Errorf("look for drift: %w", err))
		}
		if len(drift) == 0 {
			return nil
		}
		a.cfg.Log.Warn("component drifted from the applied state; applying it again", "component", c.Name(), "err", desired.Faults(drift))
		a.updateStats(func(s *Stats) { s.Drifts[c.Name()]++ })
	}
	if err := c.Apply(ctx, &a.last.State); err != nil {
		return faultsOf(c, err)
	}
	left, err := c.Drift(ctx)
	if err != nil {
		return faultsOf(c, fmt.Errorf("look for drift: %w", err))
	}
	if !a.unsettled && len(left) == 0 {
		a.updateStats(func(s *Stats) { s.Mended[c.Name()]++ })
	}
	return left
}

// applied publishes that parts are as the last request says.
func (a *Agent) applied() {
	a.updateStats(func(s *Stats) {
		s.Status.Generation, s.Status.Hash, s.Status.Since = a.last.Generation, a.last.Hash, time.Now().UTC()
	})
	a.publishDrift(nil)
}

// tell publishes what is not as the last request says, and logs it when that is news.
func (a *Agent) publishDrift(faults desired.Faults) {
	a.updateStats(func(s *Stats) {
		if text := faults.Error(); text != "" && text != desired.Faults(s.Status.Drift).Error() {
			a.cfg.Log.Error("the gateway is not as wanted", "err", text)
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

// Sight returns what there is to see now. It waits for no part.
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
