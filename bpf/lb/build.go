package lb

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// candidate is an endpoint that can serve a frontend.
type candidate struct {
	address Address
	cluster clusterset.ClusterID
	rank    uint8 // by the Service's policy: the candidates of the lowest rank get clients
	backend *backend
}

// scratch is memory that is reused for each frontend.
type scratch struct {
	candidates []candidate
	serving    []candidate
	addrs      []Address
	weights    []uint32
	vips       []netip.Addr
}

// build makes the frontends of a Service, and plans the writes to entries that the maps do not hold yet.
func (p *Planner) build(in *Input, s *serviceState, svc *clusterset.Service) {
	s.stale, s.source = false, svc
	defer func() { p.setServiceID(s, len(s.frontends) > 0) }()
	if svc.Type != clusterset.ClusterSetIP {
		return
	}
	if s.waiting {
		p.refuse(in, s, svc)
		return
	}
	policy, faults := policyOf(policyFieldsOf(svc), svc.Annotations)
	for _, err := range faults {
		s.problem(InvalidAnnotation, "%s", err)
	}
	vips := p.admit(in, s, svc)
	for _, port := range svc.Ports {
		if port.Protocol == clusterset.SCTP {
			s.problem(UnsupportedProtocol, "port %d/%s is served by the packet path only: sockets are not translated for %s", port.Port, port.Protocol, port.Protocol)
		}
		for _, vip := range vips {
			if fe := p.claim(s, vip, port); fe != nil {
				p.setServiceID(s, true)
				p.fill(fe, in, &policy, svc, port)
			}
		}
	}
}

// refuse notes why a waiting Service is not served. A frontend that an earlier Service claims would not be its own in larger maps
// either, so its Problem names the claim.
func (p *Planner) refuse(in *Input, s *serviceState, svc *clusterset.Service) {
	own := false
	for _, vip := range p.admit(in, s, svc) {
		for _, port := range svc.Ports {
			if first := p.firstClaim(in, svc, vip, port); first != svc.Service {
				s.problem(VIPTaken, "%s belongs to %s", Address{netip.AddrPortFrom(vip, port.Port), port.Protocol}, first)
				s.contested = true
				continue
			}
			own = true
		}
	}
	if own {
		s.problem(NoRoom, "it is not served: the node has room for %d combinations of VIP, port and protocol, and it is among the youngest services of the cluster that uses most of them; export fewer of them", p.limits.Frontends)
	}
}

// firstClaim returns the first Service, in the order in which Plan builds them, that may claim a frontend of a waiting one.
func (p *Planner) firstClaim(in *Input, svc *clusterset.Service, vip netip.Addr, port clusterset.Port) clusterset.ServiceName {
	for _, other := range p.claimants[vip] {
		asks := slices.ContainsFunc(other.Ports, func(q clusterset.Port) bool { return q.Port == port.Port && q.Protocol == port.Protocol })
		if asks && in.VIPs.judge(other.Service, vip) == (verdict{}) {
			return other.Service
		}
	}
	return svc.Service
}

// admit returns the addresses of svc that may be VIPs, in p.scratch.
func (p *Planner) admit(in *Input, s *serviceState, svc *clusterset.Service) []netip.Addr {
	vips := p.scratch.vips[:0]
	for _, ip := range svc.IPs {
		ip = ip.Unmap()
		if is := in.VIPs.judge(s.name, ip); is != (verdict{}) {
			s.problem(is.reason, "%s", in.VIPs.explain(ip, is))
			continue
		}
		vips = append(vips, ip)
	}
	p.scratch.vips = vips
	return vips
}

// claim gives s the frontend of a VIP and port, and returns it; nil when s cannot have it.
func (p *Planner) claim(s *serviceState, vip netip.Addr, port clusterset.Port) *frontend {
	if !vip.IsValid() || vip.IsUnspecified() || port.Port == 0 {
		s.problem(InvalidVIP, "%s port %d/%s is not an address that clients can connect to", vip, port.Port, port.Protocol)
		return nil
	}
	a := Address{netip.AddrPortFrom(vip, port.Port), port.Protocol}
	fe := p.frontend(a)
	if fe == nil {
		s.problem(NoRoom, "%s is not served: the node has room for %d combinations of VIP, port and protocol; export fewer of them", a, p.limits.Frontends)
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

// fill selects the backends of fe, and plans the writes of its slots and of fe itself.
func (p *Planner) fill(fe *frontend, in *Input, policy *policy, svc *clusterset.Service, port clusterset.Port) {
	p.gather(fe, in, policy, svc, port)
	all := p.assignBackends(fe)
	serving := p.attach(fe, all)
	table, isMaglev := p.fitTable(fe, policy, serving)
	p.putTable(fe, table)
	if policy.affinity > 0 {
		p.findStaleAffinities(fe, table)
	}
	fe.table = table
	if len(table) == len(all) && len(serving) == len(all) && !isMaglev {
		fe.backends = table // each backend has one slot: share the memory
	}
	value := Frontend{ID: fe.value.ID, Count: uint32(len(table)), Service: fe.owner.id, Affinity: policy.affinity, Maglev: isMaglev}
	if !fe.held || fe.value != value {
		p.plan.Frontends.put(fe.address, value)
	}
	fe.held, fe.value = true, value
}

// assignBackends finds the backend of each gathered candidate, and returns the candidates that there is room for.
func (p *Planner) assignBackends(fe *frontend) []candidate {
	for i := range p.scratch.candidates {
		c := &p.scratch.candidates[i]
		c.backend = p.backend(keyOf(c.address, p.clusterIndex(fe.owner, c.cluster)))
	}
	all := slices.DeleteFunc(p.scratch.candidates, func(c candidate) bool { return c.backend == nil })
	if len(all) < len(p.scratch.candidates) {
		fe.owner.problem(NoRoom, "endpoints of %s are left out: the node has room for %d backends; export fewer of them", fe.address, p.limits.Backends)
	}
	return all
}

// attach makes all of the candidates backends of fe, and returns those that get clients: the candidates of the lowest
// rank, unless that rank is drained.
func (p *Planner) attach(fe *frontend, all []candidate) []candidate {
	best := rankDrained
	for i := range all {
		best = min(best, all[i].rank)
	}
	serving := p.scratch.serving[:0]
	fe.backends = make([]*backend, len(all))
	for i := range all {
		c := &all[i]
		fe.backends[i] = c.backend
		c.backend.frontends++
		p.touch(c.backend)
		if c.rank == best && best < rankDrained {
			serving = append(serving, *c)
		}
	}
	p.scratch.serving = serving
	return serving
}

// fitTable returns the slots of fe. Where the map has no room for all of them, the table is smaller and ignores weights
// and Maglev.
func (p *Planner) fitTable(fe *frontend, policy *policy, serving []candidate) (table []*backend, isMaglev bool) {
	table, isMaglev = p.table(fe.table, policy, serving)
	if reserve(&p.used.Slots, max(0, len(table)-len(fe.table)), p.limits.Slots) {
		return table, isMaglev
	}
	fe.owner.problem(NoRoom, "%s has a smaller table than it asks for: the node has room for %d slots; let fewer Services ask for weights or Maglev, see the annotation %s",
		fe.address, p.limits.Slots, AnnotationBalancer)
	room := len(fe.table) + max(0, p.limits.Slots-p.used.Slots)
	few := serving[:min(len(serving), room)]
	table = arrange(fe.table, few, nil, len(few))
	p.used.Slots += max(0, len(table)-len(fe.table))
	return table, false
}

// putTable plans the writes that turn the slots of fe into table.
func (p *Planner) putTable(fe *frontend, table []*backend) {
	for i, b := range table {
		b.slots++
		if i >= len(fe.table) || fe.table[i] != b {
			p.putSlot(Slot{fe.value.ID, uint32(i)}, b)
		}
	}
	p.deleteSlots(fe, len(table))
}

// putSlot makes k lead to b. An orphan slot that a half-finished update left may do so already.
func (p *Planner) putSlot(k Slot, b *backend) {
	id, orphan := p.orphanSlots[k]
	if orphan {
		delete(p.orphanSlots, k)
		p.used.Slots-- // it was counted as an orphan
	}
	if !orphan || id != b.id {
		p.plan.Slots.put(k, b.id)
	}
}

// findStaleAffinities notes the backends that fe loses when its slots become table.
func (p *Planner) findStaleAffinities(fe *frontend, table []*backend) {
	for _, b := range table {
		b.marked = true
	}
	for _, b := range fe.table {
		if b != nil && !b.marked {
			b.marked = true
			p.staleAffinities = append(p.staleAffinities, staleAffinity{fe.value.ID, b})
		}
	}
	for _, b := range fe.table {
		if b != nil {
			b.marked = false
		}
	}
	for _, b := range table {
		b.marked = false
	}
}

// gather collects in p.scratch the endpoints that can serve port of svc at fe, sorted by address, each once.
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
				policy.local && !in.inTier(tierNode, slice, e) {
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
				cluster: slice.Cluster, rank: policy.rank(in, slice, e),
			})
		}
	}
	// An endpoint that moves from one slice to another is in both for a while; the better rank counts.
	slices.SortStableFunc(found, func(a, b candidate) int {
		if c := a.address.Compare(b.address); c != 0 {
			return c
		}
		return int(a.rank) - int(b.rank)
	})
	p.scratch.candidates = slices.CompactFunc(found, func(a, b candidate) bool { return a.address == b.address })
}

// table puts the serving candidates, sorted by address, into slots; current is what the slots hold now.
func (p *Planner) table(current []*backend, policy *policy, serving []candidate) (slots []*backend, isMaglev bool) {
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
	return arrange(current, serving, weights, units), false
}

// weigh returns how many slots each serving candidate gets, nil for one each, and the number of all these slots.
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
	var each []uint32
	if policy.groups == nil {
		each = slotsPerBackend(groups)
	} else {
		each = slotsByWeight(groups, policy.shares(groups, member))
	}
	weights = p.scratch.weights[:0]
	for i := range serving {
		w := each[member[serving[i].cluster]]
		weights = append(weights, w)
		units += int(w)
	}
	p.scratch.weights = weights
	return weights, units
}

// arrange puts each of want into as many slots as weights says, or one if weights is nil. Backends of current that are
// still wanted keep their slots; the others fill the gaps in order.
func arrange(current []*backend, want []candidate, weights []uint32, slots int) []*backend {
	if slots == 0 {
		return nil
	}
	table := make([]*backend, slots)
	for i := range want {
		want[i].backend.missing = 1
		if weights != nil {
			want[i].backend.missing = int32(weights[i])
		}
	}
	for i := range min(len(current), len(table)) {
		if b := current[i]; b != nil && b.missing > 0 {
			table[i] = b
			b.missing--
		}
	}
	gap := 0
	for i := range want {
		for b := want[i].backend; b.missing > 0; b.missing-- {
			for table[gap] != nil {
				gap++
			}
			table[gap] = b
		}
	}
	return table
}

// problem notes a Problem of s, once. A Service without room is rebuilt in each Plan, for any Plan may free some.
func (s *serviceState) problem(r Reason, format string, args ...any) {
	if r == NoRoom {
		s.source = nil
	}
	p := Problem{s.name, r, fmt.Sprintf(format, args...)}
	if !slices.Contains(s.problems, p) {
		s.problems = append(s.problems, p)
	}
}
