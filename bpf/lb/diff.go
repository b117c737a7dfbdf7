package lb

import (
	"cmp"
	"slices"
)

// BackendWrite makes ID name Address.
type BackendWrite struct {
	ID      BackendID
	Address Address
}

// SlotWrite makes Slot lead to Backend.
type SlotWrite struct {
	Slot    Slot
	Backend BackendID
}

// FrontendWrite makes clients of Address meet Frontend.
type FrontendWrite struct {
	Address  Address
	Frontend Frontend
}

// Plan is a list of map writes, to be carried out field by field in the order of the fields. Within a
// field any order will do, so each may go to the kernel as one batch.
//
// Backends come before the slots that name them, slots before the frontend that counts them; then the
// same backwards: a frontend shrinks or goes before its slots do, and a backend goes when no slot names
// it any more. A client that comes between any two writes thus meets a backend of the old or of the new
// set, never a hole and never somebody else's pod.
type Plan struct {
	PutBackends     []BackendWrite
	PutSlots        []SlotWrite
	PutFrontends    []FrontendWrite
	DeleteFrontends []Address
	DeleteSlots     []Slot
	DeleteBackends  []BackendID
}

// Writes returns how many map entries p writes or deletes.
func (p Plan) Writes() int {
	return len(p.PutBackends) + len(p.PutSlots) + len(p.PutFrontends) +
		len(p.DeleteFrontends) + len(p.DeleteSlots) + len(p.DeleteBackends)
}

// Prefix returns the first n writes of p, all of them when n is larger. It shares p's memory.
func (p Plan) Prefix(n int) Plan {
	return Plan{
		PutBackends:     take(&n, p.PutBackends),
		PutSlots:        take(&n, p.PutSlots),
		PutFrontends:    take(&n, p.PutFrontends),
		DeleteFrontends: take(&n, p.DeleteFrontends),
		DeleteSlots:     take(&n, p.DeleteSlots),
		DeleteBackends:  take(&n, p.DeleteBackends),
	}
}

// take returns the first *n of s and lowers *n by their number.
func take[T any](n *int, s []T) []T {
	k := min(max(*n, 0), len(s))
	*n -= k
	if k == 0 {
		return nil
	}
	return s[:k]
}

// Diff returns the writes that turn have into want. Any prefix of the Plan may be applied alone without
// a frontend naming a missing backend, or one that is in neither its old nor its new set. Diff(s, s) is
// empty. It reads both states and keeps neither.
//
// want must come from Build with have: a backend number that both hold names the same address in both.
func Diff(have, want State) Plan {
	var p Plan
	for id, a := range want.Backends {
		if old, ok := have.Backends[id]; !ok || old != a {
			p.PutBackends = append(p.PutBackends, BackendWrite{id, a})
		}
	}
	for k, id := range want.Slots {
		if old, ok := have.Slots[k]; !ok || old != id {
			p.PutSlots = append(p.PutSlots, SlotWrite{k, id})
		}
	}
	for a, fe := range want.Frontends {
		if old, ok := have.Frontends[a]; !ok || old != fe {
			p.PutFrontends = append(p.PutFrontends, FrontendWrite{a, fe})
		}
	}
	p.DeleteFrontends = missing(have.Frontends, want.Frontends)
	p.DeleteSlots = missing(have.Slots, want.Slots)
	p.DeleteBackends = missing(have.Backends, want.Backends)

	// A fixed order makes plans, logs and failures the same every time.
	slices.SortFunc(p.PutBackends, func(a, b BackendWrite) int { return cmp.Compare(a.ID, b.ID) })
	slices.SortFunc(p.PutSlots, func(a, b SlotWrite) int { return a.Slot.Compare(b.Slot) })
	slices.SortFunc(p.PutFrontends, func(a, b FrontendWrite) int { return a.Address.Compare(b.Address) })
	slices.SortFunc(p.DeleteFrontends, Address.Compare)
	slices.SortFunc(p.DeleteSlots, Slot.Compare)
	slices.Sort(p.DeleteBackends)
	return p
}

// missing lists the keys of have that want does not hold.
func missing[K comparable, V any](have, want map[K]V) []K {
	var gone []K
	for k := range have {
		if _, ok := want[k]; !ok {
			gone = append(gone, k)
		}
	}
	return gone
}
