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
	"path"
	"sync"
	"sync/atomic"

	utilnet "k8s.io/apimachinery/pkg/util/net"
)

// Target is the address and the credentials of a member's API server.
type Target struct {
	Server string // an https URL
	Token  string
	CA     string // PEM
}

// errNoTarget is returned for a member whose Secret is missing or broken.
var errNoTarget = errors.New("there are no credentials")

// transport sends requests to the member's current address. It returns no response from a connection on which the cluster
// has not proved that it is the member.
type transport struct {
	verify  func(ctx context.Context, send func(*http.Request) (*http.Response, error)) error
	current atomic.Pointer[session]
}

// receiveBuffer limits the bytes of a watch that wait for this process. The library's 4 MiB would add up to hundreds of MiB
// for all members while the processor is busy; the rest waits at the API server.
const receiveBuffer = 256 << 10

// session is the state of a transport for one Target.
type session struct {
	base   *url.URL
	token  string
	rt     *http.Transport
	ctx    context.Context //nolint:containedctx // requests of the session end with it
	cancel context.CancelFunc

	dials    atomic.Int64
	mu       sync.Mutex
	verified atomic.Int64 // the number of dials when the cluster last proved its identity
}

// set directs requests to a target from now on, and ends the requests to the former one.
func (t *transport) set(target Target) error {
	base, err := url.Parse(target.Server)
	if err != nil {
		return fmt.Errorf("server: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM([]byte(target.CA)) {
		return errors.New("ca.crt has no certificate in PEM")
	}
	s := &session{base: base, token: target.Token}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	var dialer net.Dialer
	s.rt = utilnet.SetTransportDefaults(&http.Transport{
		HTTP2:           &http.HTTP2Config{MaxReceiveBufferPerStream: receiveBuffer},
		TLSClientConfig: &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12},
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := dialer.DialContext(ctx, network, address)
			if err == nil {
				s.dials.Add(1)
			}
			return conn, err
		},
	})
	t.replace(s)
	return nil
}

// unset makes requests fail.
func (t *transport) unset() { t.replace(nil) }

func (t *transport) replace(s *session) {
	if was := t.current.Swap(s); was != nil {
		was.cancel()
		was.rt.CloseIdleConnections()
	}
}

// doubt requires the cluster to prove its identity again before its next response is returned.
func (t *transport) doubt() {
	if s := t.current.Load(); s != nil {
		s.verified.Store(-1)
	}
}

// probe requires the cluster to prove its identity now.
func (t *transport) probe(ctx context.Context) error {
	s := t.current.Load()
	if s == nil {
		return errNoTarget
	}
	s.verified.Store(-1)
	return t.prove(ctx, s)
}

// prove returns nil once the cluster has proved its identity on all connections of s so far.
func (t *transport) prove(ctx context.Context, s *session) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.verified.Load() != s.dials.Load() || s.dials.Load() == 0 {
		if err := t.verify(ctx, s.send); err != nil {
			return err
		}
		s.verified.Store(s.dials.Load())
	}
	return nil
}

// RoundTrip is part of http.RoundTripper.
func (t *transport) RoundTrip(req *http.Request) (*http.Response, error) {
	s := t.current.Load()
	if s == nil {
		return nil, errNoTarget
	}
	if req.Method != http.MethodGet { // a write cannot be undone afterwards
		if err := t.prove(req.Context(), s); err != nil {
			return nil, err
		}
	}
	resp, err := s.send(req)
	if err != nil {
		return nil, err
	}
	if err := t.prove(req.Context(), s); err != nil {
		_ = resp.Body.Close()
		return nil, err
	}
	return resp, nil
}

// send sends a request with the token of the session. The request and its response end with the session.
func (s *session) send(req *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancel(req.Context())
	release := context.AfterFunc(s.ctx, cancel)
	req = req.Clone(ctx)
	req.URL.Scheme, req.URL.Host, req.Host = s.base.Scheme, s.base.Host, ""
	req.URL.Path = s.base.Path + req.URL.Path
	req.Header.Set("Authorization", "Bearer "+s.token)
	if isSmallWatch(req.URL) {
		req.Header.Set("Accept-Encoding", "identity")
	}
	resp, err := s.rt.RoundTrip(req)
	if err != nil {
		release()
		cancel()
		return nil, err
	}
	resp.Body = &body{resp.Body, func() { release(); cancel() }}
	return resp, nil
}

// isSmallWatch reports whether a request watches a kind of which a member has few objects. Its responses are not compressed: a decompressor
// takes 48 KiB for as long as the watch lasts, 7 MiB for 20 members. The many endpoints and Services are worth one.
func isSmallWatch(u *url.URL) bool {
	kind := path.Base(u.Path)
	return u.Query().Get("watch") == "true" && kind != "endpointslices" && kind != "services"
}

// body is the body of a response. Close releases the context of the request.
type body struct {
	io.ReadCloser

	release func()
}

func (b *body) Close() error {
	defer b.release()
	return b.ReadCloser.Close()
}
