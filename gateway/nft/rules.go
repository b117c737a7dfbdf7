package nft

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"github.com/google/nftables"
	"github.com/google/nftables/userdata"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// kernelRule is the part of a rule that is read back. The library cannot parse expressions that match one direction of a
// connection.
type kernelRule struct {
	chain, comment string
	packets        uint64 // of its counter
}

// rulesInKernel returns the rules of a table of ours, in order by chain.
func (s *sockets) rulesInKernel(of *nftables.Table) (all []kernelRule, err error) {
	req := s.request(unix.NFT_MSG_GETRULE, unix.NLM_F_DUMP)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: uint8(of.Family), Version: nl.NFNETLINK_V0})
	req.AddData(nl.NewRtAttr(unix.NFTA_RULE_TABLE, nl.ZeroTerminated(Table)))
	messages, err := req.Execute(unix.NETLINK_NETFILTER, 0)
	if err != nil {
		return nil, fmt.Errorf("list rules of %s: %w", Table, err)
	}
	for _, m := range messages {
		var r kernelRule
		if err := attributes(m[nl.SizeofNfgenmsg:], func(kind uint16, value []byte) error {
			switch kind {
			case unix.NFTA_RULE_CHAIN:
				r.chain = string(bytes.TrimRight(value, "\x00"))
			case unix.NFTA_RULE_USERDATA:
				r.comment, _ = userdata.GetString(value, userdata.TypeComment)
			case unix.NFTA_RULE_EXPRESSIONS:
				return r.count(value)
			}
			return nil
		}); err != nil {
			return nil, fmt.Errorf("list rules of %s: %w", Table, err)
		}
		all = append(all, r)
	}
	return all, nil
}

// count reads the counter among the expressions of a rule.
func (r *kernelRule) count(expressions []byte) error {
	return attributes(expressions, func(_ uint16, expression []byte) error {
		var name string
		return attributes(expression, func(kind uint16, value []byte) error {
			switch {
			case kind == unix.NFTA_EXPR_NAME:
				name = string(bytes.TrimRight(value, "\x00"))
			case kind == unix.NFTA_EXPR_DATA && name == "counter":
				return attributes(value, func(kind uint16, value []byte) error {
					if kind == unix.NFTA_COUNTER_PACKETS && len(value) == 8 {
						r.packets = binary.BigEndian.Uint64(value)
					}
					return nil
				})
			}
			return nil
		})
	})
}

// attributes calls each for every attribute in b.
func attributes(b []byte, each func(kind uint16, value []byte) error) error {
	all, err := nl.ParseRouteAttr(b)
	if err != nil {
		return err
	}
	for _, a := range all {
		if err := each(a.Attr.Type&nl.NLA_TYPE_MASK, a.Value); err != nil {
			return err
		}
	}
	return nil
}
