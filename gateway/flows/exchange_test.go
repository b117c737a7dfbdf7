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

// fake is a balancer that has what it is given.
type fake struct {
	opens chan Flow
	mu    sync.Mutex
	has   []Flow // from the beginning
	heard []Flow
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

func (f *fake) All(tell func(Flow) error) error {
	for _, h := range f.has {
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

// comes gives it a backend that was late.
func (f *fake) comes(backend netip.AddrPort) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.late, backend)
}

func (f *fake) knows(o Flow) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Contains(f.heard, o)
}

// flow is one of many.
func flow(port uint16) Flow {
	at := func(a string, port uint16) netip.AddrPort { return netip.AddrPortFrom(netip.MustParseAddr(a), port) }
	client := at("192.0.2.1", port)
	return Flow{Protocol: "TCP", Client: client, VIP: at("198.51.100.7", 80), Backend: at("10.1.0.1", 8080), Source: client}
}

// gateway is an exchange that can be reached.
type gateway struct {
	*Exchange
	balancer fake
	mate     desired.PeerGateway
	own      *certs.Source
	server   *http.Server
	at       string
}

// newGateways returns some of one authority.
func newGateways(t *testing.T, names ...string) (all []*gateway) {
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
		g := &gateway{own: own, balancer: fake{opens: make(chan Flow)}, at: "127.0.0.1:0"}
		g.Exchange = New(&g.balancer, own, slog.New(slog.DiscardHandler))
		g.listen(t)
		g.mate = desired.PeerGateway{URL: "https://" + g.at, Name: name}
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
func (g *gateway) listen(t *testing.T) {
	t.Helper()
	l, err := net.Listen("tcp", g.at)
	if err != nil {
		t.Fatal(err)
	}
	g.at = l.Addr().String()
	g.server = &http.Server{Handler: g.Exchange, TLSConfig: g.own.Server(), ReadHeaderTimeout: time.Second, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0)}
	go func() { _ = g.server.ServeTLS(l, "", "") }()
}

func await(t *testing.T, is func() bool, otherwise string) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(20 * time.Second); !is(); <-tick.C {
		if time.Now().After(end) {
			t.Fatal(otherwise)
		}
	}
}

// A gateway hears of what was there before it came, of what opens, and after it was away of what it missed.
func TestExchange(t *testing.T) {
	t.Parallel()
	g := newGateways(t, "gateway-1", "gateway-2", "gateway-3")
	old := flow(1)
	g[0].balancer.has = []Flow{old}
	g[0].SetPeers([]desired.PeerGateway{g[1].mate})
	g[1].SetPeers([]desired.PeerGateway{g[0].mate})
	await(t, func() bool { return g[1].balancer.knows(old) }, "what was there is not told")
	g[0].balancer.opens <- flow(2)
	await(t, func() bool { return g[1].balancer.knows(flow(2)) }, "what opens is not told")

	if err := g[1].server.Close(); err != nil {
		t.Fatal(err)
	}
	g[0].balancer.opens <- flow(3)
	sight := func() PeerStats { return g[0].Stats().Peers[0] }
	await(t, func() bool { s := sight(); return s.Fault != "" && s.Queued == 1 && s.Failed > 0 }, "it is not to be seen that a gateway is away")
	g[1].listen(t)
	await(t, func() bool { return g[1].balancer.knows(flow(3)) }, "what opened meanwhile is not told")
	await(t, func() bool { s := sight(); return s.Fault == "" && s.Queued == 0 && s.Sent == 3 }, "it is not to be seen that a gateway is back")
	if have := g[1].Stats().Peers[0]; have.Gateway != "gateway-1" || have.Received != 3 {
		t.Errorf("the other end has seen %+v", have)
	}

	g[2].SetPeers([]desired.PeerGateway{g[0].mate})
	g[0].SetPeers([]desired.PeerGateway{g[1].mate, g[2].mate})
	await(t, func() bool { return g[2].balancer.knows(old) }, "who is new hears nothing of what is there")
	g[0].SetPeers([]desired.PeerGateway{g[2].mate})
	g[0].balancer.opens <- flow(4)
	await(t, func() bool { return g[2].balancer.knows(flow(4)) }, "what opens is not told to who is left")
	if g[1].balancer.knows(flow(4)) {
		t.Error("who left the group is told")
	}
}

// A gateway that starts anew, having forgotten everything, hears at once of what there is, though nothing opens: before its router
// leads packets of it here.
func TestPeerRestarts(t *testing.T) {
	t.Parallel()
	g := newGateways(t, "gateway-1", "gateway-2")
	g[0].balancer.has = []Flow{flow(1)}
	g[0].SetPeers([]desired.PeerGateway{g[1].mate})
	g[1].SetPeers([]desired.PeerGateway{g[0].mate})
	await(t, func() bool { return g[1].balancer.knows(flow(1)) }, "what was there is not told")
	if err := g[1].server.Close(); err != nil {
		t.Fatal(err)
	}
	next := &gateway{own: g[1].own, at: g[1].at}
	next.Exchange = New(&next.balancer, next.own, slog.New(slog.DiscardHandler))
	next.SetPeers([]desired.PeerGateway{g[0].mate})
	t.Cleanup(func() { next.SetPeers(nil) })
	next.listen(t)
	t.Cleanup(func() { _ = next.server.Close() })
	await(t, func() bool { return next.balancer.knows(flow(1)) }, "what was there is not told to who has started anew")
}

// Whoever starts knows what there is when Hear returns, before anybody has told it, and waits for nobody who is away.
func TestPullAll(t *testing.T) {
	t.Parallel()
	g := newGateways(t, "gateway-1", "gateway-2", "gateway-3")
	g[0].balancer.has = []Flow{flow(1), flow(2)}
	g[0].SetPeers([]desired.PeerGateway{g[1].mate})
	await(t, func() bool { return g[1].Stats().Refused > 0 }, "who has no group yet was told") // so it is told again a second later
	if err := g[2].server.Close(); err != nil {
		t.Fatal(err)
	}
	g[1].SetPeers([]desired.PeerGateway{g[0].mate, g[2].mate})
	g[1].PullAll(t.Context(), false)
	for _, f := range g[0].balancer.has {
		if !g[1].balancer.knows(f) {
			t.Errorf("%s is not known", &f)
		}
	}
	heard := len(g[1].balancer.heard)
	g[1].PullAll(t.Context(), false) // who was asked is not asked again
	if have := len(g[1].balancer.heard); have != heard {
		t.Errorf("%d flows were heard again", have-heard)
	}
	g[1].PullAll(t.Context(), true)
	if have := len(g[1].balancer.heard); have < heard+2 {
		t.Error("everybody was to be asked again")
	}
}

// Others know everything when TellAll returns, which waits for nobody who is away.
func TestPushAll(t *testing.T) {
	t.Parallel()
	g := newGateways(t, "gateway-1", "gateway-2", "gateway-3")
	if err := g[2].server.Close(); err != nil {
		t.Fatal(err)
	}
	g[1].SetPeers([]desired.PeerGateway{g[0].mate})
	g[0].SetPeers([]desired.PeerGateway{g[1].mate, g[2].mate})
	for port := range uint16(2*maxBatch + 1) {
		g[0].balancer.has = append(g[0].balancer.has, flow(port+1))
	}
	g[0].PushAll(t.Context())
	for _, f := range []Flow{flow(1), flow(maxBatch), flow(maxBatch + 1), flow(2*maxBatch + 1)} {
		if !g[1].balancer.knows(f) {
			t.Errorf("%s is not known", &f)
		}
	}
}

// A flow whose backend is not there yet is known as soon as it is, and the gateway that told of it need not live so long.
func TestFlowArrivesBeforeItsBackend(t *testing.T) {
	t.Parallel()
	g := newGateways(t, "gateway-1", "gateway-2")
	g[1].balancer.late = map[netip.AddrPort]bool{flow(1).Backend: true}
	g[0].SetPeers([]desired.PeerGateway{g[1].mate})
	g[1].SetPeers([]desired.PeerGateway{g[0].mate})
	g[0].balancer.opens <- flow(1)
	await(t, func() bool { return g[1].Stats().Pending == 1 }, "what came early does not wait")
	if err := g[0].server.Close(); err != nil {
		t.Fatal(err)
	}
	g[1].SetPeers([]desired.PeerGateway{g[0].mate}) // of something else
	await(t, func() bool { return len(g[1].retryPending) == 0 && g[1].Stats().Pending == 1 }, "what came early waits no more")
	g[1].balancer.comes(flow(1).Backend)
	g[1].SetPeers([]desired.PeerGateway{g[0].mate})
	await(t, func() bool { return g[1].balancer.knows(flow(1)) && g[1].Stats().Pending == 0 }, "what came early is not known later")
}

// A backend that comes while flows with it are looked at is not missed, and flows do not wait for ever.
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

// meanwhile is a balancer that gets its backends while it is told of flows with them for the first time.
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

// Only the group is heard, and only with flows that can be.
func TestRefusedRequests(t *testing.T) {
	t.Parallel()
	g := newGateways(t, "gateway-1", "gateway-2", "stranger")
	g[0].SetPeers([]desired.PeerGateway{g[1].mate})
	other, short, unknown := flow(1), flow(1), flow(1)
	other.Backend = netip.MustParseAddrPort("[fd00::1]:80")
	short.Source = netip.AddrPort{}
	unknown.Protocol = "SCTP"
	cases := map[string]struct {
		from *gateway
		body any
		want int
	}{
		"a mate":                      {g[1], []Flow{flow(1)}, http.StatusNoContent},
		"a stranger":                  {g[2], []Flow{flow(1)}, http.StatusForbidden},
		"another family":              {g[1], []Flow{other}, http.StatusBadRequest},
		"no source":                   {g[1], []Flow{short}, http.StatusBadRequest},
		"another protocol":            {g[1], []Flow{unknown}, http.StatusBadRequest},
		"no array":                    {g[1], "flows", http.StatusBadRequest},
		"more than fits in a request": {g[1], slices.Repeat([]Flow{flow(1)}, 100_000), http.StatusBadRequest},
	}
	for name, tt := range cases {
		t.Run(name, func(t *testing.T) {
			body, err := json.Marshal(tt.body)
			if err != nil {
				t.Fatal(err)
			}
			client := http.Client{Transport: &http.Transport{TLSClientConfig: tt.from.own.Client("gateway-1"), DisableKeepAlives: true}}
			request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, g[0].mate.URL+Path, bytes.NewReader(body))
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
