package main

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/isthmus-net/isthmus/dns"
)

// dnsMetrics collects the metrics of the name server. It reads them at each scrape. There are none while the server has no
// sockets, and the counters restart when it opens new ones.
type dnsMetrics struct {
	// current returns false while there is no server.
	current func() (dns.Status, bool)
}

// docs/dataplane.md lists these metrics after the others; a test compares.
var (
	metricDNSAnswers    = metric{"isthmus_agent_dns_answers_total", "Answers by path (fast or slow over UDP, tcp, or kernel), type of question and response code.", []string{"path", "type", "rcode"}, prometheus.CounterValue}
	metricDNSIgnored    = metric{"isthmus_agent_dns_ignored_total", "Messages that were not questions and got no answer.", nil, prometheus.CounterValue}
	metricDNSLimited    = metric{"isthmus_agent_dns_limited_total", "Answers dropped or truncated by the rate limit.", nil, prometheus.CounterValue}
	metricDNSRefused    = metric{"isthmus_agent_dns_refused_connections_total", "TCP connections closed by a limit, by reason: the client's share (client), all connections of pods, neighbours or strangers, an oversized question, or unread answers.", []string{"reason"}, prometheus.CounterValue}
	metricDNSACLRefused = metric{"isthmus_agent_dns_acl_refused_total", "Questions of clients that are not allowed at the node-local addresses for pods, at an address of the node, or at one for external clients (listener): refused, or dropped beyond the limit (outcome).", []string{"listener", "outcome"}, prometheus.CounterValue}
	metricDNSDropped    = metric{"isthmus_agent_dns_dropped_total", "Questions that the kernel dropped because a receive buffer was full.", nil, prometheus.CounterValue}
	metricDNSNames      = metric{"isthmus_agent_dns_names", "Names that exist in the zone.", nil, prometheus.GaugeValue}
	metricDNSSkipped    = metric{"isthmus_agent_dns_skipped", "Services without a valid DNS name, or without all of theirs; the log lists them.", nil, prometheus.GaugeValue}
	metricDNSChanged    = metric{"isthmus_agent_dns_zone_timestamp_seconds", "When the zone last changed.", nil, prometheus.GaugeValue}
	metricDNSStale      = metric{"isthmus_agent_dns_stale", "1 while the zone comes from the zone file, because the API server has not been read yet.", nil, prometheus.GaugeValue}
	metricDNSFileError  = metric{"isthmus_agent_dns_zone_file_error", "1 if the last read or write of the zone file failed.", nil, prometheus.GaugeValue}
	metricDNSUpdates    = metric{"isthmus_agent_dns_update_seconds", "Time from a changed snapshot to answers from it (a histogram).", nil, prometheus.UntypedValue}

	allDNSMetrics = []metric{
		metricDNSAnswers, metricDNSIgnored, metricDNSLimited, metricDNSRefused, metricDNSACLRefused, metricDNSDropped, metricDNSNames, metricDNSSkipped,
		metricDNSChanged, metricDNSStale, metricDNSFileError, metricDNSUpdates,
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
	for _, reason := range dns.ConnReasons {
		put(metricDNSRefused, float64(s.Counts.Refused[reason]), reason)
	}
	for _, r := range dns.ACLRefusals {
		put(metricDNSACLRefused, float64(s.Counts.ACLRefused[r]), r.Listener, r.Outcome)
	}
	put(metricDNSDropped, float64(s.Counts.Dropped))
	put(metricDNSNames, float64(s.Names))
	put(metricDNSSkipped, float64(len(s.Skipped)))
	if s.Synced {
		put(metricDNSChanged, seconds(s.SyncedAt))
	}
	put(metricDNSStale, one(s.Stale))
	put(metricDNSFileError, one(s.FileErr != nil))
	buckets := map[float64]uint64{}
	for i, bound := range dns.UpdateBuckets {
		buckets[bound] = s.Updates.Buckets[i]
	}
	ch <- prometheus.MustNewConstHistogram(metricDNSUpdates.desc(), s.Updates.Count, s.Updates.Sum, buckets)
}
