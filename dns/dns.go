// Package dns answers for clusterset.local on a node: authoritative, from the same snapshot that drives
// the dataplane, over UDP and TCP on addresses of its own.
//
// What goes in is a [clusterset.Snapshot], whole, by [Server.Sync]; what comes out is answers. The zone
// built from a snapshot is immutable and swapped behind an atomic pointer, so a question sees one world
// or the next and never half of each.
//
// It fails open: when the API server is away nobody calls Sync, and the last zone is served without
// bound. Before the first Sync every name of the zone is SERVFAIL, because "no such name" would be a
// guess that resolvers remember.
package dns

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/dns/internal/server"
	"github.com/isthmus-net/isthmus/dns/internal/zone"
)

// DefaultPort is where resolvers look for a name server.
const DefaultPort = 53

// limits are what clients may use. Those of a node are some hundred.
var limits = server.Limits{Rate: 50_000, Connections: 8192, ConnectionsEach: 256}

// Config says where to answer. The zero value is not valid: there is no address that is right everywhere.
type Config struct {
	// Listen holds the addresses to answer on, over UDP and TCP each. They must stand on an interface of
	// this network namespace. No wildcard: an answer has to leave from the address that was asked, and
	// other name servers of the node listen on port 53 too. Port 0 lets the kernel choose one.
	Listen []netip.AddrPort
	// Log takes what an operator should see; nil discards it.
	Log *slog.Logger
}

// Validate returns all faults of c, joined, or nil.
func (c Config) Validate() error {
	var faults []error
	if len(c.Listen) == 0 {
		faults = append(faults, errors.New("dns: no address to listen on; give at least one, such as 169.254.20.53:53"))
	}
	seen := map[netip.AddrPort]bool{}
	for _, a := range c.Listen {
		switch {
		case !a.Addr().IsValid():
			faults = append(faults, fmt.Errorf("dns: listen address %q is not an IP address and port", a))
		case a.Addr().IsUnspecified():
			faults = append(faults, fmt.Errorf("dns: listen address %s is a wildcard; name the addresses to answer on", a))
		case a.Addr().IsMulticast():
			faults = append(faults, fmt.Errorf("dns: listen address %s is multicast; use an address of this node", a))
		case seen[a] && a.Port() != 0:
			faults = append(faults, fmt.Errorf("dns: listen address %s is given twice", a))
		}
		seen[a] = true
	}
	return errors.Join(faults...)
}

// Server answers questions. Make one with [New]. Its methods may be called from any goroutine.
type Server struct {
	log        *slog.Logger
	listeners  *server.Server
	zoneConfig zone.Config
	zone       atomic.Pointer[zone.Zone]

	mu       sync.Mutex // held by Sync; guards what follows
	builder  zone.Builder
	skipped  []zone.Problem
	syncedAt time.Time
}

// New opens all sockets of c, or none. An error names the address, the port and what to do about it.
// Questions are answered from the call of [Server.Run] on, which also closes the sockets.
func New(c Config) (*Server, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	log := c.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	s := &Server{log: log, zoneConfig: zone.Config{Nameservers: firstOfEachFamily(c.Listen), TTL: zone.DefaultTTL}}
	listeners, err := server.Listen(context.Background(), c.Listen, s.zone.Load, limits, log)
	if err != nil {
		return nil, fmt.Errorf("dns: %w", err)
	}
	s.listeners = listeners
	return s, nil
}

// firstOfEachFamily returns the addresses of ns.dns.clusterset.local: where a client of this node finds
// this server, most local first as the operator lists them.
func firstOfEachFamily(listen []netip.AddrPort) []netip.Addr {
	var addrs []netip.Addr
	seen := map[clusterset.Family]bool{}
	for _, l := range listen {
		f := clusterset.FamilyOf(l.Addr())
		if !seen[f] {
			seen[f] = true
			addrs = append(addrs, l.Addr())
		}
	}
	return addrs
}

// Run answers questions until ctx is done, then closes every socket and returns nil. It may be called
// once. A listener that breaks ends all of them and is the error.
func (s *Server) Run(ctx context.Context) error {
	s.log.Info("answer for "+zone.Origin, "listen", s.listeners.Addrs())
	if err := s.listeners.Serve(ctx); err != nil {
		return fmt.Errorf("dns: %w", err)
	}
	return nil
}

// Sync makes snap the world that questions are answered from. A snapshot with the same records as the last one
// changes nothing, not even the serial. It keeps snap, which must not change afterwards. The only error is that
// of ctx.
func (s *Server) Sync(ctx context.Context, snap *clusterset.Snapshot) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("dns: sync: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	// The serial is the wall clock's second, so that serials grow over restarts.
	z, changed := s.builder.Build(snap, s.zoneConfig, uint32(time.Now().Unix()))
	if !changed {
		return nil
	}
	s.zone.Store(z)
	s.syncedAt = time.Now()
	skipped := s.builder.Problems()
	for _, p := range skipped {
		if !slices.Contains(s.skipped, p) {
			s.log.Warn("leave a service out of DNS", "namespace", p.Service.Namespace, "service", p.Service.Name, "err", p.Reason)
		}
	}
	s.skipped = skipped
	s.log.Debug("serve a new zone", "serial", z.Serial(), "records", z.Len())
	return nil
}

// Status is what a person or a probe may want to know about the server.
type Status struct {
	Listen   []netip.AddrPort // as bound
	Synced   bool             // false: every name of the zone is SERVFAIL
	SyncedAt time.Time        // when the zone last changed
	Serial   uint32
	Records  int
	Skipped  []string // services that cannot be named in DNS, and why
}

// Status returns the state of the server now.
func (s *Server) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := Status{Listen: s.listeners.Addrs(), SyncedAt: s.syncedAt}
	if z := s.zone.Load(); z != nil {
		st.Synced, st.Serial, st.Records = true, z.Serial(), z.Len()
	}
	for _, p := range s.skipped {
		st.Skipped = append(st.Skipped, p.Service.String()+": "+p.Reason)
	}
	return st
}
