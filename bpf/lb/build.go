package lb

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Reason classifies a Problem for conditions and metrics.
type Reason string

// The reasons of a Problem.
const (
	UnsupportedProtocol Reason = "UnsupportedProtocol" // the socket path speaks TCP and UDP
	InvalidVIP          Reason = "InvalidVIP"          // an address or port that cannot be a frontend
	VIPTaken            Reason = "VIPTaken"            // another Service has this VIP, port and protocol
	InvalidEndpoint     Reason = "InvalidEndpoint"     // an address or port that cannot be a backend
)

// Problem says what of a Service could not be programmed and why. It is the user's to mend, not an
// error: everything else is programmed.
type Problem struct {
	Service clusterset.ServiceName
	Reason  Reason
	Message string // one sentence, the same for the same problem
}

// String returns "namespace/name: Reason: message".
func (p Problem) String() string { return fmt.Sprintf("%s: %s: %s", p.Service, p.Reason, p.Message) }

// Build returns what the maps should hold for snap: a frontend for each VIP, port and protocol of each
// import, over the first address of each ready endpoint of the VIP's family whose slice has a port of
// the same name and protocol. A Service without a ready endpoint has a frontend without slots, which
// refuses.
//
// Frontends and backends that have holds already keep their numbers, and backends their slots, so that
// an unchanged Service costs no write and one changed endpoint a few. New numbers come from ids. Build
// keeps neither argument; equal snap, have and ids give equal results.
func Build(snap *clusterset.Snapshot, have State, ids *IDs) (State, []Problem) {
	ids.adopt(have)
	b := builder{have: have, want: NewState(), ids: ids, owner: map[Address]clusterset.ServiceName{}}
	b.adoptBackends()
	b.adoptFrontends()
	for i := range snap.Services {
		b.addService(&snap.Services[i])
	}
	return b.want, b.problems
}

// builder holds what one Build needs to look up.
type builder struct {
	have, want  State
	ids         *IDs
	backendIDs  map[Address]BackendID  // of have, then also the new ones
	frontendIDs map[Address]FrontendID // of have
	usedFE      map[FrontendID]bool    // every number in frontendIDs or given by this Build
	owner       map[Address]clusterset.ServiceName
	problems    []Problem
}

// adoptBackends indexes have's backends. Should two numbers name one address, the lower one stays.
func (b *builder) adoptBackends() {
	b.backendIDs = make(map[Address]BackendID, len(b.have.Backends))
	for id, be := range b.have.Backends {
		if old, ok := b.backendIDs[be.Address]; id != 0 && (!ok || id < old) {
			b.backendIDs[be.Address] = id
		}
	}
}

// adoptFrontends indexes have's frontends. Should two frontends share a number, the first in order
// keeps it and the other gets a new one.
func (b *builder) adoptFrontends() {
	b.frontendIDs = make(map[Address]FrontendID, len(b.have.Frontends))
	b.usedFE = make(map[FrontendID]bool, len(b.have.Frontends))
	for _, a := range slices.SortedFunc(maps.Keys(b.have.Frontends), Address.Compare) {
		if id := b.have.Frontends[a].ID; id != 0 && !b.usedFE[id] {
			b.frontendIDs[a], b.usedFE[id] = id, true
		}
	}
}

func (b *builder) addService(svc *clusterset.Service) {
	if svc.Type != clusterset.ClusterSetIP {
		return
	}
	for _, p := range svc.Ports {
		if p.Protocol != clusterset.TCP && p.Protocol != clusterset.UDP {
			b.problem(svc, UnsupportedProtocol, "port %d/%s is not programmed: sockets are translated for TCP and UDP only", p.Port, p.Protocol)
			continue
		}
		for _, vip := range svc.IPs {
			b.addFrontend(svc, vip.Unmap(), p)
		}
	}
}

func (b *builder) addFrontend(svc *clusterset.Service, vip netip.Addr, p clusterset.Port) {
	if !vip.IsValid() || vip.IsUnspecified() || p.Port == 0 {
		b.problem(svc, InvalidVIP, "%s port %d/%s is no address a client can connect to", vip, p.Port, p.Protocol)
		return
	}
	a := Address{netip.AddrPortFrom(vip, p.Port), p.Protocol}
	if other, ok := b.owner[a]; ok {
		b.problem(svc, VIPTaken, "%s belongs to %s", a, other)
		return
	}
	b.owner[a] = svc.Service

	var had []Address
	id, known := b.frontendIDs[a]
	if known {
		had = b.have.table(b.have.Frontends[a])
	} else {
		id = FrontendID(next(&b.ids.frontend, func(n uint32) bool { return b.usedFE[FrontendID(n)] }))
		b.usedFE[id] = true
	}
	table := arrange(had, b.backendsOf(svc, clusterset.FamilyOf(vip), p))
	for i, be := range table {
		b.want.Slots[Slot{id, uint32(i)}] = b.backendID(be)
	}
	b.want.Frontends[a] = Frontend{ID: id, Count: uint32(len(table))}
}

// backendsOf returns where port p of svc is served in family f, sorted, each once.
func (b *builder) backendsOf(svc *clusterset.Service, f clusterset.Family, p clusterset.Port) []Address {
	var found []Address
	for _, s := range svc.Slices {
		if s.Family != f {
			continue
		}
		i := slices.IndexFunc(s.Ports, func(ep clusterset.EndpointPort) bool {
			return ep.Name == p.Name && ep.Protocol == p.Protocol
		})
		if i < 0 {
			continue
		}
		for _, e := range s.Endpoints {
			if !e.Ready || len(e.Addrs) == 0 {
				continue
			}
			addr := e.Addrs[0].Unmap()
			if !addr.IsValid() || clusterset.FamilyOf(addr) != f || addr.IsUnspecified() || s.Ports[i].Port == 0 {
				b.problem(svc, InvalidEndpoint, "endpoint %s port %d/%s of cluster %s cannot take %s traffic",
					addr, s.Ports[i].Port, p.Protocol, s.Cluster, f)
				continue
			}
			found = append(found, Address{netip.AddrPortFrom(addr.WithZone(""), s.Ports[i].Port), p.Protocol})
		}
	}
	slices.SortFunc(found, Address.Compare)
	return slices.Compact(found)
}

// backendID returns the number of be, and writes be into want.
func (b *builder) backendID(be Address) BackendID {
	id, ok := b.backendIDs[be]
	if !ok {
		id = BackendID(next(&b.ids.backend, func(n uint32) bool {
			_, had := b.have.Backends[BackendID(n)]
			_, given := b.want.Backends[BackendID(n)]
			return had || given
		}))
		b.backendIDs[be] = id
	}
	b.want.Backends[id] = Backend{Address: be}
	return id
}

func (b *builder) problem(svc *clusterset.Service, r Reason, format string, args ...any) {
	p := Problem{svc.Service, r, fmt.Sprintf(format, args...)}
	if !slices.Contains(b.problems, p) {
		b.problems = append(b.problems, p)
	}
}

// arrange puts want, which is sorted and without repetition, into as many slots. What stands in had
// within these slots stays where it is; the rest fills the gaps in order.
func arrange(had, want []Address) []Address {
	table := make([]Address, len(want))
	placed := make(map[Address]bool, len(want))
	for _, a := range want {
		placed[a] = false
	}
	for i := range min(len(had), len(table)) {
		if done, wanted := placed[had[i]]; wanted && !done {
			table[i], placed[had[i]] = had[i], true
		}
	}
	gap := 0
	for _, a := range want {
		if placed[a] {
			continue
		}
		for table[gap].AddrPort.IsValid() {
			gap++
		}
		table[gap] = a
	}
	return table
}
