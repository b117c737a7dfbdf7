package ebpf

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/gateway/desired"
)

// DefaultFlows is how many connections there is room for. Each takes 672 bytes, whether it is there or not.
const DefaultFlows = 131072

// entriesPerFlow is how many entries a connection has in the map at most (bpf/gateway.bpf.c).
const entriesPerFlow = 4

// Config is what a Balancer needs to know.
type Config struct {
	// BPFFS is where a BPF filesystem is mounted.
	BPFFS string
	// Devices are the names of those whose packets are balanced. None: all that speak Ethernet and have an address that
	// others can reach.
	Devices []string
	XDP     XDP
	// Flows is how many connections there is room for when the map is made; 0 is DefaultFlows. One that was silent for
	// longest makes room.
	Flows int
	Log   *slog.Logger
}

// Balancer is the eBPF balancer of this machine. It is the agent's part desired.ComponentBalancer.
type Balancer struct {
	cfg Config

	mu   sync.Mutex // guards what follows
	k    *kernel
	have *content // of the kernel's maps, as far as we know
	ids  *ids
	next uint32 // number of the next new backend, as the kernel's settings have it
	// lists are what tables were made of, by frontend id: a list that stays needs no new table.
	lists map[uint32]list
	// applied is the last state that was, nil before.
	applied *desired.State
	// unsure means that have is perhaps not what applied says.
	unsure bool
	// settled means that nothing of other ABIs is left.
	settled bool
	// fast are the devices whose drivers run the XDP program, by index; without is why others do not, by name.
	fast    map[int]string
	without map[string]string
	// looked is the last table that Drift has looked at.
	looked uint32
}

// list is what a table is made of, and its sum.
type list struct {
	proto    uint8
	backends []desired.Backend
	numbers  []uint32
	sum      uint64
}

// Open loads program and maps, or takes over those that an earlier process pinned, which go on as they are until Apply. It is
// the caller's to Close.
func Open(cfg Config) (*Balancer, error) {
	this, err := thisVersion()
	if err != nil {
		return nil, err
	}
	if this.noTCX {
		cfg.Log.Info("this kernel has no TCX, which came with Linux 6.6: the balancer is a clsact filter")
	}
	return openVersion(cfg, this)
}

func openVersion(cfg Config, this version) (*Balancer, error) {
	if cfg.Flows == 0 {
		cfg.Flows = DefaultFlows
	}
	k, err := load(cfg.BPFFS, cfg.Flows, this)
	if err != nil {
		return nil, err
	}
	b := &Balancer{cfg: cfg, k: k, lists: map[uint32]list{}}
	if err := b.reread(); err != nil {
		return nil, errors.Join(err, k.close())
	}
	return b, nil
}

// reread learns from the kernel what there is. The caller holds mu, or nobody else knows b.
func (b *Balancer) reread() error {
	have, err := b.k.read()
	if err != nil {
		return err
	}
	for _, f := range have.frontends {
		if f.Count > 0 {
			if have.tables[f.Id], err = b.k.readTable(f.Id); err != nil {
				return err
			}
		}
	}
	var s bpf.GatewaySettings
	if err := b.k.maps[bpf.MapGatewaySettings].Lookup(uint32(0), &s); err != nil {
		return fmt.Errorf("read settings: %w", err)
	}
	b.next = max(b.next, s.NextBackend)
	b.have, b.ids, b.unsure = have, idsOf(have, b.next), true
	for _, p := range b.k.predecessors {
		b.ids.adopt(p)
	}
	return nil
}

// Name returns desired.ComponentBalancer.
func (b *Balancer) Name() string { return desired.ComponentBalancer }

// Apply makes the machine balance as s says, all or nothing. Only what differs is written.
func (b *Balancer) Apply(_ context.Context, s *desired.State) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if s.Balancer == desired.NFTables {
		return desired.Faults{{Component: desired.ComponentBalancer, Field: "balancer", Message: `is "nftables", and this gateway balances with eBPF`}}
	}
	devices, err := chosen(b.cfg.Devices)
	if err != nil {
		return err
	}
	if err := b.set(s); err != nil {
		return errors.Join(err, b.back())
	}
	if err := b.place(devices); err != nil {
		b.unsure = true
		return errors.Join(err, b.back())
	}
	b.applied, b.unsure = s, false
	b.succeed()
	return nil
}

// place puts the programs on these devices, and takes them off all others. A driver that does not run the XDP program is no
// error: that is logged, once.
func (b *Balancer) place(devices map[int]string) error {
	fast, without := map[int]string{}, map[string]string{}
	if b.cfg.XDP == XDPAuto {
		for index, name := range devices {
			if err := mayRun(index); err != nil {
				without[name] = err.Error()
				continue
			}
			fast[index] = name
		}
	}
	if err := b.k.tell(fast); err != nil { // what goes is forgotten before it goes
		return err
	}
	failed, err := b.k.place(devices, fast)
	if err != nil {
		return err
	}
	for index, why := range failed {
		without[fast[index]] = why.Error()
		delete(fast, index)
	}
	for name, why := range without {
		if b.without[name] != why {
			b.cfg.Log.Info("a device balances without XDP", "device", name, "why", why)
		}
	}
	for index, name := range fast {
		if b.fast[index] == "" {
			b.cfg.Log.Info("a device balances with XDP", "device", name)
		}
	}
	b.fast, b.without = fast, without
	if len(fast)+len(failed) == 0 {
		return nil
	}
	return b.k.tell(fast) // again: some drivers send for others only now
}

// succeed lets go of what other ABIs have left, once our program is on all devices.
func (b *Balancer) succeed() {
	if b.settled {
		return
	}
	if err := b.k.forgetOthers(); err != nil {
		b.cfg.Log.Warn("maps of another version stay for now", "err", err)
		return
	}
	b.ids, b.settled = idsOf(b.have, b.ids.next), true
}

// back makes the maps hold again what they did.
func (b *Balancer) back() error {
	if b.applied == nil {
		return b.reread() // of an earlier process: what was written is safe, and the agent tries again
	}
	if !b.unsure {
		return nil // nothing was written
	}
	if err := b.set(b.applied); err != nil {
		return fmt.Errorf("go back: %w", err)
	}
	return nil
}

// set makes the maps hold what s says. It looks closely only at what differs from the state before, if it is sure of that.
func (b *Balancer) set(s *desired.State) error {
	old := b.have
	if !b.unsure {
		before, after := touched(b.applied, s)
		had, faults := build(before, machine{ids: b.ids, address: addressTowards, table: func(id uint32, _ uint8, _ []desired.Backend, _ []uint32) uint64 {
			return b.have.tables[id]
		}})
		if len(faults) == 0 {
			old, s = had, after
		}
	}
	tables, lists := map[uint32][]byte{}, map[uint32]list{}
	want, faults := build(s, machine{
		ids: b.ids, address: addressTowards,
		table: func(id uint32, proto uint8, backends []desired.Backend, numbers []uint32) uint64 {
			l := b.list(id, proto, backends, numbers)
			if l.sum == 0 || b.have.tables[id] != l.sum {
				tables[id] = tableOf(proto, backends, numbers)
				l.sum = maphash.Bytes(b.k.seed, tables[id]) | 1
			}
			lists[id] = l
			return l.sum
		},
	})
	if len(faults) > 0 {
		return faults
	}
	b.unsure = true // until the caller says that all is well
	if b.ids.next != b.next {
		// Before any of them is used.
		if err := b.setting(func(s *bpf.GatewaySettings) { s.NextBackend = b.ids.next }); err != nil {
			return err
		}
		b.next = b.ids.next
	}
	gone := &content{frontends: maps.Clone(old.frontends), backends: maps.Clone(old.backends)}
	if err := b.k.write(b.have, old, want, tables); err != nil {
		return err
	}
	b.ids.release(gone, want)
	maps.Copy(b.lists, lists)
	return nil
}

// list returns what a frontend's table is made of, with its sum when that is as before.
func (b *Balancer) list(id uint32, proto uint8, backends []desired.Backend, numbers []uint32) list {
	l, known := b.lists[id]
	if known && l.proto == proto && slices.Equal(l.backends, backends) && slices.Equal(l.numbers, numbers) {
		return l
	}
	return list{proto, slices.Clone(backends), numbers, 0}
}

// setting changes the settings.
func (b *Balancer) setting(change func(*bpf.GatewaySettings)) error {
	var s bpf.GatewaySettings
	m := b.k.maps[bpf.MapGatewaySettings]
	if err := m.Lookup(uint32(0), &s); err != nil {
		return fmt.Errorf("read settings: %w", err)
	}
	change(&s)
	if err := m.Put(uint32(0), s); err != nil {
		return fmt.Errorf("write settings: %w", err)
	}
	return nil
}

// tableOf returns a Maglev table as the kernel has it: the backends' numbers, slot by slot.
func tableOf(proto uint8, backends []desired.Backend, numbers []uint32) []byte {
	addrs := make([]lb.Address, len(backends))
	weights := make([]uint32, len(backends))
	p := clusterset.TCP
	if protocolName(proto) == "UDP" {
		p = clusterset.UDP
	}
	for i, b := range backends {
		addrs[i] = lb.Address{AddrPort: netip.AddrPortFrom(b.Addr, b.Port), Protocol: p}
		weights[i] = uint32(b.Weight)
	}
	slots := lb.Maglev(addrs, weights, len(bpf.GatewayTable{}))
	table := make([]byte, 0, 4*len(slots))
	for _, i := range slots {
		table = binary.NativeEndian.AppendUint32(table, numbers[i])
	}
	return table
}

// Drift tells what is not as it was applied last: maps that somebody wrote to, and devices without the program.
func (b *Balancer) Drift(context.Context) ([]desired.Fault, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.applied == nil {
		return nil, nil
	}
	var drift []desired.Fault
	add := func(format string, args ...any) {
		drift = append(drift, desired.Fault{Component: desired.ComponentBalancer, Message: fmt.Sprintf(format, args...)})
	}
	now, err := b.k.read()
	if err != nil {
		return nil, err
	}
	if now.tables, err = b.readSome(); err != nil {
		return nil, err
	}
	for name, differs := range now.differences(b.have) {
		if differs {
			add("somebody wrote to map %s", name)
		}
	}
	if len(drift) > 0 {
		if err := b.reread(); err != nil {
			return nil, err
		}
	}
	devices, err := chosen(b.cfg.Devices)
	if err != nil {
		return nil, err
	}
	for index, name := range devices {
		runs, err := b.k.runs(index)
		if err != nil {
			return nil, err
		}
		if !runs {
			add("device %s does not run the balancer", name)
		}
	}
	for index, name := range b.fast {
		if runs, err := b.k.has(b.k.driver(), index); err != nil {
			return nil, err
		} else if !runs {
			add("the driver of device %s does not run the XDP program", name)
		}
	}
	if knows, err := b.k.knows(b.fast); err != nil {
		return nil, err
	} else if !knows {
		add("the XDP program knows devices as they were")
	}
	return drift, nil
}

// some is how many tables Drift looks at each time: there may be thousands, of 64 KiB.
const some = 32

// readSome returns the sums of all tables, of which it has read but some.
func (b *Balancer) readSome() (map[uint32]uint64, error) {
	sums := maps.Clone(b.have.tables)
	ids := slices.Sorted(maps.Keys(sums))
	at, _ := slices.BinarySearch(ids, b.looked+1)
	for i := range min(some, len(ids)) {
		id := ids[(at+i)%len(ids)]
		sum, err := b.k.readTable(id)
		if err != nil {
			return nil, err
		}
		sums[id], b.looked = sum, id
	}
	return sums, nil
}

// Sent is how many packets drivers have sent, on all CPUs.
func (b *Balancer) Sent() (n uint64) {
	var each []uint64
	_ = b.k.maps[bpf.MapXDPSent].Lookup(uint32(0), &each) // an array has it
	for _, sent := range each {
		n += sent
	}
	return n
}

// Close lets go. The balancer goes on in the kernel.
func (b *Balancer) Close(context.Context, bool) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.k.close()
}

// Remove takes the balancer off the machine: connections through it end. Removing what is not there succeeds.
func Remove(bpffs string) error {
	k := &kernel{dir: filepath.Join(bpffs, folder)}
	if _, err := os.Stat(k.dir); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if _, err := k.place(nil, nil); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := k.removeFilters(nil); err != nil {
		return err
	}
	if err := os.RemoveAll(k.dir); err != nil {
		return fmt.Errorf("remove pins: %w", err)
	}
	return nil
}
