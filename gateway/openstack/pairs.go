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

// staleTries bounds the attempts to change an object that others change at the same time.
const staleTries = 5

// PairsExhausted is ErrPairs with the requested prefixes that the port does not let pass.
type PairsExhausted struct {
	Missing []netip.Prefix // sorted

	cause error
}

// Error implements error.
func (n *PairsExhausted) Error() string {
	texts := make([]string, len(n.Missing))
	for i, p := range n.Missing {
		texts[i] = textOf(p)
	}
	return fmt.Sprintf("the limit excludes %s: %v", strings.Join(texts, ", "), n.cause)
}

// Unwrap returns the error of Neutron.
func (n *PairsExhausted) Unwrap() error { return n.cause }

// SetAddressPairs lets a gateway's port, which is not ours, send and receive packets of the prefixes in want. It removes
// those in had that are no longer wanted, and leaves pairs of others alone. It writes nothing when nothing changes. A
// port with a lower limit keeps its pairs and gets as many of the new ones as it may have; the error is then a
// *PairsExhausted.
func (c *Client) SetAddressPairs(ctx context.Context, port string, had, want []netip.Prefix) error {
	return c.call(ctx, "set allowed address pairs of port "+port, func(ctx context.Context, s *session) error {
		m, err := c.writePairs(ctx, s, port, had, want, math.MaxInt)
		said := explain(err)
		if !errors.Is(said, ErrPairs) {
			return err
		}
		// Neutron tells the limit only to administrators, so it is found by bisection.
		fits, refused, limit := m.existing, len(m.pairs), m.existing
		for {
			m, err := c.writePairs(ctx, s, port, had, want, limit)
			switch {
			case errors.Is(explain(err), ErrPairs) && len(m.pairs) > m.existing:
				refused = len(m.pairs)
			case err != nil:
				return err
			case len(m.missing) == 0: // another pair was removed meanwhile
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

// writePairs makes one write of SetAddressPairs, with at most limit pairs in all.
func (c *Client) writePairs(ctx context.Context, s *session, port string, had, want []netip.Prefix, limit int) (m mergedPairs, err error) {
	for try := 1; ; try++ {
		is, err := ports.Get(ctx, s.network, port).Extract()
		if err != nil {
			return m, err
		}
		m = mergePairs(is.AllowedAddressPairs, is.MACAddress, had, want, limit)
		if slices.Equal(m.pairs, is.AllowedAddressPairs) {
			return m, nil
		}
		_, err = ports.Update(ctx, s.network, port, ports.UpdateOpts{AllowedAddressPairs: &m.pairs, RevisionNumber: &is.RevisionNumber}).Extract()
		if !errors.Is(explain(err), ErrStale) || try == staleTries {
			return m, err
		}
	}
}

// mergedPairs are the pairs that a port should have.
type mergedPairs struct {
	pairs    []ports.AddressPair
	existing int            // number of pairs that it already has
	missing  []netip.Prefix // wanted prefixes beyond the limit, sorted
}

// mergePairs adds want to the pairs of a port, up to limit in all, and removes the prefixes in had that are not wanted.
// Our pairs have the port's own MAC address, which Neutron fills in.
func mergePairs(pairs []ports.AddressPair, mac string, had, want []netip.Prefix, limit int) mergedPairs {
	missing := slices.Clone(want)
	m := mergedPairs{pairs: []ports.AddressPair{}} // Neutron wants an empty list, not null
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

// prefixOf parses a prefix or an address of Neutron.
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

// AddressPairs returns the prefixes that a port may send from besides its own addresses, of any owner.
func (c *Client) AddressPairs(ctx context.Context, port string) (all []netip.Prefix, err error) {
	err = c.call(ctx, "read allowed address pairs of port "+port, func(ctx context.Context, s *session) error {
		is, err := ports.Get(ctx, s.network, port).Extract()
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
