package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/isthmus-net/isthmus/agent/evidence"
	"github.com/isthmus-net/isthmus/bpf/datapath/names"
	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/dns"
	"github.com/isthmus-net/isthmus/dns/device"
)

// errNotListening is what Sync says while the name server has no sockets.
var errNotListening = errors.New("the name server does not listen yet")

// nameserver keeps a DNS server alive beside the dataplane: when its sockets cannot be had, because
// something else sits on the port, say, it tries again for ever, and the dataplane never notices.
// It is a view.Sink.
type nameserver struct {
	cfg dns.Config // without Log
	// neighbours are those of cfg.Listen that can be done without: the agents of other nodes stand in for them.
	neighbours []netip.AddrPort
	fast       names.Config // without Resolvers the kernel answers nothing
	log        *slog.Logger
	// retry passes between two attempts to listen.
	retry time.Duration
	// drains holds the members that are drained from now on, if that is new.
	drains chan map[clusterset.ClusterID]bool

	mu      sync.Mutex // guards what follows
	server  *dns.Server
	last    *clusterset.Snapshot
	local   clusterset.ClusterID
	drained map[clusterset.ClusterID]bool
	kernel  *names.Responder // nil while the kernel answers nothing
	iface   string
	lacks   []string // the optional abilities that the node lacks
	err     error
}

func newNameserver(cfg dns.Config, neighbours []netip.AddrPort, log *slog.Logger) *nameserver {
	return &nameserver{cfg: cfg, neighbours: neighbours, log: log, retry: 5 * time.Second, drains: make(chan map[clusterset.ClusterID]bool, 1)}
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
		case drained := <-n.drains:
			n.settle(func() { n.drained = drained })
		}
	}
}

// keepServing serves until ctx is done, again and again.
func (n *nameserver) keepServing(ctx context.Context) {
	for {
		err := n.serve(ctx)
		if ctx.Err() != nil {
			return // whatever ended it, the end was asked for
		}
		n.mu.Lock()
		fresh := n.err == nil || err == nil || n.err.Error() != err.Error()
		n.err = err
		n.mu.Unlock()
		if fresh {
			n.log.Error("DNS is not served; will try again", "err", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(n.retry):
		}
	}
}

// serve opens the sockets and answers until ctx is done or a socket breaks.
func (n *nameserver) serve(ctx context.Context) error {
	kernel, lacks := n.newKernel()
	server, err := n.open(ctx, kernel, lacks)
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

// newKernel returns what lets the kernel answer, if that is asked for and this node can. It knows what one server
// tells it, and goes with that.
func (n *nameserver) newKernel() (kernel *names.Responder, lacks []string) {
	if len(n.fast.Resolvers) == 0 {
		return nil, nil
	}
	kernel, err := names.New(n.fast, n.log)
	if err != nil {
		return nil, []string{"DNS answers from the kernel: " + oneLine(err)}
	}
	return kernel, nil
}

// open assigns the addresses that are ours, binds all sockets and shows the server the last world. lacks are the
// abilities of which is known before that the node has them not.
func (n *nameserver) open(ctx context.Context, kernel *names.Responder, lacks []string) (*dns.Server, error) {
	listen, iface, without, err := n.assign()
	if err != nil {
		return nil, err
	}
	server, alone, err := n.listen(listen, kernel)
	if err != nil {
		return nil, err
	}
	if without != "" {
		lacks = append(lacks, without)
	}
	lacks = append(lacks, alone...)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.server, n.kernel, n.iface, n.lacks, n.err = server, kernel, iface, lacks, nil
	server.Settle(n.local, n.drained)
	if n.last != nil {
		n.err = server.Sync(ctx, n.last)
	}
	return server, nil
}

// listen makes a server for some addresses and for guests, or, where that cannot be, for as many as can: those of guests
// and then those of neighbours are left out, and it says so.
func (n *nameserver) listen(addrs []netip.AddrPort, kernel *names.Responder) (server *dns.Server, lacks []string, err error) {
	cfg := n.cfg
	cfg.Listen, cfg.Log = addrs, n.log
	if kernel != nil {
		cfg.Kernel = kernel
	}
	if server, err = dns.New(cfg); err == nil {
		return server, nil, nil
	}
	alone, nobody := slices.DeleteFunc(slices.Clone(addrs), func(a netip.AddrPort) bool { return slices.Contains(n.neighbours, a) }), dns.Guests{}
	type attempt struct {
		listen  []netip.AddrPort
		guests  dns.Guests
		without []string // what users miss, and what to do
	}
	forGuests := fmt.Sprintf("DNS for machines outside of the cluster: %s, or another address with --dns-guest-listen", oneLine(err))
	forNeighbours := fmt.Sprintf("DNS for other nodes while their agents are away: %s, or another port with --dns-neighbour-port", oneLine(err))
	for _, a := range []attempt{{addrs, nobody, []string{forGuests}}, {alone, n.cfg.Guests, []string{forNeighbours}}, {alone, nobody, []string{forGuests, forNeighbours}}} {
		if len(a.listen) == 0 || len(a.listen) == len(addrs) && len(a.guests.Listen) == len(n.cfg.Guests.Listen) {
			continue // tried before
		}
		cfg.Listen, cfg.Guests = a.listen, a.guests
		server, second := dns.New(cfg)
		if second == nil {
			n.log.Warn("the names are not served on all addresses", "err", err)
			return server, a.without, nil
		}
	}
	return nil, nil, err
}

// assign gives our own addresses an interface. On a node without IPv6 the IPv6 ones are left out.
func (n *nameserver) assign() (listen []netip.AddrPort, iface, lacks string, err error) {
	var own []netip.Addr
	for _, l := range n.cfg.Listen {
		if device.Owns(l.Addr()) {
			own = append(own, l.Addr())
		}
	}
	if len(own) == 0 {
		return n.cfg.Listen, "", "", nil
	}
	iface, assigned, err := device.Ensure(own)
	if err != nil {
		return nil, "", "", err
	}
	if err := device.Untrack(assigned); err != nil {
		lacks = "DNS without connection tracking: " + err.Error()
	}
	for _, l := range n.cfg.Listen {
		if device.Owns(l.Addr()) && !slices.Contains(assigned, l.Addr()) {
			lacks = "DNS over IPv6: IPv6 is switched off on this node"
			continue
		}
		listen = append(listen, l)
	}
	return listen, iface, lacks, nil
}

// Place tells the server, now or as soon as there is one, which member the node is of.
func (n *nameserver) Place(local clusterset.ClusterID) { n.settle(func() { n.local = local }) }

// Drain takes what the node knows of each member's packets, so that names which stand for several clusters leave out
// those that are silent. It does not wait; it is for one goroutine.
func (n *nameserver) Drain(known map[clusterset.ClusterID]evidence.State) {
	drained := map[clusterset.ClusterID]bool{}
	for id, state := range known {
		if state == evidence.Silent {
			drained[id] = true
		}
	}
	select {
	case <-n.drains: // nobody took the last one yet, and it is old
	default:
	}
	n.drains <- drained
}

// settle changes what the answers depend on besides the last world.
func (n *nameserver) settle(change func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	change()
	if n.server != nil {
		n.server.Settle(n.local, n.drained)
	}
}

// Sync hands s to the server, now or as soon as there is one.
func (n *nameserver) Sync(ctx context.Context, s *clusterset.Snapshot) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.last = s
	if n.server == nil {
		return errors.Join(errNotListening, n.err)
	}
	return n.server.Sync(ctx, s)
}

// Status says what is served now, and which optional abilities the node lacks.
func (n *nameserver) Status() (s status.DNS, lacks []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	s.Interface = n.iface
	if n.err != nil {
		s.Error = n.err.Error()
	}
	if n.server != nil {
		is := n.server.Status()
		s.Names, s.Synced = is.Records, is.SyncedAt
		for _, l := range is.Listen {
			s.Listening = append(s.Listening, l.String())
		}
	}
	if n.kernel != nil {
		is := n.kernelStatus()
		s.Kernel = &status.KernelDNS{Devices: is.Devices, Answers: is.A + is.AAAA}
		for _, r := range n.fast.Resolvers {
			s.Kernel.Resolvers = append(s.Kernel.Resolvers, r.String())
		}
	}
	return s, n.lacks
}
