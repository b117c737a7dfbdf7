package withdrawal

import (
	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

var (
	heldServices = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "isthmus_controller_held_services",
		Help: "Services of a member that vanished at once and without a word, and are kept nevertheless.",
	}, []string{"source_cluster"})
	withdrawalsHeld = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "isthmus_controller_withdrawals_held_total",
		Help: "Services that vanished and were not believed to be gone.",
	}, []string{"source_cluster"})
)

func init() { metrics.Registry.MustRegister(heldServices, withdrawalsHeld) }

// gauge is one guard's part of heldServices, to which all guards of a process add up.
type gauge map[clusterset.ClusterID]int

// show makes held what this guard adds.
func (g gauge) show(held map[clusterset.ClusterID]int) {
	for id, n := range held {
		if d := n - g[id]; d != 0 {
			heldServices.WithLabelValues(string(id)).Add(float64(d))
			g[id] = n
		}
	}
	for id, n := range g {
		if _, ok := held[id]; !ok {
			heldServices.WithLabelValues(string(id)).Sub(float64(n))
			delete(g, id)
		}
	}
}
