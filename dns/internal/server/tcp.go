package server

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

const (
	// DefaultIdle is the idle timeout of TCP connections: "a few seconds" in RFC 7766, section 6.2.3.
	DefaultIdle = 8 * time.Second

	// strangerIdle is that of strangers, who may ask one question.
	strangerIdle = 2 * time.Second

	// maxTCPQuery is the size in bytes of the largest question over TCP. One with a name and EDNS has about 300.
	maxTCPQuery = 4096

	// maxSmall is the size of answers that clients need not read at once. Larger ones count against Limits.Unread.
	maxSmall = 4096

	// receiveTCP and sendTCP are the sizes of a connection's buffers; the kernel doubles them. Its defaults would buffer megabytes
	// for each client that does not read. A send buffer below the size of usual answers would wait for acknowledgements.
	receiveTCP = 16 << 10
	sendTCP    = 32 << 10
)

// tcpListener is the TCP socket of an address.
type tcpListener struct {
	*net.TCPListener

	audience audience
}

// openTCP opens the TCP socket of an address.
func openTCP(ctx context.Context, addr netip.AddrPort, to audience) (*net.TCPListener, error) {
	config := listenConfig(func(fd int) error {
		receive := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, receiveTCP) // connections inherit both
		send := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, sendTCP)
		return errors.Join(receive, send, setFreebind(fd, to))
	})
	config.KeepAlive = -1 // the idle timeout is shorter
	l, err := config.Listen(ctx, "tcp", addr.String())
	if err != nil {
		return nil, explain("tcp", addr, err)
	}
	return l.(*net.TCPListener), nil
}

// connClass is a class of clients with TCP connections of its own.
type connClass uint8

const (
	podConns connClass = iota
	neighbourConns
	strangerConns
	connClasses
)

// setLimits sets the limits of connections and of unread answers.
func (s *Server) setLimits(l Limits) {
	s.conns[podConns].Budget, s.conns[neighbourConns].Budget, s.conns[strangerConns].Budget = l.Pods, l.Neighbours, l.Strangers
	for i := range s.unread {
		s.unread[i].Budget = l.Unread
	}
	s.conns[podConns].whole, s.unread[podConns].whole = true, true
}

// classOf returns the class of a client. The addresses for pods answer everyone, but while the cluster's clients are known, no
// other client takes a connection of pods there.
func (s *Server) classOf(to audience, client netip.Addr) connClass {
	switch {
	case !s.serves(to, client):
		return strangerConns
	case to != toPods:
		return neighbourConns
	}
	if known := s.allowed[toCluster].Load(); known != nil && !known.contains(client) {
		return neighbourConns
	}
	return podConns
}

// serveTCP serves the connections of listener until that is closed, waits for them to end, and returns the error of
// Accept.
func (s *Server) serveTCP(ctx context.Context, listener *tcpListener) error {
	var conns errgroup.Group
	defer func() { _ = conns.Wait() }() // they return no errors
	for {
		conn, err := listener.AcceptTCP()
		switch {
		case err == nil:
			from := conn.RemoteAddr().(*net.TCPAddr).AddrPort()
			client := from.Addr().Unmap().WithZone("")
			class := s.classOf(listener.audience, client)
			limit := &s.conns[class]
			if ok, each := limit.enter(client); !ok {
				s.tcpTally.refused[refusal(class, each)].Add(1)
				_ = conn.Close()
				continue
			}
			conns.Go(func() error {
				defer limit.leave(client)
				c := &tcpConn{TCPConn: conn, server: s, from: from, audience: listener.audience, class: class, rotation: rand.Uint32(), asked: rand.Uint64()}
				c.serve(ctx)
				return nil
			})
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("accept on tcp %s: %w", listener.Addr(), err)
		default:
			// The client reset the connection, or the process is out of file descriptors. Other connections go on.
			s.Log.Debug("accept a connection", "err", err)
			pause(ctx, retry)
		}
	}
}

// tcpConn is an open connection. While it is idle, it holds no buffer.
type tcpConn struct {
	*net.TCPConn

	server   *Server
	from     netip.AddrPort
	audience audience
	class    connClass
	rotation uint32
	asked    uint64 // questions, for the sampled log
	length   [2]byte
	large    bool // the last answer did not fit into a small buffer
}

// serve answers the questions of the connection in order, until the client closes it, is silent for too long or does not
// read, or until ctx is done. It closes the connection. A stranger gets one answer, which is REFUSED.
func (c *tcpConn) serve(ctx context.Context) {
	defer c.Close()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	for {
		query, ok := c.read()
		if !ok || !c.answer(query) || c.class == strangerConns {
			return
		}
	}
}

// read returns the next question, or false if there will be none.
func (c *tcpConn) read() ([]byte, bool) {
	idle := c.server.Idle
	if c.class == strangerConns {
		idle = min(idle, strangerIdle)
	}
	_ = c.SetDeadline(time.Now().Add(idle)) // fails only on a closed connection; then the read fails too
	if _, err := io.ReadFull(c, c.length[:]); err != nil {
		return nil, false
	}
	n := binary.BigEndian.Uint16(c.length[:])
	if n > maxTCPQuery {
		c.server.tcpTally.refused[refusedSize].Add(1)
		return nil, false
	}
	query := make([]byte, n)
	_, err := io.ReadFull(c, query)
	return query, err == nil
}

// tcpBuffers holds the memory for one answer over TCP. The buffer begins with two bytes for the length.
type tcpBuffers struct {
	responder

	buffer []byte
}

// Buffers for answers of up to maxSmall bytes, and for larger ones.
var (
	smallBuffers = sync.Pool{New: func() any { return &tcpBuffers{buffer: make([]byte, 2+maxSmall)} }}
	largeBuffers = sync.Pool{New: func() any { return &tcpBuffers{buffer: make([]byte, 2+maxTCP)} }}
)

// answer answers a question. It returns false if the connection must end.
func (c *tcpConn) answer(query []byte) bool {
	pool := &smallBuffers
	if c.large {
		pool = &largeBuffers
	}
	b := pool.Get().(*tcpBuffers)
	frame := c.frame(b, query)
	c.large = len(frame) > 2+maxSmall
	if pool == &largeBuffers && !c.large {
		frame = append([]byte(nil), frame...) // a client that does not read must not keep a large buffer
	}
	if pool == &smallBuffers && c.large || pool == &largeBuffers && !c.large {
		pool.Put(b)
	} else {
		defer pool.Put(b)
	}
	if frame == nil {
		return false // not a question: the next bytes cannot be trusted
	}
	return c.send(frame)
}

// frame returns the answer to a question with its length in front, or nil for none. It is in memory of b if it fits.
func (c *tcpConn) frame(b *tcpBuffers, query []byte) []byte {
	s := c.server
	c.rotation++
	b.denied = c.class == strangerConns
	b.out = b.buffer[2:2]
	answer := b.respond(s.Zone(), query, overTCP, c.rotation)
	s.tcpTally.count(b.last, answer != nil)
	if b.denied && answer != nil {
		s.tcpTally.acl[c.audience][aclRefused].Add(1)
	}
	if s.Sample > 0 {
		s.sample(&c.asked, &b.responder, answer, c.from)
	}
	b.out = nil
	if answer == nil {
		return nil
	}
	frame := b.buffer[:2]
	if &answer[0] == &b.buffer[2] {
		frame = b.buffer[:2+len(answer)]
	} else {
		frame = append(frame[:2:2], answer...)
	}
	binary.BigEndian.PutUint16(frame, uint16(len(answer)))
	return frame
}

// send sends an answer. It returns false if the client did not read it in time, or too many others are unread.
func (c *tcpConn) send(frame []byte) bool {
	s := c.server
	if c.large {
		client := c.from.Addr().Unmap().WithZone("")
		if ok, _ := s.unread[c.class].enter(client); !ok {
			s.tcpTally.refused[refusedUnread].Add(1)
			return false
		}
		defer s.unread[c.class].leave(client)
	}
	if _, err := c.Write(frame); err != nil {
		if errors.Is(err, os.ErrDeadlineExceeded) {
			s.tcpTally.refused[refusedUnread].Add(1)
		}
		_ = c.SetLinger(0) // discard what the client has not read
		return false
	}
	return true
}
