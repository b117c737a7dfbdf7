package bpf_test

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/isthmus-net/isthmus/bpf"
)

// balancer is a program that tracks flows, on a path with one VIP and empty maps.
type balancer struct {
	*path
	side
	there, back string // the programs of the two directions
	known       netip.AddrPort
}

// inEachBalancer runs a test for each program that tracks flows.
func inEachBalancer(t *testing.T, s side, proto uint8, test func(t *testing.T, b *balancer)) {
	t.Helper()
	t.Run("node", func(t *testing.T) {
		p := newPath(t)
		p.serve(1, proto, s.vip, s.backend)
		test(t, &balancer{p, s, bpf.ProgFromClient, bpf.ProgToClient, s.client})
	})
	for name, source := range map[string]netip.Addr{"gateway": {}, "gateway by the VIP": s.vip.Addr()} {
		t.Run(name, func(t *testing.T) {
			p := newGateway(t)
			p.balance(1, proto, s.vip, s.backend, source)
			known := s.client
			if source.IsValid() {
				known = netip.AddrPortFrom(source, s.client.Port())
			}
			test(t, &balancer{p, s, bpf.ProgGateway, bpf.ProgGateway, known})
		})
	}
}

// sends expects a packet of the client to reach the backend.
func (b *balancer) sends(f frame) {
	b.t.Helper()
	b.translated(b.there, f, f.to(b.backend).from(netip.AddrPortFrom(b.known.Addr(), f.src.Port())))
}

// answers expects a packet of the backend to reach the client.
func (b *balancer) answers(f frame) {
	b.t.Helper()
	b.translated(b.back, f.to(netip.AddrPortFrom(b.known.Addr(), f.dst.Port())), f.from(b.vip))
}

// scaled is the option of a SYN that scales the windows by 4.
var scaled = []byte{1, 3, 3, 2}

// connect makes a connection whose two sides have announced a window of 4000 bytes.
func (b *balancer) connect() {
	b.t.Helper()
	hello, answer, confirm := b.tcp(syn), b.tcpBack(syn|ack), b.tcp(ack)
	hello.tcpOpts, answer.tcpOpts = scaled, scaled
	hello.window, answer.window, confirm.window = 1000, 1000, 1000
	b.sends(hello)
	b.answers(answer)
	b.sends(confirm)
	after := b.tcpBack(ack)
	after.window = 1000
	b.answers(after)
	b.state(bpf.ConnOpen, bpf.MapFlows)
}

// state checks the state of the flow, and the map that holds it.
func (b *balancer) state(want bpf.ConnState, home string) {
	b.t.Helper()
	keys := []bpf.ConnKey{connKey(b.client, b.vip, tcp, 0), connKey(b.client, b.backend, tcp, 1)}
	if b.known != b.client { // the entries of the second translation
		keys = append(keys, connKey(b.backend, b.known, tcp, 0), connKey(b.backend, b.client, tcp, 1))
	}
	for _, key := range keys {
		if c, at := b.entry(key), b.home(key); c.State != want || at != home {
			b.t.Errorf("direction %d has state %d in %s, want %d in %s", key.Reply, c.State, at, want, home)
		}
	}
}

// A RST or FIN changes a flow only if its number lies in the window of the side that it is sent to. A packet with any other
// number is forwarded, since its receiver can judge it.
func TestForgedEnd(t *testing.T) {
	// Both sides have acknowledged everything: the client expects 201, the backend 101.
	numbers := map[string]struct {
		ahead  uint32 // of the number that is expected
		belief bool
	}{
		"expected": {0, true}, "end of the window": {4000, true}, "old": {^uint32(0), false}, "beyond": {4001, false},
		"far": {1 << 31, false}, "blind": {123456789, false},
	}
	for family, s := range sides {
		for name, n := range numbers {
			for what, flags := range map[string]uint8{"RST": rst, "RST with ACK": rst | ack, "FIN": fin | ack} {
				t.Run(family+"/"+name+"/"+what, func(t *testing.T) {
					inEachBalancer(t, s, tcp, func(t *testing.T, b *balancer) {
						t.Helper()
						for _, back := range []bool{false, true} {
							b.clearFlows()
							b.connect()
							if back {
								f := b.tcpBack(flags)
								f.seq += n.ahead
								b.answers(f)
							} else {
								f := b.tcp(flags)
								f.seq += n.ahead
								b.sends(f)
							}
							want := bpf.ConnOpen
							switch {
							case n.belief && flags&rst != 0:
								want = bpf.ConnClosed
							case n.belief:
								want = bpf.ConnHalf
							}
							b.state(want, bpf.MapFlows)
						}
					})
				})
			}
		}
	}
}

// A forged acknowledgement beyond the window that its sender has announced does not move the window to a forged RST.
func TestForgedWindow(t *testing.T) {
	inEachBalancer(t, sides["IPv4"], tcp, func(t *testing.T, b *balancer) {
		t.Helper()
		b.connect()
		forged := b.tcpBack(ack)
		forged.ack, forged.window = 987654321, 0xffff
		b.answers(forged)
		end := b.tcp(rst)
		end.seq = 987654321
		b.sends(end)
		b.state(bpf.ConnOpen, bpf.MapFlows)
		// The true window moves with the data.
		for range 100 {
			f := b.tcpBack(ack)
			f.window = 1000
			f.ack = b.entry(connKey(b.client, b.backend, tcp, 1)).Ack + 3999
			b.answers(f)
			end.seq = f.ack
		}
		b.sends(end)
		b.state(bpf.ConnClosed, bpf.MapFlows)
	})
}

// A flow only opens if the backend acknowledges the client's SYN, and the client the backend's SYN+ACK.
func TestForgedHandshake(t *testing.T) {
	inEachBalancer(t, sides["IPv6"], tcp, func(t *testing.T, b *balancer) {
		t.Helper()
		b.sends(b.tcp(syn))
		for _, flags := range []uint8{syn | ack, ack, rst, rst | ack, fin | ack} {
			f := b.tcpBack(flags)
			f.ack = 5555
			b.answers(f)
			b.state(bpf.ConnOpening, bpf.MapHandshakes)
		}
		b.answers(b.tcpBack(syn | ack))
		b.state(bpf.ConnAnswered, bpf.MapHandshakes)
		for _, flags := range []uint8{ack, fin | ack, rst} {
			f := b.tcp(flags)
			f.ack, f.seq = 5555, 7777
			b.sends(f)
			b.state(bpf.ConnAnswered, bpf.MapHandshakes)
		}
		b.sends(b.tcp(ack))
		b.state(bpf.ConnOpen, bpf.MapFlows)
	})
}

// A SYN on an open flow goes to its backend. Another flow opens only when the client ends the old one, or when the backend was
// removed.
func TestForgedSYN(t *testing.T) {
	inEachBalancer(t, sides["IPv4"], tcp, func(t *testing.T, b *balancer) {
		t.Helper()
		forged := b.tcp(syn)
		forged.seq = 99
		client := connKey(b.client, b.vip, tcp, 0)
		reopened := func() {
			t.Helper()
			if state, home := b.entry(client).State, b.home(client); state != bpf.ConnOpening || home != bpf.MapHandshakes && home != bpf.MapFlows {
				t.Errorf("a SYN leads to state %d in %q", state, home)
			}
		}
		b.connect()
		for range 10 {
			b.sends(forged)
			b.answers(b.tcpBack(ack))
			b.state(bpf.ConnOpen, bpf.MapFlows)
			b.age(2 * time.Second)
		}
		b.sends(b.tcp(rst)) // the client knows nothing of the connection
		b.state(bpf.ConnClosed, bpf.MapFlows)
		b.sends(forged)
		reopened()
		b.clearFlows()
		b.connect()
		c := b.entry(client)
		c.BackendId = 999 // which does not exist
		b.put(bpf.MapFlows, client, c)
		b.run(b.there, forged.bytes())
		reopened()
	})
}

// A flood of SYNs, ten times as many as there is room for flows, ends no connection. Nor does one of datagrams, of datagrams that
// their receiver answers and whose forged sender sends another, or of packets in the middle of unknown connections.
func TestFloods(t *testing.T) {
	const kept = 100
	for name, c := range map[string]struct {
		proto, flags uint8
		answered     bool
	}{"SYNs": {tcp, syn, false}, "ACKs": {tcp, ack, false}, "datagrams": {udp, 0, false}, "answered datagrams": {udp, 0, true}} {
		t.Run(name, func(t *testing.T) {
			inEachBalancer(t, sides["IPv4"], tcp, func(t *testing.T, b *balancer) {
				t.Helper()
				if b.there == bpf.ProgGateway {
					if c.proto == udp {
						b.balance(2, udp, b.vip, b.backend, b.clientSource())
					}
				} else {
					b.set(bpf.PacketAdopt)
					b.serve(2, udp, b.vip, b.backend)
				}
				kept := keep(b, kept)
				flood := b.tcp(c.flags)
				flood.proto = c.proto
				room := 10 * int(b.coll.Maps[bpf.MapFlows].MaxEntries())
				t.Cleanup(func() { b.opened(time.Hour, 0, 0) })
				for i := range room {
					if i%20_000 == 0 {
						b.opened(time.Hour, 0, 0) // the limit is another test's
					}
					flood.src = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 66, byte(i >> 8), byte(i)}), uint16(2000+i>>16))
					b.run(b.there, flood.bytes())
					if c.answered {
						answer := b.tcpBack(0).to(netip.AddrPortFrom(b.known.Addr(), flood.src.Port()))
						if b.known == b.client {
							answer = answer.to(flood.src)
						}
						answer.proto = udp
						b.run(b.back, answer.bytes())
						b.run(b.there, flood.bytes())
					}
				}
				if n := len(b.entries(bpf.MapHandshakes)) + len(b.entries(bpf.MapUDPFlows)); n < room/20 {
					t.Fatalf("the flood has only %d entries", n)
				}
				for _, s := range kept {
					b.side, b.known = s.side, s.known
					if home := b.home(connKey(s.client, s.vip, tcp, 0)); home != bpf.MapFlows {
						t.Fatalf("the flow of %s is in %q", s.client, home)
					}
					b.sends(b.tcp(ack))
					b.answers(b.tcpBack(ack))
				}
			})
		})
	}
}

// clientSource returns the address that replaces the clients', none if they keep theirs.
func (b *balancer) clientSource() netip.Addr {
	if b.known.Addr() == b.client.Addr() {
		return netip.Addr{}
	}
	return b.known.Addr()
}

// keep connects from n ports of the client.
func keep(b *balancer, n int) (all []balancer) {
	b.t.Helper()
	for i := range n {
		b.client = netip.AddrPortFrom(b.client.Addr(), uint16(20_000+i))
		b.known = netip.AddrPortFrom(b.known.Addr(), b.client.Port())
		b.connect()
		all = append(all, *b)
	}
	return all
}

// The flows of an older build continue: with its next packet a flow moves to the new map.
func TestOldFlows(t *testing.T) {
	for name, proto := range map[string]uint8{"TCP": tcp, "UDP": udp} {
		t.Run(name, func(t *testing.T) {
			s := sides["IPv4"]
			// Another backend: a packet that finds no flow goes to the VIP's own.
			old := netip.AddrPortFrom(s.backend.Addr().Next(), 9090)
			inEachBalancer(t, s, proto, func(t *testing.T, b *balancer) {
				t.Helper()
				if b.known != b.client {
					return // the entries of a second translation are read in the same way
				}
				id := uint32(100)
				if b.there == bpf.ProgGateway {
					id = 1
				}
				b.backend = old
				for key, c := range map[bpf.ConnKey]bpf.Conn{
					connKey(b.client, b.vip, proto, 0): {Addr: bpf.Addr16(old.Addr()), ServerPort: old.Port(), ClientPort: b.client.Port()},
					connKey(b.client, old, proto, 1):   {Addr: bpf.Addr16(b.vip.Addr()), ServerPort: b.vip.Port(), ClientPort: b.client.Port()},
				} {
					c.BackendId, c.State, c.Seen = id, bpf.ConnOpen, monotonic(t)-uint64(time.Minute)
					whole, err := binary.Append(nil, binary.NativeEndian, c)
					if err != nil {
						t.Fatal(err)
					}
					b.put(bpf.MapConns, key, whole[:binary.Size(bpf.OldConn{})])
				}
				there, back := b.tcp(ack), b.tcpBack(ack)
				there.proto, back.proto = proto, proto
				for range 2 {
					b.answers(back)
					b.sends(there)
				}
				want := map[uint8]string{tcp: bpf.MapFlows, udp: bpf.MapUDPFlows}[proto]
				for _, key := range []bpf.ConnKey{connKey(b.client, b.vip, proto, 0), connKey(b.client, old, proto, 1)} {
					if home := b.home(key); home != want {
						t.Errorf("direction %d is in %q", key.Reply, home)
					}
				}
				var key bpf.ConnKey
				if err := b.coll.Maps[bpf.MapConns].NextKey(nil, &key); !errors.Is(err, ebpf.ErrKeyNotExist) {
					t.Errorf("a flow remains in the old map: %v, %v", key, err)
				}
				if proto != tcp {
					return
				}
				// The window is unknown, so that no RST ends the flow. If the client connects again and the backend accepts,
				// a new window begins.
				if b.there == bpf.ProgGateway {
					b.announce(b.side)
				}
				b.sends(b.tcp(rst))
				b.state(bpf.ConnOpen, bpf.MapFlows)
				b.sends(b.tcp(syn))
				b.answers(b.tcpBack(syn | ack))
				b.state(bpf.ConnAnswered, bpf.MapFlows)
				b.sends(b.tcp(ack))
				b.state(bpf.ConnOpen, bpf.MapFlows)
				if n := b.announced(); b.there == bpf.ProgGateway && n != 1 {
					t.Errorf("the gateway announces %d flows, want 1", n)
				}
				b.sends(b.tcp(rst))
				b.state(bpf.ConnClosed, bpf.MapFlows)
			})
		})
	}
}

// The XDP program follows the windows of the packets that it forwards.
func TestXDPWindow(t *testing.T) {
	d := newDriven(t)
	for family, s := range sides {
		for way, source := range map[string]netip.Addr{"routed": {}, "by the VIP": s.vip.Addr()} {
			t.Run(family+" "+way, func(t *testing.T) {
				d.t = t
				d.clearFlows()
				there, thereWant, back, backWant := d.begin(s, tcp, source)
				back.window, backWant.window = 5000, 5000
				for range 5 { // the backend acknowledges what the client sends, and announces the same window
					d.sent(xdpRedirect, back, backWant, d.mac)
					back.ack += 5000
					backWant.ack = back.ack
					d.sent(xdpRedirect, there, thereWant, d.mac)
				}
				end := there
				end.flags, end.seq = rst, back.ack-5000
				d.drive(bpf.ProgGateway, end.bytes())
				if c := d.entry(connKey(s.client, s.vip, tcp, 0)); c.State != bpf.ConnClosed {
					t.Errorf("a RST in the window leaves state %d", c.State)
				}
			})
		}
	}
}
