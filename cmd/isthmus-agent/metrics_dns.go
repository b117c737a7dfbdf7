package main

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/isthmus-net/isthmus/dns"
)

// dnsMetrics is what the node's name server knows as Prometheus metrics, read when they are scraped. While it has no
// sockets there are none, and its counters begin anew with its sockets.
type dnsMetrics struct {
	// current says false while there is no server.
	current func() (dns.Status, bool)
}

// allDNSMetrics are those of the name server; docs/dataplane.md lists them behind the others.
var (
	metricDNSAnswers = metric{"isthmus_agent_dns_answers_total", "Answers by path (fast or slow over UDP, tcp, or kernel), type of question and code.", []string{"path", "type", "rcode"}, prometheus.CounterValue}
	metricDNSIgnored = metric{"isthmus_agent_dns_ignored_total", "Messages that deserved no answer.", nil, prometheus.CounterValue}
	metricDNSLimited = metric{"isthmus_agent_dns_limited_total", "Answers held back or cut short because their client asked too often.", nil, prometheus.CounterValue}
	metricDNSRefused = metric{"isthmus_agent_dns_refused_connections_total", "TCP connections that were one too many.", nil, prometheus.CounterValue}
	metricDNSBarred  = metric{"isthmus_agent_dns_barred_total", "Questions on the addresses for guests of clients that may not ask there, which were refused.", nil, prometheus.CounterValue}
	metricDNSDropped = metric{"isthmus_agent_dns_dropped_total", "Questions that the kernel dropped because the sockets were full.", nil, prometheus.CounterValue}
	metricDNSNames   = metric{"isthmus_agent_dns_names", "Names that exist in the zone.", nil, prometheus.GaugeValue}
	metricDNSSkipped = metric{"isthmus_agent_dns_skipped", "Names that cannot be in DNS, by their characters or their length; the log has them.", nil, prometheus.GaugeValue}
	metricDNSChanged = metric{"isthmus_agent_dns_zone_timestamp_seconds", "When what is answered last changed.", nil, prometheus.GaugeValue}
	metricDNSOld     = metric{"isthmus_agent_dns_old", "1 while what is answered was known before the agent started, and the API server has said nothing yet.", nil, prometheus.GaugeValue}
	metricDNSUnkept  = metric{"isthmus_agent_dns_unkept", "1 when the names could not be read from the file that keeps them over a restart, or written there.", nil, prometheus.GaugeValue}
	metricDNSUpdates = metric{"isthmus_agent_dns_update_seconds", "How long it took from a changed world to answers from it (a histogram).", nil, prometheus.UntypedValue}

	allDNSMetrics = []metric{
		metricDNSAnswers, metricDNSIgnored, metricDNSLimited, metricDNSRefused, metricDNSBarred, metricDNSDropped, metricDNSNames, metricDNSSkipped,
		metricDNSChanged, metricDNSOld, metricDNSUnkept, metricDNSUpdates,
	}
)

// Describe is part of prometheus.Collector.
func (dnsMetrics) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range allDNSMetrics {
		ch <- m.desc()
	}
}

// Collect is part of prometheus.Collector.
func (m dnsMetrics) Collect(ch chan<- prometheus.Metric) {
	s, ok := m.current()
	if !ok {
		return
	}
	put := func(m metric, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(m.desc(), m.kind, v, labels...)
	}
	for _, a := range s.Counts.Answers {
		put(metricDNSAnswers, float64(a.Messages), a.Path, a.Type, a.Rcode)
	}
	put(metricDNSIgnored, float64(s.Counts.Ignored))
	put(metricDNSLimited, float64(s.Counts.Limited))
	put(metricDNSRefused, float64(s.Counts.Refused))
	put(metricDNSBarred, float64(s.Counts.Barred))
	put(metricDNSDropped, float64(s.Counts.Dropped))
	put(metricDNSNames, float64(s.Names))
	put(metricDNSSkipped, float64(len(s.Skipped)))
	if s.Synced {
		put(metricDNSChanged, seconds(s.SyncedAt))
	}
	put(metricDNSOld, one(s.Old))
	put(metricDNSUnkept, one(s.FileErr != nil))
	buckets := map[float64]uint64{}
	for i, bound := range dns.UpdateBuckets {
		buckets[bound] = s.Updates.Buckets[i]
	}
	ch <- prometheus.MustNewConstHistogram(metricDNSUpdates.desc(), s.Updates.Count, s.Updates.Sum, buckets)
}
