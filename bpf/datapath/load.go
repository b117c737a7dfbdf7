package datapath

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
)

// build is one version of the programs and maps that this package installs on a node.
type build struct {
	abi   int
	specs []*ebpf.CollectionSpec
	hooks []bpf.Hook // in the order in which they are attached

	packets []packetHook // in the order in which a packet meets them
	noTCX   bool         // behave as on a kernel without TCX
}

// loader loads the maps and programs of a build into the kernel and attaches nothing. undo removes what it has made.
type loader struct {
	steps

	pins  pins
	conns string // pin of bpf.MapConns
	maps  map[string]*ebpf.Map
	progs map[string]*ebpf.Program
}

func (l *loader) run(b build) error {
	if err := l.makeFolders(); err != nil {
		return err
	}
	l.maps, l.progs = map[string]*ebpf.Map{}, map[string]*ebpf.Program{}
	for _, spec := range b.specs {
		if err := l.openMaps(spec); err != nil {
			return err
		}
		if err := l.loadPrograms(spec); err != nil {
			return err
		}
	}
	return nil
}

func (l *loader) makeFolders() error {
	for _, path := range l.pins.folders() {
		err := os.Mkdir(path, 0o700)
		if errors.Is(err, fs.ErrExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("make pin folder: %w", err)
		}
		l.onUndo(func() error { return os.Remove(path) })
	}
	return nil
}

// mapName is the name that a map is pinned under. The constants of an object are a map too, under the same name in every
// object, and frozen once loaded. That map is named after a hash of its content, so that programs with different
// constants count as different.
func (l *loader) mapName(name string, ms *ebpf.MapSpec) string {
	if name == bpf.MapConns {
		return l.conns
	}
	if name != ".rodata" || len(ms.Contents) != 1 {
		return name
	}
	sum := sha256.Sum256(fmt.Append(nil, ms.Contents[0].Value))
	return "rodata_" + hex.EncodeToString(sum[:8])
}

// openMaps opens every pinned map and creates the missing ones. Objects share maps by name.
func (l *loader) openMaps(spec *ebpf.CollectionSpec) error {
	if err := l.findOldFlows(spec); err != nil {
		return err
	}
	_, noUDP := os.Stat(l.pins.mapPath(bpf.MapUDPFlows))
	for key, ms := range spec.Maps {
		name := l.mapName(key, ms)
		if key == ".rodata" {
			ms.Flags |= unix.BPF_F_MMAPABLE // as the library creates such maps
		}
		path := l.pins.mapPath(name)
		m, known := l.maps[name]
		if !known {
			var err error
			if m, err = ebpf.LoadPinnedMap(path, nil); errors.Is(err, fs.ErrNotExist) {
				if err := l.newMap(name, ms); err != nil {
					return err
				}
				continue
			} else if err != nil {
				return fmt.Errorf("open pinned map %s: %w", path, err)
			}
			l.maps[name] = m
		}
		if err := ms.Compatible(m); err != nil {
			return fmt.Errorf("map %s was created by a version of Isthmus with another layout (%w); run that version again, or stop the agent on this node, run its cleanup and start it again: %w",
				path, err, ErrIncompatible)
		}
	}
	if l.maps[bpf.MapUDPFlows] != nil && errors.Is(noUDP, fs.ErrNotExist) {
		return bpf.CopyUDPFlows(l.maps[bpf.MapUDPFlows], l.maps[bpf.MapFlows], l.maps[bpf.MapHandshakes])
	}
	return nil
}

// newMap pins a map that this ABI does not have yet. A map of connections is taken from another ABI if that has one, so
// that the programs of both know the same connections; any other map is created.
func (l *loader) newMap(name string, ms *ebpf.MapSpec) error {
	var m *ebpf.Map
	var err error
	if slices.Contains([]string{bpf.MapFlows, bpf.MapHandshakes, bpf.MapUDPFlows, bpf.MapConns, bpf.MapFragments, bpf.MapRoutedClients}, name) {
		if m, err = l.share(name, ms); err != nil {
			return err
		}
	}
	if m == nil {
		if name == bpf.MapRoutedClients && (l.shares(bpf.MapFlows) || l.shares(bpf.MapConns)) {
			// The other ABI did not record which clients are routed: flag that some may be.
			ms = ms.Copy()
			ms.Contents = []ebpf.MapKV{{Key: uint32(0), Value: uint32(1)}}
		}
		if m, err = ebpf.NewMap(ms); err != nil {
			return fmt.Errorf("create map %s: %w", name, err)
		}
	}
	l.maps[name] = m
	if err := m.Pin(l.pins.mapPath(name)); err != nil {
		return fmt.Errorf("pin map %s: %w", name, err)
	}
	l.onUndo(m.Unpin)
	return nil
}

// share returns the compatible map of that name that another ABI has pinned, or nil. The other pin stays.
func (l *loader) share(name string, ms *ebpf.MapSpec) (*ebpf.Map, error) {
	others, err := l.pins.otherMaps()
	if err != nil {
		return nil, err
	}
	for _, dir := range others {
		m, err := bpf.Share(filepath.Join(dir, name), func(pinned *ebpf.Map) bool { return ms.Compatible(pinned) == nil })
		if m != nil || err != nil {
			return m, err
		}
	}
	return nil, nil
}

// shares reports whether another ABI has pinned a map of that name.
func (l *loader) shares(name string) bool {
	others, err := l.pins.otherMaps()
	return err == nil && slices.ContainsFunc(others, func(dir string) bool {
		_, err := os.Stat(filepath.Join(dir, name))
		return err == nil
	})
}

func (l *loader) loadPrograms(spec *ebpf.CollectionSpec) error {
	used := map[string]*ebpf.Map{}
	for name, ms := range spec.Maps {
		used[name] = l.maps[l.mapName(name, ms)]
	}
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: used})
	if err != nil {
		return fmt.Errorf("load BPF programs: %w", err)
	}
	defer coll.Close()
	for name := range spec.Programs {
		l.progs[name] = coll.DetachProgram(name)
	}
	return nil
}

// closeHandles closes the file descriptors that the loader holds.
func (l *loader) closeHandles() error {
	return errors.Join(closeAll(l.maps), closeAll(l.progs), l.close())
}

// closeAll closes maps or programs.
func closeAll[T interface{ Close() error }](all map[string]T) error {
	var errs []error
	for _, c := range all {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}
