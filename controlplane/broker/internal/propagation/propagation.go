// Package propagation measures how long a change of an endpoint is on its way from one member to another,
// hop by hop.
package propagation

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Stage is a part of the way.
type Stage string

// The stages. The last one is the sum of the others, seen by the importing member.
const (
	Export Stage = "export" // from the exporter's watch event until the broker has it
	Broker Stage = "broker" // from the exporter's watch event until the importer's
	Import Stage = "import" // from the importer's watch event until its own API server has it
	Total  Stage = "total"
)

var (
	seconds = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "isthmus_endpoint_propagation_seconds",
		Help:    "How long a changed endpoint needs to get from one member to another, by stage and by the member it comes from.",
		Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60},
	}, []string{"stage", "source_cluster"})
	negative = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "isthmus_endpoint_propagation_negative_total",
		Help: "Durations that came out negative, by clocks that differ more than was learned of them, and were counted as zero.",
	}, []string{"stage", "source_cluster"})
)

func init() { metrics.Registry.MustRegister(seconds, negative) }

// Observe notes a duration. One between two clocks must be corrected before.
func Observe(stage Stage, source clusterset.ClusterID, d time.Duration) {
	if d < 0 {
		negative.WithLabelValues(string(stage), string(source)).Inc()
		d = 0
	}
	seconds.WithLabelValues(string(stage), string(source)).Observe(d.Seconds())
}

// Since remembers when the oldest change of each Service came that nobody has dealt with yet. The zero Since
// is empty. Safe for concurrent use.
type Since struct {
	mu    sync.Mutex
	began map[clusterset.ServiceName]time.Time
}

// Mark notes that something about name changed at t.
func (s *Since) Mark(name clusterset.ServiceName, t time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.began == nil {
		s.began = map[clusterset.ServiceName]time.Time{}
	}
	if old, ok := s.began[name]; !ok || t.Before(old) {
		s.began[name] = t
	}
}

// Take returns when the oldest change of name came, now if none is known, and forgets it.
func (s *Since) Take(name clusterset.ServiceName) time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	t, ok := s.began[name]
	if !ok {
		return time.Now()
	}
	delete(s.began, name)
	return t
}
