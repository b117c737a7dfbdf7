package ebpf

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
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
	// Flows is how many connections there is room for when the map is made; 0 is DefaultFlows. One that was silent for
	// longest makes room.
	Flows int
	Log   *slog.Logger
}

// Balancer is the eBPF balancer of this machine. It is the agent's part desired.PartBalancer.
type Balancer struct {
	cfg Config

	mu   sync.Mutex // guards what follows
	k    *kernel
	have *content
	next uint32 // number of the next new backend
	// lists are what tables were made of, by frontend id: a list that stays needs no new table.
	lists map[uint32]list
	// applied is the last state that was, nil before.
	applied *desired.State
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
	if cfg.Flows == 0 {
		cfg.Flows = DefaultFlows
	}
	k, err := load(cfg.BPFFS, cfg.Flows)
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
	var s bpf.GatewaySettings
	if err := b.k.maps[bpf.MapGatewaySettings].Lookup(uint32(0), &s); err != nil {
		return fmt.Errorf("read settings: %w", err)
	}
	b.have, b.next = have, max(b.next, s.NextBackend)
	return nil
}

// Name returns desired.PartBalancer.
func (b *Balancer) Name() string { return desired.PartBalancer }

// Apply makes the machine balance as s says, all or nothing. Only what differs is written.
func (b *Balancer) Apply(_ context.Context, s *desired.State) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	devices, err := b.devices(s)
	if err != nil {
		return err
	}
	if err := b.set(s); err != nil {
		return errors.Join(err, b.back())
	}
	if err := b.k.place(devices); err != nil {
		return errors.Join(err, b.back())
	}
	b.applied = s
	return nil
}

// devices returns where the program belongs: nowhere when another balancer has the gateway.
func (b *Balancer) devices(s *desired.State) (map[int]string, error) {
	if s.Balancer != desired.EBPF {
		return nil, nil
	}
	return chosen(b.cfg.Devices)
}

// back makes the maps hold again what they did.
func (b *Balancer) back() error {
	if b.applied == nil {
		return b.reread() // of an earlier process: what was written is safe, and the agent tries again
	}
	if err := b.set(b.applied); err != nil {
		return fmt.Errorf("go back: %w", err)
	}
	return nil
}

// set makes the maps hold what s says.
func (b *Balancer) set(s *desired.State) error {
	fresh := map[uint32]list{}
	tables := map[uint32][]byte{}
	ids := idsOf(b.have, b.next)
	want, faults := build(s, machine{
		ids: ids, address: addressTowards,
		table: func(id uint32, proto uint8, backends []desired.Backend, numbers []uint32) uint64 {
			l, known := b.lists[id]
			if !known || l.proto != proto || !slices.Equal(l.backends, backends) || !slices.Equal(l.numbers, numbers) {
				l = list{proto, slices.Clone(backends), numbers, 0}
			}
			if l.sum == 0 || b.have.tables[id] != l.sum {
				tables[id] = tableOf(proto, backends, numbers)
				l.sum = maphash.Bytes(b.k.seed, tables[id]) | 1
			}
			fresh[id] = l
			return l.sum
		},
	})
	if len(faults) > 0 {
		return faults
	}
	if ids.next != b.next {
		// Before any of them is used.
		if err := b.setting(func(s *bpf.GatewaySettings) { s.NextBackend = ids.next }); err != nil {
			return err
		}
		b.next = ids.next
	}
	if err := b.k.write(b.have, want, tables); err != nil {
		return err
	}
	b.lists = fresh
	return nil
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
		drift = append(drift, desired.Fault{Part: desired.PartBalancer, Message: fmt.Sprintf(format, args...)})
	}
	had := b.have
	if err := b.reread(); err != nil {
		return nil, err
	}
	for name, differs := range b.have.differences(had) {
		if differs {
			add("somebody wrote to map %s", name)
		}
	}
	devices, err := b.devices(b.applied)
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
	return drift, nil
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
	if err := k.place(nil); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := os.RemoveAll(k.dir); err != nil {
		return fmt.Errorf("remove pins: %w", err)
	}
	return nil
}
