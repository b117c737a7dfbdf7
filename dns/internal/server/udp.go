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

// received is how many bytes of questions may wait in a socket, at some 800 a question. What comes while the node is
// busy elsewhere is answered late then, and not lost; where nobody waits it takes no memory.
const received = 4 << 20

// lastCall is how long sockets are read at the end: what lies in them would be lost, and its clients would wait for
// seconds before they ask somebody else, while a closed socket refuses at once.
// While there is something, there is another call, so often at most.
const (
	lastCall  = 20 * time.Millisecond
	lastCalls = 25
)

// udpSocket is one of those of an address. The kernel gives all packets of a client's socket to the same one.
type udpSocket struct {
	*net.UDPConn
	tally

	guests bool // whether it is for guests
}

// openUDP opens one of several UDP sockets of an address.
func openUDP(ctx context.Context, addr netip.AddrPort, guests bool) (*net.UDPConn, error) {
	shared := listenConfig(func(fd int) error {
		if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, received) != nil { // which needs NET_ADMIN
			_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, received) // up to net.core.rmem_max
		}
		return errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1), anywhere(fd, guests))
	})
	conn, err := shared.ListenPacket(ctx, "udp", addr.String())
	if err != nil {
		return nil, explain("udp", addr, err)
	}
	return conn.(*net.UDPConn), nil
}

// portOf returns the port that a socket is bound to.
func portOf(conn net.PacketConn) uint16 {
	return conn.LocalAddr().(*net.UDPAddr).AddrPort().Port()
}

func (c *udpSocket) drain() {
	_ = c.SetReadDeadline(time.Now().Add(lastCall)) // fails only on a closed socket
}

// slip is how many of the answers that a client must not have make one that sends it to TCP.
const slip = 2

// udpDesk answers what comes to one socket.
type udpDesk struct {
	server *Server
	socket *udpSocket
	batch  *batch

	responder responder
	clock     clock
	limit     rateLimit
	turn      uint32
	asked     uint64 // for the log
}

// serveUDP answers the datagrams of a socket until it is drained or closed, which is its error.
func (s *Server) serveUDP(ctx context.Context, socket *udpSocket) error {
	b, err := newBatch(socket.UDPConn)
	if err != nil {
		return err
	}
	d := &udpDesk{server: s, socket: socket, batch: b, limit: rateLimit{rate: int32(s.Limits.Rate)}, turn: rand.Uint32(), asked: rand.Uint64()}
	var since, calls int // questions since the last call, and how many there were
	for {
		n, err := b.wait()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded) && since > 0 && calls < lastCalls:
			since, calls = 0, calls+1
			socket.drain()
			continue
		case errors.Is(err, net.ErrClosed), errors.Is(err, os.ErrDeadlineExceeded):
			return fmt.Errorf("read from udp %s: %w", socket.LocalAddr(), err)
		case err != nil:
			s.Log.Debug("read datagrams", "err", err) // such as memory running out
			pause(ctx, retry)
			continue
		}
		since += n
		for i := range n {
			if answer := d.answer(i); answer != nil {
				b.reply(i, answer)
			}
		}
		if err := b.flush(); err != nil && ctx.Err() == nil {
			s.Log.Debug("send answers", "err", err) // the clients ask again
		}
	}
}

// answer returns the answer to the question number i of the batch, in its memory, or nil.
func (d *udpDesk) answer(i int) []byte {
	query, whole := d.batch.query(i)
	peer := d.batch.peer(i)
	r := &d.responder
	r.out = d.batch.memory(i)
	if !d.limit.allows(peer.Addr(), d.clock.now()) {
		d.socket.limited.Add(1)
		if d.limit.every(peer.Addr(), slip) {
			return r.truncated(query)
		}
		return nil
	}
	r.barred = d.socket.guests && !d.server.Guests.allows(peer.Addr())
	var answer []byte
	if d.turn++; whole {
		answer = r.respond(d.server.Zone(), query, overUDP, d.turn)
	} else {
		answer = r.tooLong(query)
	}
	d.socket.count(r.last, answer != nil)
	d.socket.countBarred(r.barred && answer != nil)
	if d.server.Sample > 0 {
		d.server.sample(&d.asked, r, answer, peer)
	}
	return answer
}
