package lb

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Build returns what the maps should hold for in, when they hold have now: a frontend for each VIP, port and
// protocol of each import, over the first address of each endpoint of the VIP's family whose slice has a
// port of the same name and protocol. Who of them gets clients is the Service's choice (see [AnnotationPrefer]
// and its neighbours); the others that serve stay backends that drain. A Service without anybody has a
// frontend without slots, which refuses.
//
// Whatever has holds already keeps its number, and backends their slots, so that an unchanged Service
// costs no write and one changed endpoint a few. New numbers come from ids. Build keeps none of its arguments;
// equal arguments give equal results.
func Build(in Input, have State, ids *IDs) (State, []Problem) {
	p := newPlanner(have, *ids)
	_, problems := p.Plan(in)
	*ids = p.ids
	return p.State(), problems
}

// Planner makes one Plan after the other for one kernel. It is what Build and Diff are together, at the price
// of what has changed: it remembers what it made of each Service, and looks again only at those that are not
// in the very memory of the last Snapshot. Make it with NewPlanner. Not safe for concurrent use.
type Planner struct {
	ids IDs

	last     Input // of the last Plan, without its Snapshot
	planned  bool  // there was one
	round    uint64
	services map[clusterset.ServiceName]*served
	order    []*served // of the last Snapshot, nil where a name is there again
	there    int       // how many they are

	frontends map[Address]*frontend
	backends  map[backendKey]*backend
	clusters  [MaxClusters]cluster
	indices   map[clusterset.ClusterID]ClusterIndex
	names     map[ServiceID]clusterset.ServiceName
	ranges    map[netip.Prefix]bool

	usedFrontends numbers            // every one in frontends
	usedBackends  numbers            // every one in backends, and those that were found without use
	strays        map[Slot]BackendID // slots that no frontend counts, found at the start
	limits, used  Limits             // of the maps; a Plan takes away last, so what goes is in use until it ends

	plan     Plan
	touched  []*backend // whose use may have changed in this Plan
	partings []parting
	released []*frontend
	scratch  scratch
}

// served is what became of one Service.
type served struct {
	name      clusterset.ServiceName
	id        ServiceID           // 0 without frontends
	seen      uint64              // the last round it was there
	place     int                 // in that round's Snapshot
	stale     bool                // to be looked at in this round
	contested bool                // it wants what belongs to another
	source    *clusterset.Service // what it was made of, in the last Snapshot; nil: make it anew
	frontends []*frontend
	problems  []Problem
}

// frontend is one entry of the map and its slots.
type frontend struct {
	address Address
	owner   *served // nil: it goes
	held    bool    // the map has it, as value
	value   Frontend
	table   []*backend // the slots in the map; nil where nothing good is
	members []*backend // who serves it, with and without slots
}

// backendKey is what tells backends apart: two members may, one after the other, have a pod of one address. There
// are very many of them, so it is small and holds no pointer.
type backendKey struct {
	addr     [16]byte // IPv4 as ::ffff:a.b.c.d
	port     uint16
	cluster  ClusterIndex
	protocol clusterset.Protocol
}

func keyOf(a Address, c ClusterIndex) backendKey {
	return backendKey{a.AddrPort.Addr().As16(), a.AddrPort.Port(), c, a.Protocol}
}

func (k backendKey) address() Address {
	return Address{netip.AddrPortFrom(netip.AddrFrom16(k.addr).Unmap(), k.port), k.protocol}
}

// backend is one entry of the map, and who uses it.
type backend struct {
	id       BackendID
	key      backendKey
	held     bool  // the map has it
	draining bool  // as the map has it
	touched  bool  // it is in Planner.touched
	seen     bool  // while two tables are compared
	members  int32 // how many frontends it serves
	slots    int32 // how many slots lead to it
	wanted   int32 // slots still to be found for it, while a table is made
}

// parting is a Parting, if the backend is there in the end.
type parting struct {
	frontend FrontendID
	backend  *backend
}

// cluster is one index.
type cluster struct {
	id       clusterset.ClusterID // "": free
	held     bool                 // the map has it
	backends int
}

// NewPlanner returns a Planner for a kernel whose maps hold have. It keeps nothing of have.
func NewPlanner(have State) *Planner { return newPlanner(have, IDs{}) }

// Again returns a Planner for the same kernel after plans that were not carried out as a whole: its maps hold
// have. Numbers go on where p was, so that none comes back while a program may still hold it.
func (p *Planner) Again(have State) *Planner { return newPlanner(have, p.ids) }

// Plan returns the writes that lead from what the maps hold to what in asks for, and what of it cannot be.
// Any prefix of them is safe, as Diff has it. The Planner goes on as if they had been carried out; when they
// were not, all of them, it must be thrown away. It keeps what in holds and must find it unchanged.
//
// A Service that does not fit into the maps has what fits, beside those that came before it, and is looked at
// again in each Plan.
func (p *Planner) Plan(in Input) (Plan, []Problem) {
	p.round++
	p.limits = in.Limits
	if len(p.backends) == 0 {
		p.makeRoom(in.Snapshot)
	}
	p.mark(&in)
	p.release()
	var problems []Problem
	for i, s := range p.order {
		if s == nil {
			continue
		}
		if s.stale {
			p.build(&in, s, &in.Snapshot.Services[i])
		}
		problems = append(problems, s.problems...)
	}
	p.sweep()
	p.setRanges(in.Ranges)
	p.last, p.planned = in, true
	p.last.Snapshot = nil
	plan := p.plan
	p.plan = Plan{}
	p.used.Frontends -= len(plan.DeleteFrontends)
	p.used.Slots -= len(plan.DeleteSlots)
	p.used.Backends -= len(plan.DeleteBackends)
	p.used.Services -= len(plan.DeleteServices)
	return plan, problems
}

// makeRoom allocates what a first Plan fills at once: growing there step by step would leave twice as much behind.
func (p *Planner) makeRoom(snap *clusterset.Snapshot) {
	endpoints := 0
	for i := range snap.Services {
		for _, s := range snap.Services[i].Slices {
			endpoints += len(s.Endpoints)
		}
	}
	p.backends = make(map[backendKey]*backend, endpoints)
	p.touched = make([]*backend, 0, endpoints)
	p.plan.PutBackends = make([]BackendWrite, 0, endpoints)
	p.plan.PutSlots = make([]SlotWrite, 0, endpoints)
}

// mark finds the Services to look at and puts all that are there into order.
func (p *Planner) mark(in *Input) {
	all := !p.planned || p.last.Node != in.Node || p.last.ZonesSpanClusters != in.ZonesSpanClusters || !maps.Equal(p.last.Drained, in.Drained)
	before := p.order
	p.order = make([]*served, 0, len(in.Snapshot.Services))
	p.there = 0
	for i := range in.Snapshot.Services {
		svc := &in.Snapshot.Services[i]
		s := p.find(before, i, svc.Service)
		if s.seen == p.round {
			p.order = append(p.order, nil) // named twice: the first one counts
			continue
		}
		s.seen, s.place = p.round, i
		p.there++
		s.stale = all || s.contested || s.source == nil || !same(s.source, svc)
		if !s.stale {
			s.source = svc // the same in younger memory, so that the older can go
		}
		p.order = append(p.order, s)
	}
	// Who owns what a changed Service that comes first wants must give it up.
	for i, s := range p.order {
		if s == nil || !s.stale || all {
			continue
		}
		svc := &in.Snapshot.Services[i]
		for _, vip := range svc.IPs {
			for _, port := range svc.Ports {
				fe := p.frontends[Address{netip.AddrPortFrom(vip.Unmap(), port.Port), port.Protocol}]
				if fe != nil && fe.owner != nil && fe.owner.seen == p.round && i < fe.owner.place {
					fe.owner.stale = true
				}
			}
		}
	}
}

// find returns what is known of a Service, which is likely where it was the last time.
func (p *Planner) find(before []*served, i int, name clusterset.ServiceName) *served {
	if i < len(before) && before[i] != nil && before[i].name == name {
		return before[i]
	}
	s := p.services[name]
	if s == nil {
		s = &served{name: name}
		p.services[name] = s
	}
	return s
}

// same reports whether b is a as far as balancing goes, by memory where it is large.
func same(a, b *clusterset.Service) bool {
	if a.Type != b.Type || a.SessionAffinity != b.SessionAffinity || a.InternalTrafficPolicy != b.InternalTrafficPolicy ||
		a.TrafficDistribution != b.TrafficDistribution || len(a.Slices) != len(b.Slices) ||
		!slices.Equal(a.IPs, b.IPs) || !slices.Equal(a.Ports, b.Ports) {
		return false
	}
	if len(a.Annotations)+len(b.Annotations) > 0 {
		for _, key := range []string{AnnotationPrefer, AnnotationClusterWeights, AnnotationBalancer} {
			va, oka := a.Annotations[key]
			if vb, okb := b.Annotations[key]; oka != okb || va != vb {
				return false
			}
		}
	}
	for i := range a.Slices {
		s, t := &a.Slices[i], &b.Slices[i]
		if s.Cluster != t.Cluster || s.Family != t.Family || !sameMemory(s.Endpoints, t.Endpoints) || !sameMemory(s.Ports, t.Ports) {
			return false
		}
	}
	return true
}

func sameMemory[T any](a, b []T) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

// release takes the frontends of Services that are gone, or looked at anew, away from them.
func (p *Planner) release() {
	for _, s := range p.order {
		if s != nil && s.stale {
			p.releaseAll(s)
		}
	}
	if len(p.services) == p.there {
		return
	}
	var gone []*served
	for _, s := range p.services {
		if s.seen != p.round {
			gone = append(gone, s)
		}
	}
	slices.SortFunc(gone, func(a, b *served) int { return a.name.Compare(b.name) })
	for _, s := range gone {
		p.releaseAll(s)
		p.setServiceID(s, false)
		delete(p.services, s.name)
	}
}

func (p *Planner) releaseAll(s *served) {
	for _, fe := range s.frontends {
		fe.owner = nil
		p.released = append(p.released, fe)
		for _, b := range fe.members {
			b.members--
			p.touch(b)
		}
		for _, b := range fe.table {
			b.slots--
		}
		fe.members = nil
	}
	s.frontends, s.problems, s.contested = nil, nil, false
}

func (p *Planner) touch(b *backend) {
	if !b.touched {
		b.touched = true
		p.touched = append(p.touched, b)
	}
}

// sweep writes what became of the backends, and takes away what nobody uses any more.
func (p *Planner) sweep() {
	for _, fe := range p.released {
		if fe.owner != nil || p.frontends[fe.address] != fe {
			continue
		}
		p.plan.DeleteFrontends = append(p.plan.DeleteFrontends, fe.address)
		p.deleteSlots(fe, 0)
		delete(p.frontends, fe.address)
		p.usedFrontends.remove(uint32(fe.value.ID))
	}
	for _, b := range p.touched {
		b.touched = false
		c := &p.clusters[b.key.cluster]
		switch draining := b.slots == 0; {
		case b.members == 0:
			if b.held {
				c.backends--
				p.plan.DeleteBackends = append(p.plan.DeleteBackends, b.id)
			}
			delete(p.backends, b.key)
			p.usedBackends.remove(uint32(b.id))
		case !b.held || b.draining != draining:
			if !b.held {
				c.backends++
			}
			b.held, b.draining = true, draining
			p.plan.PutBackends = append(p.plan.PutBackends, BackendWrite{b.id, b.value()})
		}
	}
	for _, part := range p.partings {
		if part.backend.members > 0 {
			p.plan.Partings = append(p.plan.Partings, Parting{part.frontend, part.backend.id})
		}
	}
	clear(p.partings)
	p.partings = p.partings[:0]
	for i := range p.clusters[1:] {
		c, index := &p.clusters[i+1], ClusterIndex(i+1)
		switch {
		case c.id == "":
		case c.backends == 0:
			if c.held {
				p.plan.DeleteClusters = append(p.plan.DeleteClusters, index)
			}
			if p.indices[c.id] == index {
				delete(p.indices, c.id)
			}
			*c = cluster{}
		case !c.held:
			c.held = true
			p.plan.PutClusters = append(p.plan.PutClusters, ClusterWrite{index, c.id})
		}
	}
	for k := range p.strays {
		p.plan.DeleteSlots = append(p.plan.DeleteSlots, k)
	}
	clear(p.strays)
	p.released, p.touched = nil, nil
	slices.SortFunc(p.plan.DeleteFrontends, Address.Compare)
	slices.SortFunc(p.plan.DeleteSlots, Slot.Compare)
	slices.Sort(p.plan.DeleteBackends)
	slices.Sort(p.plan.DeleteServices)
	slices.Sort(p.plan.DeleteClusters)
}

func (b *backend) value() Backend {
	return Backend{Address: b.key.address(), Cluster: b.key.cluster, Draining: b.draining}
}

// deleteSlots deletes the slots of fe from index on.
func (p *Planner) deleteSlots(fe *frontend, from int) {
	for i := from; i < len(fe.table); i++ {
		p.plan.DeleteSlots = append(p.plan.DeleteSlots, Slot{fe.value.ID, uint32(i)})
	}
}

func (p *Planner) setRanges(ranges []netip.Prefix) {
	wanted := make(map[netip.Prefix]bool, len(ranges))
	for _, r := range ranges {
		if r.IsValid() {
			wanted[r.Masked()] = true
		}
	}
	put(p.ranges, wanted, func(r netip.Prefix, _ bool) { p.plan.PutRanges = append(p.plan.PutRanges, r) })
	p.plan.DeleteRanges = append(p.plan.DeleteRanges, missing(p.ranges, wanted)...)
	slices.SortFunc(p.plan.PutRanges, netip.Prefix.Compare)
	slices.SortFunc(p.plan.DeleteRanges, netip.Prefix.Compare)
	p.ranges = wanted
}

// fits takes n entries of a map that has used of limit, and reports whether there was room for them.
func fits(used *int, n, limit int) bool {
	if limit > 0 && *used+n > limit {
		return false
	}
	*used += n
	return true
}

// setServiceID gives s a number when it needs one, and takes it back when it does not.
func (p *Planner) setServiceID(s *served, needed bool) {
	if (s.id != 0) == needed {
		return
	}
	if needed && !fits(&p.used.Services, 1, p.limits.Services) {
		s.problem(NoRoom, "its clients are not counted: the node has room for the names of %d Services", p.limits.Services)
		return
	}
	if !needed {
		p.plan.DeleteServices = append(p.plan.DeleteServices, s.id)
		delete(p.names, s.id)
		s.id = 0
		return
	}
	s.id = ServiceID(next(&p.ids.service, func(n uint32) bool { _, taken := p.names[ServiceID(n)]; return taken }))
	p.names[s.id] = s.name
	p.plan.PutServices = append(p.plan.PutServices, ServiceWrite{s.id, s.name})
}

// clusterIndex returns the index of a member, for s; 0, nobody's, when all are taken.
func (p *Planner) clusterIndex(s *served, id clusterset.ClusterID) ClusterIndex {
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
	s.problem(NoRoom, "what becomes of packets to cluster %s is not seen: the node has room for %d members", id, MaxClusters-1)
	return 0
}

// backend returns the one of a key, a new one if there is none yet, nil when there is no room for it.
func (p *Planner) backend(key backendKey) *backend {
	b := p.backends[key]
	if b == nil && fits(&p.used.Backends, 1, p.limits.Backends) {
		b = &backend{id: BackendID(next(&p.ids.backend, p.usedBackends.has)), key: key}
		p.backends[key] = b
		p.usedBackends.add(uint32(b.id))
	}
	return b
}

// frontend returns the one of an address, a new one if there is none yet, nil when there is no room for it.
func (p *Planner) frontend(a Address) *frontend {
	fe := p.frontends[a]
	if fe == nil {
		if !fits(&p.used.Frontends, 1, p.limits.Frontends) {
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

// State returns what the maps hold once all plans have been carried out. It shares nothing with p.
func (p *Planner) State() State {
	s := NewState()
	for a, fe := range p.frontends {
		s.Frontends[a] = fe.value
		for i, b := range fe.table {
			s.Slots[Slot{fe.value.ID, uint32(i)}] = b.id
		}
	}
	for _, b := range p.backends {
		s.Backends[b.id] = b.value()
	}
	maps.Copy(s.Services, p.names)
	for i, c := range p.clusters {
		if c.id != "" {
			s.Clusters[ClusterIndex(i)] = c.id
		}
	}
	maps.Copy(s.Ranges, p.ranges)
	return s
}

// Counts returns how many frontends and backends the maps hold.
func (p *Planner) Counts() (frontends, backends int) { return len(p.frontends), len(p.backends) }

// newPlanner adopts have. What in it is not as it should be is taken away, or written over, by the first
// Plan: a crash or a foreign hand may have left anything.
func newPlanner(have State, ids IDs) *Planner {
	ids.adopt(have)
	p := &Planner{
		ids:           ids,
		services:      make(map[clusterset.ServiceName]*served, len(have.Services)),
		frontends:     make(map[Address]*frontend, len(have.Frontends)),
		backends:      make(map[backendKey]*backend, len(have.Backends)),
		indices:       map[clusterset.ClusterID]ClusterIndex{},
		names:         maps.Clone(have.Services),
		ranges:        maps.Clone(have.Ranges),
		usedFrontends: numbers{},
		usedBackends:  numbers{},
		strays:        map[Slot]BackendID{},
	}
	p.adoptNames(have)
	byID := p.adoptBackends(have)
	p.adoptFrontends(have, byID)
	p.used = Limits{Frontends: len(p.frontends), Slots: len(p.strays), Backends: len(have.Backends), Services: len(have.Services)}
	for _, fe := range p.frontends {
		p.used.Slots += len(fe.table)
	}
	return p
}
