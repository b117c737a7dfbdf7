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
	"github.com/isthmus-net/isthmus/gateway/flows"
)

// Config configures a Balancer.
type Config struct {
	// BPFFS is the mount point of a BPF filesystem.
	BPFFS string
	// Devices names the devices whose packets are balanced. If it is empty, these are all Ethernet devices with a
	// global unicast address.
	Devices []string
	XDP     XDP
	// Flows is the capacity in connections when the maps are created; 0 means DefaultFlows. See there.
	Flows int
	Log   *slog.Logger
}

// Balancer is the eBPF balancer of this machine. It is the agent's component desired.ComponentBalancer.
type Balancer struct {
	cfg   Config
	tally flows.Tally

	mu   sync.Mutex // guards the fields below
	k    *kernel
	have *content // content of the kernel's maps, as far as is known
	ids  *ids
	next uint32 // id of the next new backend, as in the kernel's settings
	// lists holds the inputs of each table by frontend id: an unchanged list needs no new table.
	lists map[uint32]list
	// applied is the last applied state, nil before the first, and services the Services of its frontends, by id.
	applied  *desired.State
	services map[uint32]flows.CountKey // replaced, never changed
	// counted is the traffic that was counted of each of these frontends, by id.
	counted map[uint32]counted
	// unsure means that have may differ from what applied requires.
	unsure bool
	// migrated means that nothing of other ABIs is left.
	migrated bool
	// fast holds the devices whose drivers run the XDP program, by index. without holds the reasons of the others, by
	// name.
	fast    map[int]string
	without map[string]string
	// checked is the last table that Drift has read.
	checked uint32
}

// list holds the inputs of a table, and the table's hash.
type list struct {
	proto    uint8
	backends []desired.Backend
	numbers  []uint32
	sum      uint64
}

// Open loads program and maps, or takes over those that an earlier process pinned. Those stay unchanged until Apply.
// The caller closes the Balancer.
func Open(cfg Config) (*Balancer, error) {
	this, err := thisVersion()
	if err != nil {
		return nil, err
	}
	if this.noTCX {
		cfg.Log.Info("kernel has no TCX, which came with Linux 6.6: the balancer is a clsact filter")
	}
	return openVersion(cfg, this)
}

func openVersion(cfg Config, this version) (*Balancer, error) {
	if cfg.Flows == 0 {
		flows, err := DefaultFlows()
		if err != nil {
			return nil, err
		}
		cfg.Flows = flows
	}
	k, err := load(cfg.BPFFS, cfg.Flows, this)
	if err != nil {
		return nil, err
	}
	if flows := k.flows(); flows != cfg.Flows {
		cfg.Log.Info("the table of connections keeps its size until the machine restarts", "connections", flows, "configured", cfg.Flows)
	}
	b := &Balancer{cfg: cfg, k: k, lists: map[uint32]list{}, counted: map[uint32]counted{}}
	if err := b.reread(); err != nil {
		return nil, errors.Join(err, k.close())
	}
	return b, nil
}

// reread reads the kernel's maps. The caller holds mu, or has not shared b yet.
func (b *Balancer) reread() error {
	have, err := b.k.read()
	if err != nil {
		return err
	}
	for _, f := range have.frontends {
		if f.Slots > 0 {
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
	b.have, b.unsure = have, true
	b.assignIDs()
	return nil
}

// assignIDs takes the ids from the content of the maps.
func (b *Balancer) assignIDs() {
	b.ids = idsOf(b.have, b.next)
	for _, p := range b.k.predecessors {
		b.ids.adopt(p)
	}
}

// Name returns desired.ComponentBalancer.
func (b *Balancer) Name() string { return desired.ComponentBalancer }

// Apply makes the machine balance according to s, or changes nothing. It only writes what differs.
func (b *Balancer) Apply(_ context.Context, s *desired.State) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if s.Balancer == desired.NFTables {
		return desired.Faults{{Component: desired.ComponentBalancer, Field: "balancer", Message: `is "nftables", but this gateway balances with eBPF`}}
	}
	devices, err := selectDevices(b.cfg.Devices)
	if err != nil {
		return err
	}
	if err := b.write(s); err != nil {
		return errors.Join(err, b.rollBack())
	}
	if err := b.attach(devices); err != nil {
		b.unsure = true
		return errors.Join(err, b.rollBack())
	}
	b.applied, b.services, b.unsure = s, b.servicesOf(s), false
	b.removePredecessors()
	if err := b.beginToCount(); err != nil {
		b.cfg.Log.Warn("the traffic of new ports is not counted", "err", err) // the state is applied all the same
	}
	return nil
}

// attach attaches the programs to these devices and detaches them from all others. A driver without XDP support is no
// error; it is logged once.
func (b *Balancer) attach(devices map[int]string) error {
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
	if err := b.k.setXDPDevices(fast); err != nil { // a device is removed from the map before its program is detached
		return err
	}
	failed, err := b.k.attachAll(devices, fast)
	if err != nil {
		return err
	}
	for index, why := range failed {
		without[fast[index]] = why.Error()
		delete(fast, index)
	}
	for name, why := range without {
		if b.without[name] != why {
			b.cfg.Log.Info("device balances without XDP", "device", name, "reason", why)
		}
	}
	for index, name := range fast {
		if b.fast[index] == "" {
			b.cfg.Log.Info("device balances with XDP", "device", name)
		}
	}
	b.fast, b.without = fast, without
	if len(fast)+len(failed) == 0 {
		return nil
	}
	return b.k.setXDPDevices(fast) // some drivers report only now that they forward frames of other devices
}

// removePredecessors removes the maps of other ABIs, once this program runs on all devices.
func (b *Balancer) removePredecessors() {
	if b.migrated {
		return
	}
	if err := b.k.forgetOthers(); err != nil {
		b.cfg.Log.Warn("cannot remove maps of another version yet", "err", err)
		return
	}
	b.ids, b.migrated = idsOf(b.have, b.ids.next), true
}

// rollBack restores the content of the maps.
func (b *Balancer) rollBack() error {
	if b.applied == nil {
		return b.reread() // the state of an earlier process is unknown; what was written is safe, and the agent retries
	}
	if !b.unsure {
		return nil // nothing was written
	}
	if err := b.write(b.applied); err != nil {
		return fmt.Errorf("roll back: %w", err)
	}
	return nil
}

// write makes the maps hold what s requires. If it knows their content, it only compares what differs from the
// previous state.
func (b *Balancer) write(s *desired.State) error {
	old, before := b.have, b.applied
	if before == nil {
		before = &desired.State{}
	}
	if b.unsure {
		if faults := checkRoom(b.k.limits(), usedBy(before), before, s); len(faults) > 0 {
			return faults
		}
	} else {
		before, after := touched(before, s)
		if faults := checkRoom(b.k.limits(), usedBy(b.applied), before, after); len(faults) > 0 {
			return faults
		}
		had, faults := build(before, environment{ids: b.ids, address: addressTowards, table: func(id uint32, _ uint8, _ []desired.Backend, _ []uint32) uint64 {
			return b.have.tables[id]
		}})
		if len(faults) == 0 {
			old, s = had, after
		}
	}
	tables, lists := map[uint32][]byte{}, map[uint32]list{}
	want, faults := build(s, environment{
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
		b.assignIDs() // without those of frontends that are not applied
		return faults.ByService()
	}
	b.unsure = true // until the caller has succeeded
	if b.ids.next != b.next {
		// The counter is stored before any of these ids is used.
		if err := b.changeSettings(func(s *bpf.GatewaySettings) { s.NextBackend = b.ids.next }); err != nil {
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

// list returns the inputs of a frontend's table, with its hash if they are unchanged.
func (b *Balancer) list(id uint32, proto uint8, backends []desired.Backend, numbers []uint32) list {
	l, known := b.lists[id]
	if known && l.proto == proto && slices.Equal(l.backends, backends) && slices.Equal(l.numbers, numbers) {
		return l
	}
	return list{proto, slices.Clone(backends), numbers, 0}
}

// changeSettings changes the settings in the kernel.
func (b *Balancer) changeSettings(change func(*bpf.GatewaySettings)) error {
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

// tableOf returns a Maglev table in the kernel's format: the backend id of every slot.
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

// Drift reports differences from the last applied state: maps that another process changed, and devices without the
// program.
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
	if now.tables, err = b.readTables(); err != nil {
		return nil, err
	}
	for name, differs := range now.differences(b.have) {
		if differs {
			add("map %s was changed by another process", name)
		}
	}
	if len(drift) > 0 {
		if err := b.reread(); err != nil {
			return nil, err
		}
	}
	devices, err := selectDevices(b.cfg.Devices)
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
	if knows, err := b.k.hasXDPDevices(b.fast); err != nil {
		return nil, err
	} else if !knows {
		add("the XDP program has outdated devices")
	}
	return drift, nil
}

// tablesPerCheck is how many tables Drift reads each time. There may be thousands, of 64 KiB each.
const tablesPerCheck = 32

// readTables returns the hashes of all tables. It only reads tablesPerCheck of them and assumes the others unchanged.
func (b *Balancer) readTables() (map[uint32]uint64, error) {
	sums := maps.Clone(b.have.tables)
	ids := slices.Sorted(maps.Keys(sums))
	at, _ := slices.BinarySearch(ids, b.checked+1)
	for i := range min(tablesPerCheck, len(ids)) {
		id := ids[(at+i)%len(ids)]
		sum, err := b.k.readTable(id)
		if err != nil {
			return nil, err
		}
		sums[id], b.checked = sum, id
	}
	return sums, nil
}

// Sent returns the number of packets that drivers have forwarded.
func (b *Balancer) Sent() uint64 { return b.counter(bpf.MapXDPSent) }

// HandedOver returns the number of packets that were handed over to other gateways.
func (b *Balancer) HandedOver() uint64 { return b.counter(bpf.MapHandedOver) }

// counter returns the sum of a counter over all CPUs.
func (b *Balancer) counter(name string) (n uint64) {
	var each []uint64
	_ = b.k.maps[name].Lookup(uint32(0), &each) // an array always has index 0
	for _, count := range each {
		n += count
	}
	return n
}

// Close releases program and maps. The balancer continues in the kernel.
func (b *Balancer) Close(context.Context, bool) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.k.close()
}

// Remove removes the balancer from the machine, which ends connections through it. It succeeds if there is none.
func Remove(bpffs string) error {
	k := &kernel{dir: filepath.Join(bpffs, folder)}
	if _, err := os.Stat(k.dir); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if _, err := k.attachAll(nil, nil); err != nil && !errors.Is(err, os.ErrNotExist) {
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
