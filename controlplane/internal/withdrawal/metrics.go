package withdrawal

import (
	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

var (
	heldServices = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "isthmus_controller_held_services",
		Help: "Exports of a member that vanished together without being withdrawn and are held.",
	}, []string{"source_cluster"})
	withdrawalsHeld = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "isthmus_controller_withdrawals_held_total",
		Help: "Exports of a member that vanished without being withdrawn and were held.",
	}, []string{"source_cluster"})
)

func init() { metrics.Registry.MustRegister(heldServices, withdrawalsHeld) }

// gauge is the contribution of one Guard to heldServices, the sum over all Guards of a process.
type gauge map[clusterset.ClusterID]int

// set makes held the contribution of this Guard.
func (g gauge) set(held map[clusterset.ClusterID]int) {
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
