package flows

import (
	"maps"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

// CountKey is a Service, as namespace/name, and a protocol.
type CountKey struct{ Service, Protocol string }

// Refusal is a Service and a reason for which packets were refused or dropped.
type Refusal struct {
	// Service is namespace/name, "" if the packet had none, it was removed, or the balancer does not know.
	Service string
	// Reason is the name of a bpf.DropReason.
	Reason string
}

// Counts are the flows of a Service at one gateway, and their traffic since the process began to count.
type Counts struct {
	Opened uint64 // flows since then
	Active int
	Traffic
}

// Traffic is what was forwarded of flows.
type Traffic struct{ ToBackends, ToClients Sum }

// Sum is a number of packets, and the bytes of those IP packets.
type Sum struct{ Packets, Bytes uint64 }

// Plus returns both together.
func (t Traffic) Plus(more Traffic) Traffic {
	return Traffic{t.ToBackends.plus(more.ToBackends), t.ToClients.plus(more.ToClients)}
}

func (s Sum) plus(more Sum) Sum { return Sum{s.Packets + more.Packets, s.Bytes + more.Bytes} }

// Since returns what t has more than an earlier count of the same flows. If that is not the same, as t has less, it returns t.
func (t Traffic) Since(earlier Traffic) Traffic {
	return Traffic{t.ToBackends.since(earlier.ToBackends), t.ToClients.since(earlier.ToClients)}
}

func (s Sum) since(earlier Sum) Sum {
	if s.Packets < earlier.Packets || s.Bytes < earlier.Bytes {
		return s
	}
	return Sum{s.Packets - earlier.Packets, s.Bytes - earlier.Bytes}
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

	mu      sync.Mutex
	opened  map[CountKey]uint64  // guarded by mu, as is traffic
	traffic map[CountKey]Traffic // of all flows, also of those that have ended

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

// Forward counts traffic.
func (t *Tally) Forward(k CountKey, more Traffic) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.traffic == nil {
		t.traffic = map[CountKey]Traffic{}
	}
	t.traffic[k] = t.traffic[k].Plus(more)
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
			all[k] = Counts{t.opened[k], t.active[k], t.traffic[k]}
		}
	}
	maps.DeleteFunc(t.opened, func(k CountKey, _ uint64) bool { _, ok := all[k]; return !ok })
	maps.DeleteFunc(t.traffic, func(k CountKey, _ Traffic) bool { _, ok := all[k]; return !ok })
	return all, nil
}
