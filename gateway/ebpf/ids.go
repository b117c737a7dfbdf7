package ebpf

import (
	"fmt"

	"github.com/isthmus-net/isthmus/bpf"
)

// maxFrontends is the number of tables (GATEWAY_FRONTENDS_MAX) without id 0.
const maxFrontends = 16384 - 1

// ids assigns the ids by which the maps know frontends and backends. An id never changes while it is in use.
type ids struct {
	frontends map[bpf.GatewayFrontendKey]uint32
	taken     map[uint32]bool
	free      uint32 // all ids below it are taken
	backends  map[bpf.GatewayFrontendKey]uint32
	next      uint32 // next backend id; a flow may still hold the id of a removed backend, so none is reused
}

// idsOf returns the ids in use.
func idsOf(c *content, next uint32) *ids {
	i := &ids{
		frontends: map[bpf.GatewayFrontendKey]uint32{}, taken: map[uint32]bool{}, free: 1, backends: map[bpf.GatewayFrontendKey]uint32{}, next: max(next, 1),
	}
	for key, f := range c.frontends {
		i.frontends[key], i.taken[f.Id] = f.Id, true
	}
	for number, b := range c.backends {
		i.backends[bpf.GatewayFrontendKey{Addr: b.Addr, Port: b.Port, Proto: b.Proto}] = number
		i.next = max(i.next, number+1)
	}
	return i
}

func (i *ids) frontend(key bpf.GatewayFrontendKey) (uint32, error) {
	if id, ok := i.frontends[key]; ok {
		return id, nil
	}
	for i.taken[i.free] {
		i.free++
	}
	if i.free > maxFrontends {
		return 0, fmt.Errorf("there are more than %d ports of VIPs: use another group of gateways for some", maxFrontends)
	}
	i.frontends[key], i.taken[i.free] = i.free, true
	return i.free, nil
}

func (i *ids) backend(key bpf.GatewayFrontendKey) uint32 {
	if number, ok := i.backends[key]; ok {
		return number
	}
	i.backends[key] = i.next
	i.next++
	return i.backends[key]
}

// release frees the ids of entries that old has and want lacks. A backend's id is never reused.
func (i *ids) release(old, want *content) {
	for key, f := range old.frontends {
		if _, ok := want.frontends[key]; !ok {
			delete(i.frontends, key)
			delete(i.taken, f.Id)
			i.free = min(i.free, f.Id)
		}
	}
	for number, b := range old.backends {
		if _, ok := want.backends[number]; !ok {
			delete(i.backends, bpf.GatewayFrontendKey{Addr: b.Addr, Port: b.Port, Proto: b.Proto})
		}
	}
}
