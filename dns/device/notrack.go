package device

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// Table is the nftables table with the rules of Untrack, of family inet.
const Table = "isthmus-dns"

// Untrack exempts packets from and to addrs from the node's connection tracking: parallel A and AAAA questions of one client
// then cannot race for an entry, and DNS fills no table. It replaces earlier rules atomically. On error the earlier rules
// stay; DNS also works with connection tracking.
func Untrack(addrs []netip.Addr) error {
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("reach nftables: %w", explain(err))
	}
	t := &nftables.Table{Family: nftables.TableFamilyINet, Name: Table}
	c.AddTable(t)
	c.FlushTable(t)
	for name, hook := range map[string]*nftables.ChainHook{"prerouting": nftables.ChainHookPrerouting, "output": nftables.ChainHookOutput} {
		chain := c.AddChain(&nftables.Chain{
			Name: name, Table: t, Type: nftables.ChainTypeFilter, Hooknum: hook, Priority: nftables.ChainPriorityRaw, // before tracking begins
		})
		for _, a := range addrs {
			for _, end := range []end{source, destination} {
				c.AddRule(&nftables.Rule{Table: t, Chain: chain, Exprs: append(matches(a.Unmap(), end), &expr.Notrack{})})
			}
		}
	}
	if err := c.Flush(); err != nil {
		return fmt.Errorf("write nftables table %s: %w", Table, explain(err))
	}
	return nil
}

// end selects the source or the destination of a packet.
type end int

const (
	source end = iota
	destination
)

// matches returns the expressions of a rule that match packets with an address at one end.
func matches(a netip.Addr, e end) []expr.Any {
	family, first, size := byte(unix.NFPROTO_IPV4), uint32(12), uint32(4) // RFC 791, section 3.1
	if a.Is6() {
		family, first, size = unix.NFPROTO_IPV6, 8, 16 // RFC 8200, section 3
	}
	if e == destination {
		first += size
	}
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{family}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: first, Len: size},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: a.AsSlice()},
	}
}

// track removes the rules of Untrack. It succeeds if there are none, or if the kernel has no nftables.
func track() error {
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("reach nftables: %w", explain(err))
	}
	c.DelTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: Table})
	if err := c.Flush(); err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("remove nftables table %s: %w", Table, explain(err))
	}
	return nil
}
