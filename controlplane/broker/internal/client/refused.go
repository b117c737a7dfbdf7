package client

import (
	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// The values of the label field for a whole record, and for the addresses of endpoints.
const (
	kindRecord  = "record"
	kindAddress = "endpoints.addresses"
)

var refused = prometheus.NewCounterVec(prometheus.CounterOpts{
	Name: "isthmus_controller_refused_total",
	Help: "Versions of objects on the broker of which this member ignores a field, by the member that wrote it; the log names object and remedy.",
}, []string{"source_cluster", "field"})

func init() { metrics.Registry.MustRegister(refused) }

// refuse logs and counts, once for each version of an object, that a field of member id is ignored. id is registered, so the
// metric is bounded.
func (b *Broker) refuse(id clusterset.ClusterID, field, version string, err error) {
	if b.registry.warnOnce(id, version, err) {
		refused.WithLabelValues(string(id), field).Inc()
	}
}
