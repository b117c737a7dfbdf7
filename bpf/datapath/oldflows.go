package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/cilium/ebpf"

	"github.com/isthmus-net/isthmus/bpf"
)

// findOldFlows finds the flows of a build that has no bpf.MapFlows, and prepares a spec of the packet path to read them.
// Each flow moves to the new map with its next packet.
func (l *loader) findOldFlows(spec *ebpf.CollectionSpec) error {
	ms := spec.Maps[bpf.MapConns]
	if ms == nil {
		return nil
	}
	dirs, err := l.pins.otherMaps()
	if err != nil {
		return err
	}
	_, err = os.Stat(l.pins.mapPath(bpf.MapFlows))
	capacity, err := bpf.FindOldFlows(append(dirs, l.pins.maps()), errors.Is(err, fs.ErrNotExist))
	if err != nil || capacity == 0 {
		l.conns = bpf.MapNoConns
		return err
	}
	l.conns, ms.MaxEntries = bpf.MapConns, capacity
	return setConstant(spec, bpf.VarOldFlows, 1)
}

// setConstant sets a constant in the section that openMaps makes a map of. The library would only do so in a map that it
// makes itself.
func setConstant(spec *ebpf.CollectionSpec, name string, value uint32) error {
	v := spec.Variables[name]
	if err := v.Set(value); err != nil {
		return fmt.Errorf("set constant: %w", err)
	}
	section, ok := spec.Maps[v.SectionName].Contents[0].Value.([]byte)
	if !ok || int(v.Offset)+len(v.Value) > len(section) {
		return fmt.Errorf("constant %s lies outside of its section", name)
	}
	copy(section[v.Offset:], v.Value)
	return nil
}
