package main

import (
	"context"
	"fmt"
	"net"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/cmd/internal/httpserver"
	"github.com/isthmus-net/isthmus/cmd/internal/httpserver/reviews"
	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/cmd/internal/version"
)

// newAccess returns the access to metrics, status and introspection, which show the Services of all tenants and the connections of
// clients on this node. A request needs a token whose account may get the path. Without an API server to check tokens, only
// processes of the node have access. They always have access to DNS records: DNS gives the same to anyone who asks by name.
func newAccess(cluster *rest.Config) (httpserver.Access, error) {
	if cluster == nil {
		return httpserver.Local{}, nil
	}
	access, err := reviews.New(cluster, status.TokenAudience)
	if err != nil {
		return nil, err
	}
	return httpserver.LocalPaths{Paths: []string{status.RecordsPath}, Access: access}, nil
}

// serveHTTP serves probes, metrics, status and introspection on l until ctx is done.
func (c components) serveHTTP(ctx context.Context, l net.Listener, m metrics, in *introspection) error {
	config, err := c.cfg.HTTP.Config(c.log)
	if err != nil {
		return fmt.Errorf("serve HTTP: %w", err)
	}
	access, err := newAccess(c.api.config)
	if err != nil {
		return err
	}
	server := httpserver.New(httpserver.Config{Listener: l, TLS: config, Access: access, Open: c.cfg.HTTP.Open(), Log: c.log.With("component", "http")})
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), m, dnsMetrics{in.names.dnsStatus}, server.Metrics(), version.Metric())
	server.Handle("/metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	server.Handle(status.Path, status.Handler(m.current))
	server.Probe("/readyz", func() []string { return m.current().Waiting })
	in.register(server.Handle)
	return server.Serve(ctx)
}
