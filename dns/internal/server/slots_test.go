package server

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"runtime"
	"runtime/debug"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/dns/internal/zone"
)

// listenOn is listen with one address for pods and one that is guarded, and a headless Service with some endpoints.
func listenOn(t *testing.T, endpoints int, c Config, clients ...string) (s *Server, pods, guarded netip.AddrPort) {
	t.Helper()
	z := testZone(endpoints)
	c.Zone, c.Log = func() *zone.Zone { return z }, slog.New(slog.DiscardHandler)
	local, node := netip.MustParseAddrPort("127.0.0.1:0"), netip.MustParseAddrPort("127.0.0.2:0")
	c.Guarded = []netip.AddrPort{node}
	s, err := Listen(t.Context(), []netip.AddrPort{local, node}, c)
	if err != nil {
		t.Fatal(err)
	}
	var allowed []netip.Prefix
	for _, text := range clients {
		allowed = append(allowed, netip.MustParsePrefix(text))
	}
	s.SetClients(allowed, true)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return s, s.Addrs()[0], s.Addrs()[1]
}

// dialFrom connects from a source address.
func dialFrom(t *testing.T, from string, to netip.AddrPort) *net.TCPConn {
	t.Helper()
	d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(from), 0))}
	conn, err := d.DialContext(t.Context(), "tcp", to.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	return conn.(*net.TCPConn)
}

// Pods, neighbours and strangers have connections of their own. Clients that are not known at an address for pods get answers, but
// take no connections of pods.
func TestConnectionClasses(t *testing.T) {
	t.Parallel()
	s, pods, guarded := listenOn(t, 4000, Config{Limits: Limits{Pods: Budget{All: 3, Each: 2}, Neighbours: Budget{All: 3, Each: 2}, Strangers: Budget{All: 2, Each: 1}}}, "127.0.1.0/24")
	query := ask(t, helloName, dns.TypeA, nil)
	answered := func(from string, to netip.AddrPort, code byte) *net.TCPConn {
		t.Helper()
		conn := dialFrom(t, from, to)
		if answer := exchange(t, conn, query); answer[3]&rcodeMask != code {
			t.Errorf("%s at %s: code %d, want %d", from, to, answer[3]&rcodeMask, code)
		}
		return conn
	}
	closed := func(from string, to netip.AddrPort, reason string) {
		t.Helper()
		before := s.Counts().Refused[reason]
		closedWithin(t, dialFrom(t, from, to), time.Minute)
		if n := s.Counts().Refused[reason] - before; n != 1 {
			t.Errorf("%s at %s: %d refusals because of %s", from, to, n, reason)
		}
	}
	for range 2 { // unknown clients fill the share of neighbours at the pods' address
		answered("127.0.9.1", pods, dns.RcodeSuccess)
	}
	closed("127.0.9.1", pods, "client")
	answered("127.0.9.2", pods, dns.RcodeSuccess)
	closed("127.0.9.3", pods, "neighbours")
	closed("127.0.1.9", guarded, "neighbours")
	for _, from := range []string{"127.0.9.1", "127.0.9.2"} { // strangers wait for their question
		dialFrom(t, from, guarded)
	}
	closed("127.0.9.1", guarded, "client")
	closed("127.0.9.3", guarded, "strangers")
	answered("127.0.1.1", pods, dns.RcodeSuccess)
	answered("127.0.1.1", pods, dns.RcodeSuccess)
	closed("127.0.1.1", pods, "client")
	answered("127.0.1.2", pods, dns.RcodeSuccess)
	closed("127.0.1.3", pods, "pods")
}

// IPv6 clients share the slots of their /64, except for pods.
func TestSlotsByNetwork(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		whole       bool
		first, next string
		ok          bool
	}{
		"the same /64":                 {false, "2001:db8::1", "2001:db8::ffff:1", false},
		"another /64":                  {false, "2001:db8::1", "2001:db8:0:1::1", true},
		"another IPv4 address":         {false, "192.0.2.1", "192.0.2.2", true},
		"the same /64, of pods":        {true, "fd00::1", "fd00::2", true},
		"the same address, of a pod":   {true, "fd00::1", "fd00::1", false},
		"the same IPv4 address, again": {false, "192.0.2.1", "192.0.2.1", false},
	} {
		l := slotLimit{Budget: Budget{All: 10, Each: 1}, whole: tc.whole}
		l.enter(netip.MustParseAddr(tc.first))
		if ok, each := l.enter(netip.MustParseAddr(tc.next)); ok != tc.ok || each == tc.ok {
			t.Errorf("%s: enters: %v, own limit: %v", name, ok, each)
		}
		l.leave(netip.MustParseAddr(tc.first))
		if ok, _ := l.enter(netip.MustParseAddr(tc.first)); !ok {
			t.Errorf("%s: a slot that was left is taken", name)
		}
	}
}

// A stranger asks one question; longer questions than any client needs end the connection.
func TestOneShortQuestion(t *testing.T) {
	t.Parallel()
	s, pods, guarded := listenOn(t, 4000, Config{Idle: time.Minute}, "127.0.1.0/24")
	query := ask(t, "many.demo.svc.clusterset.local.", dns.TypeA, nil)
	stranger := dialFrom(t, "127.0.9.1", guarded)
	if answer := exchange(t, stranger, query); answer[3]&rcodeMask != dns.RcodeRefused || len(answer) > len(query) {
		t.Errorf("code %d, %d bytes", answer[3]&rcodeMask, len(answer))
	}
	closedWithin(t, stranger, 20*time.Second)
	closedWithin(t, dialFrom(t, "127.0.9.1", guarded), 20*time.Second) // silent; the idle timeout of others is a minute
	for i, size := range []uint16{maxTCPQuery + 1, 65535} {
		conn := dialFrom(t, "127.0.1.1", pods)
		if _, err := conn.Write(binary.BigEndian.AppendUint16(nil, size)); err != nil {
			t.Fatal(err)
		}
		closedWithin(t, conn, 20*time.Second)
		if n := s.Counts().Refused["oversized"]; n != uint64(i+1) {
			t.Errorf("%d oversized questions, want %d", n, i+1)
		}
	}
	longest := ask(t, "many.demo.svc.clusterset.local.", dns.TypeA, func(m *dns.Msg) {
		m.SetEdns0(1232, false)
		m.IsEdns0().Option = append(m.IsEdns0().Option, &dns.EDNS0_PADDING{Padding: make([]byte, maxTCPQuery-len(query)-11-4)})
	})
	if answer := exchange(t, dialFrom(t, "127.0.1.1", pods), longest); len(longest) != maxTCPQuery || answer[3]&rcodeMask != dns.RcodeSuccess {
		t.Errorf("a question of %d bytes: code %d", len(longest), answer[3]&rcodeMask)
	}
}

// Few large answers may be unread at a time: some of a client, and some more of all. Others are answered meanwhile.
func TestUnreadAnswers(t *testing.T) {
	t.Parallel()
	s, pods, _ := listenOn(t, 4000, Config{Idle: time.Minute, Limits: Limits{Unread: Budget{All: 3, Each: 2}}}, "127.0.1.0/24")
	query := ask(t, "many.demo.svc.clusterset.local.", dns.TypeA, nil)
	framed := append(binary.BigEndian.AppendUint16(nil, uint16(len(query))), query...)
	slow := func(from string) *net.TCPConn {
		t.Helper()
		conn := dialFrom(t, from, pods)
		if err := conn.SetReadBuffer(1); err != nil {
			t.Fatal(err)
		}
		// One fills the buffers, the next waits. The server may have closed the connection before it has all of them.
		for range 4 {
			if _, err := conn.Write(framed); err != nil && !errors.Is(err, syscall.EPIPE) && !errors.Is(err, syscall.ECONNRESET) {
				t.Fatal(err)
			}
		}
		return conn
	}
	unread := func(want int) {
		t.Helper()
		// For a moment an answer that the buffers take counts, too.
		const lasting = 300
		seen := 0
		for end := time.Now().Add(20 * time.Second); seen < lasting; <-time.After(time.Millisecond) {
			if seen++; s.unread[podConns].count() != want {
				seen = 0
			}
			if time.Now().After(end) {
				t.Fatalf("%d unread answers, want %d", s.unread[podConns].count(), want)
			}
		}
	}
	slow("127.0.1.1")
	last := slow("127.0.1.1")
	unread(2)
	closedWithin(t, slow("127.0.1.1"), 20*time.Second)
	if len(exchange(t, dialFrom(t, "127.0.1.2", pods), query)) <= maxSmall {
		t.Error("the answer is not large")
	}
	unread(2)
	slow("127.0.1.2")
	unread(3)
	closedWithin(t, slow("127.0.1.3"), 20*time.Second)
	exchange(t, dialFrom(t, "127.0.1.3", pods), ask(t, helloName, dns.TypeA, nil)) // a small answer
	if n := s.Counts().Refused["unread"]; n != 2 {
		t.Errorf("%d connections closed for unread answers, want 2", n)
	}
	_ = last.Close()
	unread(2)
}

// 8,192 open connections cost at most 8 KiB each in the process, also after large answers, and the bytes of an unfinished question.
func TestMemoryOfConnections(t *testing.T) {
	const conns, each, idle = 8192, 256, 8 << 10
	raiseFileLimit(t, 2*conns+500)
	s, pods, _ := listenOn(t, 300, Config{Idle: 10 * time.Minute, Limits: Limits{Pods: Budget{All: conns, Each: each}, Unread: Budget{All: 256, Each: 16}}}, "127.0.0.0/8")
	used := func() uint64 {
		debug.FreeOSMemory() // twice: it shrinks stacks, and empties the pools
		debug.FreeOSMemory()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapInuse + m.StackInuse
	}
	before := used()
	var fds []int // system calls, since connections of package net would count too
	t.Cleanup(func() {
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
	})
	for i := range conns {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		fds = append(fds, fd)
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 60}); err != nil {
			t.Fatal(err)
		}
		if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 1, 0, byte(1 + i/each)}}); err != nil {
			t.Fatal(err)
		}
		if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: pods.Addr().As4(), Port: int(pods.Port())}); err != nil {
			t.Fatalf("after %d connections: %v", i, err)
		}
	}
	for end := time.Now().Add(time.Minute); s.connections() < conns && time.Now().Before(end); {
		<-time.After(time.Millisecond)
	}
	check := func(state string, most uint64) {
		t.Helper()
		if n := s.connections(); n != conns {
			t.Fatalf("%s: %d connections are open", state, n)
		}
		cost := (used() - before) / conns
		t.Logf("%s: %d bytes a connection", state, cost)
		if cost > most && !withRaceDetector {
			t.Errorf("%s: %d bytes a connection, at most %d allowed", state, cost, most)
		}
	}
	check("new", idle)
	query := ask(t, "many.demo.svc.clusterset.local.", dns.TypeA, nil)
	framed := append(binary.BigEndian.AppendUint16(nil, uint16(len(query))), query...)
	answer := make([]byte, maxTCP)
	for i, fd := range fds {
		if err := exchangeFD(fd, framed, answer); err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
	}
	check("idle after a large answer", idle)
	half := append(binary.BigEndian.AppendUint16(nil, maxTCPQuery), make([]byte, maxTCPQuery-1)...)
	for _, fd := range fds {
		if _, err := unix.Write(fd, half); err != nil {
			t.Fatal(err)
		}
	}
	check("in the middle of a question", idle+maxTCPQuery+512)
}

// readFD is read(2), again after a signal.
func readFD(fd int, b []byte) (n int, err error) {
	for {
		if n, err = unix.Read(fd, b); !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

// exchangeFD sends a question and reads its answer.
func exchangeFD(fd int, framed, buffer []byte) error {
	if _, err := unix.Write(fd, framed); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	var length [2]byte
	if n, err := readFD(fd, length[:]); n != 2 || err != nil {
		return fmt.Errorf("read %d bytes of the length: %w", n, err)
	}
	for left := int(binary.BigEndian.Uint16(length[:])); left > 0; {
		n, err := readFD(fd, buffer[:min(left, len(buffer))])
		if err != nil || n == 0 {
			return fmt.Errorf("the answer ends: %w", err)
		}
		left -= n
	}
	return nil
}
