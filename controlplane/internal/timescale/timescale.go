// Package timescale shortens or stretches the timers of a controller, so that a test or a drill sees a failover in
// seconds.
package timescale

import "time"

// Factor multiplies durations: 0.1 makes everything ten times as fast. The zero value counts as 1. All clusters of a
// ClusterSet need the same Factor, or one of them takes a healthy peer for dead.
type Factor float64

// Scale returns d multiplied by f.
func (f Factor) Scale(d time.Duration) time.Duration {
	if f == 0 {
		return d
	}
	return time.Duration(float64(d) * float64(f))
}
