package bpf_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// Return values of the programs.
const (
	passed   = math.MaxUint32 // TC_ACT_UNSPEC
	dropped  = 2              // TC_ACT_SHOT
	sentBack = 7              // TC_ACT_REDIRECT
)

// The programs on the way to a VIP, and those on the way back to a client.
var (
	there = []string{bpf.ProgFromClient, bpf.ProgFromNetwork}
	back  = []string{bpf.ProgToClient, bpf.ProgToNetwork}
)

var (
	mustAddrPort = netip.MustParseAddrPort

	// side holds the addresses of the same setup in one family.
	sides = map[string]side{
		"IPv4": {
			client: mustAddrPort("10.1.0.2:40000"), vip: mustAddrPort("243.0.0.5:80"), backend: mustAddrPort("10.2.0.9:8080"),
			router: netip.MustParseAddr("10.9.9.9"), elsewhere: mustAddrPort("198.51.100.7:80"), ranges: "243.0.0.0/8",
		},
		"IPv6": {
			client: mustAddrPort("[fd01::2]:40000"), vip: mustAddrPort("[fd99::5]:80"), backend: mustAddrPort("[fd02::9]:8080"),
			router: netip.MustParseAddr("fd09::9"), elsewhere: mustAddrPort("[2001:db8::7]:80"), ranges: "fd99::/48",
		},
	}
	transports = map[string]uint8{"TCP": tcp, "UDP": udp, "SCTP": sctp}
)

type side struct {
	client, vip, backend netip.AddrPort
	router               netip.Addr
	elsewhere            netip.AddrPort
	ranges               string
}

// opening returns the first packet of a flow to the VIP.
func (s side) opening(proto uint8) frame {
	f := frame{src: s.client, dst: s.vip, proto: proto, payload: []byte("hello, isthmus")}
	switch proto {
	case tcp:
		f.flags = syn
	case sctp:
		f.flags = sctpInit
	}
	return f
}

// answer returns the backend's first packet of that flow.
func (s side) answer(proto uint8) frame {
	f := s.opening(proto).to(s.backend).back()
	switch proto {
	case tcp:
		f.flags, f.ack = syn|ack, 1
	case sctp:
		f.flags = sctpInitAck
	}
	return f
}

// header is the length of an IP header.
func (s side) header() int {
	if s.vip.Addr().Is6() {
		return 40
	}
	return 20
}

// shortest returns the length to which f can be truncated: the kernel refuses a test run with a truncated IP header,
// unless a VLAN tag hides that header.
func (s side) shortest(f frame) int {
	if len(f.vlan) > 0 {
		return 15
	}
	return 14 + s.header()
}

// path is the packet path with maps of its own.
type path struct {
	t    testing.TB
	coll *ebpf.Collection
}

// loadOnce returns a function that loads programs at its first call: the verifier takes a second for them.
func loadOnce(read func() (*ebpf.CollectionSpec, error)) func() (*ebpf.Collection, error) {
	return sync.OnceValues(func() (*ebpf.Collection, error) {
		spec, err := read()
		if err != nil {
			return nil, err
		}
		for _, name := range []string{bpf.MapFlows, bpf.MapHandshakes, bpf.MapUDPFlows, bpf.MapConns} {
			spec.Maps[name].MaxEntries = 4096 // these maps are preallocated
		}
		if err := spec.Variables[bpf.VarOldFlows].Set(uint32(1)); err != nil {
			return nil, err
		}
		return ebpf.NewCollection(spec)
	})
}

// newEmpty returns loaded programs with empty maps.
func newEmpty(t testing.TB, load func() (*ebpf.Collection, error)) *path {
	t.Helper()
	netlab.Privileged(t)
	coll, err := load()
	if err != nil {
		t.Fatalf("load: %+v", err)
	}
	p := &path{t: t, coll: coll}
	for name, m := range coll.Maps {
		if slices.Contains([]ebpf.MapType{ebpf.Hash, ebpf.LRUHash, ebpf.LPMTrie}, m.Type()) {
			p.clear(name, m)
		}
	}
	return p
}

var loadPath = loadOnce(bpf.LoadPacketSpec)

// newPath returns the packet path with empty maps.
func newPath(t testing.TB) *path {
	t.Helper()
	p := newEmpty(t, loadPath)
	for i := range uint32(256) {
		p.put(bpf.MapClusters, i, bpf.Cluster{})
	}
	p.put(bpf.MapSettings, uint32(0), bpf.Settings{})
	p.put(bpf.MapRoutedClients, uint32(0), uint32(1)) // ProgToNetwork translates from the start
	p.set(0)
	return p
}

func (p *path) clear(name string, m *ebpf.Map) {
	p.t.Helper()
	key := make([]byte, m.KeySize())
	for {
		err := m.NextKey(nil, &key)
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return
		}
		if err != nil {
			p.t.Fatalf("next of %s: %v", name, err)
		}
		p.delete(name, key)
	}
}

// homes are the maps of flows.
var homes = []string{bpf.MapFlows, bpf.MapHandshakes, bpf.MapUDPFlows}

// clearFlows deletes all flows.
func (p *path) clearFlows() {
	p.t.Helper()
	for _, name := range homes {
		p.clear(name, p.coll.Maps[name])
	}
}

func (p *path) put(name string, key, value any) {
	p.t.Helper()
	if err := p.coll.Maps[name].Put(key, value); err != nil {
		p.t.Fatalf("put into %s: %v", name, err)
	}
}

// set sets the flags of the packet path, and the nets that cover the ranges of all sides.
func (p *path) set(flags bpf.PacketFlags) {
	p.t.Helper()
	s := bpf.PacketSettings{
		Flags: flags, Net4: binary.NativeEndian.Uint32([]byte{243, 0, 0, 0}), Mask4: binary.NativeEndian.Uint32([]byte{255, 0, 0, 0}),
		Net6: [16]uint8{0: 0xfd, 1: 0x99}, Mask6: [16]uint8{255, 255, 255, 255, 255, 255},
	}
	p.put(bpf.MapPacketSettings, uint32(0), s)
}

func (p *path) addRange(cidr string) {
	p.t.Helper()
	pre := netip.MustParsePrefix(cidr)
	bits := pre.Bits()
	if pre.Addr().Is4() {
		bits += 96
	}
	p.put(bpf.MapRanges, bpf.RangeKey{Prefixlen: uint32(bits), Addr: bpf.Addr16(pre.Addr())}, uint32(1))
}

// serve adds a VIP with backends. The frontend, its Service and its cluster have the same number.
func (p *path) serve(id uint32, proto uint8, vip netip.AddrPort, backends ...netip.AddrPort) {
	p.t.Helper()
	for i, b := range backends {
		n := id*100 + uint32(i)
		p.put("backends", n, bpf.Backend{Addr: bpf.Addr16(b.Addr()), Port: b.Port(), Proto: proto, Cluster: uint16(id)})
		p.put("slots", bpf.SlotKey{FrontendId: id, Slot: uint32(i)}, n)
	}
	p.put("services", id, bpf.Service{})
	p.put("frontends", bpf.FrontendKey{Addr: bpf.Addr16(vip.Addr()), Port: vip.Port(), Proto: proto},
		bpf.Frontend{Id: id, Count: uint32(len(backends)), Service: id})
}

// run runs a program on a packet.
func (p *path) run(prog string, in []byte) (verdict uint32, out []byte) {
	p.t.Helper()
	out = make([]byte, len(in)+256)
	opts := ebpf.RunOptions{Data: in, DataOut: out}
	verdict, err := p.coll.Programs[prog].Run(&opts)
	if err != nil {
		p.t.Fatalf("run %s on %d bytes: %v", prog, len(in), err)
	}
	return verdict, opts.DataOut
}

// want runs a program and compares its verdict and the resulting packet.
func (p *path) want(prog string, in []byte, verdict uint32, out []byte) {
	p.t.Helper()
	gotVerdict, got := p.run(prog, in)
	if gotVerdict != verdict {
		p.t.Errorf("%s returns %d, want %d", prog, int32(gotVerdict), int32(verdict))
	}
	if diff := cmp.Diff(out, got); diff != "" {
		p.t.Errorf("%s: packet (-want +got):\n%s", prog, diff)
	}
}

// translated expects a packet to pass as another one.
func (p *path) translated(prog string, in, out frame) {
	p.t.Helper()
	p.want(prog, in.bytes(), passed, out.bytes())
}

// untouched expects a packet to pass unchanged.
func (p *path) untouched(prog string, in []byte) {
	p.t.Helper()
	p.want(prog, in, passed, in)
}

// refusals returns the refusal counters, sorted.
func (p *path) refusals() map[string]uint64 {
	p.t.Helper()
	counts := map[string]uint64{}
	var key bpf.RefusalKey
	var n uint64
	for it := p.coll.Maps[bpf.MapRefusals].Iterate(); it.Next(&key, &n); {
		counts[fmt.Sprint(key.Service, " ", key.Reason)] = n
	}
	return counts
}

func (p *path) wantRefusals(want map[string]uint64) {
	p.t.Helper()
	if diff := cmp.Diff(want, p.refusals()); diff != "" {
		p.t.Errorf("refusals (-want +got):\n%s", diff)
	}
}

func connKey(client, server netip.AddrPort, proto, reply uint8) bpf.ConnKey {
	return bpf.ConnKey{
		Client: bpf.Addr16(client.Addr()), ClientPort: client.Port(),
		Server: bpf.Addr16(server.Addr()), ServerPort: server.Port(), Proto: proto, Reply: reply,
	}
}

// states returns the states of both directions of a flow.
func (p *path) states(s side, proto uint8) (there, back bpf.ConnState) {
	p.t.Helper()
	var a, b bpf.Conn
	for key, c := range map[bpf.ConnKey]*bpf.Conn{connKey(s.client, s.vip, proto, 0): &a, connKey(s.client, s.backend, proto, 1): &b} {
		*c = p.entry(key)
	}
	return a.State, b.State
}

// entry returns an entry of a flow.
func (p *path) entry(key bpf.ConnKey) (c bpf.Conn) {
	p.t.Helper()
	home := p.home(key)
	if home == "" {
		p.t.Fatalf("no map has the flow of %v", key)
	}
	if err := p.coll.Maps[home].Lookup(key, &c); err != nil {
		p.t.Fatalf("flow of %v: %v", key, err)
	}
	return c
}

// home returns the map with an entry.
func (p *path) home(key bpf.ConnKey) string {
	p.t.Helper()
	var c bpf.Conn
	for _, name := range homes {
		if p.coll.Maps[name].Lookup(key, &c) == nil {
			return name
		}
	}
	return ""
}

// forget deletes an entry.
func (p *path) forget(key bpf.ConnKey) {
	p.t.Helper()
	p.delete(p.home(key), key)
}

// age makes all flows older, as if no packet had come for so long.
func (p *path) age(by time.Duration) {
	p.t.Helper()
	for _, name := range homes {
		var key bpf.ConnKey
		var c bpf.Conn
		for it := p.coll.Maps[name].Iterate(); it.Next(&key, &c); {
			c.Seen -= uint64(by)
			c.CheckedAt -= 2
			p.put(name, key, c)
		}
	}
}

func (p *path) cluster(index uint32) bpf.Cluster {
	p.t.Helper()
	var c bpf.Cluster
	if err := p.coll.Maps["clusters"].Lookup(index, &c); err != nil {
		p.t.Fatal(err)
	}
	return c
}

// crossing is one transport in one family.
type crossing struct {
	side
	proto uint8
}

// crossings returns all combinations by name.
func crossings() map[string]crossing {
	all := map[string]crossing{}
	for family, s := range sides {
		for name, proto := range transports {
			all[family+"/"+name] = crossing{s, proto}
		}
	}
	return all
}

// inEach runs a test for each transport in each family, on a path with empty maps.
func inEach(t *testing.T, test func(t *testing.T, p *path, s side, proto uint8)) {
	t.Helper()
	for name, of := range crossings() {
		t.Run(name, func(t *testing.T) { test(t, newPath(t), of.side, of.proto) })
	}
}

func TestPacketTranslation(t *testing.T) {
	variants := map[string]struct {
		change func(*frame)
		only   uint8 // for this protocol only
		v6, v4 bool  // for this family only
	}{
		"plain":               {change: func(*frame) {}},
		"no payload":          {change: func(f *frame) { f.payload = nil }},
		"odd payload":         {change: func(f *frame) { f.payload = []byte("odd") }},
		"large":               {change: func(f *frame) { f.payload = make([]byte, 1400) }},
		"wrong checksum":      {change: func(f *frame) { f.wrong = 0x1234 }},
		"no checksum":         {change: func(f *frame) { f.noCheck = true }, only: udp},
		"one hop left":        {change: func(f *frame) { f.hops = 1 }},
		"VLAN":                {change: func(f *frame) { f.vlan = []int{7} }},
		"VLAN in VLAN":        {change: func(f *frame) { f.vlan = []int{7, 8} }},
		"options":             {change: func(f *frame) { f.options = []byte{1, 1, 1, 0} }, v4: true},
		"all options":         {change: func(f *frame) { f.options = slices.Repeat([]byte{1}, 40) }, v4: true},
		"hop by hop":          {change: func(f *frame) { f.exts = []ext{{unix.IPPROTO_HOPOPTS, make([]byte, 6)}} }, v6: true},
		"destination":         {change: func(f *frame) { f.exts = []ext{{unix.IPPROTO_DSTOPTS, make([]byte, 14)}} }, v6: true},
		"routing header done": {change: func(f *frame) { f.exts = []ext{{unix.IPPROTO_ROUTING, []byte{4, 0, 0, 0, 0, 0}}} }, v6: true},
		"atomic fragment":     {change: func(f *frame) { f.exts = []ext{{unix.IPPROTO_FRAGMENT, make([]byte, 6)}} }, v6: true},
		"six extensions":      {change: func(f *frame) { f.exts = slices.Repeat([]ext{{unix.IPPROTO_DSTOPTS, make([]byte, 6)}}, 6) }, v6: true},
		"one byte":            {change: func(f *frame) { f.payload = []byte{0} }},
		"wrong header":        {change: func(f *frame) { f.wrongIP = 0x1234 }, v4: true},
		"VLAN, options":       {change: func(f *frame) { f.vlan, f.options = []int{7}, []byte{1, 1, 1, 0} }, v4: true},
		"VLAN, extension":     {change: func(f *frame) { f.vlan, f.exts = []int{7}, []ext{{unix.IPPROTO_HOPOPTS, make([]byte, 6)}} }, v6: true},
	}
	p := newPath(t)
	for name, of := range crossings() {
		t.Run(name, func(t *testing.T) {
			s, proto := of.side, of.proto
			p.serve(1, proto, s.vip, s.backend)
			port := uint16(1000)
			for name, v := range variants {
				if v.only != 0 && v.only != proto || v.v4 && s.vip.Addr().Is6() || v.v6 && s.vip.Addr().Is4() {
					continue
				}
				port++
				t.Run(name, func(t *testing.T) {
					p.t = t
					s := s
					s.client = netip.AddrPortFrom(s.client.Addr(), port)
					there, back := s.opening(proto), s.answer(proto)
					v.change(&there)
					v.change(&back)
					p.translated(bpf.ProgFromClient, there, there.to(s.backend))
					p.translated(bpf.ProgFromNetwork, there, there.to(s.backend))
					p.untouched(bpf.ProgFromClient, back.bytes())
					p.untouched(bpf.ProgFromNetwork, back.bytes()) // the flow takes the slow path
					p.translated(bpf.ProgToClient, back, back.from(s.vip))
					p.translated(bpf.ProgToNetwork, back, back.from(s.vip))
					for _, prog := range []string{bpf.ProgToClient, bpf.ProgToNetwork} {
						p.untouched(prog, there.to(s.backend).bytes())
						p.untouched(prog, back.from(s.elsewhere).bytes())
					}
				})
			}
			p.t = t
			p.wantRefusals(map[string]uint64{})
		})
	}
}

// Replies to clients leave by an uplink only after a client came in by a device that is not a client's.
func TestPacketRoutedClients(t *testing.T) {
	const loopback = 1 // the device of test runs
	inEach(t, func(t *testing.T, p *path, s side, proto uint8) {
		t.Helper()
		p.put(bpf.MapRoutedClients, uint32(0), uint32(0))
		p.put(bpf.MapDevices, uint32(loopback), bpf.Device{Flags: bpf.DeviceClient})
		p.serve(1, proto, s.vip, s.backend)
		there, back := s.opening(proto), s.answer(proto)
		p.translated(bpf.ProgFromClient, there, there.to(s.backend))
		p.untouched(bpf.ProgToNetwork, back.bytes())
		p.translated(bpf.ProgToClient, back, back.from(s.vip))
		p.delete(bpf.MapDevices, uint32(loopback))
		other := netip.AddrPortFrom(s.client.Addr().Next(), s.client.Port())
		p.translated(bpf.ProgFromNetwork, there.from(other), there.from(other).to(s.backend))
		p.translated(bpf.ProgToNetwork, back.to(other), back.to(other).from(s.vip))
		p.translated(bpf.ProgToNetwork, back, back.from(s.vip))
	})
}

// A frame is padded to the minimum length of Ethernet: the padding is not part of the packet.
func TestPacketPadding(t *testing.T) {
	p := newPath(t)
	for name, of := range crossings() {
		t.Run(name, func(t *testing.T) {
			s, proto := of.side, of.proto
			p.t = t
			p.serve(1, proto, s.vip, s.backend)
			f := s.opening(proto)
			pad := make([]byte, 20)
			p.want(bpf.ProgFromClient, append(f.bytes(), pad...), passed, append(f.to(s.backend).bytes(), pad...))
		})
	}
}

// A packet that is not to a VIP passes unchanged, whatever it is.
func TestPacketToOtherAddress(t *testing.T) {
	for name, flags := range map[string]bpf.PacketFlags{
		"VIPs anywhere": 0, "VIPs in ranges": bpf.PacketVIPsInRanges,
		"VIPs in one range": bpf.PacketVIPsInRanges | bpf.PacketOneRange, "fast": bpf.PacketVIPsInRanges | bpf.PacketFast,
	} {
		t.Run(name, func(t *testing.T) {
			p := newPath(t)
			p.set(flags)
			for _, s := range sides {
				p.addRange(s.ranges)
				for _, proto := range transports {
					p.serve(1, proto, s.vip, s.backend)
					for _, vlan := range [][]int{nil, {7}, {7, 8}} {
						f := s.opening(proto).to(s.elsewhere)
						f.vlan = vlan
						whole := f.bytes()
						for n := s.shortest(f); n <= len(whole); n++ {
							for _, prog := range slices.Concat(there, back) {
								p.untouched(prog, whole[:n])
							}
						}
					}
				}
				for _, prog := range slices.Concat(there, back) {
					p.untouched(prog, icmp(s.client.Addr(), s.elsewhere.Addr(), 8, 0, 1, nil).bytes())
				}
			}
			for _, prog := range slices.Concat(there, back) {
				p.untouched(prog, append(make([]byte, 12), 8, 6, 0, 1, 8, 0, 6, 4, 0, 1)) // ARP
			}
			p.wantRefusals(map[string]uint64{})
		})
	}
}

// A truncated packet is refused without a reply and counted, once enough of it is there to recognize its destination.
func TestPacketTruncated(t *testing.T) {
	p := newPath(t)
	for _, s := range sides {
		p.addRange(s.ranges)
	}
	for name, of := range crossings() {
		t.Run(name, func(t *testing.T) {
			s, proto := of.side, of.proto
			p.t = t
			p.serve(1, proto, s.vip, s.backend)
			p.run(bpf.ProgFromClient, s.opening(proto).bytes())
			base := p.refusals()["0 malformed"]
			for _, vlan := range [][]int{nil, {7}, {7, 8}} {
				f, reply := s.opening(proto), s.answer(proto)
				f.vlan, reply.vlan = vlan, vlan
				whole, answer := f.bytes(), reply.bytes()
				for n := s.shortest(f); n < len(whole); n++ {
					for _, prog := range there {
						verdict := uint32(passed)
						if n >= 14+4*len(vlan)+s.header() {
							verdict = dropped
							base++
						}
						p.want(prog, whole[:n], verdict, whole[:n])
						if got := p.refusals()["0 malformed"]; got != base {
							t.Errorf("%s, %d bytes: %d malformed, want %d", prog, n, got, base)
						}
					}
					for _, prog := range append(back, bpf.ProgFromNetwork) {
						p.untouched(prog, answer[:n])
					}
				}
			}
		})
	}
}

// A header may also contain wrong lengths.
func TestPacketMalformed(t *testing.T) {
	s4, s6 := sides["IPv4"], sides["IPv6"]
	bend := func(f frame, at int, b byte) []byte {
		raw := f.bytes()
		raw[14+at] = b
		return raw
	}
	cases := map[string]struct {
		packet []byte
		reason string
	}{
		"version 5":            {bend(s4.opening(tcp), 0, 0x55), "0 malformed"},
		"header of 16 bytes":   {bend(s4.opening(tcp), 0, 0x44), "0 malformed"},
		"longer than total":    {bend(s4.opening(tcp), 0, 0x4f), "0 malformed"},
		"total beyond the end": {bend(s4.opening(udp), 2, 0x20), "0 malformed"},
		"TCP of 16 bytes":      {bend(s4.opening(tcp), 32, 0x40), "0 malformed"},
		"TCP beyond the end":   {bend(s4.opening(tcp), 32, 0xf0), "0 malformed"},
		"UDP of 7 bytes":       {bend(s4.opening(udp), 25, 7), "0 malformed"},
		"UDP beyond the end":   {bend(s4.opening(udp), 24, 1), "0 malformed"},
		"IPv6 version 4":       {bend(s6.opening(tcp), 0, 0x40), "0 malformed"},
		"payload beyond":       {bend(s6.opening(tcp), 4, 0x20), "0 malformed"},
		"extension beyond":     {bend(frame{src: s6.client, dst: s6.vip, proto: udp, exts: []ext{{unix.IPPROTO_HOPOPTS, make([]byte, 6)}}}, 41, 200), "0 malformed"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			p := newPath(t)
			p.addRange(s4.ranges)
			p.addRange(s6.ranges)
			for _, prog := range there {
				p.want(prog, c.packet, dropped, c.packet)
			}
			p.wantRefusals(map[string]uint64{c.reason: 2})
			for _, prog := range back {
				p.untouched(prog, c.packet)
			}
		})
	}
}

// refusal returns the reply to a refused frame.
func refusal(f frame, next int) frame {
	if f.proto == tcp {
		r := frame{src: f.dst, dst: f.src, proto: tcp, flags: rst, dontFrag: f.src.Addr().Is4(), vlan: f.vlan}
		if f.flags&ack != 0 {
			r.seq = f.ack
			return r
		}
		r.flags |= ack
		r.ack = f.seq + uint32(len(f.payload))
		if f.flags&syn != 0 {
			r.ack++
		}
		if f.flags&fin != 0 {
			r.ack++
		}
		return r
	}
	quote := f.ip()
	quote = quote[:min(len(quote), 96)]
	kind, code, rest := uint8(3), uint8(2), uint32(0)
	switch {
	case f.src.Addr().Is4() && f.proto == udp:
		code = 3
	case f.src.Addr().Is4():
	case f.proto == udp:
		kind, code = 1, 4
	case f.proto == unix.IPPROTO_ICMPV6:
		kind, code = 1, 1
	default:
		kind, code, rest = 4, 1, uint32(next)
	}
	r := icmp(f.dst.Addr(), f.src.Addr(), kind, code, rest, quote)
	r.dontFrag, r.vlan = f.src.Addr().Is4(), f.vlan
	return r
}

// next is the offset of the protocol number in an IPv6 header without extensions.
const next = 6

func TestPacketRefused(t *testing.T) {
	for name, of := range crossings() {
		t.Run(name, func(t *testing.T) {
			s, proto := of.side, of.proto
			cases := map[string]struct {
				arrange func(p *path)
				frame   frame
				reason  string
			}{
				"no frontend":     {func(p *path) { p.addRange(s.ranges) }, s.opening(proto), "0 no_frontend"},
				"no backend":      {func(p *path) { p.serve(3, proto, s.vip) }, s.opening(proto), "3 no_backend"},
				"backend removed": {func(p *path) { p.serve(3, proto, s.vip, s.backend); p.delete("backends", uint32(300)) }, s.opening(proto), "3 backend_gone"},
				"slot removed":    {func(p *path) { p.serve(3, proto, s.vip, s.backend); p.delete("slots", bpf.SlotKey{FrontendId: 3}) }, s.opening(proto), "3 backend_gone"},
				"another port":    {func(p *path) { p.addRange(s.ranges); p.serve(3, proto, s.backend, s.backend) }, s.opening(proto), "0 no_frontend"},
				"tagged":          {func(p *path) { p.addRange(s.ranges) }, func() frame { f := s.opening(proto); f.vlan = []int{9}; return f }(), "0 no_frontend"},
				"large":           {func(p *path) { p.addRange(s.ranges) }, func() frame { f := s.opening(proto); f.payload = make([]byte, 1200); return f }(), "0 no_frontend"},
				"no payload":      {func(p *path) { p.addRange(s.ranges) }, func() frame { f := s.opening(proto); f.payload = nil; return f }(), "0 no_frontend"},
				"wrong checksum":  {func(p *path) { p.addRange(s.ranges) }, func() frame { f := s.opening(proto); f.wrong = 7; return f }(), "0 no_frontend"},
				"more headers": {func(p *path) { p.addRange(s.ranges) }, func() frame {
					f := s.opening(proto)
					if s.vip.Addr().Is6() {
						f.exts = []ext{{unix.IPPROTO_DSTOPTS, make([]byte, 6)}}
					} else {
						f.options = []byte{1, 1, 1, 0}
					}
					return f
				}(), "0 no_frontend"},
			}
			for name, c := range cases {
				t.Run(name, func(t *testing.T) {
					p := newPath(t)
					c.arrange(p)
					at := next
					if len(c.frame.exts) > 0 {
						at = 40
					}
					answer := refusal(c.frame, at).bytes()
					for _, prog := range there {
						p.want(prog, c.frame.bytes(), sentBack, answer)
					}
					p.wantRefusals(map[string]uint64{c.reason: 2})
					for _, prog := range back {
						p.untouched(prog, answer)
					}
				})
			}
		})
	}
}

// A client that is its own backend gets its packets back from the VIP, and its replies too.
func TestPacketToItself(t *testing.T) {
	for name, of := range crossings() {
		for _, prog := range there {
			t.Run(name+"/"+prog, func(t *testing.T) {
				s, proto := of.side, of.proto
				s.backend = netip.AddrPortFrom(s.client.Addr(), 8080)
				vipAsClient := netip.AddrPortFrom(s.vip.Addr(), s.client.Port())
				p := newPath(t)
				p.addRange(s.ranges)
				p.serve(3, proto, s.vip, s.backend)
				home := func(in, out frame) {
					t.Helper()
					p.want(prog, in.bytes(), sentBack, out.bytes())
					for _, egress := range back {
						p.untouched(egress, out.bytes())
					}
				}
				opening, seen := s.opening(proto), s.opening(proto).from(vipAsClient).to(s.backend)
				answer, known := s.answer(proto).to(vipAsClient), s.answer(proto).from(s.vip)
				home(opening, seen)
				home(opening, seen)
				home(answer, known)
				if got := p.cluster(3); got.Established != 1 || got.Reset != 0 {
					t.Errorf("after an answer: %+v", got)
				}
				if proto == tcp {
					home(s.tcp(ack), s.tcp(ack).from(vipAsClient).to(s.backend))
				}
				for _, shape := range []func(*frame){
					func(f *frame) { f.vlan = []int{7} }, func(f *frame) { f.wrong = 0x1234 }, func(f *frame) { f.payload = []byte("odd") },
					func(f *frame) {
						if f.src.Addr().Is4() {
							f.options = []byte{1, 1, 1, 0}
						} else {
							f.exts = []ext{{unix.IPPROTO_HOPOPTS, make([]byte, 6)}}
						}
					},
				} {
					in, out := answer, known
					shape(&in)
					shape(&out)
					home(in, out)
				}
				// The client refuses what it received.
				home(icmpUnreachable(s.client.Addr(), s.vip.Addr(), seen), icmpUnreachable(s.vip.Addr(), s.client.Addr(), opening))
				home(icmpUnreachable(s.client.Addr(), s.vip.Addr(), known), icmpUnreachable(s.vip.Addr(), s.client.Addr(), answer))
				p.wantRefusals(map[string]uint64{})
				lie := icmpUnreachable(s.router, s.vip.Addr(), seen).bytes()
				p.want(prog, lie, dropped, lie)
				p.wantRefusals(map[string]uint64{"0 no_connection": 1})
				// Either direction recreates the entry of the other.
				for _, gone := range []bpf.ConnKey{connKey(s.client, s.vip, proto, 0), connKey(s.backend, vipAsClient, proto, 0)} {
					p.forget(gone)
					p.age(2 * time.Second)
					first, second := answer, opening
					firstOut, secondOut := known, seen
					if gone.ClientPort == s.backend.Port() {
						first, firstOut, second, secondOut = second, secondOut, first, firstOut
					}
					for _, f := range []*frame{&first, &firstOut, &second, &secondOut} {
						switch proto {
						case tcp:
							f.flags = ack
						case sctp:
							f.flags = sctpData
						}
					}
					home(first, firstOut)
					home(second, secondOut)
				}
			})
		}
	}
}

// The same works with fragments.
func TestPacketToItselfInFragments(t *testing.T) {
	for family, s := range sides {
		t.Run(family, func(t *testing.T) {
			s.backend = netip.AddrPortFrom(s.client.Addr(), 8080)
			p := newPath(t)
			p.serve(3, udp, s.vip, s.backend)
			whole := s.opening(udp)
			whole.payload, whole.id = make([]byte, 2000), 0x4242
			seen := whole.to(s.backend).from(netip.AddrPortFrom(s.vip.Addr(), s.client.Port()))
			for _, at := range []int{0, 1000, 2000} {
				n := min(1000, 2008-at)
				p.want(bpf.ProgFromClient, whole.fragment(at, n).bytes(), sentBack, seen.fragment(at, n).bytes())
			}
			p.wantRefusals(map[string]uint64{})
		})
	}
}

// A flood of refused packets does not become a flood of replies.
func TestPacketReplyRateLimit(t *testing.T) {
	const most = 10_000 // per second and CPU
	for name, of := range crossings() {
		t.Run(name, func(t *testing.T) {
			p := newPath(t)
			p.addRange(of.ranges)
			f := of.opening(of.proto)
			cpus, err := ebpf.PossibleCPU()
			if err != nil {
				t.Fatal(err)
			}
			answers := make([]bpf.Answers, cpus)
			given := func(age time.Duration, n uint64) {
				t.Helper()
				var now unix.Timespec
				if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
					t.Fatal(err)
				}
				for i := range answers {
					answers[i] = bpf.Answers{Since: uint64(now.Nano() - int64(age)), Given: n}
				}
				p.put(bpf.MapAnswers, uint32(0), answers)
			}
			in, out := f.bytes(), refusal(f, next).bytes()
			given(0, most-1)
			p.want(bpf.ProgFromClient, in, sentBack, out)
			given(0, most)
			p.want(bpf.ProgFromClient, in, dropped, in)
			p.wantRefusals(map[string]uint64{"0 no_frontend": 2, "0 unanswered": 1})
			given(2*time.Second, most)
			p.want(bpf.ProgFromClient, in, sentBack, out)
			p.wantRefusals(map[string]uint64{"0 no_frontend": 3, "0 unanswered": 1})
		})
	}
}

func (p *path) delete(name string, key any) {
	p.t.Helper()
	if err := p.coll.Maps[name].Delete(key); err != nil {
		p.t.Fatalf("delete from %s: %v", name, err)
	}
}

// A packet that is neither TCP, UDP, SCTP nor an ICMP error is refused. So are echo requests, on purpose: a VIP is no
// machine.
func TestPacketOtherProtocols(t *testing.T) {
	for family, s := range sides {
		echo := icmp(s.client.Addr(), s.vip.Addr(), 8, 0, 77, []byte("ping"))
		if s.vip.Addr().Is6() {
			echo = icmp(s.client.Addr(), s.vip.Addr(), 128, 0, 77, []byte("ping"))
		}
		gre := frame{src: s.client, dst: s.vip, proto: 47, bare: true, payload: []byte("generic")}
		exts := slices.Repeat([]ext{{unix.IPPROTO_DSTOPTS, make([]byte, 6)}}, 7)
		tooMany := frame{src: s.client, dst: s.vip, proto: 47, bare: true, payload: []byte("generic"), exts: exts}
		underWay := frame{src: s.client, dst: s.vip, proto: 47, bare: true, payload: []byte("generic"), exts: []ext{{unix.IPPROTO_ROUTING, []byte{4, 1, 0, 0, 0, 0}}}}
		cases := map[string]struct {
			frame frame
			next  int
		}{"echo": {echo, 0}, "GRE": {gre, next}}
		if s.vip.Addr().Is6() {
			// The pointer names the header that was not recognized.
			cases["too many extensions"] = struct {
				frame frame
				next  int
			}{tooMany, 40 + 5*8}
			cases["routed further"] = struct {
				frame frame
				next  int
			}{underWay, next}
		}
		for name, c := range cases {
			t.Run(family+"/"+name, func(t *testing.T) {
				p := newPath(t)
				p.addRange(s.ranges)
				answer := refusal(c.frame, c.next)
				for _, prog := range there {
					p.want(prog, c.frame.bytes(), sentBack, answer.bytes())
				}
				p.wantRefusals(map[string]uint64{"0 protocol": 2})
				for _, prog := range back {
					p.untouched(prog, c.frame.bytes())
				}
			})
		}
	}
}

func TestPacketNoConnection(t *testing.T) {
	for family, s := range sides {
		middle := frame{src: s.client, dst: s.vip, proto: tcp, flags: ack, seq: 5, ack: 9, payload: []byte("x")}
		for name, c := range map[string]struct {
			frame   frame
			flags   bpf.PacketFlags
			verdict uint32
			out     []byte
		}{
			"refused":      {frame: middle, verdict: sentBack, out: refusal(middle, 0).bytes()},
			"adopted":      {frame: middle, flags: bpf.PacketAdopt, verdict: passed, out: middle.to(s.backend).bytes()},
			"reset":        {frame: s.tcp(rst), verdict: dropped, out: s.tcp(rst).bytes()},
			"SYN with ACK": {frame: s.tcp(syn | ack), verdict: sentBack, out: refusal(s.tcp(syn|ack), 0).bytes()},
		} {
			t.Run(family+"/"+name, func(t *testing.T) {
				p := newPath(t)
				p.set(c.flags)
				p.serve(3, tcp, s.vip, s.backend)
				p.want(bpf.ProgFromClient, c.frame.bytes(), c.verdict, c.out)
				want := map[string]uint64{"3 no_connection": 1}
				if c.verdict == passed {
					want = map[string]uint64{}
				}
				p.wantRefusals(want)
			})
		}
		t.Run(family+"/SCTP", func(t *testing.T) {
			p := newPath(t)
			p.serve(3, sctp, s.vip, s.backend)
			f := s.opening(sctp)
			f.flags = sctpData
			p.want(bpf.ProgFromClient, f.bytes(), sentBack, refusal(f, next).bytes())
			p.wantRefusals(map[string]uint64{"3 no_connection": 1})
		})
	}
}

// tcp returns a packet of the client with these flags. The client's SYN has number 100, the backend's 200.
func (s side) tcp(flags uint8) frame {
	f := frame{src: s.client, dst: s.vip, proto: tcp, flags: flags, seq: 101, ack: 201}
	if flags&syn != 0 {
		f.seq, f.ack = 100, 0
	}
	return f
}

// tcpBack returns a packet of the backend with these flags.
func (s side) tcpBack(flags uint8) frame {
	f := frame{src: s.backend, dst: s.client, proto: tcp, flags: flags, seq: 201, ack: 101}
	if flags&syn != 0 {
		f.seq = 200
	}
	return f
}

// Both directions of a flow have the same state, and the idle timeout depends on it.
func TestPacketStates(t *testing.T) {
	s := sides["IPv4"]
	type step struct {
		there uint8 // flags of the client's packet
		back  uint8 // or of the backend's
	}
	begin := []step{{there: syn}, {back: syn | ack}, {there: ack}}
	cases := map[string]struct {
		steps   []step
		state   bpf.ConnState
		silence time.Duration
	}{
		"opening":     {begin[:1], bpf.ConnOpening, time.Minute},
		"answered":    {begin[:2], bpf.ConnAnswered, time.Minute},
		"open":        {begin, bpf.ConnOpen, 6 * time.Hour},
		"client done": {append(begin[:3:3], step{there: fin | ack}), bpf.ConnHalf, time.Hour},
		"server done": {append(begin[:3:3], step{back: fin | ack}), bpf.ConnHalf, time.Hour},
		"both done":   {append(begin[:3:3], step{there: fin | ack}, step{back: fin | ack}, step{there: ack}), bpf.ConnClosing, time.Minute},
		"reset":       {append(begin[:3:3], step{there: rst}), bpf.ConnClosed, 10 * time.Second},
		"refused":     {append(begin[:1:1], step{back: rst | ack}), bpf.ConnClosed, 10 * time.Second},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			for _, over := range []bool{false, true} {
				p := newPath(t)
				p.serve(1, tcp, s.vip, s.backend)
				for _, step := range c.steps {
					if step.there != 0 {
						p.translated(bpf.ProgFromClient, s.tcp(step.there), s.tcp(step.there).to(s.backend))
					} else {
						p.translated(bpf.ProgToClient, s.tcpBack(step.back), s.tcpBack(step.back).from(s.vip))
					}
				}
				there, back := p.states(s, tcp)
				if there != c.state || back != c.state {
					t.Errorf("state %d and %d, want %d", there, back, c.state)
				}
				more := s.tcp(ack)
				if over {
					p.age(c.silence + time.Second)
					p.want(bpf.ProgFromClient, more.bytes(), sentBack, refusal(more, 0).bytes())
					continue
				}
				p.age(c.silence - time.Second)
				p.translated(bpf.ProgFromClient, more, more.to(s.backend))
				// A packet of one direction keeps the other alive.
				p.age(c.silence - time.Second)
				p.translated(bpf.ProgToClient, s.tcpBack(ack), s.tcpBack(ack).from(s.vip))
				p.age(c.silence - time.Second)
				p.translated(bpf.ProgFromClient, more, more.to(s.backend))
			}
		})
	}
}

// A datagram after a long silence, or after its backend was removed, may go to another backend.
func TestPacketDatagramGetsNewBackend(t *testing.T) {
	s := sides["IPv4"]
	other := mustAddrPort("10.2.0.10:8080")
	cases := map[string]struct {
		answered bool
		silence  time.Duration
		gone     bool
		moves    bool
	}{
		"young":                 {false, 59 * time.Second, false, false},
		"old":                   {false, 61 * time.Second, false, true},
		"answered":              {true, 299 * time.Second, false, false},
		"answered, old":         {true, 301 * time.Second, false, true},
		"backend removed":       {true, 2 * time.Second, true, true},
		"backend removed, busy": {true, 0, true, false}, // for less than a second
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			p := newPath(t)
			p.serve(1, udp, s.vip, s.backend)
			f := s.opening(udp)
			p.translated(bpf.ProgFromClient, f, f.to(s.backend))
			if c.answered {
				p.translated(bpf.ProgToClient, s.answer(udp), s.answer(udp).from(s.vip))
			}
			if c.gone {
				p.delete("backends", uint32(100))
			}
			p.serve(2, udp, s.vip, other)
			p.age(c.silence)
			want := s.backend
			if c.moves {
				want = other
			}
			p.translated(bpf.ProgFromClient, f, f.to(want))
			back := f.to(want).back()
			p.translated(bpf.ProgToClient, back, back.from(s.vip))
		})
	}
}

// A SYN on a known flow opens a new one, unless it is a duplicate or its answer is in flight.
func TestPacketReopened(t *testing.T) {
	s := sides["IPv6"]
	other := mustAddrPort("[fd02::10]:8080")
	cases := map[string]struct {
		between func(p *path)
		moves   bool
		silent  uint64
	}{
		"duplicate":     {func(*path) {}, false, 0},
		"retransmitted": {func(p *path) { p.age(time.Second) }, true, 1},
		"answered":      {func(p *path) { p.run(bpf.ProgToClient, s.tcpBack(syn|ack).bytes()); p.age(time.Second) }, false, 0},
		"open": {func(p *path) {
			p.run(bpf.ProgToClient, s.tcpBack(syn|ack).bytes())
			p.run(bpf.ProgFromClient, s.tcp(ack).bytes())
		}, false, 0}, // TestForgedSYN
		"reset": {func(p *path) { p.run(bpf.ProgToClient, s.tcpBack(rst|ack).bytes()) }, true, 0},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			p := newPath(t)
			p.serve(1, tcp, s.vip, s.backend)
			p.translated(bpf.ProgFromClient, s.tcp(syn), s.tcp(syn).to(s.backend))
			c.between(p)
			p.serve(2, tcp, s.vip, other)
			want := s.backend
			if c.moves {
				want = other
			}
			p.translated(bpf.ProgFromClient, s.tcp(syn), s.tcp(syn).to(want))
			if got := p.cluster(1).Silent; got != c.silent {
				t.Errorf("%d silent, want %d", got, c.silent)
			}
			late := s.tcpBack(syn | ack)
			if c.moves {
				p.untouched(bpf.ProgToClient, late.bytes())
			} else {
				p.translated(bpf.ProgToClient, late, late.from(s.vip))
			}
		})
	}
}

// A reopened flow equals a new one, whatever the previous flow left behind.
func TestPacketReopenedFlowIsNew(t *testing.T) {
	here, back := bpf.ProgFromClient, bpf.ProgToClient
	other := mustAddrPort("[fd02::10]:8080")
	for family, s := range sides {
		backWay := bpf.ConnKey{
			Client: bpf.Addr16(s.client.Addr()), Server: bpf.Addr16(s.backend.Addr()), ClientPort: s.client.Port(), ServerPort: s.backend.Port(), Proto: tcp, Reply: 1,
		}
		for end, how := range map[string]func(p *path){
			"both done": func(p *path) {
				p.run(back, s.tcpBack(syn|ack).bytes())
				p.run(here, s.tcp(fin|ack).bytes())
				p.run(back, s.tcpBack(fin|ack).bytes())
			},
			"reset":      func(p *path) { p.run(here, s.tcp(rst).bytes()) },
			"unanswered": func(*path) {},
		} {
			for change, do := range map[string]func(p *path){
				"nothing":         func(*path) {},
				"no reply entry":  func(*path) {},
				"another address": func(p *path) { p.serve(1, tcp, s.vip, other) },
				"another backend": func(p *path) { p.serve(2, tcp, s.vip, s.backend) },
			} {
				t.Run(family+"/"+end+"/"+change, func(t *testing.T) {
					begin := func(before func(p *path)) map[bpf.ConnKey]bpf.Conn {
						p := newPath(t)
						p.serve(1, tcp, s.vip, s.backend)
						before(p)
						p.run(here, s.tcp(syn).bytes())
						return p.flows()
					}
					want := begin(do)
					have := begin(func(p *path) {
						p.run(here, s.tcp(syn).bytes())
						how(p)
						p.age(time.Hour)
						if change == "no reply entry" {
							p.forget(backWay)
						}
						do(p)
					})
					for key, c := range want {
						h := have[key]
						if age := int64(c.Seen - h.Seen); age > int64(time.Minute) {
							t.Errorf("%v was seen %s ago", key, time.Duration(age))
						}
						h.Seen, h.CheckedAt = c.Seen, c.CheckedAt
						have[key] = h
					}
					if !maps.Equal(have, want) {
						t.Errorf("have %+v, want %+v", have, want)
					}
				})
			}
		}
	}
}

// A SYN+ACK or INIT ACK on a flow that is over belongs to a connection that the client opened to the backend
// directly, from the same port. From then on all packets do.
func TestPacketDirectConnection(t *testing.T) {
	type step struct {
		prog string
		sent uint8 // flags or chunk
	}
	here, back := bpf.ProgFromClient, bpf.ProgToClient
	handshake := []step{{here, syn}, {back, syn | ack}, {here, ack}}
	for family, s := range sides {
		for name, c := range map[string]struct {
			proto  uint8
			steps  []step
			answer uint8
			direct bool
		}{
			"opening":          {tcp, handshake[:1], syn | ack, false},
			"answered":         {tcp, handshake[:2], syn | ack, false},
			"open":             {tcp, handshake, syn | ack, false},
			"client done":      {tcp, append(handshake[:3:3], step{here, fin | ack}), syn | ack, false},
			"both done":        {tcp, append(handshake[:3:3], step{here, fin | ack}, step{back, fin | ack}), syn | ack, true},
			"an ACK after it":  {tcp, append(handshake[:3:3], step{here, fin | ack}, step{back, fin | ack}), ack, false},
			"a FIN after it":   {tcp, append(handshake[:3:3], step{here, fin | ack}, step{back, fin | ack}), fin | ack, false},
			"reset":            {tcp, append(handshake[:3:3], step{here, rst}), syn | ack, true},
			"refused":          {tcp, append(handshake[:1:1], step{back, rst | ack}), syn | ack, true},
			"reopened":         {tcp, append(handshake[:3:3], step{here, rst}, step{here, syn}), syn | ack, false},
			"SCTP":             {sctp, []step{{here, sctpInit}, {back, sctpInitAck}}, sctpInitAck, false},
			"SCTP, aborted":    {sctp, []step{{here, sctpInit}, {back, sctpAbort}}, sctpInitAck, true},
			"SCTP, data after": {sctp, []step{{here, sctpInit}, {back, sctpAbort}}, sctpData, false},
		} {
			t.Run(family+"/"+name, func(t *testing.T) {
				p := newPath(t)
				p.serve(1, c.proto, s.vip, s.backend)
				packet := func(prog string, sent uint8) frame {
					f := s.opening(c.proto)
					switch {
					case c.proto == tcp && prog == back:
						return s.tcpBack(sent)
					case c.proto == tcp:
						return s.tcp(sent)
					case prog == back:
						f = s.answer(c.proto)
					}
					f.flags = sent
					return f
				}
				for _, step := range c.steps {
					p.run(step.prog, packet(step.prog, step.sent).bytes())
				}
				in := packet(back, c.answer)
				if !c.direct {
					p.translated(back, in, in.from(s.vip))
					return
				}
				p.untouched(back, in.bytes())
				if n := len(p.flows()); n != 0 {
					t.Errorf("%d entries of a finished flow", n)
				}
				in.flags = ack
				p.untouched(back, in.bytes())
			})
		}
	}
}

// flows returns all entries of flows.
func (p *path) flows() map[bpf.ConnKey]bpf.Conn {
	p.t.Helper()
	all := map[bpf.ConnKey]bpf.Conn{}
	for _, name := range homes {
		maps.Copy(all, p.entries(name))
	}
	return all
}

// entries returns all entries of a map of flows.
func (p *path) entries(name string) map[bpf.ConnKey]bpf.Conn {
	p.t.Helper()
	all := map[bpf.ConnKey]bpf.Conn{}
	var key bpf.ConnKey
	var c bpf.Conn
	for it := p.coll.Maps[name].Iterate(); it.Next(&key, &c); {
		all[key] = c
	}
	return all
}

// Evidence of life is what a backend did, never what was sent to it.
func TestPacketEvidence(t *testing.T) {
	inEach(t, func(t *testing.T, p *path, s side, proto uint8) {
		t.Helper()
		p.serve(7, proto, s.vip, s.backend)
		p.run(bpf.ProgFromClient, s.opening(proto).bytes())
		if got := p.cluster(7); got.Established != 0 || got.AnsweredAt != 0 {
			t.Errorf("an opening is evidence: %+v", got)
		}
		p.run(bpf.ProgToClient, s.answer(proto).bytes())
		p.run(bpf.ProgToClient, s.answer(proto).bytes())
		got := p.cluster(7)
		if got.Established != 1 || got.Reset != 0 || got.AnsweredAt == 0 {
			t.Errorf("after an answer: %+v", got)
		}
		p.age(2 * time.Second)
		p.run(bpf.ProgToClient, s.answer(proto).bytes())
		if later := p.cluster(7); later.AnsweredAt <= got.AnsweredAt || later.Established != 1 {
			t.Errorf("after another: %+v", later)
		}
	})
	t.Run("refused", func(t *testing.T) {
		s, p := sides["IPv4"], newPath(t)
		p.serve(7, tcp, s.vip, s.backend)
		p.run(bpf.ProgFromClient, s.tcp(syn).bytes())
		p.run(bpf.ProgToClient, s.tcpBack(rst|ack).bytes())
		if got := p.cluster(7); got.Established != 0 || got.Reset != 1 || got.AnsweredAt == 0 {
			t.Errorf("after a reset: %+v", got)
		}
	})
}

// Two VIPs may lead the same client and port to one backend. The backend then sees two ports, and both replies
// arrive.
func TestPacketNATPort(t *testing.T) {
	inEach(t, func(t *testing.T, p *path, s side, proto uint8) {
		t.Helper()
		second := s
		second.vip = netip.AddrPortFrom(s.vip.Addr().Next(), 99)
		p.serve(1, proto, s.vip, s.backend)
		p.serve(2, proto, second.vip, s.backend)
		p.translated(bpf.ProgFromClient, s.opening(proto), s.opening(proto).to(s.backend))
		p.run(bpf.ProgFromClient, second.opening(proto).bytes())
		c := p.entry(connKey(s.client, second.vip, proto, 0))
		if c.ClientPort == s.client.Port() || c.ClientPort < 32768 {
			t.Fatalf("the second flow has port %d", c.ClientPort)
		}
		natted := netip.AddrPortFrom(s.client.Addr(), c.ClientPort)
		f := second.opening(proto)
		p.translated(bpf.ProgFromClient, f, f.to(s.backend).from(natted))
		back := s.answer(proto)
		p.translated(bpf.ProgToClient, back, back.from(s.vip))
		p.translated(bpf.ProgToClient, back.to(natted), back.from(second.vip))
		// An error about the second flow is translated too.
		if proto != sctp {
			lost, seen := icmpUnreachable(s.router, s.client.Addr(), f.to(s.backend).from(natted)), icmpUnreachable(s.router, s.client.Addr(), f)
			p.translated(bpf.ProgToClient, lost, seen)
		}
	})
}

// icmpUnreachable returns an ICMP error about f. It quotes no TCP checksum, which is never translated.
func icmpUnreachable(from, to netip.Addr, f frame) frame {
	quote := f.ip()
	if f.proto != udp {
		quote = quote[:len(quote)-len(f.transport())+8]
	}
	if from.Is4() {
		return icmp(from, to, 3, 4, 1400, quote)
	}
	return icmp(from, to, 2, 0, 1400, quote)
}

func TestPacketErrors(t *testing.T) {
	inEach(t, func(t *testing.T, p *path, s side, proto uint8) {
		t.Helper()
		p.serve(1, proto, s.vip, s.backend)
		there, back := s.opening(proto), s.answer(proto)
		if proto == sctp {
			there.payload, back.payload = nil, nil
		}
		p.run(bpf.ProgFromClient, there.bytes())
		p.run(bpf.ProgToClient, back.bytes())
		lost := there.to(s.backend)

		// An error to the client, about its packet: from a router on the way, and from the backend itself.
		p.translated(bpf.ProgToClient, icmpUnreachable(s.router, s.client.Addr(), lost), icmpUnreachable(s.router, s.client.Addr(), there))
		p.translated(bpf.ProgToClient, icmpUnreachable(s.backend.Addr(), s.client.Addr(), lost), icmpUnreachable(s.vip.Addr(), s.client.Addr(), there))
		// An error to the backend, about its packet: from the client, and from a router before it.
		seen := back.from(s.vip)
		p.translated(bpf.ProgFromClient, icmpUnreachable(s.client.Addr(), s.vip.Addr(), seen), icmpUnreachable(s.client.Addr(), s.backend.Addr(), back))
		p.translated(bpf.ProgFromClient, icmpUnreachable(s.router, s.vip.Addr(), seen), icmpUnreachable(s.router, s.backend.Addr(), back))
		// An error about another flow.
		unknownClient := netip.AddrPortFrom(s.client.Addr(), 4)
		p.untouched(bpf.ProgToClient, icmpUnreachable(s.router, s.client.Addr(), lost.from(unknownClient)).bytes())
		p.untouched(bpf.ProgFromClient, icmpUnreachable(s.client.Addr(), s.vip.Addr(), seen.to(unknownClient)).bytes())
		p.untouched(bpf.ProgToClient, icmpUnreachable(s.router, s.client.Addr(), lost.to(s.elsewhere)).bytes())
		p.wantRefusals(map[string]uint64{})
		p.addRange(s.ranges)
		unknown := icmpUnreachable(s.client.Addr(), s.vip.Addr(), seen.to(unknownClient)).bytes()
		p.want(bpf.ProgFromClient, unknown, dropped, unknown)
		p.wantRefusals(map[string]uint64{"0 no_connection": 1})
	})
}

// ICMP errors, and the packets that they quote, may have options and extension headers.
func TestPacketErrorShapes(t *testing.T) {
	cases := map[string]struct {
		outer, quoted func(*frame)
		v4, v6        bool // only for this family
	}{
		"VLAN":              {outer: func(f *frame) { f.vlan = []int{7} }},
		"VLAN in VLAN":      {outer: func(f *frame) { f.vlan = []int{7, 8} }},
		"one hop left":      {outer: func(f *frame) { f.hops = 1 }},
		"wrong checksum":    {outer: spoil},
		"wrong header":      {outer: func(f *frame) { f.wrongIP = 0x1234 }, v4: true},
		"options":           {outer: func(f *frame) { f.options = slices.Repeat([]byte{1}, 40) }, v4: true},
		"hop by hop":        {outer: func(f *frame) { f.exts = []ext{{unix.IPPROTO_HOPOPTS, make([]byte, 6)}} }, v6: true},
		"six extensions":    {outer: func(f *frame) { f.exts = slices.Repeat([]ext{{unix.IPPROTO_DSTOPTS, make([]byte, 6)}}, 6) }, v6: true},
		"quoted options":    {quoted: func(f *frame) { f.options = []byte{1, 1, 1, 0} }, v4: true},
		"quoted extensions": {quoted: func(f *frame) { f.exts = slices.Repeat([]ext{{unix.IPPROTO_DSTOPTS, make([]byte, 6)}}, 2) }, v6: true},
		"quoted fragment":   {quoted: func(f *frame) { f.more, f.id = true, 7 }},
		"quoted hops":       {quoted: func(f *frame) { f.hops = 1 }},
	}
	same := func(*frame) {}
	for name, of := range crossings() {
		for variant, c := range cases {
			if c.v4 && of.vip.Addr().Is6() || c.v6 && of.vip.Addr().Is4() {
				continue
			}
			t.Run(name+"/"+variant, func(t *testing.T) {
				s, proto := of.side, of.proto
				p := newPath(t)
				p.serve(1, proto, s.vip, s.backend)
				p.run(bpf.ProgFromClient, s.opening(proto).bytes())
				p.run(bpf.ProgToClient, s.answer(proto).bytes())
				if c.outer == nil {
					c.outer = same
				}
				if c.quoted == nil {
					c.quoted = same
				}
				about := func(from, to netip.Addr, f frame) frame {
					c.quoted(&f)
					e := icmpUnreachable(from, to, f)
					c.outer(&e)
					return e
				}
				sent, got := s.opening(proto), s.answer(proto)
				sent.payload, got.payload = nil, nil
				for _, prog := range back {
					p.translated(prog, about(s.router, s.client.Addr(), sent.to(s.backend)), about(s.router, s.client.Addr(), sent))
				}
				for _, prog := range there {
					p.translated(prog, about(s.client.Addr(), s.vip.Addr(), got.from(s.vip)), about(s.client.Addr(), s.backend.Addr(), got))
				}
				p.wantRefusals(map[string]uint64{})
			})
		}
	}
}

// spoil makes the checksum of an ICMP message wrong.
func spoil(f *frame) {
	f.payload = slices.Clone(f.payload)
	check := binary.BigEndian.Uint16(f.payload[2:])
	binary.BigEndian.PutUint16(f.payload[2:], uint16(sum(uint32(check), []byte{0x12, 0x34})))
}

// An ICMP error may be truncated. If it quotes enough of a packet, it is translated. Otherwise it passes unchanged on
// the way to a client, and is dropped on the way to a VIP.
func TestPacketErrorsTruncated(t *testing.T) {
	inEach(t, func(t *testing.T, p *path, s side, proto uint8) {
		t.Helper()
		p.addRange(s.ranges)
		p.serve(1, proto, s.vip, s.backend)
		p.run(bpf.ProgFromClient, s.opening(proto).bytes())
		p.run(bpf.ProgToClient, s.answer(proto).bytes())
		cut := func(f frame, n int) frame {
			e := icmp(f.src.Addr(), f.dst.Addr(), f.payload[0], f.payload[1], 1400, f.payload[8:max(n, 8)])
			e.payload = e.payload[:n]
			return e
		}
		sent, got := s.opening(proto), s.answer(proto)
		toClient, atClient := icmpUnreachable(s.router, s.client.Addr(), sent.to(s.backend)), icmpUnreachable(s.router, s.client.Addr(), sent)
		toVIP, atBackend := icmpUnreachable(s.client.Addr(), s.vip.Addr(), got.from(s.vip)), icmpUnreachable(s.client.Addr(), s.backend.Addr(), got)
		want := map[string]uint64{}
		for n := range len(toClient.payload) + 1 {
			enough := n >= 8+s.header()+8
			for _, prog := range back {
				if enough {
					p.translated(prog, cut(toClient, n), cut(atClient, n))
				} else {
					p.untouched(prog, cut(toClient, n).bytes())
				}
			}
			for _, prog := range there {
				switch {
				case enough:
					p.translated(prog, cut(toVIP, n), cut(atBackend, n))
					continue
				case n < 8:
					want["0 malformed"]++
				default:
					want["0 no_connection"]++
				}
				p.want(prog, cut(toVIP, n).bytes(), dropped, cut(toVIP, n).bytes())
			}
		}
		p.wantRefusals(want)
		// The error ends before its header says.
		whole := toVIP.bytes()
		for n := 14 + s.header(); n < len(whole); n++ {
			for _, prog := range there {
				want["0 malformed"]++
				p.want(prog, whole[:n], dropped, whole[:n])
			}
			for _, prog := range back {
				p.untouched(prog, toClient.bytes()[:n])
			}
		}
		p.wantRefusals(want)
	})
}

// Only the first fragment of a datagram has the ports.
func TestPacketFragments(t *testing.T) {
	for family, s := range sides {
		t.Run(family, func(t *testing.T) {
			p := newPath(t)
			p.addRange(s.ranges)
			p.serve(1, udp, s.vip, s.backend)
			whole := s.opening(udp)
			whole.payload, whole.id = make([]byte, 2000), 0x4242
			for i := range whole.payload {
				whole.payload[i] = byte(i)
			}
			early := whole.fragment(1000, 1000)
			p.want(bpf.ProgFromClient, early.bytes(), dropped, early.bytes())
			p.wantRefusals(map[string]uint64{"0 fragment": 1})
			for _, at := range []int{0, 1000, 2000} {
				n := min(1000, 2008-at)
				p.translated(bpf.ProgFromClient, whole.fragment(at, n), whole.to(s.backend).fragment(at, n))
			}
			back := whole.to(s.backend).back()
			p.untouched(bpf.ProgToClient, back.fragment(1000, 1000).bytes())
			for _, at := range []int{0, 1000, 2000} {
				n := min(1000, 2008-at)
				p.translated(bpf.ProgToClient, back.fragment(at, n), back.from(s.vip).fragment(at, n))
			}
			other := whole
			other.id++
			p.want(bpf.ProgFromClient, other.fragment(1000, 1000).bytes(), dropped, other.fragment(1000, 1000).bytes())
			p.wantRefusals(map[string]uint64{"0 fragment": 2})

			// A CRC cannot follow a changed port if it covers bytes of other fragments.
			p.serve(2, sctp, s.vip, s.backend)
			init := s.opening(sctp)
			init.payload, init.id = make([]byte, 200), 5
			f := init.fragment(0, 104)
			p.want(bpf.ProgFromClient, f.bytes(), sentBack, refusal(f, 40).bytes())
			p.wantRefusals(map[string]uint64{"0 fragment": 2, "2 sctp_port": 1})
			same := netip.AddrPortFrom(s.backend.Addr(), s.vip.Port())
			p.serve(3, sctp, netip.AddrPortFrom(s.vip.Addr().Next(), s.vip.Port()), same)
			init.dst = netip.AddrPortFrom(s.vip.Addr().Next(), s.vip.Port())
			p.translated(bpf.ProgFromClient, init.fragment(0, 104), init.to(same).fragment(0, 104))
			p.translated(bpf.ProgFromClient, init.fragment(104, 80), init.to(same).fragment(104, 80))
		})
	}
}

// The id of a datagram is reused after a while.
func TestPacketOldFragment(t *testing.T) {
	s := sides["IPv6"]
	for name, c := range map[string]struct {
		age     time.Duration
		verdict uint32
	}{"young": {29 * time.Second, passed}, "old": {31 * time.Second, dropped}} {
		t.Run(name, func(t *testing.T) {
			p := newPath(t)
			p.addRange(s.ranges)
			p.serve(1, udp, s.vip, s.backend)
			whole := s.opening(udp)
			whole.payload, whole.id = make([]byte, 2000), 3
			p.run(bpf.ProgFromClient, whole.fragment(0, 1000).bytes())
			var key bpf.FragmentKey
			var first bpf.Fragment
			if it := p.coll.Maps[bpf.MapFragments].Iterate(); !it.Next(&key, &first) {
				t.Fatal("the first fragment is not stored")
			}
			first.Seen -= uint64(c.age)
			p.put(bpf.MapFragments, key, first)
			if got, _ := p.run(bpf.ProgFromClient, whole.fragment(1000, 1000).bytes()); got != c.verdict {
				t.Errorf("verdict %d, want %d", int32(got), int32(c.verdict))
			}
		})
	}
}

// A UDP checksum that becomes zero is written as 0xffff: zero would mean no checksum.
func TestPacketZeroChecksum(t *testing.T) {
	for family, s := range sides {
		t.Run(family, func(t *testing.T) {
			p := newPath(t)
			p.serve(1, udp, s.vip, s.backend)
			there, back := s.opening(udp), s.answer(udp)
			there.payload = zeroing(there.to(s.backend))
			p.translated(bpf.ProgFromClient, there, there.to(s.backend))
			back.payload = zeroing(back.from(s.vip))
			p.translated(bpf.ProgToClient, back, back.from(s.vip))
			there.payload = zeroing(there)
			p.translated(bpf.ProgToClient, icmpUnreachable(s.router, s.client.Addr(), there.to(s.backend)), icmpUnreachable(s.router, s.client.Addr(), there))
		})
	}
}

// If the device delivered the sum over the whole packet, that sum stays correct.
func TestPacketCompleteChecksum(t *testing.T) {
	inEach(t, func(t *testing.T, p *path, s side, proto uint8) {
		t.Helper()
		p.set(bpf.PacketFast)
		p.serve(1, proto, s.vip, s.backend)
		there, back := s.opening(proto), s.answer(proto)
		p.complete(bpf.ProgFromClient, passed, there, there.to(s.backend))
		p.complete(bpf.ProgToClient, passed, back, back.from(s.vip))

		key := connKey(s.client, s.backend, proto, 1)
		c := p.entry(key)
		c.Flags |= bpf.ConnFast
		p.put(p.home(key), key, c)
		hopped := back.from(s.vip)
		hopped.hops = 63
		p.complete(bpf.ProgFromNetwork, sentBack, back, hopped)
	})
}

// complete expects a packet to become another one, and the device's sum to follow.
func (p *path) complete(prog string, verdict uint32, in, out frame) {
	p.t.Helper()
	const flag = 1 << 2 // BPF_F_TEST_SKB_CHECKSUM_COMPLETE: EBADMSG means that it did not
	opts := ebpf.RunOptions{Data: in.bytes(), DataOut: make([]byte, 512), Flags: flag}
	got, err := p.coll.Programs[prog].Run(&opts)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.17: only the packet is compared
		p.want(prog, in.bytes(), verdict, out.bytes())
		return
	}
	if err != nil || got != verdict {
		p.t.Errorf("%s returns %d, %v, want %d", prog, int32(got), err, int32(verdict))
	}
	if diff := cmp.Diff(out.bytes(), opts.DataOut); diff != "" {
		p.t.Errorf("%s: packet (-want +got):\n%s", prog, diff)
	}
}

// zeroing returns a payload with which the checksum of f becomes zero.
func zeroing(f frame) []byte {
	for i := range 1 << 16 {
		f.payload = []byte{byte(i >> 8), byte(i)}
		if l4 := f.transport(); l4[6] == 0xff && l4[7] == 0xff {
			break
		}
	}
	return f.payload
}

// If one entry of a flow was evicted, the next packet of the other direction that refreshes the flow creates it
// again.
func TestPacketHalfEvicted(t *testing.T) {
	inEach(t, func(t *testing.T, p *path, s side, proto uint8) {
		t.Helper()
		p.serve(1, proto, s.vip, s.backend)
		there, back := s.opening(proto), s.answer(proto)
		p.translated(bpf.ProgFromClient, there, there.to(s.backend))
		p.translated(bpf.ProgToClient, back, back.from(s.vip))
		p.forget(connKey(s.client, s.backend, proto, 1))
		p.age(2 * time.Second)
		p.translated(bpf.ProgFromClient, there, there.to(s.backend))
		p.translated(bpf.ProgToClient, back, back.from(s.vip))
		p.forget(connKey(s.client, s.vip, proto, 0))
		p.age(2 * time.Second)
		p.translated(bpf.ProgToClient, back, back.from(s.vip))
		more := there
		if proto != udp {
			more.flags = 0
		}
		p.translated(bpf.ProgFromClient, more, more.to(s.backend))
	})
}

// The choice depends on the packet alone: a flow whose entries were evicted finds its backend again, and nodes agree on a Maglev
// table. Session affinity identifies a client by its address.
func TestPacketChoice(t *testing.T) {
	s := sides["IPv4"]
	backends := make([]netip.AddrPort, 20)
	for i := range backends {
		backends[i] = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 2, 1, byte(i)}), 8080)
	}
	serving := func(t *testing.T) *path {
		t.Helper()
		p := newPath(t)
		p.serve(1, udp, s.vip, backends...)
		return p
	}
	// chosen returns the backends of n flows.
	chosen := func(p *path, n int) (got []netip.AddrPort) {
		t.Helper()
		for i := range n {
			f := s.opening(udp).from(netip.AddrPortFrom(s.client.Addr(), uint16(5000+i)))
			p.run(bpf.ProgFromClient, f.bytes())
			c := p.entry(connKey(f.src, s.vip, udp, 0))
			got = append(got, netip.AddrPortFrom(bpf.AddrOf(c.Addr), c.ServerPort))
		}
		return got
	}
	distinct := func(got []netip.AddrPort) int {
		return len(slices.Compact(slices.SortedFunc(slices.Values(got), netip.AddrPort.Compare)))
	}
	front := bpf.FrontendKey{Addr: bpf.Addr16(s.vip.Addr()), Port: s.vip.Port(), Proto: udp}
	t.Run("evicted", func(t *testing.T) {
		p := serving(t)
		before := chosen(p, 400)
		if n := distinct(before); n != len(backends) {
			t.Errorf("400 flows reached %d of %d backends", n, len(backends))
		}
		p.clearFlows()
		if !slices.Equal(before, chosen(p, 400)) {
			t.Error("evicted flows have other backends")
		}
		var svc bpf.Service
		if err := p.coll.Maps[bpf.MapServices].Lookup(uint32(1), &svc); err != nil || svc.Chosen != 800 {
			t.Errorf("%d choices counted, %v, want 800", svc.Chosen, err)
		}
	})
	t.Run("affinity", func(t *testing.T) {
		p := serving(t)
		p.put("frontends", front, bpf.Frontend{Id: 1, Count: 20, Service: 1, Affinity: 100})
		if n := distinct(chosen(p, 100)); n != 1 {
			t.Errorf("one client reached %d backends", n)
		}
	})
	t.Run("Maglev", func(t *testing.T) {
		var nodes [2][]netip.AddrPort
		for i := range nodes {
			p := serving(t)
			p.put("frontends", front, bpf.Frontend{Id: 1, Count: 20, Service: 1, Flags: bpf.FrontendMaglev})
			nodes[i] = chosen(p, 200)
		}
		if !slices.Equal(nodes[0], nodes[1]) || distinct(nodes[0]) != len(backends) {
			t.Errorf("two nodes differ, or do not use all of %d backends:\n%v\n%v", len(backends), nodes[0], nodes[1])
		}
	})
}

func TestPacketEvents(t *testing.T) {
	inEach(t, func(t *testing.T, p *path, s side, proto uint8) {
		t.Helper()
		p.addRange(s.ranges)
		p.serve(4, proto, s.vip, s.backend)
		p.put(bpf.MapSettings, uint32(0), bpf.Settings{Observe: 1})
		events, err := ringbuf.NewReader(p.coll.Maps[bpf.MapEvents])
		if err != nil {
			t.Fatal(err)
		}
		defer events.Close()
		nowhere := netip.AddrPortFrom(s.vip.Addr(), 1)
		p.run(bpf.ProgFromClient, s.opening(proto).bytes())
		p.run(bpf.ProgFromClient, s.opening(proto).bytes()) // of the same flow: no new choice
		p.run(bpf.ProgFromClient, s.opening(proto).to(nowhere).bytes())
		for _, want := range []bpf.Event{
			{
				Kind: bpf.EventChosen, Path: bpf.PathPacket, Service: 4, Cluster: 4, Proto: proto, Client: bpf.Addr16(s.client.Addr()), ClientPort: s.client.Port(),
				Vip: bpf.Addr16(s.vip.Addr()), VipPort: s.vip.Port(), Backend: bpf.Addr16(s.backend.Addr()), BackendPort: s.backend.Port(),
			},
			{
				Kind: bpf.EventRefused, Path: bpf.PathPacket, Proto: proto, Client: bpf.Addr16(s.client.Addr()), ClientPort: s.client.Port(),
				Vip: bpf.Addr16(s.vip.Addr()), VipPort: 1, Reason: 4,
			},
		} {
			events.SetDeadline(time.Now().Add(time.Second))
			record, err := events.Read()
			if err != nil {
				t.Fatal(err)
			}
			var got bpf.Event
			if _, err := binary.Decode(record.RawSample, binary.NativeEndian, &got); err != nil {
				t.Fatal(err)
			}
			want.Time = got.Time
			if got != want || got.Time == 0 {
				t.Errorf("event %+v, want %+v", got, want)
			}
		}
		events.SetDeadline(time.Now())
		if _, err := events.Read(); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("one event too many: %v", err)
		}
	})
}
