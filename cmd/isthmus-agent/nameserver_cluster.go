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

// Where the cluster's DNS is.
//
// +kubebuilder:rbac:groups="",resources=services,resourceNames=kube-dns,verbs=get

const (
	// clusterDNSInterval passes between two questions to the cluster's DNS.
	clusterDNSInterval = 20 * time.Second
	// clusterDNSPatience is how many questions in a row nobody answers before that is said: packets get lost.
	clusterDNSPatience = 2
	// clusterDNSPath is the Service of the cluster's DNS, by the name that it has everywhere.
	clusterDNSPath = "/api/v1/namespaces/kube-system/services/kube-dns"
)

// clusterDNS watches whether the cluster's DNS, which pods ask, answers for clusterset.local: somebody may take the
// block away that sends it to the agents, or write it over.
type clusterDNS struct {
	at     string         // its address; "" asks server, and again when nobody answers there
	server rest.Interface // may be nil when at is not empty
	log    *slog.Logger
	ask    func(ctx context.Context, server netip.AddrPort) error // whether it answers

	mu   sync.Mutex
	last *status.ClusterDNS // nil: not known
}

// newClusterDNS returns nil where there is nothing to watch.
func newClusterDNS(at string, server rest.Interface, log *slog.Logger) *clusterDNS {
	if at == clusterDNSNone || at == "" && server == nil {
		return nil
	}
	return &clusterDNS{at: at, server: server, log: log, ask: askVersion}
}

// Status says what is known, nil for nothing. c may be nil.
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
	silent, said := 0, ""
	for {
		at, err := c.find(ctx)
		if err == nil {
			err = c.ask(ctx, at)
			switch {
			case err == nil || refused(err):
				silent = 0
			default:
				silent++
			}
			if ctx.Err() == nil && (silent == 0 || silent >= clusterDNSPatience) {
				c.note(at, err)
			}
		} else if text := err.Error(); ctx.Err() == nil && text != said {
			c.log.Info("the cluster's DNS is not watched; name it by --cluster-dns", "err", err)
			said = text
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// find returns where the cluster's DNS is.
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

// note keeps what was found, and logs it when it is new.
func (c *clusterDNS) note(at netip.AddrPort, err error) {
	is := &status.ClusterDNS{Server: at.String(), Answers: err == nil}
	if err != nil {
		is.Reason = oneLine(err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.last != nil && c.last.Answers == is.Answers {
		is.Since = c.last.Since
	} else {
		is.Since = time.Now()
		if err != nil {
			c.log.Warn("pods do not find names of clusterset.local; see isthmusctl dns status", "server", at, "err", err)
		} else if c.last != nil {
			c.log.Info("pods find names of clusterset.local again", "server", at)
		}
	}
	c.last = is
}

// refused reports whether err is an answer, and not the want of one.
func refused(err error) bool { return errors.Is(err, zoneask.ErrNotServed) }

// askVersion asks a name server for what every server of a ClusterSet's zone has.
func askVersion(ctx context.Context, server netip.AddrPort) error {
	return zoneask.Ask(ctx, &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, server.String())
	}})
}

// askServers says of each server= whether it answers for clusterset.local, as seen from here.
func askServers(w http.ResponseWriter, r *http.Request) {
	texts := r.URL.Query()["server"]
	if len(texts) == 0 || len(texts) > status.MaxAsked {
		http.Error(w, fmt.Sprintf("name 1 to %d servers by server=", status.MaxAsked), http.StatusBadRequest)
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
	said := make([]status.ClusterDNS, len(servers))
	var asking sync.WaitGroup
	for i, at := range servers {
		asking.Go(func() {
			err := askVersion(r.Context(), at)
			said[i] = status.ClusterDNS{Server: at.String(), Answers: err == nil}
			if err != nil {
				said[i].Reason = oneLine(err)
			}
		})
	}
	asking.Wait()
	writeAnswer(w, said, nil)
}
