package liveness

import (
	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

var (
	memberState = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "isthmus_controller_member_state",
		Help: "1 for the current state of another member, 0 for its other states: live, stale (its lease is old, its endpoints stay), unproven (it renews again, but not for long enough), dead.",
	}, []string{"source_cluster", "state"})
	transitions = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "isthmus_controller_member_transitions_total",
		Help: "Transitions of another member into a state.",
	}, []string{"source_cluster", "state"})
	heartbeat = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "isthmus_controller_heartbeat_seen",
		Help: "1 while this member sees the renewals of its own lease on the broker; while it is 0, no member is declared dead.",
	})
	minimumLive = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "isthmus_controller_minimum_live",
		Help: "1 while all other members are silent at once, so that none of them is declared dead.",
	})
)

func init() { metrics.Registry.MustRegister(memberState, transitions, heartbeat, minimumLive) }

// setStateMetric sets memberState for a member.
func (t *Tracker) setStateMetric(id clusterset.ClusterID, state State) {
	if t.cfg.Unmetered {
		return
	}
	for s := Live; s <= Dead; s++ {
		value := 0.0
		if s == state {
			value = 1
		}
		memberState.WithLabelValues(string(id), s.String()).Set(value)
	}
}

// deleteStateMetric removes a member from memberState.
func (t *Tracker) deleteStateMetric(id clusterset.ClusterID) {
	if t.cfg.Unmetered {
		return
	}
	memberState.DeletePartialMatch(prometheus.Labels{"source_cluster": string(id)})
}

// flag sets a gauge to 1 or 0.
func (t *Tracker) flag(g prometheus.Gauge, on bool) {
	if t.cfg.Unmetered {
		return
	}
	value := 0.0
	if on {
		value = 1
	}
	g.Set(value)
}
