package federation

import (
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/tools/apitest"
	"github.com/isthmus-net/isthmus/tools/bench/metric/metrictest"
	"github.com/isthmus-net/isthmus/tools/scale/simulation"
)

// TestRun runs one round at the smallest sizes: every row has a value. The values only mean something on a quiet machine and at
// the promised sizes.
func TestRun(t *testing.T) {
	apitest.Require(t)
	few := simulation.FederationConfig{Members: 2, Supervisors: 1, Services: 2, Endpoints: 2}
	more, whole := few, few
	more.Members = 3
	whole.ClusterSetIPs, whole.Policies = true, 2
	rows, err := run(t.Context(), sizes{changing: few, rate: 20, turn: time.Second, rest: time.Second, growing: []simulation.FederationConfig{few, more}, whole: whole}, 1, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	const want = 3 + 2*3 + 1*3 + 1 // changes; two sizes; the step between them; all features
	metrictest.Check(t, rows, want)
}
