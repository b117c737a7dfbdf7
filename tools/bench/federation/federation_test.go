package federation

import (
	"math"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/tools/apitest"
	"github.com/isthmus-net/isthmus/tools/scale/simulation"
)

// One round with next to nothing in it, to see that every row comes out; what the rows say is for a quiet machine and
// the promised sizes.
func TestRun(t *testing.T) {
	apitest.Require(t)
	few := simulation.FederationConfig{Members: 2, Supervisors: 1, Services: 2, Endpoints: 2}
	more, most, whole := few, few, few
	more.Members, most.Members = 3, 4
	whole.ClusterSetIPs, whole.Policies = true, 2
	rows, err := run(t.Context(), sizes{changing: few, rate: 20, turn: time.Second, rest: time.Second, growing: []simulation.FederationConfig{few, more, most}, whole: whole}, 1, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	const want = 3 + 3*3 + 2*3 + 1 // of changes; of three sizes; of two steps between them; of everything
	if len(rows) != want {
		t.Errorf("%d rows, want %d", len(rows), want)
	}
	for _, r := range rows {
		if math.IsNaN(r.Value) || math.IsInf(r.Value, 0) || r.Value < 0 || r.Bar != nil && *r.Bar == 0 && r.Value != 0 {
			t.Errorf("%s: %v %s is no measurement", r.Name, r.Value, r.Unit)
		}
		t.Logf("%-100s %8.2f %s", r.Name, r.Value, r.Unit)
	}
}
