package liveness

import (
	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

var (
	memberState = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "isthmus_controller_member_state",
		Help: "1 for the state that another member is in, 0 for the others: live, stale (its lease is old, its endpoints stay), unproven (it renews again, but not for long enough), dead.",
	}, []string{"source_cluster", "state"})
	transitions = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "isthmus_controller_member_transitions_total",
		Help: "How often another member came into a state.",
	}, []string{"source_cluster", "state"})
	heartbeat = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "isthmus_controller_heartbeat_seen",
		Help: "1 while the renewals of this member's own lease come back from the broker; while it is 0, no member is judged.",
	})
	floor = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "isthmus_controller_liveness_floor",
		Help: "1 while all other members seem to be gone at once, so that none of them is judged.",
	})
)

func init() { metrics.Registry.MustRegister(memberState, transitions, heartbeat, floor) }

// show makes memberState say that a member is in a state.
func show(id clusterset.ClusterID, state State) {
	for s := Live; s <= Dead; s++ {
		value := 0.0
		if s == state {
			value = 1
		}
		memberState.WithLabelValues(string(id), s.String()).Set(value)
	}
}

// hide removes a member from memberState.
func hide(id clusterset.ClusterID) {
	memberState.DeletePartialMatch(prometheus.Labels{"source_cluster": string(id)})
}

// flag sets a gauge to 1 or 0.
func flag(g prometheus.Gauge, on bool) {
	value := 0.0
	if on {
		value = 1
	}
	g.Set(value)
}
