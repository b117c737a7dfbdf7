package httpserver

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

// The reasons of refusals, which are labels of a metric. docs/http.md lists them.
const (
	noToken           = "no_token"
	noCertificate     = "no_certificate"
	notLocal          = "not_local"
	requestRate       = "request_rate"
	connectionRate    = "connection_rate"
	sourceConnections = "source_connections"
	connections       = "connections"
	evicted           = "evicted"

	// InvalidToken and those below are the reasons of package reviews.
	InvalidToken = "invalid_token"
	Forbidden    = "forbidden"
	FailureRate  = "failure_rate"
	Unavailable  = "unavailable"
	NoToken      = noToken
)

// Reasons returns all reasons of refusals.
func Reasons() []string {
	return []string{
		noToken, InvalidToken, Forbidden, noCertificate, notLocal, FailureRate, Unavailable,
		requestRate, connectionRate, sourceConnections, connections, evicted,
	}
}

// Refusals counts refused requests and connections by reason.
type Refusals struct{ by map[string]*atomic.Uint64 }

func newRefusals() *Refusals {
	r := &Refusals{map[string]*atomic.Uint64{}}
	for _, reason := range Reasons() {
		r.by[reason] = new(atomic.Uint64)
	}
	return r
}

func (r *Refusals) add(reason string) { r.by[reason].Add(1) }

// Count returns how many were refused for a reason.
func (r *Refusals) Count(reason string) uint64 { return r.by[reason].Load() }

func (l *Listener) metricRefused() *prometheus.Desc {
	return prometheus.NewDesc("isthmus_http_refused_total", "Requests and connections refused, by reason.", []string{"reason"}, prometheus.Labels{"listener": l.limits.Name})
}

func (l *Listener) metricConnections() *prometheus.Desc {
	return prometheus.NewDesc("isthmus_http_connections", "Open connections.", nil, prometheus.Labels{"listener": l.limits.Name})
}

// Describe implements prometheus.Collector.
func (l *Listener) Describe(ch chan<- *prometheus.Desc) {
	ch <- l.metricRefused()
	ch <- l.metricConnections()
}

// Collect implements prometheus.Collector.
func (l *Listener) Collect(ch chan<- prometheus.Metric) {
	refused := l.metricRefused()
	for _, reason := range Reasons() {
		ch <- prometheus.MustNewConstMetric(refused, prometheus.CounterValue, float64(l.Refused.Count(reason)), reason)
	}
	ch <- prometheus.MustNewConstMetric(l.metricConnections(), prometheus.GaugeValue, float64(l.Open()))
}
