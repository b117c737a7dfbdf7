package view

import (
	"slices"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// member is a slice with its Service.
type member struct {
	service clusterset.ServiceName
	slice   clusterset.Slice
}

// assemble joins imports and slices, in any order, into a Snapshot. It drops a slice without an import, which no client can
// reach; an import without slices is a Service without endpoints. The Snapshot shares memory with its inputs. O(n log n).
func assemble(imports []clusterset.Import, members []member) *clusterset.Snapshot {
	bySvc := make(map[clusterset.ServiceName][]clusterset.Slice, len(imports))
	for _, m := range members {
		bySvc[m.service] = append(bySvc[m.service], m.slice)
	}
	snapshot := &clusterset.Snapshot{Services: make([]clusterset.Service, 0, len(imports))}
	for _, imp := range imports {
		own := bySvc[imp.Service]
		slices.SortFunc(own, compareSlices)
		snapshot.Services = append(snapshot.Services, clusterset.Service{Import: imp, Slices: own})
	}
	slices.SortFunc(snapshot.Services, func(a, b clusterset.Service) int { return a.Service.Compare(b.Service) })
	return snapshot
}
