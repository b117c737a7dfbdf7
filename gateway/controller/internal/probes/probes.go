// Package probes asks nodes, at the health check port of a Service, whether they accept its connections. With
// externalTrafficPolicy Local, only nodes with endpoints do (Kubernetes API, spec.healthCheckNodePort). A dead node is
// noticed within seconds here, while the API server waits for its Lease to expire.
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
	// DefaultPeriod is the time between two probes of a node.
	DefaultPeriod = 2 * time.Second
	// DefaultTimeout bounds one probe.
	DefaultTimeout = time.Second
	// missedLimit is the number of consecutive failed probes after which a node is silent.
	missedLimit = 3
	// maxConcurrent bounds the concurrent probes.
	maxConcurrent = 64
)

// Answer is the last result for a node.
type Answer int

const (
	// Unknown nodes have not answered yet.
	Unknown Answer = iota
	// Serving nodes accept connections.
	Serving
	// Refusing nodes have no endpoints.
	Refusing
	// Silent nodes missed several probes.
	Silent
)

// Config holds the settings of a Prober.
type Config struct {
	// Period and Timeout have defaults for 0.
	Period, Timeout time.Duration
	// Changed is called after an answer changed, perhaps from several goroutines at a time.
	Changed func()
}

// Prober probes nodes. Its methods may be called from any goroutine.
type Prober struct {
	ctx    context.Context
	cfg    Config
	client *http.Client
	slots  chan struct{}
	group  sync.WaitGroup

	mu    sync.Mutex
	nodes map[netip.AddrPort]*node
}

// node is a probed node.
type node struct {
	stop   context.CancelFunc
	answer Answer
	missed int // consecutive failed probes
}

// New returns a prober without nodes. It ends with ctx; Wait returns when it has ended.
func New(ctx context.Context, cfg Config) *Prober {
	if cfg.Period == 0 {
		cfg.Period = DefaultPeriod
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = DefaultTimeout
	}
	transport := &http.Transport{MaxIdleConnsPerHost: 1, IdleConnTimeout: 3 * cfg.Period} // its own, without the proxy of the environment
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

// Set replaces the probed nodes, each an address with the health check port of a Service. Answers of other nodes are
// forgotten.
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

// Answers returns the last answers of the probed nodes.
func (p *Prober) Answers() map[netip.AddrPort]Answer {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := make(map[netip.AddrPort]Answer, len(p.nodes))
	for at, n := range p.nodes {
		all[at] = n.answer
	}
	return all
}

// Wait returns when all probes have ended, after the end of New's context.
func (p *Prober) Wait() { p.group.Wait() }

// probe probes a node once.
func (p *Prober) probe(ctx context.Context, n *node, at netip.AddrPort) {
	select {
	case p.slots <- struct{}{}:
		defer func() { <-p.slots }()
	case <-ctx.Done():
		return
	}
	code, err := p.get(ctx, at)
	if ctx.Err() != nil {
		return // it was cancelled
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
	_, err = io.CopyN(io.Discard, resp.Body, 4096) // the connection can be reused once the body is read
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return resp.StatusCode, err
}
