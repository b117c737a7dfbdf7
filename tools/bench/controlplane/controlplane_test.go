package controlplane

import (
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/tools/apitest"
	"github.com/isthmus-net/isthmus/tools/bench/metric/metrictest"
	"github.com/isthmus-net/isthmus/tools/scale/simulation"
)

// TestRun runs one round at the smallest sizes, with one testbed for all parts: every row has a value. The values only mean
// something on a quiet machine and at the promised sizes.
func TestRun(t *testing.T) {
	apitest.Require(t)
	few := simulation.Config{Members: 2, Exports: 3, Endpoints: 2, Exporter: true}
	s := sizes{
		pair: few, pairRate: 20, many: few, manyRate: 20, large: few, wide: few,
		quotas: v1alpha1.Quotas{Services: 10, Slices: 10, StorageBytes: 1 << 20},
		turn:   time.Second, rest: time.Second, imports: 1,
	}
	rows, err := run(t.Context(), s, 1, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	metrictest.Check(t, rows, 27)
	for _, r := range rows {
		if r.Unit == "MiB" && r.Value == 0 && !strings.Contains(r.Name, "growth of the import") { // a second's worth may vanish in noise
			t.Errorf("%s: 0 MiB", r.Name)
		}
	}
}

func TestArrived(t *testing.T) {
	t.Parallel()
	if err := arrived(simulation.Propagation{Changes: 5}); err != nil {
		t.Error(err)
	}
	if arrived(simulation.Propagation{Changes: 5, Missing: 1}) == nil {
		t.Error("a change that never arrived returns no error")
	}
}
