package lb

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// shareFrontends returns the Services of a Snapshot that wait because the maps have no room for the frontends of all. The
// members share the room: while it does not suffice, the youngest Service of the member that uses most waits. For example,
// of 65,536 frontends member "east" asks for 66,000 and "west" for 1,000; then some of east's youngest Services wait, and
// west's are all served, whichever came first. The result depends on the Snapshot alone, so a restart of the agent changes
// nothing. It is nil when there is room for all.
//
// A Service of several members counts for each of them with an equal share. A frontend that several Services claim counts for
// each, because it is served by another one while the first one waits.
func shareFrontends(snap *clusterset.Snapshot, limit int) map[clusterset.ServiceName]bool {
	total := 0
	for i := range snap.Services {
		total += frontendsOf(&snap.Services[i])
	}
	if limit <= 0 || total <= limit {
		return nil
	}
	authors := authorsOf(snap)
	waiting := map[clusterset.ServiceName]bool{}
	for total > limit {
		most := slices.MaxFunc(authors, func(a, b *author) int {
			return cmp.Or(cmp.Compare(a.used, b.used), cmp.Compare(a.id, b.id))
		})
		youngest := most.services[len(most.services)-1]
		most.services = most.services[:len(most.services)-1]
		if waiting[youngest.Service] {
			continue
		}
		waiting[youngest.Service] = true
		n := frontendsOf(youngest)
		total -= n
		for _, a := range authors {
			if slices.Contains(youngest.Clusters, a.id) || len(youngest.Clusters) == 0 && a.id == "" {
				a.used -= float64(n) / float64(max(1, len(youngest.Clusters)))
			}
		}
	}
	return waiting
}

// claimantsOf returns the Services that ask for each VIP of the waiting ones, in the order of the Snapshot.
func claimantsOf(snap *clusterset.Snapshot, waiting map[clusterset.ServiceName]bool) map[netip.Addr][]*clusterset.Service {
	if len(waiting) == 0 {
		return nil
	}
	claimants := map[netip.Addr][]*clusterset.Service{}
	for i := range snap.Services {
		if svc := &snap.Services[i]; waiting[svc.Service] {
			for _, ip := range svc.IPs {
				claimants[ip.Unmap()] = nil
			}
		}
	}
	for i := range snap.Services {
		svc := &snap.Services[i]
		for _, ip := range svc.IPs {
			if all, ok := claimants[ip.Unmap()]; ok && svc.Type == clusterset.ClusterSetIP {
				claimants[ip.Unmap()] = append(all, svc)
			}
		}
	}
	return claimants
}

// author is a member whose Services need frontends.
type author struct {
	id       clusterset.ClusterID
	used     float64               // frontends
	services []*clusterset.Service // the oldest first
}

// authorsOf returns the members of a Snapshot that need frontends, sorted by id. Services of no member belong to "".
func authorsOf(snap *clusterset.Snapshot) []*author {
	byID := map[clusterset.ClusterID]*author{}
	var all []*author
	for i := range snap.Services {
		svc := &snap.Services[i]
		n := frontendsOf(svc)
		if n == 0 {
			continue
		}
		ids := svc.Clusters
		if len(ids) == 0 {
			ids = []clusterset.ClusterID{""}
		}
		for _, id := range ids {
			a := byID[id]
			if a == nil {
				a = &author{id: id}
				byID[id] = a
				all = append(all, a)
			}
			a.used += float64(n) / float64(len(ids))
			a.services = append(a.services, svc)
		}
	}
	for _, a := range all {
		slices.SortFunc(a.services, func(x, y *clusterset.Service) int {
			return cmp.Or(x.Created.Compare(y.Created), x.Service.Compare(y.Service))
		})
	}
	slices.SortFunc(all, func(x, y *author) int { return cmp.Compare(x.id, y.id) })
	return all
}

// frontendsOf returns how many frontends a Service asks for.
func frontendsOf(svc *clusterset.Service) int {
	if svc.Type != clusterset.ClusterSetIP {
		return 0
	}
	return len(svc.IPs) * len(svc.Ports)
}
