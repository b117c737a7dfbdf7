package main

import (
	"encoding/json"
	"net"
	"net/http"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/isthmus-net/isthmus/cmd/internal/httpserver"
	"github.com/isthmus-net/isthmus/cmd/internal/version"
	"github.com/isthmus-net/isthmus/gateway/agent"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/ebpf"
	"github.com/isthmus-net/isthmus/gateway/flows"
)

// httpServer returns the server of health, readiness, metrics and the peers of the group. It adds more to the metrics of the
// agent. Metrics and peers are for processes of this machine, and for clients with a certificate of the gateway's authority.
func (g *gateway) httpServer(l net.Listener, more ...prometheus.Collector) *httpserver.Server {
	c := httpserver.Config{Listener: l, Access: httpserver.Local{}, Log: g.log}
	if g.cfg.Insecure {
		c.Open = []string{"/metrics"}
	} else {
		c.TLS, c.Access = g.certs.OpenServer(), httpserver.Certificates(g.certs.VerifyAny)
	}
	server := httpserver.New(c)
	registry := prometheus.NewRegistry()
	registry.MustRegister(append(more, g.certs.Metrics()...)...)
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		metrics{g.agent.Stats, g.exchange.Stats}, server.Metrics(), version.Metric())
	server.Probe("/readyz", func() []string {
		switch s := g.agent.Stats(); {
		case s.Ready:
			return nil
		case len(s.Status.Drift) > 0:
			return []string{desired.Faults(s.Status.Drift).Error()}
		}
		return []string{"no state was applied yet"}
	})
	server.Handle("GET "+peersPath, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(g.exchange.Stats()) // an error means that the client has gone
	}))
	server.Handle("/metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	return server
}

// metricsOf returns the metrics of a balancer, of which only eBPF has one of XDP.
func metricsOf(b balancer) []prometheus.Collector {
	all := []prometheus.Collector{
		connections(b.Counts), refusals(b.Refusals),
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "isthmus_gateway_handed_over_packets_total", Help: "Packets of unknown connections that were handed over to other gateways.",
		}, func() float64 { return float64(b.HandedOver()) }),
	}
	if with, ok := b.(*ebpf.Balancer); ok {
		all = append(all, prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "isthmus_gateway_xdp_packets_total", Help: "Packets that XDP programs sent from the driver.",
		}, func() float64 { return float64(with.Sent()) }))
	}
	return all
}

// refusals exports the packets that a balancer refused or dropped, read at each scrape.
type refusals func() (map[flows.Refusal]uint64, error)

var metricRefusedPackets = prometheus.NewDesc("isthmus_gateway_refused_packets_total",
	"Packets that were refused or dropped, by Service (none for a packet of no Service, for removed ones, and with nftables) and reason.", []string{"service", "reason"}, nil)

// Describe implements prometheus.Collector.
func (refusals) Describe(ch chan<- *prometheus.Desc) { ch <- metricRefusedPackets }

// Collect implements prometheus.Collector.
func (r refusals) Collect(ch chan<- prometheus.Metric) {
	counts, err := r()
	if err != nil {
		ch <- prometheus.NewInvalidMetric(metricRefusedPackets, err)
	}
	for key, n := range counts {
		ch <- prometheus.MustNewConstMetric(metricRefusedPackets, prometheus.CounterValue, float64(n), key.Service, key.Reason)
	}
}

// connections exports the flows and the traffic of each Service of the applied state, read at each scrape.
type connections func() (map[flows.CountKey]flows.Counts, error)

var (
	metricOpened = prometheus.NewDesc("isthmus_gateway_connections_total",
		"TCP connections that have opened, and UDP flows that have lasted, by Service and protocol.", []string{"service", "protocol"}, nil)
	metricPackets = prometheus.NewDesc("isthmus_gateway_forwarded_packets_total",
		"Packets that were forwarded to backends or to clients, by Service and protocol.", []string{"service", "protocol", "to"}, nil)
	metricBytes = prometheus.NewDesc("isthmus_gateway_forwarded_bytes_total",
		"Bytes of those IP packets.", []string{"service", "protocol", "to"}, nil)
	metricActive = prometheus.NewDesc("isthmus_gateway_active_connections",
		"Open TCP connections and UDP flows, by Service and protocol, as counted some seconds ago.", []string{"service", "protocol"}, nil)
)

// Describe implements prometheus.Collector.
func (connections) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range []*prometheus.Desc{metricOpened, metricActive, metricPackets, metricBytes} {
		ch <- m
	}
}

// Collect implements prometheus.Collector.
func (c connections) Collect(ch chan<- prometheus.Metric) {
	counts, err := c()
	if err != nil {
		ch <- prometheus.NewInvalidMetric(metricActive, err)
	}
	for k, n := range counts {
		ch <- prometheus.MustNewConstMetric(metricOpened, prometheus.CounterValue, float64(n.Opened), k.Service, k.Protocol)
		ch <- prometheus.MustNewConstMetric(metricActive, prometheus.GaugeValue, float64(n.Active), k.Service, k.Protocol)
		for to, sum := range map[string]flows.Sum{"backends": n.ToBackends, "clients": n.ToClients} {
			ch <- prometheus.MustNewConstMetric(metricPackets, prometheus.CounterValue, float64(sum.Packets), k.Service, k.Protocol, to)
			ch <- prometheus.MustNewConstMetric(metricBytes, prometheus.CounterValue, float64(sum.Bytes), k.Service, k.Protocol, to)
		}
	}
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
	metricRefused    = prometheus.NewDesc("isthmus_gateway_refused_services", "Services of that state that are not applied: each stays as it was, or is left out.", nil, nil)
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
		metricReady, metricGeneration, metricApplied, metricAnnounced, metricRefused, metricRequests, metricDrifts, metricMended,
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
	gauge(metricRefused, float64(len(s.Status.Refused)))
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
