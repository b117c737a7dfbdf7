package controller

import (
	"context"
	"errors"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/gateway/openstack"
	"github.com/isthmus-net/isthmus/gateway/service"
)

// port is an L2 port: addresses that Services share as long as no two of them want the same L4 port.
type port struct {
	// ID is what stands in the Services' annotation.
	ID   string
	Pool string
	// VIPs are what packets have as their destination at the gateways, of each family one at most.
	VIPs []netip.Addr
	// Purpose is for whom it was made, where that is kept.
	Purpose string
	// Floating leads to the IPv4 one; its ID is "" for none.
	Floating openstack.FloatingIP
}

// external are the addresses that clients use, of the families that a Service has.
func (p port) external(families []corev1.IPFamily) (all []netip.Addr) {
	for _, vip := range p.vips(families) {
		if vip.Is4() && p.Floating.ID != "" {
			vip = p.Floating.Addr
		}
		all = append(all, vip)
	}
	return all
}

// vips are those of some families, in their order.
func (p port) vips(families []corev1.IPFamily) (all []netip.Addr) {
	for _, f := range families {
		for _, vip := range p.VIPs {
			if familyOf(vip) == f {
				all = append(all, vip)
			}
		}
	}
	return all
}

// covers reports whether a port has an address of each family.
func (p port) covers(families []corev1.IPFamily) bool { return len(p.vips(families)) == len(families) }

func familyOf(a netip.Addr) corev1.IPFamily {
	if a.Is4() {
		return corev1.IPv4Protocol
	}
	return corev1.IPv6Protocol
}

// request is what a new port is to have.
type request struct {
	Pool     *Pool
	Families []corev1.IPFamily
	// Floating is for float, afterwards: what that would refuse for ever is refused before anything is made.
	Floating service.FloatingIP
	// Purpose is for whom it is: a request that is made again after a crash finds what the first one made.
	Purpose string
}

// backend keeps addresses.
type backend interface {
	// ports returns all ports, those of held that a backend knows by their ids alone among them.
	ports(ctx context.Context, held []string) ([]port, error)
	// create returns a new port, without a floating IP, or the one that was made for the same purpose before. No other Service
	// has it. all are all ports as they are, and held the ids of those that Services have.
	create(ctx context.Context, r request, all map[string]port, held []string) (port, error)
	// float lets a floating IP lead to a port, or none.
	float(ctx context.Context, p port, want service.FloatingIP) (port, error)
}

// cleaner is a backend with something to give back.
type cleaner interface {
	// clean gives back all that no Service has and returns what that was, for people.
	clean(ctx context.Context, used func(id string) bool) (gone []string, err error)
}

// errExhausted means that a pool has no address left.
var errExhausted = errors.New("the pool has no address left")

// floats reports whether a floating IP is as somebody wants it.
func matchesFloatingIP(f openstack.FloatingIP, want service.FloatingIP) bool {
	switch {
	case want.Use != "":
		return f.ID != "" && (f.ID == want.Use || f.Addr.String() == want.Use)
	case want.Allocate:
		return f.ID != "" && !(want.Retain && f.Ours)
	}
	return f.ID == ""
}

// sameFloating reports whether two Services can share a port with a floating IP f as far as that goes. One may name it by its
// id, the other by its address.
func sameFloating(a, b service.FloatingIP, f openstack.FloatingIP) bool {
	if a.Use != "" && b.Use != "" {
		return a.Use == b.Use || matchesFloatingIP(f, a) && matchesFloatingIP(f, b)
	}
	return a.Allocate == b.Allocate && a.Use == b.Use
}

// common are the families of want that there are, in the order of want.
func common(want, are []corev1.IPFamily) []corev1.IPFamily {
	return slices.DeleteFunc(slices.Clone(want), func(f corev1.IPFamily) bool { return !slices.Contains(are, f) })
}
