package bpf_test

import (
	"math"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// BenchmarkPacket measures one run of each program by the kernel's own clock, without the overhead of its statistics.
// Each figure includes the cost of a program that does nothing.
//
// A test run repeats a program on its own output. So two VIPs are each other's backends, and every run translates.
// For replies, the flow's two entries are turned into such a pair too.
func BenchmarkPacket(b *testing.B) {
	b.Run("nothing", func(b *testing.B) { repeat(b, nothing(b), make([]byte, 64)) })
	b.Run("no IP", func(b *testing.B) { repeat(b, newPath(b).coll.Programs[bpf.ProgToClient], make([]byte, 64)) })
	for family, s := range sides {
		for name, proto := range map[string]uint8{"TCP": tcp, "UDP": udp} {
			s := s
			s.backend = s.vip // a VIP too
			s.vip = mustAddrPort("243.0.0.6:81")
			if s.backend.Addr().Is6() {
				s.vip = mustAddrPort("[fd99::6]:81")
			}
			there := s.confirm(proto)
			for prog, in := range map[string]frame{
				bpf.ProgFromClient:  there,
				bpf.ProgToClient:    there.to(s.backend).back(),
				bpf.ProgFromNetwork: there,
			} {
				b.Run(family+"/"+name+"/"+prog+"/VIP", func(b *testing.B) {
					p := newPath(b)
					p.pingPong(s, proto)
					repeat(b, p.coll.Programs[prog], in.bytes())
				})
				b.Run(family+"/"+name+"/"+prog+"/elsewhere", func(b *testing.B) {
					p := newPath(b)
					p.addRange(s.ranges)
					p.set(inProduction)
					repeat(b, p.coll.Programs[prog], in.to(s.elsewhere).from(s.elsewhere).bytes())
				})
			}
			b.Run(family+"/"+name+"/"+bpf.ProgFromClient+"/new", func(b *testing.B) {
				p := newPath(b)
				p.pingPong(s, proto)
				p.firsts(b, s.opening(proto))
			})
		}
	}
}

// BenchmarkConnection measures every packet of a TCP connection that the backend closes first, on the slow path: of a client's new
// ports, and of the same ports again, whose flows have ended.
func BenchmarkConnection(b *testing.B) {
	const ports = 1000 // of the 2048 that `flows` has room for here
	s := sides["IPv4"]
	p := newPath(b)
	p.addRange(s.ranges)
	p.set(inProduction)
	p.serve(1, tcp, s.vip, s.backend)
	packets := []struct {
		name string
		frame
	}{
		{"1 SYN", s.tcp(syn)},
		{"2 SYN+ACK", s.tcpBack(syn | ack)},
		{"3 ACK", s.tcp(ack)},
		{"4 FIN of the backend", s.tcpBack(fin | ack)},
		{"5 FIN of the client", s.tcp(fin | ack)},
		{"6 ACK of the backend", s.tcpBack(ack)},
	}
	packets[0].tcpOpts, packets[1].tcpOpts = scaled, scaled
	for _, name := range []string{"new", "again"} {
		took := make([][]time.Duration, len(packets))
		for port := range uint16(ports) {
			client := netip.AddrPortFrom(s.client.Addr(), 1000+port)
			for i, packet := range packets {
				prog, in := bpf.ProgFromClient, packet.from(client)
				if packet.src != s.client {
					prog, in = bpf.ProgToClient, packet.to(client)
				}
				_, once, err := p.coll.Programs[prog].Benchmark(in.bytes(), 1, func() {})
				if err != nil {
					b.Fatal(err)
				}
				took[i] = append(took[i], once)
			}
		}
		for i, packet := range packets {
			b.Run(name+"/"+packet.name, func(b *testing.B) {
				slices.Sort(took[i])
				b.ReportMetric(float64(took[i][len(took[i])/2].Nanoseconds()), "ns/run")
			})
		}
	}
}

// inProduction holds the flags that an agent with known ranges sets.
const inProduction = bpf.PacketVIPsInRanges | bpf.PacketOneRange

// nothing returns a program that passes every packet.
func nothing(b *testing.B) *ebpf.Program {
	b.Helper()
	netlab.Privileged(b)
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()},
	})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = prog.Close() })
	return prog
}

// pingPong creates open flows between s.vip and s.backend, each with the other as backend, in both directions.
func (p *path) pingPong(s side, proto uint8) {
	p.t.Helper()
	p.addRange(s.ranges)
	p.set(inProduction)
	for i, v := range []side{s, {client: s.client, vip: s.backend, backend: s.vip}} {
		p.serve(uint32(i+1), proto, v.vip, v.backend)
		p.run(bpf.ProgFromClient, v.opening(proto).bytes())
		p.run(bpf.ProgToClient, v.answer(proto).bytes())
		p.run(bpf.ProgFromClient, v.confirm(proto).bytes())
	}
}

// confirm returns the client's packet after the answer, which opens the flow.
func (s side) confirm(proto uint8) frame {
	f := s.opening(proto)
	if proto == tcp {
		f.flags = ack
		f.seq = uint32(len(f.payload) + 1)
		f.ack = uint32(len(s.answer(proto).payload) + 1)
	}
	return f
}

// repeat reports the fastest of many short runs, since interference only makes a run slower.
func repeat(b *testing.B, prog *ebpf.Program, in []byte) {
	b.Helper()
	const row = 10_000
	best := time.Duration(math.MaxInt64)
	for range max(b.N/row, 1) {
		_, perRun, err := prog.Benchmark(in, row, func() {})
		if err != nil {
			b.Fatal(err)
		}
		best = min(best, perRun)
	}
	b.ReportMetric(float64(best.Nanoseconds()), "ns/run")
}

// firsts reports the median time of the first packets of flows.
func (p *path) firsts(b *testing.B, f frame) {
	b.Helper()
	const flows = 2000
	took := make([]time.Duration, 0, flows)
	for i := range flows {
		_, once, err := p.coll.Programs[bpf.ProgFromClient].Benchmark(f.from(netip.AddrPortFrom(f.src.Addr(), uint16(1000+i))).bytes(), 1, func() {})
		if err != nil {
			b.Fatal(err)
		}
		took = append(took, once)
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[flows/2].Nanoseconds()), "ns/run")
}
