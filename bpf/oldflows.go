package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// OldConn is the value of the map conns, which older builds have: what a Conn begins with.
type OldConn = packetOldConn

// VarOldFlows is the name of a variable of the packet path and of the gateway, a uint32. Set it to 1 before loading if
// conns is the map of an older build: its flows then move to the map flows.
const VarOldFlows = packetVarOLD_FLOWS

// MapNoConns is the pin of the map conns if there is no older build's. The name conns stays free for an older build, which
// would refuse this map.
const MapNoConns = "conns_none"

// oldFlowTimeout is the longest idle timeout of a flow (OPEN_S in flow.h), and oldSeen the index of its time in an OldConn.
const (
	oldFlowTimeout = 6 * time.Hour
	oldSeen        = 4
)

// FindOldFlows looks for an older build's map conns in folders of pinned maps, and returns its capacity, or 0 without one that
// is still needed. It is needed while a flow in it lives, and on the first start after that build, whose programs may still
// add flows.
func FindOldFlows(dirs []string, first bool) (capacity uint32, err error) {
	for _, dir := range dirs {
		m, err := ebpf.LoadPinnedMap(filepath.Join(dir, MapConns), nil)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return 0, fmt.Errorf("open flows of another version: %w", err)
		}
		needed := m.Type() == ebpf.LRUHash && int(m.KeySize()) == binary.Size(ConnKey{}) && int(m.ValueSize()) == binary.Size(OldConn{})
		if needed && !first {
			needed, err = holdsFlow(m)
		}
		if needed {
			capacity = m.MaxEntries()
		}
		if err := errors.Join(err, m.Close()); err != nil || needed {
			return capacity, err
		}
	}
	return 0, nil
}

// CopyUDPFlows copies the flows of UDP to the new map MapUDPFlows from the maps in which a build without it has them.
func CopyUDPFlows(to *ebpf.Map, from ...*ebpf.Map) error {
	const batch = 4096
	keys, values := make([]ConnKey, batch), make([]Conn, batch)
	for _, m := range from {
		var cursor ebpf.MapBatchCursor
		for {
			n, err := m.BatchLookup(&cursor, keys, values, nil)
			for i := range n {
				if keys[i].Proto != unix.IPPROTO_UDP {
					continue
				}
				if err := to.Update(keys[i], values[i], ebpf.UpdateNoExist); err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
					return fmt.Errorf("copy a flow of UDP: %w", err)
				}
			}
			if errors.Is(err, ebpf.ErrKeyNotExist) {
				break
			}
			if err != nil {
				return fmt.Errorf("read flows of another version: %w", err)
			}
		}
	}
	return nil
}

// holdsFlow reports whether an older build's map holds a flow that has not timed out.
func holdsFlow(m *ebpf.Map) (bool, error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return false, fmt.Errorf("read clock: %w", err)
	}
	const batch = 4096
	keys, values := make([]ConnKey, batch), make([]OldConn, batch)
	var cursor ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		for i := range n {
			if time.Duration(uint64(now.Nano())-values[i].Words[oldSeen]) <= oldFlowTimeout {
				return true, nil
			}
		}
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("read flows of another version: %w", err)
		}
	}
}
