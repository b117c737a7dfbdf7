package gateway

import (
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/tools/bench/metric"
)

// The bars match the promise: no connection breaks, a change takes 50 ms at most, and a Service answers within 5 s.
func TestGroupRows(t *testing.T) {
	t.Parallel()
	ms := time.Millisecond
	seen := func(broken int, change time.Duration) map[desired.Balancer]*whole {
		all := map[desired.Balancer]*whole{}
		for _, b := range balancers {
			w := &whole{broken: map[string]int{}, opened: 1000, changes: []time.Duration{change, change, change}, memory: []float64{30}}
			for _, way := range ways {
				w.broken[way.name] = broken
			}
			all[b.kind] = w
		}
		return all
	}
	for name, tc := range map[string]struct {
		rows []metric.Metric
		want int
		met  bool
	}{
		"none broken":   {deathRows(seen(0, 0)), 4, true},
		"one broken":    {deathRows(seen(1, 0)), 4, false},
		"quick changes": {changeRows(seen(0, 50*ms)), 6, true},
		"slow changes":  {changeRows(seen(0, 51*ms)), 6, false},
		"an answer":     {serviceRows([]time.Duration{5 * time.Second}), 2, true},
		"a late answer": {serviceRows([]time.Duration{5001 * ms}), 2, false},
	} {
		if len(tc.rows) != tc.want {
			t.Errorf("%s: %d rows, want %d", name, len(tc.rows), tc.want)
		}
		for _, r := range tc.rows {
			if r.Bar != nil && r.Met() != tc.met {
				t.Errorf("%s: %s is %v: met is %v", name, r.Name, r.Value, r.Met())
			}
		}
	}
}

// The changed state has as many VIPs as its row says, and is valid.
func TestManyVIPs(t *testing.T) {
	t.Parallel()
	s := desired.State{Cluster: "bench", Group: "bench", Balancer: desired.EBPF, VIPs: manyVIPs(), BGP: speaker(0)}
	if faults := s.Validate(); len(faults) > 0 || len(s.VIPs) != many || len(s.VIPs[0].Frontends[0].Backends) != serverCount {
		t.Errorf("%d VIPs, %v", len(s.VIPs), faults)
	}
}
