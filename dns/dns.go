// Package dns is the authoritative name server for clusterset.local on a node. It answers over UDP and TCP, on addresses of
// its own, from the same snapshot that drives the dataplane.
//
// Its input is a whole [clusterset.Snapshot], passed to [Server.Sync]. The zone built from a snapshot is immutable and is
// swapped through an atomic pointer, so each answer comes from one snapshot, never from a mix of two.
//
// It fails open: while the API server is unreachable, the last zone is served without a time limit. After a restart it is
// read from a file. Without a file, every name in the zone is SERVFAIL until the first Sync, because resolvers would cache
// an NXDOMAIN that is only a guess.
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
	"github.com/isthmus-net/isthmus/controlplane/clusterset/signal"
	"github.com/isthmus-net/isthmus/dns/internal/server"
	"github.com/isthmus-net/isthmus/dns/internal/zone"
)

// DefaultPort is the port of DNS.
const DefaultPort = 53

// DefaultTTL is the default TTL of answers, in seconds.
const DefaultTTL = zone.DefaultTTL

// Config configures a Server. The zero value is not valid: it has no address to listen on.
type Config struct {
	// Listen holds the addresses to answer on, over both UDP and TCP. An interface in this network namespace must have
	// them. Wildcards are not allowed: an answer must leave from the address that was asked, and other name servers of the
	// node listen on port 53 too. Port 0 lets the kernel choose a port.
	Listen []netip.AddrPort
	// Guarded holds those addresses of Listen that answer only the clients of [Server.SetClients], such as the node's own
	// addresses, which every host on the network can reach. Other clients get few REFUSED answers, and beyond these none.
	Guarded []netip.AddrPort
	// Outside, if not nil, reports whether a client is on another machine. Such clients get no answers at the other addresses of Listen
	// either, unless SetClients has them or not all pods. It is called at most 1,000 times a second, from several goroutines, one at a time.
	Outside func(netip.Addr) bool
	// TTL is the TTL of positive and negative answers in seconds, 0 to 3600.
	TTL uint32
	// Names are the names that the specification does not ask for. SetNames changes them.
	Names
	// Reverse holds ranges of ClusterSetIPs whose addresses get PTR records.
	Reverse []netip.Prefix
	// File is the path of a file that keeps the zone over restarts, so that it is served before the first Sync. Empty means
	// no file.
	File string
	// Limits bounds the resources that clients may use.
	Limits Limits
	// ExternalClients holds addresses for clients outside of the cluster, such as virtual machines.
	ExternalClients ExternalClients
	// Kernel, if not nil, receives the addresses that it may answer by itself. It must be empty, and the caller closes it.
	Kernel Kernel
	// Sample logs every Sample-th question of each CPU and connection; 0 logs none.
	Sample uint64
	// Log may be nil, to log nothing.
	Log *slog.Logger
}

// Names are names as Lighthouse has them and the specification does not.
type Names struct {
	// EmptyHeadless keeps the name of a headless Service while no endpoint is ready: answers are then NODATA, as with
	// Lighthouse, instead of NXDOMAIN, as the specification asks.
	EmptyHeadless bool
	// ClusterScoped adds <cluster>.<service>.<namespace> and its ports, and port names without underscores, as Lighthouse
	// has them. The specification forbids the former.
	ClusterScoped bool
}

// Kernel answers simple questions for addresses where clients' packets enter the node, before they reach any resolver.
type Kernel interface {
	// Update takes the names of a new zone that were added, changed or removed, in lower case and wire format. Each comes
	// with its only IPv4 and its only IPv6 address. The kernel must forget names for which both are invalid: they were
	// removed, or have several addresses. soa is the zone's SOA without its owner; ttl, in seconds, is that of addresses.
	Update(ttl uint32, soa string, changes iter.Seq2[string, [2]netip.Addr]) error
}

// ExternalClients holds addresses besides those of Config.Listen, and the source ranges of the clients that may use them;
// other clients are refused there. The node need not have the addresses yet: whichever node has one answers on it.
type ExternalClients = server.ExternalClients

// Limits bounds the resources that clients may use. Zero means no limit.
type Limits = server.Limits

// Budget is a limit for all clients together and one for each of them. Zero means no limit.
type Budget = server.Budget

// DefaultLimits are generous for any workload that fits on one node, and low for clients that are refused.
var DefaultLimits = Limits{
	Rate: 50_000, Amplified: 1000, Refusals: Budget{All: 200, Each: 20},
	Pods: Budget{All: 8192, Each: 256}, Neighbours: Budget{All: 1024, Each: 256}, Strangers: Budget{All: 64, Each: 4},
	Unread: Budget{All: 256, Each: 16},
}

// maxTTL is one hour, in seconds. Clients should not use the address of a removed Service for longer.
const maxTTL = 3600

// Validate returns all errors in c, joined, or nil.
func (c Config) Validate() error {
	var faults []error
	if len(c.Listen) == 0 {
		faults = append(faults, errors.New("dns: no address to listen on; give at least one, such as 169.254.20.53:53"))
	}
	seen := map[netip.AddrPort]bool{}
	for _, a := range slices.Concat(c.Listen, c.ExternalClients.Listen) {
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
	for _, a := range c.Guarded {
		if !slices.Contains(c.Listen, a) {
			faults = append(faults, fmt.Errorf("dns: guarded address %s is not a listen address; add it to those or leave it out", a))
		}
	}
	if len(c.ExternalClients.Listen) > 0 && len(c.ExternalClients.Allow) == 0 {
		faults = append(faults, fmt.Errorf("dns: no client may use the address %s for external clients; give the ranges of those that may", c.ExternalClients.Listen[0]))
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

// Server is a name server, made by [New]. Its methods may be called from any goroutine.
type Server struct {
	log        *slog.Logger
	listeners  *server.Server
	zoneConfig zone.Config
	zone       atomic.Pointer[zone.Zone]
	file       zoneFile
	kernel     Kernel // may be nil

	mu       sync.Mutex // guards the fields below
	builder  zone.Builder
	last     *clusterset.Snapshot
	skipped  []zone.Problem
	syncedAt time.Time
	stale    bool // the zone was read from the file; there was no Sync yet
	updates  Updates
}

// New opens all sockets of c, or none. An error names the address, the port and the fix. [Server.Run] answers questions and
// closes the sockets.
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
	}, file: zoneFile{path: c.File, log: log, due: signal.New()}, kernel: c.Kernel}
	listeners, err := server.Listen(context.Background(), c.Listen, server.Config{
		Zone: s.zone.Load, Limits: c.Limits, Guarded: c.Guarded, Outside: c.Outside, ExternalClients: c.ExternalClients, Sample: c.Sample, Log: log,
	})
	if err != nil {
		return nil, fmt.Errorf("dns: %w", err)
	}
	s.listeners = listeners
	if z, made := s.file.load(); z != nil {
		s.zone.Store(z)
		s.syncedAt, s.stale = made, true
	}
	return s, nil
}

// firstOfEachFamily returns the addresses of ns.dns.clusterset.local. Operators list the most local address first, which
// every client of this node can reach.
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

// Run answers questions until ctx is done, then closes every socket and returns nil. If a socket fails before, Run ends and
// returns its error. It may be called only once.
func (s *Server) Run(ctx context.Context) error {
	s.log.Info("answering for "+zone.Origin, "listen", s.listeners.Addrs())
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return s.listeners.Serve(ctx) })
	group.Go(func() error { return s.file.run(ctx, s.unsaved) })
	if err := group.Wait(); err != nil {
		return fmt.Errorf("dns: %w", err)
	}
	return nil
}

// unsaved returns the zone and the time of its last change, or nil if the zone is still the one read from the file.
func (s *Server) unsaved() (*zone.Zone, time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stale {
		return nil, time.Time{}
	}
	return s.zone.Load(), s.syncedAt
}

// Sync makes the server answer from snap. If snap has the same records as the last snapshot, nothing changes, not even the
// serial. Sync keeps snap, which must not change afterwards. It fails only if ctx is done.
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

// SetTopology sets the member that this node belongs to, and the drained members. Names that stand for several clusters
// prefer the local one and leave out drained ones. A call with the same values has no effect.
func (s *Server) SetTopology(local clusterset.ClusterID, drained map[clusterset.ClusterID]bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.zoneConfig.Local, s.zoneConfig.Drained = local, maps.Clone(drained)
	if s.last != nil {
		s.build()
	}
}

// SetNames sets the names that the specification does not ask for. A call with the same values has no effect.
func (s *Server) SetNames(n Names) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.zoneConfig.EmptyHeadless, s.zoneConfig.ClusterScoped = n.EmptyHeadless, n.ClusterScoped
	if s.last != nil {
		s.build()
	}
}

// SetClients sets the clients that guarded addresses answer. Before the first call they answer none. At the other addresses of
// Listen every client gets answers, unless pods says that all pods are among these clients and it is outside (Config.Outside). After
// the first call only these clients use the TCP connections of pods there.
func (s *Server) SetClients(allowed []netip.Prefix, pods bool) { s.listeners.SetClients(allowed, pods) }

// build makes a zone of the last snapshot and serves it. The caller holds mu.
func (s *Server) build() {
	begin := time.Now()
	// The serial is the time in seconds, so that it also grows over restarts.
	z, changed := s.builder.Build(s.last, s.zoneConfig, uint32(time.Now().Unix()))
	if !changed {
		return
	}
	s.zone.Store(z)
	s.syncedAt, s.stale = time.Now(), false
	s.updates.observe(s.syncedAt.Sub(begin))
	s.file.changed()
	addresses := s.builder.TakeAddresses()
	if s.kernel != nil {
		if err := s.kernel.Update(s.zoneConfig.TTL, z.SOA(), addresses); err != nil {
			s.log.Error("cannot pass the new zone to the kernel, which may still answer from an older one", "err", err)
		}
	}
	skipped := s.builder.Problems()
	for _, p := range skipped {
		if !slices.Contains(s.skipped, p) {
			s.log.Warn("service has no DNS name, or not all of its names", "namespace", p.Service.Namespace, "service", p.Service.Name, "err", p.Reason)
		}
	}
	s.skipped = skipped
	s.log.Debug("serving a new zone", "serial", z.Serial(), "records", z.Len())
}

// Name returns the DNS name of a Service in the ClusterSet, with the trailing dot.
func Name(s clusterset.ServiceName) string { return zone.NameOf(s) }

// Record is one record in presentation format.
type Record = zone.Record

// Records returns the records at a name and below, or all if name is empty. They are sorted by name from the rightmost
// label, then by type.
func (s *Server) Records(name string) []Record {
	z := s.zone.Load()
	if z == nil {
		return nil
	}
	return slices.DeleteFunc(z.Records(name), func(r Record) bool { return r.Type == 0 }) // names without records
}

// Counts holds the counters of a server.
type Counts = server.Counts

// Count counts messages with the same path, type and outcome.
type Count = server.Count

// ACLRefusal is how a question of a client that is not allowed was refused.
type ACLRefusal = server.ACLRefusal

// ACLRefusals are all of them, and ConnReasons all reasons for which the server closes a TCP connection.
var (
	ACLRefusals = server.ACLRefusals[:]
	ConnReasons = server.ConnReasons[:]
)

// Status is the state of a server.
type Status struct {
	Listen   []netip.AddrPort // as bound
	Synced   bool             // there is a zone; while there is none, every name in it is SERVFAIL
	SyncedAt time.Time        // when the zone last changed
	Serial   uint32
	Records  int
	Names    int
	Updates  Updates
	Stale    bool     // the zone was saved by an earlier process; SyncedAt is its time
	FileErr  error    // of the last read or write of the zone file
	Counts   Counts   // of messages
	Skipped  []string // Services without a DNS name, or without all of theirs, and why
}

// Status returns the state of the server now.
func (s *Server) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := Status{Listen: s.listeners.Addrs(), SyncedAt: s.syncedAt, Stale: s.stale, FileErr: s.file.failed(), Updates: s.updates, Counts: s.listeners.Counts()}
	if z := s.zone.Load(); z != nil {
		st.Synced, st.Serial, st.Records, st.Names = true, z.Serial(), z.Len(), z.Names()
	}
	for _, p := range s.skipped {
		st.Skipped = append(st.Skipped, p.Service.String()+": "+p.Reason)
	}
	return st
}
