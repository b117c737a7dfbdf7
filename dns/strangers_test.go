package dns_test

import (
	"encoding/binary"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"testing"
	"time"

	wire "github.com/miekg/dns"

	"github.com/isthmus-net/isthmus/dns"
)

// stranger sends messages from addresses of a range of its own.
type stranger struct {
	t      *testing.T
	number byte
	to     netip.AddrPort
}

// address returns one of the stranger's addresses, in one of its /24.
func (s stranger) address(block, host byte) netip.Addr {
	return netip.AddrFrom4([4]byte{127, 100 + s.number, block, host})
}

// udp sends a message some times from an address and returns the answers.
func (s stranger) udp(from netip.Addr, message []byte, times int, wait time.Duration) (answers [][]byte) {
	s.t.Helper()
	conn, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0)), net.UDPAddrFromAddrPort(s.to))
	if err != nil {
		s.t.Fatal(err)
	}
	defer conn.Close()
	for range times {
		if _, err := conn.Write(message); err != nil {
			s.t.Fatal(err)
		}
	}
	for {
		buffer := make([]byte, 65535)
		if err := conn.SetReadDeadline(time.Now().Add(wait)); err != nil {
			s.t.Fatal(err)
		}
		n, err := conn.Read(buffer)
		if err != nil {
			return answers
		}
		answers = append(answers, buffer[:n])
		if len(answers) == times {
			return answers
		}
	}
}

// tcp sends bytes on a connection and returns all that the server sends until it closes the connection.
func (s stranger) tcp(bytes []byte) []byte {
	s.t.Helper()
	d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(s.address(0, 1), 0))}
	conn, err := d.DialContext(s.t.Context(), "tcp", s.to.String())
	if err != nil {
		s.t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write(bytes); err != nil {
		s.t.Fatal(err)
	}
	if err := conn.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		s.t.Fatal(err)
	}
	all, err := io.ReadAll(conn)
	if ne, ok := err.(net.Error); ok && ne.Timeout() { //nolint:errorlint // net returns it as it is
		s.t.Error("the connection is still open")
	}
	return all
}

func framed(message []byte) []byte {
	return append(binary.BigEndian.AppendUint16(nil, uint16(len(message))), message...)
}

// pack returns a question, after edit has changed it.
func pack(t *testing.T, name string, typ uint16, edit func(*wire.Msg)) []byte {
	t.Helper()
	m := new(wire.Msg).SetQuestion(name, typ)
	if edit != nil {
		edit(m)
	}
	b, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Messages of strangers to an address of the node are refused without data and in no more bytes than they have, or get no answer.
// They are counted, and change nothing for pods.
func TestStrangers(t *testing.T) {
	const name = "hello.demo.svc.clusterset.local."
	ask := func(typ uint16, edit func(*wire.Msg)) []byte { return pack(t, name, typ, edit) }
	plain := ask(wire.TypeA, nil)
	option := func(size int) func(*wire.Msg) {
		return func(m *wire.Msg) {
			m.SetEdns0(4096, true)
			m.IsEdns0().Option = append(m.IsEdns0().Option, &wire.EDNS0_PADDING{Padding: make([]byte, size)})
		}
	}
	raw := func(edit func(b []byte) []byte) []byte { return edit(append([]byte(nil), plain...)) }
	refused, dropped := dns.ACLRefusal{Listener: "node", Outcome: "refused"}, dns.ACLRefusal{Listener: "node", Outcome: "dropped"}
	attempts := []struct {
		name    string
		message []byte
		tcp     bool
		ignored bool // no answer at all
	}{
		{name: "A", message: plain},
		{name: "AAAA", message: ask(wire.TypeAAAA, nil)},
		{name: "SRV", message: ask(wire.TypeSRV, nil)},
		{name: "ANY", message: ask(wire.TypeANY, nil)},
		{name: "the zone's SOA", message: pack(t, "clusterset.local.", wire.TypeSOA, nil)},
		{name: "the version", message: pack(t, "dns-version.clusterset.local.", wire.TypeTXT, nil)},
		{name: "PTR of an address", message: pack(t, "1.0.0.243.in-addr.arpa.", wire.TypePTR, nil)},
		{name: "a transfer", message: ask(wire.TypeAXFR, nil)},
		{name: "an unknown name", message: pack(t, "unknown.demo.svc.clusterset.local.", wire.TypeA, nil)},
		{name: "the root", message: pack(t, ".", wire.TypeNS, nil)},
		{name: "CHAOS", message: ask(wire.TypeTXT, func(m *wire.Msg) { m.Question[0].Qclass = wire.ClassCHAOS })},
		{name: "EDNS with a large size", message: ask(wire.TypeA, func(m *wire.Msg) { m.SetEdns0(65535, true) })},
		{name: "EDNS version 1", message: ask(wire.TypeA, func(m *wire.Msg) { m.SetEdns0(4096, true); m.IsEdns0().SetVersion(1) })},
		{name: "an unusual option", message: ask(wire.TypeA, option(10))},
		{name: "2,000 bytes", message: ask(wire.TypeA, option(2000))},
		{name: "60,000 bytes", message: ask(wire.TypeA, option(60_000))},
		{name: "two questions", message: ask(wire.TypeA, func(m *wire.Msg) { m.Question = append(m.Question, m.Question[0]) })},
		{name: "no question", message: ask(wire.TypeA, func(m *wire.Msg) { m.Question = nil })},
		{name: "an update", message: ask(wire.TypeSOA, func(m *wire.Msg) { m.Opcode = wire.OpcodeUpdate })},
		{name: "a pointer as name", message: raw(func(b []byte) []byte { return append(b[:12], 0xc0, 12, 0, 1, 0, 1) })},
		{name: "a cut name", message: raw(func(b []byte) []byte { return b[:20] })},
		{name: "an answer", message: raw(func(b []byte) []byte { b[2] |= 0x80; return b }), ignored: true},
		{name: "less than a header", message: plain[:11], ignored: true},
		{name: "A over TCP", message: framed(plain), tcp: true},
		{name: "two questions over TCP", message: append(framed(plain), framed(plain)...), tcp: true},
		{name: "2,000 bytes over TCP", message: framed(ask(wire.TypeA, option(2000))), tcp: true},
		{name: "a transfer over TCP", message: framed(ask(wire.TypeAXFR, nil)), tcp: true},
		{name: "65,535 bytes over TCP", message: []byte{0xff, 0xff}, tcp: true, ignored: true},
		{name: "silence over TCP", tcp: true, ignored: true},
		{name: "half a question over TCP", message: framed(plain)[:9], tcp: true, ignored: true},
	}
	local, node := netip.MustParseAddrPort("127.0.0.1:0"), netip.MustParseAddrPort("127.0.0.2:0")
	s, _ := startWith(t, dns.Config{Listen: []netip.AddrPort{local, node}, Guarded: []netip.AddrPort{node}, Limits: dns.DefaultLimits})
	if err := s.Sync(t.Context(), hello("243.0.0.1")); err != nil {
		t.Fatal(err)
	}
	s.SetClients([]netip.Prefix{netip.MustParsePrefix("127.0.5.0/24")}, true)
	at := s.Status().Listen
	counts := func() map[dns.ACLRefusal]uint64 { return s.Status().Counts.ACLRefused }
	for i, a := range attempts {
		t.Run(a.name, func(t *testing.T) {
			before := counts()
			from := stranger{t, byte(i), at[1]}
			var answers [][]byte
			if a.tcp {
				if all := from.tcp(a.message); len(all) > 2 {
					answers = [][]byte{all[2:]}
				}
			} else {
				wait := 20 * time.Second
				if a.ignored {
					wait = 50 * time.Millisecond
				}
				answers = from.udp(from.address(0, 1), a.message, 1, wait)
			}
			if a.ignored {
				if len(answers) > 0 || !maps.Equal(before, counts()) {
					t.Errorf("answers %v, counts %v", answers, counts())
				}
				return
			}
			if len(answers) != 1 || len(answers[0]) < 12 {
				t.Fatalf("answers %v", answers)
			}
			answer := answers[0]
			if code := answer[3] & 0xf; code != wire.RcodeRefused || len(answer) > len(a.message) || binary.BigEndian.Uint32(answer[6:]) != 0 {
				t.Errorf("code %d in %d bytes to %d: %x", code, len(answer), len(a.message), answer)
			}
			if n := counts()[refused] - before[refused]; n != 1 {
				t.Errorf("%d refusals are counted", n)
			}
		})
	}
	flood := func(name string, most int, send func(from stranger) int) {
		t.Run(name, func(t *testing.T) {
			before, begin := counts(), time.Now()
			answers := send(stranger{t, 90, at[1]})
			now := counts()
			answered, lost := now[refused]-before[refused], now[dropped]-before[dropped]
			if seconds := int(time.Since(begin)/time.Second) + 2; answers > most*seconds || answered > uint64(most*seconds) || lost == 0 {
				t.Errorf("%d answers in %d s, %d counted, %d dropped", answers, seconds, answered, lost)
			}
		})
	}
	sockets := 8 // at most, of the guarded address
	flood("many from one address", 20*sockets, func(s stranger) int {
		return len(s.udp(s.address(0, 1), plain, 3000, 200*time.Millisecond))
	})
	flood("many from one block", 20*sockets, func(s stranger) (n int) {
		for host := range byte(200) {
			n += len(s.udp(s.address(1, 1+host), plain, 20, time.Millisecond))
		}
		return n
	})
	flood("many from many blocks", 200, func(s stranger) (n int) {
		for block := range byte(200) {
			n += len(s.udp(s.address(block, 1), plain, 20, time.Millisecond))
		}
		return n
	})
	t.Run("many connections", func(t *testing.T) {
		for i := range 100 {
			d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 200, byte(i), 1}), 0))}
			for range 5 {
				conn, err := d.DialContext(t.Context(), "tcp", at[1].String())
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close()
			}
		}
		if have := refusedConnections(t, s); have["strangers"] == 0 || have["client"] == 0 || have["pods"]+have["neighbours"] > 0 {
			t.Errorf("connections refused: %v", have)
		}
		pods(t, at) // while the strangers' connections are open
	})
	pods(t, at)
}

// Questions with the forged address of a pod or node have it get few answers that are much longer than the questions. The others are
// truncated: the pod itself would ask again over TCP.
func TestAmplification(t *testing.T) {
	const asked, limit = 1000, 10
	node := netip.MustParseAddrPort("127.0.0.2:0")
	s, _ := startWith(t, dns.Config{Listen: []netip.AddrPort{node}, Guarded: []netip.AddrPort{node}, Limits: dns.Limits{Amplified: limit}})
	var many []string
	for i := range 20 {
		many = append(many, fmt.Sprintf("10.0.0.%d", 1+i))
	}
	if err := s.Sync(t.Context(), hello(many...)); err != nil {
		t.Fatal(err)
	}
	s.SetClients([]netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}, true)
	victim := stranger{t, 1, s.Status().Listen[0]}
	question := pack(t, "hello.demo.svc.clusterset.local.", wire.TypeA, nil)
	begin, long := time.Now(), 0
	const each = 100 // a receive buffer holds their answers
	for range asked / each {
		answers := victim.udp(victim.address(0, 1), question, each, 20*time.Second)
		if len(answers) != each {
			t.Fatalf("%d answers to %d questions", len(answers), each)
		}
		for _, a := range answers {
			switch truncated := a[2]&2 != 0; {
			case len(a) > 3*len(question):
				long++
			case !truncated || len(a) > len(question):
				t.Fatalf("an answer of %d bytes, truncated %t", len(a), truncated)
			}
		}
	}
	sockets, seconds := 8, int(time.Since(begin)/time.Second)+2
	if long < limit || long > limit*sockets*seconds || s.Status().Counts.Limited != uint64(asked-long) {
		t.Errorf("%d of %d answers are long, in %d s; %d are counted as limited", long, asked, seconds, s.Status().Counts.Limited)
	}
	if have := askFrom(t, "tcp", "127.0.5.1", s.Status().Listen[0]); len(have) != 1+len(many) {
		t.Errorf("over TCP: %s", have)
	}
}

// refusedConnections waits until the server has accepted a connection of each share, and returns its counts.
func refusedConnections(t *testing.T, s *dns.Server) map[string]uint64 {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); ; <-time.After(time.Millisecond) {
		have := s.Status().Counts.Refused
		if have["strangers"] > 0 && have["client"] > 0 || time.Now().After(end) {
			return have
		}
	}
}

// pods checks that pods and neighbours get answers.
func pods(t *testing.T, at []netip.AddrPort) {
	t.Helper()
	for _, to := range at {
		for _, network := range []string{"udp", "tcp"} {
			if have := fmt.Sprint(askFrom(t, network, "127.0.5.1", to)); have != "[NOERROR 243.0.0.1]" {
				t.Errorf("a pod at %s over %s: %s", to, network, have)
			}
		}
	}
}
