package engine

import (
	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
)

var (
	memberReachable = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "isthmus_federation_member_reachable",
		Help: "1 while the member's API server answers and belongs to the member, else 0.",
	}, []string{"member"})
	memberLed = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "isthmus_federation_member_led",
		Help: "1 while this process leads the member, else 0.",
	}, []string{"member"})
	syncSeconds = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "isthmus_federation_sync_seconds",
		Help:    "Time to reconcile one federated Service or policy in one member.",
		Buckets: prometheus.ExponentialBuckets(0.001, 4, 8),
	}, []string{"component"})
	syncErrors = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "isthmus_federation_sync_errors_total",
		Help: "Failed reconciliations of a federated Service or policy in a member, conflicts excluded.",
	}, []string{"component"})
)

func init() { metrics.Registry.MustRegister(memberReachable, memberLed, syncSeconds, syncErrors) }

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
