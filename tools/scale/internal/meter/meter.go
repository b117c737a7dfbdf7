// Package meter counts the bytes of TCP connections that pass through it, to and from a server.
package meter

import (
	"context"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
)

// Meter forwards connections to one server. It counts the bytes of applications, TLS included, but neither packet headers nor
// TCP retransmissions.
type Meter struct {
	server   string
	listener net.Listener
	running  sync.WaitGroup

	sent, received atomic.Int64

	mu     sync.Mutex
	closed bool
	conns  map[net.Conn]bool
}

// New returns a meter in front of server, a host and port.
func New(ctx context.Context, server string) (*Meter, error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("listen for what goes to %s: %w", server, err)
	}
	m := &Meter{server: server, listener: listener, conns: map[net.Conn]bool{}}
	m.running.Go(m.accept)
	return m, nil
}

// Address returns the address for clients.
func (m *Meter) Address() string { return m.listener.Addr().String() }

// Sent and Received return the bytes that clients have sent to the server and received from it so far.
func (m *Meter) Sent() int64 { return m.sent.Load() }

// Received is described with Sent.
func (m *Meter) Received() int64 { return m.received.Load() }

// Close ends all connections.
func (m *Meter) Close() {
	_ = m.listener.Close()
	m.mu.Lock()
	m.closed = true
	for c := range m.conns {
		_ = c.Close()
	}
	m.mu.Unlock()
	m.running.Wait()
}

func (m *Meter) accept() {
	for {
		client, err := m.listener.Accept()
		if err != nil {
			return
		}
		m.running.Go(func() { m.forward(client) })
	}
}

// forward copies both directions until either ends.
func (m *Meter) forward(client net.Conn) {
	if !m.admit(client) {
		return
	}
	defer m.dismiss(client)
	server, err := net.Dial("tcp", m.server) //nolint:noctx // a local server answers or refuses at once
	if err != nil {
		return // the client sees its connection end, as without a meter
	}
	if !m.admit(server) {
		return
	}
	defer m.dismiss(server)
	var back sync.WaitGroup
	back.Go(func() {
		_, _ = io.Copy(client, counting{server, &m.received})
		_ = client.Close()
	})
	_, _ = io.Copy(server, counting{client, &m.sent})
	_ = server.Close()
	back.Wait()
}

// admit registers c with Close, or closes it after Close.
func (m *Meter) admit(c net.Conn) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		_ = c.Close()
		return false
	}
	m.conns[c] = true
	return true
}

func (m *Meter) dismiss(c net.Conn) {
	_ = c.Close()
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.conns, c)
}

// counting counts bytes before it passes them on, so that a receiver finds its bytes counted.
type counting struct {
	from  io.Reader
	bytes *atomic.Int64
}

func (c counting) Read(p []byte) (int, error) {
	n, err := c.from.Read(p)
	c.bytes.Add(int64(n))
	return n, err
}
