package ebpf

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/isthmus-net/isthmus/bpf"
)

// write makes the maps hold want where they hold old, a part of have, which follows what is written. tables are those of
// want that are not as have has them. At every moment each packet finds what belongs together: backends come before the
// tables that name them, tables before frontends, frontends before VIPs, and all go the other way round. A table that changes
// does so under the packets that read it: each reads one slot, the old or the new.
func (k *kernel) write(have, old, want *content, tables map[uint32][]byte) error {
	m := k.maps
	for _, step := range []func() error{
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
	} {
		if err := step(); err != nil {
			return err
		}
	}
	for id := range old.tables {
		if want.tables[id] == 0 {
			// It stays for the next frontend of that number: to take it out would wait for every CPU.
			delete(have.tables, id)
		}
	}
	return nil
}

// put writes what want has and have has not.
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

// remove takes out what old has and want has not.
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

// putTables fills the tables that there are, and puts in those that are new, all at once: the kernel waits for every CPU each
// time.
func (k *kernel) putTables(have, want map[uint32]uint64, tables map[uint32][]byte) error {
	var ids []uint32
	var fds []uint32
	var fresh []*ebpf.Map
	defer func() {
		for _, m := range fresh {
			_ = m.Close() // the outer map holds it
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
