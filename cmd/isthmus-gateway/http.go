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

// serveHTTP answers whoever watches the gateway, until ctx is done. More are metrics besides the agent's.
func serveHTTP(ctx context.Context, l net.Listener, a *agent.Agent, x *flows.Exchange, more ...prometheus.Collector) error {
	registry := prometheus.NewRegistry()
	registry.MustRegister(more...)
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), metrics{a.Sight, x.Sight})
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("/readyz", func(w http.ResponseWriter, _ *http.Request) {
		switch s := a.Sight(); {
		case s.Ready:
			fmt.Fprintln(w, "ok")
		case len(s.Status.Drift) > 0:
			http.Error(w, desired.Faults(s.Status.Drift).Error(), http.StatusServiceUnavailable)
		default:
			http.Error(w, "no state was applied yet", http.StatusServiceUnavailable)
		}
	})
	mux.HandleFunc("GET "+matesPath, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(x.Sight()) // who went away needs no answer
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

// metricsOf is what a balancer counts that others do not have.
func metricsOf(b balancer) []prometheus.Collector {
	with, ok := b.(*ebpf.Balancer)
	if !ok {
		return nil
	}
	return []prometheus.Collector{prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "isthmus_gateway_xdp_packets_total", Help: "Packets that drivers have sent themselves, by XDP.",
	}, func() float64 { return float64(with.Sent()) })}
}

// metrics is what the agent knows as Prometheus metrics, read when they are scraped.
type metrics struct {
	current func() agent.Sight
	flows   func() flows.Sight
}

var (
	metricReady      = prometheus.NewDesc("isthmus_gateway_ready", "1 when the gateway is as its controller wants.", nil, nil)
	metricGeneration = prometheus.NewDesc("isthmus_gateway_generation", "Generation of the state that was applied last.", nil, nil)
	metricApplied    = prometheus.NewDesc("isthmus_gateway_applied_timestamp_seconds", "When that was.", nil, nil)
	metricAnnounced  = prometheus.NewDesc("isthmus_gateway_announced_vips", "VIPs that neighbours are told about.", nil, nil)
	metricRequests   = prometheus.NewDesc("isthmus_gateway_reconfigurations_total", "Requests of controllers, by HTTP status.", []string{"code"}, nil)
	metricDrifts     = prometheus.NewDesc("isthmus_gateway_drifts_total", "How often a part began to be other than applied.", []string{"part"}, nil)
	metricMended     = prometheus.NewDesc("isthmus_gateway_mended_total", "How often that was put right at once.", []string{"part"}, nil)

	metricFlowsRefused  = prometheus.NewDesc("isthmus_gateway_flows_refused_total", "Requests with flows that were refused here.", nil, nil)
	metricFlowsEarly    = prometheus.NewDesc("isthmus_gateway_flows_early", "Flows of other gateways whose VIP or backend this gateway does not have yet.", nil, nil)
	metricFlowsSent     = ofMate("flows_sent_total", "Flows that another gateway took.")
	metricFlowsReceived = ofMate("flows_received_total", "Flows that another gateway told of.")
	metricFlowsBehind   = ofMate("flows_behind", "Flows that wait to be sent to another gateway.")
	metricFlowsLeftOut  = ofMate("flows_left_out_total", "Flows that found no room to wait for another gateway.")
	metricFlowsFailed   = ofMate("flows_failed_total", "Requests with flows that another gateway did not take.")
	metricMateReachable = ofMate("mate_reachable", "1 when another gateway took the last request with flows, or there was none yet.")
)

func ofMate(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("isthmus_gateway_"+name, help, []string{"gateway", "url"}, nil)
}

// Describe is part of prometheus.Collector.
func (metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		metricReady, metricGeneration, metricApplied, metricAnnounced, metricRequests, metricDrifts, metricMended,
		metricFlowsRefused, metricFlowsEarly, metricFlowsSent, metricFlowsReceived, metricFlowsBehind, metricFlowsLeftOut, metricFlowsFailed, metricMateReachable,
	} {
		ch <- d
	}
}

// Collect is part of prometheus.Collector.
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
	for _, part := range []string{desired.PartBalancer, desired.PartBGP, desired.PartVRRP} {
		count(metricDrifts, s.Drifts[part], part)
		count(metricMended, s.Mended[part], part)
	}
	m.collectFlows(ch)
}

func (m metrics) collectFlows(ch chan<- prometheus.Metric) {
	s := m.flows()
	ch <- prometheus.MustNewConstMetric(metricFlowsRefused, prometheus.CounterValue, float64(s.Refused))
	ch <- prometheus.MustNewConstMetric(metricFlowsEarly, prometheus.GaugeValue, float64(s.Early))
	for _, mate := range s.Mates {
		for d, n := range map[*prometheus.Desc]uint64{
			metricFlowsSent: mate.Sent, metricFlowsReceived: mate.Received, metricFlowsLeftOut: mate.LeftOut, metricFlowsFailed: mate.Failed,
		} {
			ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n), mate.Gateway, mate.URL)
		}
		reachable := 1.0
		if mate.Fault != "" {
			reachable = 0
		}
		ch <- prometheus.MustNewConstMetric(metricFlowsBehind, prometheus.GaugeValue, float64(mate.Behind), mate.Gateway, mate.URL)
		ch <- prometheus.MustNewConstMetric(metricMateReachable, prometheus.GaugeValue, reachable, mate.Gateway, mate.URL)
	}
}
