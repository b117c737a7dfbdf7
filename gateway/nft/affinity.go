package nft

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/flows"
)

// The rules of clients that stay with their backend stand in a chain for each time that they stay: a rule adds elements that
// live for one time only. Which chain is a frontend's says the map affinity; the chains come and go with its elements.
const affinityPrefix = "stays-"

// maxClients is how many clients there is room for. For more of them the hash alone says where they stay.
const maxClients = 1 << 18

func affinityChainName(seconds int32) string { return affinityPrefix + strconv.Itoa(int(seconds)) }

// stayChain is the chain of a name that stayName gave.
func affinityChain(name string) (chain, error) {
	seconds, err := strconv.Atoi(strings.TrimPrefix(name, affinityPrefix))
	if err != nil {
		return chain{}, fmt.Errorf("chain %s is none of ours: %w", name, err)
	}
	c := chain{Chain: &nftables.Chain{Name: name, Table: ourTable}}
	for _, f := range []family{ipv4, ipv6} {
		c.rules = append(c.rules, f.affinity(time.Duration(seconds)*time.Second)...)
	}
	return c, nil
}

// stay keeps a client with its backend for a time after its last connection, while that one serves. In the registers stand
// the client, the frontend, and then the backend, so that each two that belong together are side by side.
func (f family) affinity(lives time.Duration) []rule {
	client, frontend, backend := uint32(0), f.addr, f.addr+f.key
	remember := func(operation uint32) []expr.Any {
		return one(&expr.Dynset{
			SrcRegKey: reg(client), SrcRegData: reg(backend), SetName: familySet{clients, f.v4}.name(), Operation: operation, Timeout: lives,
		})
	}
	who := join(f.is, f.client(client), f.frontendAt(frontend))
	known := join(who, f.mappedFrom(client, clients, backend))
	serving := func(not bool) []expr.Any {
		return one(&expr.Lookup{SourceRegister: reg(frontend), SetName: familySet{affinityBackends, f.v4}.name(), Invert: not})
	}
	return []rule{
		{"the backend of before", join(known, serving(false), remember(unix.NFT_DYNSET_OP_UPDATE), f.dnat(backend))},
		{"the backend of before serves no more", join(known, serving(true), remember(dynsetDelete))},
		{"by the hash of the client", join(who, slot(client, f.addr, backend), f.mappedFrom(frontend, slotsAffine, backend), remember(unix.NFT_DYNSET_OP_UPDATE), f.dnat(backend))},
	}
}

// dynsetDelete is NFT_DYNSET_OP_DELETE of linux/netfilter/nf_tables.h.
const dynsetDelete = 2

// stayChains are the names of the chains that the elements lead to.
func (b *contents) affinityChains() map[string]bool {
	names := map[string]bool{}
	for _, v4 := range []bool{true, false} {
		for _, values := range b.wanted[familySet{affinity, v4}] {
			for name := range values {
				names[name] = true
			}
		}
	}
	return names
}

// addStays adds the chains that are missing, before the elements that lead to them.
func (b *Balancer) addAffinityChains(conn *nftables.Conn, have, want map[string]bool) error {
	for name := range want {
		if have[name] {
			continue
		}
		c, err := affinityChain(name)
		if err != nil {
			return err
		}
		c.add(conn, b.version)
	}
	return nil
}

// removeStays removes those that no element leads to any more.
func removeAffinityChains(conn *nftables.Conn, have, want map[string]bool) {
	for name := range have {
		if !want[name] {
			c := &nftables.Chain{Name: name, Table: ourTable}
			conn.FlushChain(c)
			conn.DelChain(c)
		}
	}
}

// meeting is a client that another gateway told of.
type clientElement struct {
	place   familySet
	element nftables.SetElement
}

// meet makes known with which backends other gateways' clients stay. One that has come here before stays where it is.
func (b *Balancer) importClients(is sharedState, all []*flows.Flow) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	var news []clientElement
	for _, f := range all {
		lives := is.affinity(f)
		if lives == 0 {
			continue
		}
		p := familySet{clients, f.VIP.Addr().Is4()}
		key := string(f.Client.Addr().AsSlice()) + endpoint(f.VIP.Addr(), protocol(&desired.Frontend{Protocol: f.Protocol}), f.VIP.Port())
		if until, ok := b.imported[key]; ok && now.Before(until) {
			continue
		}
		b.imported[key] = now.Add(lives / 2)
		news = append(news, clientElement{p, nftables.SetElement{Key: []byte(key), Val: []byte(addrPort(f.Backend)), Timeout: lives}})
	}
	for key, until := range b.imported {
		if len(b.imported) <= maxClients && now.Before(until) {
			break // a look at any one of them each time is enough
		}
		delete(b.imported, key)
	}
	if len(news) == 0 || b.addClients(news) == nil {
		return nil
	}
	// The kernel refuses who stays with another backend here, and all that comes in the same transaction.
	left, err := b.unknownClients(news)
	if err == nil {
		err = b.addClients(left)
	}
	if err != nil {
		return fmt.Errorf("make clients of another gateway known: %w", err)
	}
	return nil
}

// strangers returns those who are not known here.
func (b *Balancer) unknownClients(all []clientElement) (left []clientElement, err error) {
	s, err := b.open()
	if err != nil {
		return nil, err
	}
	known := map[string]bool{}
	for _, v4 := range []bool{true, false} {
		elements, err := s.rules.GetSetElements(familySet{clients, v4}.spec())
		if err != nil {
			return nil, fmt.Errorf("read clients: %w", err)
		}
		for _, e := range elements {
			known[string(e.Key)] = true
		}
	}
	for _, m := range all {
		if len(known) < maxClients && !known[string(m.element.Key)] {
			left = append(left, m)
			known[string(m.element.Key)] = true
		}
	}
	return left, nil
}

// introduce adds clients in one transaction.
func (b *Balancer) addClients(some []clientElement) (err error) {
	defer func() {
		if err != nil {
			b.reopen()
		}
	}()
	s, err := b.open()
	if err != nil {
		return err
	}
	before, err := s.generation()
	if err != nil {
		return err
	}
	for _, m := range some {
		if err := s.rules.SetAddElements(m.place.spec(), []nftables.SetElement{m.element}); err != nil {
			return err
		}
	}
	if err := s.rules.Flush(); err != nil {
		return fmt.Errorf("write clients: %w", err)
	}
	if after, err := s.generation(); err == nil && before == b.generation && after == before+1 {
		b.generation = after
	}
	return nil
}
