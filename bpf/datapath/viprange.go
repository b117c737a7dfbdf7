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

// vipRanges guarantees to the programs of the packet path that no VIP lies outside of the ranges of the ClusterSet, and
// gives them one net of each family that contains these. With the guarantee the programs let most other packets pass
// after one look at the destination. The guarantee is withdrawn before a write that breaks it, and given only after all
// maps have been read. Were it withdrawn after the write, packets to a new VIP outside of the ranges would pass
// untranslated.
type vipRanges struct {
	settings   *ebpf.Map
	fast       bool // there may be flows on the fast path
	guaranteed bool
	outside    bool           // a frontend outside of the ranges prevents the guarantee
	ranges     []netip.Prefix // while guaranteed
}

// start withdraws the guarantee that the previous process gave, until afterApply has checked it again. Flows that the previous
// process put on the fast path stay there.
func (v *vipRanges) start() error {
	var before bpf.PacketSettings
	if err := v.settings.Lookup(uint32(0), &before); err != nil {
		return fmt.Errorf("read map %s: %w", bpf.MapPacketSettings, err)
	}
	v.fast = v.fast || before.Flags&bpf.PacketFast != 0
	return v.set(false)
}

// beforeApply withdraws the guarantee if p breaks it.
func (v *vipRanges) beforeApply(p lb.Plan) error {
	if !v.guaranteed {
		return nil
	}
	outside := slices.ContainsFunc(p.Frontends.Put, func(e lb.Entry[lb.Address, lb.Frontend]) bool { return !v.contain(e.Key) })
	if !outside && len(p.Ranges.Put)+len(p.Ranges.Delete) == 0 {
		return nil
	}
	return v.set(false)
}

// afterApply gives the guarantee if it holds after p. have returns the content of the maps.
func (v *vipRanges) afterApply(ctx context.Context, p lb.Plan, have func(context.Context) (lb.State, error)) error {
	if v.settings == nil || v.guaranteed || v.outside && len(p.Frontends.Delete)+len(p.Ranges.Put) == 0 {
		return nil
	}
	s, err := have(ctx)
	if err != nil {
		return err
	}
	v.ranges, v.outside = nil, true
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

func (v *vipRanges) set(guaranteed bool) error {
	var s bpf.PacketSettings
	if guaranteed {
		s = encodeNets(v.ranges)
		s.Flags |= bpf.PacketVIPsInRanges
	}
	if v.fast {
		s.Flags |= bpf.PacketFast
	}
	if err := v.settings.Put(uint32(0), s); err != nil {
		return fmt.Errorf("write map %s: %w", bpf.MapPacketSettings, err)
	}
	v.guaranteed, v.outside = guaranteed, false
	return nil
}

// encodeNets returns the smallest net of each family that contains the ranges, with PacketOneRange if the nets contain
// nothing else.
func encodeNets(ranges []netip.Prefix) bpf.PacketSettings {
	s := bpf.PacketSettings{Flags: bpf.PacketOneRange, Net4: 1}
	s.Net6[0] = 1 // a net that contains no address: the bit is outside of its all-zero mask
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

// nativeWord is an IPv4 address as the programs read it: a word in network order.
func nativeWord(addr [4]byte) uint32 { return binary.NativeEndian.Uint32(addr[:]) }

// cover returns the smallest net that contains both; n may be invalid, which is no net.
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
