package client

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// maxSliceEvents bounds the arrivals, and the vanished slices, that are remembered of one member. It is far beyond what a
// member exports; only one that creates and deletes slices without end reaches it.
const maxSliceEvents = 100_000

// sliceEvents remembers when slices arrived, and which slices vanished before their record did. It keeps at most
// maxSliceEvents of each for a member, and forgets them when the member leaves. The zero sliceEvents is empty. Safe for
// concurrent use.
type sliceEvents struct {
	mu      sync.Mutex
	members map[clusterset.ClusterID]*memberEvents
}

// memberEvents are the events of one member's slices.
type memberEvents struct {
	seen     map[ImportedSlice]time.Time
	vanished map[clusterset.ServiceName]map[ImportedSlice]struct{}
	count    int // of vanished
}

// added records that a slice exists: seen by the watch, or found by a list.
func (e *sliceEvents) added(id clusterset.ClusterID, s ImportedSlice, listed bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	m := e.members[id]
	if m == nil {
		if listed {
			return
		}
		m = e.add(id)
	}
	if _, known := m.seen[s]; !listed && (known || len(m.seen) < maxSliceEvents) {
		m.seen[s] = time.Now()
	}
	m.forget(s)
}

// add starts the events of a member. e.mu is held.
func (e *sliceEvents) add(id clusterset.ClusterID) *memberEvents {
	if e.members == nil {
		e.members = map[clusterset.ClusterID]*memberEvents{}
	}
	m := &memberEvents{seen: map[ImportedSlice]time.Time{}, vanished: map[clusterset.ServiceName]map[ImportedSlice]struct{}{}}
	e.members[id] = m
	return m
}

// removed records that a slice is gone, and whether it vanished without a tombstone.
func (e *sliceEvents) removed(id clusterset.ClusterID, s ImportedSlice, unexplained bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	m := e.members[id]
	if m == nil {
		if !unexplained {
			return
		}
		m = e.add(id)
	}
	delete(m.seen, s)
	if !unexplained || m.count >= maxSliceEvents {
		return
	}
	of := m.vanished[s.Service]
	if of == nil {
		of = map[ImportedSlice]struct{}{}
		m.vanished[s.Service] = of
	}
	if _, known := of[s]; !known {
		of[s] = struct{}{}
		m.count++
	}
}

// settled forgets a vanished slice that the guard keeps no longer: no tombstone need release it.
func (e *sliceEvents) settled(id clusterset.ClusterID, s ImportedSlice) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if m := e.members[id]; m != nil {
		m.forget(s)
	}
}

// takeVanished removes and returns the slices of a member's Service that vanished before its tombstone arrived.
func (e *sliceEvents) takeVanished(id clusterset.ClusterID, name clusterset.ServiceName) []ImportedSlice {
	e.mu.Lock()
	defer e.mu.Unlock()
	m := e.members[id]
	if m == nil {
		return nil
	}
	of := m.vanished[name]
	m.count -= len(of)
	delete(m.vanished, name)
	return slices.Collect(maps.Keys(of))
}

// left forgets a member.
func (e *sliceEvents) left(id clusterset.ClusterID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.members, id)
}

// take removes and returns when the last change of a slice arrived, and whether one arrived since the last call.
func (e *sliceEvents) take(id clusterset.ClusterID, s ImportedSlice) (time.Time, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	m := e.members[id]
	if m == nil {
		return time.Time{}, false
	}
	t, ok := m.seen[s]
	delete(m.seen, s)
	return t, ok
}

// forget forgets a vanished slice.
func (m *memberEvents) forget(s ImportedSlice) {
	of := m.vanished[s.Service]
	if _, ok := of[s]; !ok {
		return
	}
	delete(of, s)
	m.count--
	if len(of) == 0 {
		delete(m.vanished, s.Service)
	}
}

// SeenAt returns when the last change of a slice's source, which is of member id, arrived from the broker, and whether one
// arrived since the last call.
func (b *Broker) SeenAt(id clusterset.ClusterID, s ImportedSlice) (time.Time, bool) {
	return b.sliceEvents.take(id, s)
}
