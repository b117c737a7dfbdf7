// Package agents sends desired states to the gateways' agents. Each gateway has a goroutine that retries until the
// gateway has its state, so an unreachable gateway delays no other.
package agents

import (
	"context"
	"crypto/tls"
	"log/slog"
	"maps"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/isthmus-net/isthmus/gateway/certs"
	"github.com/isthmus-net/isthmus/gateway/desired"
)

// Config holds the settings of Clients.
type Config struct {
	// TLS returns the configuration for connecting to the agent with an identity.
	TLS func(identity string) *tls.Config
	// Timeout bounds one request; 0: 5 s.
	Timeout time.Duration
	// Poll is how often a gateway with the current state is asked for its status; 0: 5 s.
	Poll time.Duration
	// SetTimeout bounds how long Set waits for gateways that answered last time; 0: 2 s.
	SetTimeout time.Duration
	// Retry bounds the pause before an unreachable gateway is tried again; 0: 2 s.
	Retry time.Duration
	// MaxAge is the age at which a connection is replaced, so that renewed certificates are used; 0: 1 minute.
	MaxAge time.Duration
	// Fence returns an error when this process is no longer the leader. It is called before a gateway's newer generation
	// is overruled. Nil: this process always leads.
	Fence func(context.Context) error
	// Sign signs the request of a gateway whose certificate is due for renewal, for its identity and with the lifetime of the certificate
	// that it has. Nil: certificates are not renewed.
	Sign func(ctx context.Context, identity string, request []byte, has certs.Validity) (certificate []byte, err error)
	// Renewed is called from any goroutine when a certificate was renewed, or with the error.
	Renewed func(gateway string, err error)
	// RetryRenewal is the pause after an error; 0: 1 hour.
	RetryRenewal time.Duration
	// Changed is called from any goroutine when a Report changes.
	Changed func()
	Log     *slog.Logger
}

// Target is a gateway with its desired state.
type Target struct {
	URL string
	// Identity is the name in the agent's certificate.
	Identity string
	State    desired.State
	// Hold means that there is no valid State: the gateway keeps its current one.
	Hold bool
}

// Report is the status of a gateway.
type Report struct {
	// Err is why it does not answer; nil while it does.
	Err error
	// Refused is its answer to the current target; nil if it did not refuse it.
	Refused *Refused
	// Status is its last answer. Applied says that it matches the target.
	Status  desired.Status
	Applied bool
	// Asked says that it was contacted at least once.
	Asked bool
	// Certificate is the validity of its certificate, as of its last answer.
	Certificate certs.Validity
}

// Clients are the clients of all gateways. Their methods are for one goroutine, except Reports.
type Clients struct {
	cfg Config
	ctx context.Context // of New, because clients start and stop during Set

	group sync.WaitGroup

	mu         sync.Mutex
	generation uint64
	byName     map[string]*client
}

// New returns Clients without gateways. Their goroutines end with ctx.
func New(ctx context.Context, c Config) *Clients {
	defaults := func(d *time.Duration, by time.Duration) {
		if *d == 0 {
			*d = by
		}
	}
	defaults(&c.Timeout, 5*time.Second)
	defaults(&c.Poll, 5*time.Second)
	defaults(&c.SetTimeout, 2*time.Second)
	defaults(&c.Retry, 2*time.Second)
	defaults(&c.MaxAge, time.Minute)
	defaults(&c.RetryRenewal, time.Hour)
	if c.Fence == nil {
		c.Fence = func(context.Context) error { return nil }
	}
	if c.Changed == nil {
		c.Changed = func() {}
	}
	return &Clients{cfg: c, ctx: ctx, byName: map[string]*client{}}
}

// ReadGenerations reads the generations of gateways, so that the next one is higher than all of them. A gateway that does
// not answer is asked again before it receives a state.
func (f *Clients) ReadGenerations(ctx context.Context, targets map[string]Target) {
	var group errgroup.Group
	for _, t := range targets {
		group.Go(func() error {
			p := newAPI(t.URL, f.cfg.TLS(t.Identity), f.cfg.Timeout, f.cfg.MaxAge)
			defer p.close()
			if s, err := p.state(ctx); err == nil {
				f.raiseGeneration(s.Generation)
			}
			return nil
		})
	}
	_ = group.Wait() // no function returns an error
}

// raiseGeneration makes the next generation higher than a gateway's.
func (f *Clients) raiseGeneration(generation uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.generation = max(f.generation, generation)
}

// nextGeneration returns a generation higher than any known one.
func (f *Clients) nextGeneration() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.generation++
	return f.generation
}

// Set replaces the gateways and their desired states, by name. It returns when those that answered last time have been
// tried, or after SetTimeout. Gateways that are no longer named keep their state.
func (f *Clients) Set(ctx context.Context, targets map[string]Target) {
	ctx, cancel := context.WithTimeout(ctx, f.cfg.SetTimeout)
	defer cancel()
	f.mu.Lock()
	var gone []*client
	for name, l := range f.byName {
		if t, ok := targets[name]; !ok || t.URL != l.url || t.Identity != l.identity {
			gone = append(gone, l)
			delete(f.byName, name)
		}
	}
	var waiting []<-chan struct{}
	for name, t := range targets {
		if t.Hold {
			continue
		}
		l := f.byName[name]
		if l == nil {
			l = f.newClient(name, t)
			f.byName[name] = l
		}
		if done := l.set(t.State); done != nil {
			waiting = append(waiting, done)
		}
	}
	f.mu.Unlock()
	for _, l := range gone {
		l.stop()
	}
	for _, done := range waiting {
		select {
		case <-done:
		case <-ctx.Done():
			return
		}
	}
}

// Reports returns the status of all gateways by name.
func (f *Clients) Reports() map[string]Report {
	f.mu.Lock()
	links := maps.Clone(f.byName)
	f.mu.Unlock()
	all := make(map[string]Report, len(links))
	for name, l := range links {
		all[name] = l.current()
	}
	return all
}

// Wait returns when all goroutines have ended, after the end of New's context.
func (f *Clients) Wait() { f.group.Wait() }
