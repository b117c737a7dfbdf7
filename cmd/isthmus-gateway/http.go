package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/isthmus-net/isthmus/gateway/agent"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/ebpf"
	"github.com/isthmus-net/isthmus/gateway/flows"
)

// serveHTTP serves health, readiness, metrics and the peers of the group until ctx is done. It adds more to the metrics of
// the agent.
func serveHTTP(ctx context.Context, l net.Listener, a *agent.Agent, x *flows.Exchange, more ...prometheus.Collector) error {
	registry := prometheus.NewRegistry()
	registry.MustRegister(more...)
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), metrics{a.Stats, x.Stats})
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("/readyz", func(w http.ResponseWriter, _ *http.Request) {
		switch s := a.Stats(); {
		case s.Ready:
			fmt.Fprintln(w, "ok")
		case len(s.Status.Drift) > 0:
			http.Error(w, desired.Faults(s.Status.Drift).Error(), http.StatusServiceUnavailable)
		default:
			http.Error(w, "no state was applied yet", http.StatusServiceUnavailable)
		}
	})
	mux.HandleFunc("GET "+peersPath, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(x.Stats()) // an error means that the client has gone
	})
	mux.Handle("/metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	stop := context.AfterFunc(ctx, func() { server.Close() })
	defer stop()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve HTTP on %s: %w", l.Addr(), err)
	}
	return nil
}

// metricsOf returns the metrics that only one kind of balancer has.
func metricsOf(b balancer) []prometheus.Collector {
	with, ok := b.(*ebpf.Balancer)
	if !ok {
		return nil
	}
	return []prometheus.Collector{prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "isthmus_gateway_xdp_packets_total", Help: "Packets that XDP programs sent from the driver.",
	}, func() float64 { return float64(with.Sent()) })}
}

// metrics exports what the agent and the exchange of flows count, read at each scrape.
type metrics struct {
	current func() agent.Stats
	flows   func() flows.Stats
}

var (
	metricReady      = prometheus.NewDesc("isthmus_gateway_ready", "1 when the gateway matches the last state of its controller.", nil, nil)
	metricGeneration = prometheus.NewDesc("isthmus_gateway_generation", "Generation of the state applied last.", nil, nil)
	metricApplied    = prometheus.NewDesc("isthmus_gateway_applied_timestamp_seconds", "Time at which that state was applied.", nil, nil)
	metricAnnounced  = prometheus.NewDesc("isthmus_gateway_announced_vips", "VIPs announced to neighbours now.", nil, nil)
	metricRequests   = prometheus.NewDesc("isthmus_gateway_reconfigurations_total", "Requests of controllers, by HTTP status.", []string{"code"}, nil)
	metricDrifts     = prometheus.NewDesc("isthmus_gateway_drifts_total", "Times a component began to drift from the applied state.", []string{"component"}, nil)
	metricMended     = prometheus.NewDesc("isthmus_gateway_mended_total", "Drifts that the next Apply removed at once.", []string{"component"}, nil)

	metricFlowsRefused  = prometheus.NewDesc("isthmus_gateway_flows_refused_total", "Requests with flows that this gateway refused.", nil, nil)
	metricFlowsPending  = prometheus.NewDesc("isthmus_gateway_flows_pending", "Flows of peers that wait here for their VIP or backend.", nil, nil)
	metricFlowsSent     = peerMetric("flows_sent_total", "Flows that the peer accepted.")
	metricFlowsReceived = peerMetric("flows_received_total", "Flows that the peer sent.")
	metricFlowsQueued   = peerMetric("flows_queued", "Flows queued for the peer.")
	metricFlowsDropped  = peerMetric("flows_dropped_total", "Flows dropped because the queue of the peer was full. They are sent again later.")
	metricFlowsFailed   = peerMetric("flows_failed_total", "Requests with flows that the peer did not accept.")
	metricPeerReachable = peerMetric("peer_reachable", "1 when the peer accepted the last request with flows, or none was sent yet.")
)

func peerMetric(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("isthmus_gateway_"+name, help, []string{"gateway", "url"}, nil)
}

// Describe implements prometheus.Collector.
func (metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		metricReady, metricGeneration, metricApplied, metricAnnounced, metricRequests, metricDrifts, metricMended,
		metricFlowsRefused, metricFlowsPending, metricFlowsSent, metricFlowsReceived, metricFlowsQueued, metricFlowsDropped, metricFlowsFailed, metricPeerReachable,
	} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (m metrics) Collect(ch chan<- prometheus.Metric) {
	s := m.current()
	gauge := func(d *prometheus.Desc, v float64) { ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v) }
	count := func(d *prometheus.Desc, v int, label string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), label)
	}
	ready := 0.0
	if s.Ready {
		ready = 1
	}
	gauge(metricReady, ready)
	gauge(metricGeneration, float64(s.Status.Generation))
	gauge(metricAnnounced, float64(len(s.Status.Announced)))
	if !s.Status.Since.IsZero() {
		gauge(metricApplied, float64(s.Status.Since.UnixMilli())/1000)
	}
	for code, n := range s.Reconfigurations {
		count(metricRequests, n, strconv.Itoa(code))
	}
	for component := range s.Drifts {
		count(metricDrifts, s.Drifts[component], component)
		count(metricMended, s.Mended[component], component)
	}
	m.collectFlows(ch)
}

func (m metrics) collectFlows(ch chan<- prometheus.Metric) {
	s := m.flows()
	ch <- prometheus.MustNewConstMetric(metricFlowsRefused, prometheus.CounterValue, float64(s.Refused))
	ch <- prometheus.MustNewConstMetric(metricFlowsPending, prometheus.GaugeValue, float64(s.Pending))
	for _, peer := range s.Peers {
		for d, n := range map[*prometheus.Desc]uint64{
			metricFlowsSent: peer.Sent, metricFlowsReceived: peer.Received, metricFlowsDropped: peer.Dropped, metricFlowsFailed: peer.Failed,
		} {
			ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n), peer.Gateway, peer.URL)
		}
		reachable := 1.0
		if peer.Fault != "" {
			reachable = 0
		}
		ch <- prometheus.MustNewConstMetric(metricFlowsQueued, prometheus.GaugeValue, float64(peer.Queued), peer.Gateway, peer.URL)
		ch <- prometheus.MustNewConstMetric(metricPeerReachable, prometheus.GaugeValue, reachable, peer.Gateway, peer.URL)
	}
}
