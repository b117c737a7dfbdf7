package nft

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"
)

// Table is the name of our nftables tables, of the families ip and ip6. In family inet, `dup` does not exist.
const Table = "isthmus-gateway"

// hashSeed must be the same on all gateways of a group.
const hashSeed = 0x15740005

var (
	table4 = &nftables.Table{Family: nftables.TableFamilyIPv4, Name: Table}
	table6 = &nftables.Table{Family: nftables.TableFamilyIPv6, Name: Table}
)

// families are both, in the order in which their tables are written.
var families = [2]family{ipv4, ipv6}

var setNames = [setCount]string{
	"maglev", "maglev-restricted", "maglev-affinity", "restricted", "sources", "vips", "refused", "backends", "backend-frontends",
	"routed-backends", "snat", "masquerade", "affinity", "affinity-backends", "clients", "own-ports", "owners", "previous-owners", "peers",
	"peer-addresses", "unknown", "awaited",
}

func (p familySet) name() string { return setNames[p.set] }

func (p familySet) table() *nftables.Table {
	if p.v4 {
		return table4
	}
	return table6
}

// familySets returns all sets of both families.
func familySets() (all []familySet) {
	for s := range setCount {
		all = append(all, familySet{s, true}, familySet{s, false})
	}
	return all
}

// spec returns the nftables declaration of a set or map.
func (p familySet) spec() *nftables.Set {
	addr := nftables.TypeIP6Addr
	if p.v4 {
		addr = nftables.TypeIPAddr
	}
	proto, port := nftables.TypeInetProto, nftables.TypeInetService
	s := &nftables.Set{Table: p.table(), Name: p.name()}
	switch p.set {
	case maglev, maglevRestricted, maglevAffinity:
		s.KeyType, s.DataType = nftables.MustConcatSetType(addr, proto, port, nftables.TypeMark), nftables.MustConcatSetType(addr, port)
	case sources:
		s.KeyType = nftables.MustConcatSetType(addr, proto, port, addr)
		s.Interval = true
	case restricted, refused, backends, routedBackends:
		s.KeyType = nftables.MustConcatSetType(addr, proto, port)
	case backendFrontends:
		s.KeyType, s.DataType = nftables.MustConcatSetType(addr, proto, port), nftables.MustConcatSetType(addr, port)
	case affinity:
		s.KeyType, s.DataType, s.IsMap = nftables.MustConcatSetType(addr, proto, port), nftables.TypeVerdict, true
	case affinityBackends:
		s.KeyType = nftables.MustConcatSetType(addr, proto, port, addr, port)
	case clients:
		s.KeyType, s.DataType = nftables.MustConcatSetType(addr, addr, proto, port), nftables.MustConcatSetType(addr, port)
		s.HasTimeout, s.Dynamic, s.Size = true, true, maxClients
	case unknown, awaited:
		s.KeyType = nftables.MustConcatSetType(addr, port, addr, port)
		s.HasTimeout, s.Dynamic, s.Size = true, true, maxUnknown
	case ownPorts:
		s.KeyType, s.DataType = port, port
	case owners, previousOwners:
		s.KeyType, s.DataType = port, addr
	case peers:
		s.KeyType, s.DataType = nftables.TypeMark, addr
	default:
		s.KeyType = addr
	}
	s.IsMap = s.IsMap || s.DataType.Bytes > 0
	switch p.set {
	case vipSet, snat, masquerade, ownPorts, owners, previousOwners, peers, peerAddrs:
	default:
		s.Concatenation = true
	}
	return s
}

// chain is a chain of the table with its rules.
type chain struct {
	*nftables.Chain
	rules []rule
}

// rule is a rule with the reason that `nft list` shows.
type rule struct {
	why   string
	exprs []expr.Any
}

// chains returns the chains of a family's table: first those that are jumped to, then the others in the order in which packets pass them.
func (f family) chains() []chain {
	c := func(name string, kind nftables.ChainType, hook *nftables.ChainHook, priority *nftables.ChainPriority, rules []rule) chain {
		return chain{Chain: &nftables.Chain{Name: name, Table: f.table, Type: kind, Hooknum: hook, Priority: priority}, rules: rules}
	}
	return []chain{
		c("answer-from-peer", "", nil, nil, f.answerFromPeer()),
		c("question-from-peer", "", nil, nil, f.questionFromPeer()),
		c("from-peers", "", nil, nil, f.fromPeers()),
		c("to-keeper", "", nil, nil, f.toKeeper()),
		c("to-owner", "", nil, nil, f.toOwner()),
		c("to-peers", "", nil, nil, f.toPeers()),
		c("unknown", "", nil, nil, f.unknown()),
		c("answers", nftables.ChainTypeFilter, nftables.ChainHookPrerouting, nftables.ChainPriorityMangle, f.answers()),
		c("balance", nftables.ChainTypeNAT, nftables.ChainHookPrerouting, nftables.ChainPriorityNATDest, f.balance()),
		c("refuse", nftables.ChainTypeFilter, nftables.ChainHookPrerouting, nftables.ChainPriorityFilter, f.refuse()),
		c("returns", nftables.ChainTypeFilter, nftables.ChainHookForward, nftables.ChainPriorityFilter, f.returns()),
		c("source", nftables.ChainTypeNAT, nftables.ChainHookPostrouting, nftables.ChainPriorityNATSource, f.source()),
	}
}

// balance receives the first packet of a connection, or the first one that this gateway receives of it.
func (f family) balance() []rule {
	client := f.key + 1 // after the slot
	byHash := func(s set) []expr.Any {
		return join(f.frontend, f.client(client), load(sourcePort, client+f.addr), slot(client, f.addr+1, f.key), f.mapped(s, client), f.dnat(client))
	}
	return []rule{
		{"backend by the hash of client and port", byHash(maglev)},
		{"refuse clients outside of the sources", join(f.frontend, f.in(restricted), f.client(f.key), f.notIn(sources), count, drop)},
		{"backend of a client among the sources, by the hash of client and port", byHash(maglevRestricted)},
		{"session affinity", join(f.frontend, f.jump(affinity))},
		{"session affinity with a full table, by the hash of the client", join(f.frontend, f.client(client), slot(client, f.addr, f.key), f.mapped(maglevAffinity, client), f.dnat(client))},
	}
}

// refuse receives packets for a VIP that no rule of balance took.
func (f family) refuse() []rule {
	rules := []rule{
		{"established connections pass", join(known, accept)},
		{"the packet was balanced", join(destinationTranslated, accept)},
	}
	for _, r := range []struct {
		why  string
		what []expr.Any
	}{
		{toEmpty, join(f.frontend, f.in(refused))},
		{toVIP, join(load(f.destination, 0), f.in(vipSet))},
	} {
		rules = append(rules,
			rule{"drop a reply of a backend without its connection: " + r.why, join(r.what, f.sender, f.in(backends), count, drop)},
			rule{"drop a packet of no connection: " + r.why, join(r.what, state(expr.CtStateBitINVALID), count, drop)},
			rule{"reset TCP: " + r.why, join(r.what, protocolIs(unix.IPPROTO_TCP), count, reset)},
			rule{"reject: " + r.why, join(r.what, count, f.unreachable)})
	}
	return rules
}

// returns receives packets of backends. One without a connection must not leave with the backend's address.
func (f family) returns() []rule {
	from := join(f.sender, f.in(backends))
	return []rule{
		{"translated packets have a connection", join(destinationTranslated, accept)},
		{"drop a packet of a backend without a connection", join(from, state(expr.CtStateBitINVALID), count, drop)},
		{"a backend opens a connection from its serving port", join(from, protocolIs(unix.IPPROTO_TCP), flags(synAck, syn), accept)},
		{"drop a packet of a backend with several frontends", join(from, original, untranslated, f.notIn(backendFrontends), count, drop)},
	}
}

// source receives the first packet of a connection as it leaves. The kernel keeps the client's port if it is free and in
// the range. A connection that did not begin here more likely has its client's port than one of this gateway's.
func (f family) source() []rule {
	to := f.key // after the key
	ports := to + f.addr
	toVIP := join(destinationTranslated, originalDestination(0), f.in(snat), originalDestination(to))
	anyPort := one(&expr.NAT{Type: expr.NATTypeSourceNAT, Family: f.nfproto, RegAddrMin: reg(to)})
	ownPort := join(lastOf(ports, ports+1), one(&expr.NAT{Type: expr.NATTypeSourceNAT, Family: f.nfproto, RegAddrMin: reg(to), RegProtoMin: reg(ports), RegProtoMax: reg(ports + 1)}))
	shown := &expr.NAT{Type: expr.NATTypeSourceNAT, Family: f.nfproto, RegAddrMin: reg(to), RegProtoMin: reg(to + f.addr)}
	return []rule{
		{"masquerade", join(destinationTranslated, originalDestination(0), f.in(masquerade), one(&expr.Masq{}))},
		{"SNAT to the VIP, of a TCP connection of another gateway", join(toVIP, protocolIs(unix.IPPROTO_TCP), flags(syn, 0), anyPort)},
		{"SNAT to the VIP, with a port of the gateway's slots", join(toVIP, slotOf(sourcePort, ports), f.mappedFrom(ports, ownPorts, ports), ownPort)},
		{"SNAT to the VIP, without slots", join(toVIP, anyPort)},
		{"TCP connection of another gateway, identified by its backend", join(protocolIs(unix.IPPROTO_TCP), flags(syn, 0), f.sender, f.mapped(backendFrontends, to), one(shown))},
		{"UDP connection of another gateway, identified by its backend", join(protocolIs(unix.IPPROTO_UDP), f.sender, f.mapped(backendFrontends, to), one(shown))},
	}
}

// version returns a digest of sets, chains and rules. A table with another version is created again.
func version(all []chain) (string, error) {
	h := sha256.New()
	for _, p := range familySets() {
		s := p.spec()
		fmt.Fprintln(h, s.Table.Family, s.Name, s.KeyType.Name, s.DataType.Name, s.Interval, s.Concatenation, s.Size)
	}
	for _, c := range all {
		fmt.Fprintln(h, c.Table.Family, c.Name, c.Type)
		if c.Hooknum != nil {
			fmt.Fprintln(h, *c.Hooknum, *c.Priority)
		}
		for _, r := range c.rules {
			for _, e := range r.exprs {
				b, err := expr.Marshal(byte(c.Table.Family), e)
				if err != nil {
					return "", err
				}
				h.Write(b)
			}
		}
	}
	return hex.EncodeToString(h.Sum(nil)[:6]), nil
}

// comment returns the text by which our rules are recognised: their reason and version.
func (r rule) comment(version string) string { return r.why + " #" + version }

// create adds the tables without elements. Existing ones are deleted in the same transaction.
func create(c *nftables.Conn, all []chain, version string) error {
	for _, f := range families {
		remove(c, f.table)
		c.AddTable(f.table)
	}
	for _, p := range familySets() {
		s := p.spec()
		s.KeyByteOrder = binaryutil.BigEndian
		if err := c.AddSet(s, nil); err != nil {
			return fmt.Errorf("describe set %s: %w", s.Name, err)
		}
	}
	for _, chain := range all {
		chain.add(c, version)
	}
	return nil
}

// remove removes a table, if there is one.
func remove(c *nftables.Conn, t *nftables.Table) {
	c.AddTable(t) // so that deleting it succeeds
	c.DelTable(t)
}

// add adds a chain with its rules.
func (c chain) add(conn *nftables.Conn, version string) {
	conn.AddChain(c.Chain)
	for _, r := range c.rules {
		conn.AddRule(&nftables.Rule{
			Table: c.Table, Chain: c.Chain, Exprs: r.exprs,
			UserData: userdata.AppendString(nil, userdata.TypeComment, r.comment(version)),
		})
	}
}
