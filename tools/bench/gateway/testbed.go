package gateway

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/vrrp"
	"github.com/isthmus-net/isthmus/tools/netlab/edge"
	"github.com/isthmus-net/isthmus/tools/netlab/frr"
	"github.com/isthmus-net/isthmus/tools/netlab/subprocess"
)

// testbed is an edge whose gateways announce a VIP by one protocol. Gateway 0 is preferred.
type testbed struct {
	*edge.Lab
	name    string
	program string
	vip     netip.Addr
	router  *frr.Router // nil without BGP
	parts   [2]*subprocess.Process

	argument func(gateway int) string // of the announcer's process
	state    func(gateway int) *desired.State
	undo     []func() error
}

const (
	routerASN  = 65000
	gatewayASN = 65010
	millis     = 100
)

// newBGP creates a testbed with a router, BFD and graceful restart.
func newBGP(ctx context.Context, program string) (*testbed, error) {
	b := &testbed{name: "BGP", program: program, vip: netip.MustParseAddr("203.0.113.10")}
	b.argument = func(int) string { return "bgp" }
	b.state = func(gateway int) *desired.State {
		return b.withVIP(&desired.State{BGP: speaker(gateway)}, desired.ByBGP)
	}
	if err := b.makeEdge(); err != nil {
		return nil, errors.Join(err, b.close())
	}
	cfg := frr.Config{ASN: routerASN, RouterID: edge.Router[0]}
	for i := range b.Gateways {
		cfg.Peers = append(cfg.Peers, frr.Peer{Addr: edge.Gateways[i][0], ASN: gatewayASN, BFDMillis: millis})
	}
	router, err := frr.Start(ctx, b.Router, cfg)
	if err != nil {
		return nil, errors.Join(err, b.close())
	}
	b.router = router
	b.undo = append(b.undo, router.Close)
	return b, nil
}

// speaker returns the BGP configuration of a gateway. The first one is preferred.
func speaker(gateway int) *desired.BGP {
	return &desired.BGP{
		ASN: gatewayASN, RouterID: edge.Gateways[gateway][0], MED: new(uint32(gateway * 50)), GracefulRestart: 10,
		Peers: []desired.Peer{{Addr: edge.Router[0], ASN: routerASN, BFD: &desired.BFD{IntervalMillis: millis, Multiplier: 3}}},
	}
}

// newVRRP creates a testbed with keepalived, whose files are below dir.
func newVRRP(ctx context.Context, program, dir string) (*testbed, error) {
	b := &testbed{name: "VRRP", program: program, vip: netip.MustParseAddr("10.99.0.100")}
	folder := func(gateway int) string { return filepath.Join(dir, fmt.Sprint(gateway)) }
	b.argument = func(gateway int) string { return "vrrp:" + folder(gateway) }
	b.state = func(gateway int) *desired.State {
		return b.withVIP(&desired.State{VRRP: &desired.VRRP{
			Interface: edge.Device, Source: edge.Gateways[gateway][0], Peers: []netip.Addr{edge.Gateways[1-gateway][0]},
			RouterID: 51, Priority: uint8(200 - gateway*100), IntervalMillis: millis,
		}}, desired.ByVRRP)
	}
	if err := b.makeEdge(); err != nil {
		return nil, errors.Join(err, b.close())
	}
	for i, gw := range b.Gateways {
		b.undo = append(b.undo, func() error {
			return gw.Do(func() error { return vrrp.Cleanup(context.WithoutCancel(ctx), folder(i)) })
		})
	}
	return b, nil
}

func (b *testbed) withVIP(s *desired.State, how desired.Announce) *desired.State {
	s.Cluster, s.Group, s.Balancer = "bench", "edge", desired.NFTables
	s.VIPs = []desired.VIP{{Addr: b.vip, Announce: how, Return: desired.Routed, Frontends: []desired.Frontend{{
		Service: "bench/echo", Protocol: "UDP", Port: 9000, Backends: []desired.Backend{{Addr: b.vip, Port: 9000, Weight: 1}},
	}}}}
	return s
}

func (b *testbed) makeEdge() (err error) {
	if b.Lab, err = edge.New(); err != nil {
		return err
	}
	b.undo = append(b.undo, b.Close)
	for i := range b.Gateways {
		stop, err := b.Echo(i, b.vip)
		if err != nil {
			return err
		}
		b.undo = append(b.undo, stop)
	}
	return nil
}

func (b *testbed) close() error {
	for _, p := range b.parts {
		if p != nil {
			p.Kill()
		}
	}
	var errs []error
	for _, undo := range slices.Backward(b.undo) {
		errs = append(errs, undo())
	}
	return errors.Join(errs...)
}

// begin starts the announcer of a gateway and waits until it has no drift.
func (b *testbed) begin(ctx context.Context, gateway int) error {
	p, err := subprocess.Start(ctx, b.Gateways[gateway], b.program, b.argument(gateway), os.Stderr)
	if err != nil {
		return err
	}
	b.parts[gateway] = p
	if err := p.Apply(b.state(gateway)); err != nil {
		return err
	}
	return b.converged(ctx, gateway)
}

const (
	timeout = 30 * time.Second
	poll    = 20 * time.Millisecond
)

// await polls condition until it returns "" instead of what is missing.
func await(ctx context.Context, condition func() (string, error)) error {
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for begin := time.Now(); ; {
		missing, err := condition()
		if err != nil || missing == "" {
			return err
		}
		if time.Since(begin) > timeout {
			return errors.New(missing)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// missing returns the text of a temporary error.
func missing(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// converged waits until a gateway matches its state, and the router, if any, has its current route.
func (b *testbed) converged(ctx context.Context, gateway int) error {
	return await(ctx, func() (string, error) {
		_, drift, err := b.parts[gateway].Status()
		if err != nil || len(drift) > 0 {
			return fmt.Sprintf("gateway %d: %v", gateway, drift), err
		}
		if b.router == nil {
			return "", nil
		}
		routes, err := b.router.Routes(ctx, b.vip)
		for _, r := range routes {
			if r.From == edge.Gateways[gateway][0] && !r.Stale {
				return "", err
			}
		}
		return fmt.Sprintf("the router has no route through gateway %d", gateway), err
	})
}

// answered waits until a gateway answers requests sent from now on.
func answered(ctx context.Context, p *edge.Probe, gateway int) error {
	begin := time.Now()
	return await(ctx, func() (string, error) {
		if p.From(gateway, begin).IsZero() {
			return fmt.Sprintf("gateway %d does not answer", gateway), nil
		}
		return "", nil
	})
}

// asking runs do while a client probes the VIP. Gateway 0 answers at first, and last at the end.
func (b *testbed) asking(ctx context.Context, last int, do func(*edge.Probe) error) (edge.Result, error) {
	p, err := b.Probe(b.vip)
	if err != nil {
		return edge.Result{}, err
	}
	err = answered(ctx, p, 0)
	p.Stop() // until then any gateway may have answered
	if err != nil {
		return edge.Result{}, err
	}
	if p, err = b.Probe(b.vip); err != nil {
		return edge.Result{}, err
	}
	if err = answered(ctx, p, 0); err == nil {
		err = do(p)
	}
	if err == nil {
		err = answered(ctx, p, last)
	}
	return p.Stop(), err
}

// crash kills the agent of gateway 0 and starts it again.
func (b *testbed) crash(ctx context.Context) (edge.Result, error) {
	return b.asking(ctx, 0, func(*edge.Probe) error {
		b.parts[0].Kill()
		return b.begin(ctx, 0)
	})
}

// cordon cordons gateway 0, and uncordons it when the other one has the traffic.
func (b *testbed) cordon(ctx context.Context) (edge.Result, error) {
	return b.asking(ctx, 0, func(p *edge.Probe) error {
		cordoned := b.state(0)
		cordoned.Cordoned = true
		if err := b.parts[0].Apply(cordoned); err != nil {
			return err
		}
		if err := answered(ctx, p, 1); err != nil {
			return err
		}
		if err := b.parts[0].Apply(b.state(0)); err != nil {
			return err
		}
		return b.converged(ctx, 0)
	})
}

// drain drains gateway 0 and then kills it. It comes back afterwards.
func (b *testbed) drain(ctx context.Context) (edge.Result, error) {
	r, err := b.asking(ctx, 1, func(p *edge.Probe) error {
		err := b.parts[0].Close(true)
		b.parts[0] = nil
		if err != nil {
			return err
		}
		if err := answered(ctx, p, 1); err != nil {
			return err
		}
		return b.Cut(0)
	})
	if err != nil {
		return r, err
	}
	if err := b.Mend(0); err != nil {
		return r, err
	}
	return r, b.begin(ctx, 0)
}

// death cuts gateway 0 off, which comes back afterwards. It returns the time from the cut to the first answer of the
// other gateway.
func (b *testbed) death(ctx context.Context) (time.Duration, error) {
	var cut time.Time
	r, err := b.asking(ctx, 1, func(*edge.Probe) error {
		cut = time.Now()
		return b.Cut(0)
	})
	if err != nil {
		return 0, err
	}
	if err := b.Mend(0); err != nil {
		return 0, err
	}
	return r.From(1, cut).Sub(cut), b.converged(ctx, 0)
}
