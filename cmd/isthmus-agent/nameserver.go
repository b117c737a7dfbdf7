package main

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

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
	log *slog.Logger
	// retry passes between two attempts to listen.
	retry time.Duration

	mu     sync.Mutex // guards what follows
	server *dns.Server
	last   *clusterset.Snapshot
	local  clusterset.ClusterID
	iface  string
	lacks  string // the optional ability that the node lacks, or ""
	err    error
}

// Run listens and answers until ctx is done; then it returns nil.
func (n *nameserver) Run(ctx context.Context) error {
	for {
		err := n.serve(ctx)
		if ctx.Err() != nil {
			return nil //nolint:nilerr // whatever ended it, the end was asked for
		}
		n.mu.Lock()
		fresh := n.err == nil || err == nil || n.err.Error() != err.Error()
		n.server, n.err = nil, err
		n.mu.Unlock()
		if fresh {
			n.log.Error("DNS is not served; will try again", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(n.retry):
		}
	}
}

// serve opens the sockets and answers until ctx is done or a socket breaks.
func (n *nameserver) serve(ctx context.Context) error {
	server, err := n.open(ctx)
	if err != nil {
		return err
	}
	return server.Run(ctx)
}

// open assigns the addresses that are ours, binds all sockets and shows the server the last world.
func (n *nameserver) open(ctx context.Context) (*dns.Server, error) {
	listen, iface, lacks, err := n.assign()
	if err != nil {
		return nil, err
	}
	cfg := n.cfg
	cfg.Listen, cfg.Log = listen, n.log
	server, err := dns.New(cfg)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.server, n.iface, n.lacks, n.err = server, iface, lacks, nil
	server.Settle(n.local, nil)
	if n.last != nil {
		n.err = server.Sync(ctx, n.last)
	}
	return server, nil
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
func (n *nameserver) Place(local clusterset.ClusterID) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.local = local
	if n.server != nil {
		n.server.Settle(local, nil)
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

// Status says what is served now, and which optional ability the node lacks, if one.
func (n *nameserver) Status() (s status.DNS, lacks string) {
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
	return s, n.lacks
}
