// Package dns answers for clusterset.local on a node: authoritative, from the same snapshot that drives
// the dataplane, over UDP and TCP on addresses of its own.
//
// What goes in is a [clusterset.Snapshot], whole, by [Server.Sync]; what comes out is answers. The zone
// built from a snapshot is immutable and swapped behind an atomic pointer, so a question sees one world
// or the next and never half of each.
//
// It fails open: when the API server is away nobody calls Sync, and the last zone is served without
// bound, after a restart too, from a file. Where there is none, every name of the zone is SERVFAIL before the first
// Sync, because "no such name" would be a guess that resolvers remember.
package dns

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/dns/internal/server"
	"github.com/isthmus-net/isthmus/dns/internal/zone"
)

// DefaultPort is where resolvers look for a name server.
const DefaultPort = 53

// DefaultTTL is the TTL of answers, unless a Config says otherwise, in seconds.
const DefaultTTL = zone.DefaultTTL

// Config says where to answer, and what. The zero value is not valid: there is no address that is right everywhere.
type Config struct {
	// Listen holds the addresses to answer on, over UDP and TCP each. They must stand on an interface of
	// this network namespace. No wildcard: an answer has to leave from the address that was asked, and
	// other name servers of the node listen on port 53 too. Port 0 lets the kernel choose one.
	Listen []netip.AddrPort
	// TTL is that of answers, positive and negative, in seconds, 0 to 3600.
	TTL uint32
	// EmptyHeadless lets the name of a headless Service exist also while no endpoint is ready: then what is asked
	// there has no data, as with Lighthouse. The specification asks for no such name.
	EmptyHeadless bool
	// ClusterScoped adds names that say which cluster, <cluster>.<service>.<namespace> and its ports, and ports without
	// underscores, as with Lighthouse. The specification forbids the former.
	ClusterScoped bool
	// Reverse are ranges of ClusterSetIPs whose addresses are to have names (PTR).
	Reverse []netip.Prefix
	// File, if not empty, keeps the zone over restarts: it is served before the first Sync.
	File string
	// Limits are what clients may use.
	Limits Limits
	// Guests are addresses for clients that are no pod and no node, such as virtual machines.
	Guests Guests
	// Kernel, if not nil, is told what it may answer by itself. It must know nothing yet, and is the caller's.
	Kernel Kernel
	// Sample logs one of so many questions, of each CPU and connection; 0 none.
	Sample uint64
	// Log takes what an operator should see; nil discards it.
	Log *slog.Logger
}

// Kernel answers plain questions for addresses where clients' packets enter the node, before they reach any resolver.
type Kernel interface {
	// Update is told the names of a new zone that are new or changed, in lower case and on the wire, each with the one
	// IPv4 and the one IPv6 address that it has. Names with neither are gone, or not for the kernel. soa is the zone's
	// SOA without its owner, and ttl, in seconds, that of addresses.
	Update(ttl uint32, soa string, changes iter.Seq2[string, [2]netip.Addr]) error
}

// Guests are addresses beside those of a Config's Listen that only clients in Allow may ask; others are refused. The
// node need not have them yet: whichever node has one answers there.
type Guests = server.Guests

// Limits are what clients may use. Zero is no limit.
type Limits = server.Limits

// DefaultLimits are generous to all that a node has room for.
var DefaultLimits = Limits{Rate: 50_000, Connections: 8192, ConnectionsEach: 256}

// maxTTL is an hour: nobody should believe for longer in what may have gone.
const maxTTL = 3600

// Validate returns all faults of c, joined, or nil.
func (c Config) Validate() error {
	var faults []error
	if len(c.Listen) == 0 {
		faults = append(faults, errors.New("dns: no address to listen on; give at least one, such as 169.254.20.53:53"))
	}
	seen := map[netip.AddrPort]bool{}
	for _, a := range slices.Concat(c.Listen, c.Guests.Listen) {
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
	if len(c.Guests.Listen) > 0 && len(c.Guests.Allow) == 0 {
		faults = append(faults, fmt.Errorf("dns: nobody may ask at the guests' address %s; name the ranges of those who may", c.Guests.Listen[0]))
	}
	if c.TTL > maxTTL {
		faults = append(faults, fmt.Errorf("dns: a TTL of %d s is too long; use 0 to %d", c.TTL, maxTTL))
	}
	for _, p := range c.Reverse {
		if !p.IsValid() || p != p.Masked() {
			faults = append(faults, fmt.Errorf("dns: reverse range %s is not a prefix of a network", p))
		}
	}
	return errors.Join(faults...)
}

// Server answers questions. Make one with [New]. Its methods may be called from any goroutine.
type Server struct {
	log        *slog.Logger
	listeners  *server.Server
	zoneConfig zone.Config
	zone       atomic.Pointer[zone.Zone]
	keeper     keeper
	kernel     Kernel // or nil

	mu       sync.Mutex // held by Sync; guards what follows
	builder  zone.Builder
	last     *clusterset.Snapshot
	skipped  []zone.Problem
	syncedAt time.Time
	old      bool // the zone is of the file, of another life
	updates  Updates
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
	s := &Server{log: log, zoneConfig: zone.Config{
		Nameservers: firstOfEachFamily(c.Listen), TTL: c.TTL, EmptyHeadless: c.EmptyHeadless, ClusterScoped: c.ClusterScoped, Reverse: c.Reverse,
	}, keeper: keeper{path: c.File, log: log, due: make(chan struct{}, 1)}, kernel: c.Kernel}
	listeners, err := server.Listen(context.Background(), c.Listen, server.Config{Zone: s.zone.Load, Limits: c.Limits, Guests: c.Guests, Sample: c.Sample, Log: log})
	if err != nil {
		return nil, fmt.Errorf("dns: %w", err)
	}
	s.listeners = listeners
	if z, made := s.keeper.load(); z != nil {
		s.zone.Store(z)
		s.syncedAt, s.old = made, true
	}
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
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return s.listeners.Serve(ctx) })
	group.Go(func() error { return s.keeper.run(ctx, s.known) })
	if err := group.Wait(); err != nil {
		return fmt.Errorf("dns: %w", err)
	}
	return nil
}

// known returns the zone and since when it is so, nil before there is one of this life.
func (s *Server) known() (*zone.Zone, time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.old {
		return nil, time.Time{}
	}
	return s.zone.Load(), s.syncedAt
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
	s.last = snap
	s.build()
	return nil
}

// Settle says which member this one is and which members do not live, so that names which stand for several clusters
// lead to the nearest that does. The same again costs nothing.
func (s *Server) Settle(local clusterset.ClusterID, drained map[clusterset.ClusterID]bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.zoneConfig.Local, s.zoneConfig.Drained = local, maps.Clone(drained)
	if s.last != nil {
		s.build()
	}
}

// build makes the zone of the last snapshot the one that is served. The caller holds mu.
func (s *Server) build() {
	begin := time.Now()
	// The serial is the wall clock's second, so that serials grow over restarts.
	z, changed := s.builder.Build(s.last, s.zoneConfig, uint32(time.Now().Unix()))
	if !changed {
		return
	}
	s.zone.Store(z)
	s.syncedAt, s.old = time.Now(), false
	s.updates.observe(s.syncedAt.Sub(begin))
	s.keeper.changed()
	addresses := s.builder.TakeAddresses()
	if s.kernel != nil {
		if err := s.kernel.Update(s.zoneConfig.TTL, z.SOA(), addresses); err != nil {
			s.log.Error("tell the kernel of a new zone; it may answer from one before", "err", err)
		}
	}
	skipped := s.builder.Problems()
	for _, p := range skipped {
		if !slices.Contains(s.skipped, p) {
			s.log.Warn("leave a service out of DNS", "namespace", p.Service.Namespace, "service", p.Service.Name, "err", p.Reason)
		}
	}
	s.skipped = skipped
	s.log.Debug("serve a new zone", "serial", z.Serial(), "records", z.Len())
}

// Name returns the name of a Service in the ClusterSet, with the dot at its end.
func Name(s clusterset.ServiceName) string { return zone.NameOf(s) }

// Record is one record, as people look at it.
type Record = zone.Record

// Records returns the records at and below a name, or all when it is empty, sorted by name from the right, then by
// type.
func (s *Server) Records(name string) []Record {
	z := s.zone.Load()
	if z == nil {
		return nil
	}
	return slices.DeleteFunc(z.Records(name), func(r Record) bool { return r.Type == 0 }) // names alone
}

// Counts are what a server has counted.
type Counts = server.Counts

// Count is how many answers there were of one kind.
type Count = server.Count

// Status is what a person or a probe may want to know about the server.
type Status struct {
	Listen   []netip.AddrPort // as bound
	Synced   bool             // false: every name of the zone is SERVFAIL
	SyncedAt time.Time        // when the zone last changed
	Serial   uint32
	Records  int
	Names    int
	Updates  Updates
	Old      bool     // what is served was known before this process began; SyncedAt says when
	FileErr  error    // why the zone cannot be kept over a restart, if it cannot
	Counts   Counts   // of messages
	Skipped  []string // services that cannot be named in DNS, and why
}

// Status returns the state of the server now.
func (s *Server) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := Status{Listen: s.listeners.Addrs(), SyncedAt: s.syncedAt, Old: s.old, FileErr: s.keeper.failed(), Updates: s.updates, Counts: s.listeners.Counts()}
	if z := s.zone.Load(); z != nil {
		st.Synced, st.Serial, st.Records, st.Names = true, z.Serial(), z.Len(), z.Names()
	}
	for _, p := range s.skipped {
		st.Skipped = append(st.Skipped, p.Service.String()+": "+p.Reason)
	}
	return st
}
