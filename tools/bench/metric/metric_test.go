package metric

import (
	"math"
	"testing"
	"time"
)

func TestMet(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		metric Metric
		want   bool
	}{
		"lower, below":   {Metric{Value: 1.02, Bar: new(1.03), Better: Lower}, true},
		"lower, at":      {Metric{Value: 1.03, Bar: new(1.03), Better: Lower}, true},
		"lower, above":   {Metric{Value: 1.04, Bar: new(1.03), Better: Lower}, false},
		"higher, above":  {Metric{Value: 8, Bar: new(7.0), Better: Higher}, true},
		"higher, below":  {Metric{Value: 6, Bar: new(7.0), Better: Higher}, false},
		"without a bar":  {Metric{Value: 6}, true},
		"not a number":   {Metric{Value: math.NaN(), Bar: new(7.0), Better: Higher}, false},
		"beyond numbers": {Metric{Value: math.Inf(1), Bar: new(7.0), Better: Higher}, false},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if have := tc.metric.Met(); have != tc.want {
				t.Errorf("%+v: met = %t", tc.metric, have)
			}
		})
	}
}

func TestMedian(t *testing.T) {
	t.Parallel()
	for want, values := range map[float64][]float64{1: {1}, 2: {3, 1, 2}, 2.5: {4, 1, 3, 2}} {
		if got := Median(values); got != want {
			t.Errorf("Median(%v) = %v, want %v", values, got, want)
		}
	}
}

// A round that is slow for both sides does not count twice.
func TestMedianRatio(t *testing.T) {
	t.Parallel()
	value := func(ms int) float64 { return Milliseconds(time.Duration(ms) * time.Millisecond) }
	if have := MedianRatio([]int{20, 200, 30}, []int{10, 100, 10}, value); have != 2 {
		t.Errorf("ratio %v, want 2", have)
	}
	if have := MedianOf([]int{20, 200, 30}, value); have != 30 {
		t.Errorf("median %v, want 30", have)
	}
}
