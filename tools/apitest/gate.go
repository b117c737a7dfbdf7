package apitest

import (
	"io"
	"net"
	"net/url"
	"sync"
	"testing"

	"k8s.io/client-go/rest"
)

// Gate stands between a client and an API server. Shut, it ends all connections and accepts none, as a
// server that went away does.
type Gate struct {
	upstream string
	listener net.Listener

	mu    sync.Mutex
	shut  bool
	conns map[net.Conn]bool
}

// NewGate returns an open gate and a configuration whose client passes through it. It ends with the test.
func NewGate(t testing.TB, config *rest.Config) (*Gate, *rest.Config) {
	t.Helper()
	target, err := url.Parse(config.Host)
	if err != nil {
		t.Fatal(err)
	}
	upstream := target.Host
	if upstream == "" { // host:port without a scheme
		upstream = config.Host
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // loopback: nothing to wait for
	if err != nil {
		t.Fatal(err)
	}
	g := &Gate{upstream: upstream, listener: listener, conns: map[net.Conn]bool{}}
	var running sync.WaitGroup
	running.Go(func() { g.accept(&running) })
	t.Cleanup(func() {
		_ = listener.Close()
		g.Shut()
		running.Wait()
	})
	through := rest.CopyConfig(config)
	through.Host = "https://" + listener.Addr().String()
	return g, through
}

// Shut ends all connections and refuses new ones.
func (g *Gate) Shut() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.shut = true
	for c := range g.conns {
		_ = c.Close()
	}
}

// Open lets connections through again.
func (g *Gate) Open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.shut = false
}

func (g *Gate) accept(running *sync.WaitGroup) {
	for {
		client, err := g.listener.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", g.upstream) //nolint:noctx // loopback: nothing to wait for
		if err != nil {
			_ = client.Close()
			continue
		}
		if !g.admit(client, server) {
			continue
		}
		running.Go(func() { g.pipe(server, client) })
		running.Go(func() { g.pipe(client, server) })
	}
}

// admit takes both ends under the gate's control, or closes them when it is shut.
func (g *Gate) admit(conns ...net.Conn) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, c := range conns {
		if g.shut {
			_ = c.Close()
			continue
		}
		g.conns[c] = true
	}
	return !g.shut
}

// pipe copies one direction and ends both when it ends.
func (g *Gate) pipe(to, from net.Conn) {
	_, _ = io.Copy(to, from)
	_ = to.Close()
	_ = from.Close()
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.conns, to)
	delete(g.conns, from)
}
