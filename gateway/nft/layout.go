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

// Table is the name of our nftables table, of family inet.
const Table = "isthmus-gateway"

// hashSeed must be the same on all gateways of a group.
const hashSeed = 0x15740005

var ourTable = &nftables.Table{Family: nftables.TableFamilyINet, Name: Table}

// setNames are the names of the sets, without the digit of the address family.
var setNames = [setCount]string{"maglev", "maglev-restricted", "maglev-affinity", "restricted", "sources", "vips", "refused", "backends", "backend-frontends", "snat", "masquerade", "affinity", "affinity-backends", "clients", "own-ports"}

func (p familySet) name() string {
	if p.v4 {
		return setNames[p.set] + "4"
	}
	return setNames[p.set] + "6"
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
	s := &nftables.Set{Table: ourTable, Name: p.name()}
	switch p.set {
	case maglev, maglevRestricted, maglevAffinity:
		s.KeyType, s.DataType = nftables.MustConcatSetType(addr, proto, port, nftables.TypeMark), nftables.MustConcatSetType(addr, port)
	case sources:
		s.KeyType = nftables.MustConcatSetType(addr, proto, port, addr)
		s.Interval = true
	case restricted, refused, backends:
		s.KeyType = nftables.MustConcatSetType(addr, proto, port)
	case backendFrontends:
		s.KeyType, s.DataType = nftables.MustConcatSetType(addr, proto, port), nftables.MustConcatSetType(addr, port)
	case snat:
		s.KeyType, s.DataType = addr, addr
	case affinity:
		s.KeyType, s.DataType, s.IsMap = nftables.MustConcatSetType(addr, proto, port), nftables.TypeVerdict, true
	case affinityBackends:
		s.KeyType = nftables.MustConcatSetType(addr, proto, port, addr, port)
	case clients:
		s.KeyType, s.DataType = nftables.MustConcatSetType(addr, addr, proto, port), nftables.MustConcatSetType(addr, port)
		s.HasTimeout, s.Dynamic, s.Size = true, true, maxClients
	case ownPorts:
		s.KeyType, s.DataType = port, nftables.MustConcatSetType(port, port)
	default:
		s.KeyType = addr
	}
	s.IsMap = s.IsMap || s.DataType.Bytes > 0
	s.Concatenation = p.set != vipSet && p.set != snat && p.set != masquerade && p.set != ownPorts
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

// chains returns the chains of the table, in the order in which packets pass them.
func chains() []chain {
	c := func(name string, kind nftables.ChainType, hook *nftables.ChainHook, priority *nftables.ChainPriority, rules ...func(family) []rule) chain {
		made := chain{Chain: &nftables.Chain{Name: name, Table: ourTable, Type: kind, Hooknum: hook, Priority: priority}}
		if name == "refuse" {
			made.rules = append(made.rules,
				rule{"established connections pass", join(state(expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED), accept)},
				rule{"the packet was balanced", join(destinationTranslated, accept)})
		}
		if name == "returns" {
			made.rules = append(made.rules, rule{"translated packets have a connection", join(destinationTranslated, accept)})
		}
		for _, f := range []family{ipv4, ipv6} {
			for _, r := range rules {
				made.rules = append(made.rules, r(f)...)
			}
		}
		return made
	}
	return []chain{
		c("balance", nftables.ChainTypeNAT, nftables.ChainHookPrerouting, nftables.ChainPriorityNATDest, family.balance),
		c("refuse", nftables.ChainTypeFilter, nftables.ChainHookPrerouting, nftables.ChainPriorityFilter, family.refuse),
		c("returns", nftables.ChainTypeFilter, nftables.ChainHookForward, nftables.ChainPriorityFilter, family.returns),
		c("source", nftables.ChainTypeNAT, nftables.ChainHookPostrouting, nftables.ChainPriorityNATSource, family.source),
	}
}

// balance receives the first packet of a connection, or the first one that this gateway receives of it.
func (f family) balance() []rule {
	client := f.key + 1 // after the slot
	byHash := func(s set) []expr.Any {
		return join(f.is, f.frontend, f.client(client), load(sourcePort, client+f.addr), slot(client, f.addr+1, f.key), f.mapped(s, client), f.dnat(client))
	}
	return []rule{
		{"backend by the hash of client and port", byHash(maglev)},
		{"refuse clients outside of the sources", join(f.is, f.frontend, f.in(restricted), f.client(f.key), f.notIn(sources), count, drop)},
		{"backend of a client among the sources, by the hash of client and port", byHash(maglevRestricted)},
		{"session affinity", join(f.is, f.frontend, f.jump(affinity))},
		{"session affinity with a full table, by the hash of the client", join(f.is, f.frontend, f.client(client), slot(client, f.addr, f.key), f.mapped(maglevAffinity, client), f.dnat(client))},
	}
}

// refuse receives packets for a VIP that no rule of balance took.
func (f family) refuse() []rule {
	var rules []rule
	for _, r := range []struct {
		why  string
		what []expr.Any
	}{
		{"to a VIP of the gateways", join(f.is, load(f.destination, 0), f.in(vipSet))},
		{"to a frontend without backends", join(f.is, f.frontend, f.in(refused))},
	} {
		rules = append(rules,
			rule{"drop a reply of a backend without its connection: " + r.why, join(r.what, f.sender, f.in(backends), count, drop)},
			rule{"drop a packet of no connection: " + r.why, join(r.what, state(expr.CtStateBitINVALID), count, drop)},
			rule{"reset TCP: " + r.why, join(r.what, protocolIs(unix.IPPROTO_TCP), count, reset)},
			rule{"reject: " + r.why, join(r.what, count, unreachable)})
	}
	return rules
}

// returns receives packets of backends. One without a connection must not leave with the backend's address.
func (f family) returns() []rule {
	from := join(f.is, f.sender, f.in(backends))
	return []rule{
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
	toVIP := join(f.is, destinationTranslated, originalDestination, f.mapped(snat, to))
	anyPort := one(&expr.NAT{Type: expr.NATTypeSourceNAT, Family: f.nfproto, RegAddrMin: reg(to)})
	ownPort := one(&expr.NAT{Type: expr.NATTypeSourceNAT, Family: f.nfproto, RegAddrMin: reg(to), RegProtoMin: reg(ports), RegProtoMax: reg(ports + 1)})
	shown := &expr.NAT{Type: expr.NATTypeSourceNAT, Family: f.nfproto, RegAddrMin: reg(to), RegProtoMin: reg(to + f.addr)}
	return []rule{
		{"masquerade", join(f.is, destinationTranslated, originalDestination, f.in(masquerade), one(&expr.Masq{}))},
		{"SNAT to the VIP, of a TCP connection of another gateway", join(toVIP, protocolIs(unix.IPPROTO_TCP), flags(syn, 0), anyPort)},
		{"SNAT to the VIP, with a port of the gateway's slots", join(toVIP, slotOf(sourcePort, ports), f.mappedFrom(ports, ownPorts, ports), ownPort)},
		{"SNAT to the VIP, without slots", join(toVIP, anyPort)},
		{"TCP connection of another gateway, identified by its backend", join(f.is, protocolIs(unix.IPPROTO_TCP), flags(syn, 0), f.sender, f.mapped(backendFrontends, to), one(shown))},
		{"UDP connection of another gateway, identified by its backend", join(f.is, protocolIs(unix.IPPROTO_UDP), f.sender, f.mapped(backendFrontends, to), one(shown))},
	}
}

// version returns a digest of sets, chains and rules. A table with another version is created again.
func version(all []chain) (string, error) {
	h := sha256.New()
	for _, p := range familySets() {
		s := p.spec()
		fmt.Fprintln(h, s.Name, s.KeyType.Name, s.DataType.Name, s.Interval, s.Concatenation, s.Size)
	}
	for _, c := range all {
		fmt.Fprintln(h, c.Name, c.Type)
		if c.Hooknum != nil {
			fmt.Fprintln(h, *c.Hooknum, *c.Priority)
		}
		for _, r := range c.rules {
			for _, e := range r.exprs {
				b, err := expr.Marshal(byte(ourTable.Family), e)
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

// create adds the table without elements. An existing one is deleted in the same transaction.
func create(c *nftables.Conn, all []chain, version string) error {
	c.AddTable(ourTable)
	c.DelTable(ourTable)
	c.AddTable(ourTable)
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

// add adds a chain with its rules.
func (c chain) add(conn *nftables.Conn, version string) {
	conn.AddChain(c.Chain)
	for _, r := range c.rules {
		conn.AddRule(&nftables.Rule{
			Table: ourTable, Chain: c.Chain, Exprs: r.exprs,
			UserData: userdata.AppendString(nil, userdata.TypeComment, r.comment(version)),
		})
	}
}
