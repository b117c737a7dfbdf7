package controller

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/openstack"
	"github.com/isthmus-net/isthmus/gateway/service"
)

// Settings are what people choose, in a file.
type Settings struct {
	// Cluster is the id of this cluster, by which its ports and floating IPs are told from those of others.
	Cluster string `json:"cluster"`
	// DefaultClass takes Services without a class as well.
	DefaultClass bool `json:"defaultClass,omitempty"`
	// Backends is where gateways send packets to, pods (the default) or nodeports, for Services that do not say.
	Backends service.Backends `json:"backends,omitempty"`
	// FloatingIPs is what Services get that do not say: none (the default) or allocate.
	FloatingIPs string `json:"floatingIPs,omitempty"`
	// AddressPairs is how Neutron is told to let VIPs pass at gateways' own ports.
	AddressPairs AddressPairs `json:"addressPairs,omitempty"`
	// Pools are where addresses come from. The first one is for Services that do not say.
	Pools []Pool `json:"pools"`
}

// AddressPairs is a way to let VIPs pass at a port.
type AddressPairs string

// The ways.
const (
	// PairPerVIP allows each VIP: OVN needs it to know where a VIP is. Neutron allows 10 of them by default.
	PairPerVIP AddressPairs = "per-vip"
	// PairPerCIDR allows the CIDRs of the pools.
	PairPerCIDR AddressPairs = "cidr"
	// PairNone leaves the ports alone: port security is off, or there is no Neutron.
	PairNone AddressPairs = "none"
)

// Pool is where addresses come from: one of Neutron, Moved and Addresses says how.
type Pool struct {
	Name string `json:"name"`
	// Group is the gateways that take packets to its addresses; empty: default.
	Group string `json:"group,omitempty"`
	// Announce is how routers learn of its addresses: bgp, vrrp or none.
	Announce desired.Announce `json:"announce"`
	// Return is how backends' packets find back: routed, snat or masquerade.
	Return desired.Return `json:"return"`
	// Neutron makes a port for the addresses, and where Services ask for it a floating IP.
	Neutron *NeutronPool `json:"neutron,omitempty"`
	// Moved has one floating IP, which leads to the own port of one gateway of the group, and to another's when that one fails.
	FailoverIP *FailoverIPPool `json:"failoverIP,omitempty"`
	// Addresses are given out one by one, without Neutron.
	Addresses []netip.Prefix `json:"addresses,omitempty"`
	// CIDRs have all addresses of the pool, for address pairs of the kind cidr. Those of Addresses need not be named.
	CIDRs []netip.Prefix `json:"cidrs,omitempty"`
}

// NeutronPool is a network of the project.
type NeutronPool struct {
	// Network, IPv4Subnet and IPv6Subnet are ids; one of the subnets may be missing.
	Network    string `json:"network"`
	IPv4Subnet string `json:"ipv4Subnet,omitempty"`
	IPv6Subnet string `json:"ipv6Subnet,omitempty"`
	// FloatingNetwork is the id of the external network that floating IPs come from; empty: there are none.
	FloatingNetwork string `json:"floatingNetwork,omitempty"`
}

// MovedPool is a floating IP for all Services of a pool. Nobody announces it, and backends see the gateway that it leads to.
type FailoverIPPool struct {
	// FloatingNetwork is the id of the external network that it comes from.
	FloatingNetwork string `json:"floatingNetwork"`
}

// DefaultGroup is the group of gateways and pools that name none.
const DefaultGroup = "default"

var poolName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

// Complete fills in what is not said and returns all that is wrong, each with its field.
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
			wrong("%s.name %q is there twice", at, p.Name)
		}
		for _, err := range p.faults(s.AddressPairs) {
			wrong("%s.%w", at, err)
		}
		for _, o := range s.Pools[:i] {
			if p.FailoverIP != nil && o.FailoverIP != nil && p.Group == o.Group {
				wrong("%s.group: the floating IP of pool %s leads to gateways of group %s already, which have one address for it; name another group", at, o.Name, p.Group)
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

// faults returns all that is wrong with a pool, each beginning with its field.
func (p *Pool) faults(pairs AddressPairs) (errs []error) {
	wrong := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if !poolName.MatchString(p.Name) {
		wrong("name %q is not of a-z, 0-9 and -, 63 at most", p.Name)
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
		}
	}
	return errs
}

// families are those that a pool has addresses of.
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

// cidrs have all addresses of a pool.
func (p *Pool) cidrs() []netip.Prefix { return append(slices.Clone(p.Addresses), p.CIDRs...) }

// services are the settings as they count for Services.
func (s *Settings) services() service.Config {
	c := service.Config{Default: s.DefaultClass, Floating: service.FloatingIP{Allocate: s.FloatingIPs == "allocate"}, Backends: s.Backends}
	for _, p := range s.Pools {
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

// Cloud is what the controller needs of OpenStack. gateway/openstack has it.
type Cloud interface {
	Ports(ctx context.Context) ([]openstack.Port, error)
	CreatePort(ctx context.Context, r openstack.PortRequest) (openstack.Port, error)
	DeletePort(ctx context.Context, id string) error
	FloatingIPs(ctx context.Context) ([]openstack.FloatingIP, error)
	AllFloatingIPs(ctx context.Context) ([]openstack.FloatingIP, error)
	CreateFloatingIP(ctx context.Context, network, port string, fixed netip.Addr) (openstack.FloatingIP, error)
	ReserveFloatingIP(ctx context.Context, network, purpose string) (openstack.FloatingIP, error)
	AssociateFloatingIP(ctx context.Context, id, port string, fixed netip.Addr) error
	RetainFloatingIP(ctx context.Context, id string) error
	DeleteFloatingIP(ctx context.Context, id string) error
	SetAddressPairs(ctx context.Context, port string, had, want []netip.Prefix) error
	Quota(ctx context.Context) (openstack.Quota, error)
}

// subnet is the id of the subnet of a family, in a pool of Neutron.
func (p *Pool) subnet(f corev1.IPFamily) string {
	if f == corev1.IPv4Protocol {
		return p.Neutron.IPv4Subnet
	}
	return p.Neutron.IPv6Subnet
}
