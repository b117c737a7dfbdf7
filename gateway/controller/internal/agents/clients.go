// Package agents tells the gateways' agents what to do. Each gateway has a goroutine that goes on until the gateway has
// what it should have: one that does not answer gets it when it is back, and nobody waits for it.
package agents

import (
	"context"
	"crypto/tls"
	"log/slog"
	"maps"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

// Config says how to talk to gateways.
type Config struct {
	// TLS returns the configuration to connect to the agent with an identity.
	TLS func(identity string) *tls.Config
	// Timeout is for one request; 0: 5 s.
	Timeout time.Duration
	// Poll is how often a gateway that has everything is asked how it is; 0: 5 s.
	Poll time.Duration
	// Patience is how long Set waits for those that answered the last time; 0: 2 s.
	SetTimeout time.Duration
	// Retry bounds how long a gateway that does not answer is left alone; 0: 2 s.
	Retry time.Duration
	// Fence returns an error when this process is no longer the one that works. It is asked before a newer generation of
	// a gateway is overruled. Nil: it always is.
	Fence func(context.Context) error
	// Changed is called, from any goroutine, when a Report is another one than before.
	Changed func()
	Log     *slog.Logger
}

// Target is a gateway and what it is to have.
type Target struct {
	URL string
	// Identity is what the agent's certificate must say.
	Identity string
	State    desired.State
	// Hold says that State is none, and that it keeps what it has.
	Hold bool
}

// Report is how a gateway is doing.
type Report struct {
	// Err says why it does not answer; nil while it does.
	Err error
	// Refused is what it said to the state that it is to have now; nil when it did not refuse it.
	Refused *Refused
	// Status is what it said last. Applied says that this is what it is to have.
	Status  desired.Status
	Applied bool
	// Asked says that it was spoken to since it is known.
	Asked bool
}

// Fleet is all gateways. Its methods are for one goroutine, Reports for any.
type Clients struct {
	cfg Config
	ctx context.Context // of New: links begin and end between two calls of Set

	group sync.WaitGroup

	mu         sync.Mutex
	generation uint64
	byName     map[string]*client
}

// New returns a fleet without gateways, whose goroutines end with ctx.
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
	if c.Fence == nil {
		c.Fence = func(context.Context) error { return nil }
	}
	if c.Changed == nil {
		c.Changed = func() {}
	}
	return &Clients{cfg: c, ctx: ctx, byName: map[string]*client{}}
}

// Learn asks gateways what they have, so that the next generation is higher than all of them. Those that do not answer are
// asked when they do, before they are told anything.
func (f *Clients) ReadGenerations(ctx context.Context, targets map[string]Target) {
	var group errgroup.Group
	for _, t := range targets {
		group.Go(func() error {
			p := newAPI(t.URL, f.cfg.TLS(t.Identity), f.cfg.Timeout)
			defer p.close()
			if s, err := p.state(ctx); err == nil {
				f.raiseGeneration(s.Generation)
			}
			return nil
		})
	}
	_ = group.Wait() // none has an error
}

// overtake makes the next generation higher than one that a gateway has.
func (f *Clients) raiseGeneration(generation uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.generation = max(f.generation, generation)
}

// next returns a generation that no gateway has.
func (f *Clients) nextGeneration() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.generation++
	return f.generation
}

// Set says which gateways there are, by name, and what each is to have. It returns when those that answered the last time
// were told, or patience is over. Gateways that are no longer named are left with what they have.
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
	var told []<-chan struct{}
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
			told = append(told, done)
		}
	}
	f.mu.Unlock()
	for _, l := range gone {
		l.stop()
	}
	for _, done := range told {
		select {
		case <-done:
		case <-ctx.Done():
			return
		}
	}
}

// Reports tells how all gateways are doing, by name.
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

// Wait returns when all goroutines have ended, which they do with the context of New.
func (f *Clients) Wait() { f.group.Wait() }
