package datapath

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/lb"
)

// vipRanges keeps a promise to the programs of the packet path: that no VIP lies outside of the ranges of the
// ClusterSet, and these in one net of each family. While it stands they let most other packets pass after a look at
// their destination. It is taken back before it is broken, and given again only after all maps have been read.
type vipRanges struct {
	settings *ebpf.Map
	fast     bool // flows on the fast road there may be
	promised bool
	judged   bool           // not promised, because of a frontend there is
	ranges   []netip.Prefix // while promised
}

// start takes over from the process before this one: it promises nothing until the first Apply knows. Flows that
// took the fast road stay on it.
func (v *vipRanges) start() error {
	var before bpf.PacketSettings
	if err := v.settings.Lookup(uint32(0), &before); err != nil {
		return fmt.Errorf("read map %s: %w", bpf.MapPacketSettings, err)
	}
	v.fast = v.fast || before.Flags&bpf.PacketFast != 0
	return v.set(false)
}

// before takes the promise back if p breaks it.
func (v *vipRanges) before(p lb.Plan) error {
	if !v.promised {
		return nil
	}
	outside := slices.ContainsFunc(p.Frontends.Put, func(e lb.Entry[lb.Address, lb.Frontend]) bool { return !v.contain(e.Key) })
	if !outside && len(p.Ranges.Put)+len(p.Ranges.Delete) == 0 {
		return nil
	}
	return v.set(false)
}

// after gives the promise if it holds after p. have returns what the maps hold.
func (v *vipRanges) after(ctx context.Context, p lb.Plan, have func(context.Context) (lb.State, error)) error {
	if v.settings == nil || v.promised || v.judged && len(p.Frontends.Delete)+len(p.Ranges.Put) == 0 {
		return nil
	}
	s, err := have(ctx)
	if err != nil {
		return err
	}
	v.ranges, v.judged = nil, true
	for r := range s.Ranges {
		v.ranges = append(v.ranges, r)
	}
	for a := range s.Frontends {
		if !v.contain(a) {
			return nil
		}
	}
	return v.set(true)
}

func (v *vipRanges) contain(a lb.Address) bool {
	return slices.ContainsFunc(v.ranges, func(r netip.Prefix) bool { return r.Contains(a.AddrPort.Addr()) })
}

func (v *vipRanges) set(promised bool) error {
	var s bpf.PacketSettings
	if promised {
		s = encodeNets(v.ranges)
		s.Flags |= bpf.PacketVIPsInRanges
	}
	if v.fast {
		s.Flags |= bpf.PacketFast
	}
	if err := v.settings.Put(uint32(0), s); err != nil {
		return fmt.Errorf("write map %s: %w", bpf.MapPacketSettings, err)
	}
	v.promised, v.judged = promised, false
	return nil
}

// encodeNets returns the nets that ranges lie in, one a family, with PacketOneRange if they hold nothing else.
func encodeNets(ranges []netip.Prefix) bpf.PacketSettings {
	s := bpf.PacketSettings{Flags: bpf.PacketOneRange, Net4: 1}
	s.Net6[0] = 1 // no part of a mask of zeros: a net in which nothing lies
	var nets [2]netip.Prefix
	for _, r := range ranges {
		n := &nets[0]
		if r.Addr().Is6() {
			n = &nets[1]
		}
		if n.IsValid() {
			s.Flags &^= bpf.PacketOneRange
		}
		*n = cover(*n, r)
	}
	if n := nets[0]; n.IsValid() {
		s.Net4 = nativeWord(n.Addr().As4())
		s.Mask4 = nativeWord([4]byte(net.CIDRMask(n.Bits(), 32)))
	}
	if n := nets[1]; n.IsValid() {
		s.Net6 = n.Addr().As16()
		s.Mask6 = [16]byte(net.CIDRMask(n.Bits(), 128))
	}
	return s
}

// nativeWord is an IPv4 address as the programs see it: in network order, whatever the machine's.
func nativeWord(addr [4]byte) uint32 { return binary.NativeEndian.Uint32(addr[:]) }

// cover returns the smallest net that holds both; n may be none.
func cover(n, r netip.Prefix) netip.Prefix {
	if !n.IsValid() {
		return r.Masked()
	}
	bits := min(n.Bits(), r.Bits())
	for !netip.PrefixFrom(n.Addr(), bits).Contains(r.Addr()) {
		bits--
	}
	return netip.PrefixFrom(n.Addr(), bits).Masked()
}
