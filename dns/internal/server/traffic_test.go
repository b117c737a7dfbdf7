package server

import (
	"context"
	"log/slog"
	"math"
	"net"
	"net/netip"
	"testing"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/dns/internal/zone"
)

// benchmarkUDP measures the CPU time of one question and its answer, client and kernel included. setUp adds to the configuration
// and to the server.
func benchmarkUDP(b *testing.B, c Config, setUp func(*Server)) {
	b.Helper()
	z := testZone(4)
	c.Zone, c.Log, c.Limits.Rate = func() *zone.Zone { return z }, slog.New(slog.DiscardHandler), math.MaxInt32
	s, err := Listen(b.Context(), []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0")}, c)
	if err != nil {
		b.Fatal(err)
	}
	setUp(s)
	ctx, cancel := context.WithCancel(b.Context())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			b.Error(err)
		}
	}()
	conn, err := net.Dial("udp", s.Addrs()[0].String())
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close()
	m := new(dns.Msg).SetQuestion(helloName, dns.TypeA)
	query, err := m.Pack()
	if err != nil {
		b.Fatal(err)
	}
	const window = 32
	answer := make([]byte, 512)
	before := cpuTime(b)
	for asked := 0; asked < b.N; asked += window {
		for range window {
			if _, err := conn.Write(query); err != nil {
				b.Fatal(err)
			}
		}
		for range window {
			if _, err := conn.Read(answer); err != nil || answer[3]&rcodeMask != dns.RcodeSuccess {
				b.Fatal(err, answer[3])
			}
		}
	}
	b.ReportMetric(float64(cpuTime(b)-before)/float64(b.N), "cpu-ns/op")
}

// cpuTime returns the CPU time of the process in nanoseconds.
func cpuTime(b *testing.B) int64 {
	b.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return u.Utime.Nano() + u.Stime.Nano()
}

func BenchmarkUDP(b *testing.B) { benchmarkUDP(b, Config{}, func(*Server) {}) }

// BenchmarkUDPGuarded is BenchmarkUDP at an address that answers some clients only.
func BenchmarkUDPGuarded(b *testing.B) {
	clients := []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("fd00::/64")}
	for i := range 1000 {
		clients = append(clients, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 7), byte(i << 1), 1}), 32))
	}
	benchmarkUDP(b, Config{Guarded: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0")}}, func(s *Server) { s.SetClients(clients, true) })
}
