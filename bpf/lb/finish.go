package lb

import "github.com/isthmus-net/isthmus/controlplane/clusterset"

// finish plans what follows from all Services together: it deletes unused entries, and writes changed backends and
// members.
func (p *Planner) finish() {
	p.deleteReleased()
	p.updateBackends()
	p.keepStaleAffinities()
	p.updateClusters()
	for k := range p.orphanSlots {
		p.plan.Slots.delete(k)
	}
	clear(p.orphanSlots)
}

// deleteReleased deletes the released frontends that no Service claimed again.
func (p *Planner) deleteReleased() {
	for _, fe := range p.released {
		if fe.owner != nil || p.frontends[fe.address] != fe {
			continue
		}
		p.plan.Frontends.delete(fe.address)
		p.deleteSlots(fe, 0)
		delete(p.frontends, fe.address)
		p.usedFrontends.remove(uint32(fe.value.ID))
	}
	p.released = nil
}

// deleteSlots deletes the slots of fe from index on.
func (p *Planner) deleteSlots(fe *frontend, from int) {
	for i := from; i < len(fe.table); i++ {
		p.plan.Slots.delete(Slot{fe.value.ID, uint32(i)})
	}
}

// updateBackends writes the backends that are new or begin or end to drain, and deletes those that serve no frontend.
func (p *Planner) updateBackends() {
	for _, b := range p.touched {
		b.touched = false
		c := &p.clusters[b.key.cluster]
		switch draining := b.slots == 0; {
		case b.frontends == 0:
			if b.held {
				c.backends--
				p.plan.Backends.delete(b.id)
			}
			delete(p.backends, b.key)
			p.usedBackends.remove(uint32(b.id))
		case !b.held || b.draining != draining:
			if !b.held {
				c.backends++
			}
			b.held, b.draining = true, draining
			p.plan.Backends.put(b.id, b.value())
		}
	}
	p.touched = nil
}

// keepStaleAffinities adds the stale affinities to the Plan whose backends still serve another frontend. The programs
// skip an affinity whose backend does not exist.
func (p *Planner) keepStaleAffinities() {
	for _, s := range p.staleAffinities {
		if s.backend.frontends > 0 {
			p.plan.StaleAffinities = append(p.plan.StaleAffinities, StaleAffinity{s.frontend, s.backend.id})
		}
	}
	clear(p.staleAffinities)
	p.staleAffinities = p.staleAffinities[:0]
}

// updateClusters writes new members, and frees the indices of members without backends.
func (p *Planner) updateClusters() {
	for i := range p.clusters[1:] {
		c, index := &p.clusters[i+1], ClusterIndex(i+1)
		switch {
		case c.id == "":
		case c.backends == 0:
			if c.held {
				p.plan.Clusters.delete(index)
			}
			if p.indices[c.id] == index {
				delete(p.indices, c.id)
			}
			*c = cluster{}
		case !c.held:
			c.held = true
			p.plan.Clusters.put(index, c.id)
		}
	}
}

// reserve takes room for n entries of a map that has used of limit, and reports whether there was enough.
func reserve(used *int, n, limit int) bool {
	if limit > 0 && *used+n > limit {
		return false
	}
	*used += n
	return true
}

// setServiceID numbers s when it needs a number, and frees the number when it does not.
func (p *Planner) setServiceID(s *serviceState, needed bool) {
	if (s.id != 0) == needed {
		return
	}
	if needed && !reserve(&p.used.Services, 1, p.limits.Services) {
		s.problem(NoRoom, "its clients are not counted: the node has room for the names of %d Services", p.limits.Services)
		return
	}
	if !needed {
		p.plan.Services.delete(s.id)
		delete(p.names, s.id)
		s.id = 0
		return
	}
	s.id = ServiceID(next(&p.ids.service, func(n uint32) bool { _, taken := p.names[ServiceID(n)]; return taken }))
	p.names[s.id] = s.name
	p.plan.Services.put(s.id, s.name)
}

// clusterIndex returns the index of a member of s; 0, no member, when all indices are taken.
func (p *Planner) clusterIndex(s *serviceState, id clusterset.ClusterID) ClusterIndex {
	if i, ok := p.indices[id]; ok {
		return i
	}
	for range MaxClusters - 1 {
		p.ids.cluster = p.ids.cluster%(MaxClusters-1) + 1
		if c := &p.clusters[p.ids.cluster]; c.id == "" {
			c.id = id
			p.indices[id] = ClusterIndex(p.ids.cluster)
			return p.indices[id]
		}
	}
	s.problem(NoRoom, "cluster %s is never drained when its packets get no answer: the node has room for %d members", id, MaxClusters-1)
	return 0
}

// backend returns the backend of a key, a new one if there is none yet, nil when there is no room for it.
func (p *Planner) backend(key backendKey) *backend {
	b := p.backends[key]
	if b == nil && reserve(&p.used.Backends, 1, p.limits.Backends) {
		b = &backend{id: BackendID(next(&p.ids.backend, p.usedBackends.has)), key: key}
		p.backends[key] = b
		p.usedBackends.add(uint32(b.id))
	}
	return b
}

// frontend returns the frontend of an address, a new one if there is none yet, nil when there is no room for it.
func (p *Planner) frontend(a Address) *frontend {
	fe := p.frontends[a]
	if fe == nil {
		if !reserve(&p.used.Frontends, 1, p.limits.Frontends) {
			return nil
		}
		fe = &frontend{address: a}
		p.frontends[a] = fe
	}
	if fe.value.ID == 0 {
		fe.value.ID = FrontendID(next(&p.ids.frontend, p.usedFrontends.has))
		p.usedFrontends.add(uint32(fe.value.ID))
	}
	return fe
}
