// Package server receives DNS questions over UDP and TCP and answers them from a [zone.Zone]. It is the only package that
// parses DNS messages, and the only one that imports miekg/dns.
package server

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/dns/internal/zone"
)

// DefaultIdle is the idle timeout of TCP connections: "a few seconds" in RFC 7766, section 6.2.3.
const DefaultIdle = 8 * time.Second

// tcpSendBuffer limits the bytes buffered for a TCP client that does not read: one answer of the largest size. The
// kernel's default would buffer megabytes for each such client.
const tcpSendBuffer = maxTCP

// retry is the pause after a transient socket error.
const retry = 10 * time.Millisecond

// Limits bounds the resources that clients may use. Zero means no limit.
type Limits struct {
	// Rate is the number of answers per second that a client gets over UDP from one socket; an address has one socket for
	// each CPU. Above the rate, every second answer is truncated, so that the client retries over TCP, and the others are
	// dropped.
	Rate int
	// Connections is the number of open TCP connections of all clients, ConnectionsEach that of one client.
	Connections, ConnectionsEach int
}

// ExternalClients are clients outside of the cluster, such as virtual machines.
type ExternalClients struct {
	Listen []netip.AddrPort // addresses for them
	Allow  []netip.Prefix   // their source ranges
}

// allows reports whether a client is in an allowed range.
func (g ExternalClients) allows(client netip.Addr) bool {
	return slices.ContainsFunc(g.Allow, func(p netip.Prefix) bool { return p.Contains(client.Unmap()) })
}

// Config configures a Server.
type Config struct {
	// Zone returns the zone to answer a question from, or nil before there is one.
	Zone   func() *zone.Zone
	Limits Limits
	// ExternalClients are addresses besides those of Listen. Clients outside of Allow are refused there. This machine need
	// not have the addresses when Listen is called: they may move between machines.
	ExternalClients ExternalClients
	// Idle is the time that a TCP client may stay silent between questions, take to send one, or take to read an answer;
	// 0 means DefaultIdle.
	Idle time.Duration
	// Sample logs every Sample-th question of each socket and connection; 0 logs none.
	Sample uint64
	Log    *slog.Logger
}

// Server is a set of open sockets. Make one with [Listen].
type Server struct {
	Config
	conns    connLimit
	addrs    []netip.AddrPort
	udp      []*udpSocket
	tcp      []*tcpListener
	tcpTally tally
}

// Listen opens, on each address, a TCP socket and one UDP socket for each CPU that this process may use. If any fails, it
// opens none, and the error names the address, the port and the fix.
func Listen(ctx context.Context, addrs []netip.AddrPort, c Config) (*Server, error) {
	c.Idle = cmp.Or(c.Idle, DefaultIdle)
	s := &Server{Config: c, conns: connLimit{all: c.Limits.Connections, each: c.Limits.ConnectionsEach}}
	for i, addr := range slices.Concat(addrs, c.ExternalClients.Listen) {
		if err := s.listen(ctx, addr, i >= len(addrs)); err != nil {
			s.close()
			return nil, err
		}
	}
	return s, nil
}

// listen opens the sockets of one address. If the kernel chooses the port, the one it gives to UDP may be in use for TCP;
// listen then lets it choose again, a few times.
func (s *Server) listen(ctx context.Context, addr netip.AddrPort, external bool) error {
	udp, tcp, err := open(ctx, addr, external)
	for range 20 {
		if addr.Port() != 0 || !errors.Is(err, syscall.EADDRINUSE) {
			break
		}
		udp, tcp, err = open(ctx, addr, external)
	}
	if err != nil {
		return err
	}
	bound := netip.AddrPortFrom(addr.Addr(), portOf(udp))
	s.udp, s.tcp = append(s.udp, &udpSocket{UDPConn: udp, external: external}), append(s.tcp, &tcpListener{tcp, external})
	s.addrs = append(s.addrs, bound)
	for range runtime.GOMAXPROCS(0) - 1 {
		more, err := openUDP(ctx, bound, external)
		if err != nil {
			return err
		}
		s.udp = append(s.udp, &udpSocket{UDPConn: more, external: external})
	}
	return nil
}

// open opens a UDP socket, and a TCP socket on the same port. If one fails, it opens neither.
func open(ctx context.Context, addr netip.AddrPort, external bool) (*net.UDPConn, *net.TCPListener, error) {
	// SO_REUSEPORT also shares the port with other programs of the same user. A socket without it detects such a program.
	config := listenConfig(func(fd int) error { return setFreebind(fd, external) })
	exclusive, err := config.ListenPacket(ctx, "udp", addr.String())
	if err != nil {
		return nil, nil, explain("udp", addr, err)
	}
	addr = netip.AddrPortFrom(addr.Addr(), portOf(exclusive))
	if err := exclusive.Close(); err != nil {
		return nil, nil, explain("udp", addr, err)
	}
	udp, err := openUDP(ctx, addr, external)
	if err != nil {
		return nil, nil, err
	}
	tcp, err := config.Listen(ctx, "tcp", addr.String())
	if err != nil {
		_ = udp.Close()
		return nil, nil, explain("tcp", addr, err)
	}
	return udp, tcp.(*net.TCPListener), nil
}

// tcpListener is the TCP socket of an address.
type tcpListener struct {
	*net.TCPListener

	external bool // the address is for external clients
}

// listenConfig returns a ListenConfig that calls control on each socket before it is bound.
func listenConfig(control func(fd int) error) *net.ListenConfig {
	return &net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		failed := c.Control(func(fd uintptr) { err = control(int(fd)) })
		return errors.Join(failed, err)
	}}
}

// setFreebind lets a socket for external clients bind an address that this machine does not have, such as one that moves
// between nodes.
func setFreebind(fd int, external bool) error {
	if !external {
		return nil
	}
	return unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_FREEBIND, 1) // applies to IPv6 sockets too
}

// explain adds to err the socket that could not be opened, and the fix.
func explain(network string, addr netip.AddrPort, err error) error {
	fix := "choose another address with --dns-listen"
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		fix = fmt.Sprintf("another program uses the port (`ss -lnp 'sport = :%d'` shows which); stop it or choose another address with --dns-listen", addr.Port())
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		fix = fmt.Sprintf("no interface of this node has the address; add it (`ip address add %s dev lo`) or choose another address with --dns-listen", addr.Addr())
	case errors.Is(err, syscall.EACCES):
		fix = "ports below 1024 need the capability NET_BIND_SERVICE; grant it or choose another port with --dns-listen"
	}
	return fmt.Errorf("listen on %s address %s port %d: %w: %s", network, addr.Addr(), addr.Port(), cause(err), fix)
}

// cause returns the system call's error: the error of package net would repeat network, address and port.
func cause(err error) error {
	if sys := (*net.OpError)(nil); errors.As(err, &sys) {
		return sys.Err
	}
	return err
}

// Addrs returns the addresses of the open sockets, with the bound ports.
func (s *Server) Addrs() []netip.AddrPort { return slices.Clone(s.addrs) }

// Counts returns the counters since Listen.
func (s *Server) Counts() Counts {
	var c Counts
	for _, conn := range s.udp {
		c.addUDP(&conn.tally)
	}
	c.addTCP(&s.tcpTally)
	c.Dropped = dropped(s.udp)
	return c
}

// Serve answers questions until ctx is done, and then closes every socket and connection and returns nil. If a socket fails
// before, Serve ends and returns its error. No goroutine outlives it.
func (s *Server) Serve(ctx context.Context) error {
	g, running := errgroup.WithContext(ctx)
	defer s.close()
	defer context.AfterFunc(running, s.drain)()
	for _, conn := range s.udp {
		g.Go(func() error { return s.serveUDP(running, conn) })
	}
	for _, listener := range s.tcp {
		g.Go(func() error { return s.serveTCP(running, listener) })
	}
	err := g.Wait()
	if ctx.Err() != nil {
		return nil // the error is that of a socket closed because ctx is done
	}
	return err
}

// drain closes the TCP listeners, and lets the readers of UDP sockets end once their queues are empty.
func (s *Server) drain() {
	for _, listener := range s.tcp {
		_ = listener.Close()
	}
	for _, conn := range s.udp {
		conn.drain()
	}
}

// close closes all sockets. A second call has no effect.
func (s *Server) close() {
	for _, conn := range s.udp {
		_ = conn.Close() // a UDP socket buffers nothing that Close could lose
	}
	for _, listener := range s.tcp {
		_ = listener.Close()
	}
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
			client := conn.RemoteAddr().(*net.TCPAddr).AddrPort().Addr()
			if !s.conns.enter(client) {
				s.tcpTally.refused.Add(1)
				_ = conn.Close()
				continue
			}
			_ = conn.SetWriteBuffer(tcpSendBuffer) // on failure the default stays
			conns.Go(func() error {
				defer s.conns.leave(client)
				s.serveConn(ctx, conn, listener.external && !s.ExternalClients.allows(client))
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

// pause waits for d or until ctx is done.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// serveConn answers the questions of one connection in order, until the client closes it or is silent for too long, or
// until ctx is done. It closes the connection. If denied, all answers are REFUSED.
func (s *Server) serveConn(ctx context.Context, conn *net.TCPConn, denied bool) {
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	var length [2]byte
	r := responder{denied: denied}
	rotation := rand.Uint32()
	asked := rand.Uint64()
	from := conn.RemoteAddr().(*net.TCPAddr).AddrPort()
	for {
		_ = conn.SetDeadline(time.Now().Add(s.Idle)) // fails only on a closed connection; then the read fails too
		if _, err := io.ReadFull(conn, length[:]); err != nil {
			return
		}
		query := make([]byte, binary.BigEndian.Uint16(length[:]))
		if _, err := io.ReadFull(conn, query); err != nil {
			return
		}
		rotation++
		resp := r.respond(s.Zone(), query, overTCP, rotation)
		s.tcpTally.count(r.last, resp != nil)
		s.tcpTally.countDenied(r.denied && resp != nil)
		if s.Sample > 0 {
			s.sample(&asked, &r, resp, from)
		}
		if resp == nil {
			return // not a question: what follows cannot be trusted
		}
		if _, err := conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(resp))), resp...)); err != nil {
			_ = conn.SetLinger(0) // discard what the client has not read
			return
		}
	}
}
