package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/cmd/internal/zoneask"
	"github.com/isthmus-net/isthmus/dns"
)

// The agent reads the address of the cluster's DNS from Service kube-dns.
//
// +kubebuilder:rbac:groups="",resources=services,resourceNames=kube-dns,verbs=get

const (
	// clusterDNSInterval is the time between two questions to the cluster's DNS.
	clusterDNSInterval = 20 * time.Second
	// clusterDNSLosses is the number of unanswered questions in a row that count as an outage: one may be a lost packet.
	clusterDNSLosses = 2
	// clusterDNSPath is the Service of the cluster's DNS, which has this name in every distribution.
	clusterDNSPath = "/api/v1/namespaces/kube-system/services/kube-dns"
)

// clusterDNS watches whether the cluster's DNS, which pods use, answers for clusterset.local. It stops doing so when, for
// example, an add-on manager overwrites the Corefile and removes the block that forwards the zone to the agents.
type clusterDNS struct {
	at     string         // its address; if empty, read from server before each question
	server rest.Interface // may be nil if at is set
	log    *slog.Logger
	ask    func(ctx context.Context, server netip.AddrPort) error // nil if it answers

	mu   sync.Mutex
	last *status.ClusterDNS // nil while unknown
}

// newClusterDNS returns nil if the watch is off, or if there is no way to find the address.
func newClusterDNS(at string, server rest.Interface, log *slog.Logger) *clusterDNS {
	if at == clusterDNSNone || at == "" && server == nil {
		return nil
	}
	return &clusterDNS{at: at, server: server, log: log, ask: askVersion}
}

// Status returns the last result, nil if there is none. c may be nil.
func (c *clusterDNS) Status() *status.ClusterDNS {
	if c == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.last == nil {
		return nil
	}
	is := *c.last
	return &is
}

// Run asks until ctx is done; then it returns nil.
func (c *clusterDNS) Run(ctx context.Context) error {
	tick := time.NewTicker(clusterDNSInterval)
	defer tick.Stop()
	losses, logged := 0, ""
	for {
		at, err := c.find(ctx)
		if err == nil {
			err = c.ask(ctx, at)
			switch {
			case err == nil || refused(err):
				losses = 0
			default:
				losses++
			}
			if ctx.Err() == nil && (losses == 0 || losses >= clusterDNSLosses) {
				c.note(at, err)
			}
		} else if text := err.Error(); ctx.Err() == nil && text != logged {
			c.log.Info("cannot find the cluster's DNS, so it is not watched; set --cluster-dns", "err", err)
			logged = text
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// find returns the address of the cluster's DNS.
func (c *clusterDNS) find(ctx context.Context) (netip.AddrPort, error) {
	at := c.at
	if at == "" {
		var service corev1.Service
		if err := getObject(ctx, c.server, clusterDNSPath, &service); err != nil {
			return netip.AddrPort{}, fmt.Errorf("read Service kube-system/kube-dns: %w", err)
		}
		at = service.Spec.ClusterIP
	}
	addr, err := netip.ParseAddr(at)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("service kube-system/kube-dns has no address: %w", err)
	}
	return netip.AddrPortFrom(addr, dns.DefaultPort), nil
}

// note records a result, and logs it if it differs from the last one.
func (c *clusterDNS) note(at netip.AddrPort, err error) {
	now := &status.ClusterDNS{Server: at.String(), Answers: err == nil}
	if err != nil {
		now.Reason = oneLine(err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.last != nil && c.last.Answers == now.Answers {
		now.Since = c.last.Since
	} else {
		now.Since = time.Now()
		if err != nil {
			c.log.Warn("pods cannot resolve names in clusterset.local; see isthmusctl dns status", "server", at, "err", err)
		} else if c.last != nil {
			c.log.Info("pods can resolve names in clusterset.local again", "server", at)
		}
	}
	c.last = now
}

// refused reports whether the server answered that it does not serve the zone; other errors mean that it did not answer.
func refused(err error) bool { return errors.Is(err, zoneask.ErrNotServed) }

// askVersion asks a name server for dns-version.clusterset.local, which every server of the zone has.
func askVersion(ctx context.Context, server netip.AddrPort) error {
	return zoneask.Ask(ctx, &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, server.String())
	}})
}

// askServers handles AskPath: it asks each server= whether it answers for clusterset.local.
func askServers(w http.ResponseWriter, r *http.Request) {
	texts := r.URL.Query()["server"]
	if len(texts) == 0 || len(texts) > status.MaxAsked {
		http.Error(w, fmt.Sprintf("give 1 to %d servers as server=", status.MaxAsked), http.StatusBadRequest)
		return
	}
	servers := make([]netip.AddrPort, len(texts))
	for i, text := range texts {
		var err error
		if servers[i], err = netip.ParseAddrPort(text); err != nil {
			http.Error(w, fmt.Sprintf("server=%s is not an address with a port", text), http.StatusBadRequest)
			return
		}
	}
	results := make([]status.ClusterDNS, len(servers))
	var asking sync.WaitGroup
	for i, at := range servers {
		asking.Go(func() {
			err := askVersion(r.Context(), at)
			results[i] = status.ClusterDNS{Server: at.String(), Answers: err == nil}
			if err != nil {
				results[i].Reason = oneLine(err)
			}
		})
	}
	asking.Wait()
	writeAnswer(w, results, nil)
}
