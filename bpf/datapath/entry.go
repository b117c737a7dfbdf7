package datapath

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Entry is the frontend of one VIP, port and protocol, as the kernel holds it.
type Entry struct {
	Service  clusterset.ServiceName // the zero value when its number has no name
	Backends []lb.Address           // that get new clients, one for each slot, in the order of slots
	Broken   int                    // slots without a backend
}

// maxBroken is the number of broken slots after which the rest is not read.
const maxBroken = 1000

// Frontend returns one frontend with all its slots, and false when it does not exist.
func (r *Reader) Frontend(a lb.Address) (Entry, bool, error) {
	var fe bpf.Frontend
	if found, err := lookup(r, bpf.MapFrontends, encodeFrontendKey(a), &fe); !found || err != nil {
		return Entry{}, false, err
	}
	entry := Entry{Service: r.serviceName(lb.ServiceID(fe.Service))}
	for i := range fe.Count {
		if entry.Broken == maxBroken {
			entry.Broken += int(fe.Count - i) // only another writer can have left such a count, which may be four billion
			break
		}
		var id uint32
		found, err := lookup(r, bpf.MapSlots, bpf.SlotKey{FrontendId: fe.Id, Slot: i}, &id)
		var be bpf.Backend
		if found && err == nil {
			found, err = lookup(r, bpf.MapBackends, id, &be)
		}
		switch {
		case err != nil:
			return Entry{}, false, err
		case !found:
			entry.Broken++
		default:
			entry.Backends = append(entry.Backends, decodeBackend(be).Address)
		}
	}
	return entry, true, nil
}

// lookup reads the value of a key. It returns false when the map does not have the key.
func lookup[K, V any](r *Reader, name string, key K, value *V) (bool, error) {
	m, err := r.open(name)
	if err != nil {
		return false, err
	}
	err = m.Lookup(key, value)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read map %s: %w", name, err)
	}
	return true, nil
}
