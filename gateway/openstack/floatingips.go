package openstack

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/extensions/layer3/floatingips"
)

// FloatingIP is an IPv4 address of an external network that leads to a port, or to nothing yet.
type FloatingIP struct {
	ID   string
	Addr netip.Addr
	// Port is the id of its port, "" for none, and Fixed the address there.
	Port  string
	Fixed netip.Addr
	// Ours says that it was created for this cluster. Others belong to a user.
	Ours bool
	// Purpose is the purpose given to ReserveFloatingIP; "" for one that was created for its port.
	Purpose string
	// KeptFor is the namespace that RetainFloatingIP gave it to; CLUSTER/NAMESPACE for one of another cluster.
	KeptFor string
}

// FloatingIPs returns the floating IPs of this cluster, by id.
func (c *Client) FloatingIPs(ctx context.Context) ([]FloatingIP, error) {
	all, err := c.AllFloatingIPs(ctx)
	return slices.DeleteFunc(all, func(f FloatingIP) bool { return !f.Ours }), err
}

// FindFloatingIP returns the floating IP with an id or an address in this project, of any owner, or ErrGone.
func (c *Client) FindFloatingIP(ctx context.Context, idOrAddr string) (FloatingIP, error) {
	opts := floatingips.ListOpts{ID: idOrAddr}
	if _, err := netip.ParseAddr(idOrAddr); err == nil {
		opts = floatingips.ListOpts{FloatingIP: idOrAddr}
	}
	found, err := c.listFloatingIPs(ctx, opts)
	if err != nil {
		return FloatingIP{}, err
	}
	if len(found) == 0 {
		return FloatingIP{}, fmt.Errorf("floating IP %s: %w", idOrAddr, ErrGone)
	}
	return found[0], nil
}

// CreateFloatingIP returns a floating IP of an external network that leads to an IPv4 address of a port: a new one, or
// the existing one. One request creates and associates it, so a crash leaves both or none; Neutron refuses a second one
// of the same address.
func (c *Client) CreateFloatingIP(ctx context.Context, network, port string, fixed netip.Addr) (FloatingIP, error) {
	f, err := c.createFloatingIP(ctx, network, port, fixed)
	if !errors.Is(err, ErrTaken) {
		return f, err
	}
	existing, listed := c.FloatingIPs(ctx)
	if i := slices.IndexFunc(existing, func(f FloatingIP) bool { return f.Port == port && f.Fixed == fixed }); i >= 0 {
		return existing[i], nil
	}
	return FloatingIP{}, errors.Join(err, listed)
}

func (c *Client) createFloatingIP(ctx context.Context, network, port string, fixed netip.Addr) (f FloatingIP, err error) {
	err = c.call(ctx, "create floating IP", func(ctx context.Context, s *session) error {
		made, err := floatingips.Create(ctx, s.network, floatingips.CreateOpts{
			FloatingNetworkID: network, PortID: port, FixedIP: fixed.String(), Description: c.description(),
		}).Extract()
		if err != nil {
			return err
		}
		f, err = c.floatingIP(made)
		return err
	})
	return f, err
}

// ReserveFloatingIP returns a floating IP of an external network that leads to nothing yet: a new one, or the one that an
// earlier call with the same purpose created, wherever that leads. A purpose must not contain a closing bracket.
func (c *Client) ReserveFloatingIP(ctx context.Context, network, purpose string) (f FloatingIP, err error) {
	existing, err := c.FloatingIPs(ctx)
	if err != nil {
		return FloatingIP{}, err
	}
	if i := slices.IndexFunc(existing, func(f FloatingIP) bool { return f.Purpose == purpose }); i >= 0 {
		return existing[i], nil
	}
	err = c.call(ctx, "reserve floating IP", func(ctx context.Context, s *session) error {
		made, err := floatingips.Create(ctx, s.network, floatingips.CreateOpts{FloatingNetworkID: network, Description: c.reserved(purpose)}).Extract()
		if err != nil {
			return err
		}
		f, err = c.floatingIP(made)
		return err
	})
	return f, err
}

// AssociateFloatingIP makes a floating IP, of this cluster or of a user, lead to an IPv4 address of a port, or to nothing
// when port is empty. It returns ErrStale when the floating IP was changed meanwhile: the caller must read it again.
func (c *Client) AssociateFloatingIP(ctx context.Context, id, port string, fixed netip.Addr) error {
	return c.call(ctx, "associate floating IP "+id, func(ctx context.Context, s *session) error {
		is, err := floatingips.Get(ctx, s.network, id).Extract()
		if err != nil {
			return err
		}
		if is.PortID == port && (port == "" || is.FixedIP == fixed.String()) {
			return nil
		}
		opts := floatingips.UpdateOpts{PortID: &port, RevisionNumber: &is.RevisionNumber}
		if port != "" {
			opts.FixedIP = fixed.String() // required if the port has two
		}
		_, err = floatingips.Update(ctx, s.network, id, opts).Extract()
		return err
	})
}

// DeleteFloatingIP deletes a floating IP of this cluster. Deleting one that does not exist is no error.
func (c *Client) DeleteFloatingIP(ctx context.Context, id string) error {
	return c.call(ctx, "delete floating IP "+id, func(ctx context.Context, s *session) error {
		is, err := floatingips.Get(ctx, s.network, id).Extract()
		if err == nil {
			if _, ours := c.owned(is); !ours {
				err = fmt.Errorf("it does not belong to cluster %s: its description is %q", c.cfg.Cluster, is.Description)
			}
		}
		if err == nil {
			err = floatingips.Delete(ctx, s.network, id).ExtractErr()
		}
		if errors.Is(explain(err), ErrGone) {
			return nil
		}
		return err
	})
}

// description records the owner of a floating IP for us and for people. No other field can be set when it is created and
// be used for listing.
func (c *Client) description() string {
	return "Isthmus gateway" + c.suffix()
}

// reserved is description with a purpose.
func (c *Client) reserved(purpose string) string {
	return reservedPrefix + purpose + ")" + c.suffix()
}

const reservedPrefix = "Isthmus gateway ("

func (c *Client) suffix() string { return " of the Kubernetes cluster " + c.cfg.Cluster }

// owned reports whether a floating IP belongs to this cluster, and the purpose that it was reserved for.
func (c *Client) owned(f *floatingips.FloatingIP) (purpose string, ours bool) {
	if f.Description == c.description() {
		return "", true
	}
	rest, begins := strings.CutPrefix(f.Description, reservedPrefix)
	purpose, ends := strings.CutSuffix(rest, ")"+c.suffix())
	if !begins || !ends || strings.Contains(purpose, ")") { // with a bracket, it belongs to a cluster whose id looks like this
		return "", false
	}
	return purpose, true
}

func (c *Client) listFloatingIPs(ctx context.Context, opts floatingips.ListOpts) (all []FloatingIP, err error) {
	err = c.call(ctx, "list floating IPs", func(ctx context.Context, s *session) error {
		opts.ProjectID = s.project
		all, err = list(ctx, floatingips.List(s.network, opts), floatingips.ExtractFloatingIPs, c.floatingIP, func(f FloatingIP) string { return f.ID })
		return err
	})
	return all, err
}

func (c *Client) floatingIP(f *floatingips.FloatingIP) (FloatingIP, error) {
	is := FloatingIP{ID: f.ID, Port: f.PortID}
	is.Purpose, is.Ours = c.owned(f)
	is.KeptFor = c.keptFor(f.Description)
	var err error
	if is.Addr, err = netip.ParseAddr(f.FloatingIP); err != nil {
		return FloatingIP{}, fmt.Errorf("floating IP %s has the address %q: %w", f.ID, f.FloatingIP, err)
	}
	if f.FixedIP != "" {
		if is.Fixed, err = netip.ParseAddr(f.FixedIP); err != nil {
			return FloatingIP{}, fmt.Errorf("floating IP %s leads to the address %q: %w", f.ID, f.FixedIP, err)
		}
	}
	return is, nil
}

// AllFloatingIPs returns all floating IPs of the project, of any owner, by id.
func (c *Client) AllFloatingIPs(ctx context.Context) ([]FloatingIP, error) {
	return c.listFloatingIPs(ctx, floatingips.ListOpts{})
}

// RetainFloatingIP gives a floating IP of this cluster to the users of a namespace: it is never deleted from then on. One of
// another owner already belongs to a user.
func (c *Client) RetainFloatingIP(ctx context.Context, id, namespace string) error {
	return c.call(ctx, "retain floating IP "+id, func(ctx context.Context, s *session) error {
		is, err := floatingips.Get(ctx, s.network, id).Extract()
		if err != nil || is.Description != c.description() {
			return err
		}
		kept := keptPrefix + namespace + keptBy + c.cfg.Cluster
		_, err = floatingips.Update(ctx, s.network, id, floatingips.UpdateOpts{Description: &kept, RevisionNumber: &is.RevisionNumber}).Extract()
		return err
	})
}

// keptPrefix and keptBy are the parts of the description of a floating IP that was retained, before the namespace and the
// cluster. The description is the only place in Neutron that outlives the Service.
const (
	keptPrefix = "Kept for namespace "
	keptBy     = "; allocated by the Isthmus gateway of the Kubernetes cluster "
)

// keptFor returns the namespace in the description of a retained floating IP, "" for none.
func (c *Client) keptFor(description string) string {
	rest, kept := strings.CutPrefix(description, keptPrefix)
	namespace, cluster, by := strings.Cut(rest, keptBy)
	switch {
	case !kept || !by:
		return ""
	case cluster != c.cfg.Cluster:
		return cluster + "/" + namespace
	}
	return namespace
}
