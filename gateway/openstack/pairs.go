package openstack

import (
	"context"
	"errors"
	"net/netip"
	"slices"

	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/ports"
)

// staleTries is how often a change is tried against others who change the same object.
const staleTries = 5

// SetAddressPairs lets a gateway's port, which is not ours, send and receive packets of the prefixes in want. Of those that
// it was told before, had, it takes away what is wanted no more; pairs of others stay. It writes nothing when nothing
// changes, and is ErrPairs when the port may not have so many.
func (c *Client) SetAddressPairs(ctx context.Context, port string, had, want []netip.Prefix) error {
	return c.call(ctx, "set allowed address pairs of port "+port, func(ctx context.Context) error {
		for try := 1; ; try++ {
			is, err := ports.Get(ctx, c.network, port).Extract()
			if err != nil {
				return err
			}
			pairs := mergePairs(is.AllowedAddressPairs, is.MACAddress, had, want)
			if slices.Equal(pairs, is.AllowedAddressPairs) {
				return nil
			}
			_, err = ports.Update(ctx, c.network, port, ports.UpdateOpts{AllowedAddressPairs: &pairs, RevisionNumber: &is.RevisionNumber}).Extract()
			if !errors.Is(explain(err), ErrStale) || try == staleTries {
				return err
			}
		}
	})
}

// mergePairs returns the pairs of a port with want in them and had, as far as it is wanted no more, not. A pair of ours
// has the port's own MAC address, which Neutron fills in.
func mergePairs(pairs []ports.AddressPair, mac string, had, want []netip.Prefix) []ports.AddressPair {
	missing := slices.Clone(want)
	merged := []ports.AddressPair{} // none is an empty list for Neutron, and not null
	for _, pair := range pairs {
		prefix, ok := prefixOf(pair.IPAddress)
		if !ok || pair.MACAddress != "" && pair.MACAddress != mac {
			merged = append(merged, pair)
			continue
		}
		wanted := slices.Contains(want, prefix)
		if wanted {
			missing = slices.DeleteFunc(missing, func(p netip.Prefix) bool { return p == prefix })
		}
		if wanted || !slices.Contains(had, prefix) {
			merged = append(merged, pair)
		}
	}
	slices.SortFunc(missing, netip.Prefix.Compare)
	for _, p := range slices.Compact(missing) {
		merged = append(merged, ports.AddressPair{IPAddress: textOf(p)})
	}
	return merged
}

// prefixOf reads what Neutron has for a prefix: an address alone is one as well.
func prefixOf(s string) (netip.Prefix, bool) {
	if addr, err := netip.ParseAddr(s); err == nil {
		return netip.PrefixFrom(addr, addr.BitLen()), true
	}
	p, err := netip.ParsePrefix(s)
	return p, err == nil
}

func textOf(p netip.Prefix) string {
	if p.IsSingleIP() {
		return p.Addr().String()
	}
	return p.String()
}

// AddressPairs returns the prefixes that a port may send from, besides its own addresses, whoever allowed them.
func (c *Client) AddressPairs(ctx context.Context, port string) (all []netip.Prefix, err error) {
	err = c.call(ctx, "read allowed address pairs of port "+port, func(ctx context.Context) error {
		is, err := ports.Get(ctx, c.network, port).Extract()
		if err != nil {
			return err
		}
		for _, pair := range is.AllowedAddressPairs {
			if p, ok := prefixOf(pair.IPAddress); ok {
				all = append(all, p)
			}
		}
		return nil
	})
	return all, err
}
