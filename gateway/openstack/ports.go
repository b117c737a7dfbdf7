package openstack

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/ports"
)

// portOwner is device_owner of our ports. Nobody else uses it, and Neutron gives it no meaning.
const portOwner = "isthmus:gateway"

// Port is a Neutron port of this cluster: addresses that are kept for the VIPs of Services. No device is behind it.
type Port struct {
	ID    string
	Addrs []netip.Addr // of each family one at most
	// Purpose is what Create was told, the UID of the Service that the port was made for.
	Purpose string
}

// PortRequest says what a port is to be.
type PortRequest struct {
	Network string   // id
	Subnets []string // ids, of each family one at most; of each the port gets an address
	// Purpose is kept in the port: a request that is made again after a crash finds what the first one made.
	Purpose string
}

// Ports returns all ports of this cluster, by id.
func (c *Client) Ports(ctx context.Context) (all []Port, err error) {
	err = c.call(ctx, "list ports", func(ctx context.Context) error {
		pages, err := ports.List(c.network, ports.ListOpts{ProjectID: c.project, DeviceOwner: portOwner, DeviceID: c.cluster}).AllPages(ctx)
		if err != nil {
			return err
		}
		found, err := ports.ExtractPorts(pages)
		if err != nil {
			return err
		}
		all, err = translate(found, c.ours, func(p Port) string { return p.ID })
		return err
	})
	return all, err
}

// CreatePort returns a new port, or the one that an earlier call for the same purpose made.
func (c *Client) CreatePort(ctx context.Context, r PortRequest) (p Port, err error) {
	existing, err := c.Ports(ctx)
	if err != nil {
		return Port{}, err
	}
	if i := slices.IndexFunc(existing, func(p Port) bool { return p.Purpose == r.Purpose }); i >= 0 {
		return existing[i], nil
	}
	var addresses []ports.IP
	for _, s := range r.Subnets {
		addresses = append(addresses, ports.IP{SubnetID: s})
	}
	err = c.call(ctx, "create port", func(ctx context.Context) error {
		made, err := ports.Create(ctx, c.network, ports.CreateOpts{
			NetworkID: r.Network, FixedIPs: addresses, DeviceOwner: portOwner, DeviceID: c.cluster, Name: portName(r.Purpose),
			Description: "Addresses of Services of type LoadBalancer of the Kubernetes cluster " + c.cluster + ", kept by Isthmus.",
		}).Extract()
		if err != nil {
			return err
		}
		p, err = c.ours(made)
		return err
	})
	return p, err
}

// DeletePort deletes a port of this cluster. One that is gone is no error.
func (c *Client) DeletePort(ctx context.Context, id string) error {
	return c.call(ctx, "delete port "+id, func(ctx context.Context) error {
		p, err := ports.Get(ctx, c.network, id).Extract()
		if err == nil {
			_, err = c.ours(p)
		}
		if err == nil {
			err = ports.Delete(ctx, c.network, id).ExtractErr()
		}
		if errors.Is(explain(err), ErrGone) {
			return nil
		}
		return err
	})
}

// purposePrefix begins the name of our ports: the name is for people too, who read it in lists.
const purposePrefix = "isthmus-"

func portName(purpose string) string { return purposePrefix + purpose }

// ours translates a port of Neutron. One that is not of this cluster is an error: it must not be touched.
func (c *Client) ours(p *ports.Port) (Port, error) {
	if p.DeviceOwner != portOwner || p.DeviceID != c.cluster {
		return Port{}, fmt.Errorf("port %s is not of cluster %s: its device_owner is %q and its device_id %q", p.ID, c.cluster, p.DeviceOwner, p.DeviceID)
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
