// Package metric describes the rows of a benchmark's table, and the medians that they are made of.
package metric

import (
	"math"
	"slices"
	"time"
)

// The values of Metric.Better.
const (
	Lower  = "lower"
	Higher = "higher"
)

// Metric is one measured number and the values to compare it with, such as Bar: new(1.03).
type Metric struct {
	Name   string   `json:"name"`
	Value  float64  `json:"value"`
	Unit   string   `json:"unit"`   // such as "ratio", "us", "1/s", "MB"
	Bar    *float64 `json:"bar"`    // the value to reach; nil: the row is informative
	Better string   `json:"better"` // Lower or Higher
	Peer   *float64 `json:"peer"`   // the best known peer's value, measured beside it; nil: not measured
	Limit  *float64 `json:"limit"`  // the best value possible on the machine, measured beside it; nil: not measured
	// Quartiles are the first and the third quartile of the values that Value is the median of; nil: not given.
	Quartiles *[2]float64 `json:"quartiles,omitempty"`
	// Why explains why this machine cannot reach the bar. It is shown when the bar is missed; "": no explanation.
	Why string `json:"why,omitempty"`
}

// Met reports whether the value reaches the bar. It does if there is no bar. NaN and infinities never reach a bar.
func (m Metric) Met() bool {
	switch {
	case m.Bar == nil:
		return true
	case math.IsNaN(m.Value) || math.IsInf(m.Value, 0):
		return false
	case m.Better == Higher:
		return m.Value >= *m.Bar
	default:
		return m.Value <= *m.Bar
	}
}

// Median returns the median of values, of which there is at least one. It sorts them.
func Median(values []float64) float64 {
	slices.Sort(values)
	n := len(values)
	return (values[(n-1)/2] + values[n/2]) / 2
}

// MedianOf returns the median of the values of samples.
func MedianOf[T any](samples []T, value func(T) float64) float64 {
	values := make([]float64, len(samples))
	for i, s := range samples {
		values[i] = value(s)
	}
	return Median(values)
}

// MedianRatio returns the median of the ratios of values in a and b, taken pair by pair: a[i] and b[i] are of the same round.
func MedianRatio[T any](a, b []T, value func(T) float64) float64 {
	ratios := make([]float64, len(a))
	for i := range a {
		ratios[i] = value(a[i]) / value(b[i])
	}
	return Median(ratios)
}

// Milliseconds returns d in milliseconds.
func Milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// Microseconds returns d in microseconds.
func Microseconds(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }
