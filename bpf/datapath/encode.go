package datapath

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// The constructors below are the one place where a lb type becomes bytes of a map and back.

func encodeFrontendKey(a lb.Address) bpf.FrontendKey {
	return bpf.FrontendKey{Addr: bpf.Addr16(a.AddrPort.Addr()), Port: a.AddrPort.Port(), Proto: uint8(a.Protocol)}
}

func decodeFrontendKey(k bpf.FrontendKey) lb.Address {
	return lb.Address{AddrPort: netip.AddrPortFrom(bpf.AddrOf(k.Addr), k.Port), Protocol: clusterset.Protocol(k.Proto)}
}

func encodeFrontend(f lb.Frontend) bpf.Frontend {
	return bpf.Frontend{Id: uint32(f.ID), Count: f.Count}
}

func decodeFrontend(f bpf.Frontend) lb.Frontend {
	return lb.Frontend{ID: lb.FrontendID(f.Id), Count: f.Count}
}

func encodeSlot(s lb.Slot) bpf.SlotKey {
	return bpf.SlotKey{FrontendId: uint32(s.Frontend), Slot: s.Index}
}

func decodeSlot(k bpf.SlotKey) lb.Slot {
	return lb.Slot{Frontend: lb.FrontendID(k.FrontendId), Index: k.Slot}
}

func encodeBackend(a lb.Address) bpf.Backend {
	return bpf.Backend{Addr: bpf.Addr16(a.AddrPort.Addr()), Port: a.AddrPort.Port(), Proto: uint8(a.Protocol)}
}

func decodeBackend(b bpf.Backend) lb.Address {
	return lb.Address{AddrPort: netip.AddrPortFrom(bpf.AddrOf(b.Addr), b.Port), Protocol: clusterset.Protocol(b.Proto)}
}

// encodeAll splits writes into the keys and values of a batch.
func encodeAll[W, K, V any](writes []W, encode func(W) (K, V)) ([]K, []V) {
	keys, values := make([]K, len(writes)), make([]V, len(writes))
	for i, w := range writes {
		keys[i], values[i] = encode(w)
	}
	return keys, values
}

// chunk is how many entries go to the kernel in one system call: enough to make the call itself
// cheap, few enough that a cancelled Apply ends soon.
const chunk = 4096

// dump calls each for every entry of m, in no order.
func dump[K, V any](ctx context.Context, m *ebpf.Map, each func(K, V)) error {
	var cursor ebpf.MapBatchCursor
	keys, values := make([]K, chunk), make([]V, chunk)
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		for i := range n {
			each(keys[i], values[i])
		}
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil // the end
		}
		if err != nil {
			return fmt.Errorf("read map %s: %w", m, err)
		}
	}
}

// put writes keys and values into a map of d and counts them.
func put[K, V any](ctx context.Context, d *Datapath, name string, keys []K, values []V) error {
	m := d.maps[name]
	for len(keys) > 0 {
		if err := ctx.Err(); err != nil {
			return err
		}
		n := min(len(keys), chunk)
		done, err := m.BatchUpdate(keys[:n], values[:n], nil)
		d.writes.Add(uint64(done))
		if errors.Is(err, unix.E2BIG) {
			return fmt.Errorf("write map %s: full at %d entries: %w", name, m.MaxEntries(), err)
		}
		if err != nil {
			return fmt.Errorf("write map %s: %w", name, err)
		}
		keys, values = keys[n:], values[n:]
	}
	return nil
}

// remove deletes entries from a map of d and counts them. What is not there is no error.
func remove[T, K any](ctx context.Context, d *Datapath, name string, gone []T, encode func(T) K) error {
	keys := make([]K, len(gone))
	for i, g := range gone {
		keys[i] = encode(g)
	}
	for len(keys) > 0 {
		if err := ctx.Err(); err != nil {
			return err
		}
		n := min(len(keys), chunk)
		done, err := d.maps[name].BatchDelete(keys[:n], nil)
		d.writes.Add(uint64(done))
		switch {
		case errors.Is(err, ebpf.ErrKeyNotExist):
			n = done + 1 // the kernel stopped at the missing one: go on after it
		case err != nil:
			return fmt.Errorf("delete from map %s: %w", name, err)
		}
		keys = keys[n:]
	}
	return nil
}
