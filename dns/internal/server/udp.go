package server

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// receiveBuffer is the size of a socket's receive buffer in bytes; a question takes about 800. Questions that arrive while
// the CPU is busy elsewhere are then answered late instead of lost. An empty buffer takes no memory.
const receiveBuffer = 4 << 20

// drainTime is how long a socket is read after the end was asked for. Questions left in a closed socket would be lost, and
// their clients would wait for seconds before they ask another server; questions to a closed port are refused at once. If
// questions arrived within drainTime, the socket is read for that long again, at most maxDrains times.
const (
	drainTime = 20 * time.Millisecond
	maxDrains = 25
)

// udpSocket is one of the sockets of an address. The kernel delivers all packets from one client socket to the same one.
type udpSocket struct {
	*net.UDPConn
	tally

	audience audience
}

// openUDP opens one of the UDP sockets of an address. They share the port by SO_REUSEPORT.
func openUDP(ctx context.Context, addr netip.AddrPort, to audience) (*net.UDPConn, error) {
	shared := listenConfig(func(fd int) error {
		if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer) != nil { // needs NET_ADMIN
			_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, receiveBuffer) // up to net.core.rmem_max
		}
		return errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1), setFreebind(fd, to))
	})
	conn, err := shared.ListenPacket(ctx, "udp", addr.String())
	if err != nil {
		return nil, explain("udp", addr, err)
	}
	return conn.(*net.UDPConn), nil
}

// portOf returns the port to which a socket is bound.
func portOf(conn net.PacketConn) uint16 {
	return conn.LocalAddr().(*net.UDPAddr).AddrPort().Port()
}

// drain lets reads go on for drainTime.
func (c *udpSocket) drain() {
	_ = c.SetReadDeadline(time.Now().Add(drainTime)) // fails only on a closed socket
}

// amplification is how many times longer than its question an answer is that counts as amplified.
const amplification = 3

// slip is the fraction of answers above the rate limit that are truncated rather than dropped: one in slip.
const slip = 2

// udpWorker answers the questions of one socket.
type udpWorker struct {
	server *Server
	socket *udpSocket
	batch  *batch

	responder responder
	clock     clock
	limit     rateLimit
	amplified rateLimit // answers to other machines that are much longer than their questions
	refusals  rateLimit // REFUSED answers to strangers
	rotation  uint32
	asked     uint64 // questions, for the sampled log
}

// serveUDP answers the questions of a socket until that is drained or closed, and returns the error of the last read.
func (s *Server) serveUDP(ctx context.Context, socket *udpSocket) error {
	b, err := newBatch(socket.UDPConn)
	if err != nil {
		return err
	}
	w := &udpWorker{server: s, socket: socket, batch: b, rotation: rand.Uint32(), asked: rand.Uint64()}
	w.limit.per, w.limit.rate = perClient, int32(s.Limits.Rate)
	if socket.audience != toPods {
		w.amplified.per, w.amplified.rate = perClient, int32(s.Limits.Amplified)
	}
	w.refusals.per, w.refusals.rate = perBlock, int32(s.Limits.Refusals.Each)
	var since, drains int // questions since the read deadline was set, and how often it was extended
	for {
		n, err := b.wait()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded) && since > 0 && drains < maxDrains:
			since, drains = 0, drains+1
			socket.drain()
			continue
		case errors.Is(err, net.ErrClosed), errors.Is(err, os.ErrDeadlineExceeded):
			return fmt.Errorf("read from udp %s: %w", socket.LocalAddr(), err)
		case err != nil:
			s.Log.Debug("read datagrams", "err", err) // such as ENOMEM
			pause(ctx, retry)
			continue
		}
		since += n
		for i := range n {
			if answer := w.answer(i); answer != nil {
				b.reply(i, answer)
			}
		}
		if err := b.flush(); err != nil && ctx.Err() == nil {
			s.Log.Debug("send answers", "err", err) // the clients retry
		}
	}
}

// answer returns the answer to question i of the batch, in memory of the batch, or nil for none.
func (w *udpWorker) answer(i int) []byte {
	query, whole := w.batch.query(i)
	peer := w.batch.peer(i)
	r := &w.responder
	r.out = w.batch.memory(i)
	if !w.server.serves(w.socket.audience, peer.Addr()) {
		return w.refuse(query, peer)
	}
	second := w.clock.now()
	if !w.limit.allows(peer.Addr(), second) {
		w.socket.limited.Add(1)
		if w.limit.every(peer.Addr(), slip) {
			return r.truncated(query)
		}
		return nil
	}
	var answer []byte
	if w.rotation++; whole {
		answer = r.respond(w.server.Zone(), query, overUDP, w.rotation)
	} else {
		answer = r.tooLong(query)
	}
	if len(answer) > amplification*len(query) && !w.amplified.allows(peer.Addr(), second) {
		w.socket.limited.Add(1)
		return r.truncated(query)
	}
	w.socket.count(r.last, answer != nil)
	if w.server.Sample > 0 {
		w.server.sample(&w.asked, r, answer, peer)
	}
	return answer
}

// refuse returns the answer to a question of a stranger, or nil beyond the limits. They are low, so it reads the clock for
// each question.
func (w *udpWorker) refuse(query []byte, peer netip.AddrPort) []byte {
	r, acl := &w.responder, &w.socket.acl[w.socket.audience]
	if len(query) < headerLen || query[2]&response != 0 {
		w.socket.ignored.Add(1)
		return nil
	}
	if now := uint32(time.Now().Unix()); !w.refusals.allows(peer.Addr(), now) || !w.server.refusals.allows(now) {
		acl[aclDropped].Add(1)
		return nil
	}
	answer := r.refuse(query)
	acl[aclRefused].Add(1)
	w.socket.count(r.last, true)
	if w.server.Sample > 0 {
		w.server.sample(&w.asked, r, answer, peer)
	}
	return answer
}
