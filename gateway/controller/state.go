package controller

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/portmap"
)

// vips returns the VIPs of a group, sorted as in a state.
func vips(settings *Settings, services []*mapped, e *endpoints, group string) []desired.VIP {
	return vipsAt(settings, services, e, group, func(m *mapped, pool *Pool) []netip.Addr {
		if pool.FailoverIP != nil {
			return nil // each gateway has its own address for it
		}
		return m.port.vips(m.families(pool))
	})
}

// failoverVIPs returns the VIPs at own, the address of one gateway for failover IPs.
func failoverVIPs(settings *Settings, services []*mapped, e *endpoints, group string, own netip.Addr) []desired.VIP {
	return vipsAt(settings, services, e, group, func(_ *mapped, pool *Pool) []netip.Addr {
		if pool.FailoverIP == nil {
			return nil
		}
		return []netip.Addr{own}
	})
}

func vipsAt(settings *Settings, services []*mapped, e *endpoints, group string, at func(*mapped, *Pool) []netip.Addr) []desired.VIP {
	byAddr := map[netip.Addr]*desired.VIP{}
	for _, m := range services {
		pool := settings.pool(m.port.Pool)
		if pool == nil || pool.Group != group {
			continue
		}
		for _, addr := range at(m, pool) {
			v := byAddr[addr]
			if v == nil {
				v = &desired.VIP{Addr: addr, Announce: pool.Announce, Return: pool.Return, Route: pool.BGP, RouterID: pool.routerID()}
				byAddr[addr] = v
			}
			v.Frontends = append(v.Frontends, frontends(m, e, addr)...)
		}
	}
	all := make([]desired.VIP, 0, len(byAddr))
	for _, addr := range slices.SortedFunc(maps.Keys(byAddr), netip.Addr.Compare) {
		v := byAddr[addr]
		slices.SortFunc(v.Frontends, func(a, b desired.Frontend) int {
			return cmp.Or(cmp.Compare(a.Port, b.Port), strings.Compare(a.Protocol, b.Protocol))
		})
		all = append(all, *v)
	}
	return all
}

// frontends returns the frontends of a Service at a VIP: its allocated ports.
func frontends(m *mapped, e *endpoints, vip netip.Addr) (all []desired.Frontend) {
	for _, p := range m.ports {
		l4 := portmap.L4{Protocol: string(p.Protocol), Port: uint16(p.Port)}
		if !slices.Contains(m.want.L4, l4) {
			continue
		}
		all = append(all, desired.Frontend{
			Service: m.name.String(), Protocol: l4.Protocol, Port: l4.Port, Sources: m.want.Sources, Affinity: m.want.Affinity,
			Backends: e.backends(m, p, familyOf(vip)),
		})
	}
	return all
}
