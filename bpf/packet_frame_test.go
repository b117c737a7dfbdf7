package bpf_test

import (
	"encoding/binary"
	"hash/crc32"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
)

// frame describes a packet to be built. Fields that are not set get the value that a correct sender would use.
type frame struct {
	src, dst netip.AddrPort
	proto    uint8
	flags    uint8  // TCP flags, or the type of the first SCTP chunk
	seq, ack uint32 // TCP
	window   uint16 // TCP
	tcpOpts  []byte // TCP
	payload  []byte // after the transport header

	hops     uint8  // 0 means 64
	vlan     []int  // tags, the outer one first
	options  []byte // IPv4
	exts     []ext  // IPv6
	id       uint32 // of a fragment's datagram
	offset   int    // of a fragment, in bytes
	more     bool   // fragments follow
	wrong    uint16 // added to every transport checksum
	wrongIP  uint16 // added to the IPv4 header's checksum
	noCheck  bool   // a UDP checksum of zero
	bare     bool   // the payload follows the IP header directly
	dontFrag bool
}

// ext is an extension header of IPv6.
type ext struct {
	kind uint8
	body []byte // after the length; 6 bytes, or 14
}

const (
	tcp  = unix.IPPROTO_TCP
	udp  = unix.IPPROTO_UDP
	sctp = unix.IPPROTO_SCTP

	fin, syn, rst, ack = 1, 2, 4, 16

	sctpData, sctpInit, sctpInitAck, sctpAbort = 0, 1, 2, 6
)

// sum adds b to the ones' complement sum s.
func sum(s uint32, b []byte) uint32 {
	for ; len(b) > 1; b = b[2:] {
		s += uint32(binary.BigEndian.Uint16(b))
	}
	if len(b) == 1 {
		s += uint32(b[0]) << 8
	}
	for s>>16 != 0 {
		s = s&0xffff + s>>16
	}
	return s
}

func (f frame) pseudo(length int) uint32 {
	return sum(sum(uint32(f.proto)+uint32(length), f.src.Addr().AsSlice()), f.dst.Addr().AsSlice())
}

// transport returns the transport header and payload of the whole datagram.
func (f frame) transport() []byte {
	if f.bare {
		return f.payload
	}
	b := binary.BigEndian.AppendUint16(nil, f.src.Port())
	b = binary.BigEndian.AppendUint16(b, f.dst.Port())
	check := func(at int) {
		c := ^uint16(sum(f.pseudo(len(b)), b))
		c = uint16(sum(uint32(c), []byte{byte(f.wrong >> 8), byte(f.wrong)}))
		if c == 0 && f.proto == udp {
			c = 0xffff
		}
		binary.BigEndian.PutUint16(b[at:], c)
	}
	switch f.proto {
	case tcp:
		b = binary.BigEndian.AppendUint32(b, f.seq)
		b = binary.BigEndian.AppendUint32(b, f.ack)
		b = append(b, byte(5+len(f.tcpOpts)/4)<<4, f.flags)
		b = binary.BigEndian.AppendUint16(b, f.window)
		b = slices.Concat(b, []byte{0, 0, 0, 0}, f.tcpOpts, f.payload)
		check(16)
	case udp:
		b = binary.BigEndian.AppendUint16(b, uint16(8+len(f.payload)))
		b = append(append(b, 0, 0), f.payload...)
		if !f.noCheck {
			check(6)
		}
	case sctp:
		b = append(b, 1, 2, 3, 4, 0, 0, 0, 0, f.flags, 0)
		b = binary.BigEndian.AppendUint16(b, uint16(4+len(f.payload)))
		b = append(b, f.payload...)
		crc := crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)) ^ uint32(f.wrong)
		binary.LittleEndian.PutUint32(b[8:], crc)
	}
	return b
}

// bytes returns the frame as on the wire; a fragment ends with the payload.
func (f frame) bytes() []byte {
	b := make([]byte, 12, 128) // MAC addresses of zero, as the loopback device has
	for _, tag := range f.vlan {
		b = append(b, 0x81, 0, byte(tag>>8), byte(tag))
	}
	return append(b, f.network()...)
}

// network returns the frame from its ethertype on.
func (f frame) network() []byte {
	if f.hops == 0 {
		f.hops = 64
	}
	l4 := f.transport()
	if f.src.Addr().Is4() {
		return append([]byte{8, 0}, f.ipv4(l4)...)
	}
	return append([]byte{0x86, 0xdd}, f.ipv6(l4)...)
}

// ip returns the frame from its IP header on.
func (f frame) ip() []byte { return f.network()[2:] }

func (f frame) ipv4(l4 []byte) []byte {
	length := 20 + len(f.options)
	b := []byte{byte(0x40 | length/4), 0}
	b = binary.BigEndian.AppendUint16(b, uint16(length+len(l4)))
	b = binary.BigEndian.AppendUint16(b, uint16(f.id))
	fragment := uint16(f.offset / 8)
	if f.more {
		fragment |= 0x2000
	}
	if f.dontFrag {
		fragment |= 0x4000
	}
	b = binary.BigEndian.AppendUint16(b, fragment)
	b = append(b, f.hops, f.proto, 0, 0)
	b = append(append(b, f.src.Addr().AsSlice()...), f.dst.Addr().AsSlice()...)
	b = append(b, f.options...)
	check := ^uint16(sum(0, b))
	binary.BigEndian.PutUint16(b[10:], uint16(sum(uint32(check), []byte{byte(f.wrongIP >> 8), byte(f.wrongIP)})))
	return append(b, l4...)
}

func (f frame) ipv6(l4 []byte) []byte {
	exts := slices.Clone(f.exts)
	if f.offset > 0 || f.more {
		body := make([]byte, 6)
		binary.BigEndian.PutUint16(body, uint16(f.offset))
		if f.more {
			body[1] |= 1
		}
		binary.BigEndian.PutUint32(body[2:], f.id)
		exts = append(exts, ext{unix.IPPROTO_FRAGMENT, body})
	}
	next := func(i int) uint8 {
		if i < len(exts) {
			return exts[i].kind
		}
		return f.proto
	}
	var headers []byte
	for i, e := range exts {
		headers = append(headers, next(i+1), byte((len(e.body)+2)/8-1))
		headers = append(headers, e.body...)
	}
	b := []byte{0x60, 0, 0, 0}
	b = binary.BigEndian.AppendUint16(b, uint16(len(headers)+len(l4)))
	b = append(b, next(0), f.hops)
	b = append(append(b, f.src.Addr().AsSlice()...), f.dst.Addr().AsSlice()...)
	return append(append(b, headers...), l4...)
}

// icmp returns an ICMP message of the frame's family.
func icmp(src, dst netip.Addr, kind, code uint8, rest uint32, body []byte) frame {
	f := frame{src: netip.AddrPortFrom(src, 0), dst: netip.AddrPortFrom(dst, 0), bare: true, proto: unix.IPPROTO_ICMP}
	if src.Is6() {
		f.proto = unix.IPPROTO_ICMPV6
	}
	b := []byte{kind, code, 0, 0}
	b = append(binary.BigEndian.AppendUint32(b, rest), body...)
	s := uint32(0)
	if src.Is6() {
		s = f.pseudo(len(b))
	}
	binary.BigEndian.PutUint16(b[2:], ^uint16(sum(s, b)))
	f.payload = b
	return f
}

// to and from return the frame with another destination or source.
func (f frame) to(dst netip.AddrPort) frame   { f.dst = dst; return f }
func (f frame) from(src netip.AddrPort) frame { f.src = src; return f }

// back returns the reply to the frame.
func (f frame) back() frame { f.src, f.dst = f.dst, f.src; return f }

// fragment returns the IP fragment of f that carries n bytes of its datagram, starting at offset.
func (f frame) fragment(offset, n int) frame {
	l4 := f.transport()
	f.offset, f.more, f.bare = offset, offset+n < len(l4), true
	f.payload = l4[offset : offset+n]
	return f
}
