package bpf_test

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
)

// addSeeds adds the frames that ofFlow returns for a flow of each transport in each family, its opening with more headers
// and in fragments, and packets with one wrong byte.
func addSeeds(f *testing.F, ofFlow func(s side, there, back frame) []frame) {
	f.Helper()
	for _, s := range sides {
		for _, proto := range transports {
			there := s.opening(proto)
			tagged, whole := there, there
			tagged.vlan = []int{7, 8}
			tagged.options = []byte{1, 1, 1, 0}
			tagged.exts = []ext{{unix.IPPROTO_HOPOPTS, make([]byte, 6)}, {unix.IPPROTO_DSTOPTS, make([]byte, 14)}}
			whole.payload, whole.id = make([]byte, 300), 9
			for _, seed := range append(ofFlow(s, there, s.answer(proto)), tagged, whole.fragment(0, 160), whole.fragment(160, 80)) {
				f.Add(seed.bytes())
			}
		}
		whole := s.opening(udp).bytes()
		for i := 14; i < len(whole); i++ {
			lie := bytes.Clone(whole)
			lie[i] ^= 0xff
			f.Add(lie)
		}
	}
}

// FuzzPacket passes arbitrary bytes to every program, with an open flow of each protocol. It checks the invariants: a
// known verdict, an unchanged length or a short reply, and no right checksum that becomes wrong. The seeds run with
// the other tests. For a longer run:
//
//	go test -run '^$' -fuzz FuzzPacket -fuzztime 10m ./bpf
func FuzzPacket(f *testing.F) {
	newPath(f) // loading takes longer than the fuzzer allows for one input
	addSeeds(f, func(s side, there, back frame) []frame {
		return []frame{
			there, back, there.to(s.elsewhere), there.to(netip.AddrPortFrom(s.vip.Addr(), 1)),
			icmpUnreachable(s.router, s.client.Addr(), there.to(s.backend)), icmpUnreachable(s.client.Addr(), s.vip.Addr(), back.from(s.vip)),
		}
	})
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) < 14+40 || len(in) > 3000 {
			t.Skip("no packet the kernel makes a test of")
		}
		p := newPath(t)
		for _, s := range sides {
			p.addRange(s.ranges)
			for id, proto := range []uint8{tcp, udp, sctp} {
				p.serve(uint32(id)+1, proto, s.vip, s.backend)
				p.run(bpf.ProgFromClient, s.opening(proto).bytes())
				p.run(bpf.ProgToClient, s.answer(proto).bytes())
			}
		}
		copy(in, make([]byte, 12)) // for this host, as far as the link layer knows
		for _, prog := range []string{bpf.ProgFromClient, bpf.ProgFromNetwork, bpf.ProgToClient} {
			verdict, out := p.run(prog, bytes.Clone(in))
			lawful(t, prog, in, out, verdict)
		}
	})
}

// lawful checks the invariants of a packet.
func lawful(t *testing.T, prog string, in, out []byte, verdict uint32) {
	t.Helper()
	switch verdict {
	case passed, dropped:
		if len(out) != len(in) {
			t.Fatalf("%s: %d bytes became %d", prog, len(in), len(out))
		}
		if verdict == dropped && prog == bpf.ProgFromClient && !bytes.Equal(in, out) {
			t.Fatalf("%s: a dropped packet was changed", prog)
		}
		if soundness(in) == sound && soundness(out) != sound {
			t.Fatalf("%s: a right checksum became wrong:\n%x\n%x", prog, in, out)
		}
	case sentBack:
		if prog == bpf.ProgToClient {
			t.Fatalf("%s: sent back", prog)
		}
		if len(out) > 22+40+8+96 {
			t.Fatalf("%s: an answer of %d bytes", prog, len(out))
		}
		if soundness(out) != sound {
			t.Fatalf("%s: the answer's checksum is wrong:\n%x\n%x", prog, in, out)
		}
	default:
		t.Fatalf("%s: verdict %d", prog, int32(verdict))
	}
}

// States of a packet's checksums.
const (
	unknown = iota // cannot be checked: no IP, a fragment, a wrong length, another protocol
	sound
	unsound
)

// soundness checks a packet as its receiver would: over all its bytes, unlike the programs.
func soundness(b []byte) int {
	kind := binary.BigEndian.Uint16(b[12:])
	l3 := 14
	for kind == 0x8100 || kind == 0x88a8 {
		if l3+4 > len(b) || l3 > 18 {
			return unknown
		}
		kind = binary.BigEndian.Uint16(b[l3+2:])
		l3 += 4
	}
	b = b[l3:]
	switch {
	case kind == 0x0800 && len(b) >= 20 && b[0]>>4 == 4:
		return soundIPv4(b)
	case kind == 0x86dd && len(b) >= 40 && b[0]>>4 == 6:
		return soundIPv6(b)
	}
	return unknown
}

func soundIPv4(b []byte) int {
	header, total := int(b[0]&15)*4, int(binary.BigEndian.Uint16(b[2:]))
	if header < 20 || total < header || total > len(b) || binary.BigEndian.Uint16(b[6:])&0x3fff != 0 {
		return unknown
	}
	if sum(0, b[:header]) != 0xffff {
		return unsound
	}
	return soundTransport(b[9], b[12:16], b[16:20], b[header:total])
}

func soundIPv6(b []byte) int {
	payload := int(binary.BigEndian.Uint16(b[4:]))
	if 40+payload > len(b) {
		return unknown
	}
	next, l4 := b[6], b[40:40+payload]
	for range 6 {
		if next != unix.IPPROTO_HOPOPTS && next != unix.IPPROTO_DSTOPTS {
			break
		}
		if len(l4) < 8 || len(l4) < 8+8*int(l4[1]) {
			return unknown
		}
		next, l4 = l4[0], l4[8+8*int(l4[1]):]
	}
	return soundTransport(next, b[8:24], b[24:40], l4)
}

func soundTransport(proto uint8, src, dst, l4 []byte) int {
	pseudo := sum(sum(uint32(proto)+uint32(len(l4)), src), dst)
	var right bool
	switch {
	case proto == tcp && len(l4) >= 20, proto == unix.IPPROTO_ICMPV6 && len(l4) >= 8 && len(src) == 16:
		right = sum(pseudo, l4) == 0xffff
	case proto == udp && len(l4) >= 8:
		n := int(binary.BigEndian.Uint16(l4[4:]))
		if n < 8 || n > len(l4) {
			return unknown
		}
		pseudo = sum(sum(uint32(proto)+uint32(n), src), dst)
		right = l4[6] == 0 && l4[7] == 0 || sum(pseudo, l4[:n]) == 0xffff
	case proto == unix.IPPROTO_ICMP && len(l4) >= 8 && len(src) == 4:
		right = sum(0, l4) == 0xffff
	case proto == sctp && len(l4) >= 16:
		b := bytes.Clone(l4)
		copy(b[8:], make([]byte, 4))
		right = crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)) == binary.LittleEndian.Uint32(l4[8:])
	default:
		return unknown
	}
	if right {
		return sound
	}
	return unsound
}
