package ebpf

import (
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

// touched returns both states reduced to the VIPs that differ, and to those that share a backend with them. The maps'
// content for all other VIPs does not change. The caller must not modify the result.
func touched(before, after *desired.State) (b, a *desired.State) {
	had := map[netip.Addr]*desired.VIP{}
	for i := range before.VIPs {
		had[before.VIPs[i].Addr] = &before.VIPs[i]
	}
	t := touch{vips: map[netip.Addr]bool{}, backends: map[netip.AddrPort]bool{}}
	for i := range after.VIPs {
		v := &after.VIPs[i]
		old, ok := had[v.Addr]
		if !ok || !balancedAlike(old, v) {
			t.add(v)
		}
		if ok && t.vips[v.Addr] {
			t.add(old)
		}
		delete(had, v.Addr)
	}
	for _, v := range had {
		t.add(v)
	}
	// An added VIP may share a backend with yet another one.
	for t.spread(before) || t.spread(after) {
	}
	return t.of(before), t.of(after)
}

type touch struct {
	vips     map[netip.Addr]bool
	backends map[netip.AddrPort]bool
}

func (t *touch) add(v *desired.VIP) {
	t.vips[v.Addr] = true
	for i := range v.Frontends {
		for _, b := range v.Frontends[i].Backends {
			t.backends[netip.AddrPortFrom(b.Addr, b.Port)] = true
		}
	}
}

// spread adds the VIPs that share a backend with an added one, and reports whether there were any.
func (t *touch) spread(s *desired.State) (any bool) {
	for i := range s.VIPs {
		v := &s.VIPs[i]
		if !t.vips[v.Addr] && (v.Return == desired.Masquerade && len(t.vips) > 0 || t.shares(v)) {
			t.add(v)
			any = true
		}
	}
	return any
}

func (t *touch) shares(v *desired.VIP) bool {
	return slices.ContainsFunc(v.Frontends, func(f desired.Frontend) bool {
		return slices.ContainsFunc(f.Backends, func(b desired.Backend) bool { return t.backends[netip.AddrPortFrom(b.Addr, b.Port)] })
	})
}

func (t *touch) of(s *desired.State) *desired.State {
	part := *s
	part.VIPs = nil
	for i := range s.VIPs {
		if t.vips[s.VIPs[i].Addr] {
			part.VIPs = append(part.VIPs, s.VIPs[i])
		}
	}
	return &part
}

// balancedAlike reports whether two versions of a VIP differ at most in how it is announced to routers.
func balancedAlike(a, b *desired.VIP) bool {
	x, y := *a, *b
	x.Route, x.RouterID, y.Route, y.RouterID = nil, 0, nil, 0
	return x.Equal(&y)
}
