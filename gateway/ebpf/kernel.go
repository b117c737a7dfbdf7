package ebpf

import (
	"errors"
	"fmt"
	"hash/maphash"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/isthmus-net/isthmus/bpf"
)

// folder is this package's folder in the BPF filesystem. Each ABI has its own maps. They share the links, so that one
// program replaces the other.
const folder = "isthmus-gateway"

// kernel holds the programs and their maps.
type kernel struct {
	dir   string // folder, below the mount point of the BPF filesystem
	abi   int
	noTCX bool // the program is a clsact filter
	maps  map[string]*ebpf.Map
	prog  *ebpf.Program
	xdp   *ebpf.Program // for drivers
	seed  maphash.Seed
	// predecessors are other ABIs whose programs may still run. The list is empty once our program runs on all
	// devices.
	predecessors []predecessor
}

func (k *kernel) mapsDir() string { return filepath.Join(k.dir, fmt.Sprint(mapsPrefix, k.abi)) }

func (k *kernel) links() string { return filepath.Join(k.dir, "links") }

// load opens the pinned maps, creates missing ones, and loads the programs without attaching them.
func load(bpffs string, flows int, v version) (k *kernel, err error) {
	k = &kernel{dir: filepath.Join(bpffs, folder), abi: v.abi, noTCX: v.noTCX, maps: map[string]*ebpf.Map{}, seed: maphash.MakeSeed()}
	for _, dir := range []string{k.dir, k.mapsDir(), k.links()} {
		if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, fmt.Errorf("make pin folder: %w", err)
		}
	}
	spec := v.spec
	if k.predecessors, err = k.findPredecessors(spec); err != nil {
		return nil, err
	}
	size(spec, flows)
	spec.Maps[bpf.MapGatewaySources].MaxEntries *= 2 // see limits
	conns, err := k.findOldFlows(spec)
	if err != nil {
		return nil, err
	}
	_, noUDP := os.Stat(filepath.Join(k.mapsDir(), bpf.MapUDPFlows))
	for name, ms := range spec.Maps {
		if strings.HasPrefix(name, ".") {
			continue // constants belong to the program
		}
		pin := name
		if name == bpf.MapConns {
			pin = conns
		}
		if k.maps[name], err = k.openMap(pin, ms); err != nil {
			return nil, errors.Join(err, k.close())
		}
	}
	if errors.Is(noUDP, fs.ErrNotExist) {
		if err := bpf.CopyUDPFlows(k.maps[bpf.MapUDPFlows], k.maps[bpf.MapFlows], k.maps[bpf.MapHandshakes]); err != nil {
			return nil, errors.Join(err, k.close())
		}
	}
	if err := k.limitHalfOpen(spec); err != nil {
		return nil, errors.Join(err, k.close())
	}
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: k.maps})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("load the balancer's programs: %w", err), k.close())
	}
	k.prog, k.xdp = coll.DetachProgram(bpf.ProgGateway), coll.DetachProgram(bpf.ProgGatewayXDP)
	coll.Close()
	return k, nil
}

// openMap returns the pinned map of that name, that of a predecessor, or a new one. A pinned map keeps its capacity.
func (k *kernel) openMap(name string, ms *ebpf.MapSpec) (*ebpf.Map, error) {
	path := filepath.Join(k.mapsDir(), name)
	m, err := ebpf.LoadPinnedMap(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		if slices.Contains(shared, name) {
			if m, err = k.share(name, ms); err != nil {
				return nil, err
			}
		}
		if m == nil {
			if m, err = ebpf.NewMap(ms); err != nil {
				return nil, fmt.Errorf("create map %s: %w", name, err)
			}
		} else {
			ms.MaxEntries = m.MaxEntries()
		}
		if err := m.Pin(path); err != nil {
			return nil, errors.Join(fmt.Errorf("pin map %s: %w", name, err), m.Close())
		}
		return m, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open pinned map %s: %w", path, err)
	}
	ms.MaxEntries = m.MaxEntries()
	if err := ms.Compatible(m); err != nil {
		return nil, errors.Join(fmt.Errorf("map %s was made by a version with another layout; drain this gateway, run its cleanup and start it anew: %w", path, err), m.Close())
	}
	return m, nil
}

// close releases programs and maps; pins stay.
func (k *kernel) close() error {
	var errs []error
	for _, m := range k.maps {
		errs = append(errs, m.Close())
	}
	if k.prog != nil {
		errs = append(errs, k.prog.Close(), k.xdp.Close())
	}
	return errors.Join(errs...)
}

// read returns the content of the maps, without the tables.
func (k *kernel) read() (*content, error) {
	c := newContent()
	return c, errors.Join(
		dump(k.maps[bpf.MapGatewayVIPs], c.vips), dump(k.maps[bpf.MapFrontends], c.frontends), dump(k.maps[bpf.MapBackends], c.backends),
		dump(k.maps[bpf.MapGatewaySources], c.sources), dump(k.maps[bpf.MapGatewayMembers], c.members),
		dump(k.maps[bpf.MapGatewayOrigins], c.origins), dump(k.maps[bpf.MapGatewaySlots], c.slots),
		dump(k.maps[bpf.MapGatewayPeers], c.peers),
	)
}

// dump copies a hash map of the kernel into a Go map.
func dump[K, V comparable](m *ebpf.Map, into map[K]V) error {
	const batch = 4096
	keys, values := make([]K, batch), make([]V, batch)
	var cursor ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		last := errors.Is(err, ebpf.ErrKeyNotExist)
		if err != nil && !last {
			return fmt.Errorf("read map %s: %w", m, err)
		}
		for i := range n {
			into[keys[i]] = values[i]
		}
		if last {
			return nil
		}
	}
}

// table opens the table of a frontend, nil if it has none.
func (k *kernel) table(id uint32) (*ebpf.Map, error) {
	var inner *ebpf.Map
	err := k.maps[bpf.MapGatewayTables].Lookup(id, &inner)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open the table of frontend %d: %w", id, err)
	}
	return inner, nil
}

// readTable returns the hash of a frontend's table, 0 if it has none.
func (k *kernel) readTable(id uint32) (uint64, error) {
	inner, err := k.table(id)
	if err != nil || inner == nil {
		return 0, err
	}
	defer inner.Close()
	b, err := inner.LookupBytes(uint32(0))
	if err != nil {
		return 0, fmt.Errorf("read the table of frontend %d: %w", id, err)
	}
	return maphash.Bytes(k.seed, b) | 1, nil
}
