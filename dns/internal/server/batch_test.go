package server

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/miekg/dns"
	"golang.org/x/sys/unix"
)

// What clients send before it is read comes in few calls, each datagram with its sender, and the answers find their way.
func TestBatch(t *testing.T) {
	t.Parallel()
	for _, at := range []string{"127.0.0.1:0", "[::1]:0"} {
		t.Run(at, func(t *testing.T) {
			t.Parallel()
			b, to := newTestBatch(t, at)
			const clients, each = 3, batchLen
			want := map[netip.AddrPort]int{}
			var conns [clients]*net.UDPConn
			for i := range conns {
				conns[i] = dialUDP(t, to)
				from := conns[i].LocalAddr().(*net.UDPAddr).AddrPort()
				for j := range each {
					if _, err := fmt.Fprintf(conns[i], "%s %d", from, j); err != nil {
						t.Fatal(err)
					}
				}
				want[from] = each
			}
			got := map[netip.AddrPort]int{}
			calls := 0
			for received := 0; received < clients*each; calls++ {
				n, err := b.wait()
				if err != nil {
					t.Fatal(err)
				}
				received += n
				for i := range n {
					query, whole := b.query(i)
					from := b.peer(i)
					if !bytes.HasPrefix(query, []byte(from.String()+" ")) || !whole {
						t.Errorf("%q seems to come from %s, whole: %v", query, from, whole)
					}
					got[from]++
					b.reply(i, append(b.memory(i), query...))
				}
				if err := b.flush(); err != nil {
					t.Fatal(err)
				}
			}
			if diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.AddrPort{})); diff != "" {
				t.Errorf("questions by client (-want +got):\n%s", diff)
			}
			if calls > clients*each/4 { // as many as clients, unless the kernel is late with some
				t.Errorf("%d questions took %d calls, want about %d", clients*each, calls, clients)
			}
			for i, conn := range conns {
				for j := range each {
					if got, want := readUDP(t, conn), fmt.Sprintf("%s %d", conn.LocalAddr(), j); got != want {
						t.Errorf("client %d got %q, want %q", i, got, want)
					}
				}
			}
		})
	}
}

// An answer that cannot be sent keeps no other back.
func TestBatchSendsAllThatCanBe(t *testing.T) {
	t.Parallel()
	b, to := newTestBatch(t, "127.0.0.1:0")
	conn := dialUDP(t, to)
	for i := range 3 {
		if _, err := fmt.Fprint(conn, i); err != nil {
			t.Fatal(err)
		}
	}
	n, err := b.wait()
	if n != 3 || err != nil {
		t.Fatal(n, err)
	}
	for i := range n {
		query, _ := b.query(i)
		b.reply(i, append(b.memory(i), query...))
	}
	b.slots[1].peer[0] = 0xff // an address family that is none
	if err := b.flush(); !errors.Is(err, unix.EAFNOSUPPORT) {
		t.Errorf("flush: %v", err)
	}
	for _, want := range []string{"0", "2"} {
		if got := readUDP(t, conn); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	if err := b.flush(); err != nil {
		t.Errorf("with nothing to send: %v", err)
	}
}

// A question that is longer than we take is malformed for us, and an answer of that size none of our business.
func TestTooLong(t *testing.T) {
	t.Parallel()
	s, serve := listen(t, Config{})
	serve()
	conn := dial(t, "udp", s)
	query := ask(t, helloName, dns.TypeA, nil)
	long := append(query, make([]byte, maxQuery)...)
	long[2] |= response
	if _, err := conn.Write(long); err != nil {
		t.Fatal(err)
	}
	long[2] &^= response
	var m dns.Msg
	if err := m.Unpack(exchange(t, conn, long)); err != nil || m.Rcode != dns.RcodeFormatError {
		t.Errorf("%v, %v", &m, err)
	}
	want := Counts{Ignored: 1, Answers: []Count{{Path: PathSlow, Type: "other", Rcode: "FORMERR", Messages: 1}}}
	if diff := cmp.Diff(want, s.Counts()); diff != "" {
		t.Errorf("counts (-want +got):\n%s", diff)
	}
}

func newTestBatch(t *testing.T, at string) (*batch, netip.AddrPort) {
	t.Helper()
	conn, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort(at)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	b, err := newBatch(conn)
	if err != nil {
		t.Fatal(err)
	}
	return b, conn.LocalAddr().(*net.UDPAddr).AddrPort()
}

func dialUDP(t *testing.T, to netip.AddrPort) *net.UDPConn {
	t.Helper()
	conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func readUDP(t *testing.T, conn *net.UDPConn) string {
	t.Helper()
	if err := conn.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, maxQuery)
	n, err := conn.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	return string(buf[:n])
}
