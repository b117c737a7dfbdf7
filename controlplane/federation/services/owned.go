package services

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/federation/services/internal/offers"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
)

// ownAddresses are addresses of members themselves that lie in the ranges of ClusterSetIPs, as they matter to one Service. An
// administrator who chose ranges apart from all clusters' addresses has none.
type ownAddresses []ownAddress

// ownAddress is a member's claim that addresses are its own.
type ownAddress struct {
	netip.Prefix
	cluster clusterset.ClusterID
	owner   string // a text
	// settled are ClusterSetIPs that the Service has in most of the other members. No claim of one member moves them.
	settled []netip.Addr
}

// owner returns the owner of a, "" if no member has it, or it is settled.
func (o ownAddresses) owner(a netip.Addr) string {
	for _, claim := range o {
		if claim.Contains(a) && !slices.Contains(claim.settled, a) {
			return claim.owner
		}
	}
	return ""
}

// withhold returns addrs without those that belong to a cluster itself, which must not get them as ClusterSetIPs, and the
// owner of the first of these.
func (o ownAddresses) withhold(cluster clusterset.ClusterID, addrs []netip.Addr) (rest []netip.Addr, owner string) {
	for _, a := range addrs {
		i := slices.IndexFunc(o, func(claim ownAddress) bool { return claim.cluster == cluster && claim.Contains(a) })
		if i < 0 {
			rest = append(rest, a)
		} else if owner == "" {
			owner = fmt.Sprintf("%s belongs to %s", a, o[i].owner)
		}
	}
	return rest, owner
}

// owner names a Service or a node that had addresses in the ranges when it was last seen.
type owner struct {
	cluster clusterset.ClusterID
	node    bool
	key     client.ObjectKey
}

// addressesOf returns the addresses of a Service or a node that lie in the ranges, or overlap them. Of a Service these are its
// ClusterIPs alone: users choose all other addresses of their Services, and could block any ClusterSetIP by one.
func (v *vips) addressesOf(o client.Object) []netip.Prefix {
	if !v.on() {
		return nil
	}
	var texts, cidrs []string
	switch o := o.(type) {
	case *corev1.Service:
		texts = o.Spec.ClusterIPs
	case *corev1.Node:
		cidrs = o.Spec.PodCIDRs
		for _, a := range o.Status.Addresses {
			texts = append(texts, a.Address)
		}
	}
	var all []netip.Prefix
	for _, text := range texts {
		if a, err := netip.ParseAddr(text); err == nil {
			all = append(all, netip.PrefixFrom(a.Unmap(), a.Unmap().BitLen()))
		}
	}
	for _, text := range cidrs {
		if p, err := netip.ParsePrefix(text); err == nil {
			all = append(all, p)
		}
	}
	return slices.DeleteFunc(all, func(p netip.Prefix) bool { return !slices.ContainsFunc(v.ranges, p.Overlaps) })
}

// note records a Service or a node of a member that has addresses in the ranges.
func (v *vips) note(cluster clusterset.ClusterID, o client.Object) {
	if len(v.addressesOf(o)) > 0 {
		_, node := o.(*corev1.Node)
		v.owners.Store(owner{cluster, node, client.ObjectKeyFromObject(o)}, true)
	}
}

// own returns the members' own addresses in the ranges, as they matter to a Service.
func (v *vips) own(ctx context.Context, name clusterset.ServiceName, all []reconcile.Member) (own ownAddresses, err error) {
	v.owners.Range(func(key, _ any) bool {
		k, _ := key.(owner)
		i := slices.IndexFunc(all, func(m reconcile.Member) bool { return m.ID() == k.cluster })
		if i < 0 {
			return true
		}
		var o client.Object = &corev1.Service{}
		text := fmt.Sprintf("Service %s of cluster %s", k.key, k.cluster)
		if k.node {
			o, text = &corev1.Node{}, fmt.Sprintf("node %s of cluster %s, or its pods", k.key.Name, k.cluster)
		}
		err := all[i].Get(ctx, k.key, o)
		addresses := v.addressesOf(o)
		if err == nil && len(addresses) == 0 || err != nil && client.IgnoreNotFound(err) == nil {
			v.owners.Delete(key)
		}
		for _, p := range addresses {
			own = append(own, ownAddress{Prefix: p, cluster: k.cluster, owner: text})
		}
		return true
	})
	if len(own) == 0 {
		return nil, nil
	}
	imports, err := v.addressesIn(ctx, name, all)
	for i := range own {
		own[i].settled = settled(imports, own[i].cluster)
	}
	return own, err
}

// addressesIn returns the addresses of our ServiceImports of a Service in each member that was read.
func (v *vips) addressesIn(ctx context.Context, name clusterset.ServiceName, all []reconcile.Member) (map[clusterset.ClusterID][]netip.Addr, error) {
	imports := map[clusterset.ClusterID][]netip.Addr{}
	for _, m := range all {
		if !m.Synced() {
			continue
		}
		si, err := ourImport(ctx, m, name)
		if err != nil {
			return nil, err
		}
		imports[m.ID()] = parseIPs(si)
	}
	return imports, nil
}

// settled returns the addresses that most members other than cluster have.
func settled(imports map[clusterset.ClusterID][]netip.Addr, cluster clusterset.ClusterID) (all []netip.Addr) {
	others := 0
	members := map[netip.Addr]int{} // with that address
	for id, addrs := range imports {
		if id == cluster {
			continue
		}
		others++
		for _, a := range slices.Compact(addrs) {
			members[a]++
		}
	}
	for a, n := range members {
		if 2*n > others {
			all = append(all, a)
		}
	}
	return all
}

// ourImport returns the federation's ServiceImport of a Service in a member, an empty one if there is none.
func ourImport(ctx context.Context, m reconcile.Member, name clusterset.ServiceName) (*v1beta1.ServiceImport, error) {
	var si v1beta1.ServiceImport
	err := m.Get(ctx, client.ObjectKey(name), &si)
	switch {
	case client.IgnoreNotFound(err) != nil && !errors.Is(err, objectcache.ErrKindMissing):
		return nil, fmt.Errorf("read service import %s in cluster %s: %w", name, m.ID(), err)
	case err == nil && offers.IsOurs(&si):
		return &si, nil
	}
	return &v1beta1.ServiceImport{}, nil
}

// fault returns why a cannot be a ClusterSetIP of this federation, "" if it can.
func (v *vips) fault(a netip.Addr, own ownAddresses) string {
	i := slices.IndexFunc(v.ranges, func(r netip.Prefix) bool { return r.Contains(a) })
	if i < 0 || a == v.ranges[i].Addr() || a.Is4() && !v.ranges[i].Contains(a.Next()) {
		return fmt.Sprintf("%s is no address of spec.clusterSetIP.ranges %v of the Federation", a, v.ranges)
	}
	if of := own.owner(a); of != "" {
		return fmt.Sprintf("%s belongs to %s; give spec.clusterSetIP.ranges of the Federation a range that no cluster uses", a, of)
	}
	return ""
}

// faults returns why addresses of an import cannot be ClusterSetIPs of this federation.
func (v *vips) faults(si *v1beta1.ServiceImport, own ownAddresses) (all []string) {
	for _, a := range parseIPs(si) {
		if fault := v.fault(a, own); fault != "" {
			all = append(all, fault)
		}
	}
	return all
}

// foreign returns the faults of the import that a member has for a federated Service, for the owners of its member Services.
func (v *vips) foreign(ctx context.Context, m reconcile.Member, s *snapshot) (all []string, err error) {
	if !v.on() {
		return nil, nil
	}
	si, err := ourImport(ctx, m, s.name)
	if err != nil {
		return nil, err
	}
	for _, fault := range v.faults(si, s.blocked) {
		all = append(all, fmt.Sprintf("the ServiceImport of cluster %s is not believed: %s", m.ID(), fault))
	}
	return all, nil
}
