package openstack

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/ports"
	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/subnets"
)

// portOwner is the device_owner of our ports. Neutron gives it no meaning.
const portOwner = "isthmus:gateway"

// Port is a Neutron port of this cluster. It reserves addresses for the VIPs of Services; no device uses it.
type Port struct {
	ID    string
	Addrs []netip.Addr // at most one of each family
	// Purpose is the purpose given to CreatePort.
	Purpose string
}

// PortRequest describes a new port.
type PortRequest struct {
	Network string   // id
	Subnets []string // ids, at most one of each family; the port gets an address of each
	// Addresses are those that the port is to get, by the id of their subnet. It gets any address of other subnets.
	Addresses map[string]netip.Addr
	// Purpose is stored in the port, so that the port is found after a crash.
	Purpose string
}

// Ports returns all ports of this cluster, by id.
func (c *Client) Ports(ctx context.Context) (all []Port, err error) {
	err = c.call(ctx, "list ports", func(ctx context.Context, s *session) error {
		opts := ports.ListOpts{ProjectID: s.project, DeviceOwner: portOwner, DeviceID: c.cfg.Cluster}
		all, err = list(ctx, ports.List(s.network, opts), ports.ExtractPorts, c.ours, func(p Port) string { return p.ID })
		return err
	})
	return all, err
}

// CreatePort creates a port. It returns ErrInvalid for an address that Neutron would not allocate by itself: others of a subnet belong to
// routers, or to machines that Neutron does not know. It returns ErrTaken for one that another port has. After another error the port may
// exist all the same, because a response can be lost: then look for its purpose in Ports before the next attempt.
func (c *Client) CreatePort(ctx context.Context, r PortRequest) (p Port, err error) {
	var addresses []ports.IP
	for _, id := range r.Subnets {
		ip := ports.IP{SubnetID: id}
		if a, asked := r.Addresses[id]; asked {
			if err := c.checkAllocatable(ctx, id, a); err != nil {
				return Port{}, err
			}
			ip.IPAddress = a.String()
		}
		addresses = append(addresses, ip)
	}
	err = c.call(ctx, "create port", func(ctx context.Context, s *session) error {
		made, err := ports.Create(ctx, s.network, ports.CreateOpts{
			NetworkID: r.Network, FixedIPs: addresses, DeviceOwner: portOwner, DeviceID: c.cfg.Cluster, Name: portName(r.Purpose),
			Description: "Addresses of Services of type LoadBalancer of the Kubernetes cluster " + c.cfg.Cluster + ", kept by Isthmus.",
		}).Extract()
		if err != nil {
			return err
		}
		p, err = c.ours(made)
		return err
	})
	return p, err
}

// checkAllocatable returns ErrInvalid for an address outside of the allocation pools of a subnet.
func (c *Client) checkAllocatable(ctx context.Context, subnet string, a netip.Addr) error {
	return c.call(ctx, "read subnet "+subnet, func(ctx context.Context, s *session) error {
		is, err := subnets.Get(ctx, s.network, subnet).Extract()
		if err != nil {
			return err
		}
		var pools []string
		for _, p := range is.AllocationPools {
			first, err := netip.ParseAddr(p.Start)
			last, err2 := netip.ParseAddr(p.End)
			if err := errors.Join(err, err2); err != nil {
				return fmt.Errorf("an allocation pool: %w", err)
			}
			if first.Compare(a) <= 0 && a.Compare(last) <= 0 {
				return nil
			}
			pools = append(pools, p.Start+"-"+p.End)
		}
		return fmt.Errorf("%w: %s is not in its allocation pools, %s", ErrInvalid, a, strings.Join(pools, ", "))
	})
}

// DeletePort deletes a port of this cluster. It is no error if it does not exist.
func (c *Client) DeletePort(ctx context.Context, id string) error {
	return c.call(ctx, "delete port "+id, func(ctx context.Context, s *session) error {
		p, err := ports.Get(ctx, s.network, id).Extract()
		if err == nil {
			_, err = c.ours(p)
		}
		if err == nil {
			err = ports.Delete(ctx, s.network, id).ExtractErr()
		}
		if errors.Is(explain(err), ErrGone) {
			return nil
		}
		return err
	})
}

// purposePrefix starts the name of our ports, which people read in lists.
const purposePrefix = "isthmus-"

func portName(purpose string) string { return purposePrefix + purpose }

// ours converts a Neutron port. A port of another owner is an error: it must not be changed.
func (c *Client) ours(p *ports.Port) (Port, error) {
	if p.DeviceOwner != portOwner || p.DeviceID != c.cfg.Cluster {
		return Port{}, fmt.Errorf("port %s does not belong to cluster %s: its device_owner is %q and its device_id %q", p.ID, c.cfg.Cluster, p.DeviceOwner, p.DeviceID)
	}
	purpose, _ := strings.CutPrefix(p.Name, purposePrefix)
	is := Port{ID: p.ID, Purpose: purpose}
	for _, ip := range p.FixedIPs {
		addr, err := netip.ParseAddr(ip.IPAddress)
		if err != nil {
			return Port{}, fmt.Errorf("port %s has the address %q: %w", p.ID, ip.IPAddress, err)
		}
		is.Addrs = append(is.Addrs, addr)
	}
	slices.SortFunc(is.Addrs, netip.Addr.Compare)
	return is, nil
}
