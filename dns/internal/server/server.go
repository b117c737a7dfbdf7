// Package server receives DNS questions over UDP and TCP and answers them from a [zone.Zone]. It is the only package that
// parses DNS messages, and the only one that imports miekg/dns.
package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/dns/internal/zone"
)

// retry is the pause after a transient socket error.
const retry = 10 * time.Millisecond

// ExternalClients are clients outside of the cluster, such as virtual machines.
type ExternalClients struct {
	Listen []netip.AddrPort // addresses for them
	Allow  []netip.Prefix   // their source ranges
}

// Config configures a Server.
type Config struct {
	// Zone returns the zone to answer a question from, or nil before there is one.
	Zone   func() *zone.Zone
	Limits Limits
	// Guarded holds those addresses given to Listen that answer only clients of [Server.SetClients]; other clients are
	// refused there.
	Guarded []netip.AddrPort
	// ExternalClients are addresses besides those of Listen. Clients outside of Allow are refused there. This machine need
	// not have the addresses when Listen is called: they may move between machines.
	ExternalClients ExternalClients
	// Outside, if not nil, reports whether a client is on another machine. While SetClients has all pods, such a client that it
	// does not have is refused at the addresses for pods, too.
	Outside func(netip.Addr) bool
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
	// allowed holds the clients of each audience but toPods; nil means none.
	allowed [audiences]atomic.Pointer[clientSet]
	// podsKnown is set while allowed[toCluster] has all pods.
	podsKnown atomic.Bool

	outside  outsideCache
	refusals sharedLimit // REFUSED answers to strangers
	conns    [connClasses]slotLimit
	unread   [connClasses]slotLimit
	addrs    []netip.AddrPort
	udp      []*udpSocket
	tcp      []*tcpListener
	tcpTally tally
}

// audience is the kind of clients that an address is for.
type audience uint8

const (
	toPods     audience = iota // of this node; every client on it is answered
	toCluster                  // clients of SetClients
	toExternal                 // clients of ExternalClients
	audiences
)

// serves reports whether an address for an audience answers a client, which must be neither a mapped IPv4 address nor have a
// zone.
func (s *Server) serves(to audience, client netip.Addr) bool {
	if to == toPods {
		return !s.isStranger(client)
	}
	return s.allowed[to].Load().contains(client)
}

// isStranger reports whether a client at an address for pods is known to be on another machine, and not to be one of the cluster's
// clients. Pods may have addresses of the node's network.
func (s *Server) isStranger(client netip.Addr) bool {
	return s.podsKnown.Load() && s.Outside != nil && !s.allowed[toCluster].Load().contains(client) && s.outside.has(client, s.Outside)
}

// SetClients sets the clients that guarded addresses answer, and whether all pods are among them. Without a call they answer none.
func (s *Server) SetClients(allowed []netip.Prefix, pods bool) {
	s.allowed[toCluster].Store(newClientSet(allowed))
	s.podsKnown.Store(pods)
}

// Listen opens, on each address, a TCP socket and one UDP socket for each CPU that this process may use. If any fails, it
// opens none, and the error names the address, the port and the fix.
func Listen(ctx context.Context, addrs []netip.AddrPort, c Config) (*Server, error) {
	c.Idle = cmp.Or(c.Idle, DefaultIdle)
	s := &Server{Config: c}
	s.setLimits(c.Limits)
	s.refusals.rate = int32(c.Limits.Refusals.All)
	s.allowed[toExternal].Store(newClientSet(c.ExternalClients.Allow))
	for i, addr := range slices.Concat(addrs, c.ExternalClients.Listen) {
		to := toPods
		switch {
		case i >= len(addrs):
			to = toExternal
		case slices.Contains(c.Guarded, addr):
			to = toCluster
		}
		if err := s.listen(ctx, addr, to); err != nil {
			s.close()
			return nil, err
		}
	}
	return s, nil
}

// listen opens the sockets of one address. If the kernel chooses the port, the one it gives to UDP may be in use for TCP;
// listen then lets it choose again, a few times.
func (s *Server) listen(ctx context.Context, addr netip.AddrPort, to audience) error {
	udp, tcp, err := open(ctx, addr, to)
	for range 20 {
		if addr.Port() != 0 || !errors.Is(err, syscall.EADDRINUSE) {
			break
		}
		udp, tcp, err = open(ctx, addr, to)
	}
	if err != nil {
		return err
	}
	bound := netip.AddrPortFrom(addr.Addr(), portOf(udp))
	s.udp, s.tcp = append(s.udp, &udpSocket{UDPConn: udp, audience: to}), append(s.tcp, &tcpListener{tcp, to})
	s.addrs = append(s.addrs, bound)
	for range runtime.GOMAXPROCS(0) - 1 {
		more, err := openUDP(ctx, bound, to)
		if err != nil {
			return err
		}
		s.udp = append(s.udp, &udpSocket{UDPConn: more, audience: to})
	}
	return nil
}

// open opens a UDP socket, and a TCP socket on the same port. If one fails, it opens neither.
func open(ctx context.Context, addr netip.AddrPort, to audience) (*net.UDPConn, *net.TCPListener, error) {
	// SO_REUSEPORT also shares the port with other programs of the same user. A socket without it detects such a program.
	config := listenConfig(func(fd int) error { return setFreebind(fd, to) })
	exclusive, err := config.ListenPacket(ctx, "udp", addr.String())
	if err != nil {
		return nil, nil, explain("udp", addr, err)
	}
	addr = netip.AddrPortFrom(addr.Addr(), portOf(exclusive))
	if err := exclusive.Close(); err != nil {
		return nil, nil, explain("udp", addr, err)
	}
	udp, err := openUDP(ctx, addr, to)
	if err != nil {
		return nil, nil, err
	}
	tcp, err := openTCP(ctx, addr, to)
	if err != nil {
		_ = udp.Close()
		return nil, nil, err
	}
	return udp, tcp, nil
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
func setFreebind(fd int, to audience) error {
	if to != toExternal {
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

// pause waits for d or until ctx is done.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}
