package controller

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/gateway/openstack"
	"github.com/isthmus-net/isthmus/gateway/service"
)

// neutron allocates addresses as Neutron ports. The purpose of a port is the name of its pool, a dot, and the UID of a
// Service.
type neutron struct{ cloud Cloud }

func (*neutron) lane() string { return lanePorts }

func (n *neutron) read(ctx context.Context) ([]port, error) {
	var ports []openstack.Port
	var floating []openstack.FloatingIP
	both, ctx := errgroup.WithContext(ctx)
	both.Go(func() (err error) {
		ports, err = n.cloud.Ports(ctx)
		return err
	})
	both.Go(func() (err error) {
		floating, err = n.cloud.AllFloatingIPs(ctx)
		return err
	})
	if err := both.Wait(); err != nil {
		return nil, err
	}
	all := make([]port, len(ports))
	for i, p := range ports {
		all[i] = translate(p)
		if f := slices.IndexFunc(floating, func(f openstack.FloatingIP) bool { return f.Port == p.ID }); f >= 0 {
			all[i].Floating = floating[f]
		}
	}
	return all, nil
}

func translate(p openstack.Port) port {
	pool, _, _ := strings.Cut(p.Purpose, ".")
	return port{ID: p.ID, Pool: pool, VIPs: p.Addrs, Purpose: p.Purpose}
}

// reuse returns the port that an earlier attempt created for a Service.
func (*neutron) reuse(r request, all map[string]port, held []string) (port, bool, error) {
	made := byPurpose(all)
	for i := 1; ; i++ {
		p, ok := made[purpose(r, i)]
		if !ok {
			return port{}, false, nil
		}
		if !slices.Contains(held, p.ID) && p.covers(r.Families) && containsAll(p.VIPs, r.Addresses) {
			return p, true, nil
		}
	}
}

// purpose returns the purpose of the ith port of a Service. One that has to leave a shared port needs another one.
func purpose(r request, i int) string {
	if i == 1 {
		return r.Pool.Name + "." + r.Purpose
	}
	return fmt.Sprintf("%s.%s.%d", r.Pool.Name, r.Purpose, i)
}

func byPurpose(all map[string]port) map[string]port {
	made := map[string]port{}
	for _, p := range all {
		made[p.Purpose] = p
	}
	return made
}

// complete implements provider.
func (*neutron) complete(p port, want service.FloatingIP) bool {
	_, ok := ipv4(p.VIPs)
	return !ok || matchesFloatingIP(p.Floating, want)
}

// create creates a port for the first purpose of the Service that no port has.
func (n *neutron) create(ctx context.Context, r request, all map[string]port) (port, error) {
	made, i := byPurpose(all), 1
	for ; ; i++ {
		if _, ok := made[purpose(r, i)]; !ok {
			break
		}
	}
	if slices.Contains(r.Families, corev1.IPv4Protocol) {
		if _, err := n.checkFloatingIP(ctx, r); err != nil {
			return port{}, err
		}
	}
	ask := openstack.PortRequest{Network: r.Pool.Neutron.Network, Purpose: purpose(r, i), Addresses: map[string]netip.Addr{}}
	for _, f := range r.Families {
		ask.Subnets = append(ask.Subnets, r.Pool.subnet(f))
	}
	for _, a := range r.Addresses {
		ask.Addresses[r.Pool.subnet(familyOf(a))] = a
	}
	p, err := n.cloud.CreatePort(ctx, ask)
	if err != nil {
		return port{}, explainAsked(err, r, all)
	}
	return translate(p), nil
}

// explainAsked returns an error of Neutron, which may be about the addresses that a Service asks for. A port of a former Service will be deleted; no
// retry helps against others.
func explainAsked(err error, r request, all map[string]port) error {
	if len(r.Addresses) == 0 {
		return err
	}
	if errors.Is(err, openstack.ErrInvalid) {
		return invalid{fmt.Errorf("%s: pool %s does not have it: %w", r.AddressesField, r.Pool.Name, err)}
	}
	if !errors.Is(err, openstack.ErrTaken) {
		return err
	}
	for _, p := range all {
		if containsAny(p.VIPs, r.Addresses) {
			return fmt.Errorf("%s: a port of a former Service has it: %w", r.AddressesField, err)
		}
	}
	return invalid{fmt.Errorf("%s: %w; ask for another one", r.AddressesField, err)}
}

func (n *neutron) float(ctx context.Context, p port, r request) (port, error) {
	want := r.Floating
	if n.complete(p, want) {
		return p, nil
	}
	fixed, _ := ipv4(p.VIPs)
	use, err := n.checkFloatingIP(ctx, r)
	if err != nil {
		return p, err
	}
	if p.Floating.ID != "" && (want.Use != "" || !want.Allocate) { // the other one takes its place
		if err := n.releaseFloatingIP(ctx, p.Floating); err != nil {
			return p, err
		}
		p.Floating = openstack.FloatingIP{}
	}
	switch {
	case want.Use != "":
		if err := n.cloud.AssociateFloatingIP(ctx, use.ID, p.ID, fixed); err != nil {
			return p, err
		}
		use.Port, use.Fixed, p.Floating = p.ID, fixed, use
	case want.Allocate:
		if p.Floating.ID == "" {
			if p.Floating, err = n.cloud.CreateFloatingIP(ctx, r.Pool.Neutron.FloatingNetwork, p.ID, fixed); err != nil {
				return p, err
			}
		}
		if want.Retain && p.Floating.Ours {
			if err := n.cloud.RetainFloatingIP(ctx, p.Floating.ID, r.Namespace); err != nil {
				return p, err
			}
			p.Floating.Ours = false
		}
	}
	return p, nil
}

// checkFloatingIP returns the floating IP that a Service names, if any, and an error if the pool cannot provide what it
// wants.
func (n *neutron) checkFloatingIP(ctx context.Context, r request) (openstack.FloatingIP, error) {
	pool, want := r.Pool, r.Floating
	if want.Allocate && pool.Neutron.FloatingNetwork == "" {
		return openstack.FloatingIP{}, invalid{fmt.Errorf("pool %s has no floating IPs; set its neutron.floatingNetwork, or the annotation %s to \"none\"", pool.Name, service.AnnotationFloatingIP)}
	}
	if want.Use == "" {
		return openstack.FloatingIP{}, nil
	}
	return n.userFloatingIP(ctx, want.Use, r.Namespace)
}

// userFloatingIP returns a floating IP that a user named. It refuses one that leads to a port outside of this cluster, and one
// that was kept for another namespace.
func (n *neutron) userFloatingIP(ctx context.Context, idOrAddr, namespace string) (openstack.FloatingIP, error) {
	all, err := n.cloud.AllFloatingIPs(ctx)
	if err != nil {
		return openstack.FloatingIP{}, err
	}
	i := slices.IndexFunc(all, func(f openstack.FloatingIP) bool { return f.ID == idOrAddr || f.Addr.String() == idOrAddr })
	if i < 0 {
		return openstack.FloatingIP{}, invalid{fmt.Errorf("annotation %s: the project has no floating IP %s", service.AnnotationFloatingIP, idOrAddr)}
	}
	if kept := all[i].KeptFor; kept != "" && kept != namespace {
		return openstack.FloatingIP{}, invalid{fmt.Errorf("annotation %s: floating IP %s was kept for another namespace; name another one, or ask an administrator of the OpenStack project to remove its description", service.AnnotationFloatingIP, idOrAddr)}
	}
	if all[i].Ours && all[i].Purpose != "" {
		return openstack.FloatingIP{}, invalid{fmt.Errorf("annotation %s: floating IP %s belongs to a pool and was created for %s; name another one", service.AnnotationFloatingIP, idOrAddr, all[i].Purpose)}
	}
	if all[i].Port == "" {
		return all[i], nil
	}
	ports, err := n.cloud.Ports(ctx)
	if err != nil {
		return openstack.FloatingIP{}, err
	}
	if !slices.ContainsFunc(ports, func(p openstack.Port) bool { return p.ID == all[i].Port }) {
		return openstack.FloatingIP{}, invalid{fmt.Errorf("annotation %s: floating IP %s leads to port %s, which does not belong to this cluster; disassociate it first", service.AnnotationFloatingIP, idOrAddr, all[i].Port)}
	}
	return all[i], nil
}

// releaseFloatingIP removes a floating IP from its port: it deletes one of ours, and only disassociates one of the user.
func (n *neutron) releaseFloatingIP(ctx context.Context, f openstack.FloatingIP) error {
	if f.Ours {
		return n.cloud.DeleteFloatingIP(ctx, f.ID)
	}
	return n.cloud.AssociateFloatingIP(ctx, f.ID, "", netip.Addr{})
}

func (n *neutron) clean(ctx context.Context, used map[string]bool) (gone []string, err error) {
	ports, err := n.cloud.Ports(ctx)
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, p := range ports {
		if used[p.ID] {
			continue
		}
		if err := n.cloud.DeletePort(ctx, p.ID); err != nil {
			errs = append(errs, err)
			continue
		}
		gone = append(gone, fmt.Sprintf("port %s %v", p.ID, p.Addrs))
	}
	floating, err := n.cloud.FloatingIPs(ctx)
	if err != nil {
		return gone, errors.Join(append(errs, err)...)
	}
	for _, f := range floating {
		if f.Port != "" || f.Purpose != "" {
			continue
		}
		if err := n.cloud.DeleteFloatingIP(ctx, f.ID); err != nil {
			errs = append(errs, err)
			continue
		}
		gone = append(gone, fmt.Sprintf("floating IP %s %s", f.ID, f.Addr))
	}
	return gone, errors.Join(errs...)
}

func ipv4(addrs []netip.Addr) (netip.Addr, bool) {
	i := slices.IndexFunc(addrs, netip.Addr.Is4)
	if i < 0 {
		return netip.Addr{}, false
	}
	return addrs[i], true
}
