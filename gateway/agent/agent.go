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

// DefaultCheckEvery is how often parts are asked what somebody else changed.
const DefaultCheckEvery = 5 * time.Second

// Config is what an Agent needs to know. All but CheckEvery and Flows must be set.
type Config struct {
	// Cluster is the id of the cluster whose controller is obeyed.
	Cluster string
	// Parts do the work.
	Parts []Part
	// StatePath is the file, in a folder that exists, in which the last request is kept.
	StatePath string
	// CheckEvery is about how often drift is looked for; 0 is DefaultCheckEvery.
	CheckEvery time.Duration
	// Flows answers other gateways; see package flows. It looks itself who calls.
	Flows   http.Handler
	Version string
	Log     *slog.Logger
}

// Agent is a gateway's one control loop.
type Agent struct {
	cfg   Config
	store store

	mu sync.Mutex // held while parts change; guards what follows
	// last is what was asked for last and is applied, or will be as soon as it can; nil when nothing was yet.
	last *desired.Request
	// unsure means that parts are perhaps not as last says: they are told again.
	unsure bool
	// closed is set before mu is taken to close the parts, which nobody tells anything after that.
	closed atomic.Bool

	see  sync.Mutex // guards what follows; taken after mu
	seen Sight
}

// Sight is what there is to see of an agent.
type Sight struct {
	Status desired.Status
	// Ready means that all parts are as the last request says.
	Ready bool
	// Reconfigurations counts requests by their HTTP status, Drifts by part how often something began to be other than
	// applied, Mended how often that was put right at once.
	Reconfigurations map[int]int
	Drifts, Mended   map[string]int
}

// New returns the agent of a gateway, with what an earlier one left on disk. A file that is broken is put aside and logged:
// then the gateway goes on as it is until a controller speaks.
func New(cfg Config) (*Agent, error) {
	if cfg.CheckEvery == 0 {
		cfg.CheckEvery = DefaultCheckEvery
	}
	a := &Agent{cfg: cfg, store: store{cfg.StatePath, syncFolder}}
	a.seen = Sight{Reconfigurations: map[int]int{}, Drifts: map[string]int{}, Mended: map[string]int{}}
	a.seen.Status.Version = cfg.Version
	last, err := a.store.read()
	if err != nil {
		cfg.Log.Error("start without a state", "err", err)
	}
	if last != nil && last.State.Cluster != cfg.Cluster {
		return nil, fmt.Errorf("%s is of cluster %q and this gateway of %q: remove the file if that is meant", cfg.StatePath, last.State.Cluster, cfg.Cluster)
	}
	if last != nil {
		a.last, a.unsure = last, true
		a.seen.Status.Generation, a.seen.Status.Hash = last.Generation, last.Hash
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
	balancers, announcers := split(a.cfg.Parts)
	var errs []error
	for _, p := range slices.Concat(announcers, balancers) {
		if err := p.Close(ctx, drain); err != nil {
			errs = append(errs, fmt.Errorf("close %s: %w", p.Name(), err))
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
	have := nothing(&r.State)
	if a.last != nil {
		have = &a.last.State
	}
	file, err := a.store.prepare(r)
	if err != nil {
		return failed(err)
	}
	if err := change(ctx, a.cfg.Parts, have, &r.State); err != nil {
		file.drop()
		a.stuck(err)
		return failed(err)
	}
	if err := file.commit(a.last); err != nil {
		file.drop()
		if back := change(ctx, a.cfg.Parts, &r.State, have); back != nil {
			err = errors.Join(err, errStuck, back)
			a.stuck(err)
		}
		return failed(err)
	}
	a.last, a.unsure = &r, false
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
func (a *Agent) stuck(err error) {
	if errors.Is(err, errStuck) {
		a.unsure = true
		a.tell(allFaults(err))
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
	balancers, announcers := split(a.cfg.Parts)
	for _, p := range slices.Concat(balancers, announcers) {
		left = append(left, a.mend(ctx, p)...)
	}
	if ctx.Err() != nil {
		return
	}
	first := a.unsure
	a.unsure = len(left) > 0
	a.tell(left)
	if first && !a.unsure {
		a.cfg.Log.Info("as wanted", "generation", a.last.Generation)
		a.applied()
	}
}

// mend tells one part again, where that is needed, and returns what is still wrong: a neighbour that is away comes back in
// its own time.
func (a *Agent) mend(ctx context.Context, p Part) desired.Faults {
	if !a.unsure {
		drift, err := p.Drift(ctx)
		if err != nil {
			return faultsOf(p, fmt.Errorf("look for drift: %w", err))
		}
		if len(drift) == 0 {
			return nil
		}
		a.cfg.Log.Warn("a part is not as this gateway made it; making it again", "part", p.Name(), "err", desired.Faults(drift))
		a.count(func(s *Sight) { s.Drifts[p.Name()]++ })
	}
	if err := p.Apply(ctx, &a.last.State); err != nil {
		return faultsOf(p, err)
	}
	left, err := p.Drift(ctx)
	if err != nil {
		return faultsOf(p, fmt.Errorf("look for drift: %w", err))
	}
	if !a.unsure && len(left) == 0 {
		a.count(func(s *Sight) { s.Mended[p.Name()]++ })
	}
	return left
}

// applied publishes that parts are as the last request says.
func (a *Agent) applied() {
	a.count(func(s *Sight) {
		s.Status.Generation, s.Status.Hash, s.Status.Since = a.last.Generation, a.last.Hash, time.Now().UTC()
	})
	a.tell(nil)
}

// tell publishes what is not as the last request says, and logs it when that is news.
func (a *Agent) tell(faults desired.Faults) {
	a.count(func(s *Sight) {
		if text := faults.Error(); text != "" && text != desired.Faults(s.Status.Drift).Error() {
			a.cfg.Log.Error("the gateway is not as wanted", "err", text)
		}
		s.Status.Drift = faults
		s.Ready = a.last != nil && !a.unsure
	})
}

func (a *Agent) count(f func(*Sight)) {
	a.see.Lock()
	defer a.see.Unlock()
	f(&a.seen)
}

// Sight returns what there is to see now. It waits for no part.
func (a *Agent) Sight() Sight {
	a.see.Lock()
	s := a.seen
	s.Reconfigurations, s.Drifts, s.Mended = maps.Clone(s.Reconfigurations), maps.Clone(s.Drifts), maps.Clone(s.Mended)
	a.see.Unlock()
	for _, p := range a.cfg.Parts {
		if announcer, ok := p.(Announcer); ok {
			s.Status.Announced = append(s.Status.Announced, announcer.Announced()...)
		}
	}
	slices.SortFunc(s.Status.Announced, netip.Addr.Compare)
	return s
}
