package agents

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/gateway/agent"
	"github.com/isthmus-net/isthmus/gateway/certs"
	"github.com/isthmus-net/isthmus/gateway/desired"
)

// part is a balancer that does nothing, or refuses.
type balancer struct {
	fault atomic.Pointer[desired.Faults]
}

func (*balancer) Name() string { return desired.ComponentBalancer }

func (p *balancer) Apply(_ context.Context, s *desired.State) error {
	if f := p.fault.Load(); f != nil && (len((*f)[0].Services) == 0 || s.Has((*f)[0].Services[0])) {
		return *f
	}
	return nil
}
func (*balancer) Drift(context.Context) ([]desired.Fault, error) { return nil, nil }
func (*balancer) Close(context.Context, bool) error              { return nil }

// lab is an authority with its gateways.
type lab struct {
	t         *testing.T
	authority *certs.Authority
}

func newLab(t *testing.T) *lab {
	t.Helper()
	a, err := certs.NewAuthority("test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return &lab{t, a}
}

// source returns a certificate of an identity, issued by an authority.
func (l *lab) source(identity string, by *certs.Authority) *certs.Source {
	l.t.Helper()
	return l.open(l.write(l.t.TempDir(), identity, by, time.Hour))
}

// write writes the files of a certificate into a folder.
func (l *lab) write(dir, identity string, by *certs.Authority, life time.Duration) certs.Files {
	l.t.Helper()
	pair, err := by.Issue(identity, time.Now(), life)
	if err != nil {
		l.t.Fatal(err)
	}
	files := certs.Files{Cert: filepath.Join(dir, "tls.crt"), Key: filepath.Join(dir, "tls.key"), CA: filepath.Join(dir, "ca.crt")}
	for name, text := range map[string][]byte{files.Cert: pair.Cert, files.Key: pair.Key, files.CA: l.authority.Cert} {
		if err := os.WriteFile(name, text, 0o600); err != nil {
			l.t.Fatal(err)
		}
	}
	return files
}

func (l *lab) open(files certs.Files) *certs.Source {
	l.t.Helper()
	s, err := certs.Open(files, slog.New(slog.DiscardHandler))
	if err != nil {
		l.t.Fatal(err)
	}
	return s
}

// gateway is a real agent with a balancer that does nothing.
type gateway struct {
	lab  *lab
	name string
	addr string
	dir  string
	part balancer
	life time.Duration // of its certificate
	// renewable says that it accepts a renewed certificate.
	renewable bool
	agent     *agent.Agent
	stopped   chan error
	stop      context.CancelFunc
}

func (l *lab) gateway(name string) *gateway {
	l.t.Helper()
	return l.gatewayWith(name, time.Hour, false)
}

// gatewayWith is a gateway whose certificate, which was issued an hour ago, ends after a time.
func (l *lab) gatewayWith(name string, left time.Duration, renewable bool) *gateway {
	l.t.Helper()
	g := &gateway{lab: l, name: name, addr: "127.0.0.1:0", dir: l.t.TempDir(), life: left, renewable: renewable}
	g.start()
	l.t.Cleanup(g.end)
	return g
}

func (g *gateway) start() {
	g.lab.t.Helper()
	listener, err := net.Listen("tcp", g.addr)
	if err != nil {
		g.lab.t.Fatal(err)
	}
	g.addr = listener.Addr().String()
	g.agent, err = agent.New(agent.Config{
		Cluster: "cluster-a", Balancer: &g.part, StatePath: filepath.Join(g.dir, "state.json"), Version: "test", Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		g.lab.t.Fatal(err)
	}
	files := g.lab.write(g.dir, g.name, g.lab.authority, g.life)
	if g.renewable {
		files.Renewed = filepath.Join(g.dir, "renewed.pem")
	}
	own := g.lab.open(files)
	ctx, stop := context.WithCancel(g.lab.t.Context())
	g.stop, g.stopped = stop, make(chan error, 1)
	go func() { g.stopped <- g.agent.Serve(ctx, listener, own, certs.Controller) }()
}

func (g *gateway) end() {
	if g.stop == nil {
		return
	}
	g.stop()
	if err := <-g.stopped; err != nil {
		g.lab.t.Error(err)
	}
	g.stop = nil
}

func (g *gateway) target(vip string) Target {
	return Target{URL: "https://" + g.addr, Identity: g.name, State: desired.State{
		Cluster: "cluster-a", Group: "default", Balancer: desired.NFTables,
		VIPs: []desired.VIP{{Addr: netip.MustParseAddr(vip), Announce: desired.ByNone, Return: desired.SNAT}},
	}}
}

// hash returns the hash of the gateway's state, "" for none.
func (g *gateway) hash() string { return g.agent.Stats().Status.Hash }

func (l *lab) clients(change func(*Config)) *Clients {
	l.t.Helper()
	ctx, stop := context.WithCancel(l.t.Context())
	c := Config{TLS: l.source(certs.Controller, l.authority).Client, Poll: 20 * time.Millisecond, Retry: 20 * time.Millisecond, Log: slog.New(slog.DiscardHandler)}
	if change != nil {
		change(&c)
	}
	f := New(ctx, c)
	l.t.Cleanup(func() { stop(); f.Wait() })
	return f
}

// await waits until a condition holds.
func await(t *testing.T, what string, is func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(20 * time.Second)
	for !is() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("it never happened that %s", what)
		}
	}
}

func hashOf(t Target) string { return t.State.Hash() }

func TestSet(t *testing.T) {
	l := newLab(t)
	one, two := l.gateway("gw1"), l.gateway("gw2")
	f := l.clients(nil)
	want := map[string]Target{"gw1": one.target("192.0.2.1"), "gw2": two.target("192.0.2.1")}
	f.ReadGenerations(t.Context(), want)
	f.Set(t.Context(), want)
	if one.hash() != hashOf(want["gw1"]) || two.hash() != hashOf(want["gw2"]) {
		t.Fatal("Set returned before the gateways had it")
	}
	await(t, "the reports say so", func() bool { r := f.Reports(); return r["gw1"].Applied && r["gw2"].Applied })
	generation := one.agent.Stats().Status.Generation
	f.Set(t.Context(), want)
	if one.agent.Stats().Status.Generation != generation {
		t.Error("what a gateway has was sent again")
	}
}

// A gateway without a valid state keeps its current one and is polled. An unknown one is not contacted.
func TestHold(t *testing.T) {
	l := newLab(t)
	one, two := l.gateway("gw1"), l.gateway("gw2")
	f := l.clients(nil)
	has := one.target("192.0.2.1")
	f.Set(t.Context(), map[string]Target{"gw1": has})
	hold := func(t Target) Target {
		t.State, t.Hold = desired.State{}, true
		return t
	}
	f.Set(t.Context(), map[string]Target{"gw1": hold(has), "gw2": hold(two.target("192.0.2.1"))})
	if r, ok := f.Reports()["gw1"]; !ok || !r.Applied || one.hash() != hashOf(has) {
		t.Errorf("%+v, and it has %s, want %s", r, one.hash(), hashOf(has))
	}
	if r, ok := f.Reports()["gw2"]; ok || two.hash() != "" {
		t.Errorf("one that was not known: %+v, and it has %q", r, two.hash())
	}
	one.end()
	await(t, "the report says that it does not answer", func() bool { return f.Reports()["gw1"].Err != nil })
}

// An unreachable gateway delays no other, and receives its state when it is back.
func TestGatewayAway(t *testing.T) {
	l := newLab(t)
	one, two := l.gateway("gw1"), l.gateway("gw2")
	f := l.clients(func(c *Config) { c.SetTimeout, c.Timeout = time.Hour, time.Hour })
	f.Set(t.Context(), map[string]Target{"gw1": one.target("192.0.2.1"), "gw2": two.target("192.0.2.1")})
	two.end()
	await(t, "the report says that it is away", func() bool { return f.Reports()["gw2"].Err != nil })
	want := map[string]Target{"gw1": one.target("192.0.2.2"), "gw2": two.target("192.0.2.2")}
	hole, err := net.Listen("tcp", two.addr) // a listener that never answers: a request there lasts an hour
	if err != nil {
		t.Fatal(err)
	}
	set := make(chan struct{})
	go func() {
		f.Set(t.Context(), want)
		close(set)
	}()
	await(t, "Set returns, which would be patient for an hour", func() bool {
		select {
		case <-set:
			return true
		default:
			return false
		}
	})
	if err := hole.Close(); err != nil {
		t.Error(err)
	}
	if one.hash() != hashOf(want["gw1"]) {
		t.Error("the other gateway did not receive its state")
	}
	two.start()
	await(t, "it has it", func() bool { return two.hash() == hashOf(want["gw2"]) })
	await(t, "the report says so", func() bool { return f.Reports()["gw2"].Applied })
}

// A controller that takes over continues from the highest generation, also from one that it learns later.
func TestGenerations(t *testing.T) {
	l := newLab(t)
	one, two := l.gateway("gw1"), l.gateway("gw2")
	before := l.clients(nil)
	for _, vip := range []string{"192.0.2.1", "192.0.2.2", "192.0.2.3"} {
		before.Set(t.Context(), map[string]Target{"gw1": one.target(vip), "gw2": two.target(vip)})
	}
	high := two.agent.Stats().Status.Generation
	two.end()
	f := l.clients(nil)
	want := map[string]Target{"gw1": one.target("192.0.2.4"), "gw2": two.target("192.0.2.4")}
	f.ReadGenerations(t.Context(), want)
	f.Set(t.Context(), want)
	if one.hash() != hashOf(want["gw1"]) {
		t.Error("gw1 did not receive its state")
	}
	two.start()
	await(t, "gw2 has it", func() bool { return two.hash() == hashOf(want["gw2"]) })
	if two.agent.Stats().Status.Generation <= high {
		t.Errorf("generation %d after %d", two.agent.Stats().Status.Generation, high)
	}
}

// A controller that lost its Lease cannot roll a gateway back.
func TestTwoControllers(t *testing.T) {
	l := newLab(t)
	g := l.gateway("gw1")
	lost := errors.New("the Lease is another's")
	old := l.clients(func(c *Config) {
		c.Poll = time.Hour
		c.Fence = func(context.Context) error { return lost }
	})
	old.Set(t.Context(), map[string]Target{"gw1": g.target("192.0.2.1")})
	current := l.clients(nil)
	want := map[string]Target{"gw1": g.target("192.0.2.2")}
	current.ReadGenerations(t.Context(), want)
	current.Set(t.Context(), want)
	old.Set(t.Context(), map[string]Target{"gw1": g.target("192.0.2.3")})
	await(t, "the old one knows", func() bool { return errors.Is(old.Reports()["gw1"].Err, lost) })
	if g.hash() != hashOf(want["gw1"]) {
		t.Error("the old one was obeyed")
	}
}

// A refusal is reported by component, and a state that may be accepted later is retried.
func TestRefused(t *testing.T) {
	l := newLab(t)
	g := l.gateway("gw1")
	g.part.fault.Store(&desired.Faults{{Component: desired.ComponentBalancer, Message: "the map is full"}})
	f := l.clients(nil)
	want := map[string]Target{"gw1": g.target("192.0.2.1")}
	f.Set(t.Context(), want)
	await(t, "it is refused", func() bool {
		r := f.Reports()["gw1"].Refused
		return r != nil && len(r.Faults) == 1 && r.Faults[0].Message == "the map is full"
	})
	g.part.fault.Store(nil)
	await(t, "it is applied", func() bool { return f.Reports()["gw1"].Applied && g.hash() == hashOf(want["gw1"]) })
}

// A Service that a gateway refuses alone is in the report, and the state is not sent again.
func TestRefusedService(t *testing.T) {
	l := newLab(t)
	g := l.gateway("gw1")
	g.part.fault.Store(&desired.Faults{{Component: desired.ComponentBalancer, Services: []string{"demo/a"}, Message: "the map is full"}})
	target := g.target("192.0.2.1")
	for i, name := range []string{"demo/a", "demo/b"} {
		target.State.VIPs[0].Frontends = append(target.State.VIPs[0].Frontends, desired.Frontend{Service: name, Protocol: "TCP", Port: uint16(80 + i)})
	}
	f := l.clients(nil)
	f.Set(t.Context(), map[string]Target{"gw1": target})
	r := f.Reports()["gw1"]
	if !r.Applied || r.Refused != nil || len(r.Status.Refused) != 1 || r.Status.Refused[0].Services[0] != "demo/a" || r.Status.Hash != hashOf(target) {
		t.Errorf("%+v", r)
	}
	f.Set(t.Context(), map[string]Target{"gw1": target})
	g.part.fault.Store(nil)
	next := g.target("192.0.2.2")
	f.Set(t.Context(), map[string]Target{"gw1": next})
	await(t, "the next state is applied", func() bool { return g.hash() == hashOf(next) })
	if n := g.agent.Stats().Reconfigurations[200]; n != 2 {
		t.Errorf("%d requests for two states", n)
	}
}

// Gateways and controllers refuse peers with a wrong certificate.
func TestUnknownClients(t *testing.T) {
	l := newLab(t)
	g := l.gateway("gw1")
	other, err := certs.NewAuthority("other", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		own      *certs.Source
		identity string
	}{
		"a controller of another authority": {l.source(certs.Controller, other), "gw1"},
		"a gateway as a controller":         {l.source("gw2", l.authority), "gw1"},
		"another gateway than named":        {l.source(certs.Controller, l.authority), "gw2"},
	} {
		t.Run(name, func(t *testing.T) {
			f := l.clients(func(c *Config) { c.TLS = tc.own.Client })
			target := g.target("192.0.2.1")
			target.Identity = tc.identity
			f.Set(t.Context(), map[string]Target{"gw1": target})
			await(t, "it fails", func() bool { r := f.Reports()["gw1"]; return r.Asked && r.Err != nil })
			if g.hash() != "" {
				t.Error("it was obeyed")
			}
		})
	}
}

// Certificates that either end renews while they are connected are used by both, and reports have the expiry of the agent's.
func TestRenewedCertificates(t *testing.T) {
	l := newLab(t)
	g := l.gateway("gw1")
	dir := t.TempDir()
	own := l.open(l.write(dir, certs.Controller, l.authority, time.Hour))
	f := l.clients(func(c *Config) { c.TLS, c.MaxAge = own.Client, time.Millisecond })
	f.Set(t.Context(), map[string]Target{"gw1": g.target("192.0.2.1")})
	within := func(life time.Duration) func() bool {
		return func() bool {
			left := time.Until(f.Reports()["gw1"].Certificate.NotAfter)
			return left > life-time.Hour && left <= life
		}
	}
	await(t, "the report has the certificate's expiry", within(time.Hour))
	l.write(g.dir, "gw1", l.authority, 10*time.Hour)
	await(t, "it has that of the renewed one", within(10*time.Hour))

	// The agent no longer accepts the controller's first certificate, as after its expiry.
	next, err := certs.NewAuthority("next", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	l.write(dir, certs.Controller, next, time.Hour)
	if err := os.WriteFile(filepath.Join(g.dir, "ca.crt"), next.Cert, 0o600); err != nil {
		t.Fatal(err)
	}
	l.write(g.dir, "gw1", l.authority, 20*time.Hour)
	if err := os.WriteFile(filepath.Join(g.dir, "ca.crt"), append(next.Cert, '\n'), 0o600); err != nil {
		t.Fatal(err)
	}
	await(t, "the agent answers to the controller's renewed certificate", within(20*time.Hour))
}

// The certificate of a gateway is renewed when it is due, once, by a request whose key the gateway keeps. A gateway whose files are
// renewed otherwise is left alone, and an error is reported and tried again.
func TestRenewals(t *testing.T) {
	l := newLab(t)
	due, fixed, young := l.gatewayWith("due", 20*time.Minute, true), l.gatewayWith("fixed", 20*time.Minute, false), l.gatewayWith("young", time.Hour, true)
	const pause = 100 * time.Millisecond
	var mu sync.Mutex
	signed, renewed := map[string][]time.Time{}, map[string][]error{}
	fails := true
	f := l.clients(func(c *Config) {
		c.RetryRenewal = pause
		c.Sign = func(_ context.Context, identity string, request []byte, has certs.Validity) ([]byte, error) {
			mu.Lock()
			defer mu.Unlock()
			signed[identity] = append(signed[identity], time.Now())
			if fails {
				fails = false
				return nil, errors.New("the API server is away")
			}
			return l.authority.SignRequest(request, identity, certs.Validity{NotBefore: has.NotBefore, NotAfter: has.NotAfter.Add(10 * time.Hour)}, time.Now())
		}
		c.Renewed = func(gateway string, err error) {
			mu.Lock()
			defer mu.Unlock()
			renewed[gateway] = append(renewed[gateway], err)
		}
	})
	f.Set(t.Context(), map[string]Target{"due": due.target("192.0.2.1"), "fixed": fixed.target("192.0.2.1"), "young": young.target("192.0.2.1")})
	await(t, "the certificate is renewed", func() bool { return time.Until(f.Reports()["due"].Certificate.NotAfter) > 9*time.Hour })
	await(t, "all others answer", func() bool { return f.Reports()["fixed"].Applied && f.Reports()["young"].Applied })
	mu.Lock()
	defer mu.Unlock()
	at, r := signed["due"], renewed["due"]
	if len(at) != 2 || len(r) != 2 || r[0] == nil || r[1] != nil || at[1].Sub(at[0]) < pause {
		t.Errorf("it was signed at %v, with %v", at, r)
	}
	if len(signed) != 1 || len(renewed) != 1 {
		t.Errorf("signed %v, renewed %v", signed, renewed)
	}
}

// A renewal that hangs, as when the API server does not answer, holds no state for longer than a request may take.
func TestRenewalHoldsNoState(t *testing.T) {
	l := newLab(t)
	due := l.gatewayWith("due", 20*time.Minute, true)
	asked, ended := make(chan struct{}, 1), make(chan error, 1)
	f := l.clients(func(c *Config) {
		c.Timeout = 200 * time.Millisecond
		c.Sign = func(ctx context.Context, _ string, _ []byte, _ certs.Validity) ([]byte, error) {
			asked <- struct{}{}
			<-ctx.Done()
			return nil, ctx.Err()
		}
		c.Renewed = func(_ string, err error) { ended <- err }
	})
	f.Set(t.Context(), map[string]Target{"due": due.target("192.0.2.1")})
	<-asked
	second := due.target("192.0.2.2")
	f.Set(t.Context(), map[string]Target{"due": second})
	await(t, "the second state is applied", func() bool { return due.hash() == hashOf(second) })
	if err := <-ended; !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the renewal ended with %v", err)
	}
}
