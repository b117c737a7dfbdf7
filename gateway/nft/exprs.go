package nft

import (
	"encoding/binary"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

// family holds what differs between IPv4 and IPv6. Lengths and positions are in registers of four bytes.
type family struct {
	v4          bool
	table       *nftables.Table
	nfproto     uint32
	addr        uint32 // length of an address
	key         uint32 // length of address, protocol and port
	destination field
	origin      field      // the source address
	frontend    []expr.Any // loads destination, protocol and port from register 0 on
	sender      []expr.Any // loads source, protocol and port from register 0 on
	hopLimit    field      // IPv4's time to live
	unreachable []expr.Any // the port is
}

// field is a field of a packet header.
type field struct {
	base           expr.PayloadBase
	offset, length uint32
}

// From RFC 791 section 3.1, RFC 8200 section 3, and RFC 9293 section 3.1; UDP has its ports at the same place.
var (
	sourcePort      = field{expr.PayloadBaseTransportHeader, 0, 2}
	destinationPort = field{expr.PayloadBaseTransportHeader, 2, 2}
	ipv4            = newFamily(true, table4, 8, 3, 12, 4)
	ipv6            = newFamily(false, table6, 7, 4, 8, 16)
)

func newFamily(v4 bool, in *nftables.Table, hopLimit uint32, portUnreachable uint8, first, length uint32) family {
	f := family{
		v4: v4, table: in, nfproto: uint32(in.Family), addr: length / 4, key: length/4 + 2,
		hopLimit:    field{expr.PayloadBaseNetworkHeader, hopLimit, 1},
		unreachable: one(&expr.Reject{Type: unix.NFT_REJECT_ICMP_UNREACH, Code: portUnreachable}),
		origin:      field{expr.PayloadBaseNetworkHeader, first, length},
		destination: field{expr.PayloadBaseNetworkHeader, first + length, length},
	}
	f.frontend = f.frontendAt(0)
	f.sender = join(load(f.origin, 0), one(&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg(f.addr)}), load(sourcePort, f.addr+1))
	return f
}

// frontendAt loads destination, protocol and port.
func (f family) frontendAt(to uint32) []expr.Any {
	return join(load(f.destination, to), one(&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg(to + f.addr)}), load(destinationPort, to+f.addr+1))
}

// scratch is a register above all keys. Conditions use it.
const scratch = 15

// reg returns the number of the nth register of four bytes.
func reg(n uint32) uint32 { return unix.NFT_REG32_00 + n }

func one(e expr.Any) []expr.Any { return []expr.Any{e} }

func join(all ...[]expr.Any) (joined []expr.Any) {
	for _, some := range all {
		joined = append(joined, some...)
	}
	return joined
}

func load(f field, to uint32) []expr.Any {
	return one(&expr.Payload{DestRegister: reg(to), Base: f.base, Offset: f.offset, Len: f.length})
}

// client loads the source address.
func (f family) client(to uint32) []expr.Any { return load(f.origin, to) }

// slot hashes n registers into another one. The hash modulo slots is the same on each gateway.
func slot(from, n, to uint32) []expr.Any {
	return one(&expr.Hash{
		SourceRegister: reg(from), Length: 4 * n, DestRegister: reg(to), Modulus: slots, Seed: hashSeed, Type: expr.HashTypeJenkins,
	})
}

// slotOf loads the first port of a port's slot. See desired.Slot.
func slotOf(port field, to uint32) []expr.Any {
	return join(load(port, to), one(&expr.Bitwise{SourceRegister: reg(to), DestRegister: reg(to), Len: 2, Mask: slotMask, Xor: make([]byte, 2)}))
}

// lastOf loads the last port of a port's slot, from a register.
func lastOf(port, to uint32) []expr.Any {
	return one(&expr.Bitwise{SourceRegister: reg(port), DestRegister: reg(to), Len: 2, Mask: slotMask, Xor: binary.BigEndian.AppendUint16(nil, desired.SlotPorts-1)})
}

var slotMask = binary.BigEndian.AppendUint16(nil, 1<<16-desired.SlotPorts)

// in continues if the key in register 0 is in a set.
func (f family) in(s set) []expr.Any {
	return one(&expr.Lookup{SourceRegister: reg(0), SetName: familySet{s, f.v4}.name()})
}

func (f family) notIn(s set) []expr.Any {
	return one(&expr.Lookup{SourceRegister: reg(0), SetName: familySet{s, f.v4}.name(), Invert: true})
}

// mapped loads the value of the key in register 0 from a map.
func (f family) mapped(s set, to uint32) []expr.Any { return f.mappedFrom(0, s, to) }

// mappedFrom loads the value of the key in a register from a map.
func (f family) mappedFrom(key uint32, s set, to uint32) []expr.Any {
	return one(&expr.Lookup{SourceRegister: reg(key), DestRegister: reg(to), IsDestRegSet: true, SetName: familySet{s, f.v4}.name()})
}

// jump jumps to the chain that a map holds for the key in register 0.
func (f family) jump(s set) []expr.Any {
	return one(&expr.Lookup{SourceRegister: reg(0), DestRegister: unix.NFT_REG_VERDICT, IsDestRegSet: true, SetName: familySet{s, f.v4}.name()})
}

func (f family) dnat(from uint32) []expr.Any {
	return one(&expr.NAT{Type: expr.NATTypeDestNAT, Family: f.nfproto, RegAddrMin: reg(from), RegProtoMin: reg(from + f.addr)})
}

// Bits of a TCP header's flags (RFC 9293, section 3.1).
const (
	fin    = 1 << 0
	syn    = 1 << 1
	rst    = 1 << 2
	synAck = 1<<1 | 1<<4
)

// flags continues if, of the flags in mask, exactly those in want are set.
func flags(mask, want byte) []expr.Any { return compareFlags(mask, expr.CmpOpEq, want) }

// compareFlags compares the flags in mask.
func compareFlags(mask byte, op expr.CmpOp, with byte) []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: reg(scratch), Base: expr.PayloadBaseTransportHeader, Offset: 13, Len: 1},
		&expr.Bitwise{SourceRegister: reg(scratch), DestRegister: reg(scratch), Len: 1, Mask: []byte{mask}, Xor: []byte{0}},
		&expr.Cmp{Op: op, Register: reg(scratch), Data: []byte{with}},
	}
}

// hops compares the hop limit.
func (f family) hops(op expr.CmpOp, with byte) []expr.Any {
	return join(load(f.hopLimit, scratch), one(&expr.Cmp{Op: op, Register: reg(scratch), Data: []byte{with}}))
}

// setHops sets the hop limit. It writes two bytes, as IPv4's checksum has.
func (f family) setHops(to byte) []expr.Any {
	both, mask, value := f.hopLimit, []byte{0, 0xff}, []byte{to, 0}
	write := &expr.Payload{OperationType: expr.PayloadWrite, SourceRegister: reg(scratch), CsumType: expr.CsumTypeInet, CsumOffset: 10}
	if both.length = 2; !f.v4 {
		both.offset--
		mask, value = []byte{0xff, 0}, []byte{0, to}
		write.CsumType, write.CsumOffset = expr.CsumTypeNone, 0
	}
	write.Base, write.Offset, write.Len = both.base, both.offset, both.length
	return join(load(both, scratch), []expr.Any{&expr.Bitwise{SourceRegister: reg(scratch), DestRegister: reg(scratch), Len: 2, Mask: mask, Xor: value}, write})
}

// state continues if the connection has any of the states.
func state(any uint32) []expr.Any { return connection(expr.CtKeySTATE, any, expr.CmpOpNeq) }

// connection compares masked bits of the tracked connection with zero.
func connection(key expr.CtKey, mask uint32, op expr.CmpOp) []expr.Any {
	return []expr.Any{
		&expr.Ct{Key: key, Register: reg(scratch)},
		&expr.Bitwise{SourceRegister: reg(scratch), DestRegister: reg(scratch), Len: 4, Mask: binary.NativeEndian.AppendUint32(nil, mask), Xor: make([]byte, 4)},
		&expr.Cmp{Op: op, Register: reg(scratch), Data: make([]byte, 4)},
	}
}

// Bits of the status of a connection, from linux/netfilter/nf_conntrack_common.h.
const (
	ipsAssured = 1 << 2
	ipsSrcNAT  = 1 << 4
	ipsDstNAT  = 1 << 5
	// ipsFixedTimeout keeps packets from extending the lifetime of a connection. We set it in the entries of peers' connections.
	ipsFixedTimeout = 1 << 10
)

// Building blocks of rules.
var (
	destinationTranslated = connection(expr.CtKeySTATUS, ipsDstNAT, expr.CmpOpNeq)
	established           = state(expr.CtStateBitESTABLISHED)
	// known continues for packets of a known connection and for ICMP errors about them.
	known = state(expr.CtStateBitESTABLISHED | expr.CtStateBitRELATED)
	// kept continues if a peer keeps the connection, see tracked.
	kept = connection(expr.CtKeySTATUS, ipsFixedTimeout, expr.CmpOpNeq)
	// halfOpen continues if the connection awaits the packet that opens it.
	halfOpen     = connection(expr.CtKeySTATUS, ipsAssured, expr.CmpOpEq)
	untranslated = connection(expr.CtKeySTATUS, ipsSrcNAT|ipsDstNAT, expr.CmpOpEq)
	original     = []expr.Any{
		&expr.Ct{Key: expr.CtKeyDIRECTION, Register: reg(scratch)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg(scratch), Data: []byte{0}},
	}
	count  = one(&expr.Counter{})
	accept = one(&expr.Verdict{Kind: expr.VerdictAccept})
	drop   = one(&expr.Verdict{Kind: expr.VerdictDrop})
	reset  = one(&expr.Reject{Type: unix.NFT_REJECT_TCP_RST})
)

// originalDestination loads the address that the client sent to.
func originalDestination(to uint32) []expr.Any {
	return one(&expr.Ct{Key: expr.CtKeyDST, Register: reg(to), Direction: 0})
}

// jumpTo ends a rule. The next one follows when the chain has no verdict.
func jumpTo(chain string) []expr.Any { return one(&expr.Verdict{Kind: expr.VerdictJump, Chain: chain}) }

// protocolIs continues if the packet has an L4 protocol.
func protocolIs(p byte) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg(scratch)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg(scratch), Data: []byte{p}},
	}
}
