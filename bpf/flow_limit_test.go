package bpf_test

import (
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
)

// The limits of bpf/flow.h: new flows per second and CPU.
const (
	cpuFlowsMax    = 100_000
	clientFlowsMax = 50_000
)

// opened pretends that every CPU opened so many flows in a second that began age ago: cpu in all, client for each client.
func (p *path) opened(age time.Duration, cpu, client uint64) {
	p.t.Helper()
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		p.t.Fatal(err)
	}
	now := monotonic(p.t)
	values := make([]bpf.Answers, cpus)
	fill := func(given uint64) []bpf.Answers {
		for i := range values {
			values[i] = bpf.Answers{Since: now - uint64(age), Given: given}
		}
		return values
	}
	p.put(bpf.MapNewFlows, uint32(0), fill(cpu))
	for i := uint32(1); i < p.coll.Maps[bpf.MapNewFlows].MaxEntries(); i++ {
		p.put(bpf.MapNewFlows, i, fill(client))
	}
}

// monotonic returns the time of the programs' clock.
func monotonic(t testing.TB) uint64 {
	t.Helper()
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		t.Fatal(err)
	}
	return uint64(now.Nano())
}

// A flow beyond the limit of its CPU or of its client is dropped without a reply and counted. Known flows continue, and so do
// new ones in the next second.
func TestNewFlowLimit(t *testing.T) {
	const soon = -10 * time.Second // a second that is not over before the test is
	for name, of := range crossings() {
		if of.proto == sctp {
			continue // a gateway has none, and for a node it is one more protocol
		}
		for prog, load := range map[string]func(testing.TB) *path{
			bpf.ProgFromClient: newPath, bpf.ProgFromNetwork: newPath,
			bpf.ProgGateway: func(t testing.TB) *path {
				t.Helper()
				p := newGateway(t)
				p.balance(1, of.proto, of.vip, of.backend, netip.Addr{})
				return p
			},
		} {
			t.Run(name+"/"+prog, func(t *testing.T) {
				pin(t)
				p := load(t)
				t.Cleanup(func() { p.opened(time.Hour, 0, 0) })
				if prog != bpf.ProgGateway {
					p.serve(1, of.proto, of.vip, of.backend)
				}
				open := func(port uint16, want uint32) {
					t.Helper()
					f := of.opening(of.proto)
					f.src = netip.AddrPortFrom(of.client.Addr(), port)
					if got, _ := p.run(prog, f.bytes()); got != want {
						t.Errorf("a packet from port %d: verdict %d, want %d", port, int32(got), int32(want))
					}
				}
				p.opened(soon, cpuFlowsMax-1, 0)
				open(1001, passed)
				open(1002, dropped)
				open(1001, passed) // a known flow
				p.opened(soon, 0, clientFlowsMax-1)
				open(1003, passed)
				open(1004, dropped)
				p.wantRefusals(map[string]uint64{"1 new_flows": 2})
				p.opened(2*time.Second, cpuFlowsMax, clientFlowsMax)
				open(1005, passed)
				p.wantRefusals(map[string]uint64{"1 new_flows": 2})
			})
		}
	}
}
