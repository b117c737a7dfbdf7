// Package hosts knows the addresses of load balancers that have a host name only. In go the names that Services use,
// out come addresses and word of every change. Each is asked for again when its time to live is over; while nobody
// answers, what was answered last stays.
package hosts

import (
	"context"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

const (
	// shortest and longest bound a time to live: one of 0 is not asked for without pause, and one of a week is not
	// believed for a week, because the answer moves traffic.
	shortest, longest = 5 * time.Second, 5 * time.Minute
	// retry is when to ask again where nobody answered.
	retry = 10 * time.Second
	// atOnce is how many names are asked for at a time.
	atOnce = 8
)

// Query asks for the addresses of a host and for how long they are good. No address is an answer too: there is none.
// An error means that nothing was learned.
type Query func(ctx context.Context, host string) (addrs []netip.Addr, ttl time.Duration, err error)

// Hosts is made by New. Its methods may be called by several goroutines at a time.
type Hosts struct {
	query Query
	log   *slog.Logger
	wake  chan struct{} // holds a token while there is a name that was never asked for

	mu    sync.Mutex
	known map[string]*host
}

// host is one name. The lock of Hosts covers it.
type host struct {
	users map[clusterset.ServiceName]bool
	known bool         // somebody has answered
	addrs []netip.Addr // sorted
	due   time.Time    // when to ask; zero is now
	quiet bool         // nobody answered last time
}

// New returns Hosts that ask by query.
func New(query Query, log *slog.Logger) *Hosts {
	return &Hosts{query: query, log: log, wake: make(chan struct{}, 1), known: map[string]*host{}}
}

// Use says which names a federated Service uses now. Those that nobody uses any more are forgotten.
func (h *Hosts) Use(service clusterset.ServiceName, names []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for name, known := range h.known {
		if known.users[service] && !slices.Contains(names, name) {
			delete(known.users, service)
			if len(known.users) == 0 {
				delete(h.known, name)
			}
		}
	}
	for _, name := range names {
		known := h.known[name]
		if known == nil {
			known = &host{users: map[clusterset.ServiceName]bool{}}
			h.known[name] = known
			select {
			case h.wake <- struct{}{}:
			default: // there is a token already
			}
		}
		known.users[service] = true
	}
}

// Lookup returns the addresses of a name that is in use, sorted, and whether anybody has answered yet: before that,
// which may be for as long as no name server answers, nothing is known, and a name without addresses is another thing.
func (h *Hosts) Lookup(name string) (addrs []netip.Addr, known bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if host := h.known[name]; host != nil {
		return slices.Clone(host.addrs), host.known
	}
	return nil, false
}

// Run asks, and tells which Services use a name whose addresses became known or changed, until ctx ends; then it returns nil.
func (h *Hosts) Run(ctx context.Context, changed func(clusterset.ServiceName)) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-h.wake:
		case <-timer.C:
		}
		var group errgroup.Group
		group.SetLimit(atOnce)
		for _, name := range h.due(time.Now()) {
			group.Go(func() error {
				for _, service := range h.ask(ctx, name) {
					changed(service)
				}
				return nil
			})
		}
		_ = group.Wait() // they return none
		timer.Stop()
		if next, ok := h.next(); ok {
			timer.Reset(time.Until(next))
		}
	}
}

// due returns the names to ask for.
func (h *Hosts) due(now time.Time) []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	var names []string
	for name, known := range h.known {
		if !known.due.After(now) {
			names = append(names, name)
		}
	}
	return names
}

// next returns when something is due, and whether anything ever is.
func (h *Hosts) next() (time.Time, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	var next time.Time
	for _, known := range h.known {
		if next.IsZero() || known.due.Before(next) {
			next = known.due
		}
	}
	return next, len(h.known) > 0
}

// ask asks for a name, and returns the Services that use it if its addresses changed, or were not known before.
func (h *Hosts) ask(ctx context.Context, name string) []clusterset.ServiceName {
	addrs, ttl, err := h.query(ctx, name)
	h.mu.Lock()
	defer h.mu.Unlock()
	known := h.known[name]
	if known == nil || ctx.Err() != nil {
		return nil // nobody uses it any more
	}
	if err != nil {
		if !known.quiet {
			h.log.Warn("the host name of a load balancer is not resolved; its last addresses stay", "host", name, "err", err)
		}
		known.quiet, known.due = true, time.Now().Add(retry)
		return nil
	}
	known.quiet, known.due = false, time.Now().Add(min(max(ttl, shortest), longest))
	addrs = slices.Compact(slices.SortedFunc(slices.Values(addrs), netip.Addr.Compare))
	if known.known && slices.Equal(addrs, known.addrs) {
		return nil
	}
	known.known, known.addrs = true, addrs
	return slices.SortedFunc(maps.Keys(known.users), clusterset.ServiceName.Compare)
}
