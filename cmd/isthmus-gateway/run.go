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

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

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

// closeTimeout is how long neighbours may take to go elsewhere before the gateway ends all the same.
const closeTimeout = 20 * time.Second

// run runs a gateway until a signal ends it: SIGTERM and an interrupt take it out of service, SIGHUP is for a restart.
func run(ctx context.Context, cfg Config, log *slog.Logger) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, os.Interrupt, syscall.SIGHUP)
	defer signal.Stop(signals)
	ended := make(chan os.Signal, 1)
	go func() {
		select {
		case s := <-signals:
			ended <- s
			stop()
		case <-ctx.Done():
		}
	}()

	for _, dir := range []string{cfg.StateDir, cfg.RunDir} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("make a folder: %w", err)
		}
	}
	own, err := certs.Open(cfg.Files, log)
	if err != nil {
		return fmt.Errorf("%w; isthmusctl gateway certs makes them", err)
	}
	m := mark(filepath.Join(cfg.RunDir, "serving"))
	balancer, err := newBalancer(cfg, log)
	if err != nil {
		return err
	}
	exchange := flows.New(balancer, own, log)
	parts, err := parts(cfg, &sharing{balancer: balancer, exchange: exchange}, m, log)
	if err != nil {
		return err
	}
	a, err := agent.New(agent.Config{
		Cluster: cfg.Cluster, Parts: parts, Flows: exchange, StatePath: cfg.statePath(), CheckEvery: cfg.CheckEvery, Version: version.String(), Log: log,
	})
	if err != nil {
		return err
	}
	return serve(ctx, cfg, a, exchange, own, m, metricsOf(balancer), func() error {
		drain := false // who fails leaves traffic where it is, for whoever starts next
		select {
		case s := <-ended:
			drain = s != syscall.SIGHUP
			log.Info("ends", "signal", s.String(), "drain", drain)
		default:
		}
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		defer cancel()
		if drain {
			exchange.TellAll(closing)
		}
		err := a.Close(closing, drain)
		if drain {
			err = errors.Join(err, os.Remove(string(m)))
		}
		return err
	})
}

// parts returns what does the work.
func parts(cfg Config, balancer agent.Part, m mark, log *slog.Logger) ([]agent.Part, error) {
	router, err := vrrp.New(vrrp.Config{Dir: filepath.Join(cfg.RunDir, "vrrp"), Log: log})
	if err != nil {
		return nil, err
	}
	restarting, err := m.isSet()
	if err != nil {
		return nil, fmt.Errorf("look for a predecessor: %w", err)
	}
	return []agent.Part{balancer, bgp.New(bgp.Config{Restarting: restarting, Punctual: true, Log: log}), router}, nil
}

// balancer is a part whose connections other gateways can go on with.
type balancer interface {
	agent.Part
	flows.Sharer
}

func newBalancer(cfg Config, log *slog.Logger) (balancer, error) {
	if cfg.Balancer == string(desired.EBPF) {
		return ebpf.Open(ebpf.Config{BPFFS: cfg.BPFFS, Devices: cfg.Devices, XDP: ebpf.XDP(cfg.XDP), Log: log})
	}
	return nft.New(log)
}

// sharing is a balancer that tells the other gateways of its group.
type sharing struct {
	balancer
	exchange *flows.Exchange
	cordoned bool
}

// Apply is part of agent.Part. VIPs are announced, or are no more, after it: from then on packets come of connections that began
// elsewhere, or go there.
func (s *sharing) Apply(ctx context.Context, state *desired.State) error {
	if err := s.balancer.Apply(ctx, state); err != nil {
		return err
	}
	was := s.cordoned
	s.cordoned = state.Cordoned
	s.exchange.Tell(state.Mates)
	s.exchange.Hear(ctx, was && !s.cordoned)
	if s.cordoned && !was {
		s.exchange.TellAll(ctx)
	}
	return nil
}

// serve runs the agent and what asks it, until ctx is done or one of them fails, and then calls leave, which closes the agent.
// Until neighbours have gone elsewhere, connections begin here: so other gateways are told of them, and heard, until leave has
// returned.
func serve(ctx context.Context, cfg Config, a *agent.Agent, exchange *flows.Exchange, own *certs.Source, m mark, counted []prometheus.Collector, leave func() error) error {
	endpoint, watched, err := listen(ctx, cfg)
	if err != nil {
		return errors.Join(err, leave())
	}
	if err := m.set(); err != nil {
		return errors.Join(err, endpoint.Close(), watched.Close(), leave())
	}
	outlasting, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	group, serving := errgroup.WithContext(outlasting)
	group.Go(func() error {
		exchange.Run(serving)
		return nil
	})
	group.Go(func() error { return a.Serve(serving, endpoint, own, cfg.Controller) })
	group.Go(func() error { return serveHTTP(serving, watched, a, exchange, counted...) })
	group.Go(func() error {
		defer end()
		running, stop := context.WithCancel(ctx)
		defer stop()
		defer context.AfterFunc(serving, stop)()
		a.Run(running)
		return leave()
	})
	return group.Wait()
}

// listen opens the two addresses of a gateway.
func listen(ctx context.Context, cfg Config) (endpoint, watched net.Listener, err error) {
	var config net.ListenConfig
	if endpoint, err = config.Listen(ctx, "tcp", cfg.Listen); err != nil {
		return nil, nil, fmt.Errorf("--listen: %w", err)
	}
	if watched, err = config.Listen(ctx, "tcp", cfg.HTTPListen); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("--http-listen: %w", err), endpoint.Close())
	}
	return endpoint, watched, nil
}
