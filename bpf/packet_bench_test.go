package bpf_test

import (
	"math"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/bpf"
)

// BenchmarkPacket measures one run of each program by the kernel's own clock, without the statistics that add to it.
//
// A test run repeats a program on what became of its packet. So two VIPs are each other's backends, and every run
// translates; the flow's answers are made by turning its two entries into such a pair as well.
func BenchmarkPacket(b *testing.B) {
	b.Run("no IP", func(b *testing.B) { newPath(b).repeat(b, bpf.ProgToClient, make([]byte, 64)) })
	for family, s := range sides {
		for name, proto := range map[string]uint8{"TCP": tcp, "UDP": udp} {
			s := s
			s.backend = s.vip // an address of the ranges that is a VIP, too
			s.vip = mustAddrPort("243.0.0.6:81")
			if s.backend.Addr().Is6() {
				s.vip = mustAddrPort("[fd99::6]:81")
			}
			there := s.opening(proto)
			if proto == tcp {
				there.flags = ack
			}
			for prog, in := range map[string]frame{
				bpf.ProgFromClient:  there,
				bpf.ProgToClient:    there.to(s.backend).back(),
				bpf.ProgFromNetwork: there,
			} {
				b.Run(family+"/"+name+"/"+prog+"/VIP", func(b *testing.B) {
					p := newPath(b)
					p.pingPong(s, proto)
					p.repeat(b, prog, in.bytes())
				})
				b.Run(family+"/"+name+"/"+prog+"/elsewhere", func(b *testing.B) {
					p := newPath(b)
					p.addRange(s.ranges)
					p.set(bpf.PacketVIPsInRanges)
					p.repeat(b, prog, in.to(s.elsewhere).from(s.elsewhere).bytes())
				})
			}
		}
	}
}

// pingPong makes open flows of s.vip and s.backend, each with the other behind it, both ways.
func (p *path) pingPong(s side, proto uint8) {
	p.t.Helper()
	p.addRange(s.ranges)
	p.set(bpf.PacketVIPsInRanges)
	for i, v := range []side{s, {client: s.client, vip: s.backend, backend: s.vip}} {
		p.serve(uint32(i+1), proto, v.vip, v.backend)
		p.run(bpf.ProgFromClient, v.opening(proto).bytes())
		p.run(bpf.ProgToClient, v.answer(proto).bytes())
		if proto == tcp {
			there := v.opening(proto)
			there.flags = ack
			p.run(bpf.ProgFromClient, there.bytes())
		}
	}
}

// repeat reports the best of many short rows: whatever disturbs one only ever makes it longer.
func (p *path) repeat(b *testing.B, prog string, in []byte) {
	b.Helper()
	const row = 10_000
	best := time.Duration(math.MaxInt64)
	for range max(b.N/row, 1) {
		_, perRun, err := p.coll.Programs[prog].Benchmark(in, row, func() {})
		if err != nil {
			b.Fatal(err)
		}
		best = min(best, perRun)
	}
	b.ReportMetric(float64(best.Nanoseconds()), "ns/run")
}
