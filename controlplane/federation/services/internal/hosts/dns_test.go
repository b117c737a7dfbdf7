package hosts_test

import (
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/isthmus-net/isthmus/controlplane/federation/services/internal/hosts"
)

// serve answers questions for lb.example.org by UDP and TCP; the response for long.example.org does not fit in UDP. It
// returns a resolv.conf with its address.
func serve(t *testing.T) string {
	t.Helper()
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	udp, err := net.ListenPacket("udp", tcp.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = tcp.Close(), udp.Close() })
	go func() {
		buf := make([]byte, 512)
		for {
			n, from, err := udp.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = udp.WriteTo([]byte("nonsense"), from)
			_, _ = udp.WriteTo(reply(buf[:n], true), from)
		}
	}()
	go func() {
		for {
			conn, err := tcp.Accept()
			if err != nil {
				return
			}
			var length [2]byte
			_, _ = io.ReadFull(conn, length[:])
			query := make([]byte, binary.BigEndian.Uint16(length[:]))
			_, _ = io.ReadFull(conn, query)
			answer := reply(query, false)
			_, _ = conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(answer))), answer...))
			_ = conn.Close()
		}
	}()
	path := filepath.Join(t.TempDir(), "resolv.conf")
	if err := os.WriteFile(path, []byte("search example.net\nnameserver "+tcp.Addr().String()+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// reply answers a query. Responses for names that begin with "long" are truncated if short is set.
func reply(query []byte, short bool) []byte {
	var m dnsmessage.Message
	if err := m.Unpack(query); err != nil {
		return nil
	}
	q := m.Questions[0]
	m.Response, m.Truncated = true, short && strings.HasPrefix(q.Name.String(), "long")
	header := func(t dnsmessage.Type, ttl uint32) dnsmessage.ResourceHeader {
		return dnsmessage.ResourceHeader{Name: q.Name, Type: t, Class: dnsmessage.ClassINET, TTL: ttl}
	}
	switch name := q.Name.String(); {
	case m.Truncated:
	case strings.HasPrefix(name, "broken"):
		m.RCode = dnsmessage.RCodeServerFailure
	case strings.HasPrefix(name, "none"):
		m.RCode = dnsmessage.RCodeNameError
	case q.Type == dnsmessage.TypeA:
		m.Answers = []dnsmessage.Resource{
			{Header: header(dnsmessage.TypeCNAME, 20), Body: &dnsmessage.CNAMEResource{CNAME: q.Name}},
			{Header: header(dnsmessage.TypeA, 60), Body: &dnsmessage.AResource{A: [4]byte{203, 0, 113, 1}}},
		}
	default:
		m.Answers = []dnsmessage.Resource{{Header: header(dnsmessage.TypeAAAA, 60), Body: &dnsmessage.AAAAResource{AAAA: netip.MustParseAddr("2001:db8::1").As16()}}}
	}
	packed, err := m.Pack()
	if err != nil {
		panic(err)
	}
	return packed
}

func TestSystemQueriesNameServers(t *testing.T) {
	query := hosts.System(serve(t))
	both := []netip.Addr{netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("2001:db8::1")}
	for host, want := range map[string][]netip.Addr{"lb.example.org": both, "long.example.org.": both, "none.example.org": nil} {
		addrs, ttl, err := query(t.Context(), host)
		if err != nil || !slices.Equal(addrs, want) {
			t.Errorf("%s: %v, %v; want %v", host, addrs, err, want)
		}
		if len(want) > 0 && ttl != 20*time.Second {
			t.Errorf("%s is good for %v, and a record on the way for 20s", host, ttl)
		}
	}
	for _, host := range []string{"broken.example.org", strings.Repeat("x", 300)} {
		if addrs, _, err := query(t.Context(), host); err == nil {
			t.Errorf("%.20s is answered by %v", host, addrs)
		}
	}
}
