package server

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/miekg/dns"
	"golang.org/x/sys/unix"
)

// Queued datagrams are received in few calls, each with its sender, and each answer reaches its client.
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
						t.Errorf("%q from %s, whole: %v", query, from, whole)
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
			if calls > clients*each/4 { // about one call for each client
				t.Errorf("%d questions took %d calls, want about %d", clients*each, calls, clients)
			}
			for i, conn := range conns {
				var got, want []string
				for j := range each {
					got, want = append(got, readUDP(t, conn)), append(want, fmt.Sprintf("%s %d", conn.LocalAddr(), j))
				}
				slices.Sort(got)
				slices.Sort(want)
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("answers to client %d (-want +got):\n%s", i, diff)
				}
			}
		})
	}
}

// Answers of one length to one client, and one shorter one, form one message. After the kernel has failed to split a message,
// every answer is a message of its own.
func TestBatchSegmentation(t *testing.T) {
	t.Parallel()
	lengths := []int{40, 40, 100, 40, 7, 30, 40}
	for _, tt := range []struct {
		name   string
		option func(fd int) error
		want   int // messages
	}{
		{"", func(int) error { return nil }, 3}, // 100+40, 40*3+30, 7
		{"no checksums", func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_NO_CHECK, 1) }, len(lengths)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			b, to := newTestBatch(t, "127.0.0.1:0")
			if err := errors.Join(b.conn.Control(func(fd uintptr) {
				if err := tt.option(int(fd)); err != nil {
					t.Error(err)
				}
			})); err != nil {
				t.Fatal(err)
			}
			one, other := dialUDP(t, to), dialUDP(t, to)
			for _, conn := range []*net.UDPConn{one, other, one} { // the third batch shows that the setting is kept
				for range lengths {
					if _, err := conn.Write([]byte("?")); err != nil {
						t.Fatal(err)
					}
				}
				n, err := b.wait()
				if n != len(lengths) || err != nil {
					t.Fatal(n, err)
				}
				var want, got []string
				for i, l := range lengths {
					want = append(want, fmt.Sprintf("%0*d", l, i))
					b.reply(i, []byte(want[i]))
				}
				if err := b.flush(); err != nil {
					t.Fatal(err)
				}
				if b.out.count != tt.want {
					t.Errorf("%d answers were %d messages, want %d", n, b.out.count, tt.want)
				}
				for range want {
					got = append(got, readUDP(t, conn))
				}
				slices.Sort(want)
				slices.Sort(got)
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("answers (-want +got):\n%s", diff)
				}
			}
		})
	}
}

// An answer that cannot be sent does not keep back others.
func TestBatchContinuesAfterError(t *testing.T) {
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
	b.slots[1].peer[0] = 0xff // not an address family
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

// A question above the size limit gets FORMERR; an oversized message that is an answer gets none.
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
	if err := conn.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, maxQuery)
	n, err := conn.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	return string(buf[:n])
}
