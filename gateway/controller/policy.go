package controller

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	"github.com/isthmus-net/isthmus/gateway/service"
)

// choosePool returns the pool of a Service: the one that it has or names, else the first one that selects it.
func (w *worker) choosePool(ctx context.Context, s *corev1.Service, want service.Want, has port) (*Pool, error) {
	pool := w.settings.pool(want.Pool)
	if has.Pool == pool.Name {
		return pool, nil
	}
	_, named := s.Annotations[service.AnnotationPool]
	if pool.removed {
		return nil, invalid{fmt.Errorf("annotation %s: the settings no longer have pool %s; name another one", service.AnnotationPool, pool.Name)}
	}
	for i := range w.settings.Pools {
		p := &w.settings.Pools[i]
		if p.removed || named && p != pool {
			continue
		}
		if ok, err := w.selects(ctx, p, s); ok || err != nil {
			return p, err
		}
	}
	if named {
		return nil, invalid{fmt.Errorf("annotation %s: pool %s does not select this Service, by the labels of its namespace or its own; name another pool, or ask an administrator of the pool", service.AnnotationPool, pool.Name)}
	}
	return nil, invalid{errors.New("no pool selects this Service, by the labels of its namespace or its own; ask an administrator of the pools")}
}

// selects reports whether a pool is for a Service.
func (w *worker) selects(ctx context.Context, p *Pool, s *corev1.Service) (bool, error) {
	if p.Services != nil && !matches(p.Services, s.Labels) {
		return false, nil
	}
	if p.Namespaces == nil {
		return true, nil
	}
	var ns corev1.Namespace
	if err := w.live.Get(ctx, types.NamespacedName{Name: s.Namespace}, &ns); err != nil {
		return false, fmt.Errorf("read namespace %s: %w", s.Namespace, err)
	}
	return matches(p.Namespaces, ns.Labels), nil
}

// matches reports whether a selector, which Complete has found valid, selects labels.
func matches(of *metav1.LabelSelector, has map[string]string) bool {
	selector, err := metav1.LabelSelectorAsSelector(of)
	return err == nil && selector.Matches(labels.Set(has))
}

// errNamespaceQuota means that a namespace has all addresses that a pool gives it.
var errNamespaceQuota = errors.New("the namespace has no address left")

// checkQuota refuses the addresses of p, or of a new port if p is none, to a Service whose namespace has its share.
func (w *worker) checkQuota(s *corev1.Service, r request, p port) error {
	limit := r.Pool.AddressesPerNamespace
	if limit == 0 {
		return nil
	}
	has := map[netip.Addr]bool{}
	for uid, m := range w.services {
		if uid != s.UID && m.name.Namespace == s.Namespace && m.port.Pool == r.Pool.Name {
			addAll(has, m.port.VIPs)
		}
	}
	for _, a := range w.answers { // Services that are about to have them
		if a.name.Namespace == s.Namespace && a.port.Pool == r.Pool.Name {
			addAll(has, a.port.VIPs)
		}
	}
	had := len(has)
	addAll(has, p.VIPs)
	n := len(has)
	if p.ID == "" {
		n += len(r.Families)
	}
	if n > max(limit, had) {
		return fmt.Errorf("pool %s: %w: its Services have %d addresses, and may have %d; delete some, or share their addresses by other ports", r.Pool.Name, errNamespaceQuota, had, limit)
	}
	return nil
}

func addAll(set map[netip.Addr]bool, all []netip.Addr) {
	for _, a := range all {
		set[a] = true
	}
}

// checkAddresses refuses a Service that asks for addresses which its pool does not have, or which other Services have and do
// not share with it.
func (w *worker) checkAddresses(s *corev1.Service, want service.Want, pool *Pool) error {
	if pool.FailoverIP != nil && len(want.Addresses) > 0 {
		return invalid{fmt.Errorf("%s: pool %s has one floating IP for all; ask for no address, or name another pool by the annotation %s", want.AddressesField, pool.Name, service.AnnotationPool)}
	}
	asked := askedVIPs(want)
	for _, a := range asked {
		if m := w.services[s.UID]; m != nil && slices.Contains(m.port.VIPs, a) {
			continue
		}
		switch {
		case pool.Neutron != nil && !slices.Contains(pool.families(), familyOf(a)):
			return invalid{fmt.Errorf("%s: pool %s has no subnet of the family of %s", want.AddressesField, pool.Name, a)}
		case pool.Neutron == nil && !pool.lists(a):
			return invalid{fmt.Errorf("%s: pool %s does not have %s; its addresses are %s", want.AddressesField, pool.Name, a, list(pool.Addresses))}
		}
		for _, m := range w.sorted() {
			if m.name == nameOf(s) || m.port.Pool != pool.Name || !slices.Contains(m.port.VIPs, a) {
				continue
			}
			if w.foreign(s, want, m.port) {
				return foreignError(want.AddressesField, a.String(), "ask for another one")
			}
			if !m.port.covers(common(want.Families, pool.familiesWith(m.port))) || !containsAll(m.port.VIPs, asked) || w.allocations.Collision(w.claim(s, want, m.port)) != nil {
				return invalid{fmt.Errorf("%s: service %s has %s, with one of the same ports or without the other address; choose other ports, or ask for another address", want.AddressesField, m.name, a)}
			}
		}
	}
	return nil
}

// askedVIPs returns the VIPs that a Service asks for. Where it names a floating IP, the IPv4 address is no VIP.
func askedVIPs(want service.Want) []netip.Addr {
	return slices.DeleteFunc(slices.Clone(want.Addresses), func(a netip.Addr) bool { return a.Is4() && want.Floating.Use != "" })
}

// containsAll reports whether all has each of some.
func containsAll(all, some []netip.Addr) bool {
	return !slices.ContainsFunc(some, func(a netip.Addr) bool { return !slices.Contains(all, a) })
}

// containsAny reports whether all has one of some.
func containsAny(all, some []netip.Addr) bool {
	return slices.ContainsFunc(some, func(a netip.Addr) bool { return slices.Contains(all, a) })
}
