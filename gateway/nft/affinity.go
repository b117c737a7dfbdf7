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

// Each affinity timeout has its own chain, because a rule can only add elements with one fixed timeout. The map affinity
// holds the chain of each frontend; chains come and go with its elements.
const affinityPrefix = "affinity-"

// maxClients bounds the number of remembered clients. Further clients get their backend from the hash alone.
const maxClients = 1 << 18

func affinityChainName(seconds int32) string { return affinityPrefix + strconv.Itoa(int(seconds)) }

// affinityChain returns the chain with a name of affinityChainName.
func (f family) affinityChain(name string) (chain, error) {
	seconds, err := strconv.Atoi(strings.TrimPrefix(name, affinityPrefix))
	if err != nil {
		return chain{}, fmt.Errorf("chain %s is not ours: %w", name, err)
	}
	return chain{&nftables.Chain{Name: name, Table: f.table}, f.affinity(time.Duration(seconds) * time.Second)}, nil
}

// affinity keeps a client with its backend for a timeout after its last connection, while that backend serves. The
// registers hold client, frontend and backend in this order, so that the keys of both lookups are contiguous.
func (f family) affinity(lives time.Duration) []rule {
	client, frontend, backend := uint32(0), f.addr, f.addr+f.key
	remember := func(operation uint32) []expr.Any {
		return one(&expr.Dynset{
			SrcRegKey: reg(client), SrcRegData: reg(backend), SetName: familySet{clients, f.v4}.name(), Operation: operation, Timeout: lives,
		})
	}
	who := join(f.client(client), f.frontendAt(frontend))
	known := join(who, f.mappedFrom(client, clients, backend))
	serving := func(not bool) []expr.Any {
		return one(&expr.Lookup{SourceRegister: reg(frontend), SetName: familySet{affinityBackends, f.v4}.name(), Invert: not})
	}
	return []rule{
		{"the client's previous backend", join(known, serving(false), remember(unix.NFT_DYNSET_OP_UPDATE), f.dnat(backend))},
		{"the client's previous backend no longer serves", join(known, serving(true), remember(dynsetDelete))},
		{"backend by the hash of the client", join(who, slot(client, f.addr, backend), f.mappedFrom(frontend, maglevAffinity, backend), remember(unix.NFT_DYNSET_OP_UPDATE), f.dnat(backend))},
	}
}

// dynsetDelete is NFT_DYNSET_OP_DELETE of linux/netfilter/nf_tables.h.
const dynsetDelete = 2

// affinityChains returns the names of the chains that elements refer to. Both tables have all of them.
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

// addAffinityChains adds missing chains before the elements that refer to them.
func (b *Balancer) addAffinityChains(conn *nftables.Conn, have, want map[string]bool) error {
	for name := range want {
		if have[name] {
			continue
		}
		for _, f := range families {
			c, err := f.affinityChain(name)
			if err != nil {
				return err
			}
			c.add(conn, b.version)
		}
	}
	return nil
}

// removeAffinityChains removes the chains that no element refers to any more.
func removeAffinityChains(conn *nftables.Conn, have, want map[string]bool) {
	for name := range have {
		if !want[name] {
			for _, f := range families {
				c := &nftables.Chain{Name: name, Table: f.table}
				conn.FlushChain(c)
				conn.DelChain(c)
			}
		}
	}
}

// clientElement is the affinity of a client of a peer.
type clientElement struct {
	place   familySet
	element nftables.SetElement
}

// importClients adds the affinity of the peers' clients. A client that is already known here keeps its backend.
func (b *Balancer) importClients(is *sharedState, all []*flows.Flow) error {
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
			break // one stale entry per call is enough
		}
		delete(b.imported, key)
	}
	if len(news) == 0 || b.addClients(news) == nil {
		return nil
	}
	// The kernel refuses a client with another backend, and with it the whole transaction.
	left, err := b.unknownClients(news)
	if err == nil {
		err = b.addClients(left)
	}
	if err != nil {
		return fmt.Errorf("import clients of a peer: %w", err)
	}
	return nil
}

// unknownClients returns those that are not known here.
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

// addClients adds clients in one transaction.
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
