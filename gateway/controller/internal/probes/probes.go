// Package probes asks nodes, at the health check port of a Service, whether they take its connections. With
// externalTrafficPolicy Local those do that have endpoints of it (Kubernetes API, spec.healthCheckNodePort). A node
// that died is noticed here within seconds, while the API server waits for its Lease to grow old.
package probes

import (
	"context"
	"errors"
	"io"
	"maps"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

const (
	// DefaultPeriod is from one question to the next.
	DefaultPeriod = 2 * time.Second
	// DefaultTimeout is how long an answer may take.
	DefaultTimeout = time.Second
	// patience is after how many questions in a row without an answer a node is silent.
	missedLimit = 3
	// atOnce bounds the questions under way.
	maxConcurrent = 64
)

// Answer is what a node said last.
type Answer int

const (
	// Unknown is that of a node which has not answered yet.
	Unknown Answer = iota
	// Serving takes connections.
	Serving
	// Refusing has no endpoints that do.
	Refusing
	// Silent has not answered several times.
	Silent
)

// Config says how to ask.
type Config struct {
	// Period and Timeout are the defaults where they are 0.
	Period, Timeout time.Duration
	// Changed is called after an answer became another one. It may be called from several goroutines at a time.
	Changed func()
}

// Prober asks nodes. Its methods may be called from any goroutine.
type Prober struct {
	ctx    context.Context
	cfg    Config
	client *http.Client
	slots  chan struct{}
	group  sync.WaitGroup

	mu    sync.Mutex
	nodes map[netip.AddrPort]*node
}

// node is one that is asked.
type node struct {
	stop   context.CancelFunc
	answer Answer
	missed int // questions in a row
}

// New returns a prober that asks nobody yet. It ends with ctx; Wait returns when it has.
func New(ctx context.Context, cfg Config) *Prober {
	if cfg.Period == 0 {
		cfg.Period = DefaultPeriod
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = DefaultTimeout
	}
	transport := &http.Transport{MaxIdleConnsPerHost: 1, IdleConnTimeout: 3 * cfg.Period} // of its own: no proxy of the environment
	p := &Prober{
		ctx: ctx, cfg: cfg, slots: make(chan struct{}, maxConcurrent), nodes: map[netip.AddrPort]*node{},
		client: &http.Client{
			Transport: transport, Timeout: cfg.Timeout,
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}
	context.AfterFunc(ctx, transport.CloseIdleConnections)
	return p
}

// Ask makes these the nodes that are asked, each at the health check port of a Service. What others said is forgotten.
func (p *Prober) Set(all map[netip.AddrPort]bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	maps.DeleteFunc(p.nodes, func(at netip.AddrPort, n *node) bool {
		if !all[at] {
			n.stop()
		}
		return !all[at]
	})
	for at := range all {
		if p.nodes[at] != nil {
			continue
		}
		ctx, stop := context.WithCancel(p.ctx)
		n := &node{stop: stop}
		p.nodes[at] = n
		p.group.Go(func() {
			wait.JitterUntilWithContext(ctx, func(ctx context.Context) { p.probe(ctx, n, at) }, p.cfg.Period, 0.1, true)
		})
	}
}

// Answers are what the nodes that are asked said last.
func (p *Prober) Answers() map[netip.AddrPort]Answer {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := make(map[netip.AddrPort]Answer, len(p.nodes))
	for at, n := range p.nodes {
		all[at] = n.answer
	}
	return all
}

// Wait returns when nothing is asked any more, which is after the end of New's context.
func (p *Prober) Wait() { p.group.Wait() }

// ask puts the question once.
func (p *Prober) probe(ctx context.Context, n *node, at netip.AddrPort) {
	select {
	case p.slots <- struct{}{}:
		defer func() { <-p.slots }()
	case <-ctx.Done():
		return
	}
	code, err := p.get(ctx, at)
	if ctx.Err() != nil {
		return // it was cut short
	}
	p.mu.Lock()
	was := n.answer
	switch {
	case err != nil:
		if n.missed++; n.missed >= missedLimit {
			n.answer = Silent
		}
	case code == http.StatusOK:
		n.answer, n.missed = Serving, 0
	default:
		n.answer, n.missed = Refusing, 0
	}
	changed := n.answer != was
	p.mu.Unlock()
	if changed {
		p.cfg.Changed()
	}
}

func (p *Prober) get(ctx context.Context, at netip.AddrPort) (code int, err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+at.String()+"/healthz", http.NoBody)
	if err != nil {
		return 0, err
	}
	resp, err := p.client.Do(r)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	_, err = io.CopyN(io.Discard, resp.Body, 4096) // its end lets the connection be used again
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return resp.StatusCode, err
}
