package lb

import (
	"net/netip"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Audit compares what the maps hold, told entry by entry and each once, with what the plans of a Planner have made
// of them. It holds no copy of either, so it may be done every minute on every node.
type Audit struct {
	planner *Planner
	byID    map[FrontendID]*frontend
	entries int // that there should be
	found   int // of these, whatever their values
	wrong   int // another value, or an entry that should not be
}

// Audit begins a comparison with p, which must not plan until it is over.
func (p *Planner) Audit() *Audit {
	a := &Audit{
		planner: p, byID: make(map[FrontendID]*frontend, len(p.frontends)),
		entries: len(p.frontends) + len(p.backends) + len(p.names) + len(p.ranges),
	}
	for _, fe := range p.frontends {
		a.byID[fe.value.ID] = fe
		a.entries += len(fe.table)
	}
	for _, c := range p.clusters {
		if c.id != "" {
			a.entries++
		}
	}
	return a
}

// Differences returns how many entries are missing, have another value, or should not be there. A backend that was
// given another address or member is two of them.
func (a *Audit) Differences() int { return a.wrong + a.entries - a.found }

func (a *Audit) count(known, equal bool) {
	if known {
		a.found++
	}
	if !known || !equal {
		a.wrong++
	}
}

// State tells all entries of a copy of the maps.
func (a *Audit) State(s State) {
	each(s.Frontends, a.Frontend)
	each(s.Slots, a.Slot)
	each(s.Backends, a.Backend)
	each(s.Services, a.Service)
	each(s.Clusters, a.Cluster)
	each(s.Ranges, func(r netip.Prefix, _ bool) { a.Range(r) })
}

func each[K comparable, V any](m map[K]V, tell func(K, V)) {
	for k, v := range m {
		tell(k, v)
	}
}

// Frontend tells an entry of the map of frontends.
func (a *Audit) Frontend(at Address, v Frontend) {
	fe := a.planner.frontends[at]
	a.count(fe != nil, fe != nil && fe.value == v)
}

// Slot tells an entry of the map of slots.
func (a *Audit) Slot(s Slot, id BackendID) {
	fe := a.byID[s.Frontend]
	known := fe != nil && int(s.Index) < len(fe.table)
	a.count(known, known && fe.table[s.Index] != nil && fe.table[s.Index].id == id)
}

// Backend tells an entry of the map of backends.
func (a *Audit) Backend(id BackendID, v Backend) {
	b := a.planner.backends[keyOf(v.Address, v.Cluster)]
	known := b != nil && b.id == id
	a.count(known, known && b.value() == v)
}

// Service tells an entry of the map of Services.
func (a *Audit) Service(id ServiceID, name clusterset.ServiceName) {
	want, known := a.planner.names[id]
	a.count(known, want == name)
}

// Cluster tells an entry of the map of members.
func (a *Audit) Cluster(i ClusterIndex, id clusterset.ClusterID) {
	known := int(i) < len(a.planner.clusters) && a.planner.clusters[i].id != ""
	a.count(known, known && a.planner.clusters[i].id == id)
}

// Range tells an entry of the map of ranges.
func (a *Audit) Range(r netip.Prefix) {
	known := a.planner.ranges[r]
	a.count(known, true)
}
