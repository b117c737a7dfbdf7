// Package server carries questions and answers: UDP and TCP sockets on one side, a [zone.Zone] on the
// other. It is the only package that knows the wire format, through miekg/dns.
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

// DefaultIdle is "a few seconds", for which RFC 7766, section 6.2.3, asks.
const DefaultIdle = 8 * time.Second

// unread is how many bytes of answers wait for a TCP client that does not read them: one of the largest kind. The
// kernel would keep megabytes for each.
const unread = maxTCP

// retry is how long a socket rests after an error that may pass.
const retry = 10 * time.Millisecond

// Limits are what clients may use. Zero is no limit.
type Limits struct {
	// Rate is how many answers over UDP a client gets in a second from one socket, of which an address has one for
	// each CPU. Of those it gets too many, every second one sends it to TCP, and the others are not sent.
	Rate int
	// Connections is how many clients may have open over TCP in all, and ConnectionsEach how many one of them.
	Connections, ConnectionsEach int
}

// Guests are clients that are no pod and no node.
type Guests struct {
	Listen []netip.AddrPort
	Allow  []netip.Prefix
}

// allows reports whether a client is one of them.
func (g Guests) allows(client netip.Addr) bool {
	return slices.ContainsFunc(g.Allow, func(p netip.Prefix) bool { return p.Contains(client.Unmap()) })
}

// Config says what a Server needs besides addresses.
type Config struct {
	// Zone is asked for the zone at each question and may return nil: no zone yet.
	Zone   func() *zone.Zone
	Limits Limits
	// Guests are addresses beside those of Listen that only clients in Allow may ask; others are refused. This machine
	// need not have them yet: whichever has them answers there.
	Guests Guests
	// Idle is how long a TCP client may stay silent between questions, or take over one of them or over reading an
	// answer; 0 is DefaultIdle.
	Idle time.Duration
	// Sample logs one of so many questions, of each socket and connection; 0 none.
	Sample uint64
	Log    *slog.Logger
}

// Server is a set of open sockets. Make one with [Listen].
type Server struct {
	Config
	conns connLimit
	addrs []netip.AddrPort
	udp   []*udpSocket
	tcp   []*tcpListener
	ofTCP tally
}

// Listen opens a TCP socket and, for each CPU that this process may use, a UDP socket on each address, or none at all.
// An error names the address, the port and the fix.
func Listen(ctx context.Context, addrs []netip.AddrPort, c Config) (*Server, error) {
	c.Idle = cmp.Or(c.Idle, DefaultIdle)
	s := &Server{Config: c, conns: connLimit{all: c.Limits.Connections, each: c.Limits.ConnectionsEach}}
	for i, addr := range slices.Concat(addrs, c.Guests.Listen) {
		if err := s.listen(ctx, addr, i >= len(addrs)); err != nil {
			s.close()
			return nil, err
		}
	}
	return s, nil
}

// listen opens the sockets of one address. When the kernel is to choose the port, UDP gets one that
// TCP may find in use; so it may choose again, a few times.
func (s *Server) listen(ctx context.Context, addr netip.AddrPort, guests bool) error {
	udp, tcp, err := open(ctx, addr, guests)
	for range 20 {
		if addr.Port() != 0 || !errors.Is(err, syscall.EADDRINUSE) {
			break
		}
		udp, tcp, err = open(ctx, addr, guests)
	}
	if err != nil {
		return err
	}
	bound := netip.AddrPortFrom(addr.Addr(), portOf(udp))
	s.udp, s.tcp = append(s.udp, &udpSocket{UDPConn: udp, guests: guests}), append(s.tcp, &tcpListener{tcp, guests})
	s.addrs = append(s.addrs, bound)
	for range runtime.GOMAXPROCS(0) - 1 {
		more, err := openUDP(ctx, bound, guests)
		if err != nil {
			return err
		}
		s.udp = append(s.udp, &udpSocket{UDPConn: more, guests: guests})
	}
	return nil
}

// open opens a UDP socket, and a TCP socket on the port that it got, or neither.
func open(ctx context.Context, addr netip.AddrPort, guests bool) (*net.UDPConn, *net.TCPListener, error) {
	// Sockets that share a port do so with those of other programs of the same user: only one that may not be shared
	// tells whether another one answers there.
	config := listenConfig(func(fd int) error { return anywhere(fd, guests) })
	only, err := config.ListenPacket(ctx, "udp", addr.String())
	if err != nil {
		return nil, nil, explain("udp", addr, err)
	}
	addr = netip.AddrPortFrom(addr.Addr(), portOf(only))
	if err := only.Close(); err != nil {
		return nil, nil, explain("udp", addr, err)
	}
	udp, err := openUDP(ctx, addr, guests)
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

// tcpListener is that of an address.
type tcpListener struct {
	*net.TCPListener

	guests bool // whether it is for guests
}

// listenConfig makes one whose sockets are set up by control before they are bound.
func listenConfig(control func(fd int) error) *net.ListenConfig {
	return &net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		failed := c.Control(func(fd uintptr) { err = control(int(fd)) })
		return errors.Join(failed, err)
	}}
}

// anywhere lets a socket for guests have an address that this machine does not have, which moves between nodes, say.
func anywhere(fd int, guests bool) error {
	if !guests {
		return nil
	}
	return unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_FREEBIND, 1) // of IPv6 sockets too
}

// explain says which socket could not be opened and what a person can do about it.
func explain(network string, addr netip.AddrPort, err error) error {
	fix := "choose another address with --dns-listen"
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		fix = fmt.Sprintf("another program answers there (`ss -lnp 'sport = :%d'` shows which); stop it or choose another address with --dns-listen", addr.Port())
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		fix = fmt.Sprintf("no interface of this node has it; add it (`ip address add %s dev lo`) or choose another address with --dns-listen", addr.Addr())
	case errors.Is(err, syscall.EACCES):
		fix = "ports below 1024 need the capability NET_BIND_SERVICE; grant it or choose another port with --dns-listen"
	}
	return fmt.Errorf("listen on %s address %s port %d: %w: %s", network, addr.Addr(), addr.Port(), cause(err), fix)
}

// cause returns the system's own words: net's error would repeat network, address and port.
func cause(err error) error {
	if sys := (*net.OpError)(nil); errors.As(err, &sys) {
		return sys.Err
	}
	return err
}

// Addrs returns the addresses that are served, with the ports that were bound.
func (s *Server) Addrs() []netip.AddrPort { return slices.Clone(s.addrs) }

// Counts returns what was counted since the start.
func (s *Server) Counts() Counts {
	var c Counts
	for _, conn := range s.udp {
		c.addUDP(&conn.tally)
	}
	c.addTCP(&s.ofTCP)
	c.Dropped = dropped(s.udp)
	return c
}

// Serve answers until ctx is done and then closes every socket and connection. It returns nil then, or
// the error of the first socket that broke before. No goroutine outlives it.
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
		return nil // the sockets were closed because the caller is done
	}
	return err
}

// drain takes no more connections, and lets the readers of UDP sockets end when these are empty.
func (s *Server) drain() {
	for _, listener := range s.tcp {
		_ = listener.Close()
	}
	for _, conn := range s.udp {
		conn.drain()
	}
}

// close closes all sockets; doing so twice is harmless.
func (s *Server) close() {
	for _, conn := range s.udp {
		_ = conn.Close() // nothing is buffered that could be lost
	}
	for _, listener := range s.tcp {
		_ = listener.Close()
	}
}

// serveTCP serves the connections of listener until it is closed, which is its error, and returns when
// all have ended.
func (s *Server) serveTCP(ctx context.Context, listener *tcpListener) error {
	var conns errgroup.Group
	defer func() { _ = conns.Wait() }() // connections report nothing
	for {
		conn, err := listener.AcceptTCP()
		switch {
		case err == nil:
			client := conn.RemoteAddr().(*net.TCPAddr).AddrPort().Addr()
			if !s.conns.enter(client) {
				s.ofTCP.refused.Add(1)
				_ = conn.Close()
				continue
			}
			_ = conn.SetWriteBuffer(unread) // or it stays as it is
			conns.Go(func() error {
				defer s.conns.leave(client)
				s.serveConn(ctx, conn, listener.guests && !s.Guests.allows(client)) // which closes it at once when ctx is done
				return nil
			})
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("accept on tcp %s: %w", listener.Addr(), err)
		default:
			// The peer gave up, or descriptors ran out. Let the others go on and try again soon.
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

// serveConn answers the questions of one connection, in order, until the client closes it, is silent for
// too long or ctx is done. A barred client is refused them all.
func (s *Server) serveConn(ctx context.Context, conn *net.TCPConn, barred bool) {
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	var length [2]byte
	r := responder{barred: barred}
	turn := rand.Uint32()
	asked := rand.Uint64()
	from := conn.RemoteAddr().(*net.TCPAddr).AddrPort()
	for {
		_ = conn.SetDeadline(time.Now().Add(s.Idle)) // fails only on a closed connection, and then so does the read
		if _, err := io.ReadFull(conn, length[:]); err != nil {
			return
		}
		query := make([]byte, binary.BigEndian.Uint16(length[:]))
		if _, err := io.ReadFull(conn, query); err != nil {
			return
		}
		turn++
		resp := r.respond(s.Zone(), query, overTCP, turn)
		s.ofTCP.count(r.last, resp != nil)
		s.ofTCP.countBarred(r.barred && resp != nil)
		if s.Sample > 0 {
			s.sample(&asked, &r, resp, from)
		}
		if resp == nil {
			return // not a question: nothing sensible will follow
		}
		if _, err := conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(resp))), resp...)); err != nil {
			_ = conn.SetLinger(0) // what the client did not read is not kept for it
			return
		}
	}
}
