package clusterset

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"
)

// ErrPoolExhausted means that a member's block has no free address.
var ErrPoolExhausted = errors.New("clusterset IP pool exhausted")

// IPPool allocates ClusterSetIPs from one member's blocks, at most one block per family. It never enumerates a block, so a
// /64 costs as much as a /28. It never allocates the network address nor, for IPv4, the broadcast address. Not safe for
// concurrent use.
type IPPool struct {
	blocks map[Family]netip.Prefix
	byAddr map[netip.Addr]ServiceName
	byName map[ServiceName][]netip.Addr // the inverse of byAddr, each list sorted
}

// NewIPPool returns an empty pool over blocks. It refuses two blocks of one family and blocks too
// small to hold two addresses.
func NewIPPool(blocks ...netip.Prefix) (*IPPool, error) {
	p := &IPPool{
		blocks: map[Family]netip.Prefix{},
		byAddr: map[netip.Addr]ServiceName{},
		byName: map[ServiceName][]netip.Addr{},
	}
	for _, b := range blocks {
		if !b.IsValid() || b.Addr() != b.Masked().Addr() {
			return nil, fmt.Errorf("clusterset IP block %s is not a network address; write %s", b, b.Masked())
		}
		f := FamilyOf(b.Addr())
		if other, ok := p.blocks[f]; ok {
			return nil, fmt.Errorf("clusterset IP blocks %s and %s are both %s; give one per family", other, b, f)
		}
		if b.Addr().BitLen()-b.Bits() < 2 {
			return nil, fmt.Errorf("clusterset IP block %s is too small; it needs at least 4 addresses", b)
		}
		p.blocks[f] = b
	}
	return p, nil
}

// Families returns the families for which the pool has a block, IPv4 first.
func (p *IPPool) Families() []Family {
	var fs []Family
	for _, f := range []Family{IPv4, IPv6} {
		if _, ok := p.blocks[f]; ok {
			fs = append(fs, f)
		}
	}
	return fs
}

// Contains reports whether a lies in one of the pool's blocks.
func (p *IPPool) Contains(a netip.Addr) bool {
	b, ok := p.blocks[FamilyOf(a)]
	return ok && b.Contains(a)
}

// Allocate returns one address for each of families, in that order, and holds them for name; on an error it holds none. It
// returns addresses that name already holds. The error is ErrPoolExhausted if a block is full, and another one if the
// pool has no block for a family.
//
// The search starts at a hash of name, so a member that lost its state tends to choose the same address for the same
// Service again.
func (p *IPPool) Allocate(name ServiceName, families []Family) ([]netip.Addr, error) {
	held := p.Held(name)
	addrs := make([]netip.Addr, 0, len(families))
	for _, f := range families {
		block, ok := p.blocks[f]
		if !ok {
			return nil, fmt.Errorf("allocate clusterset IP for %s: no %s block", name, f)
		}
		if i := slices.IndexFunc(held, func(a netip.Addr) bool { return FamilyOf(a) == f }); i >= 0 {
			addrs = append(addrs, held[i])
			continue
		}
		a, ok := p.free(block, name)
		if !ok {
			return nil, fmt.Errorf("allocate clusterset IP for %s from %s: %w", name, block, ErrPoolExhausted)
		}
		addrs = append(addrs, a)
	}
	p.hold(name, addrs)
	return addrs, nil
}

// Reserve marks addresses as held by name, for example those of the aggregates after a restart. It ignores addresses
// outside of the pool's blocks. If another name holds one of them, it returns an error and reserves none.
func (p *IPPool) Reserve(name ServiceName, addrs ...netip.Addr) error {
	var own []netip.Addr
	for _, a := range addrs {
		if !p.Contains(a) {
			continue
		}
		if other, ok := p.byAddr[a]; ok && other != name {
			return fmt.Errorf("reserve clusterset IP %s for %s: held by %s", a, name, other)
		}
		own = append(own, a)
	}
	p.hold(name, own)
	return nil
}

// hold records that name holds addrs, which no other name holds.
func (p *IPPool) hold(name ServiceName, addrs []netip.Addr) {
	for _, a := range addrs {
		if _, ok := p.byAddr[a]; !ok {
			p.byAddr[a] = name
			p.byName[name] = append(p.byName[name], a)
		}
	}
	slices.SortFunc(p.byName[name], netip.Addr.Compare)
}

// Release returns all addresses of name to the pool; a name without addresses changes nothing.
func (p *IPPool) Release(name ServiceName) {
	for _, a := range p.byName[name] {
		delete(p.byAddr, a)
	}
	delete(p.byName, name)
}

// Held returns the addresses that name holds, IPv4 first.
func (p *IPPool) Held(name ServiceName) []netip.Addr { return slices.Clone(p.byName[name]) }

// Len returns the number of held addresses.
func (p *IPPool) Len() int { return len(p.byAddr) }

// free finds an unheld address of block. It starts at a hash of name and wraps at the end of the block.
func (p *IPPool) free(block netip.Prefix, name ServiceName) (netip.Addr, bool) {
	hostBits := block.Addr().BitLen() - block.Bits()
	first, last := uint64(1), uint64(1)<<min(hostBits, 32)-1 // offset 0 is the network address
	if block.Addr().Is4() {
		last-- // the broadcast address
	}
	span := last - first + 1
	h := fnv.New64a()
	h.Write([]byte(name.String()))
	start := h.Sum64() % span
	// Trying one address more than are held always suffices, if the block has that many.
	for i := range min(span, uint64(len(p.byAddr))+1) {
		a := offset(block.Addr(), first+(start+i)%span)
		if _, held := p.byAddr[a]; !held {
			return a, true
		}
	}
	return netip.Addr{}, false
}

// offset returns base + n. The caller keeps the sum inside base's block.
func offset(base netip.Addr, n uint64) netip.Addr {
	if base.Is4() {
		b := base.As4()
		binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(b[:])+uint32(n))
		return netip.AddrFrom4(b)
	}
	b := base.As16()
	lo := binary.BigEndian.Uint64(b[8:])
	binary.BigEndian.PutUint64(b[8:], lo+n)
	return netip.AddrFrom16(b)
}
