package flows

import (
	"maps"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

// CountKey is a Service, as namespace/name, and a protocol.
type CountKey struct{ Service, Protocol string }

// Counts are the flows of a Service at one gateway.
type Counts struct {
	Opened uint64 // since the process began to count
	Active int
}

const (
	// countInterval is the least time between two counts of the active flows, and countShare the share of a CPU that they may
	// take: counting a full table of 131,072 flows, with 4 entries each, takes 2 s, so it then happens every 200 s.
	countInterval = 10 * time.Second
	countShare    = 100
)

// Tally counts the flows of Services, for metrics. The zero value has counted nothing. Any goroutine may use it.
type Tally struct {
	// Now is the clock; nil: time.Now.
	Now func() time.Time

	mu     sync.Mutex
	opened map[CountKey]uint64 // guarded by mu

	counting sync.Mutex // guards the rest; Open does not wait for it
	active   map[CountKey]int
	next     time.Time // when active is counted again
}

// Open counts a flow that has opened.
func (t *Tally) Open(k CountKey) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.opened == nil {
		t.opened = map[CountKey]uint64{}
	}
	t.opened[k]++
}

// Counts returns the counts of all Services of VIPs, and forgets those of others. List passes on every active flow; the last
// counts of them stay for ten seconds, or as long as listing must pause.
func (t *Tally) Counts(vips []*desired.VIP, list func(each func(CountKey)) error) (map[CountKey]Counts, error) {
	t.counting.Lock()
	defer t.counting.Unlock()
	now := time.Now
	if t.Now != nil {
		now = t.Now
	}
	if began := now(); !began.Before(t.next) {
		active := map[CountKey]int{}
		if err := list(func(k CountKey) { active[k]++ }); err != nil {
			return nil, err
		}
		ended := now()
		t.active, t.next = active, ended.Add(max(countInterval, countShare*ended.Sub(began)))
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	all := map[CountKey]Counts{}
	for _, v := range vips {
		for i := range v.Frontends {
			k := CountKey{v.Frontends[i].Service, v.Frontends[i].Protocol}
			all[k] = Counts{t.opened[k], t.active[k]}
		}
	}
	maps.DeleteFunc(t.opened, func(k CountKey, _ uint64) bool { _, ok := all[k]; return !ok })
	return all, nil
}
