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

// Table is the nftables table of ours, of family inet.
const Table = "isthmus-gateway"

// hashSeed is part of what all gateways of a group must have in common.
const hashSeed = 0x15740005

var ourTable = &nftables.Table{Family: nftables.TableFamilyINet, Name: Table}

// setNames are the sets' names, without the family's number.
var setNames = [setCount]string{"maglev", "screened", "affine", "guarded", "sources", "exclusive", "refused", "backends", "origins", "snat", "masquerade", "affinity", "serving", "clients"}

func (p familySet) name() string {
	if p.v4 {
		return setNames[p.set] + "4"
	}
	return setNames[p.set] + "6"
}

// places returns all sets of both families.
func familySets() (all []familySet) {
	for s := range setCount {
		all = append(all, familySet{s, true}, familySet{s, false})
	}
	return all
}

// spec returns the set or map in the terms of nftables.
func (p familySet) spec() *nftables.Set {
	addr := nftables.TypeIP6Addr
	if p.v4 {
		addr = nftables.TypeIPAddr
	}
	proto, port := nftables.TypeInetProto, nftables.TypeInetService
	s := &nftables.Set{Table: ourTable, Name: p.name()}
	switch p.set {
	case slotsOpen, slotsRestricted, slotsAffine:
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
	default:
		s.KeyType = addr
	}
	s.IsMap = s.IsMap || s.DataType.Bytes > 0
	s.Concatenation = p.set != ownVIPs && p.set != snat && p.set != masquerade
	return s
}

// chain is one of the table's, with its rules.
type chain struct {
	*nftables.Chain
	rules []rule
}

// rule is what stands in a chain; why is what a person reads there.
type rule struct {
	why   string
	exprs []expr.Any
}

// chains are the table's, in the order in which packets see them.
func chains() []chain {
	c := func(name string, kind nftables.ChainType, hook *nftables.ChainHook, priority *nftables.ChainPriority, rules ...func(family) []rule) chain {
		made := chain{Chain: &nftables.Chain{Name: name, Table: ourTable, Type: kind, Hooknum: hook, Priority: priority}}
		if name == "refuse" {
			made.rules = append(made.rules,
				rule{"what goes on is no news", join(state(expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED), accept)},
				rule{"it was taken", join(destinationTranslated, accept)})
		}
		if name == "returns" {
			made.rules = append(made.rules, rule{"what is translated belongs to a connection", join(destinationTranslated, accept)})
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

// balance sees the first packet of a connection, and the first one that this gateway sees of it.
func (f family) balance() []rule {
	client := f.key + 1 // behind the slot
	byHash := func(s set) []expr.Any {
		return join(f.is, f.frontend, f.client(client), load(sourcePort, client+f.addr), slot(client, f.addr+1, f.key), f.mapped(s, client), f.dnat(client))
	}
	return []rule{
		{"by the hash of client and port", byHash(slotsOpen)},
		{"only sources may connect", join(f.is, f.frontend, f.in(restricted), f.client(f.key), f.notIn(sources), count, drop)},
		{"by the hash of a client that may connect, and its port", byHash(slotsRestricted)},
		{"a client stays with its backend", join(f.is, f.frontend, f.jump(affinity))},
		{"a client that there is no room for", join(f.is, f.frontend, f.client(client), slot(client, f.addr, f.key), f.mapped(slotsAffine, client), f.dnat(client))},
	}
}

// refuse sees what is left for a VIP when nothing took it.
func (f family) refuse() []rule {
	var rules []rule
	for _, r := range []struct {
		why  string
		what []expr.Any
	}{
		{"of a VIP, which is nobody else's", join(f.is, load(f.destination, 0), f.in(ownVIPs))},
		{"of a frontend without backends", join(f.is, f.frontend, f.in(refused))},
	} {
		rules = append(rules,
			rule{"a backend's answer, without its connection: " + r.why, join(r.what, f.sender, f.in(backends), count, drop)},
			rule{"it is no beginning: " + r.why, join(r.what, state(expr.CtStateBitINVALID), count, drop)},
			rule{"refuse TCP at once: " + r.why, join(r.what, protocolIs(unix.IPPROTO_TCP), count, reset)},
			rule{"refuse at once: " + r.why, join(r.what, count, unreachable)})
	}
	return rules
}

// returns sees what backends send. What belongs to no connection must not leave with the backend's address.
func (f family) returns() []rule {
	from := join(f.is, f.sender, f.in(backends))
	return []rule{
		{"it belongs to nothing", join(from, state(expr.CtStateBitINVALID), count, drop)},
		{"a backend connects, from the port that it serves", join(from, protocolIs(unix.IPPROTO_TCP), flags(synAck, syn), accept)},
		{"of which frontend it is cannot be told", join(from, original, untranslated, f.notIn(backendFrontends), count, drop)},
	}
}

// source sees the first packet of a connection when it leaves.
func (f family) source() []rule {
	to := f.key // behind the key
	shown := &expr.NAT{Type: expr.NATTypeSourceNAT, Family: f.nfproto, RegAddrMin: reg(to), RegProtoMin: reg(to + f.addr)}
	return []rule{
		{"the gateway's address", join(f.is, destinationTranslated, originalDestination, f.in(masquerade), one(&expr.Masq{}))},
		{"the VIP's address", join(f.is, destinationTranslated, originalDestination, f.mapped(snat, to), one(&expr.NAT{Type: expr.NATTypeSourceNAT, Family: f.nfproto, RegAddrMin: reg(to)}))},
		{"a connection that began elsewhere, told by its backend", join(f.is, protocolIs(unix.IPPROTO_TCP), flags(syn, 0), f.sender, f.mapped(backendFrontends, to), one(shown))},
		{"datagrams of a connection that began elsewhere", join(f.is, protocolIs(unix.IPPROTO_UDP), f.sender, f.mapped(backendFrontends, to), one(shown))},
	}
}

// version is a digest of sets, chains and rules: a table with another one is made anew.
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

// comment is what tells our rule from another: what it is for and of which version it is.
func (r rule) comment(version string) string { return r.why + " #" + version }

// create adds everything but elements. Whatever stood there goes, in the same moment.
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
