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

// port is an L2 port: its addresses are shared by Services that use different L4 ports.
type port struct {
	// ID is the value of the Services' annotation.
	ID   string
	Pool string
	// VIPs are the destination addresses of packets at the gateways, at most one of each family.
	VIPs []netip.Addr
	// Purpose names the Service that the port was created for, if the backend records it.
	Purpose string
	// Floating is the floating IP of the IPv4 address; its ID is "" for none.
	Floating openstack.FloatingIP
}

// external returns the addresses that clients use, of the given families.
func (p port) external(families []corev1.IPFamily) (all []netip.Addr) {
	for _, vip := range p.vips(families) {
		all = append(all, p.externalOf(vip))
	}
	return all
}

// externalOf returns the address that clients use for a VIP.
func (p port) externalOf(vip netip.Addr) netip.Addr {
	if vip.Is4() && p.Floating.ID != "" {
		return p.Floating.Addr
	}
	return vip
}

// vips returns the VIPs of the given families, in their order.
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

// request describes a new port.
type request struct {
	Pool     *Pool
	Families []corev1.IPFamily
	// Floating is what float will be asked for. create refuses what float would refuse for ever, before it creates
	// anything.
	Floating service.FloatingIP
	// Addresses are the VIPs that the Service asks for, by AddressesField.
	Addresses      []netip.Addr
	AddressesField string
	// Purpose names the Service. A request that is repeated after a crash finds the port of the first one.
	Purpose string
	// Namespace is that of the Service. A floating IP that was kept for a namespace is given to that one alone.
	Namespace string
}

// provider allocates addresses as objects in the cloud. The methods with a context make calls, in a lane.
type provider interface {
	// lane names the lane of its calls.
	lane() string
	// reuse returns a port that no Service uses and that fulfils a request, such as one that was created before a crash.
	reuse(r request, all map[string]port, held []string) (port, bool, error)
	// complete reports whether a port has the floating IP that a Service wants.
	complete(p port, want service.FloatingIP) bool
	// read returns all ports.
	read(ctx context.Context) ([]port, error)
	// create returns a new port, without a floating IP. all are the existing ports.
	create(ctx context.Context, r request, all map[string]port) (port, error)
	// float associates a floating IP with a port, or removes it.
	float(ctx context.Context, p port, r request) (port, error)
	// clean deletes all objects that no Service uses, and returns descriptions of them.
	clean(ctx context.Context, used map[string]bool) (gone []string, err error)
}

// errExhausted means that a pool has no free address.
var errExhausted = errors.New("the pool has no free address")

// matchesFloatingIP reports whether a floating IP is what a Service wants.
func matchesFloatingIP(f openstack.FloatingIP, want service.FloatingIP) bool {
	switch {
	case want.Use != "":
		return f.ID != "" && (f.ID == want.Use || f.Addr.String() == want.Use)
	case want.Allocate:
		return f.ID != "" && !(want.Retain && f.Ours)
	}
	return f.ID == ""
}

// sameFloating reports whether two Services can share the floating IP f of a port. One may name it by id, the other by
// address.
func sameFloating(a, b service.FloatingIP, f openstack.FloatingIP) bool {
	if a.Use != "" && b.Use != "" {
		return a.Use == b.Use || matchesFloatingIP(f, a) && matchesFloatingIP(f, b)
	}
	return a.Allocate == b.Allocate && a.Use == b.Use
}

// common returns the families of want that are also in are, in the order of want.
func common(want, are []corev1.IPFamily) []corev1.IPFamily {
	return slices.DeleteFunc(slices.Clone(want), func(f corev1.IPFamily) bool { return !slices.Contains(are, f) })
}
