// Package httpserver serves the probes, the metrics and the status of a program. In go handlers and an Access; out come
// answers for clients with access, and counted refusals for others. Probes are open.
package httpserver

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// timeouts are those of requests.
type timeouts struct {
	header time.Duration // also of the TLS handshake
	read   time.Duration
	write  time.Duration
	idle   time.Duration // longer than the interval of Prometheus
}

var defaultTimeouts = timeouts{header: 5 * time.Second, read: 10 * time.Second, write: time.Minute, idle: 2 * time.Minute}

// Sizes of requests, and of the end.
const (
	maxHeader = 16 << 10
	maxBody   = 64 << 10
	// shutdownTimeout is the time that running requests have to finish when the process ends.
	shutdownTimeout = 2 * time.Second
)

// Access decides about requests other than probes.
type Access interface {
	// Check returns nil, or the reason why a request of a source is refused.
	Check(r *http.Request, from *Source) *Refusal
}

// Refusal is the answer to a request without access.
type Refusal struct {
	Code    int // the HTTP status
	Reason  string
	Message string
}

// Config configures a Server.
type Config struct {
	Listener net.Listener
	TLS      *tls.Config // nil for plain HTTP
	Access   Access
	// Open lists paths that need no access, beside those of probes.
	Open []string
	Log  *slog.Logger
}

// Server serves one address. Handle and Probe must not be called after Serve.
type Server struct {
	cfg      Config
	listener *Listener
	timeouts timeouts
	probes   *http.ServeMux
	guarded  *http.ServeMux
}

// New returns a server without handlers, except for /healthz.
func New(cfg Config) *Server {
	s := &Server{cfg: cfg, listener: Limit(cfg.Listener, DefaultLimits), timeouts: defaultTimeouts, probes: http.NewServeMux(), guarded: http.NewServeMux()}
	s.Probe("/healthz", func() []string { return nil })
	return s
}

// Metrics returns the collector of the server's own metrics.
func (s *Server) Metrics() prometheus.Collector { return s.listener }

// Handle adds a handler for requests with access.
func (s *Server) Handle(pattern string, h http.Handler) { s.guarded.Handle(pattern, h) }

// Probe adds a path that is open to all clients. It answers 200 ok, or 503 with the reasons that waiting returns.
func (s *Server) Probe(path string, waiting func() []string) {
	s.probes.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) {
		reasons := waiting()
		if len(reasons) == 0 {
			_, _ = io.WriteString(w, "ok\n") // an error means that the client has gone
			return
		}
		w.WriteHeader(http.StatusServiceUnavailable)
		for _, reason := range reasons {
			_, _ = io.WriteString(w, reason+"\n")
		}
	})
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	from := s.connOf(r)
	if !from.source.takeRequest() {
		w.Header().Set("Connection", "close")
		s.refuse(w, r, &Refusal{http.StatusTooManyRequests, requestRate, "too many requests from this address"})
		return
	}
	if h, pattern := s.probes.Handler(r); pattern != "" {
		h.ServeHTTP(w, r)
		return
	}
	if !slices.Contains(s.cfg.Open, r.URL.Path) {
		if refused := s.cfg.Access.Check(r, from.source); refused != nil {
			s.refuse(w, r, refused)
			return
		}
		from.trust()
		from.source.SetKnown()
	}
	s.guarded.ServeHTTP(w, r)
}

// refuse counts and answers a request without access.
func (s *Server) refuse(w http.ResponseWriter, r *http.Request, x *Refusal) {
	if r.Context().Err() != nil && x.Reason == Unavailable {
		return // the client has gone
	}
	s.listener.Refused.add(x.Reason)
	if x.Code == http.StatusUnauthorized {
		w.Header().Set("WWW-Authenticate", "Bearer")
	}
	http.Error(w, x.Message, x.Code)
}

// connKey is the key of a request's conn in its context.
type connKey struct{}

// connOf returns the connection of a request. A request without one, as in tests of handlers, has a source of its own.
func (s *Server) connOf(r *http.Request) *conn {
	if c, ok := r.Context().Value(connKey{}).(*conn); ok {
		return c
	}
	return &conn{listener: s.listener, source: &Source{all: s.listener.sources}}
}

// Serve answers requests until ctx is done.
func (s *Server) Serve(ctx context.Context) error {
	requests, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	server := &http.Server{
		Handler:           http.MaxBytesHandler(s, maxBody),
		TLSConfig:         s.cfg.TLS,
		Protocols:         new(http.Protocols), // without HTTP/2, one connection carries one request at a time
		ReadHeaderTimeout: s.timeouts.header,
		ReadTimeout:       s.timeouts.read,
		WriteTimeout:      s.timeouts.write,
		IdleTimeout:       s.timeouts.idle,
		MaxHeaderBytes:    maxHeader,
		ErrorLog:          slog.NewLogLogger(s.cfg.Log.Handler(), slog.LevelDebug), // strangers decide how many there are
		BaseContext:       func(net.Listener) context.Context { return requests },
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			if t, ok := c.(*tls.Conn); ok {
				c = t.NetConn()
			}
			return context.WithValue(ctx, connKey{}, c)
		},
	}
	server.Protocols.SetHTTP1(true)
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		select {
		case <-ctx.Done():
		case <-requests.Done():
		}
		end() // streams end
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
		defer cancel()
		if server.Shutdown(ctx) != nil {
			_ = server.Close() // the listener is closed already
		}
	}()
	err := s.serve(server)
	end()
	<-stopped
	if !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve HTTP on %s: %w", s.listener.Addr(), err)
	}
	return nil
}

func (s *Server) serve(server *http.Server) error {
	if s.cfg.TLS == nil {
		return server.Serve(s.listener)
	}
	return server.ServeTLS(s.listener, "", "")
}

// Stream lifts the deadlines of one request, whose answer never ends. Before each write, the handler must call the returned
// function, which gives the client a minute to read it.
func Stream(w http.ResponseWriter) (extend func()) {
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(time.Time{}) // recorders of tests have no deadlines
	return func() { _ = control.SetWriteDeadline(time.Now().Add(defaultTimeouts.write)) }
}
