// Package propagation measures how long a changed endpoint takes to travel from one member to another, by stage.
package propagation

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Stage is a part of the path from the exporter to the importer.
type Stage string

// The stages. Total is their sum, measured by the importing member.
const (
	Export Stage = "export" // from the exporter's watch event until the broker has it
	Broker Stage = "broker" // from the exporter's watch event until the importer's
	Import Stage = "import" // from the importer's watch event until its own API server has it
	Total  Stage = "total"
)

var (
	seconds = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "isthmus_endpoint_propagation_seconds",
		Help:    "Time that a changed endpoint takes from one member to another, by stage and exporting member.",
		Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60},
	}, []string{"stage", "source_cluster"})
	negative = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "isthmus_endpoint_propagation_negative_total",
		Help: "Durations that were negative because two clocks differ by more than the measured offset; they count as zero.",
	}, []string{"stage", "source_cluster"})
)

func init() { metrics.Registry.MustRegister(seconds, negative) }

// Observe records a duration. The caller corrects one between two clocks by their offset.
func Observe(stage Stage, source clusterset.ClusterID, d time.Duration) {
	if d < 0 {
		negative.WithLabelValues(string(stage), string(source)).Inc()
		d = 0
	}
	seconds.WithLabelValues(string(stage), string(source)).Observe(d.Seconds())
}

// Forget removes the series of a member that left.
func Forget(source clusterset.ClusterID) {
	of := prometheus.Labels{"source_cluster": string(source)}
	seconds.DeletePartialMatch(of)
	negative.DeletePartialMatch(of)
}

// Since tracks the arrival of the oldest unprocessed change of each Service. The zero Since is empty. Safe for concurrent
// use.
type Since struct {
	mu    sync.Mutex
	began map[clusterset.ServiceName]time.Time
}

// Mark records a change of name at t.
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

// Take removes and returns the arrival of the oldest change of name; without one it returns the current time.
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
