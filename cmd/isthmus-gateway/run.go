package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/isthmus-net/isthmus/cmd/internal/httpserver"
	"github.com/isthmus-net/isthmus/cmd/internal/version"
	"github.com/isthmus-net/isthmus/gateway/agent"
	"github.com/isthmus-net/isthmus/gateway/bgp"
	"github.com/isthmus-net/isthmus/gateway/certs"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/ebpf"
	"github.com/isthmus-net/isthmus/gateway/flows"
	"github.com/isthmus-net/isthmus/gateway/nft"
	"github.com/isthmus-net/isthmus/gateway/vrrp"
)

// closeTimeout bounds the drain. The gateway ends after it, even where neighbours still send packets here.
const closeTimeout = 20 * time.Second

// lastHandshakes is how long a drained gateway goes on exchanging flows after neighbours have moved their traffic. Connections whose
// handshake was under way open here, by packets that the other gateway hands over, and are then sent to it.
const lastHandshakes = time.Second

// gateway is the running process: its agent, and everything that answers the outside.
type gateway struct {
	cfg      Config
	certs    *certs.Source
	balancer balancer
	exchange *flows.Exchange
	agent    *agent.Agent
	mark     mark
	log      *slog.Logger

	lastHandshakes time.Duration // see the constant
}

// run runs a gateway until a signal ends it. SIGTERM and SIGINT drain it first; SIGHUP leaves traffic in place, for a
// restart.
func run(ctx context.Context, cfg Config, log *slog.Logger) error {
	ctx, received, stop := untilSignal(ctx)
	defer stop()
	g, err := newGateway(cfg, log)
	if err != nil {
		return err
	}
	return g.serve(ctx, func() error {
		drain := false // a process that fails leaves traffic in place for its successor
		select {
		case s := <-received:
			drain = s != syscall.SIGHUP
			log.Info("gateway ends", "signal", s.String(), "drain", drain)
		default:
		}
		return g.close(ctx, drain)
	})
}

// untilSignal returns a context that SIGTERM, SIGINT or SIGHUP ends, and a channel that then holds the signal.
func untilSignal(ctx context.Context) (context.Context, <-chan os.Signal, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	signals, received := make(chan os.Signal, 1), make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, os.Interrupt, syscall.SIGHUP)
	go func() {
		select {
		case s := <-signals:
			received <- s
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, received, func() {
		signal.Stop(signals)
		cancel()
	}
}

// newGateway reads the certificates and the last state, and opens the balancer.
func newGateway(cfg Config, log *slog.Logger) (*gateway, error) {
	for _, dir := range []string{cfg.StateDir, cfg.RunDir} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, fmt.Errorf("make a folder: %w", err)
		}
	}
	g := &gateway{cfg: cfg, mark: mark(filepath.Join(cfg.RunDir, "serving")), log: log, lastHandshakes: lastHandshakes}
	var err error
	if cfg.Renewal {
		cfg.Files.Renewed = filepath.Join(cfg.StateDir, "renewed.pem")
	}
	if g.certs, err = certs.Open(cfg.Files, log); err != nil {
		return nil, fmt.Errorf("%w; isthmusctl gateway certs makes them", err)
	}
	if g.balancer, err = newBalancer(cfg, log); err != nil {
		return nil, err
	}
	g.exchange = flows.New(g.balancer, g.certs, log)
	announcers, err := newAnnouncers(cfg, g.mark, log)
	if err != nil {
		return nil, err
	}
	g.agent, err = agent.New(agent.Config{
		Cluster: cfg.Cluster, Balancer: &sharing{balancer: g.balancer, exchange: g.exchange}, Announcers: announcers, Flows: g.exchange,
		StatePath: cfg.statePath(), CheckEvery: cfg.CheckEvery, Version: version.String(), Log: log,
	})
	return g, err
}

// newAnnouncers returns every announcer of this release. A new one is one more entry here.
func newAnnouncers(cfg Config, m mark, log *slog.Logger) ([]agent.Announcer, error) {
	restarting, err := m.isSet()
	if err != nil {
		return nil, fmt.Errorf("look for a predecessor: %w", err)
	}
	router, err := vrrp.New(vrrp.Config{Dir: cfg.vrrpDir(), Log: log})
	if err != nil {
		return nil, err
	}
	return []agent.Announcer{
		bgp.New(bgp.Config{Restarting: restarting, Realtime: true, Log: log}),
		router,
	}, nil
}

// balancer is a balancer whose connections other gateways can take over.
type balancer interface {
	agent.Component
	flows.Sharer
	// Counts returns the flows of each Service and their traffic, Refusals the packets that were refused or dropped, and HandedOver the
	// packets that peers got, for metrics.
	Counts() (map[flows.CountKey]flows.Counts, error)
	Refusals() (map[flows.Refusal]uint64, error)
	HandedOver() uint64
}

func newBalancer(cfg Config, log *slog.Logger) (balancer, error) {
	if cfg.Balancer == string(desired.EBPF) {
		return ebpf.Open(ebpf.Config{BPFFS: cfg.BPFFS, Devices: cfg.Devices, XDP: ebpf.XDP(cfg.XDP), Flows: cfg.Flows, Log: log})
	}
	return nft.New(log)
}

// sharing is a balancer that exchanges flows with its peers whenever a state moves traffic from or to this gateway.
type sharing struct {
	balancer
	exchange *flows.Exchange
	cordoned bool
}

// Close implements agent.Component. The balancer stays open for the last handshakes; gateway.serve closes it.
func (*sharing) Close(context.Context, bool) error { return nil }

// Apply implements agent.Component. The agent announces or withdraws VIPs right after it: from then on packets arrive
// here that belong to connections of a peer, or the other way round.
func (s *sharing) Apply(ctx context.Context, state *desired.State) error {
	if err := s.balancer.Apply(ctx, state); err != nil {
		return err
	}
	was := s.cordoned
	s.cordoned = state.Cordoned
	s.exchange.SetPeers(state.Peers)
	s.exchange.PullAll(ctx, was && !s.cordoned)
	if s.cordoned && !was {
		s.exchange.PushAll(ctx)
	}
	return nil
}

// serve runs the agent and its listeners until ctx is done or one of them fails. It then calls leave, which closes the
// agent. Connections still begin here until neighbours have gone elsewhere, so flows are exchanged until leave returns. The balancer is
// closed last.
func (g *gateway) serve(ctx context.Context, leave func() error) (err error) {
	defer func() { err = errors.Join(err, g.balancer.Close(context.WithoutCancel(ctx), false)) }()
	endpoint, status, err := listen(ctx, g.cfg)
	if err != nil {
		return errors.Join(err, leave())
	}
	if err := g.mark.set(); err != nil {
		return errors.Join(err, endpoint.Close(), status.Close(), leave())
	}
	draining, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	group, serving := errgroup.WithContext(draining)
	group.Go(func() error {
		g.exchange.Run(serving)
		return nil
	})
	group.Go(func() error { return g.agent.Serve(serving, endpoint, g.certs, g.cfg.Controller) })
	group.Go(func() error { return g.httpServer(status, append(metricsOf(g.balancer), endpoint)...).Serve(serving) })
	group.Go(func() error {
		defer end()
		running, stop := context.WithCancel(ctx)
		defer stop()
		defer context.AfterFunc(serving, stop)()
		g.agent.Run(running)
		return leave()
	})
	return group.Wait()
}

// close closes the agent. With drain, peers first receive all flows, neighbours move their traffic, and the last handshakes end.
func (g *gateway) close(ctx context.Context, drain bool) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	if !drain {
		return g.agent.Close(ctx, false)
	}
	g.exchange.PushAll(ctx)
	err := g.agent.Close(ctx, true)
	handshakes := time.NewTimer(g.lastHandshakes)
	defer handshakes.Stop()
	select {
	case <-ctx.Done():
	case <-handshakes.C:
	}
	return errors.Join(err, os.Remove(string(g.mark)))
}

// endpointLimits are those of the address for the controller and the peers. A client proves its identity after it connected, so
// strangers are bounded by source.
var endpointLimits = httpserver.Limits{Name: "agent", Total: 1024, PerSource: 64}

// listen opens both addresses of a gateway.
func listen(ctx context.Context, cfg Config) (endpoint *httpserver.Listener, status net.Listener, err error) {
	var config net.ListenConfig
	l, err := config.Listen(ctx, "tcp", cfg.Listen)
	if err != nil {
		return nil, nil, fmt.Errorf("--listen: %w", err)
	}
	if status, err = config.Listen(ctx, "tcp", cfg.HTTPListen); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("--http-listen: %w", err), l.Close())
	}
	return httpserver.Limit(l, endpointLimits), status, nil
}
