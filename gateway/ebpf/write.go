package ebpf

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/isthmus-net/isthmus/bpf"
)

// write makes the maps hold want where they hold old, a part of have, and updates have. tables holds the tables of
// want that differ from have. Every intermediate state is consistent for packets: backends are written before the
// tables that refer to them, tables before frontends, and frontends before VIPs. Deletions run in reverse. A table is
// updated in place: a packet reads one slot, the old or the new.
func (k *kernel) write(have, old, want *content, tables map[uint32][]byte) error {
	m := k.maps
	for _, step := range []func() error{
		func() error { return put(m[bpf.MapGatewayPeers], have.peers, want.peers) },
		func() error { return put(m[bpf.MapGatewaySlots], have.slots, want.slots) },
		func() error { return put(m[bpf.MapGatewayOrigins], have.origins, want.origins) },
		func() error { return put(m[bpf.MapBackends], have.backends, want.backends) },
		func() error { return put(m[bpf.MapGatewaySources], have.sources, want.sources) },
		func() error { return put(m[bpf.MapGatewayMembers], have.members, want.members) },
		func() error { return k.putTables(have.tables, want.tables, tables) },
		func() error { return put(m[bpf.MapFrontends], have.frontends, want.frontends) },
		func() error { return put(m[bpf.MapGatewayVIPs], have.vips, want.vips) },

		func() error { return remove(m[bpf.MapGatewayVIPs], have.vips, old.vips, want.vips) },
		func() error { return remove(m[bpf.MapFrontends], have.frontends, old.frontends, want.frontends) },
		func() error { return remove(m[bpf.MapGatewaySources], have.sources, old.sources, want.sources) },
		func() error { return remove(m[bpf.MapGatewayMembers], have.members, old.members, want.members) },
		func() error { return remove(m[bpf.MapBackends], have.backends, old.backends, want.backends) },
		func() error { return remove(m[bpf.MapGatewayOrigins], have.origins, old.origins, want.origins) },
		func() error { return remove(m[bpf.MapGatewayPeers], have.peers, old.peers, want.peers) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	for id := range old.tables {
		if want.tables[id] == 0 {
			// The table stays for the next frontend with this id: deleting it would wait for every CPU.
			delete(have.tables, id)
		}
	}
	return nil
}

// put writes the entries of want that have lacks or holds with another value.
func put[K, V comparable](m *ebpf.Map, have, want map[K]V) error {
	for key, value := range want {
		if old, ok := have[key]; ok && old == value {
			continue
		}
		if err := m.Put(key, value); err != nil {
			return fmt.Errorf("write map %s: %w", m, err)
		}
		have[key] = value
	}
	return nil
}

// remove deletes the keys that old has and want lacks.
func remove[K, V comparable](m *ebpf.Map, have, old, want map[K]V) error {
	for key := range old {
		if _, ok := want[key]; ok {
			continue
		}
		if err := m.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("delete from map %s: %w", m, err)
		}
		delete(have, key)
	}
	return nil
}

// putTables fills the existing tables, and inserts all new ones in one call: the kernel waits for every CPU in each
// call.
func (k *kernel) putTables(have, want map[uint32]uint64, tables map[uint32][]byte) error {
	var ids []uint32
	var fds []uint32
	var fresh []*ebpf.Map
	defer func() {
		for _, m := range fresh {
			_ = m.Close() // the outer map holds a reference
		}
	}()
	for id, sum := range want {
		if have[id] == sum {
			continue
		}
		inner, err := k.table(id)
		if err != nil {
			return err
		}
		if inner != nil {
			if err := errors.Join(inner.Put(uint32(0), tables[id]), inner.Close()); err != nil {
				return fmt.Errorf("write the table of frontend %d: %w", id, err)
			}
			have[id] = sum
			continue
		}
		if inner, err = newTable(tables[id]); err != nil {
			return err
		}
		fresh, ids, fds = append(fresh, inner), append(ids, id), append(fds, uint32(inner.FD()))
	}
	if err := k.insert(ids, fds); err != nil {
		return fmt.Errorf("put %d new tables in: %w", len(ids), err)
	}
	for _, id := range ids {
		have[id] = want[id]
	}
	return nil
}

func newTable(content []byte) (*ebpf.Map, error) {
	m, err := ebpf.NewMap(&ebpf.MapSpec{Name: "table", Type: ebpf.Array, KeySize: 4, ValueSize: uint32(binary.Size(bpf.GatewayTable{})), MaxEntries: 1})
	if err != nil {
		return nil, fmt.Errorf("create a table: %w", err)
	}
	if err := m.Put(uint32(0), content); err != nil {
		return nil, errors.Join(fmt.Errorf("fill a table: %w", err), m.Close())
	}
	return m, nil
}

func (k *kernel) insert(ids, fds []uint32) error {
	if len(ids) == 0 {
		return nil
	}
	_, err := k.maps[bpf.MapGatewayTables].BatchUpdate(ids, fds, nil)
	return err
}
