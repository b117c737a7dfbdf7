package lb

// idAllocator numbers frontends, backends, Services and members. It counts upwards and only wraps when the numbers
// are used up, so a freed number does not come back while a BPF program may still hold it.
// The zero value is ready; one idAllocator belongs to one kernel. Not safe for concurrent use.
type idAllocator struct {
	frontend, backend, service uint32 // the highest number seen or allocated
	cluster                    uint32 // likewise, below MaxClusters
}

// adopt counts on from the highest numbers in have, also those in slots that no frontend counts.
func (ids *idAllocator) adopt(have State) {
	for _, fe := range have.Frontends {
		ids.frontend = max(ids.frontend, uint32(fe.ID))
		ids.service = max(ids.service, uint32(fe.Service))
	}
	for k, id := range have.Slots {
		ids.frontend = max(ids.frontend, uint32(k.Frontend))
		ids.backend = max(ids.backend, uint32(id))
	}
	for id := range have.Backends {
		ids.backend = max(ids.backend, uint32(id))
	}
	for id := range have.Services {
		ids.service = max(ids.service, uint32(id))
	}
	for i := range have.Clusters {
		ids.cluster = max(ids.cluster, uint32(i))
	}
}

// next returns the number after *last that is neither 0 nor taken, and stores it in *last.
func next(last *uint32, taken func(uint32) bool) uint32 {
	for {
		*last++
		if *last != 0 && !taken(*last) {
			return *last
		}
	}
}

// idSet is a set of numbers that lie close together: each word has the bits of 64 of them.
type idSet map[uint32]uint64

func (s idSet) has(n uint32) bool { return s[n/64]&(1<<(n%64)) != 0 }

func (s idSet) add(n uint32) { s[n/64] |= 1 << (n % 64) }

func (s idSet) remove(n uint32) {
	if s[n/64] &^= 1 << (n % 64); s[n/64] == 0 {
		delete(s, n/64)
	}
}
