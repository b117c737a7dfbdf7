package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/isthmus-net/isthmus/cmd/internal/status"
)

// serveHTTP answers on l until ctx is done. current is called for every request.
func serveHTTP(ctx context.Context, l net.Listener, current func() status.Agent) error {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), gauges{current})

	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("/readyz", func(w http.ResponseWriter, _ *http.Request) {
		if s := current(); !s.Ready {
			http.Error(w, strings.Join(s.Waiting, "\n"), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	mux.Handle("/metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	mux.Handle(status.Path, status.Handler(current))

	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	stop := context.AfterFunc(ctx, func() { server.Close() })
	defer stop()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve HTTP on %s: %w", l.Addr(), err)
	}
	return nil
}

// gauges is the agent's status as Prometheus metrics, read when they are scraped.
type gauges struct{ current func() status.Agent }

var (
	descReady     = prometheus.NewDesc("isthmus_agent_ready", "1 when the node serves the last world it was told of.", nil, nil)
	descServices  = prometheus.NewDesc("isthmus_agent_services", "Imported Services the agent knows of.", nil, nil)
	descFrontends = prometheus.NewDesc("isthmus_agent_frontends", "VIP:port/protocol entries in the kernel.", nil, nil)
	descBackends  = prometheus.NewDesc("isthmus_agent_backends", "Backends in the kernel.", nil, nil)
	descWrites    = prometheus.NewDesc("isthmus_agent_map_writes_total", "Writes to the kernel's maps since the agent started.", nil, nil)
	descRecords   = prometheus.NewDesc("isthmus_agent_dns_records", "DNS records served.", nil, nil)
	descRefusals  = prometheus.NewDesc("isthmus_agent_refusals_total", "Clients refused since the maps were made, by reason.", []string{"reason"}, nil)
	descDrained   = prometheus.NewDesc("isthmus_agent_drained", "1 for each member whose packets die, as this node sees it.", []string{"source_cluster"}, nil)
	descSynced    = prometheus.NewDesc("isthmus_agent_last_sync_timestamp_seconds", "When a part took the last world.", []string{"part"}, nil)
)

// Describe is part of prometheus.Collector.
func (gauges) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descReady, descServices, descFrontends, descBackends, descWrites, descRecords, descRefusals, descDrained, descSynced} {
		ch <- d
	}
}

// Collect is part of prometheus.Collector.
func (g gauges) Collect(ch chan<- prometheus.Metric) {
	s := g.current()
	ready := 0.0
	if s.Ready {
		ready = 1
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	gauge(descReady, ready)
	gauge(descServices, float64(s.View.Services))
	gauge(descFrontends, float64(s.Dataplane.Frontends))
	gauge(descBackends, float64(s.Dataplane.Backends))
	gauge(descRecords, float64(s.DNS.Names))
	ch <- prometheus.MustNewConstMetric(descWrites, prometheus.CounterValue, float64(s.Dataplane.Writes))
	for reason, n := range s.Dataplane.Refusals {
		ch <- prometheus.MustNewConstMetric(descRefusals, prometheus.CounterValue, float64(n), reason)
	}
	for _, id := range s.Dataplane.Drained {
		gauge(descDrained, 1, id)
	}
	for part, at := range map[string]time.Time{"dataplane": s.Dataplane.Synced, "dns": s.DNS.Synced} {
		if !at.IsZero() {
			gauge(descSynced, float64(at.UnixNano())/1e9, part)
		}
	}
}
