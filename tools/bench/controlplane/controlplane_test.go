package controlplane

import (
	"math"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/tools/apitest"
	"github.com/isthmus-net/isthmus/tools/scale/simulation"
)

// One round with next to nothing in it, and one ClusterSet for all parts, to see that every row comes out; what the
// rows say is for a quiet machine and the promised sizes.
func TestRun(t *testing.T) {
	apitest.Require(t)
	few := simulation.Config{Members: 2, Exports: 3, Endpoints: 2, Exporter: true}
	s := sizes{
		pair: few, pairRate: 20, many: few, manyRate: 20, large: few, wide: few,
		turn: time.Second, rest: time.Second, imports: 1,
	}
	rows, err := run(t.Context(), s, 1, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	if len(rows) != 19 {
		t.Errorf("%d rows, want 19", len(rows))
	}
	for _, r := range rows {
		if math.IsNaN(r.Value) || math.IsInf(r.Value, 0) || r.Value < 0 || r.Unit == "MiB" && r.Value == 0 {
			t.Errorf("%s: %v %s is no measurement", r.Name, r.Value, r.Unit)
		}
		if r.Bar != nil && *r.Bar == 0 && r.Value != 0 {
			t.Errorf("%s: %v %s", r.Name, r.Value, r.Unit)
		}
		t.Logf("%-100s %8.2f %s", r.Name, r.Value, r.Unit)
	}
}

func TestRatioIsOfRounds(t *testing.T) {
	t.Parallel()
	at := func(ms ...int) []simulation.Propagation {
		var p []simulation.Propagation
		for _, m := range ms {
			p = append(p, simulation.Propagation{P50: time.Duration(m) * time.Millisecond})
		}
		return p
	}
	if have := ratio(at(20, 200, 30), at(10, 100, 10), p50); have != 2 {
		t.Errorf("ratio %v, want 2: a round that is slow on both paths does not count twice", have)
	}
	if have := over(at(20, 200, 30), p50); have != 30 {
		t.Errorf("median %v, want 30", have)
	}
}

func TestArrived(t *testing.T) {
	t.Parallel()
	if err := arrived(simulation.Propagation{Changes: 5}); err != nil {
		t.Error(err)
	}
	if arrived(simulation.Propagation{Changes: 5, Missing: 1}) == nil {
		t.Error("a change that never arrived is no error")
	}
}
