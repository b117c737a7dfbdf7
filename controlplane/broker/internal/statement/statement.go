// Package statement tells a member's own withdrawals from accidents on the broker, however long ago they were.
//
// A member states in its Lease what it exports, as digests. An importer that sees exactly this on the broker knows that the member
// itself withdrew all else: a tombstone ends after minutes, and an importer may have slept for longer.
package statement

import (
	"fmt"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Statement identifies Services that a member exports, and their slices on the broker. It is comparable, and the zero value is
// empty.
type Statement struct{ exports, slices clusterset.Digest }

// AddExport adds a Service.
func (s *Statement) AddExport(name clusterset.ServiceName) { s.exports.Add(name.String()) }

// RemoveExport removes a Service that was added.
func (s *Statement) RemoveExport(name clusterset.ServiceName) { s.exports.Remove(name.String()) }

// AddSlice adds a slice of a Service by its name on the broker.
func (s *Statement) AddSlice(of clusterset.ServiceName, name string) { s.slices.Add(key(of, name)) }

// RemoveSlice removes a slice that was added.
func (s *Statement) RemoveSlice(of clusterset.ServiceName, name string) {
	s.slices.Remove(key(of, name))
}

func key(of clusterset.ServiceName, name string) string { return of.String() + "/" + name }

// Merge adds what o has, none of which is in s.
func (s *Statement) Merge(o Statement) {
	s.exports.Merge(o.exports)
	s.slices.Merge(o.slices)
}

// String returns the value of the annotation isthmus.dev/exports.
func (s Statement) String() string { return fmt.Sprintf("%s.%s", s.exports, s.slices) }

// Tracker compares what members state with what the broker has of them. The zero value is ready, and safe for concurrent use.
type Tracker struct {
	mu      sync.Mutex
	members map[clusterset.ClusterID]*member
}

// member is what the broker has of one member.
type member struct {
	seen    Statement
	renewed time.Time // the latest renewal of its Lease
}

// Change changes what the broker has of a member.
func (t *Tracker) Change(id clusterset.ClusterID, by func(*Statement)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	by(&t.of(id).seen)
}

// of returns the entry of a member. t.mu is held.
func (t *Tracker) of(id clusterset.ClusterID) *member {
	m := t.members[id]
	if m == nil {
		if t.members == nil {
			t.members = map[clusterset.ClusterID]*member{}
		}
		m = &member{}
		t.members[id] = m
	}
	return m
}

// Confirms takes the statement of a Lease, "" for none, and reports whether it is what the broker has of the member. It counts only
// in a renewal that is later than another one which this Tracker has seen: a broker that was restored has the statements of its
// backup too.
func (t *Tracker) Confirms(id clusterset.ClusterID, statement string, renewed time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	m := t.of(id)
	fresh := !m.renewed.IsZero() && renewed.After(m.renewed)
	if renewed.After(m.renewed) {
		m.renewed = renewed
	}
	return fresh && statement == m.seen.String()
}
