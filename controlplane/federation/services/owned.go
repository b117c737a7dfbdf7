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

// ownAddresses are addresses of members themselves that lie in the ranges of ClusterSetIPs, each with its owner as text. An
// administrator who chose ranges apart from all clusters' addresses has none.
type ownAddresses map[netip.Prefix]string

// owner returns the owner of a, "" if no member has it.
func (o ownAddresses) owner(a netip.Addr) string {
	for p, text := range o {
		if p.Contains(a) {
			return text
		}
	}
	return ""
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

// own returns the members' own addresses in the ranges.
func (v *vips) own(ctx context.Context, all []reconcile.Member) ownAddresses {
	own := ownAddresses{}
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
			own[p] = text
		}
		return true
	})
	return own
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
	var si v1beta1.ServiceImport
	err = m.Get(ctx, client.ObjectKey(s.name), &si)
	if err != nil || !offers.IsOurs(&si) {
		if errors.Is(err, objectcache.ErrKindMissing) {
			return nil, nil
		}
		return nil, client.IgnoreNotFound(err)
	}
	for _, fault := range v.faults(&si, s.blocked) {
		all = append(all, fmt.Sprintf("the ServiceImport of cluster %s is not believed: %s", m.ID(), fault))
	}
	return all, nil
}
