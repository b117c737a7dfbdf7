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

// testbed is a prober with its recorded changes.
type testbed struct {
	*Prober
	t       *testing.T
	changes chan struct{}
}

func newTestbed(t *testing.T) *testbed {
	t.Helper()
	w := &testbed{t: t, changes: make(chan struct{}, 100)}
	ctx, stop := context.WithCancel(t.Context())
	w.Prober = New(ctx, Config{Period: 5 * time.Millisecond, Timeout: 200 * time.Millisecond, Changed: func() { w.changes <- struct{}{} }})
	t.Cleanup(w.Wait)
	t.Cleanup(stop)
	return w
}

// waitFor waits for an answer of a node, driven by the reported changes.
func (w *testbed) waitFor(at netip.AddrPort, want Answer) {
	w.t.Helper()
	timeout := time.After(time.Minute)
	for w.Answers()[at] != want {
		select {
		case <-w.changes:
		case <-timeout:
			w.t.Fatalf("%s: answer %d, want %d", at, w.Answers()[at], want)
		}
	}
}

// kubeProxy is the health check port of a node. It answers with its code, and not at all for 0.
type kubeProxy struct {
	code   atomic.Int32
	asked  atomic.Int32
	conns  atomic.Int32
	addr   netip.AddrPort
	server *httptest.Server
}

func (w *testbed) node(code int32) *kubeProxy {
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
	w := newTestbed(t)
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
		{http.StatusFound, Refusing}, // it redirects to another server
		{http.StatusOK, Serving},
	} {
		n.code.Store(step.code)
		w.waitFor(n.addr, step.want)
	}
}

// A node is silent after three missed probes.
func TestSilence(t *testing.T) {
	w := newTestbed(t)
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

// Removed nodes are not probed any more, and their answers are forgotten.
func TestRemovedNodesAreForgotten(t *testing.T) {
	w := newTestbed(t)
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
	if after := other.asked.Load(); after > before+1 { // one probe may have been running
		t.Errorf("asked %d times more", after-before)
	}
	w.Set(map[netip.AddrPort]bool{other.addr: true})
	w.waitFor(other.addr, Serving)
}

// Probes of a node share a connection. On a slow machine a probe may time out, which costs one more; a prober that reused
// none would need one for each probe.
func TestConnectionsAreReused(t *testing.T) {
	w := newTestbed(t)
	n := w.node(http.StatusOK)
	w.Set(map[netip.AddrPort]bool{n.addr: true})
	for range 5 {
		n.code.Store(http.StatusServiceUnavailable)
		w.waitFor(n.addr, Refusing)
		n.code.Store(http.StatusOK)
		w.waitFor(n.addr, Serving)
	}
	if conns, asked := n.conns.Load(), n.asked.Load(); conns > asked/2 {
		t.Errorf("%d connections for %d probes", conns, asked)
	}
}
