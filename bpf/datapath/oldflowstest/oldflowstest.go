// Package oldflowstest makes maps of flows as older builds have them.
package oldflowstest

import (
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"

	"github.com/isthmus-net/isthmus/bpf"
)

// Demote turns the flows in a folder of pinned maps into those of an older build, which has only the map conns. Programs that
// use the pinned maps keep them.
func Demote(dir string) error {
	old, err := ebpf.NewMap(&ebpf.MapSpec{
		Type: ebpf.LRUHash, KeySize: uint32(binary.Size(bpf.ConnKey{})), ValueSize: uint32(binary.Size(bpf.OldConn{})), MaxEntries: 4096,
	})
	if err != nil {
		return err
	}
	defer old.Close()
	// Flows that have not moved from conns yet come first: a newer entry replaces theirs.
	for _, name := range []string{bpf.MapConns, bpf.MapNoConns, bpf.MapHandshakes, bpf.MapUDPFlows, bpf.MapFlows} {
		if err := demoteMap(filepath.Join(dir, name), old); err != nil {
			return err
		}
	}
	return old.Pin(filepath.Join(dir, bpf.MapConns))
}

// Unite moves the flows of UDP in a folder of pinned maps to those of connections, where a build without bpf.MapUDPFlows has
// them.
func Unite(dir string) error {
	udp := filepath.Join(dir, bpf.MapUDPFlows)
	from, err := ebpf.LoadPinnedMap(udp, nil)
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := ebpf.LoadPinnedMap(filepath.Join(dir, bpf.MapFlows), nil)
	if err != nil {
		return err
	}
	defer to.Close()
	var key bpf.ConnKey
	var value bpf.Conn
	it := from.Iterate()
	for it.Next(&key, &value) {
		if err := to.Put(key, value); err != nil {
			return err
		}
	}
	return errors.Join(it.Err(), os.Remove(udp))
}

// demoteMap copies the start of each value of a pinned map, if there is one, and removes the pin.
func demoteMap(path string, old *ebpf.Map) error {
	m, err := ebpf.LoadPinnedMap(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer m.Close()
	var key, value []byte
	it := m.Iterate()
	for it.Next(&key, &value) {
		if err := old.Put(key, value[:old.ValueSize()]); err != nil {
			return err
		}
	}
	return errors.Join(it.Err(), os.Remove(path))
}
