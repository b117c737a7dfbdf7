package lb

import (
	"cmp"
	"fmt"
	"net/netip"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// State is the content of the maps, entry by entry. It can describe any content, also that of a half-finished update.
type State struct {
	Services  map[ServiceID]clusterset.ServiceName
	Clusters  map[ClusterIndex]clusterset.ClusterID
	Backends  map[BackendID]Backend
	Slots     map[Slot]BackendID
	Frontends map[Address]Frontend
	Ranges    map[netip.Prefix]bool // an address in a range that has no frontend is refused; the values are true
}

// Plan is a list of map writes. They are carried out step by step, in the order of [Steps]; within a step any order
// will do, so each step may go to the kernel as one batch.
type Plan struct {
	Services  Changes[ServiceID, clusterset.ServiceName]
	Clusters  Changes[ClusterIndex, clusterset.ClusterID]
	Backends  Changes[BackendID, Backend]
	Slots     Changes[Slot, BackendID]
	Frontends Changes[Address, Frontend]
	Ranges    Changes[netip.Prefix, bool]

	// StaleAffinities are removed from the clients' session affinity after all writes. They are no writes by
	// themselves.
	StaleAffinities []StaleAffinity
}

// StaleAffinity is a backend that a frontend with session affinity no longer uses and that still serves another
// frontend. Since the backend exists, the BPF programs cannot tell that the client must move on.
type StaleAffinity struct {
	Frontend FrontendID
	Backend  BackendID
}

// The tables. Each is one BPF map, under the map's name.
var (
	Services = &Table[ServiceID, clusterset.ServiceName]{
		Name: "services", compare: cmp.Compare[ServiceID],
		state: func(s *State) *map[ServiceID]clusterset.ServiceName { return &s.Services },
		plan:  func(p *Plan) *Changes[ServiceID, clusterset.ServiceName] { return &p.Services },
		limit: func(l *Limits) *int { return &l.Services },
		held:  (*Planner).heldServices, find: (*Audit).findService,
	}
	Clusters = &Table[ClusterIndex, clusterset.ClusterID]{
		Name: "clusters", compare: cmp.Compare[ClusterIndex],
		state: func(s *State) *map[ClusterIndex]clusterset.ClusterID { return &s.Clusters },
		plan:  func(p *Plan) *Changes[ClusterIndex, clusterset.ClusterID] { return &p.Clusters },
		held:  (*Planner).heldClusters, find: (*Audit).findCluster,
	}
	Backends = &Table[BackendID, Backend]{
		Name: "backends", compare: cmp.Compare[BackendID],
		state: func(s *State) *map[BackendID]Backend { return &s.Backends },
		plan:  func(p *Plan) *Changes[BackendID, Backend] { return &p.Backends },
		limit: func(l *Limits) *int { return &l.Backends },
		held:  (*Planner).heldBackends, find: (*Audit).findBackend,
	}
	Slots = &Table[Slot, BackendID]{
		Name: "slots", compare: Slot.Compare,
		state: func(s *State) *map[Slot]BackendID { return &s.Slots },
		plan:  func(p *Plan) *Changes[Slot, BackendID] { return &p.Slots },
		limit: func(l *Limits) *int { return &l.Slots },
		held:  (*Planner).heldSlots, find: (*Audit).findSlot,
	}
	Frontends = &Table[Address, Frontend]{
		Name: "frontends", compare: Address.Compare,
		state: func(s *State) *map[Address]Frontend { return &s.Frontends },
		plan:  func(p *Plan) *Changes[Address, Frontend] { return &p.Frontends },
		limit: func(l *Limits) *int { return &l.Frontends },
		held:  (*Planner).heldFrontends, find: (*Audit).findFrontend,
	}
	Ranges = &Table[netip.Prefix, bool]{
		Name: "ranges", compare: netip.Prefix.Compare,
		state:  func(s *State) *map[netip.Prefix]bool { return &s.Ranges },
		plan:   func(p *Plan) *Changes[netip.Prefix, bool] { return &p.Ranges },
		derive: func(in *Input) map[netip.Prefix]bool { return in.ranges() },
		line:   func(r netip.Prefix, _ bool) string { return fmt.Sprintf("RANGE %s", r) },
	}
)

// tables lists every table in the order in which a Plan puts entries; it deletes them in the reverse order.
//
// Every prefix of a Plan must be safe. Services and clusters come first: the programs count clients under their
// numbers. Then backends come before the slots that name them, slots before the frontend that counts them, and
// frontends before the range that refuses every other address. With slots written first, a client that connects
// between the two writes would be sent to a backend that does not exist yet. Deleting runs backwards: a frontend shrinks
// or goes before its slots, and a backend goes once no slot names it. Were its backend deleted first and the number
// given to a pod of another Service, a client would reach a stranger's pod.
func tables() []table {
	return []table{Services, Clusters, Backends, Slots, Frontends, Ranges}
}

// slotTable returns the backends of fe, in slot order. A missing slot or backend is the zero Address. A count beyond the
// number of all slots, which only another writer of the maps can have left, is cut to that number.
func (s State) slotTable(fe Frontend) []Address {
	t := make([]Address, min(int(fe.Count), len(s.Slots)))
	for i := range t {
		if id, ok := s.Slots[Slot{fe.ID, uint32(i)}]; ok {
			t[i] = s.Backends[id].Address
		}
	}
	return t
}
