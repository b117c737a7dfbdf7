// Package metric is what a benchmark gives: one row of its table.
package metric

import (
	"math"
	"slices"
)

// The ways in which a value can be better.
const (
	Lower  = "lower"
	Higher = "higher"
)

// Metric is one measured number and what it is held against: Bar: new(1.03).
type Metric struct {
	Name   string   `json:"name"`
	Value  float64  `json:"value"`
	Unit   string   `json:"unit"`   // such as "ratio", "us", "1/s", "MB"
	Bar    *float64 `json:"bar"`    // what the value must reach; nil: it is shown and not judged
	Better string   `json:"better"` // Lower or Higher
	Peer   *float64 `json:"peer"`   // what the best known peer reaches, measured beside it; nil: not measured
	Limit  *float64 `json:"limit"`  // what the machine allows at best, measured beside it; nil: not measured
	// Quartiles are between what the middle half of all that Value is the median of lies; nil: not told.
	Quartiles *[2]float64 `json:"quartiles,omitempty"`
	// Why is what keeps the value from the bar on this machine, to be said when it does not reach it; "": nothing does.
	Why string `json:"why,omitempty"`
}

// Met reports whether the value reaches the bar. Without a bar it does; a value that is no number never
// does.
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

// Median returns the middle of values, the mean of the two middle ones when their number is even. It sorts them. There
// must be one.
func Median(values []float64) float64 {
	slices.Sort(values)
	n := len(values)
	return (values[(n-1)/2] + values[n/2]) / 2
}
