package main

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

	"golang.org/x/sync/errgroup"

	"github.com/isthmus-net/isthmus/agent/evidence"
	"github.com/isthmus-net/isthmus/bpf/datapath/names"
	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/clusterset/signal"
	"github.com/isthmus-net/isthmus/dns"
	"github.com/isthmus-net/isthmus/dns/device"
)

// errNotListening is the error of Sync while the name server has no sockets.
var errNotListening = errors.New("the name server does not listen yet")

// nameserver keeps a DNS server running beside the dataplane. If it cannot open its sockets, for example because another
// program uses the port, it retries without end and without effect on the dataplane. It is a view.Sink.
type nameserver struct {
	cfg dns.Config // without Log
	// neighbours are the optional addresses of cfg.Listen: other nodes' agents can answer instead.
	neighbours []netip.AddrPort
	fast       names.Config // without Resolvers, the kernel answers nothing
	// always holds the clients that get answers at the node's addresses before the cluster's are known.
	always []netip.Prefix
	log    *slog.Logger
	// retry is the time between two attempts to listen.
	retry time.Duration
	// silent is the latest set of members that do not answer; signaled is pending until Run has taken it.
	silent   atomic.Pointer[map[clusterset.ClusterID]bool]
	signaled signal.Signal

	mu      sync.Mutex // guards the fields below
	server  *dns.Server
	last    *clusterset.Snapshot
	names   dns.Names
	local   clusterset.ClusterID
	drained map[clusterset.ClusterID]bool
	clients dnsClients
	kernel  *names.Responder // nil while the kernel answers nothing
	iface   string
	missing []string // optional capabilities that the node lacks
	err     error
}

func newNameserver(cfg dns.Config, neighbours []netip.AddrPort, log *slog.Logger) *nameserver {
	cfg.Outside = device.IsOutside
	return &nameserver{cfg: cfg, names: cfg.Names, neighbours: neighbours, log: log, retry: 5 * time.Second, signaled: signal.New()}
}

// Run listens and answers until ctx is done.
func (n *nameserver) Run(ctx context.Context) {
	var serving sync.WaitGroup
	defer serving.Wait()
	serving.Go(func() { n.keepServing(ctx) })
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.signaled.C():
			n.updateTopology(func() { n.drained = *n.silent.Load() })
		}
	}
}

// keepServing calls serve until ctx is done.
func (n *nameserver) keepServing(ctx context.Context) {
	for {
		err := n.serve(ctx)
		if ctx.Err() != nil {
			return // the end of serve was asked for
		}
		n.mu.Lock()
		fresh := n.err == nil || err == nil || n.err.Error() != err.Error()
		n.err = err
		n.mu.Unlock()
		if fresh {
			n.log.Error("cannot serve DNS; will retry", "err", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(n.retry):
		}
	}
}

// serve opens the sockets and answers until ctx is done or a socket fails.
func (n *nameserver) serve(ctx context.Context) error {
	kernel, missing := n.newKernel()
	server, err := n.open(ctx, kernel, missing)
	if err != nil {
		return errors.Join(err, kernel.Close())
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return server.Run(ctx) })
	group.Go(func() error { return kernel.Follow(ctx) })
	err = group.Wait()
	n.mu.Lock()
	defer n.mu.Unlock()
	n.server, n.kernel = nil, nil
	return errors.Join(err, kernel.Close())
}

// newKernel returns the responder through which the kernel answers, or nil if it is not configured or the node does not
// support it. A responder belongs to one server and is closed with it.
func (n *nameserver) newKernel() (kernel *names.Responder, missing []string) {
	if len(n.fast.Resolvers) == 0 {
		return nil, nil
	}
	kernel, err := names.New(n.fast, n.log)
	if err != nil {
		return nil, []string{"DNS answers from the kernel: " + oneLine(err)}
	}
	return kernel, nil
}

// open assigns the node-local addresses, opens all sockets and passes the last snapshot to the server. missing holds the
// capabilities that the node is already known to lack.
func (n *nameserver) open(ctx context.Context, kernel *names.Responder, missing []string) (*dns.Server, error) {
	listen, iface, atAssign, err := n.assign()
	if err != nil {
		return nil, err
	}
	server, atListen, err := n.listen(listen, kernel)
	if err != nil {
		return nil, err
	}
	missing = append(append(missing, atAssign...), atListen...)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.server, n.kernel, n.iface, n.missing, n.err = server, kernel, iface, missing, nil
	server.SetTopology(n.local, n.drained)
	server.SetNames(n.names)
	n.passClients()
	if n.last != nil {
		n.err = server.Sync(ctx, n.last)
	}
	return server, nil
}

// listen opens a server on addrs and on the addresses for external clients. If that fails, it tries without the external
// ones, then without those of neighbours, then without both, and returns what is missing.
func (n *nameserver) listen(addrs []netip.AddrPort, kernel *names.Responder) (server *dns.Server, missing []string, err error) {
	cfg := n.cfg
	setListen := func(addrs []netip.AddrPort) {
		cfg.Listen = addrs
		cfg.Guarded = slices.DeleteFunc(slices.Clone(n.cfg.Guarded), func(a netip.AddrPort) bool { return !slices.Contains(addrs, a) })
	}
	setListen(addrs)
	cfg.Log = n.log
	if kernel != nil {
		cfg.Kernel = kernel
	}
	if server, err = dns.New(cfg); err == nil {
		return server, nil, nil
	}
	local, none := slices.DeleteFunc(slices.Clone(addrs), func(a netip.AddrPort) bool { return slices.Contains(n.neighbours, a) }), dns.ExternalClients{}
	type attempt struct {
		listen   []netip.AddrPort
		external dns.ExternalClients
		missing  []string // the missing capability, and the fix
	}
	forExternal := fmt.Sprintf("DNS for clients outside of the cluster: %s, or another address with --dns-external-listen", oneLine(err))
	forNeighbours := fmt.Sprintf("DNS for other nodes while their agents are down: %s, or another port with --dns-neighbour-port", oneLine(err))
	for _, a := range []attempt{{addrs, none, []string{forExternal}}, {local, n.cfg.ExternalClients, []string{forNeighbours}}, {local, none, []string{forExternal, forNeighbours}}} {
		if len(a.listen) == 0 || len(a.listen) == len(addrs) && len(a.external.Listen) == len(n.cfg.ExternalClients.Listen) {
			continue // nothing is left, or nothing was left out
		}
		setListen(a.listen)
		cfg.ExternalClients = a.external
		if server, retryErr := dns.New(cfg); retryErr == nil {
			n.log.Warn("DNS is not served on all addresses", "err", err)
			return server, a.missing, nil
		}
	}
	return nil, nil, err
}

// assign assigns the node-local addresses to an interface. On a node without IPv6 it leaves out the IPv6 ones.
func (n *nameserver) assign() (listen []netip.AddrPort, iface string, missing []string, err error) {
	var own []netip.Addr
	for _, l := range n.cfg.Listen {
		if device.Owns(l.Addr()) {
			own = append(own, l.Addr())
		}
	}
	if len(own) == 0 {
		return n.cfg.Listen, "", nil, nil
	}
	iface, assigned, err := device.Ensure(own)
	if err != nil {
		return nil, "", nil, err
	}
	if err := device.Untrack(assigned); err != nil {
		missing = []string{"DNS without connection tracking: " + err.Error()}
	}
	for _, l := range n.cfg.Listen {
		if device.Owns(l.Addr()) && !slices.Contains(assigned, l.Addr()) {
			missing = []string{"DNS over IPv6: IPv6 is disabled on this node"}
			continue
		}
		listen = append(listen, l)
	}
	return listen, iface, missing, nil
}

// SetLocal sets the member that the node belongs to.
func (n *nameserver) SetLocal(local clusterset.ClusterID) {
	n.updateTopology(func() { n.local = local })
}

// SetNames sets the names that the specification does not ask for, now or when the server has opened its sockets.
func (n *nameserver) SetNames(names dns.Names) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.names = names
	if n.server != nil {
		n.server.SetNames(names)
	}
}

// SetEvidence drains the members that do not answer this node's packets: names that stand for several clusters leave them
// out. It does not block.
func (n *nameserver) SetEvidence(known map[clusterset.ClusterID]evidence.State) {
	drained := map[clusterset.ClusterID]bool{}
	for id, state := range known {
		if state == evidence.Silent {
			drained[id] = true
		}
	}
	n.silent.Store(&drained)
	n.signaled.Notify()
}

// updateTopology changes the topology, and passes it to the server if there is one.
func (n *nameserver) updateTopology(change func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	change()
	if n.server != nil {
		n.server.SetTopology(n.local, n.drained)
	}
}

// Sync passes s to the server, now or when it has opened its sockets.
func (n *nameserver) Sync(ctx context.Context, s *clusterset.Snapshot) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.last = s
	if n.server == nil {
		return errors.Join(errNotListening, n.err)
	}
	return n.server.Sync(ctx, s)
}

// Status returns the state of the server, and the optional capabilities that the node lacks.
func (n *nameserver) Status() (s status.DNS, missing []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	s.Interface = n.iface
	if n.err != nil {
		s.Error = n.err.Error()
	}
	if n.server != nil {
		server := n.server.Status()
		s.Records, s.Synced = server.Records, server.SyncedAt
		for _, l := range server.Listen {
			s.Listening = append(s.Listening, l.String())
		}
	}
	if n.kernel != nil {
		kernel := n.kernelStatus()
		s.Kernel = &status.KernelDNS{Devices: kernel.Devices, Answers: kernel.A + kernel.AAAA}
		for _, r := range n.fast.Resolvers {
			s.Kernel.Resolvers = append(s.Kernel.Resolvers, r.String())
		}
	}
	return s, slices.Concat(n.missing, n.unknownClients())
}
