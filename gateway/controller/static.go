package controller

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/gateway/service"
)

// static allocates addresses from lists. Only the Services' annotations record which are in use: the id of a port
// consists of its addresses in their canonical form, IPv4 first, joined by an underscore.
type static struct{ pools []*Pool }

const staticSeparator = "_"

// ports returns the ports with the given ids.
func (s *static) ports(held []string) (all []port) {
	for _, id := range held {
		if p, ok := s.parse(id); ok {
			all = append(all, p)
		}
	}
	return all
}

// parse returns the port of an id, if a pool has all its addresses. No other text is the id of that port.
func (s *static) parse(id string) (port, bool) {
	p := port{ID: id}
	for text := range strings.SplitSeq(id, staticSeparator) {
		addr, err := netip.ParseAddr(text)
		if err != nil {
			return port{}, false
		}
		i := slices.IndexFunc(s.pools, func(p *Pool) bool { return slices.Contains(p.kept, addr) })
		if i < 0 {
			i = slices.IndexFunc(s.pools, func(p *Pool) bool { return p.lists(addr) })
		}
		if i < 0 || p.Pool != "" && p.Pool != s.pools[i].Name {
			return port{}, false
		}
		p.Pool = s.pools[i].Name
		p.VIPs = append(p.VIPs, addr)
	}
	pair := len(p.VIPs) == 2 && p.VIPs[0].Is4() && p.VIPs[1].Is6()
	return p, id == staticID(p.VIPs) && (pair || len(p.VIPs) == 1)
}

func staticID(addrs []netip.Addr) string { return joined(addrs, staticSeparator) }

// create returns a new port. held are the ids of those that Services use, and given the addresses that gateways may still
// have.
func (s *static) create(r request, held []string, given map[netip.Addr]bool) (port, error) {
	if err := s.checkFloatingIP(r.Pool.Name, r.Floating); err != nil {
		return port{}, err
	}
	taken := map[netip.Addr]bool{}
	maps.Copy(taken, given)
	for _, id := range held {
		p, _ := s.parse(id)
		for _, vip := range p.VIPs {
			taken[vip] = true
		}
	}
	p := port{Pool: r.Pool.Name}
	for _, f := range []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol} {
		if !slices.Contains(r.Families, f) {
			continue
		}
		if i := slices.IndexFunc(r.Addresses, func(a netip.Addr) bool { return familyOf(a) == f }); i >= 0 {
			if given[r.Addresses[i]] {
				return port{}, fmt.Errorf("pool %s, %s: %w", r.Pool.Name, r.Addresses[i], errExhausted)
			}
			p.VIPs = append(p.VIPs, r.Addresses[i])
			continue
		}
		addr, ok := firstFree(r.Pool.Addresses, f, taken)
		if !ok {
			return port{}, fmt.Errorf("pool %s, %s: %w; add to its addresses, or delete Services", r.Pool.Name, f, errExhausted)
		}
		p.VIPs = append(p.VIPs, addr)
	}
	p.ID = staticID(p.VIPs)
	return p, nil
}

// firstFree returns the first free address of a family. It skips the network and broadcast addresses of IPv4 networks and
// the first address of IPv6 networks, unless the network is too small to have them.
func firstFree(prefixes []netip.Prefix, f corev1.IPFamily, taken map[netip.Addr]bool) (netip.Addr, bool) {
	for _, prefix := range prefixes {
		if familyOf(prefix.Addr()) != f {
			continue
		}
		small := prefix.Addr().BitLen()-prefix.Bits() < 2
		for a := prefix.Addr(); prefix.Contains(a); a = a.Next() {
			edge := a == prefix.Addr() || a.Is4() && !prefix.Contains(a.Next())
			if !taken[a] && (small || !edge) {
				return a, true
			}
		}
	}
	return netip.Addr{}, false
}

// checkFloatingIP refuses every floating IP: a list of addresses has none.
func (*static) checkFloatingIP(pool string, want service.FloatingIP) error {
	if want.Use == "" && !want.Allocate {
		return nil
	}
	return invalid{fmt.Errorf("pool %s has no floating IPs; set the annotation %s to \"none\", or name another pool by %s", pool, service.AnnotationFloatingIP, service.AnnotationPool)}
}
