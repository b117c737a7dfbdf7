package lb

import (
	"maps"
	"slices"
)

// adoptNames takes over Services and members. Where two numbers name the same Service, the lower one stays.
func (p *Planner) adoptNames(have State) {
	for _, id := range slices.Sorted(maps.Keys(have.Services)) {
		name := have.Services[id]
		if s := p.services[name]; s != nil || id == 0 {
			p.plan.Services.delete(id)
			delete(p.names, id)
			continue
		}
		p.services[name] = &serviceState{name: name, id: id}
	}
	for _, i := range slices.Sorted(maps.Keys(have.Clusters)) {
		id := have.Clusters[i]
		if i == 0 || int(i) >= MaxClusters {
			p.plan.Clusters.delete(i)
			continue
		}
		p.clusters[i] = cluster{id: id, held: true}
		if _, twice := p.indices[id]; !twice {
			p.indices[id] = i
		}
	}
}

// adoptBackends takes over the kernel's backends and returns them by id. If two ids are of the same backend, it keeps the lower
// one.
func (p *Planner) adoptBackends(have State) map[BackendID]*backend {
	byID := make(map[BackendID]*backend, len(have.Backends))
	for _, id := range slices.Sorted(maps.Keys(have.Backends)) {
		p.usedBackends.add(uint32(id))
		be := have.Backends[id]
		key := keyOf(be.Address, be.Cluster)
		if p.backends[key] != nil || id == 0 || int(be.Cluster) >= MaxClusters {
			p.plan.Backends.delete(id)
			continue
		}
		b := &backend{id: id, key: key, held: true, draining: be.Draining}
		p.backends[key], byID[id] = b, b
		p.clusters[be.Cluster].backends++
		p.touch(b)
	}
	return byID
}

// adoptFrontends takes over the frontends and their slots. Where two frontends share a number, the first by address
// keeps it and the other gets a new one.
func (p *Planner) adoptFrontends(have State, backends map[BackendID]*backend) {
	byID := make(map[FrontendID]*frontend, len(have.Frontends))
	for _, a := range slices.SortedFunc(maps.Keys(have.Frontends), Address.Compare) {
		fe := &frontend{address: a, held: true, value: have.Frontends[a]}
		if fe.value.ID == 0 || p.usedFrontends.has(uint32(fe.value.ID)) {
			fe.value, fe.held = Frontend{}, false
		} else {
			p.usedFrontends.add(uint32(fe.value.ID))
			byID[fe.value.ID] = fe
		}
		p.frontends[a] = fe
		p.released = append(p.released, fe)
	}
	// A count beyond the number of all slots is cut to that number.
	length := make(map[*frontend]uint32, len(byID))
	for k := range have.Slots {
		if fe := byID[k.Frontend]; fe != nil && k.Index < fe.value.Count && int(k.Index) < len(have.Slots) {
			length[fe] = max(length[fe], k.Index+1)
		}
	}
	for fe, n := range length {
		fe.table = make([]*backend, n)
	}
	for k, id := range have.Slots {
		fe := byID[k.Frontend]
		if fe == nil || int(k.Index) >= len(fe.table) {
			p.orphanSlots[k] = id
			continue
		}
		fe.table[k.Index] = backends[id]
	}
}
