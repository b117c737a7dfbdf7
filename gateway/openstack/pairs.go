package openstack

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"

	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/ports"
)

// staleTries is how often a change is tried against others who change the same object.
const staleTries = 5

// NoRoom is ErrPairs, and says which of the prefixes that were asked for a port does not let pass.
type PairsExhausted struct {
	Missing []netip.Prefix // sorted

	cause error
}

// Error is that of error.
func (n *PairsExhausted) Error() string {
	texts := make([]string, len(n.Missing))
	for i, p := range n.Missing {
		texts[i] = textOf(p)
	}
	return fmt.Sprintf("no room for %s: %v", strings.Join(texts, ", "), n.cause)
}

// Unwrap returns what Neutron said.
func (n *PairsExhausted) Unwrap() error { return n.cause }

// SetAddressPairs lets a gateway's port, which is not ours, send and receive packets of the prefixes in want. Of those that
// it was told before, had, it takes away what is wanted no more; pairs of others stay. It writes nothing when nothing
// changes. A port that may not have so many gets as many as it may: those that it has, so that none is lost to another one,
// and then the first of the others. The error is a NoRoom then.
func (c *Client) SetAddressPairs(ctx context.Context, port string, had, want []netip.Prefix) error {
	return c.call(ctx, "set allowed address pairs of port "+port, func(ctx context.Context) error {
		m, err := c.writePairs(ctx, port, had, want, math.MaxInt)
		said := explain(err)
		if !errors.Is(said, ErrPairs) {
			return err
		}
		// How many it may have Neutron tells administrators alone: it is found out by halves.
		fits, refused, limit := m.existing, len(m.pairs), m.existing
		for {
			m, err := c.writePairs(ctx, port, had, want, limit)
			switch {
			case errors.Is(explain(err), ErrPairs) && len(m.pairs) > m.existing:
				refused = len(m.pairs)
			case err != nil:
				return err
			case len(m.missing) == 0: // somebody has made room
				return nil
			case len(m.pairs)+1 >= refused:
				return &PairsExhausted{Missing: m.missing, cause: said}
			default:
				fits = len(m.pairs)
			}
			limit = (fits + refused) / 2
		}
	})
}

// writePairs makes one write of SetAddressPairs: it asks for no more than limit pairs in all.
func (c *Client) writePairs(ctx context.Context, port string, had, want []netip.Prefix, limit int) (m mergedPairs, err error) {
	for try := 1; ; try++ {
		is, err := ports.Get(ctx, c.network, port).Extract()
		if err != nil {
			return m, err
		}
		m = mergePairs(is.AllowedAddressPairs, is.MACAddress, had, want, limit)
		if slices.Equal(m.pairs, is.AllowedAddressPairs) {
			return m, nil
		}
		_, err = ports.Update(ctx, c.network, port, ports.UpdateOpts{AllowedAddressPairs: &m.pairs, RevisionNumber: &is.RevisionNumber}).Extract()
		if !errors.Is(explain(err), ErrStale) || try == staleTries {
			return m, err
		}
	}
}

// merged are the pairs of a port as it is to have them.
type mergedPairs struct {
	pairs    []ports.AddressPair
	existing int            // how many of them it has
	missing  []netip.Prefix // what is wanted and not among them, sorted
}

// mergePairs returns the pairs of a port with want in them, as long as they are no more than limit, and had, as far as it is
// wanted no more, not. A pair of ours has the port's own MAC address, which Neutron fills in.
func mergePairs(pairs []ports.AddressPair, mac string, had, want []netip.Prefix, limit int) mergedPairs {
	missing := slices.Clone(want)
	m := mergedPairs{pairs: []ports.AddressPair{}} // none is an empty list for Neutron, and not null
	for _, pair := range pairs {
		prefix, ok := prefixOf(pair.IPAddress)
		if !ok || pair.MACAddress != "" && pair.MACAddress != mac {
			m.pairs = append(m.pairs, pair)
			continue
		}
		wanted := slices.Contains(want, prefix)
		if wanted {
			missing = slices.DeleteFunc(missing, func(p netip.Prefix) bool { return p == prefix })
		}
		if wanted || !slices.Contains(had, prefix) {
			m.pairs = append(m.pairs, pair)
		}
	}
	m.existing = len(m.pairs)
	slices.SortFunc(missing, netip.Prefix.Compare)
	for _, p := range slices.Compact(missing) {
		if len(m.pairs) >= limit {
			m.missing = append(m.missing, p)
			continue
		}
		m.pairs = append(m.pairs, ports.AddressPair{IPAddress: textOf(p)})
	}
	return m
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
