package bpf_test

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
)

// The limits of bpf/flow.h: new flows per second and CPU; and that of a gateway in entries of half-open flows.
const (
	cpuFlowsMax    = 100_000
	clientFlowsMax = 50_000
	halfOpenMax    = 131_072
)

// soon is the age of a second that is not over before the test is.
const soon = -10 * time.Second

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
	if p.coll.Maps[bpf.MapHalfOpen] != nil { // of a gateway; the frontends begin to count again
		p.put(bpf.MapHalfOpen, uint32(0), fill(cpu*halfOpenMax/cpuFlowsMax))
	}
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

// loadSmallGateway loads a gateway that fills a quarter of its table with half-open flows in a third of a second.
var loadSmallGateway = loadOnce(func() (*ebpf.CollectionSpec, error) {
	spec, err := bpf.LoadGatewaySpec()
	if err != nil {
		return nil, err
	}
	return spec, spec.Variables[bpf.VarHalfOpenMax].Set(uint32(smallHandshakes / 4))
})

// smallHandshakes is the capacity of the maps of a test, in entries.
const smallHandshakes = 4096

// tenants returns a VIP for each of n tenants, with one port and one backend each.
func tenants(p *path, n int, snat bool) (all []balancer) {
	p.t.Helper()
	for i := range n {
		s := sides["IPv4"]
		s.vip = netip.AddrPortFrom(netip.AddrFrom4([4]byte{243, 0, 1, byte(i)}), 80)
		s.backend = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 2, 1, byte(i)}), 8080)
		b := balancer{p, s, bpf.ProgGateway, bpf.ProgGateway, s.client}
		source := netip.Addr{}
		if snat {
			source = s.vip.Addr()
			b.known = netip.AddrPortFrom(source, s.client.Port())
		}
		p.balance(uint32(1+i), tcp, s.vip, s.backend, source)
		all = append(all, b)
	}
	return all
}

// at returns b with another client.
func (b *balancer) at(client netip.AddrPort) *balancer {
	other := *b
	if b.known == b.client {
		other.known = client
	} else {
		other.known = netip.AddrPortFrom(b.known.Addr(), client.Port())
	}
	other.client = client
	return &other
}

// A flood of ten times the flows that there is room for ends no connection of any VIP, and at least 95 % of other VIPs' new
// connections open, though every answer takes as long as the limit counts. The rest of the flood is counted as refused.
func TestFloodedVIP(t *testing.T) {
	const periods, quiet, news = 10, 4, 5
	for _, snat := range []bool{false, true} {
		for _, flooded := range []int{1, 10} {
			for name, c := range map[string]struct {
				flags    uint8
				answered bool
			}{"SYNs": {syn, false}, "answered SYNs": {syn, true}, "ACKs": {ack, false}} {
				t.Run(fmt.Sprintf("%s to %d, snat %t", name, flooded, snat), func(t *testing.T) {
					pin(t)
					p := newEmpty(t, loadSmallGateway)
					t.Cleanup(func() { p.opened(time.Hour, 0, 0) })
					all := tenants(p, flooded+quiet, snat)
					var kept []balancer
					for i := range all {
						kept = append(kept, keep(&all[i], 20)...)
					}
					sent := 0
					flood := func(n int) {
						for range n {
							at := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 66, byte(sent >> 8), byte(sent)}), uint16(1024+sent%60_000))
							b := all[sent%flooded].at(at)
							p.run(b.there, b.tcp(c.flags).bytes())
							if c.answered {
								p.run(b.back, b.tcpBack(syn|ack).to(b.known).bytes())
							}
							sent++
						}
					}
					// Each step of a connection comes a period after the one before.
					var begun, answered, done []*balancer
					each := 10 * int(p.coll.Maps[bpf.MapFlows].MaxEntries()) / periods
					for period := range periods + 2 {
						p.opened(soon, 0, 0)
						flood(each / 2)
						for _, b := range answered {
							p.run(b.there, b.tcp(ack).bytes())
						}
						for _, b := range begun {
							p.run(b.back, b.tcpBack(syn|ack).to(b.known).bytes())
						}
						done, answered, begun = append(done, answered...), begun, nil
						for i := range quiet * news {
							b := all[flooded+i%quiet].at(netip.AddrPortFrom(all[0].client.Addr(), uint16(30_000+period*quiet*news+i)))
							p.run(b.there, b.tcp(syn).bytes())
							begun = append(begun, b)
						}
						flood(each - each/2)
					}
					open := 0
					for _, b := range done {
						if p.home(connKey(b.client, b.vip, tcp, 0)) == bpf.MapFlows {
							open++
						}
					}
					if len(done) != periods*quiet*news || open*100 < len(done)*95 {
						t.Errorf("%d of %d new connections of other VIPs have opened", open, len(done))
					}
					for id := range flooded {
						if reason := fmt.Sprintf("%d new_flows", 1+id); p.refusals()[reason] < uint64(sent/flooded/2) {
							t.Errorf("refused: %v", p.refusals())
						}
					}
					for i := range kept {
						kept[i].sends(kept[i].tcp(ack))
						kept[i].answers(kept[i].tcpBack(ack))
						if home := p.home(connKey(kept[i].client, kept[i].vip, tcp, 0)); home != bpf.MapFlows {
							t.Fatalf("a flow of %s is in %q", kept[i].vip, home)
						}
					}
				})
			}
		}
	}
}

// A flow counts as half-open until it has opened: a port opens any number of flows, if clients and backends answer.
func TestOpenedFlowsCountNot(t *testing.T) {
	for _, snat := range []bool{false, true} {
		t.Run(fmt.Sprintf("snat %t", snat), func(t *testing.T) {
			pin(t)
			p := newEmpty(t, loadSmallGateway)
			t.Cleanup(func() { p.opened(time.Hour, 0, 0) })
			b := tenants(p, 1, snat)[0]
			p.opened(soon, 0, 0)
			keep(&b, smallHandshakes/2)
			p.wantRefusals(map[string]uint64{})
		})
	}
}
