package controller

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/openstack"
	"github.com/isthmus-net/isthmus/gateway/service"
)

// Settings are read from the file of --config.
type Settings struct {
	// Cluster is the id of this cluster. It distinguishes its ports and floating IPs from those of other clusters.
	Cluster string `json:"cluster"`
	// DefaultClass makes the controller manage Services without a class as well.
	DefaultClass bool `json:"defaultClass,omitempty"`
	// Backends is the default destination of packets: pods (the default) or nodeports.
	Backends service.Backends `json:"backends,omitempty"`
	// FloatingIPs is the default of Services: none (the default) or allocate.
	FloatingIPs string `json:"floatingIPs,omitempty"`
	// AddressPairs says how Neutron is made to let VIPs pass at the gateways' own ports.
	AddressPairs AddressPairs `json:"addressPairs,omitempty"`
	// Pools are the sources of addresses. The first one that selects a new Service is its default.
	Pools []Pool `json:"pools"`
}

// AddressPairs selects the allowed address pairs of gateway ports.
type AddressPairs string

// Kinds of address pairs.
const (
	// PairPerVIP allows each VIP. OVN needs it to locate a VIP. Neutron allows 10 by default.
	PairPerVIP AddressPairs = "per-vip"
	// PairPerCIDR allows the CIDRs of the pools.
	PairPerCIDR AddressPairs = "cidr"
	// PairNone leaves the ports alone: port security is off, or there is no Neutron.
	PairNone AddressPairs = "none"
)

// Pool is a source of addresses. Exactly one of Neutron, FailoverIP and Addresses is set.
type Pool struct {
	Name string `json:"name"`
	// Group names the gateways of its addresses; empty: default.
	Group string `json:"group,omitempty"`
	// Announce names the announcer of its addresses: bgp, vrrp or none.
	Announce desired.Announce `json:"announce"`
	// Return says how replies reach clients: routed, snat or masquerade.
	Return desired.Return `json:"return"`
	// BGP says how the routes to its addresses differ from the other routes of the gateways; nil: they do not.
	BGP *desired.Route `json:"bgp,omitempty"`
	// VRRP names the virtual router of its addresses; nil: the first one of the gateways.
	VRRP *VRRPPool `json:"vrrp,omitempty"`
	// Neutron creates a port for the addresses, and a floating IP for Services that ask for one.
	Neutron *NeutronPool `json:"neutron,omitempty"`
	// FailoverIP uses one floating IP for the whole pool. It leads to the own port of one gateway of the group, and moves
	// to another gateway when that one fails.
	FailoverIP *FailoverIPPool `json:"failoverIP,omitempty"`
	// Addresses are allocated one by one, without Neutron.
	Addresses []netip.Prefix `json:"addresses,omitempty"`
	// CIDRs contain all addresses of the pool, for address pairs of kind cidr. Addresses are included without being
	// repeated here.
	CIDRs []netip.Prefix `json:"cidrs,omitempty"`

	// Namespaces and Services select by labels which Services get addresses of the pool; nil: all. A Service that has an
	// address keeps it.
	Namespaces *metav1.LabelSelector `json:"namespaces,omitempty"`
	Services   *metav1.LabelSelector `json:"services,omitempty"`
	// AddressesPerNamespace is the number of addresses of the pool that the Services of a namespace may have; 0: no limit.
	AddressesPerNamespace int `json:"addressesPerNamespace,omitempty"`

	removed bool         // from the settings; its Services keep what they have
	kept    []netip.Addr // of Services, which Addresses no longer has
}

// VRRPPool names a virtual router, which GatewayNodes list.
type VRRPPool struct {
	RouterID uint8 `json:"routerID"` // 1 to 254
}

// NeutronPool allocates from a network of the project.
type NeutronPool struct {
	// Network, IPv4Subnet and IPv6Subnet are ids; one of the subnets may be missing.
	Network    string `json:"network"`
	IPv4Subnet string `json:"ipv4Subnet,omitempty"`
	IPv6Subnet string `json:"ipv6Subnet,omitempty"`
	// FloatingNetwork is the id of the external network of floating IPs; empty: no floating IPs.
	FloatingNetwork string `json:"floatingNetwork,omitempty"`
}

// FailoverIPPool is one floating IP for all Services of a pool. No announcer announces it, and backends see the address
// of its gateway.
type FailoverIPPool struct {
	// FloatingNetwork is the id of its external network.
	FloatingNetwork string `json:"floatingNetwork"`
}

// DefaultGroup is the group of gateways and pools without one.
const DefaultGroup = "default"

var poolName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

// Complete sets defaults and returns everything that is wrong, each error with its field.
func (s *Settings) Complete() error {
	var errs []error
	wrong := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if s.Cluster == "" {
		wrong("cluster is missing: an id that no other cluster of the project has")
	}
	fill(&s.Backends, service.Pods)
	fill(&s.FloatingIPs, "none")
	fill(&s.AddressPairs, PairNone)
	if s.Backends != service.Pods && s.Backends != service.NodePorts {
		wrong("backends is %q; it can be \"pods\" or \"nodeports\"", s.Backends)
	}
	if s.FloatingIPs != "none" && s.FloatingIPs != "allocate" {
		wrong("floatingIPs is %q; it can be \"none\" or \"allocate\"", s.FloatingIPs)
	}
	if !slices.Contains([]AddressPairs{PairPerVIP, PairPerCIDR, PairNone}, s.AddressPairs) {
		wrong("addressPairs is %q; it can be \"per-vip\", \"cidr\" or \"none\"", s.AddressPairs)
	}
	if len(s.Pools) == 0 {
		wrong("pools are missing: name at least one, where addresses come from")
	}
	for i := range s.Pools {
		p := &s.Pools[i]
		fill(&p.Group, DefaultGroup)
		at := fmt.Sprintf("pools[%d]", i)
		if slices.ContainsFunc(s.Pools[:i], func(o Pool) bool { return o.Name == p.Name }) {
			wrong("%s.name %q appears twice", at, p.Name)
		}
		for _, err := range p.faults(s.AddressPairs) {
			wrong("%s.%w", at, err)
		}
		for _, o := range s.Pools[:i] {
			if p.FailoverIP != nil && o.FailoverIP != nil && p.Group == o.Group {
				wrong("%s.group: the floating IP of pool %s already leads to gateways of group %s, which have one address for it; name another group", at, o.Name, p.Group)
			}
			for _, a := range p.Addresses {
				if slices.ContainsFunc(o.Addresses, a.Overlaps) {
					wrong("%s.addresses: %s overlaps with pool %s", at, a, o.Name)
				}
			}
		}
	}
	return errors.Join(errs...)
}

func fill[T ~string](field *T, by T) {
	if *field == "" {
		*field = by
	}
}

// faults returns everything that is wrong with a pool, each error starting with the field.
func (p *Pool) faults(pairs AddressPairs) (errs []error) {
	wrong := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if !poolName.MatchString(p.Name) {
		wrong("name %q may contain a-z, 0-9 and -, 63 characters at most", p.Name)
	}
	if !slices.Contains(desired.Announces, p.Announce) {
		wrong("announce is %q; it can be %s", p.Announce, desired.OneOf(desired.Announces...))
	}
	if !slices.Contains([]desired.Return{desired.Routed, desired.SNAT, desired.Masquerade}, p.Return) {
		wrong("return is %q; it can be \"routed\", \"snat\" or \"masquerade\"", p.Return)
	}
	kinds := 0
	for _, is := range []bool{p.Neutron != nil, p.FailoverIP != nil, len(p.Addresses) > 0} {
		if is {
			kinds++
		}
	}
	if kinds != 1 {
		wrong("addresses come from one place: set one of neutron, failoverIP and addresses")
	}
	if p.FailoverIP != nil {
		if p.FailoverIP.FloatingNetwork == "" {
			wrong("failoverIP.floatingNetwork is missing: the id of the external network")
		}
		if p.Announce != desired.ByNone || p.Return != desired.Masquerade {
			wrong("failoverIP needs announce \"none\" and return \"masquerade\": a floating IP leads to one gateway's own address")
		}
	}
	if n := p.Neutron; n != nil {
		if n.Network == "" {
			wrong("neutron.network is missing: the id of the network")
		}
		if n.IPv4Subnet == "" && n.IPv6Subnet == "" {
			wrong("neutron.ipv4Subnet is missing, and so is neutron.ipv6Subnet: set at least one")
		}
		if n.IPv4Subnet == "" && n.FloatingNetwork != "" {
			wrong("neutron.floatingNetwork needs neutron.ipv4Subnet: floating IPs are IPv4 only")
		}
		if pairs == PairPerCIDR && len(p.CIDRs) == 0 {
			wrong("cidrs are missing, which addressPairs \"cidr\" needs")
		}
	}
	for i, a := range p.Addresses {
		if !a.IsValid() || a != a.Masked() {
			wrong("addresses[%d] %s is not a network such as 192.0.2.16/28", i, a)
		} else if !desired.RoutablePrefix(a) {
			wrong("addresses[%d] %s has addresses that gateways cannot route to", i, a)
		}
	}
	return append(errs, p.policyFaults()...)
}

// policyFaults returns what is wrong with the Services and the routes of a pool.
func (p *Pool) policyFaults() (errs []error) {
	wrong := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if _, err := metav1.LabelSelectorAsSelector(p.Namespaces); err != nil {
		wrong("namespaces: %w", err)
	}
	if _, err := metav1.LabelSelectorAsSelector(p.Services); err != nil {
		wrong("services: %w", err)
	}
	if p.AddressesPerNamespace < 0 {
		wrong("addressesPerNamespace is %d; it can be a number of addresses, or 0 for no limit", p.AddressesPerNamespace)
	}
	if p.BGP != nil {
		if p.Announce != desired.ByBGP {
			wrong("bgp is set, but announce is %q", p.Announce)
		}
		for i, text := range p.BGP.Communities {
			if _, err := desired.ParseCommunity(text); err != nil {
				wrong("bgp.communities[%d] %w", i, err)
			}
		}
	}
	if p.VRRP != nil {
		if p.Announce != desired.ByVRRP {
			wrong("vrrp is set, but announce is %q", p.Announce)
		}
		if id := p.VRRP.RouterID; id == 0 || id == 255 {
			wrong("vrrp.routerID is %d; it can be 1 to 254", id)
		}
	}
	return errs
}

// routerID returns the virtual router of a pool's addresses, 0 for the first one of the gateways.
func (p *Pool) routerID() uint8 {
	if p.VRRP == nil {
		return 0
	}
	return p.VRRP.RouterID
}

// families returns the IP families of a pool.
func (p *Pool) families() (f []corev1.IPFamily) {
	has4, has6 := p.FailoverIP != nil || p.Neutron != nil && p.Neutron.IPv4Subnet != "", p.Neutron != nil && p.Neutron.IPv6Subnet != ""
	for _, a := range p.Addresses {
		has4, has6 = has4 || a.Addr().Is4(), has6 || a.Addr().Is6()
	}
	if has4 {
		f = append(f, corev1.IPv4Protocol)
	}
	if has6 {
		f = append(f, corev1.IPv6Protocol)
	}
	return f
}

// cidrs returns networks that contain all addresses of a pool.
func (p *Pool) cidrs() []netip.Prefix {
	all := append(slices.Clone(p.Addresses), p.CIDRs...)
	for _, a := range p.kept {
		all = append(all, netip.PrefixFrom(a, a.BitLen()))
	}
	return all
}

// services returns the defaults for Services.
func (s *Settings) services() service.Config {
	c := service.Config{Default: s.DefaultClass, Floating: service.FloatingIP{Allocate: s.FloatingIPs == "allocate"}, Backends: s.Backends}
	for _, p := range s.Pools { // removed ones come last, so none is the default
		c.Pools = append(c.Pools, p.Name)
	}
	return c
}

func (s *Settings) pool(name string) *Pool {
	if i := slices.IndexFunc(s.Pools, func(p Pool) bool { return p.Name == name }); i >= 0 {
		return &s.Pools[i]
	}
	return nil
}

// Cloud is the part of OpenStack that the controller uses; package openstack implements it.
type Cloud interface {
	Ports(ctx context.Context) ([]openstack.Port, error)
	CreatePort(ctx context.Context, r openstack.PortRequest) (openstack.Port, error)
	DeletePort(ctx context.Context, id string) error
	FloatingIPs(ctx context.Context) ([]openstack.FloatingIP, error)
	AllFloatingIPs(ctx context.Context) ([]openstack.FloatingIP, error)
	CreateFloatingIP(ctx context.Context, network, port string, fixed netip.Addr) (openstack.FloatingIP, error)
	ReserveFloatingIP(ctx context.Context, network, purpose string) (openstack.FloatingIP, error)
	AssociateFloatingIP(ctx context.Context, id, port string, fixed netip.Addr) error
	RetainFloatingIP(ctx context.Context, id, namespace string) error
	DeleteFloatingIP(ctx context.Context, id string) error
	SetAddressPairs(ctx context.Context, port string, had, want []netip.Prefix) error
	Quota(ctx context.Context) (openstack.Quota, error)
}

// subnet returns the id of the subnet of a family, in a pool of Neutron.
func (p *Pool) subnet(f corev1.IPFamily) string {
	if f == corev1.IPv4Protocol {
		return p.Neutron.IPv4Subnet
	}
	return p.Neutron.IPv6Subnet
}
