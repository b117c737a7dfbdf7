package ebpf

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/isthmus-net/isthmus/bpf"
)

// version is what one version of this package installs on a gateway.
type version struct {
	abi   int
	spec  *ebpf.CollectionSpec
	noTCX bool // behave as if the kernel had no TCX
}

// thisVersion returns the version of this program for this kernel.
func thisVersion() (version, error) {
	spec, err := bpf.LoadGatewaySpec()
	if err != nil {
		return version{}, fmt.Errorf("object of the gateway: %w", err)
	}
	// The loopback device has index 1 in every network namespace.
	_, err = link.QueryPrograms(link.QueryOptions{Target: 1, Attach: ebpf.AttachTCXIngress})
	return version{bpf.GatewayABIVersion, spec, err != nil}, nil
}

const mapsPrefix = "maps-v"

// predecessor is another ABI, whose program may still run. If the layouts allow it, both programs share the flows,
// and therefore the ids that flows refer to.
type predecessor struct {
	dir       string
	frontends map[bpf.GatewayFrontendKey]bpf.GatewayFrontend
	backends  map[uint32]bpf.GatewayBackend
	next      uint32
}

// shared names the maps that ABIs share if their layouts are equal.
var shared = []string{bpf.MapFlows, bpf.MapHandshakes, bpf.MapUDPFlows, bpf.MapConns, bpf.MapFragments, bpf.MapAffinities, bpf.MapRefusals}

// otherMaps lists the map folders of other ABIs.
func (k *kernel) otherMaps() ([]string, error) {
	entries, err := os.ReadDir(k.dir)
	if err != nil {
		return nil, fmt.Errorf("list pins: %w", err)
	}
	var others []string
	for _, e := range entries {
		if path := filepath.Join(k.dir, e.Name()); strings.HasPrefix(e.Name(), mapsPrefix) && path != k.mapsDir() {
			others = append(others, path)
		}
	}
	return others, nil
}

// findPredecessors returns the other ABIs whose ids can be adopted.
func (k *kernel) findPredecessors(spec *ebpf.CollectionSpec) ([]predecessor, error) {
	dirs, err := k.otherMaps()
	if err != nil {
		return nil, err
	}
	var found []predecessor
	for _, dir := range dirs {
		p := predecessor{dir, map[bpf.GatewayFrontendKey]bpf.GatewayFrontend{}, map[uint32]bpf.GatewayBackend{}, 0}
		settings := map[uint32]bpf.GatewaySettings{}
		ok := true
		for name, read := range map[string]func(*ebpf.Map) error{
			bpf.MapFrontends:       func(m *ebpf.Map) error { return dump(m, p.frontends) },
			bpf.MapBackends:        func(m *ebpf.Map) error { return dump(m, p.backends) },
			bpf.MapGatewaySettings: func(m *ebpf.Map) error { return dump(m, settings) },
		} {
			had, err := readPinned(filepath.Join(dir, name), spec.Maps[name], read)
			if err != nil {
				return nil, err
			}
			ok = ok && had
		}
		if ok {
			p.next = settings[0].NextBackend
			found = append(found, p)
		}
	}
	return found, nil
}

// readPinned reads a pinned map, if there is one and its entries have the size of those of ms.
func readPinned(path string, ms *ebpf.MapSpec, read func(*ebpf.Map) error) (bool, error) {
	m, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("open pinned map %s: %w", path, err)
	}
	defer m.Close()
	if m.Type() != ms.Type || m.KeySize() != ms.KeySize || m.ValueSize() != ms.ValueSize {
		return false, nil
	}
	return true, read(m)
}

// share returns a predecessor's map of that name, nil if none fits. The predecessor's pin stays.
func (k *kernel) share(name string, ms *ebpf.MapSpec) (*ebpf.Map, error) {
	for _, p := range k.predecessors {
		m, err := bpf.Share(filepath.Join(p.dir, name), func(pinned *ebpf.Map) bool {
			ms := ms.Copy()
			ms.MaxEntries = pinned.MaxEntries()
			return ms.Compatible(pinned) == nil
		})
		if m != nil || err != nil {
			return m, err
		}
	}
	return nil, nil
}

// findOldFlows finds the flows of a build that has no bpf.MapFlows, prepares the spec to read them, and returns the pin of
// bpf.MapConns. Each flow moves to the new map with its next packet.
func (k *kernel) findOldFlows(spec *ebpf.CollectionSpec) (pin string, err error) {
	dirs := []string{k.mapsDir()}
	for _, p := range k.predecessors {
		dirs = append(dirs, p.dir)
	}
	_, err = os.Stat(filepath.Join(k.mapsDir(), bpf.MapFlows))
	capacity, err := bpf.FindOldFlows(dirs, errors.Is(err, fs.ErrNotExist))
	if err != nil {
		return "", err
	}
	if capacity == 0 {
		if err := os.Remove(filepath.Join(k.mapsDir(), bpf.MapConns)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", fmt.Errorf("remove flows of another version: %w", err)
		}
		return bpf.MapNoConns, nil
	}
	spec.Maps[bpf.MapConns].MaxEntries = capacity
	return bpf.MapConns, spec.Variables[bpf.VarOldFlows].Set(uint32(1))
}

// forgetOthers removes the maps of other ABIs. Call it when none of their programs runs any more.
func (k *kernel) forgetOthers() error {
	dirs, err := k.otherMaps()
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("remove maps of another version: %w", err)
		}
	}
	k.predecessors = nil
	return nil
}

// adopt takes over a predecessor's ids for everything that has none yet.
func (i *ids) adopt(p predecessor) {
	for key, f := range p.frontends {
		if _, ok := i.frontends[key]; !ok && !i.taken[f.Id] {
			i.frontends[key], i.taken[f.Id] = f.Id, true
		}
	}
	numbers := map[uint32]bool{}
	for number := range maps.Values(i.backends) {
		numbers[number] = true
	}
	for number, b := range p.backends {
		key := bpf.GatewayFrontendKey{Addr: b.Addr, Port: b.Port, Proto: b.Proto}
		if _, ok := i.backends[key]; !ok && !numbers[number] {
			i.backends[key] = number
		}
		i.next = max(i.next, number+1)
	}
	i.next = max(i.next, p.next)
}
