package lb

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// candidate is an endpoint that may serve a frontend.
type candidate struct {
	address Address
	cluster clusterset.ClusterID
	rank    uint8 // of its policy: the lowest ones serve
	backend *backend
}

// scratch is memory that is used again for each frontend.
type scratch struct {
	candidates []candidate
	serving    []candidate
	addrs      []Address
	weights    []uint32
}

// build makes the frontends of a Service, and writes what is not in the maps yet.
func (p *Planner) build(in *Input, s *served, svc *clusterset.Service) {
	s.stale, s.source = false, svc
	defer func() { p.setServiceID(s, len(s.frontends) > 0) }()
	if svc.Type != clusterset.ClusterSetIP {
		return
	}
	policy, faults := policyOf(svc)
	for _, err := range faults {
		s.problem(InvalidAnnotation, "%s", err)
	}
	for _, port := range svc.Ports {
		if port.Protocol == clusterset.SCTP {
			s.problem(UnsupportedProtocol, "port %d/%s is served to packets only: sockets are not translated for it", port.Port, port.Protocol)
		}
		for _, vip := range svc.IPs {
			if fe := p.claim(s, vip.Unmap(), port); fe != nil {
				p.setServiceID(s, true)
				p.fill(fe, in, &policy, svc, port)
			}
		}
	}
}

// claim returns the frontend of a VIP and port for s, nil when it cannot have it.
func (p *Planner) claim(s *served, vip netip.Addr, port clusterset.Port) *frontend {
	if !vip.IsValid() || vip.IsUnspecified() || port.Port == 0 {
		s.problem(InvalidVIP, "%s port %d/%s is no address a client can connect to", vip, port.Port, port.Protocol)
		return nil
	}
	a := Address{netip.AddrPortFrom(vip, port.Port), port.Protocol}
	fe := p.frontend(a)
	if fe == nil {
		s.problem(NoRoom, "%s is not served: the node has room for %d VIPs by port and protocol; export fewer of them", a, p.limits.Frontends)
		return nil
	}
	if fe.owner != nil {
		s.problem(VIPTaken, "%s belongs to %s", a, fe.owner.name)
		s.contested = true
		return nil
	}
	fe.owner = s
	s.frontends = append(s.frontends, fe)
	return fe
}

// fill finds out who serves fe and writes its backends, slots and itself.
func (p *Planner) fill(fe *frontend, in *Input, policy *policy, svc *clusterset.Service, port clusterset.Port) {
	p.gather(fe, in, policy, svc, port)
	best := rankDrained
	for i := range p.scratch.candidates {
		c := &p.scratch.candidates[i]
		if c.backend = p.backend(keyOf(c.address, p.clusterIndex(fe.owner, c.cluster))); c.backend != nil {
			best = min(best, c.rank)
		}
	}
	all := slices.DeleteFunc(p.scratch.candidates, func(c candidate) bool { return c.backend == nil })
	if len(all) < len(p.scratch.candidates) {
		fe.owner.problem(NoRoom, "endpoints of %s are left out: the node has room for %d backends; export fewer of them", fe.address, p.limits.Backends)
	}
	serving := p.scratch.serving[:0]
	fe.members = make([]*backend, len(all))
	for i := range all {
		c := &all[i]
		fe.members[i] = c.backend
		c.backend.members++
		p.touch(c.backend)
		if c.rank == best && best < rankDrained {
			serving = append(serving, *c)
		}
	}
	p.scratch.serving = serving

	table, isMaglev := p.table(fe.table, policy, serving)
	if !fits(&p.used.Slots, max(0, len(table)-len(fe.table)), p.limits.Slots) {
		fe.owner.problem(NoRoom, "%s has a smaller table than it asks for: the node has room for %d slots; let fewer Services ask for weights or Maglev, see the annotation %s",
			fe.address, p.limits.Slots, AnnotationBalancer)
		room := len(fe.table) + max(0, p.limits.Slots-p.used.Slots)
		few := serving[:min(len(serving), room)]
		table, isMaglev = arrange(fe.table, few, nil, len(few)), false
		p.used.Slots += max(0, len(table)-len(fe.table))
	}
	for i, b := range table {
		b.slots++
		if i >= len(fe.table) || fe.table[i] != b {
			p.putSlot(Slot{fe.value.ID, uint32(i)}, b)
		}
	}
	p.deleteSlots(fe, len(table))
	if policy.affinity > 0 {
		p.part(fe, table)
	}
	fe.table = table
	if len(table) == len(all) && len(serving) == len(all) && !isMaglev {
		fe.members = table // each has one slot: the same in less memory
	}
	value := Frontend{ID: fe.value.ID, Count: uint32(len(table)), Service: fe.owner.id, Affinity: policy.affinity, Maglev: isMaglev}
	if !fe.held || fe.value != value {
		p.plan.PutFrontends = append(p.plan.PutFrontends, FrontendWrite{fe.address, value})
	}
	fe.held, fe.value = true, value
}

// part notes who no longer serves fe, which goes on with table.
func (p *Planner) part(fe *frontend, table []*backend) {
	for _, b := range table {
		b.seen = true
	}
	for _, b := range fe.table {
		if b != nil && !b.seen {
			b.seen = true
			p.partings = append(p.partings, parting{fe.value.ID, b})
		}
	}
	for _, b := range fe.table {
		if b != nil {
			b.seen = false
		}
	}
	for _, b := range table {
		b.seen = false
	}
}

// putSlot makes k lead to b, unless it does so although nobody counts it yet, after an update that was cut.
func (p *Planner) putSlot(k Slot, b *backend) {
	stray, ok := p.strays[k]
	if ok {
		delete(p.strays, k)
		p.used.Slots-- // it was counted as one to delete
	}
	if !ok || stray != b.id {
		p.plan.PutSlots = append(p.plan.PutSlots, SlotWrite{k, b.id})
	}
}

// gather lists in p.scratch who can serve port of svc at fe, sorted by address, each once.
func (p *Planner) gather(fe *frontend, in *Input, policy *policy, svc *clusterset.Service, port clusterset.Port) {
	found, family := p.scratch.candidates[:0], clusterset.FamilyOf(fe.address.AddrPort.Addr())
	for si := range svc.Slices {
		slice := &svc.Slices[si]
		if slice.Family != family {
			continue
		}
		i := slices.IndexFunc(slice.Ports, func(ep clusterset.EndpointPort) bool {
			return ep.Name == port.Name && ep.Protocol == port.Protocol
		})
		if i < 0 {
			continue
		}
		target := slice.Ports[i].Port
		for ei := range slice.Endpoints {
			e := &slice.Endpoints[ei]
			if !e.Ready && !(e.Serving && e.Terminating) || len(e.Addrs) == 0 ||
				policy.local && !in.Node.near(tierNode, false, slice.Cluster, e) {
				continue
			}
			addr := e.Addrs[0].Unmap()
			if !addr.IsValid() || clusterset.FamilyOf(addr) != family || addr.IsUnspecified() || target == 0 {
				fe.owner.problem(InvalidEndpoint, "endpoint %s port %d/%s of cluster %s cannot take %s traffic",
					addr, target, port.Protocol, slice.Cluster, family)
				continue
			}
			found = append(found, candidate{
				address: Address{netip.AddrPortFrom(addr.WithZone(""), target), port.Protocol},
				cluster: slice.Cluster, rank: policy.rank(in, slice.Cluster, e),
			})
		}
	}
	// An endpoint on its way from one slice to another is in both for a while; the better word counts.
	slices.SortStableFunc(found, func(a, b candidate) int {
		if c := a.address.Compare(b.address); c != 0 {
			return c
		}
		return int(a.rank) - int(b.rank)
	})
	p.scratch.candidates = slices.CompactFunc(found, func(a, b candidate) bool { return a.address == b.address })
}

// table puts those who serve, sorted, into slots; had is what the slots hold now.
func (p *Planner) table(had []*backend, policy *policy, serving []candidate) (slots []*backend, isMaglev bool) {
	weights, units := p.weigh(policy, serving)
	if policy.maglev && len(serving) > 0 {
		if size := maglevSize(units); size > 0 {
			addrs := p.scratch.addrs[:0]
			for i := range serving {
				addrs = append(addrs, serving[i].address)
			}
			p.scratch.addrs = addrs
			slots = make([]*backend, size)
			for i, n := range Maglev(addrs, weights, size) {
				slots[i] = serving[n].backend
			}
			return slots, true
		}
	}
	return arrange(had, serving, weights, units), false
}

// weigh returns how many slots each of those who serve gets, nil for one each, and how many these are.
func (p *Planner) weigh(policy *policy, serving []candidate) (weights []uint32, units int) {
	if policy.weights == nil || len(serving) == 0 {
		return nil, len(serving)
	}
	var groups []group
	member := map[clusterset.ClusterID]int{}
	for i := range serving {
		id := serving[i].cluster
		g, ok := member[id]
		if !ok {
			g = len(groups)
			member[id] = g
			groups = append(groups, group{weight: policy.weight(id)})
		}
		groups[g].size++
	}
	each := repeats(groups)
	weights = p.scratch.weights[:0]
	for i := range serving {
		w := each[member[serving[i].cluster]]
		weights = append(weights, w)
		units += int(w)
	}
	p.scratch.weights = weights
	return weights, units
}

// arrange puts each of want into as many slots as weights says, nil for one. Of what stands in had within
// these slots, as much as is still wanted stays where it is; the rest fills the gaps in order.
func arrange(had []*backend, want []candidate, weights []uint32, slots int) []*backend {
	if slots == 0 {
		return nil
	}
	table := make([]*backend, slots)
	for i := range want {
		want[i].backend.wanted = 1
		if weights != nil {
			want[i].backend.wanted = int32(weights[i])
		}
	}
	for i := range min(len(had), len(table)) {
		if b := had[i]; b != nil && b.wanted > 0 {
			table[i] = b
			b.wanted--
		}
	}
	gap := 0
	for i := range want {
		for b := want[i].backend; b.wanted > 0; b.wanted-- {
			for table[gap] != nil {
				gap++
			}
			table[gap] = b
		}
	}
	return table
}

// problem notes something that its owner should mend, once. Room may come with any Plan.
func (s *served) problem(r Reason, format string, args ...any) {
	if r == NoRoom {
		s.source = nil
	}
	p := Problem{s.name, r, fmt.Sprintf(format, args...)}
	if !slices.Contains(s.problems, p) {
		s.problems = append(s.problems, p)
	}
}
