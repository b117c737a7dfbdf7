package ebpf

import (
	"fmt"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/gateway/desired"
)

// room counts what Services need in the maps, counting a backend once for each frontend.
type room struct{ frontends, sources, backends, members int }

func (r room) plus(o room) room {
	return room{r.frontends + o.frontends, r.sources + o.sources, r.backends + o.backends, r.members + o.members}
}

func (r room) minus(o room) room {
	return room{r.frontends - o.frontends, r.sources - o.sources, r.backends - o.backends, r.members - o.members}
}

// ownAddresses is how many addresses of the gateway itself have room in the map of VIPs beside one for each frontend.
const ownAddresses = 64

// limits returns how much of each there may be. Half of a map is for the replacements of the other half: each can be written
// before what it replaces is removed.
func (k *kernel) limits() room {
	half := func(name string) int { return int(k.maps[name].MaxEntries() / 2) }
	return room{
		frontends: maxFrontends - ownAddresses, sources: half(bpf.MapGatewaySources), members: half(bpf.MapGatewayMembers),
		backends: min(half(bpf.MapBackends), half(bpf.MapGatewayOrigins)/2), // each backend has two origins
	}
}

// needOf returns what a frontend needs.
func needOf(v *desired.VIP, f *desired.Frontend) room {
	n := room{frontends: 1, backends: len(f.Backends)}
	for _, p := range f.Sources {
		if p.Addr().Is4() == v.Addr.Is4() {
			n.sources++
		}
	}
	if f.Affinity > 0 {
		n.members = len(f.Backends)
	}
	return n
}

// needs returns what each Service of a state needs, and the Services in the order of their first frontend.
func needs(s *desired.State) (all map[string]room, order []string) {
	all = map[string]room{}
	for i := range s.VIPs {
		v := &s.VIPs[i]
		for j := range v.Frontends {
			f := &v.Frontends[j]
			is, known := all[f.Service]
			if !known {
				order = append(order, f.Service)
			}
			all[f.Service] = is.plus(needOf(v, f))
		}
	}
	return all, order
}

// usedBy returns what all Services of a state need.
func usedBy(s *desired.State) (sum room) {
	for i := range s.VIPs {
		for j := range s.VIPs[i].Frontends {
			sum = sum.plus(needOf(&s.VIPs[i], &s.VIPs[i].Frontends[j]))
		}
	}
	return sum
}

// checkRoom returns a fault for each Service that needs more in after than before, if that does not fit within limits; used is
// what all Services need now. One that needs no more than it has always fits. The others are served in the order of their
// addresses and ports.
func checkRoom(limits, used room, before, after *desired.State) (faults desired.Faults) {
	had, _ := needs(before)
	want, order := needs(after)
	fresh := newFrontends(before, after)
	free := limits.minus(used)
	more := func(name string) (grows bool, by room) {
		by = want[name].minus(had[name])
		grows = max(by.sources, by.backends, by.members, fresh[name]) > 0
		by.frontends = fresh[name] // an id is free only after its frontend is removed
		return grows, by
	}
	for name := range had {
		if grows, by := more(name); !grows {
			free = free.minus(by)
		}
	}
	for _, name := range order {
		grows, by := more(name)
		if !grows {
			continue
		}
		by = room{by.frontends, max(by.sources, 0), max(by.backends, 0), max(by.members, 0)}
		if text := lacks(free.minus(by), by, limits); text != "" {
			faults = append(faults, desired.Fault{Component: desired.ComponentBalancer, Services: []string{name}, Message: text})
			continue
		}
		free = free.minus(by)
	}
	return faults
}

// lacks describes what is missing if left is less than nothing, "" otherwise.
func lacks(left, by, limits room) string {
	for _, r := range []struct {
		left, by, limit int
		what            string
	}{
		{left.frontends, by.frontends, limits.frontends, "ports of VIPs"},
		{left.sources, by.sources, limits.sources, "source ranges"},
		{left.backends, by.backends, limits.backends, "backends"},
		{left.members, by.members, limits.members, "backends with session affinity"},
	} {
		if r.left < 0 {
			return fmt.Sprintf("there is no room for %d more %s: a gateway has room for %d, of all Services together; use another group of gateways for some", r.by, r.what, r.limit)
		}
	}
	return ""
}

// newFrontends returns how many frontends of each Service are only in after.
func newFrontends(before, after *desired.State) map[string]int {
	had := map[bpf.GatewayFrontendKey]bool{}
	for i := range before.VIPs {
		for j := range before.VIPs[i].Frontends {
			had[keyOf(&before.VIPs[i], &before.VIPs[i].Frontends[j])] = true
		}
	}
	fresh := map[string]int{}
	for i := range after.VIPs {
		for j := range after.VIPs[i].Frontends {
			if f := &after.VIPs[i].Frontends[j]; !had[keyOf(&after.VIPs[i], f)] {
				fresh[f.Service]++
			}
		}
	}
	return fresh
}
