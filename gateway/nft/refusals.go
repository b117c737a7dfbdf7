package nft

import (
	"strings"

	"github.com/isthmus-net/isthmus/gateway/flows"
)

// Destinations of refused packets, in the reasons of rules, see refuse.
const (
	toVIP   = "to a VIP of the gateways"
	toEmpty = "to a frontend without backends"
)

// refusals are the reasons of rules that refuse packets, by the beginning of the rule's own. They are the names of a bpf.DropReason.
var refusals = []struct{ rule, reason string }{
	{"refuse clients outside of the sources", "source"},
	{"drop a reply of a backend without its connection", "no_flow"},
	{"drop a packet of a backend", "no_flow"},
	{"too many such packets", "no_flow"},
	{"drop a packet of no connection", "no_connection"},
	{"reset TCP: " + toVIP, "no_frontend"},
	{"reject: " + toVIP, "no_frontend"},
	{"reset TCP: " + toEmpty, "no_backend"},
	{"reject: " + toEmpty, "no_backend"},
}

// handOvers are the beginnings of rules that hand packets over to peers.
var handOvers = []string{"to the peer that keeps", "to the owner", "hand it on", "it was handed over"}

// Refusals returns how many packets were refused or dropped since the table was created. Rules do not know Services.
func (b *Balancer) Refusals() (map[flows.Refusal]uint64, error) {
	all := map[flows.Refusal]uint64{}
	return all, b.eachRule(func(r kernelRule) {
		for _, of := range refusals {
			if strings.HasPrefix(r.comment, of.rule) {
				all[flows.Refusal{Reason: of.reason}] += r.packets
			}
		}
	})
}

// HandedOver returns how many packets of unknown connections were handed over to peers since the table was created.
func (b *Balancer) HandedOver() (n uint64) {
	_ = b.eachRule(func(r kernelRule) { // Refusals has the error
		for _, rule := range handOvers {
			if strings.HasPrefix(r.comment, rule) {
				n += r.packets
			}
		}
	})
	return n
}

// eachRule calls do for each rule in the kernel.
func (b *Balancer) eachRule(do func(kernelRule)) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	s, err := b.open()
	if err != nil {
		return err
	}
	for _, f := range families {
		all, err := s.rulesInKernel(f.table)
		if err != nil {
			return err
		}
		for _, r := range all {
			do(r)
		}
	}
	return nil
}
