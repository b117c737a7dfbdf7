package view

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// joined is an incremental form of assemble: a node in a large ClusterSet receives one changed endpoint at a time. Any
// goroutine may call its methods. Create it with newJoined.
type joined struct {
	mu      sync.Mutex // guards what follows
	groups  map[clusterset.ServiceName]*group
	changed map[clusterset.ServiceName]bool // since last
	last    *clusterset.Snapshot
}

// group is one Service, imported or not. Snapshots share slices, so it is never changed in place.
type group struct {
	imp    *clusterset.Import
	slices []clusterset.Slice // by Cluster, then by Name
}

func newJoined() *joined {
	return &joined{groups: map[clusterset.ServiceName]*group{}, changed: map[clusterset.ServiceName]bool{}, last: &clusterset.Snapshot{Services: []clusterset.Service{}}}
}

// replaceImport replaces was by is; each may be nil.
func (w *joined) replaceImport(was, is *clusterset.Import) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if was != nil {
		w.group(was.Service).imp = nil
	}
	if is != nil {
		w.group(is.Service).imp = is
	}
}

// replaceSlice replaces was by is; each may be nil. They may belong to different Services.
func (w *joined) replaceSlice(was, is *member) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if was != nil {
		g := w.group(was.service)
		g.slices = slices.DeleteFunc(slices.Clone(g.slices), func(s clusterset.Slice) bool { return s.Name == was.slice.Name })
	}
	if is != nil {
		g := w.group(is.service)
		i, _ := slices.BinarySearchFunc(g.slices, is.slice, compareSlices)
		g.slices = slices.Insert(slices.Clip(g.slices), i, is.slice)
	}
}

func compareSlices(a, b clusterset.Slice) int {
	return cmp.Or(strings.Compare(string(a.Cluster), string(b.Cluster)), strings.Compare(a.Name, b.Name))
}

// group returns the group of a Service for a change.
func (w *joined) group(name clusterset.ServiceName) *group {
	w.changed[name] = true
	g := w.groups[name]
	if g == nil {
		g = &group{}
		w.groups[name] = g
	}
	return g
}

// snapshot returns the current Snapshot, which is the last one if nothing has changed. O(n) copies and O(changes log n).
func (w *joined) snapshot() *clusterset.Snapshot {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.changed) == 0 {
		return w.last
	}
	next := make([]clusterset.Service, 0, len(w.last.Services)+len(w.changed))
	rest := w.last.Services
	for _, name := range slices.SortedFunc(maps.Keys(w.changed), clusterset.ServiceName.Compare) {
		i, had := slices.BinarySearchFunc(rest, name, func(s clusterset.Service, n clusterset.ServiceName) int { return s.Service.Compare(n) })
		next = append(next, rest[:i]...)
		rest = rest[i:]
		if had {
			rest = rest[1:]
		}
		switch g := w.groups[name]; {
		case g.imp != nil:
			s := clusterset.Service{Import: *g.imp}
			if len(g.slices) > 0 {
				s.Slices = g.slices
			}
			next = append(next, s)
		case len(g.slices) == 0:
			delete(w.groups, name)
		}
	}
	w.last = &clusterset.Snapshot{Services: append(next, rest...)}
	clear(w.changed)
	return w.last
}
