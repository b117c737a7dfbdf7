package probes

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// world is a prober, and what it said of changes.
type world struct {
	*Prober
	t       *testing.T
	changes chan struct{}
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, changes: make(chan struct{}, 100)}
	ctx, stop := context.WithCancel(t.Context())
	w.Prober = New(ctx, Config{Period: 5 * time.Millisecond, Timeout: 200 * time.Millisecond, Changed: func() { w.changes <- struct{}{} }})
	t.Cleanup(w.Wait)
	t.Cleanup(stop)
	return w
}

// waitFor waits until a node's answer is one, by what the prober says of changes alone.
func (w *world) waitFor(at netip.AddrPort, want Answer) {
	w.t.Helper()
	timeout := time.After(10 * time.Second)
	for w.Answers()[at] != want {
		select {
		case <-w.changes:
		case <-timeout:
			w.t.Fatalf("%s: answer %d, want %d", at, w.Answers()[at], want)
		}
	}
}

// kubeProxy is a node's health check port. It answers with the code that it has, and not at all with 0.
type kubeProxy struct {
	code   atomic.Int32
	asked  atomic.Int32
	conns  atomic.Int32
	addr   netip.AddrPort
	server *httptest.Server
}

func (w *world) node(code int32) *kubeProxy {
	w.t.Helper()
	n := &kubeProxy{}
	n.code.Store(code)
	over := make(chan struct{})
	n.server = httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		n.asked.Add(1)
		if r.Method != http.MethodGet || r.URL.Path != "/healthz" {
			w.t.Errorf("asked for %s %s", r.Method, r.URL)
		}
		switch code := int(n.code.Load()); code {
		case 0:
			select {
			case <-r.Context().Done():
			case <-over:
			}
		case http.StatusFound:
			http.Redirect(rw, r, "/elsewhere", code)
		default:
			rw.WriteHeader(code)
			fmt.Fprint(rw, `{"service": {"namespace": "demo", "name": "a"}, "localEndpoints": 1}`)
		}
	}))
	n.server.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			n.conns.Add(1)
		}
	}
	n.server.Start()
	n.addr = netip.MustParseAddrPort(n.server.Listener.Addr().String())
	w.t.Cleanup(n.server.Close)
	w.t.Cleanup(func() { close(over) })
	return n
}

func TestAnswers(t *testing.T) {
	w := newWorld(t)
	n := w.node(http.StatusOK)
	w.Set(map[netip.AddrPort]bool{n.addr: true})
	for _, step := range []struct {
		code int32
		want Answer
	}{
		{http.StatusOK, Serving},
		{http.StatusServiceUnavailable, Refusing},
		{http.StatusOK, Serving},
		{0, Silent},
		{http.StatusFound, Refusing}, // it leads to somewhere that is not this node's answer
		{http.StatusOK, Serving},
	} {
		n.code.Store(step.code)
		w.waitFor(n.addr, step.want)
	}
}

// A node that is silent has missed three questions.
func TestSilence(t *testing.T) {
	w := newWorld(t)
	n := w.node(0)
	w.Set(map[netip.AddrPort]bool{n.addr: true})
	w.waitFor(n.addr, Silent)
	if asked := n.asked.Load(); asked < 3 {
		t.Errorf("silent after %d questions", asked)
	}
	n.code.Store(http.StatusOK)
	w.waitFor(n.addr, Serving)

	n.server.Close() // refuses connections
	w.waitFor(n.addr, Silent)
}

// Nodes that nobody wants to know of are not asked any more, and nothing is known of them.
func TestRemovedNodesAreForgotten(t *testing.T) {
	w := newWorld(t)
	one, other := w.node(http.StatusOK), w.node(http.StatusOK)
	w.Set(map[netip.AddrPort]bool{one.addr: true, other.addr: true})
	w.waitFor(one.addr, Serving)
	w.waitFor(other.addr, Serving)
	w.Set(map[netip.AddrPort]bool{one.addr: true})
	if diff := cmp.Diff(map[netip.AddrPort]Answer{one.addr: Serving}, w.Answers()); diff != "" {
		t.Errorf("answers (-want +have):\n%s", diff)
	}
	before := other.asked.Load()
	one.code.Store(http.StatusServiceUnavailable)
	w.waitFor(one.addr, Refusing)
	one.code.Store(http.StatusOK)
	w.waitFor(one.addr, Serving)
	if after := other.asked.Load(); after > before+1 { // one may have been under way
		t.Errorf("asked %d times more", after-before)
	}
	w.Set(map[netip.AddrPort]bool{other.addr: true})
	w.waitFor(other.addr, Serving)
}

// One connection carries all questions to a node.
func TestConnectionsAreReused(t *testing.T) {
	w := newWorld(t)
	n := w.node(http.StatusOK)
	w.Set(map[netip.AddrPort]bool{n.addr: true})
	for i := range 5 {
		n.code.Store(http.StatusServiceUnavailable)
		w.waitFor(n.addr, Refusing)
		n.code.Store(http.StatusOK)
		w.waitFor(n.addr, Serving)
		if conns := n.conns.Load(); conns != 1 {
			t.Fatalf("%d connections after %d rounds", conns, i+1)
		}
	}
}
