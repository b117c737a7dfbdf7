package agent

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/isthmus-net/isthmus/gateway/certs"
	"github.com/isthmus-net/isthmus/gateway/desired"
)

// pipes is a listener without a network, whose deadlines use the clock of synctest.
type pipes struct {
	conns  chan net.Conn
	closed chan struct{}
}

func newPipes() *pipes { return &pipes{make(chan net.Conn), make(chan struct{})} }

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error {
	close(p.closed)
	return nil
}

func (p *pipes) Addr() net.Addr { return &net.UnixAddr{Name: "pipe", Net: "unix"} }

func (p *pipes) dial() net.Conn {
	client, server := net.Pipe()
	p.conns <- server
	return client
}

// endpoint is a serving agent with the authority that it trusts.
type endpoint struct {
	t     *testing.T
	agent *Agent
	ca    *certs.Authority
	dir   string
}

// serve starts an endpoint on l. The returned function stops it.
func serve(t *testing.T, l net.Listener) (e *endpoint, stop func()) {
	t.Helper()
	ca, err := certs.NewAuthority("test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	e = &endpoint{t: t, agent: newAgent(t, newMachine(), statePath(t)), ca: ca, dir: t.TempDir()}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	own := e.source("gw-1", ca)
	go func() { done <- e.agent.Serve(ctx, l, own, certs.Controller) }()
	return e, func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// source returns a certificate of an identity, issued by an authority; it trusts the endpoint's authority.
func (e *endpoint) source(identity string, by *certs.Authority) *certs.Source {
	e.t.Helper()
	pair, err := by.Issue(identity, time.Now(), 24*time.Hour)
	if err != nil {
		e.t.Fatal(err)
	}
	dir := e.t.TempDir()
	files := certs.Files{Cert: filepath.Join(dir, "cert"), Key: filepath.Join(dir, "key"), CA: filepath.Join(e.dir, "ca")}
	if err := errors.Join(os.WriteFile(files.Cert, pair.Cert, 0o600), os.WriteFile(files.Key, pair.Key, 0o600), os.WriteFile(files.CA, e.ca.Cert, 0o600)); err != nil {
		e.t.Fatal(err)
	}
	s, err := certs.Open(files, slog.New(slog.DiscardHandler))
	if err != nil {
		e.t.Fatal(err)
	}
	return s
}

// local is an endpoint on loopback, which ends with the test.
type local struct {
	*endpoint
	addr string
}

func serveLocally(t *testing.T) local {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	e, stop := serve(t, l)
	t.Cleanup(stop)
	return local{e, l.Addr().String()}
}

// client returns an HTTP client.
func (l local) client(cfg *tls.Config) *http.Client {
	transport := &http.Transport{TLSClientConfig: cfg, DialContext: func(context.Context, string, string) (net.Conn, error) {
		return net.Dial("tcp", l.addr)
	}}
	l.t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// ask sends a request and returns the response.
func ask(t *testing.T, c *http.Client, method, path string, body []byte) (code int, answer string, err error) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, "https://gw-1"+path, bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := c.Do(r)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), err
}

func encode(t *testing.T, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Each kind of request gets its own status and message, in one life of a gateway.
func TestAnswers(t *testing.T) {
	e := serveLocally(t)
	c := e.client(e.source(certs.Controller, e.ca).Client("gw-1"))
	bad := request(3, one)
	bad.State.Group = ""
	foreign := request(9, one)
	foreign.State.Cluster = "b"
	for _, tt := range []struct {
		name, method, path string
		body               []byte
		code               int
		want               string // part of the response
	}{
		{"before the first request", "GET", "/v1/state", nil, 200, `"generation":0`},
		{"first", "POST", "/v1/reconfigure", encode(t, request(2, one)), 200, `"generation":2`},
		{"again", "POST", "/v1/reconfigure", encode(t, request(2, one)), 200, `"announced":["198.51.100.1"]`},
		{"the same generation, another state", "POST", "/v1/reconfigure", encode(t, request(2, two)), 409, "generation 2 has another state here"},
		{"older", "POST", "/v1/reconfigure", encode(t, request(1, two)), 409, "this gateway has 2"},
		{"invalid", "POST", "/v1/reconfigure", encode(t, desired.NewRequest(3, bad.State)), 400, `"field":"group"`},
		{"a request of another cluster", "POST", "/v1/reconfigure", encode(t, desired.NewRequest(9, foreign.State)), 421, "but this gateway is of cluster"},
		{"a renewal, without a file for it", "POST", "/v1/certificate/request", []byte("{}"), 404, "renewed by replacing its files"},
		{"a certificate, without a file for it", "POST", "/v1/certificate", []byte(`{"certificate":"x"}`), 404, "renewed by replacing its files"},
		{"no certificate", "POST", "/v1/certificate", []byte("x"), 400, "read the request"},
		{"garbage", "POST", "/v1/reconfigure", bytes.Repeat([]byte("\xff"), 1<<20), 400, "read the request"},
		{"garbage in JSON", "POST", "/v1/reconfigure", append([]byte(`{"generation":`), bytes.Repeat([]byte("9"), 1<<20)...), 400, "read the request"},
		{"an oversized request", "POST", "/v1/reconfigure", make([]byte, maxBody+1), 413, "larger than 16777216"},
		{"another method", "DELETE", "/v1/state", nil, 405, ""},
		{"another path", "GET", "/", nil, 404, ""},
		{"the state afterwards", "GET", "/v1/state", nil, 200, `"generation":2`},
	} {
		code, answer, err := ask(t, c, tt.method, tt.path, tt.body)
		if err != nil || code != tt.code || !strings.Contains(answer, tt.want) {
			t.Errorf("%s: %d %s, %v, want %d with %q", tt.name, code, answer, err, tt.code, tt.want)
		}
	}
	if have := e.agent.Stats().Reconfigurations; have[200] != 2 || have[400] != 3 || have[409] != 2 || have[413] != 1 || have[421] != 1 {
		t.Errorf("counted %v", have)
	}
}

// Only the controller may send requests; other certificates are refused.
func TestUnknownClients(t *testing.T) {
	e := serveLocally(t)
	other, err := certs.NewAuthority("test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	none := e.source(certs.Controller, e.ca).Client("gw-1")
	none.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return new(tls.Certificate), nil }
	old := e.source(certs.Controller, e.ca).Client("gw-1")
	old.MinVersion, old.MaxVersion, old.Renegotiation = tls.VersionTLS12, tls.VersionTLS12, tls.RenegotiateFreelyAsClient
	for name, cfg := range map[string]*tls.Config{
		"without a certificate": none, "of another authority": e.source(certs.Controller, other).Client("gw-1"),
		"TLS that renegotiates": old, "a client that wants another gateway": e.source(certs.Controller, e.ca).Client("gw-2"),
	} {
		c := e.client(cfg)
		if code, answer, err := ask(t, c, "POST", "/v1/reconfigure", encode(t, request(1, one))); err == nil {
			t.Errorf("%s: %d %s", name, code, answer)
		}
	}
	c := e.client(e.source("gw-2", e.ca).Client("gw-1"))
	for _, path := range []string{"/v1/state", "/v1/reconfigure", "/"} {
		if code, answer, err := ask(t, c, "POST", path, encode(t, request(1, one))); err != nil || code != 403 || !strings.Contains(answer, certs.Controller) {
			t.Errorf("another gateway: %d %s, %v", code, answer, err)
		}
	}
	if s := e.agent.Stats(); s.Status.Generation != 0 || len(s.Reconfigurations) != 0 {
		t.Errorf("an unknown client was accepted: %+v", s)
	}
}

// Removing an authority locks out its controllers, including connected ones.
func TestRemovedAuthority(t *testing.T) {
	e := serveLocally(t)
	c := e.client(e.source(certs.Controller, e.ca).Client("gw-1"))
	if code, _, err := ask(t, c, "GET", "/v1/state", nil); err != nil || code != 200 {
		t.Fatal(code, err)
	}
	next, err := certs.NewAuthority("the next", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(e.dir, "ca"), append([]byte("\n"), next.Cert...), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, _, err := ask(t, c, "GET", "/v1/state", nil); err != nil || code != 403 {
		t.Errorf("%d, %v, on a connection that is open", code, err)
	}
}

// Slow clients lose the connection, in the handshake, in the header and in the body.
func TestSlowClients(t *testing.T) {
	for name, tt := range map[string]struct {
		sends string
		tls   bool
		limit time.Duration
	}{
		"handshake": {"\x16", false, headerTimeout},
		"header":    {"POST /v1/reconfigure HTTP/1.1\r\nHost: g", true, headerTimeout},
		"body":      {"POST /v1/reconfigure HTTP/1.1\r\nHost: g\r\nContent-Length: 100\r\n\r\n{", true, bodyTimeout},
		"silence":   {"GET /v1/state HTTP/1.1\r\nHost: g\r\n\r\n", true, idleTimeout},
	} {
		synctest.Test(t, func(t *testing.T) {
			l := newPipes()
			e, stop := serve(t, l)
			defer stop()
			conn := l.dial()
			if tt.tls {
				c := tls.Client(conn, e.source(certs.Controller, e.ca).Client("gw-1"))
				if err := c.HandshakeContext(t.Context()); err != nil {
					t.Fatal(err)
				}
				conn = c
			}
			defer conn.Close()
			begin := time.Now()
			if _, err := conn.Write([]byte(tt.sends)); err != nil {
				t.Fatal(err)
			}
			_, _ = io.Copy(io.Discard, conn) // until the gateway closes the connection
			if took := time.Since(begin); took < tt.limit || took > tt.limit+time.Second {
				t.Errorf("%s: hung up after %v, want %v", name, took, tt.limit)
			}
		})
	}
}

// A header without an end is refused.
func TestHeaderLimit(t *testing.T) {
	e := serveLocally(t)
	c, err := tls.Dial("tcp", e.addr, e.source(certs.Controller, e.ca).Client("gw-1"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	go func() {
		_, _ = io.WriteString(c, "GET /v1/state HTTP/1.1\r\nHost: g\r\nX: "+strings.Repeat("x", 1<<20))
	}()
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil || resp.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
		t.Fatalf("%+v, %v", resp, err)
	}
	resp.Body.Close()
}

// A controller that disconnects in the middle leaves no half-applied change.
func TestClientDisconnects(t *testing.T) {
	m := newMachine()
	a := newAgent(t, m, statePath(t))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := a.Reconfigure(ctx, request(1, one)); err != nil || len(m.is[desired.ComponentVRRP]) != 1 {
		t.Errorf("%v, %v", m.is, err)
	}
	if diff := a.Stats().Status.Announced; len(diff) != 1 || diff[0] != netip.MustParseAddr("198.51.100.1") {
		t.Errorf("announced %v", diff)
	}
}
