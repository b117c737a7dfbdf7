package offers

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// outsideAddrs is how many addresses of one family a host name has: a DNS response with them fits into 512 bytes.
const outsideAddrs = 16

// Outside is how clients outside of the clusters reach a federated Service: the addresses of its host name, and at which port numbers.
type Outside struct {
	Addrs []netip.Addr // sorted; at most outsideAddrs of each family
	Ports []Target     // the ports of the federated Service that have another number at Addrs; Number 0: they are not served there
}

// Reach returns the Outside of a federated Service with ports: the addresses of gateways that balance it, if there are any, else ready
// endpoints of its members, as other clusters get them. A gateway's port is that of the
// same name; for a Service of one port it may have another name.
//
// All addresses of a host name have to serve a port at one number. So of endpoints that serve the ports in different ways, those count
// that serve most ports at the number of the federated Service, then those that serve most ports, then those of the cluster with the first
// ID: how many there are does not count, so that no single endpoint leads all clients to other ports. From each cluster comes the same number of addresses, as far as it has them, and an address stays while its endpoint does.
func Reach(ports []clusterset.Port, gateways, members []Offer) Outside {
	ways := map[string]*way{}
	for _, o := range gateways {
		for _, g := range o.Groups {
			collect(ways, ports, o.Cluster, g, byName(ports))
		}
	}
	if len(ways) == 0 {
		for _, o := range members {
			for _, g := range o.Groups {
				collect(ways, ports, o.Cluster, g, byNumber)
			}
		}
	}
	if len(ways) == 0 {
		return Outside{}
	}
	best := slices.MinFunc(slices.Collect(maps.Values(ways)), func(a, b *way) int {
		return cmp.Or(cmp.Compare(b.same, a.same), cmp.Compare(b.served, a.served), cmp.Compare(a.first(), b.first()), strings.Compare(a.key, b.key))
	})
	return Outside{Addrs: best.pick(), Ports: best.ports}
}

// way is one way to serve the ports, with the addresses that do.
type way struct {
	key          string
	same, served int // how many ports are served at their own number, and at all
	ports        []Target
	addrs        map[clusterset.ClusterID][]netip.Addr
}

// byNumber returns the index of the target of a member Service that serves a port of the federated one, -1 without one.
func byNumber(targets []Target, p clusterset.Port) int {
	return slices.IndexFunc(targets, func(t Target) bool { return numberOf(t.Port) == numberOf(p) })
}

// byName returns a function like byNumber for the targets of a gateway: the one of the same name, or the first one if the federated Service
// has no other port.
func byName(ports []clusterset.Port) func([]Target, clusterset.Port) int {
	return func(targets []Target, p clusterset.Port) int {
		i := slices.IndexFunc(targets, func(t Target) bool { return t.Port.Protocol == p.Protocol && t.Port.Name == p.Name })
		if i < 0 && len(ports) == 1 {
			i = slices.IndexFunc(targets, func(t Target) bool { return t.Port.Protocol == p.Protocol })
		}
		return i
	}
}

// collect adds the ready endpoints of a group to the way in which it serves ports.
func collect(ways map[string]*way, ports []clusterset.Port, cluster clusterset.ClusterID, g Group, find func([]Target, clusterset.Port) int) {
	w := way{addrs: map[clusterset.ClusterID][]netip.Addr{}}
	for _, p := range ports {
		number := int32(0)
		if i := find(g.Targets, p); i >= 0 {
			number = g.Targets[i].Number
			w.served++
		}
		if number == int32(p.Port) {
			w.same++
			continue
		}
		w.ports = append(w.ports, Target{Port: p, Number: number})
		w.key += fmt.Sprintf("%d/%s=%d ", p.Port, p.Protocol, number)
	}
	if w.served == 0 {
		return
	}
	for i := range g.Endpoints {
		a, err := netip.ParseAddr(g.Endpoints[i].Addresses[0])
		if err != nil || !ready(g.Endpoints[i]) {
			continue
		}
		if ways[w.key] == nil {
			ways[w.key] = &w
		}
		to := ways[w.key].addrs
		to[cluster] = append(to[cluster], a)
	}
}

// first returns the first of the clusters that have addresses.
func (w *way) first() clusterset.ClusterID { return slices.Min(slices.Collect(maps.Keys(w.addrs))) }

// pick returns up to outsideAddrs addresses of each family, in turn the lowest one of each cluster, sorted.
func (w *way) pick() (picked []netip.Addr) {
	for _, family := range []clusterset.Family{clusterset.IPv4, clusterset.IPv6} {
		var queues [][]netip.Addr
		for _, cluster := range slices.Sorted(maps.Keys(w.addrs)) {
			q := slices.DeleteFunc(slices.Clone(w.addrs[cluster]), func(a netip.Addr) bool { return clusterset.FamilyOf(a) != family })
			slices.SortFunc(q, netip.Addr.Compare)
			queues = append(queues, slices.Compact(q))
		}
		var chosen []netip.Addr
		for turn := 0; len(chosen) < outsideAddrs; turn++ {
			more := false
			for _, q := range queues {
				if turn < len(q) && len(chosen) < outsideAddrs {
					chosen, more = append(chosen, q[turn]), true
				}
			}
			if !more {
				break
			}
		}
		picked = append(picked, chosen...)
	}
	slices.SortFunc(picked, netip.Addr.Compare)
	return slices.Compact(picked)
}

// Keep returns the addresses of o and those of former ones that o lacks, as far as there is room for them, sorted.
func (o Outside) Keep(former []netip.Addr) []netip.Addr {
	kept, room := slices.Clone(o.Addrs), map[clusterset.Family]int{clusterset.IPv4: outsideAddrs, clusterset.IPv6: outsideAddrs}
	for _, a := range o.Addrs {
		room[clusterset.FamilyOf(a)]--
	}
	for _, a := range former {
		if f := clusterset.FamilyOf(a); room[f] > 0 && !slices.Contains(kept, a) {
			kept = append(kept, a)
			room[f]--
		}
	}
	slices.SortFunc(kept, netip.Addr.Compare)
	return kept
}

// Addresses returns the addresses of the offers' endpoints.
func Addresses(all []Offer) map[netip.Addr]bool {
	addrs := map[netip.Addr]bool{}
	for _, o := range all {
		for _, g := range o.Groups {
			for i := range g.Endpoints {
				if a, err := netip.ParseAddr(g.Endpoints[i].Addresses[0]); err == nil {
					addrs[a] = true
				}
			}
		}
	}
	return addrs
}
