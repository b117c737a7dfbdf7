package lb

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Planner makes one Plan after the other for one kernel. The maps get a frontend for each VIP, port and protocol of
// each import, over the first address of each endpoint of the VIP's family whose slice has a port of the same name and
// protocol. The Service's policy (see [AnnotationPrefer] and the other annotations) selects which of these endpoints
// get clients; the others stay as draining backends if they still serve. A Service without any backend gets a frontend
// without slots, which refuses.
//
// Existing entries keep their numbers, and backends their slots: an unchanged Service costs no write, and a
// changed endpoint costs a few. The Planner remembers what it made of each Service, and rebuilds only Services that do
// not share their memory with the last Snapshot. Equal histories give equal plans. Make it with NewPlanner. Not safe
// for concurrent use.
type Planner struct {
	ids idAllocator

	last     Input // of the last Plan, without its Snapshot
	planned  bool  // there was a Plan
	round    uint64
	services map[clusterset.ServiceName]*serviceState
	order    []*serviceState // of the last Snapshot, nil where a name occurs again
	present  int             // how many Services the last Snapshot has

	frontends map[Address]*frontend
	backends  map[backendKey]*backend
	clusters  [MaxClusters]cluster
	indices   map[clusterset.ClusterID]ClusterIndex
	names     map[ServiceID]clusterset.ServiceName
	derived   State // the derived tables

	usedFrontends idSet              // every frontend number in use
	usedBackends  idSet              // every backend number in use, also of backends found in the maps without a frontend
	orphanSlots   map[Slot]BackendID // slots found at the start that no frontend counts
	limits, used  Limits             // of the maps; deletes come last, so a deleted entry takes room until its Plan ends

	plan            Plan
	touched         []*backend // backends whose use may have changed in this Plan
	staleAffinities []staleAffinity
	released        []*frontend // frontends taken from their Services in this Plan
	claimants       map[netip.Addr][]*clusterset.Service
	scratch         scratch
}

// serviceState is the outcome of planning one Service.
type serviceState struct {
	name      clusterset.ServiceName
	id        ServiceID           // 0 without frontends
	round     uint64              // the last round whose Snapshot has the Service
	position  int                 // in that Snapshot
	stale     bool                // to be rebuilt in this round
	contested bool                // it claims a VIP that belongs to another Service
	waiting   bool                // the maps have no room for its frontends
	source    *clusterset.Service // in the last Snapshot; nil when the Service must be rebuilt
	frontends []*frontend
	problems  []Problem
}

// frontend is one entry of the map and its slots.
type frontend struct {
	address  Address
	owner    *serviceState // nil: it is deleted when the Plan ends
	held     bool          // the map holds it, as value
	value    Frontend
	table    []*backend // the slots in the map; nil for a slot without a valid backend
	backends []*backend // that serve it, with and without slots
}

// backendKey identifies a backend. The cluster is part of it, for two members may use one pod address one after the
// other. There are very many keys, so a key is small and holds no pointer.
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

// backend is one entry of the map, and how many frontends and slots use it.
type backend struct {
	id        BackendID
	key       backendKey
	held      bool  // the map holds it
	draining  bool  // in the map
	touched   bool  // it is in Planner.touched
	marked    bool  // while two tables are compared
	frontends int32 // how many frontends it serves
	slots     int32 // how many slots lead to it
	missing   int32 // slots still to be found for it, while a table is made
}

func (b *backend) value() Backend {
	return Backend{Address: b.key.address(), Cluster: b.key.cluster, Draining: b.draining}
}

// staleAffinity becomes a StaleAffinity if the backend still exists at the end of the Plan.
type staleAffinity struct {
	frontend FrontendID
	backend  *backend
}

// cluster is one index.
type cluster struct {
	id       clusterset.ClusterID // "": free
	held     bool                 // the map holds it
	backends int
}

// NewPlanner returns a Planner for a kernel whose maps hold have. It keeps nothing of have.
func NewPlanner(have State) *Planner { return newPlanner(have, idAllocator{}) }

// Reset makes p start again from have, which the maps hold. It is called after a plan that was not carried out as a
// whole. The numbers count on, so that none comes back while a program may still hold it.
func (p *Planner) Reset(have State) { *p = *newPlanner(have, p.ids) }

// newPlanner adopts have. The first Plan deletes or overwrites invalid entries: a crash or another writer of the maps
// may have left any content.
func newPlanner(have State, ids idAllocator) *Planner {
	ids.adopt(have)
	p := &Planner{
		ids:           ids,
		services:      make(map[clusterset.ServiceName]*serviceState, len(have.Services)),
		frontends:     make(map[Address]*frontend, len(have.Frontends)),
		backends:      make(map[backendKey]*backend, len(have.Backends)),
		indices:       map[clusterset.ClusterID]ClusterIndex{},
		names:         maps.Clone(have.Services),
		usedFrontends: idSet{},
		usedBackends:  idSet{},
		orphanSlots:   map[Slot]BackendID{},
	}
	p.adoptNames(have)
	byID := p.adoptBackends(have)
	p.adoptFrontends(have, byID)
	for _, t := range tables() {
		t.adopt(p, &have)
	}
	p.used = Limits{Frontends: len(p.frontends), Slots: len(p.orphanSlots), Backends: len(have.Backends), Services: len(have.Services)}
	for _, fe := range p.frontends {
		p.used.Slots += len(fe.table)
	}
	return p
}

// Plan returns the writes that bring the maps to what in asks for, and the parts of it that cannot be programmed. Any
// prefix of the writes may be applied alone: no frontend then names a missing backend, or one that belongs neither to
// its old nor to its new set. The Planner assumes that all writes are carried out; if they are not, it must be Reset. It
// keeps the memory that in refers to, which must not change.
//
// A Service that does not fit into the maps gets what room there is beside the Services before it, and is rebuilt in
// each Plan.
func (p *Planner) Plan(in Input) (Plan, []Problem) {
	p.round++
	p.limits = in.Limits
	if len(p.backends) == 0 {
		p.preallocate(in.Snapshot)
	}
	p.findChanged(&in)
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
	p.finish()
	p.last, p.planned = in, true
	p.last.Snapshot, p.claimants = nil, nil
	plan := p.plan
	p.plan = Plan{}
	for _, t := range tables() {
		t.update(p, &in, &plan)
		t.sortDeletes(&plan) // a fixed order makes plans, logs and failures reproducible
		t.free(&plan, &p.used)
	}
	return plan, problems
}

// preallocate allocates what the first Plan fills: growing step by step would leave twice as much garbage.
func (p *Planner) preallocate(snap *clusterset.Snapshot) {
	endpoints := 0
	for i := range snap.Services {
		for _, s := range snap.Services[i].Slices {
			endpoints += len(s.Endpoints)
		}
	}
	p.backends = make(map[backendKey]*backend, endpoints)
	p.touched = make([]*backend, 0, endpoints)
	p.plan.Backends.Put = make([]Entry[BackendID, Backend], 0, endpoints)
	p.plan.Slots.Put = make([]Entry[Slot, BackendID], 0, endpoints)
}

// findChanged marks the Services to rebuild and lists those of the Snapshot in p.order.
func (p *Planner) findChanged(in *Input) {
	all := !p.planned || p.last.Node != in.Node || p.last.ZonesSpanClusters != in.ZonesSpanClusters ||
		p.last.RegionsSpanClusters != in.RegionsSpanClusters || !maps.Equal(p.last.Drained, in.Drained)
	before, waiting := p.order, shareFrontends(in.Snapshot, in.Limits.Frontends)
	p.claimants = claimantsOf(in.Snapshot, waiting)
	p.order = make([]*serviceState, 0, len(in.Snapshot.Services))
	p.present = 0
	for i := range in.Snapshot.Services {
		svc := &in.Snapshot.Services[i]
		s := p.lookup(before, i, svc.Service)
		if s.round == p.round {
			p.order = append(p.order, nil) // the name occurs twice: the first one counts
			continue
		}
		s.round, s.position = p.round, i
		p.present++
		s.stale = all || s.contested || s.source == nil || !same(s.source, svc) || in.VIPs != p.last.VIPs && in.VIPs.differs(p.last.VIPs, svc)
		if s.waiting != waiting[svc.Service] {
			s.waiting, s.stale = waiting[svc.Service], true
		}
		if !s.stale {
			s.source = svc // the same Service in younger memory, so that the older can be freed
		}
		p.order = append(p.order, s)
	}
	if !all {
		p.findDispossessed(in)
	}
}

// findDispossessed marks each Service whose VIP is claimed by a changed Service that comes before it.
func (p *Planner) findDispossessed(in *Input) {
	for i, s := range p.order {
		if s == nil || !s.stale {
			continue
		}
		svc := &in.Snapshot.Services[i]
		for _, vip := range svc.IPs {
			for _, port := range svc.Ports {
				fe := p.frontends[Address{netip.AddrPortFrom(vip.Unmap(), port.Port), port.Protocol}]
				if fe != nil && fe.owner != nil && fe.owner.round == p.round && i < fe.owner.position {
					fe.owner.stale = true
				}
			}
		}
	}
}

// lookup returns the state of a Service, which is likely at the same position as in the last Snapshot.
func (p *Planner) lookup(before []*serviceState, i int, name clusterset.ServiceName) *serviceState {
	if i < len(before) && before[i] != nil && before[i].name == name {
		return before[i]
	}
	s := p.services[name]
	if s == nil {
		s = &serviceState{name: name}
		p.services[name] = s
	}
	return s
}

// same reports whether a and b are balanced alike. It compares endpoints and ports by their memory.
func same(a, b *clusterset.Service) bool {
	if a.Type != b.Type || len(a.Slices) != len(b.Slices) || !slices.Equal(a.IPs, b.IPs) || !slices.Equal(a.Ports, b.Ports) || !samePolicy(a, b) {
		return false
	}
	for i := range a.Slices {
		s, t := &a.Slices[i], &b.Slices[i]
		if s.Cluster != t.Cluster || s.Family != t.Family || s.Regions != t.Regions || !sameMemory(s.Endpoints, t.Endpoints) || !sameMemory(s.Ports, t.Ports) {
			return false
		}
	}
	return true
}

func sameMemory[T any](a, b []T) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

// release takes the frontends away from Services that were removed or are rebuilt.
func (p *Planner) release() {
	for _, s := range p.order {
		if s != nil && s.stale {
			p.releaseAll(s)
		}
	}
	if len(p.services) == p.present {
		return
	}
	var removed []*serviceState
	for _, s := range p.services {
		if s.round != p.round {
			removed = append(removed, s)
		}
	}
	slices.SortFunc(removed, func(a, b *serviceState) int { return a.name.Compare(b.name) })
	for _, s := range removed {
		p.releaseAll(s)
		p.setServiceID(s, false)
		delete(p.services, s.name)
	}
}

func (p *Planner) releaseAll(s *serviceState) {
	for _, fe := range s.frontends {
		fe.owner = nil
		p.released = append(p.released, fe)
		for _, b := range fe.backends {
			b.frontends--
			p.touch(b)
		}
		for _, b := range fe.table {
			b.slots--
		}
		fe.backends = nil
	}
	s.frontends, s.problems, s.contested = nil, nil, false
}

func (p *Planner) touch(b *backend) {
	if !b.touched {
		b.touched = true
		p.touched = append(p.touched, b)
	}
}

// State returns what the maps hold once all plans have been carried out. It shares nothing with p.
func (p *Planner) State() State {
	s := NewState()
	for _, t := range tables() {
		t.fill(p, &s)
	}
	return s
}

// Counts returns how many frontends and backends the maps hold.
func (p *Planner) Counts() (frontends, backends int) { return len(p.frontends), len(p.backends) }

func (p *Planner) heldFrontends(visit func(Address, Frontend)) {
	for a, fe := range p.frontends {
		visit(a, fe.value)
	}
}

func (p *Planner) heldSlots(visit func(Slot, BackendID)) {
	for _, fe := range p.frontends {
		for i, b := range fe.table {
			var id BackendID // 0 for a slot without a valid backend
			if b != nil {
				id = b.id
			}
			visit(Slot{fe.value.ID, uint32(i)}, id)
		}
	}
}

func (p *Planner) heldBackends(visit func(BackendID, Backend)) {
	for _, b := range p.backends {
		visit(b.id, b.value())
	}
}

func (p *Planner) heldServices(visit func(ServiceID, clusterset.ServiceName)) {
	for id, name := range p.names {
		visit(id, name)
	}
}

func (p *Planner) heldClusters(visit func(ClusterIndex, clusterset.ClusterID)) {
	for i, c := range p.clusters {
		if c.id != "" {
			visit(ClusterIndex(i), c.id)
		}
	}
}
