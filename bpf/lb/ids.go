package lb

// IDs gives frontends, backends, Services and members their numbers. It counts upwards and only wraps when
// the numbers are used up, so one that was just freed does not come back while a program may still hold it.
// The zero value is ready; one IDs belongs to one kernel. Not safe for concurrent use.
type IDs struct {
	frontend, backend, service uint32 // the highest seen or given
	cluster                    uint32 // likewise, below MaxClusters
}

// adopt makes room above every number that have uses, also in slots no frontend names.
func (ids *IDs) adopt(have State) {
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

// next returns the number after *last that is neither 0 nor taken, and remembers it.
func next(last *uint32, taken func(uint32) bool) uint32 {
	for {
		*last++
		if *last != 0 && !taken(*last) {
			return *last
		}
	}
}

// numbers is a set of numbers that lie close together: each word has the bits of 64 of them.
type numbers map[uint32]uint64

func (s numbers) has(n uint32) bool { return s[n/64]&(1<<(n%64)) != 0 }

func (s numbers) add(n uint32) { s[n/64] |= 1 << (n % 64) }

func (s numbers) remove(n uint32) {
	if s[n/64] &^= 1 << (n % 64); s[n/64] == 0 {
		delete(s, n/64)
	}
}
