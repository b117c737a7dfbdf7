package main

import (
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// metrics collects the metrics of the agent. It reads them at each scrape.
type metrics struct {
	current func() status.Agent
	// counters returns the counters by Service; nil leaves out their metrics.
	counters func() (map[clusterset.ServiceName]datapath.Counters, error)
	evicted  func() (uint64, error)
	log      *slog.Logger
}

// metric describes a metric.
type metric struct {
	name, help string
	labels     []string
	kind       prometheus.ValueType
}

// docs/dataplane.md lists these metrics; a test compares.
var (
	metricReady       = metric{"isthmus_agent_ready", "1 if the dataplane and the name server have applied the last snapshot.", nil, prometheus.GaugeValue}
	metricServices    = metric{"isthmus_agent_services", "Imported Services in the last snapshot.", nil, prometheus.GaugeValue}
	metricFrontends   = metric{"isthmus_agent_frontends", "VIP:port/protocol entries in the kernel.", nil, prometheus.GaugeValue}
	metricBackends    = metric{"isthmus_agent_backends", "Backends in the kernel.", nil, prometheus.GaugeValue}
	metricWrites      = metric{"isthmus_agent_map_writes_total", "Writes to the BPF maps since the agent started.", nil, prometheus.CounterValue}
	metricDifferences = metric{"isthmus_agent_map_differences", "Entries of the BPF maps that the last check found changed, and corrected.", nil, prometheus.GaugeValue}
	metricChecked     = metric{"isthmus_agent_map_check_timestamp_seconds", "When the BPF maps were last checked.", nil, prometheus.GaugeValue}
	metricRecords     = metric{"isthmus_agent_dns_records", "DNS records in the zone.", nil, prometheus.GaugeValue}
	metricClusterDNS  = metric{"isthmus_agent_cluster_dns_answers", "1 if the cluster's DNS answers for clusterset.local, 0 if not; absent while unknown.", nil, prometheus.GaugeValue}
	metricProblems    = metric{"isthmus_agent_problems", "Parts of Services that cannot be served as asked, by reason; the status lists them.", []string{"reason"}, prometheus.GaugeValue}
	metricReserved    = metric{"isthmus_agent_labels_reserved", "1 if an admission policy reserves the labels of Isthmus, 0 if not; absent while unknown, and with --imports=any.", nil, prometheus.GaugeValue}
	metricRefusals    = metric{"isthmus_agent_refusals_total", "Clients refused since the BPF maps were created, by reason.", []string{"reason"}, prometheus.CounterValue}
	metricDrained     = metric{"isthmus_agent_drained", "1 for each member that does not answer packets from this node.", []string{"source_cluster"}, prometheus.GaugeValue}
	metricSynced      = metric{"isthmus_agent_last_sync_timestamp_seconds", "When a component applied the last snapshot.", []string{"component"}, prometheus.GaugeValue}

	metricEvicted = metric{"isthmus_agent_udp_vips_evicted_total", "VIPs of unconnected UDP sockets that were evicted for lack of space since the BPF maps were created; such a socket sees the backend's address in answers.", nil, prometheus.CounterValue}

	metricServiceConnections = metric{"isthmus_agent_service_connections_total", "Clients of a Service that got a backend on this node.", []string{"namespace", "service"}, prometheus.CounterValue}
	metricServiceRefusals    = metric{"isthmus_agent_service_refusals_total", "Clients of a Service that were refused on this node, by reason.", []string{"namespace", "service", "reason"}, prometheus.CounterValue}

	allMetrics = []metric{
		metricReady, metricServices, metricFrontends, metricBackends, metricWrites, metricDifferences, metricChecked, metricRecords,
		metricClusterDNS, metricProblems, metricReserved, metricRefusals, metricDrained, metricSynced, metricEvicted, metricServiceConnections, metricServiceRefusals,
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
	put(metricRecords, float64(s.DNS.Records))
	if s.DNS.Cluster != nil {
		put(metricClusterDNS, one(s.DNS.Cluster.Answers))
	}
	put(metricWrites, float64(s.Dataplane.Writes))
	put(metricDifferences, float64(s.Dataplane.Differences))
	for reason, n := range s.Dataplane.ProblemReasons {
		put(metricProblems, float64(n), reason)
	}
	if s.View.LabelsReserved != nil {
		put(metricReserved, one(*s.View.LabelsReserved))
	}
	for reason, n := range s.Dataplane.Refusals {
		put(metricRefusals, float64(n), reason)
	}
	for _, id := range s.Dataplane.Drained {
		put(metricDrained, 1, id)
	}
	for component, at := range map[string]time.Time{"dataplane": s.Dataplane.Synced, "dns": s.DNS.Synced} {
		if !at.IsZero() {
			put(metricSynced, seconds(at), component)
		}
	}
	if !s.Dataplane.Checked.IsZero() {
		put(metricChecked, seconds(s.Dataplane.Checked))
	}
	if n, err := m.evicted(); err == nil {
		put(metricEvicted, float64(n))
	} else {
		m.log.Error("count evicted VIPs of UDP sockets", "err", err)
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

// one returns 1 for true and 0 for false.
func one(is bool) float64 {
	if is {
		return 1
	}
	return 0
}

func seconds(at time.Time) float64 { return float64(at.UnixNano()) / 1e9 }
