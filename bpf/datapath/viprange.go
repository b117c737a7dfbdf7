package datapath

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/lb"
)

// vipRanges keeps a promise to the programs of the packet path: that no VIP lies outside of the ranges of the
// ClusterSet. While it stands they let every other packet pass after one lookup. It is taken back before it is
// broken, and given again only after all maps have been read.
type vipRanges struct {
	settings *ebpf.Map
	promised bool
	judged   bool           // not promised, because of a frontend there is
	ranges   []netip.Prefix // while promised
}

// before takes the promise back if p breaks it.
func (v *vipRanges) before(p lb.Plan) error {
	if !v.promised {
		return nil
	}
	outside := slices.ContainsFunc(p.PutFrontends, func(w lb.FrontendWrite) bool { return !v.contain(w.Address) })
	if !outside && len(p.DeleteRanges) == 0 {
		return nil
	}
	return v.set(false)
}

// after gives the promise if it holds after p. have returns what the maps hold.
func (v *vipRanges) after(ctx context.Context, p lb.Plan, have func(context.Context) (lb.State, error)) error {
	if v.settings == nil || v.promised || v.judged && len(p.DeleteFrontends)+len(p.PutRanges) == 0 {
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
		s.Flags = bpf.PacketVIPsInRanges
	}
	if err := v.settings.Put(uint32(0), s); err != nil {
		return fmt.Errorf("write map %s: %w", bpf.MapPacketSettings, err)
	}
	v.promised, v.judged = promised, false
	return nil
}
