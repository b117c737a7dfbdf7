package services

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
)

// vips allocates ClusterSetIPs for federated Services. There is no broker that stores them: the ServiceImports in all members
// are the only record, and every leader that reads them all reaches the same result.
//
//   - A Service has the same address in all members. If they differ, the address of most members wins, and the lowest of
//     several such addresses. One member alone therefore moves no address.
//   - An address counts only if it lies in the ranges and belongs to no Service, node or pod of a member. Otherwise a child that
//     writes an import with the API server's address, for a name that is new, would take the API server away everywhere.
//   - The address that a Service has in most of the members stays, even if another member says that it is its own. That one
//     alone does not get it.
//   - A new Service takes the address that a hash of its name selects, or the next one that no import of any member has.
//   - Two leaders that did not see each other may give one address to two Services. The older import keeps it, or the lower
//     name if both are as old; the other Service gets a new address.
type vips struct {
	ranges []netip.Prefix // at most one of each family; empty without ClusterSetIPs

	owners sync.Map // owner: Services and nodes of members that may have addresses in the ranges

	mu     sync.Mutex
	chosen map[clusterset.ServiceName][]netip.Addr // by this process; the cache may not have them yet
}

func (v *vips) on() bool { return len(v.ranges) > 0 }

// forget frees the addresses that this process chose for a Service.
func (v *vips) forget(name clusterset.ServiceName) {
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.chosen, name)
}

// holder is the Service that holds an address.
type holder struct {
	name  clusterset.ServiceName
	since time.Time
}

// before reports whether h keeps an address that o has too.
func (h holder) before(o holder) bool {
	if !h.since.Equal(o.since) {
		return h.since.Before(o.since)
	}
	return h.name.Compare(o.name) < 0
}

// of returns the addresses of the Service of s, one for each range. It reads the imports of all Services only if into has no
// import of the Service, or the members' imports differ.
func (v *vips) of(ctx context.Context, s *snapshot, into reconcile.Member, all []reconcile.Member) ([]netip.Addr, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	pool, err := clusterset.NewIPPool(v.ranges...)
	if err != nil {
		return nil, err
	}
	own, agreed, err := v.importsOf(ctx, s, into, all)
	if err != nil {
		return nil, err
	}
	if agreed && len(own) == len(v.ranges) {
		return own, nil
	}
	if len(own) == 0 {
		own = slices.DeleteFunc(slices.Clone(v.chosen[s.name]), func(a netip.Addr) bool { return v.fault(a, s.blocked) != "" })
	}
	holders, err := v.holders(ctx, s.blocked, all)
	if err != nil {
		return nil, err
	}
	for a, h := range holders {
		if h.name != s.name {
			// The pool refuses addresses outside of its ranges. No other Service holds this one.
			_ = pool.Reserve(h.name, a)
		}
	}
	var addrs []netip.Addr
	for _, f := range pool.Families() {
		if i := slices.IndexFunc(own, func(a netip.Addr) bool { return clusterset.FamilyOf(a) == f && holders[a].name == s.name }); i >= 0 {
			addrs = append(addrs, own[i]) // the first counts, as they are sorted
			continue
		}
		given, err := v.allocate(pool, s, f)
		if err != nil {
			return nil, err
		}
		addrs = append(addrs, given)
	}
	if v.chosen == nil {
		v.chosen = map[clusterset.ServiceName][]netip.Addr{}
	}
	v.chosen[s.name] = addrs
	return addrs, nil
}

// allocate takes an address of a family from pool that belongs to no member.
func (v *vips) allocate(pool *clusterset.IPPool, s *snapshot, f clusterset.Family) (netip.Addr, error) {
	owned := ""
	for {
		given, err := pool.Allocate(s.name, []clusterset.Family{f})
		if err != nil {
			return netip.Addr{}, fmt.Errorf("%w%s; give the Federation's spec.clusterSetIP.ranges a larger range", err, owned)
		}
		if v.fault(given[0], s.blocked) == "" {
			return given[0], nil
		}
		if owner := s.blocked.owner(given[0]); owner != "" {
			owned = fmt.Sprintf(" (%s belongs to %s)", given[0], owner)
		}
		pool.Release(s.name)
		if err := pool.Reserve(clusterset.ServiceName{}, given[0]); err != nil { // no Service has the empty name
			return netip.Addr{}, err
		}
	}
}

// importsOf returns the valid addresses of our ServiceImports of the Service of s in all members, ordered by the number of
// members with the address and then by address. Other addresses are not believed: a ClusterSetIP outside of the ranges would
// take traffic from whatever has that address. agreed reports whether into's import has them all and no others.
func (v *vips) importsOf(ctx context.Context, s *snapshot, into reconcile.Member, all []reconcile.Member) (addrs []netip.Addr, agreed bool, err error) {
	here, clean := 0, true
	members := map[netip.Addr]int{} // with that address
	families := map[clusterset.Family]int{}
	for _, m := range all {
		if !m.Synced() {
			continue
		}
		si, err := ourImport(ctx, m, s.name)
		if err != nil {
			return nil, false, err
		}
		ips := slices.Compact(parseIPs(si))
		valid := slices.DeleteFunc(slices.Clone(ips), func(a netip.Addr) bool { return v.fault(a, s.blocked) != "" })
		for _, a := range valid {
			if members[a]++; members[a] == 1 {
				families[clusterset.FamilyOf(a)]++
			}
		}
		if m.ID() == into.ID() {
			here, clean = len(valid), len(valid) == len(ips)
		}
	}
	for _, n := range families {
		clean = clean && n == 1
	}
	addrs = slices.SortedFunc(maps.Keys(members), func(a, b netip.Addr) int {
		return cmp.Or(cmp.Compare(members[b], members[a]), a.Compare(b))
	})
	return addrs, clean && here > 0 && here == len(members), nil
}

// holders returns the holder of each address, including addresses that this process chose and no import has yet. Other addresses
// than those of the federation do not count.
func (v *vips) holders(ctx context.Context, own ownAddresses, all []reconcile.Member) (map[netip.Addr]holder, error) {
	created := map[clusterset.ServiceName]time.Time{} // of the oldest import
	written := map[clusterset.ServiceName]bool{}
	claims := map[netip.Addr][]clusterset.ServiceName{}
	for _, m := range all {
		if !m.Synced() {
			continue
		}
		var list v1beta1.ServiceImportList
		if err := m.List(ctx, &list); errors.Is(err, objectcache.ErrKindMissing) {
			continue
		} else if err != nil {
			return nil, fmt.Errorf("read service imports in cluster %s: %w", m.ID(), err)
		}
		for i := range list.Items {
			si := &list.Items[i]
			name := clusterset.ServiceName{Namespace: si.Namespace, Name: si.Name}
			if at, ok := created[name]; !ok || si.CreationTimestamp.Time.Before(at) {
				created[name] = si.CreationTimestamp.Time
			}
			for _, a := range parseIPs(si) {
				if v.fault(a, own) != "" {
					continue
				}
				written[name] = true
				claims[a] = append(claims[a], name)
			}
		}
	}
	for name, addrs := range v.chosen {
		if !written[name] {
			if _, imported := created[name]; !imported {
				created[name] = time.Now()
			}
			for _, a := range addrs {
				claims[a] = append(claims[a], name)
			}
		}
	}
	holders := map[netip.Addr]holder{}
	for a, names := range claims {
		for _, name := range names {
			h := holder{name, created[name]}
			if best, ok := holders[a]; !ok || h.before(best) {
				holders[a] = h
			}
		}
	}
	return holders, nil
}

func parseIPs(si *v1beta1.ServiceImport) []netip.Addr {
	var addrs []netip.Addr
	for _, text := range si.Spec.IPs {
		if a, err := netip.ParseAddr(text); err == nil {
			addrs = append(addrs, a.Unmap())
		}
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	return addrs
}
