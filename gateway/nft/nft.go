package nft

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/flows"
)

const (
	// perMessage is the number of elements in one message, whose length field has 16 bits.
	perMessage = 500
	// readBuffer holds the kernel's answers to all messages of a transaction. writeBuffer holds the transaction itself, which is
	// sent at once: a slot takes about 60 bytes.
	readBuffer, writeBuffer = 16 << 20, 64 << 20
)

// Balancer balances with nftables, in the network namespace of the calling thread.
type Balancer struct {
	log     *slog.Logger
	chains  []chain
	version string

	mu       sync.Mutex // guards what follows
	sockets  *sockets   // see open
	contents *contents
	// generation is the kernel's ruleset generation after our last write, if no other program wrote since; 0: unknown.
	generation uint32
	// removed are backends whose connections must still be deleted.
	removed map[pair]bool
	// gonePeers are addresses of removed peers. The entries of connections that they kept must still be deleted.
	gonePeers map[netip.Addr]bool
	// applied is the last state; nil before the first one. absent names its peers to which nothing is handed over.
	applied *desired.State
	absent  map[string]bool
	// unverified are frontends that may have such connections from before this process, see noteUnverified; nil until its
	// first write.
	unverified map[pair]bool
	// affinityChains are the chains in the kernel, valid while generation is known.
	affinityChains map[string]bool
	// imported holds, by key in the map clients, until when a client of a peer need not be added again.
	imported map[string]time.Time

	state   atomic.Pointer[sharedState]
	tally   flows.Tally
	counted map[uint32]flows.Traffic // of each tracked connection, by the kernel's id, when they were listed last; guarded by tally
	deletes sync.WaitGroup           // see deleteStaleSoon
}

// New returns a balancer. Its first Apply finds out what an earlier process left in the kernel.
func New(log *slog.Logger) (*Balancer, error) {
	var all, stay []chain // stay: they differ in the timeout, which is in the name
	for _, f := range families {
		c, err := f.affinityChain(affinityChainName(0))
		if err != nil {
			return nil, err
		}
		all, stay = append(all, f.chains()...), append(stay, c)
	}
	v, err := version(slices.Concat(all, stay))
	if err != nil {
		return nil, fmt.Errorf("describe table %s: %w", Table, err)
	}
	return &Balancer{log: log, chains: all, version: v, contents: newContents(), removed: map[pair]bool{}, gonePeers: map[netip.Addr]bool{}, imported: map[string]time.Time{}}, nil
}

// Name implements agent.Component.
func (b *Balancer) Name() string { return desired.ComponentBalancer }

// Apply implements agent.Component. It writes a change in one transaction, a large one in several, and only the difference when the
// kernel still has what was written last.
func (b *Balancer) Apply(_ context.Context, s *desired.State) error {
	if s.Balancer == desired.EBPF {
		return desired.Faults{{Component: desired.ComponentBalancer, Field: "balancer", Message: `is "ebpf", and this gateway balances with nftables`}}
	}
	if faults := checkSysctls(s); len(faults) > 0 {
		return faults
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	before, group := slices.Collect(maps.Values(b.contents.vips)), b.contents.group
	c, had := b.contents.replaceVIPs(s.VIPs)
	b.contents.replaceGroup(groupElements(s, b.absent), c)
	if err := b.write(c); err != nil {
		b.contents.replaceVIPs(before)
		b.contents.group = group
		b.generation = 0
		b.reopen()
		if len(before) > 0 && c.size() > perTransaction { // some of it may have been written
			err = errors.Join(err, b.write(newChanges()))
		}
		return err
	}
	b.applied = s
	now := newSharedState(s)
	b.notePeers(b.state.Swap(now), now)
	b.noteRemoved(had)
	b.deleteStaleSoon()
	return nil
}

// SetAbsent implements flows.Hander. A machine that has started and has no rules yet would forward what is handed over, or answer it with an
// ICMP error about its hop limit, by which Linux ends a handshake (tcp_req_err).
func (b *Balancer) SetAbsent(peers map[string]bool) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if maps.Equal(b.absent, peers) {
		return nil
	}
	b.absent = peers
	if b.applied == nil {
		return nil
	}
	c := newChanges()
	b.contents.replaceGroup(groupElements(b.applied, peers), c)
	if err := b.write(c); err != nil {
		b.generation = 0 // the next check for drift writes it
		b.reopen()
		return err
	}
	return nil
}

// write brings the kernel to b.contents. It writes only c if the kernel still has what was written last.
func (b *Balancer) write(c changes) error {
	s, err := b.open()
	if err != nil {
		return err
	}
	now, err := s.generation()
	if err != nil {
		return err
	}
	recreate := false
	if b.generation == 0 || now != b.generation {
		var have map[familySet]map[string]string
		if have, recreate, err = b.read(s); err != nil {
			return err
		}
		c = diff(have, b.contents.all())
		if b.unverified == nil {
			b.noteUnverified(have)
		}
	}
	chains := b.contents.affinityChains()
	if c.size() == 0 && !recreate && maps.Equal(b.affinityChains, chains) {
		b.generation = now
		return nil
	}
	if recreate {
		if err := create(s.rules, b.chains, b.version); err != nil {
			return err
		}
		b.affinityChains = nil
	}
	if err := b.addAffinityChains(s.rules, b.affinityChains, chains); err != nil {
		return err
	}
	transactions := uint32(0)
	for part, last := range c.parts(perTransaction) {
		if err := send(s.rules, part); err != nil {
			return err
		}
		if last {
			removeAffinityChains(s.rules, b.affinityChains, chains)
		}
		if err := s.rules.Flush(); err != nil {
			return fmt.Errorf("write table %s: %w", Table, err)
		}
		transactions++
	}
	b.affinityChains = chains
	// Reading everything at the next call finds a write of another program in between.
	b.generation = 0
	if after, err := s.generation(); err == nil && after == now+transactions {
		b.generation = after
	}
	return nil
}

// send adds the changes to the transaction.
func send(conn *nftables.Conn, c changes) error {
	for _, step := range []struct {
		what map[familySet][]element
		do   func(*nftables.Set, []nftables.SetElement) error
	}{{c.remove, conn.SetDeleteElements}, {c.add, conn.SetAddElements}} {
		for p, elements := range step.what {
			for some := range slices.Chunk(elements, perMessage) {
				batch := make([]nftables.SetElement, len(some))
				for i, e := range some {
					batch[i] = p.encode(e)
				}
				if err := step.do(p.spec(), batch); err != nil {
					return fmt.Errorf("write set %s: %w", p.name(), err)
				}
			}
		}
	}
	return nil
}

func (p familySet) encode(e element) nftables.SetElement {
	is := nftables.SetElement{Key: []byte(e.key), Val: []byte(e.value)}
	if p.set == affinity {
		is.Val, is.VerdictData = nil, &expr.Verdict{Kind: expr.VerdictJump, Chain: e.value}
	}
	if p.set == sources {
		half := len(e.key) / 2
		is.Key, is.KeyEnd = is.Key[:half], is.Key[half:]
	}
	return is
}

// read returns the elements in the kernel, or reports that the table must be created again.
func (b *Balancer) read(s *sockets) (have map[familySet]map[string]string, recreate bool, err error) {
	ours, err := b.areCurrent(s)
	if err != nil || !ours {
		return nil, true, err
	}
	have = map[familySet]map[string]string{}
	for _, p := range familySets() {
		if p.spec().Dynamic {
			continue // the rules write it
		}
		elements, err := s.rules.GetSetElements(p.spec())
		if err != nil {
			return nil, false, fmt.Errorf("read set %s: %w", p.name(), err)
		}
		have[p] = make(map[string]string, len(elements))
		for _, e := range elements {
			value := string(e.Val)
			if e.VerdictData != nil {
				value = e.VerdictData.Chain
			}
			have[p][string(e.Key)+string(e.KeyEnd)] = value
		}
	}
	return have, false, nil
}

// areCurrent reports whether tables, sets, chains and rules are those of this version.
func (b *Balancer) areCurrent(s *sockets) (bool, error) {
	b.affinityChains = nil
	for _, f := range families {
		if current, err := b.isCurrent(s, f); err != nil || !current {
			return false, err
		}
	}
	return true, nil
}

// isCurrent reports that of one family's table.
func (b *Balancer) isCurrent(s *sockets, f family) (bool, error) {
	tables, err := s.rules.ListTablesOfFamily(f.table.Family)
	if err != nil {
		return false, fmt.Errorf("list tables: %w", err)
	}
	if !slices.ContainsFunc(tables, func(t *nftables.Table) bool { return t.Name == Table }) {
		return false, nil
	}
	sets, err := s.rules.GetSets(f.table)
	if err != nil {
		return false, fmt.Errorf("list sets of %s: %w", Table, err)
	}
	for _, name := range setNames {
		if !slices.ContainsFunc(sets, func(s *nftables.Set) bool { return s.Name == name }) {
			return false, nil
		}
	}
	is, err := s.rules.ListChainsOfTableFamily(f.table.Family)
	if err != nil {
		return false, fmt.Errorf("list chains: %w", err)
	}
	is = slices.DeleteFunc(is, func(c *nftables.Chain) bool { return c.Table.Name != Table })
	rules, err := s.rulesInKernel(f.table)
	if err != nil {
		return false, err
	}
	for _, c := range b.chains {
		if c.Table == f.table && (!slices.ContainsFunc(is, c.isSame) || !b.chainIsCurrent(c, rules)) {
			return false, nil
		}
	}
	return b.affinityChainsAreCurrent(f, is, rules), nil
}

// affinityChainsAreCurrent notes the affinity chains of a table. All tables must have the same.
func (b *Balancer) affinityChainsAreCurrent(f family, is []*nftables.Chain, rules []kernelRule) bool {
	have := map[string]bool{}
	for _, o := range is {
		if !strings.HasPrefix(o.Name, affinityPrefix) {
			continue
		}
		c, err := f.affinityChain(o.Name)
		if err != nil || !b.chainIsCurrent(c, rules) {
			return false // another program created the chain
		}
		have[o.Name] = true
	}
	if b.affinityChains == nil {
		b.affinityChains = have
	}
	return maps.Equal(b.affinityChains, have)
}

// isSame reports whether o is the chain c in the kernel, whatever its rules.
func (c chain) isSame(o *nftables.Chain) bool {
	if o.Name != c.Name || o.Type != c.Type || (o.Hooknum == nil) != (c.Hooknum == nil) {
		return false
	}
	return o.Hooknum == nil || *o.Hooknum == *c.Hooknum && *o.Priority == *c.Priority
}

// chainIsCurrent reports whether a chain has exactly the rules of this version.
func (b *Balancer) chainIsCurrent(c chain, all []kernelRule) bool {
	here := slices.DeleteFunc(slices.Clone(all), func(r kernelRule) bool { return r.chain != c.Name })
	return slices.EqualFunc(here, c.rules, func(o kernelRule, r rule) bool { return o.comment == r.comment(b.version) })
}

// Drift implements agent.Component. As long as no program changed any rule, it costs one request.
func (b *Balancer) Drift(context.Context) (drift []desired.Fault, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	defer func() {
		if err != nil {
			b.reopen()
		}
	}()
	s, err := b.open()
	if err != nil {
		return nil, err
	}
	if err := b.deleteStale(s); err != nil {
		return nil, err
	}
	now, err := s.generation()
	if err != nil {
		return nil, err
	}
	if b.generation != 0 && now == b.generation {
		return nil, nil
	}
	have, recreate, err := b.read(s)
	if err != nil {
		return nil, err
	}
	if recreate {
		return fault("a table %s is missing or was changed", Table), nil
	}
	if n := diff(have, b.contents.all()).size(); n > 0 {
		return fault("%d elements of the tables %s were changed", n, Table), nil
	}
	if again, err := s.generation(); err == nil && again == now {
		b.generation = now
	}
	return nil, nil
}

func fault(format string, args ...any) []desired.Fault {
	return []desired.Fault{{Component: desired.ComponentBalancer, Message: fmt.Sprintf(format, args...)}}
}

// Close implements agent.Component. The kernel keeps balancing.
func (b *Balancer) Close(context.Context, bool) error {
	b.deletes.Wait()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.reopen()
	return nil
}

// Remove deletes the tables, if they exist. Traffic to VIPs stops.
func Remove() error {
	conn, err := dial()
	if err != nil {
		return err
	}
	defer func() { _ = conn.CloseLasting() }()
	for _, f := range families {
		remove(conn, f.table)
	}
	if err := conn.Flush(); err != nil {
		return fmt.Errorf("remove table %s: %w", Table, err)
	}
	return nil
}

// generation asks for the ruleset generation of this network namespace, which every transaction increments.
func (s *sockets) generation() (uint32, error) {
	req := s.request(unix.NFT_MSG_GETGEN, 0)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC, Version: nl.NFNETLINK_V0})
	messages, err := req.Execute(unix.NETLINK_NETFILTER, 0)
	if err != nil {
		return 0, fmt.Errorf("read the ruleset generation: %w", err)
	}
	var id uint32
	for _, m := range messages {
		err = attributes(m[nl.SizeofNfgenmsg:], func(kind uint16, value []byte) error {
			if kind == unix.NFTA_GEN_ID && len(value) == 4 {
				id = binary.BigEndian.Uint32(value)
			}
			return nil
		})
	}
	if err != nil || id == 0 {
		return 0, fmt.Errorf("read the ruleset generation: %w", errors.Join(err, errors.New("no answer")))
	}
	return id, nil
}
