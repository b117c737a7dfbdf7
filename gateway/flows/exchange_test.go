package flows

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/isthmus-net/isthmus/gateway/certs"
	"github.com/isthmus-net/isthmus/gateway/desired"
)

// fake is a balancer with given flows.
type fake struct {
	opens chan Flow
	mu    sync.Mutex
	has   []Flow                  // see give; guarded by mu
	heard []Flow                  // guarded by mu
	late  map[netip.AddrPort]bool // backends that it does not have yet
}

func (f *fake) Export(ctx context.Context, tell func(Flow) error) error {
	if err := f.All(tell); err != nil {
		return err
	}
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case o := <-f.opens:
			if err := tell(o); err != nil {
				return err
			}
		}
	}
}

// give adds flows that the balancer has.
func (f *fake) give(all ...Flow) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.has = append(f.has, all...)
}

// forget drops the flows that were imported.
func (f *fake) forget() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.heard = nil
}

// count returns how many flows were imported.
func (f *fake) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.heard)
}

func (f *fake) All(tell func(Flow) error) error {
	f.mu.Lock()
	all := slices.Clone(f.has)
	f.mu.Unlock()
	for _, h := range all {
		if err := tell(h); err != nil {
			return err
		}
	}
	return nil
}

func (f *fake) Import(all []Flow) (early []Flow, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, o := range all {
		if f.late[o.Backend] {
			early = append(early, o)
		} else {
			f.heard = append(f.heard, o)
		}
	}
	return early, nil
}

// comes adds a late backend.
func (f *fake) comes(backend netip.AddrPort) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.late, backend)
}

// knows reports whether a flow was imported, with the name of the gateway that sent it.
func (f *fake) knows(o Flow) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.ContainsFunc(f.heard, func(h Flow) bool {
		named := h.Gateway != ""
		h.Gateway = ""
		return named && h == o
	})
}

// flow returns one of many flows.
func flow(port uint16) Flow {
	at := func(a string, port uint16) netip.AddrPort { return netip.AddrPortFrom(netip.MustParseAddr(a), port) }
	client := at("192.0.2.1", port)
	return Flow{Protocol: "TCP", Client: client, VIP: at("198.51.100.7", 80), Backend: at("10.1.0.1", 8080), Source: client}
}

// gateway is an exchange with an address.
type gateway struct {
	*Exchange
	balancer fake
	self     desired.PeerGateway
	own      *certs.Source
	server   *http.Server
	at       string
	timeout  time.Duration // see newImpatient
}

// newGateways returns gateways with certificates of one authority.
func newGateways(t testing.TB, names ...string) (all []*gateway) {
	t.Helper()
	return newImpatient(t, 0, names...)
}

// newImpatient is newGateways with a timeout of the servers' requests and answers, unless it is 0.
func newImpatient(t testing.TB, timeout time.Duration, names ...string) (all []*gateway) {
	t.Helper()
	authority, err := certs.NewAuthority("test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		pair, err := authority.Issue(name, time.Now(), time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		dir := t.TempDir()
		files := certs.Files{Cert: filepath.Join(dir, "crt"), Key: filepath.Join(dir, "key"), CA: filepath.Join(dir, "ca")}
		for path, b := range map[string][]byte{files.Cert: pair.Cert, files.Key: pair.Key, files.CA: authority.Cert} {
			if err := os.WriteFile(path, b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		own, err := certs.Open(files, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		g := &gateway{own: own, balancer: fake{opens: make(chan Flow)}, at: "127.0.0.1:0", timeout: timeout}
		g.Exchange = New(&g.balancer, own, slog.New(slog.DiscardHandler))
		g.listen(t)
		g.self = desired.PeerGateway{URL: "https://" + g.at, Name: name}
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			g.Run(ctx)
		}()
		t.Cleanup(func() {
			stop()
			<-ended
			_ = g.server.Close()
		})
		all = append(all, g)
	}
	return all
}

// listen serves at the gateway's address.
func (g *gateway) listen(t testing.TB) {
	t.Helper()
	l, err := net.Listen("tcp", g.at)
	if err != nil {
		t.Fatal(err)
	}
	g.at = l.Addr().String()
	g.server = &http.Server{
		Handler: g.Exchange, TLSConfig: g.own.Server(), ReadHeaderTimeout: time.Second, ReadTimeout: g.timeout, WriteTimeout: g.timeout,
		ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0),
	}
	go func() { _ = g.server.ServeTLS(l, "", "") }()
}

func await(t testing.TB, is func() bool, otherwise string) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(20 * time.Second); !is(); <-tick.C {
		if time.Now().After(end) {
			t.Fatal(otherwise)
		}
	}
}

// A gateway receives the flows from before its start, new ones, and those that it missed while it was unreachable.
func TestExchange(t *testing.T) {
	t.Parallel()
	g := newGateways(t, "gateway-1", "gateway-2", "gateway-3")
	old := flow(1)
	g[0].balancer.give(old)
	g[0].SetPeers([]desired.PeerGateway{g[1].self})
	g[1].SetPeers([]desired.PeerGateway{g[0].self})
	await(t, func() bool { return g[1].balancer.knows(old) }, "existing flows are not sent")
	g[0].balancer.opens <- flow(2)
	await(t, func() bool { return g[1].balancer.knows(flow(2)) }, "new flows are not sent")

	peer := func() PeerStats { return g[0].Stats().Peers[0] }
	await(t, func() bool { return peer().Sent == 2 }, "flows are not acknowledged")
	if err := g[1].server.Close(); err != nil {
		t.Fatal(err)
	}
	g[0].balancer.opens <- flow(3)
	await(t, func() bool { s := peer(); return s.Fault != "" && s.Queued == 1 && s.Failed > 0 }, "the statistics do not report that a gateway is unreachable")
	g[1].listen(t)
	await(t, func() bool { return g[1].balancer.knows(flow(3)) }, "flows that opened meanwhile are not sent")
	await(t, func() bool { s := peer(); return s.Fault == "" && s.Queued == 0 && s.Sent == 3 }, "the statistics do not report that a gateway is back")
	if have := g[1].Stats().Peers[0]; have.Gateway != "gateway-1" || have.Received != 3 {
		t.Errorf("statistics of the other gateway: %+v", have)
	}

	g[2].SetPeers([]desired.PeerGateway{g[0].self})
	g[0].SetPeers([]desired.PeerGateway{g[1].self, g[2].self})
	await(t, func() bool { return g[2].balancer.knows(old) }, "a new peer does not receive existing flows")
	g[0].SetPeers([]desired.PeerGateway{g[2].self})
	g[0].balancer.opens <- flow(4)
	await(t, func() bool { return g[2].balancer.knows(flow(4)) }, "a remaining peer does not receive new flows")
	if g[1].balancer.knows(flow(4)) {
		t.Error("a removed peer receives flows")
	}
}

// A gateway that restarted empty receives all flows at once, although none opens: before its router sends packets of them
// here.
func TestPeerRestarts(t *testing.T) {
	t.Parallel()
	g := newGateways(t, "gateway-1", "gateway-2")
	g[0].balancer.give(flow(1))
	g[0].SetPeers([]desired.PeerGateway{g[1].self})
	g[1].SetPeers([]desired.PeerGateway{g[0].self})
	await(t, func() bool { return g[1].balancer.knows(flow(1)) }, "existing flows are not sent")
	if err := g[1].server.Close(); err != nil {
		t.Fatal(err)
	}
	next := &gateway{own: g[1].own, at: g[1].at}
	next.Exchange = New(&next.balancer, next.own, slog.New(slog.DiscardHandler))
	next.SetPeers([]desired.PeerGateway{g[0].self})
	t.Cleanup(func() { next.SetPeers(nil) })
	next.listen(t)
	t.Cleanup(func() { _ = next.server.Close() })
	await(t, func() bool { return next.balancer.knows(flow(1)) }, "a restarted peer does not receive existing flows")
}

// PullAll imports all flows of reachable peers before it returns, and does not wait for unreachable ones.
func TestPullAll(t *testing.T) {
	t.Parallel()
	g := newGateways(t, "gateway-1", "gateway-2", "gateway-3")
	g[0].balancer.give(flow(1), flow(2))
	g[0].SetPeers([]desired.PeerGateway{g[1].self})
	await(t, func() bool { return g[1].Stats().Refused > 0 }, "a gateway without peers received flows") // so the next attempt is a second later
	if err := g[2].server.Close(); err != nil {
		t.Fatal(err)
	}
	g[1].SetPeers([]desired.PeerGateway{g[0].self, g[2].self})
	g[1].PullAll(t.Context(), false)
	for _, f := range g[0].balancer.has {
		if !g[1].balancer.knows(f) {
			t.Errorf("%s is not known", &f)
		}
	}
	heard := g[1].balancer.count()
	g[1].PullAll(t.Context(), false) // a peer is asked only once
	if have := g[1].balancer.count(); have != heard {
		t.Errorf("%d flows were pulled again", have-heard)
	}
	g[1].PullAll(t.Context(), true)
	if have := g[1].balancer.count(); have < heard+2 {
		t.Error("everybody was to be asked again")
	}
}

// PushAll sends all flows to reachable peers before it returns, and does not wait for unreachable ones.
func TestPushAll(t *testing.T) {
	t.Parallel()
	g := newGateways(t, "gateway-1", "gateway-2", "gateway-3")
	if err := g[2].server.Close(); err != nil {
		t.Fatal(err)
	}
	g[1].SetPeers([]desired.PeerGateway{g[0].self})
	g[0].SetPeers([]desired.PeerGateway{g[1].self, g[2].self})
	for port := range uint16(2*maxBatch + 1) {
		g[0].balancer.give(flow(port + 1))
	}
	g[0].PushAll(t.Context())
	for _, f := range []Flow{flow(1), flow(maxBatch), flow(maxBatch + 1), flow(2*maxBatch + 1)} {
		if !g[1].balancer.knows(f) {
			t.Errorf("%s is not known", &f)
		}
	}
}

// A flow without its backend is imported when the backend appears, even if the sender is gone by then.
func TestFlowArrivesBeforeItsBackend(t *testing.T) {
	t.Parallel()
	g := newGateways(t, "gateway-1", "gateway-2")
	g[1].balancer.late = map[netip.AddrPort]bool{flow(1).Backend: true}
	g[0].SetPeers([]desired.PeerGateway{g[1].self})
	g[1].SetPeers([]desired.PeerGateway{g[0].self})
	g[0].balancer.opens <- flow(1)
	await(t, func() bool { return g[1].Stats().Pending == 1 }, "a flow without its backend is not pending")
	if err := g[0].server.Close(); err != nil {
		t.Fatal(err)
	}
	g[1].SetPeers([]desired.PeerGateway{g[0].self}) // of another backend
	await(t, func() bool { return len(g[1].retryPending.C()) == 0 && g[1].Stats().Pending == 1 }, "a flow without its backend is no longer pending")
	g[1].balancer.comes(flow(1).Backend)
	g[1].SetPeers([]desired.PeerGateway{g[0].self})
	await(t, func() bool { return g[1].balancer.knows(flow(1)) && g[1].Stats().Pending == 0 }, "a pending flow was not imported")
}

// A backend that appears during an import is not missed, and flows do not wait for ever.
func TestPendingFlows(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &meanwhile{}
		x := New(s, nil, slog.New(slog.DiscardHandler))
		s.applied = func() { x.SetPeers(nil) }
		if err := x.importFlows([]Flow{flow(1)}, nil); err != nil || s.known != 1 || x.Stats().Pending != 0 {
			t.Errorf("%d flows are known and %d wait: %v", s.known, x.Stats().Pending, err)
		}
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			x.retry(ctx)
		}()
		synctest.Wait()
		s.applied = func() {}
		s.never = true
		if err := x.importFlows([]Flow{flow(2)}, nil); err != nil || x.Stats().Pending != 1 {
			t.Errorf("%d flows wait: %v", x.Stats().Pending, err)
		}
		<-time.After(pendingTimeout)
		if n := x.Stats().Pending; n != 1 {
			t.Errorf("%d flows wait after %s", n, pendingTimeout)
		}
		<-time.After(pendingTimeout)
		if n := x.Stats().Pending; n != 0 {
			t.Errorf("%d flows wait after %s", n, 2*pendingTimeout)
		}
		stop()
		<-ended
	})
}

// meanwhile is a balancer that gets its backends during the first import of their flows.
type meanwhile struct {
	Sharer
	applied func()
	never   bool
	asked   int
	known   int
}

func (m *meanwhile) Import(all []Flow) ([]Flow, error) {
	m.asked++
	if m.asked == 1 || m.never {
		m.applied()
		return all, nil
	}
	m.known += len(all)
	return nil, nil
}

// Only peers may send flows, and only valid ones.
func TestRefusedRequests(t *testing.T) {
	t.Parallel()
	g := newGateways(t, "gateway-1", "gateway-2", "unknown")
	g[0].SetPeers([]desired.PeerGateway{g[1].self})
	other, short, unknown := flow(1), flow(1), flow(1)
	other.Backend = netip.MustParseAddrPort("[fd00::1]:80")
	short.Source = netip.AddrPort{}
	unknown.Protocol = "SCTP"
	cases := map[string]struct {
		from *gateway
		body any
		want int
	}{
		"a peer":               {g[1], []Flow{flow(1)}, http.StatusNoContent},
		"an unknown client":    {g[2], []Flow{flow(1)}, http.StatusForbidden},
		"another family":       {g[1], []Flow{other}, http.StatusBadRequest},
		"no source":            {g[1], []Flow{short}, http.StatusBadRequest},
		"another protocol":     {g[1], []Flow{unknown}, http.StatusBadRequest},
		"no array":             {g[1], "flows", http.StatusBadRequest},
		"an oversized request": {g[1], slices.Repeat([]Flow{flow(1)}, 100_000), http.StatusBadRequest},
	}
	for name, tt := range cases {
		t.Run(name, func(t *testing.T) {
			body, err := json.Marshal(tt.body)
			if err != nil {
				t.Fatal(err)
			}
			client := http.Client{Transport: &http.Transport{TLSClientConfig: tt.from.own.Client("gateway-1"), DisableKeepAlives: true}}
			request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, g[0].self.URL+Path, bytes.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			response, err := client.Do(request)
			if err != nil {
				t.Fatal(err)
			}
			defer response.Body.Close()
			if response.StatusCode != tt.want {
				t.Errorf("%s, want %d", response.Status, tt.want)
			}
		})
	}
	if s := g[0].Stats(); s.Refused != uint64(len(cases)-1) || s.Peers[0].Received != 1 {
		t.Errorf("seen were %+v", s)
	}
}

// A batch of the largest size fits in a request.
func TestBatchFits(t *testing.T) {
	t.Parallel()
	at := netip.MustParseAddrPort("[2001:db8:ffff:ffff:ffff:ffff:ffff:ffff]:65535")
	b, err := json.Marshal(slices.Repeat([]Flow{{Protocol: "TCP", Client: at, VIP: at, Backend: at, Source: at}}, maxBatch))
	if err != nil || len(b) > maxBody {
		t.Errorf("%d bytes, at most %d may be: %v", len(b), maxBody, err)
	}
}
