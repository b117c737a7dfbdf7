package bpf_test

import (
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/bpf"
)

// A connection of two real machines survives a forged RST, FIN and SYN from either side, half a minute of silence, and a flood
// of SYNs ten times as large as the table. Then it ends as its two sides close it, whatever their windows were.
func TestPacketEndForged(t *testing.T) {
	onBothPaths(t, (*lab).attachTCX, func(l *lab, family string, s side, _ bool) {
		t := l.t
		l.path.serve(1, tcp, s.vip, backendAddr(family))
		l.echo(family)
		c, err := l.dial("tcp", s.vip)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		s.client, s.backend = c.LocalAddr().(*net.TCPAddr).AddrPort(), backendAddr(family)
		echoes(t, c, 100_000)
		l.attack(s)
		if state := l.path.entry(connKey(s.client, s.vip, tcp, 0)).State; state != bpf.ConnOpen {
			t.Errorf("forged packets lead to state %d", state)
		}
		l.path.age(30 * time.Second)
		l.flood(s)
		echoes(t, c, 100_000)
		if err := c.(*net.TCPConn).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadAll(c); err != nil { // until the other side closes
			t.Fatal(err)
		}
		if there, back := l.path.states(s, tcp); there != bpf.ConnClosing || back != bpf.ConnClosing {
			t.Errorf("both sides have closed: states %d and %d", there, back)
		}
	})
}

// echoes sends n bytes and expects them back.
func echoes(t testing.TB, c net.Conn, n int) {
	t.Helper()
	sent := make(chan error, 1)
	go func() {
		_, err := c.Write(make([]byte, n))
		sent <- err
	}()
	if _, err := io.ReadFull(c, make([]byte, n)); err != nil {
		t.Fatal(err)
	}
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
}

// attack runs the programs on forged packets of a connection.
func (l *lab) attack(s side) {
	l.t.Helper()
	for _, flags := range []uint8{rst, rst | ack, fin | ack, syn} {
		for _, seq := range []uint32{0, 1 << 30, 2 << 30, 3 << 30} {
			there, back := s.tcp(flags), s.tcpBack(flags)
			there.seq, back.seq = seq, seq
			l.path.run(bpf.ProgFromClient, there.bytes())
			l.path.run(bpf.ProgToClient, back.bytes())
		}
	}
}

// flood runs the program on SYNs of other clients.
func (l *lab) flood(s side) {
	l.t.Helper()
	l.t.Cleanup(func() { l.path.opened(time.Hour, 0, 0) })
	for i := range 10 * int(l.path.coll.Maps[bpf.MapFlows].MaxEntries()) {
		if i%20_000 == 0 {
			l.path.opened(time.Hour, 0, 0) // the limit is another test's
		}
		f := s.tcp(syn)
		addr := s.client.Addr().AsSlice()
		addr[len(addr)-3], addr[len(addr)-2] = byte(i>>8), byte(i)
		from, _ := netip.AddrFromSlice(addr)
		f.src = netip.AddrPortFrom(from, uint16(2000+i>>16))
		l.path.run(bpf.ProgFromClient, f.bytes())
	}
}
