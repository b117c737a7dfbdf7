// Package metrictest checks the rows of benchmarks in tests.
package metrictest

import (
	"math"
	"testing"

	"github.com/isthmus-net/isthmus/tools/bench/metric"
)

// Check reports rows without a plausible value, and a wrong number of rows. A bar of 0 counts events that
// never happen, so it must be met.
func Check(t testing.TB, rows []metric.Metric, want int) {
	t.Helper()
	if len(rows) != want {
		t.Errorf("%d rows, want %d", len(rows), want)
	}
	for _, r := range rows {
		if math.IsNaN(r.Value) || math.IsInf(r.Value, 0) || r.Value < 0 || r.Bar != nil && *r.Bar == 0 && r.Value != 0 {
			t.Errorf("%s: %v %s is not plausible", r.Name, r.Value, r.Unit)
		}
		t.Logf("%-100s %8.2f %s", r.Name, r.Value, r.Unit)
	}
}
