package httpserver

import (
	"container/list"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Limits bound the connections of a listener.
type Limits struct {
	Name      string // of the listener, in metrics
	Total     int    // connections at a time
	PerSource int    // of one source
	// Evict makes room for a new connection at Total: the oldest connection without access is closed. Without it, the new one is.
	Evict bool
}

// DefaultLimits are those of a Server.
var DefaultLimits = Limits{Name: "http", Total: 256, PerSource: 32, Evict: true}

// Listener accepts connections within Limits. It closes others at once, and counts them in Refused.
type Listener struct {
	net.Listener
	Refused *Refusals

	limits  Limits
	sources *sources

	open atomic.Int64
	mu   sync.Mutex
	// strangers are the connections that sent no request with access, oldest first.
	strangers *list.List
}

// Limit returns a listener that bounds the connections of l.
func Limit(l net.Listener, limits Limits) *Listener {
	return &Listener{Listener: l, Refused: newRefusals(), limits: limits, sources: newSources(time.Now), strangers: list.New()}
}

// Accept implements net.Listener.
func (l *Listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		reason, admitted := l.admit(c)
		if reason == "" {
			return admitted, nil
		}
		l.Refused.add(reason)
		_ = c.Close() // the client may have closed it before
	}
}

// Open returns the number of open connections.
func (l *Listener) Open() int { return int(l.open.Load()) }

// admit returns the connection to serve, or the reason to refuse it.
func (l *Listener) admit(c net.Conn) (refused string, admitted net.Conn) {
	all := l.sources
	all.mu.Lock()
	defer all.mu.Unlock()
	source := all.of(c.RemoteAddr())
	source.used = all.now()
	switch {
	case source.open >= l.limits.PerSource:
		return sourceConnections, nil
	case !source.connections.take(connectionBudget, all.now()):
		return connectionRate, nil
	case l.Open() >= l.limits.Total && !l.evict():
		return connections, nil
	}
	source.open++
	l.open.Add(1)
	x := &conn{Conn: c, listener: l, source: source}
	l.mu.Lock()
	defer l.mu.Unlock()
	x.place = l.strangers.PushBack(x)
	return "", x
}

// evict closes the oldest connection without access. It reports whether there was one. The caller holds mu of sources.
func (l *Listener) evict() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	oldest := l.strangers.Front()
	if !l.limits.Evict || oldest == nil {
		return false
	}
	l.strangers.Remove(oldest)
	x := oldest.Value.(*conn)
	x.place = nil
	l.Refused.add(evicted)
	if !x.closed.Swap(true) {
		l.open.Add(-1)
		x.source.open--
	}
	_ = x.Conn.Close() // its server learns it from the next read
	return true
}

// conn is a connection that counts towards Limits.
type conn struct {
	net.Conn
	listener *Listener
	source   *Source
	closed   atomic.Bool
	place    *list.Element // in strangers; nil for a connection with access. The listener's mu guards it.
}

// trust keeps a connection from eviction.
func (c *conn) trust() {
	c.listener.mu.Lock()
	defer c.listener.mu.Unlock()
	if c.place != nil {
		c.listener.strangers.Remove(c.place)
		c.place = nil
	}
}

// Close implements net.Conn.
func (c *conn) Close() error {
	if !c.closed.Swap(true) {
		c.trust()
		c.listener.open.Add(-1)
		c.source.all.mu.Lock()
		c.source.open--
		c.source.all.mu.Unlock()
	}
	return c.Conn.Close()
}
