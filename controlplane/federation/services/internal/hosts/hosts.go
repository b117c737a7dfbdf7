// Package hosts resolves the host names of load balancers. Callers register the names that Services use; Run reports each
// change of their addresses. A name is resolved again when its TTL ends; while no name server responds, its last addresses
// stay.
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
	"github.com/isthmus-net/isthmus/controlplane/clusterset/signal"
)

const (
	// shortest and longest limit a TTL: a TTL of 0 does not cause a busy loop, and one of a week does not delay a change of
	// the addresses, which moves traffic, for a week.
	shortest, longest = 5 * time.Second, 5 * time.Minute
	// retry is the pause after a query without a response.
	retry = 10 * time.Second
	// parallel limits the concurrent queries.
	parallel = 8
)

// Query returns the addresses of a host and their TTL. A result without addresses is valid. An error means that the addresses
// are unknown.
type Query func(ctx context.Context, host string) (addrs []netip.Addr, ttl time.Duration, err error)

// Hosts resolves host names. Make it with New. Safe for concurrent use.
type Hosts struct {
	query Query
	log   *slog.Logger
	wake  signal.Signal // pending while a name was never resolved

	mu    sync.Mutex
	known map[string]*host
}

// host is one name, guarded by the lock of Hosts.
type host struct {
	users  map[clusterset.ServiceName]bool
	known  bool         // a name server has responded
	addrs  []netip.Addr // sorted
	due    time.Time    // of the next query; zero is now
	failed bool         // the last query had no response
}

// New returns Hosts that resolve names with query.
func New(query Query, log *slog.Logger) *Hosts {
	return &Hosts{query: query, log: log, wake: signal.New(), known: map[string]*host{}}
}

// Use sets the names that a federated Service uses. Names without users are forgotten.
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
			h.wake.Notify()
		}
		known.users[service] = true
	}
}

// Lookup returns the sorted addresses of a name in use, and whether a name server has responded yet. A name without
// addresses is known.
func (h *Hosts) Lookup(name string) (addrs []netip.Addr, known bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if host := h.known[name]; host != nil {
		return slices.Clone(host.addrs), host.known
	}
	return nil, false
}

// Run resolves names until ctx ends, then returns nil. It calls changed for each Service that uses a name whose addresses
// became known or changed.
func (h *Hosts) Run(ctx context.Context, changed func(clusterset.ServiceName)) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-h.wake.C():
		case <-timer.C:
		}
		var group errgroup.Group
		group.SetLimit(parallel)
		for _, name := range h.due(time.Now()) {
			group.Go(func() error {
				for _, service := range h.ask(ctx, name) {
					changed(service)
				}
				return nil
			})
		}
		_ = group.Wait() // no error is returned
		timer.Stop()
		if next, ok := h.next(); ok {
			timer.Reset(time.Until(next))
		}
	}
}

// due returns the names to resolve now.
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

// next returns the time of the next query, and whether there is one.
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

// ask resolves a name. It returns the Services that use it if its addresses changed or became known.
func (h *Hosts) ask(ctx context.Context, name string) []clusterset.ServiceName {
	addrs, ttl, err := h.query(ctx, name)
	h.mu.Lock()
	defer h.mu.Unlock()
	known := h.known[name]
	if known == nil || ctx.Err() != nil {
		return nil // no Service uses the name any more
	}
	if err != nil {
		if !known.failed {
			h.log.Warn("the host name of a load balancer cannot be resolved; its last addresses stay in effect", "host", name, "err", err)
		}
		known.failed, known.due = true, time.Now().Add(retry)
		return nil
	}
	known.failed, known.due = false, time.Now().Add(min(max(ttl, shortest), longest))
	addrs = slices.Compact(slices.SortedFunc(slices.Values(addrs), netip.Addr.Compare))
	if known.known && slices.Equal(addrs, known.addrs) {
		return nil
	}
	known.known, known.addrs = true, addrs
	return slices.SortedFunc(maps.Keys(known.users), clusterset.ServiceName.Compare)
}
