package lb

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// ServiceWrite makes ID name a Service.
type ServiceWrite struct {
	ID   ServiceID
	Name clusterset.ServiceName
}

// ClusterWrite makes Index name a member.
type ClusterWrite struct {
	Index ClusterIndex
	ID    clusterset.ClusterID
}

// BackendWrite makes ID name Backend.
type BackendWrite struct {
	ID      BackendID
	Backend Backend
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

// Parting is a backend that a frontend with session affinity has lost and that is there all the same.
type Parting struct {
	Frontend FrontendID
	Backend  BackendID
}

// Plan is a list of map writes, to be carried out field by field in the order of the fields. Within a
// field any order will do, so each may go to the kernel as one batch.
//
// Names come before whatever is counted under them. Backends come before the slots that name them, slots
// before the frontend that counts them, and frontends before the range that refuses all others; then the
// same backwards: a frontend shrinks or goes before its slots do, and a backend goes when no slot names
// it any more. A client that comes between any two writes thus meets a backend of the old or of the new
// set, never a hole and never somebody else's pod.
type Plan struct {
	PutServices     []ServiceWrite
	PutClusters     []ClusterWrite
	PutBackends     []BackendWrite
	PutSlots        []SlotWrite
	PutFrontends    []FrontendWrite
	PutRanges       []netip.Prefix
	DeleteRanges    []netip.Prefix
	DeleteFrontends []Address
	DeleteSlots     []Slot
	DeleteBackends  []BackendID
	DeleteServices  []ServiceID
	DeleteClusters  []ClusterIndex

	// Partings are what remembered clients must forget once all this is done: other clients may still meet the
	// backend, so that it is there does not tell. They are no writes by themselves.
	Partings []Parting
}

// Writes returns how many map entries p writes or deletes.
func (p Plan) Writes() int {
	return len(p.PutServices) + len(p.PutClusters) + len(p.PutBackends) + len(p.PutSlots) + len(p.PutFrontends) + len(p.PutRanges) +
		len(p.DeleteRanges) + len(p.DeleteFrontends) + len(p.DeleteSlots) + len(p.DeleteBackends) + len(p.DeleteServices) + len(p.DeleteClusters)
}

// Prefix returns the first n writes of p, all of it when n is larger. It shares p's memory.
func (p Plan) Prefix(n int) Plan {
	if n >= p.Writes() {
		return p
	}
	return Plan{
		PutServices:     take(&n, p.PutServices),
		PutClusters:     take(&n, p.PutClusters),
		PutBackends:     take(&n, p.PutBackends),
		PutSlots:        take(&n, p.PutSlots),
		PutFrontends:    take(&n, p.PutFrontends),
		PutRanges:       take(&n, p.PutRanges),
		DeleteRanges:    take(&n, p.DeleteRanges),
		DeleteFrontends: take(&n, p.DeleteFrontends),
		DeleteSlots:     take(&n, p.DeleteSlots),
		DeleteBackends:  take(&n, p.DeleteBackends),
		DeleteServices:  take(&n, p.DeleteServices),
		DeleteClusters:  take(&n, p.DeleteClusters),
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
	put(have.Services, want.Services, func(id ServiceID, n clusterset.ServiceName) {
		p.PutServices = append(p.PutServices, ServiceWrite{id, n})
	})
	put(have.Clusters, want.Clusters, func(i ClusterIndex, id clusterset.ClusterID) {
		p.PutClusters = append(p.PutClusters, ClusterWrite{i, id})
	})
	put(have.Backends, want.Backends, func(id BackendID, b Backend) { p.PutBackends = append(p.PutBackends, BackendWrite{id, b}) })
	put(have.Slots, want.Slots, func(k Slot, id BackendID) { p.PutSlots = append(p.PutSlots, SlotWrite{k, id}) })
	put(have.Frontends, want.Frontends, func(a Address, fe Frontend) { p.PutFrontends = append(p.PutFrontends, FrontendWrite{a, fe}) })
	put(have.Ranges, want.Ranges, func(r netip.Prefix, _ bool) { p.PutRanges = append(p.PutRanges, r) })
	p.DeleteRanges = missing(have.Ranges, want.Ranges)
	p.DeleteFrontends = missing(have.Frontends, want.Frontends)
	p.DeleteSlots = missing(have.Slots, want.Slots)
	p.DeleteBackends = missing(have.Backends, want.Backends)
	p.DeleteServices = missing(have.Services, want.Services)
	p.DeleteClusters = missing(have.Clusters, want.Clusters)

	// A fixed order makes plans, logs and failures the same every time.
	slices.SortFunc(p.PutServices, func(a, b ServiceWrite) int { return cmp.Compare(a.ID, b.ID) })
	slices.SortFunc(p.PutClusters, func(a, b ClusterWrite) int { return cmp.Compare(a.Index, b.Index) })
	slices.SortFunc(p.PutBackends, func(a, b BackendWrite) int { return cmp.Compare(a.ID, b.ID) })
	slices.SortFunc(p.PutSlots, func(a, b SlotWrite) int { return a.Slot.Compare(b.Slot) })
	slices.SortFunc(p.PutFrontends, func(a, b FrontendWrite) int { return a.Address.Compare(b.Address) })
	slices.SortFunc(p.PutRanges, netip.Prefix.Compare)
	slices.SortFunc(p.DeleteRanges, netip.Prefix.Compare)
	slices.SortFunc(p.DeleteFrontends, Address.Compare)
	slices.SortFunc(p.DeleteSlots, Slot.Compare)
	slices.Sort(p.DeleteBackends)
	slices.Sort(p.DeleteServices)
	slices.Sort(p.DeleteClusters)
	return p
}

// put calls write for every entry of want that have does not hold just so.
func put[K, V comparable](have, want map[K]V, write func(K, V)) {
	for k, v := range want {
		if old, ok := have[k]; !ok || old != v {
			write(k, v)
		}
	}
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
