package server

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"
)

// connections returns the number of open TCP connections.
func (s *Server) connections() (n int) {
	for i := range s.conns {
		n += s.conns[i].count()
	}
	return n
}

// closedWithin fails the test unless the server closes or resets the connection within d.
func closedWithin(t *testing.T, conn net.Conn, d time.Duration) {
	t.Helper()
	if err := conn.SetReadDeadline(time.Now().Add(d)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, conn); err != nil && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("still open after %s: %v", d, err)
	}
}

// Clients that send nothing, send slowly or do not read lose their connection, and no other client waits for them.
func TestSlowClients(t *testing.T) {
	t.Parallel()
	const idle = 200 * time.Millisecond
	query := ask(t, "many.demo.svc.clusterset.local.", dns.TypeA, nil)
	framed := append([]byte{0, byte(len(query))}, query...)
	for name, behave := range map[string]func(*testing.T, *net.TCPConn){
		"sends nothing": func(*testing.T, *net.TCPConn) {},
		"sends half":    func(_ *testing.T, c *net.TCPConn) { _, _ = c.Write(framed[:7]) },
		"half closed":   func(_ *testing.T, c *net.TCPConn) { _ = c.CloseWrite() },
		"sends a byte at a time": func(t *testing.T, c *net.TCPConn) { // each byte in time, the whole question not
			t.Helper()
			tick := time.NewTicker(idle / 8)
			defer tick.Stop()
			for _, b := range framed {
				<-tick.C
				if _, err := c.Write([]byte{b}); err != nil {
					return
				}
			}
			t.Error("a question that took too long was read to its end")
		},
		"does not read": func(t *testing.T, c *net.TCPConn) {
			t.Helper()
			if err := errors.Join(c.SetReadBuffer(1), c.SetWriteDeadline(time.Now().Add(2*time.Second))); err != nil {
				t.Fatal(err)
			}
			for {
				if _, err := c.Write(framed); err != nil {
					return
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, serve := listen(t, Config{Idle: idle})
			serve()
			other, conn := dial(t, "udp", s), dial(t, "tcp", s)
			exchange(t, conn, query)
			behave(t, conn.(*net.TCPConn))
			tick := time.NewTicker(time.Millisecond)
			defer tick.Stop()
			for end := time.Now().Add(20 * time.Second); s.connections() > 0; <-tick.C {
				if time.Now().After(end) {
					t.Fatal("the connection is still open")
				}
			}
			exchange(t, other, query)
		})
	}
}

// With 10,000 simultaneous connections, those within the limit are served and the others are closed at once. Once they have
// ended, new ones are accepted.
func TestTenThousandConnections(t *testing.T) {
	const clients, each, all = 50, 200, 8192
	raiseFileLimit(t, clients*each+all+500)
	s, serve := listen(t, Config{Idle: time.Minute, Limits: Limits{Pods: Budget{all, 256}}})
	serve()
	query := ask(t, helloName, dns.TypeA, nil)
	first := dial(t, "tcp", s)
	exchange(t, first, query)
	var conns []net.Conn
	for i := range clients {
		from := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 1, 0, byte(1+i))}}
		for range each {
			conn, err := from.DialContext(t.Context(), "tcp", s.Addrs()[0].String())
			if err != nil {
				t.Fatalf("after %d connections: %v", len(conns), err)
			}
			defer conn.Close()
			conns = append(conns, conn)
		}
	}
	closedWithin(t, conns[len(conns)-1], time.Minute)
	if n := s.Counts().Refused["pods"]; n != clients*each+1-all {
		t.Errorf("%d were refused, want %d", n, clients*each+1-all)
	}
	for name, conn := range map[string]net.Conn{"the first one": first, "one of many": conns[all/2], "UDP": dial(t, "udp", s)} {
		if answer := exchange(t, conn, query); answer[3]&rcodeMask != dns.RcodeSuccess {
			t.Errorf("%s: code %d", name, answer[3]&rcodeMask)
		}
	}
	for _, conn := range conns {
		_ = conn.Close()
	}
	deadline := time.Now().Add(time.Minute)
	for s.connections() > 1 && time.Now().Before(deadline) {
		_ = dial(t, "tcp", s).Close()
	}
	if n := s.connections(); n > 2 { // the first, and perhaps the last
		t.Errorf("%d connections are open after all but one were closed", n)
	}
	exchange(t, dial(t, "tcp", s), query)
}

// One client cannot use up the connections of all clients.
func TestConnectionsEach(t *testing.T) {
	t.Parallel()
	s, serve := listen(t, Config{Limits: Limits{Pods: Budget{100, 3}}})
	serve()
	query := ask(t, helloName, dns.TypeA, nil)
	for range 3 {
		exchange(t, dial(t, "tcp", s), query)
	}
	closedWithin(t, dial(t, "tcp", s), time.Minute)
	other := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.2:0"))}
	conn, err := other.DialContext(t.Context(), "tcp", s.Addrs()[0].String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	exchange(t, conn, query)
}

// raiseFileLimit raises the limit of open files to n.
func raiseFileLimit(t *testing.T, n uint64) {
	t.Helper()
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if limit.Cur >= n {
		return
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: n, Max: max(limit.Max, n)}); err != nil {
		t.Fatalf("this test opens %d files: %v", n, err)
	}
}
