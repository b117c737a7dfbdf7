package server

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"

	"github.com/isthmus-net/isthmus/dns/internal/zone"
)

// listen opens the sockets of a server on the loopback address. The test calls serve to start it; it ends with the test.
func listen(t *testing.T, c Config) (s *Server, serve func()) {
	t.Helper()
	z := testZone(4)
	c.Zone = func() *zone.Zone { return z }
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	s, err := Listen(t.Context(), []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0")}, c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.close)
	return s, func() {
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- s.Serve(ctx) }()
		t.Cleanup(func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
}

// dial connects to s.
func dial(t *testing.T, network string, s *Server) net.Conn {
	t.Helper()
	conn, err := new(net.Dialer).DialContext(t.Context(), network, s.Addrs()[0].String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	return conn
}

// exchange sends a message over UDP or TCP and waits for the answer.
func exchange(t *testing.T, conn net.Conn, query []byte) []byte {
	t.Helper()
	if conn.RemoteAddr().Network() == "udp" {
		if _, err := conn.Write(query); err != nil {
			t.Fatal(err)
		}
		answer := make([]byte, 4096)
		n, err := conn.Read(answer)
		if err != nil {
			t.Fatal(err)
		}
		return answer[:n]
	}
	if _, err := conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(query))), query...)); err != nil {
		t.Fatal(err)
	}
	var length [2]byte
	if _, err := io.ReadFull(conn, length[:]); err != nil {
		t.Fatal(err)
	}
	answer := make([]byte, binary.BigEndian.Uint16(length[:]))
	if _, err := io.ReadFull(conn, answer); err != nil {
		t.Fatal(err)
	}
	return answer
}

const helloName = "hello.demo.svc.clusterset.local."

// withNSID adds an option that the fast parser leaves to the library.
func withNSID(m *dns.Msg) {
	m.SetEdns0(1232, false)
	m.IsEdns0().Option = append(m.IsEdns0().Option, &dns.EDNS0_NSID{Code: dns.EDNS0NSID})
}

// Every message is counted once, by path, type and outcome.
func TestCounts(t *testing.T) {
	t.Parallel()
	s, serve := listen(t, Config{})
	serve()
	udp, tcp := dial(t, "udp", s), dial(t, "tcp", s)
	if _, err := udp.Write([]byte("no question")); err != nil {
		t.Fatal(err)
	}
	for _, conn := range []net.Conn{udp, udp, tcp} {
		exchange(t, conn, ask(t, helloName, dns.TypeA, nil))
	}
	exchange(t, udp, ask(t, helloName, dns.TypeA, withNSID))
	exchange(t, tcp, ask(t, helloName, dns.TypeA, withNSID))
	exchange(t, udp, ask(t, "unknown.demo.svc.clusterset.local.", dns.TypeMX, nil))
	exchange(t, udp, ask(t, ".", dns.TypeSRV, nil))
	exchange(t, udp, ask(t, helloName, dns.TypeAAAA, withOPT(1232, 1, false)))
	have := s.Counts()
	slices.SortFunc(have.Answers, func(a, b Count) int { return strings.Compare(a.Path+a.Type, b.Path+b.Type) })
	want := Counts{Ignored: 1, Answers: []Count{
		{PathFast, "A", "NOERROR", 2},
		{PathFast, "AAAA", "BADVERS", 1},
		{PathFast, "SRV", "REFUSED", 1},
		{PathFast, "other", "NXDOMAIN", 1},
		{PathSlow, "A", "NOERROR", 1},
		{PathTCP, "A", "NOERROR", 2},
	}}
	if diff := cmp.Diff(want, have); diff != "" {
		t.Errorf("counts (-want +have):\n%s", diff)
	}
}

// Questions that overflow the receive buffer are counted: nothing else shows that they were lost.
func TestDropsAreCounted(t *testing.T) {
	t.Parallel()
	s, _ := listen(t, Config{})
	conn := dial(t, "udp", s)
	query := make([]byte, 512)
	for n := 0; s.Counts().Dropped == 0; n++ {
		if n == 100 {
			t.Fatal("of 100,000 unread questions none was dropped")
		}
		for range 1000 {
			if _, err := conn.Write(query); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// Every Sample-th question is logged with its outcome.
func TestSampledLog(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	s := &Server{Config: Config{Sample: 3, Log: slog.New(slog.NewTextHandler(&log, nil))}}
	var r responder
	asked := uint64(0)
	from := netip.MustParseAddrPort("192.0.2.1:4242")
	z := testZone(1)
	for range 7 {
		s.sample(&asked, &r, r.respond(z, ask(t, "Hello.demo.svc.clusterset.local.", dns.TypeAAAA, nil), overUDP, 0), from)
	}
	if n := strings.Count(log.String(), "\n"); n != 2 {
		t.Errorf("%d lines for 7 questions, want 2:\n%s", n, &log)
	}
	for _, word := range []string{"peer=192.0.2.1:4242", "name=Hello.demo.svc.clusterset.local.", "type=AAAA", "rcode=NOERROR"} {
		if !strings.Contains(log.String(), word) {
			t.Errorf("no %s in:\n%s", word, &log)
		}
	}
	log.Reset()
	s.Sample = 1
	for _, query := range [][]byte{{1, 2, 3}, make([]byte, headerLen)} {
		s.sample(&asked, &r, r.respond(z, query, overUDP, 0), from)
	}
	if lines := log.String(); !strings.Contains(lines, "not a question") || !strings.Contains(lines, "rcode=FORMERR") {
		t.Errorf("odd messages:\n%s", lines)
	}
}
