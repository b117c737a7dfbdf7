package nft

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/flows"
)

// Refused packets are counted by reason, and what goes to peers is counted. Every rule that is named for that exists.
func TestRefusals(t *testing.T) {
	t.Parallel()
	w := newTestbed(t)
	w.serve()
	count := func() (all map[flows.Refusal]uint64, handed uint64) {
		in(t, w.gateways[0].ns, func() (err error) {
			all, err = w.gateways[0].Refusals()
			handed = w.gateways[0].HandedOver()
			return err
		})
		return all, handed
	}
	if all, handed := count(); len(all) > 0 || handed > 0 {
		t.Errorf("before the first state there are %v and %d", all, handed)
	}
	others := each(func(f *desired.Frontend) {
		f.Sources = []netip.Prefix{netip.PrefixFrom(otherAddrs[0], 32), netip.PrefixFrom(otherAddrs[1], 128)}
	})
	tries := func(port uint16) func() {
		return func() { // datagrams, so that nothing is sent twice
			for family := range familyNames {
				c, err := w.dial("udp", netip.AddrPortFrom(clientAddrs[family], 0), netip.AddrPortFrom(vips[family], port))
				if err != nil {
					t.Fatal(err)
				}
				_, _ = c.Write([]byte("?"))
			}
		}
	}
	for _, tc := range []struct {
		reason string
		state  *desired.State
		do     func()
	}{
		{"source", w.state(others), tries(vipPort)},
		{"no_frontend", w.state(), tries(vipPort + 1)},
		{"no_backend", w.state(each(func(f *desired.Frontend) { f.Backends = nil })), tries(vipPort)},
		{"no_flow", w.state(func(v *desired.VIP) { v.Return = desired.SNAT }), func() {
			w.open(0, "download")
			in(t, w.gateways[0].ns, func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) })
		}},
	} {
		w.applySlots(tc.state)
		before, handed := count()
		tc.do()
		w.poll(func() bool {
			all, now := count()
			// An answer goes to its owner, which is the peer for half of the ports.
			return all[flows.Refusal{Reason: tc.reason}] > before[flows.Refusal{Reason: tc.reason}] || tc.reason == "no_flow" && now > handed
		}, tc.reason+": no packet is counted")
	}
	named := slices.Clone(handOvers)
	for _, r := range refusals {
		named = append(named, r.rule)
	}
	for _, name := range named {
		if !hasRule(name) {
			t.Errorf("no rule is %q", name)
		}
	}
}

func hasRule(name string) bool {
	for _, f := range families {
		for _, c := range f.chains() {
			if slices.ContainsFunc(c.rules, func(r rule) bool { return strings.HasPrefix(r.why, name) }) {
				return true
			}
		}
	}
	return false
}
