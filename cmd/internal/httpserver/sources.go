package httpserver

import (
	"net"
	"net/netip"
	"sync"
	"time"
)

// Budgets of one source: what it may use at once, and how much of that it gets back a second.
var (
	connectionBudget = budget{burst: 50, perSecond: 20}
	requestBudget    = budget{burst: 200, perSecond: 50}
	failureBudget    = budget{burst: 10, perSecond: 0.2}
)

// Bounds of the table of sources.
const (
	maxSources = 4096
	// forgetAfter is when an idle source has all of its budgets back.
	forgetAfter = time.Minute
	// knownFor is how long a source counts as known after a request with access.
	knownFor = 10 * time.Minute
)

// budget is the size of a token bucket.
type budget struct{ burst, perSecond float64 }

// bucket is a token bucket. The zero value is full.
type bucket struct {
	used float64
	at   time.Time
}

// take uses one unit, and reports whether there was one.
func (b *bucket) take(of budget, now time.Time) bool {
	b.used = max(0, b.used-of.perSecond*now.Sub(b.at).Seconds())
	b.at = now
	if b.used+1 > of.burst {
		return false
	}
	b.used++
	return true
}

// giveBack returns a unit that was taken.
func (b *bucket) giveBack() { b.used = max(0, b.used-1) }

// Source is an IPv4 address or an IPv6 network of 64 bits, from which connections come.
type Source struct {
	all *sources // guards what follows

	open                            int // connections
	connections, requests, failures bucket
	used, known                     time.Time
}

// TakeFailure uses a unit of the budget for failed reviews. It returns false if the source has used it up.
func (s *Source) TakeFailure() bool {
	s.all.mu.Lock()
	defer s.all.mu.Unlock()
	return s.failures.take(failureBudget, s.all.now())
}

// GiveBack returns the unit of TakeFailure: the review did not fail.
func (s *Source) GiveBack() {
	s.all.mu.Lock()
	defer s.all.mu.Unlock()
	s.failures.giveBack()
}

// IsKnown reports whether a recent request of the source had access.
func (s *Source) IsKnown() bool {
	s.all.mu.Lock()
	defer s.all.mu.Unlock()
	return s.known.After(s.all.now())
}

// SetKnown makes the source known for some minutes.
func (s *Source) SetKnown() {
	s.all.mu.Lock()
	defer s.all.mu.Unlock()
	s.known = s.all.now().Add(knownFor)
}

// takeRequest uses a unit of the budget for requests.
func (s *Source) takeRequest() bool {
	s.all.mu.Lock()
	defer s.all.mu.Unlock()
	now := s.all.now()
	s.used = now
	return s.requests.take(requestBudget, now)
}

// sources holds the budgets of all sources.
type sources struct {
	mu    sync.Mutex
	now   func() time.Time
	by    map[netip.Prefix]*Source
	rest  *Source // shared by the sources that the table has no room for
	swept time.Time
}

func newSources(now func() time.Time) *sources {
	s := &sources{now: now, by: map[netip.Prefix]*Source{}}
	s.rest = &Source{all: s}
	return s
}

// of returns the source of an address. The caller holds mu.
func (s *sources) of(remote net.Addr) *Source {
	key := keyOf(remote)
	if known, ok := s.by[key]; ok {
		return known
	}
	now := s.now()
	if len(s.by) >= maxSources && now.Sub(s.swept) > time.Second {
		s.swept = now
		for k, v := range s.by {
			if v.open == 0 && now.Sub(v.used) > forgetAfter && !v.known.After(now) {
				delete(s.by, k)
			}
		}
	}
	if len(s.by) >= maxSources {
		return s.rest
	}
	added := &Source{all: s, used: now}
	s.by[key] = added
	return added
}

// keyOf returns what counts as one source. A host has all addresses of its IPv6 network of 64 bits.
func keyOf(remote net.Addr) netip.Prefix {
	at, err := netip.ParseAddrPort(remote.String())
	if err != nil {
		return netip.Prefix{}
	}
	addr, bits := at.Addr().Unmap().WithZone(""), 32
	if addr.Is6() {
		bits = 64
	}
	key, _ := addr.Prefix(bits) // the length is valid
	return key
}
