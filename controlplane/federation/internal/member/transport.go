package member

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"sync"
	"sync/atomic"

	utilnet "k8s.io/apimachinery/pkg/util/net"
)

// Target is how a member's API server is reached.
type Target struct {
	Server string // an https URL
	Token  string
	CA     string // PEM
}

// errNoTarget is of a member whose Secret is missing or broken.
var errNoTarget = errors.New("there are no credentials")

// transport sends requests to wherever the member is now. It lets no answer through from a connection on which the
// cluster has not shown that it is the member.
type transport struct {
	verify func(ctx context.Context, send func(*http.Request) (*http.Response, error)) error
	line   atomic.Pointer[line]
}

// receiveBuffer is how many bytes of a watch may wait for this process. The library's 4 MiB come to hundreds for all members when
// the processor is busy; the rest waits at the API server.
const receiveBuffer = 256 << 10

// line is what a transport has for one Target.
type line struct {
	base   *url.URL
	token  string
	rt     *http.Transport
	ctx    context.Context //nolint:containedctx // it ends with the line, and so do requests on it
	cancel context.CancelFunc

	dials atomic.Int64
	mu    sync.Mutex
	shown atomic.Int64 // how many dials there were when the cluster last showed who it is
}

// set makes requests go to a target from now on, and ends those that are under way to another one.
func (t *transport) set(target Target) error {
	base, err := url.Parse(target.Server)
	if err != nil {
		return fmt.Errorf("server: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM([]byte(target.CA)) {
		return errors.New("ca.crt has no certificate in PEM")
	}
	l := &line{base: base, token: target.Token}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	var dialer net.Dialer
	l.rt = utilnet.SetTransportDefaults(&http.Transport{
		HTTP2:           &http.HTTP2Config{MaxReceiveBufferPerStream: receiveBuffer},
		TLSClientConfig: &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12},
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := dialer.DialContext(ctx, network, address)
			if err == nil {
				l.dials.Add(1)
			}
			return conn, err
		},
	})
	t.replace(l)
	return nil
}

// unset makes requests fail.
func (t *transport) unset() { t.replace(nil) }

func (t *transport) replace(l *line) {
	if was := t.line.Swap(l); was != nil {
		was.cancel()
		was.rt.CloseIdleConnections()
	}
}

// doubt makes the cluster show again who it is, before any other answer of it counts.
func (t *transport) doubt() {
	if l := t.line.Load(); l != nil {
		l.shown.Store(-1)
	}
}

// ask lets the cluster show who it is, whether or not it has.
func (t *transport) ask(ctx context.Context) error {
	l := t.line.Load()
	if l == nil {
		return errNoTarget
	}
	l.shown.Store(-1)
	return t.show(ctx, l)
}

// show returns nil once the cluster on all connections of l so far has shown to be the member.
func (t *transport) show(ctx context.Context, l *line) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.shown.Load() != l.dials.Load() || l.dials.Load() == 0 {
		if err := t.verify(ctx, l.send); err != nil {
			return err
		}
		l.shown.Store(l.dials.Load())
	}
	return nil
}

// RoundTrip is http.RoundTripper's.
func (t *transport) RoundTrip(req *http.Request) (*http.Response, error) {
	l := t.line.Load()
	if l == nil {
		return nil, errNoTarget
	}
	if req.Method != http.MethodGet { // it cannot be taken back afterwards
		if err := t.show(req.Context(), l); err != nil {
			return nil, err
		}
	}
	resp, err := l.send(req)
	if err != nil {
		return nil, err
	}
	if err := t.show(req.Context(), l); err != nil {
		_ = resp.Body.Close()
		return nil, err
	}
	return resp, nil
}

// send sends a request by this line, with its token. The request and its answer end with the line.
func (l *line) send(req *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancel(req.Context())
	release := context.AfterFunc(l.ctx, cancel)
	req = req.Clone(ctx)
	req.URL.Scheme, req.URL.Host, req.Host = l.base.Scheme, l.base.Host, ""
	req.URL.Path = l.base.Path + req.URL.Path
	req.Header.Set("Authorization", "Bearer "+l.token)
	resp, err := l.rt.RoundTrip(req)
	if err != nil {
		release()
		cancel()
		return nil, err
	}
	resp.Body = &body{resp.Body, func() { release(); cancel() }}
	return resp, nil
}

// body is an answer's body that lets go of its request's context.
type body struct {
	io.ReadCloser

	release func()
}

func (b *body) Close() error {
	defer b.release()
	return b.ReadCloser.Close()
}
