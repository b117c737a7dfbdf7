package lb

import "github.com/isthmus-net/isthmus/controlplane/clusterset"

// Audit compares what the maps hold with what the plans of a Planner have made of them. The entries are passed to it
// one by one ([Table.Audit]); it copies neither side, so every node can afford an audit a minute.
type Audit struct {
	planner *Planner
	byID    map[FrontendID]*frontend
	entries int // that the maps should hold
	found   int // of these, whatever their values
	wrong   int // entries with another value, or that should not exist
}

// Audit begins a comparison with p, which must not plan until the comparison is over.
func (p *Planner) Audit() *Audit {
	a := &Audit{planner: p, byID: make(map[FrontendID]*frontend, len(p.frontends))}
	for _, fe := range p.frontends {
		a.byID[fe.value.ID] = fe
	}
	for _, t := range tables() {
		a.entries += t.count(p)
	}
	return a
}

// Differences returns how many entries are missing, have another value, or should not exist. A backend whose number
// leads to another address or member counts as two.
func (a *Audit) Differences() int { return a.wrong + a.entries - a.found }

// State passes all entries of s.
func (a *Audit) State(s State) {
	for _, t := range tables() {
		t.auditAll(a, &s)
	}
}

func (a *Audit) findFrontend(at Address, _ Frontend) (Frontend, bool) {
	if fe := a.planner.frontends[at]; fe != nil {
		return fe.value, true
	}
	return Frontend{}, false
}

// findSlot returns backend 0 for a slot that should exist and has no valid backend.
func (a *Audit) findSlot(s Slot, _ BackendID) (BackendID, bool) {
	fe := a.byID[s.Frontend]
	if fe == nil || int(s.Index) >= len(fe.table) {
		return 0, false
	}
	if b := fe.table[s.Index]; b != nil {
		return b.id, true
	}
	return 0, true
}

func (a *Audit) findBackend(id BackendID, v Backend) (Backend, bool) {
	if b := a.planner.backends[keyOf(v.Address, v.Cluster)]; b != nil && b.id == id {
		return b.value(), true
	}
	return Backend{}, false
}

func (a *Audit) findService(id ServiceID, _ clusterset.ServiceName) (clusterset.ServiceName, bool) {
	name, ok := a.planner.names[id]
	return name, ok
}

func (a *Audit) findCluster(i ClusterIndex, _ clusterset.ClusterID) (clusterset.ClusterID, bool) {
	if int(i) >= len(a.planner.clusters) || a.planner.clusters[i].id == "" {
		return "", false
	}
	return a.planner.clusters[i].id, true
}
