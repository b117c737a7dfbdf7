package bpf_test

import (
	"bytes"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/isthmus-net/isthmus/bpf"
)

var loadGateway = loadOnce(bpf.LoadGatewaySpec)

// newGateway returns a gateway with empty maps. Its namespace has no route, so translated packets continue through
// the kernel.
func newGateway(t testing.TB) *path {
	t.Helper()
	return newEmpty(t, loadGateway)
}

// balance adds a VIP with one backend. source replaces the clients' addresses if it is valid.
func (p *path) balance(id uint32, proto uint8, vip, backend netip.AddrPort, source netip.Addr) {
	p.t.Helper()
	v := bpf.GatewayVIP{}
	origin := bpf.GatewayOrigin{BackendId: id, Frontend: bpf.GatewayFrontendKey{Addr: bpf.Addr16(vip.Addr()), Port: vip.Port(), Proto: proto}}
	if source.IsValid() {
		v.Source = bpf.Addr16(source)
		origin.Frontend = bpf.GatewayFrontendKey{}
	}
	p.fillTable(id)
	p.put(bpf.MapGatewayVIPs, bpf.Addr16(vip.Addr()), v)
	p.put(bpf.MapBackends, id, bpf.GatewayBackend{Addr: bpf.Addr16(backend.Addr()), Port: backend.Port(), Proto: proto})
	p.put(bpf.MapGatewayOrigins, bpf.GatewayOriginKey{Addr: bpf.Addr16(backend.Addr()), Port: backend.Port(), Proto: proto}, origin)
	p.put(bpf.MapFrontends, bpf.GatewayFrontendKey{Addr: bpf.Addr16(vip.Addr()), Port: vip.Port(), Proto: proto},
		bpf.GatewayFrontend{Id: id, Slots: uint32(len(bpf.GatewayTable{}))})
}

// fillTable gives a frontend a table with one backend, whose id is the frontend's. The table stays, since adding one
// takes long.
func (p *path) fillTable(id uint32) {
	p.t.Helper()
	var known uint32
	if p.coll.Maps[bpf.MapGatewayTables].Lookup(id, &known) == nil {
		return
	}
	table, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: uint32(4 * len(bpf.GatewayTable{})), MaxEntries: 1})
	if err != nil {
		p.t.Fatal(err)
	}
	defer table.Close()
	var slots bpf.GatewayTable
	for i := range slots {
		slots[i] = id
	}
	if err := table.Put(uint32(0), slots); err != nil {
		p.t.Fatal(err)
	}
	p.put(bpf.MapGatewayTables, id, table)
}

// Every packet of a flow is translated exactly, in both directions, whether its source is kept or becomes the VIP. So
// are ICMP errors about it.
func TestGatewayTranslates(t *testing.T) {
	for family, s := range sides {
		for transport, proto := range map[string]uint8{"TCP": tcp, "UDP": udp} {
			t.Run(family+" "+transport+" routed", func(t *testing.T) {
				p := newGateway(t)
				p.balance(1, proto, s.vip, s.backend, netip.Addr{})
				there, back := s.opening(proto), s.answer(proto)
				p.translated(bpf.ProgGateway, there, there.to(s.backend))
				p.translated(bpf.ProgGateway, back, back.from(s.vip))
				lost := there.to(s.backend)
				p.translated(bpf.ProgGateway, icmpUnreachable(s.router, s.client.Addr(), lost), icmpUnreachable(s.router, s.client.Addr(), there))
			})
			t.Run(family+" "+transport+" by the VIP", func(t *testing.T) {
				p := newGateway(t)
				p.balance(1, proto, s.vip, s.backend, s.vip.Addr())
				known := netip.AddrPortFrom(s.vip.Addr(), s.client.Port())
				there, back := s.opening(proto), s.answer(proto)
				p.translated(bpf.ProgGateway, there, there.to(s.backend).from(known))
				p.translated(bpf.ProgGateway, back.to(known), back.from(s.vip))
				lost := there.to(s.backend).from(known)
				p.translated(bpf.ProgGateway, icmpUnreachable(s.router, s.vip.Addr(), lost), icmpUnreachable(s.router, s.client.Addr(), there))
				lost = back.from(s.vip)
				p.translated(bpf.ProgGateway, icmpUnreachable(s.client.Addr(), s.vip.Addr(), lost), icmpUnreachable(s.vip.Addr(), s.backend.Addr(), back.to(known)))
			})
		}
	}
}

// Two clients that a backend could not tell apart get different ports.
func TestGatewayKeepsClientsApart(t *testing.T) {
	for family, s := range sides {
		t.Run(family, func(t *testing.T) {
			p := newGateway(t)
			p.balance(1, tcp, s.vip, s.backend, s.vip.Addr())
			seen := map[string]bool{}
			for range 2 {
				in := s.opening(tcp)
				verdict, out := p.run(bpf.ProgGateway, in.bytes())
				if verdict != passed {
					t.Fatalf("verdict %d", int32(verdict))
				}
				seen[string(out[14+s.header():14+s.header()+2])] = true
				s.client = netip.AddrPortFrom(s.router, s.client.Port()) // another client with the same port
			}
			if len(seen) != 2 {
				t.Errorf("two clients have %d ports", len(seen))
			}
		})
	}
}

// A port that another connection of the client has at the backend is no longer free. Trying it does that connection no harm, even if it
// stays idle for longer than a handshake may.
func TestGatewayTriesATakenPort(t *testing.T) {
	for family, s := range sides {
		t.Run(family, func(t *testing.T) {
			p := newGateway(t)
			p.balance(1, tcp, s.vip, s.backend, s.vip.Addr())
			opening, answer, in, back := s.tcp(syn), s.tcpBack(syn|ack), s.tcp(ack), s.tcpBack(ack)
			from := func(client netip.Addr, port uint16) []byte {
				return opening.from(netip.AddrPortFrom(client, port)).bytes()
			}
			p.run(bpf.ProgGateway, from(s.router, s.client.Port())) // a client with the same port, which therefore is no longer free
			p.run(bpf.ProgGateway, opening.bytes())
			moved := p.entry(bpf.ConnKey{Client: bpf.Addr16(s.client.Addr()), ClientPort: s.client.Port(), Server: bpf.Addr16(s.vip.Addr()), ServerPort: s.vip.Port(), Proto: tcp})
			known := netip.AddrPortFrom(s.vip.Addr(), moved.ClientPort)
			if known.Port() == s.client.Port() {
				t.Fatal("both clients have one port at the backend")
			}
			p.translated(bpf.ProgGateway, answer.to(known), answer.from(s.vip))
			p.translated(bpf.ProgGateway, in, in.to(s.backend).from(known))

			p.run(bpf.ProgGateway, from(s.client.Addr(), known.Port()))
			p.age(5 * time.Minute)
			p.translated(bpf.ProgGateway, in, in.to(s.backend).from(known))
			p.translated(bpf.ProgGateway, back.to(known), back.from(s.vip))
		})
	}
}

// Once a backend is removed, no packet of its flows is sent to it, not even one that follows another at once.
func TestGatewayRemovedBackend(t *testing.T) {
	for family, s := range sides {
		t.Run(family, func(t *testing.T) {
			p := newGateway(t)
			p.balance(1, tcp, s.vip, s.backend, netip.Addr{})
			in, back := s.opening(tcp), s.answer(tcp)
			p.translated(bpf.ProgGateway, in, in.to(s.backend))
			p.translated(bpf.ProgGateway, back, back.from(s.vip))
			in = s.tcp(ack)
			p.translated(bpf.ProgGateway, in, in.to(s.backend))
			p.delete(bpf.MapBackends, uint32(1))
			p.age(2 * time.Second)
			for range 3 {
				if verdict, out := p.run(bpf.ProgGateway, in.bytes()); verdict == passed || bytes.Equal(out, in.to(s.backend).bytes()) {
					t.Errorf("verdict %d", int32(verdict))
				}
			}
		})
	}
}

// A truncated packet does no harm.
func TestGatewayTruncated(t *testing.T) {
	for family, s := range sides {
		t.Run(family, func(t *testing.T) {
			p := newGateway(t)
			p.balance(1, tcp, s.vip, s.backend, s.vip.Addr())
			whole := s.opening(tcp).bytes()
			for n := s.shortest(s.opening(tcp)); n < len(whole); n++ {
				verdict, out := p.run(bpf.ProgGateway, whole[:n])
				if verdict != dropped || !bytes.Equal(out, whole[:n]) {
					t.Fatalf("of %d bytes: verdict %d", n, int32(verdict))
				}
			}
			for reason := range p.refusals() {
				if !strings.HasSuffix(reason, "malformed") {
					t.Errorf("refused: %s", reason)
				}
			}
		})
	}
}

// FuzzGateway is FuzzPacket for a gateway's program. Clients keep their address in IPv4 and not in IPv6:
//
//	go test -run '^$' -fuzz FuzzGateway -fuzztime 10m ./bpf
func FuzzGateway(f *testing.F) {
	newGateway(f)
	addSeeds(f, func(s side, there, back frame) []frame {
		return []frame{
			there, back, there.to(netip.AddrPortFrom(s.vip.Addr(), 1)), back.to(netip.AddrPortFrom(s.vip.Addr(), s.client.Port())),
			icmpUnreachable(s.router, s.client.Addr(), there.to(s.backend)), icmpUnreachable(s.router, s.vip.Addr(), back.from(s.vip)),
			icmpUnreachable(s.router, s.vip.Addr(), back.from(s.vip).back()),
		}
	})
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) < 14+40 || len(in) > 3000 {
			t.Skip("no packet the kernel makes a test of")
		}
		p := newGateway(t)
		for _, s := range sides {
			source := netip.Addr{}
			if s.vip.Addr().Is6() {
				source = s.vip.Addr()
			}
			for id, proto := range []uint8{tcp, udp} {
				p.balance(uint32(id)+1, proto, s.vip, s.backend, source)
				p.run(bpf.ProgGateway, s.opening(proto).bytes())
			}
		}
		copy(in, make([]byte, 12))
		verdict, out := p.run(bpf.ProgGateway, bytes.Clone(in))
		lawful(t, bpf.ProgGateway, in, out, verdict)
	})
}
