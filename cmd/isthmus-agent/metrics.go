package main

import (
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// metrics is what the agent knows as Prometheus metrics, read when they are scraped.
type metrics struct {
	current func() status.Agent
	// counters are by Service; nil leaves them out.
	counters func() (map[clusterset.ServiceName]datapath.Counters, error)
	evicted  func() (uint64, error)
	log      *slog.Logger
}

// metric is one metric as a document has it.
type metric struct {
	name, help string
	labels     []string
	kind       prometheus.ValueType
}

// allMetrics are the agent's own; docs/dataplane.md lists them.
var (
	metricReady       = metric{"isthmus_agent_ready", "1 when the node serves the last world it was told of.", nil, prometheus.GaugeValue}
	metricServices    = metric{"isthmus_agent_services", "Imported Services the agent knows of.", nil, prometheus.GaugeValue}
	metricFrontends   = metric{"isthmus_agent_frontends", "VIP:port/protocol entries in the kernel.", nil, prometheus.GaugeValue}
	metricBackends    = metric{"isthmus_agent_backends", "Backends in the kernel.", nil, prometheus.GaugeValue}
	metricWrites      = metric{"isthmus_agent_map_writes_total", "Writes to the kernel's maps since the agent started.", nil, prometheus.CounterValue}
	metricDifferences = metric{"isthmus_agent_map_differences", "Entries of the kernel's maps that the last check found to be other than the agent wrote them. They were put right.", nil, prometheus.GaugeValue}
	metricChecked     = metric{"isthmus_agent_map_check_timestamp_seconds", "When the kernel's maps were last compared with what they should hold.", nil, prometheus.GaugeValue}
	metricRecords     = metric{"isthmus_agent_dns_records", "DNS records served.", nil, prometheus.GaugeValue}
	metricClusterDNS  = metric{"isthmus_agent_cluster_dns_answers", "1 when the cluster's DNS answers for clusterset.local, 0 when it does not; absent when that is not known.", nil, prometheus.GaugeValue}
	metricRefusals    = metric{"isthmus_agent_refusals_total", "Clients refused since the maps were made, by reason.", []string{"reason"}, prometheus.CounterValue}
	metricDrained     = metric{"isthmus_agent_drained", "1 for each member whose packets die, as this node sees it.", []string{"source_cluster"}, prometheus.GaugeValue}
	metricSynced      = metric{"isthmus_agent_last_sync_timestamp_seconds", "When a part took the last world.", []string{"part"}, prometheus.GaugeValue}

	metricEvicted = metric{"isthmus_agent_udp_vips_evicted_total", "VIPs of unconnected UDP sockets that had to make room for others since the maps were made; answers come under the backend's name.", nil, prometheus.CounterValue}

	metricServiceConnections = metric{"isthmus_agent_service_connections_total", "Clients of a Service that were given a backend on this node.", []string{"namespace", "service"}, prometheus.CounterValue}
	metricServiceRefusals    = metric{"isthmus_agent_service_refusals_total", "Clients of a Service that were refused on this node, by reason.", []string{"namespace", "service", "reason"}, prometheus.CounterValue}

	allMetrics = []metric{
		metricReady, metricServices, metricFrontends, metricBackends, metricWrites, metricDifferences, metricChecked, metricRecords,
		metricClusterDNS, metricRefusals, metricDrained, metricSynced, metricEvicted, metricServiceConnections, metricServiceRefusals,
	}
)

func (m metric) desc() *prometheus.Desc { return prometheus.NewDesc(m.name, m.help, m.labels, nil) }

// Describe is part of prometheus.Collector.
func (metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range allMetrics {
		ch <- m.desc()
	}
}

// Collect is part of prometheus.Collector.
func (m metrics) Collect(ch chan<- prometheus.Metric) {
	s := m.current()
	put := func(m metric, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(m.desc(), m.kind, v, labels...)
	}
	put(metricReady, one(s.Ready))
	put(metricServices, float64(s.View.Services))
	put(metricFrontends, float64(s.Dataplane.Frontends))
	put(metricBackends, float64(s.Dataplane.Backends))
	put(metricRecords, float64(s.DNS.Names))
	if s.DNS.Cluster != nil {
		put(metricClusterDNS, one(s.DNS.Cluster.Answers))
	}
	put(metricWrites, float64(s.Dataplane.Writes))
	put(metricDifferences, float64(s.Dataplane.Differences))
	for reason, n := range s.Dataplane.Refusals {
		put(metricRefusals, float64(n), reason)
	}
	for _, id := range s.Dataplane.Drained {
		put(metricDrained, 1, id)
	}
	for part, at := range map[string]time.Time{"dataplane": s.Dataplane.Synced, "dns": s.DNS.Synced} {
		if !at.IsZero() {
			put(metricSynced, seconds(at), part)
		}
	}
	if !s.Dataplane.Checked.IsZero() {
		put(metricChecked, seconds(s.Dataplane.Checked))
	}
	if n, err := m.evicted(); err == nil {
		put(metricEvicted, float64(n))
	} else {
		m.log.Error("count VIPs of UDP sockets that made room", "err", err)
	}
	if m.counters == nil {
		return
	}
	counters, err := m.counters()
	if err != nil {
		m.log.Error("count clients by Service", "err", err)
	}
	for name, c := range counters {
		if c.Chosen > 0 {
			put(metricServiceConnections, float64(c.Chosen), name.Namespace, name.Name)
		}
		for reason, n := range c.Refused {
			put(metricServiceRefusals, float64(n), name.Namespace, name.Name, reason.String())
		}
	}
}

// one is 1 for true.
func one(is bool) float64 {
	if is {
		return 1
	}
	return 0
}

func seconds(at time.Time) float64 { return float64(at.UnixNano()) / 1e9 }
