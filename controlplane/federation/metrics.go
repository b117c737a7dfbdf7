package federation

import (
	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
)

var (
	memberReachable = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "isthmus_federation_member_reachable",
		Help: "1 while the member's API server answers and is that of the member, else 0.",
	}, []string{"member"})
	memberLed = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "isthmus_federation_member_led",
		Help: "1 while this process leads the member, else 0.",
	}, []string{"member"})
	syncSeconds = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "isthmus_federation_sync_seconds",
		Help:    "How long it took to bring one thing in line in one member.",
		Buckets: prometheus.ExponentialBuckets(0.001, 4, 8),
	}, []string{"part"})
	syncErrors = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "isthmus_federation_sync_errors_total",
		Help: "How often something could not be brought in line in a member, conflicts apart.",
	}, []string{"part"})
)

func init() { metrics.Registry.MustRegister(memberReachable, memberLed, syncSeconds, syncErrors) }

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
