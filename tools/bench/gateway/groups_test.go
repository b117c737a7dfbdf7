package gateway

import (
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/tools/bench/metric"
)

// The bars match the promise: no connection breaks, a change takes 50 ms at most, a Service answers within 5 s, and gateways that serve at
// once cost a twentieth at most and lose nothing.
func TestGroupRows(t *testing.T) {
	t.Parallel()
	ms := time.Millisecond
	seen := func(broken int, change time.Duration) map[desired.Balancer]*whole {
		all := map[desired.Balancer]*whole{}
		for _, b := range balancers {
			w := &whole{broken: map[string]int{}, opened: 1000, changes: []time.Duration{change, change, change}, memory: []float64{30}, loads: []float64{1}, loaded: []float64{30}}
			for _, way := range ways {
				w.broken[way.name] = broken
			}
			all[b.kind] = w
		}
		return all
	}
	active := func(ratio float64, lost int, outage time.Duration, broken int) map[desired.Balancer]*actives {
		all := map[desired.Balancer]*actives{}
		for _, b := range balancers {
			a := &actives{ratios: map[desired.Return][]float64{}, handed: []float64{2}, agents: []float64{1}, all: 1000, lost: lost, outages: []time.Duration{outage}, opened: 100, perished: 20, broken: map[desired.Return]int{desired.SNAT: broken}}
			for _, way := range returns {
				a.ratios[way] = []float64{ratio}
			}
			all[b.kind] = a
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
		"quick changes": {changeRows(seen(0, 50*ms)), 10, true},
		"slow changes":  {changeRows(seen(0, 51*ms)), 10, false},
		"active":        {activeRows(active(0.95, 0, 300*ms, 0)), 14, true},
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

// Each bar of gateways that serve at once can be missed, by both balancers.
func TestActiveRowsMissed(t *testing.T) {
	t.Parallel()
	bad := &actives{
		ratios: map[desired.Return][]float64{desired.Routed: {0.94}, desired.SNAT: {0.94}, desired.Masquerade: {0.94}}, handed: []float64{2}, agents: []float64{1},
		lost: 1, outages: []time.Duration{301 * time.Millisecond}, broken: map[desired.Return]int{desired.Routed: 1},
	}
	for _, r := range activeRows(map[desired.Balancer]*actives{desired.EBPF: bad, desired.NFTables: bad}) {
		if r.Bar != nil && r.Met() {
			t.Errorf("%s is %v: met", r.Name, r.Value)
		}
	}
}

// The changed state has as many VIPs as its row says, and is valid.
func TestManyVIPs(t *testing.T) {
	t.Parallel()
	s := desired.State{Cluster: "bench", Group: "bench", Balancer: desired.EBPF, VIPs: manyVIPs(many), BGP: speaker(0)}
	if faults := s.Validate(); len(faults) > 0 || len(s.VIPs) != many || len(s.VIPs[0].Frontends[0].Backends) != serverCount {
		t.Errorf("%d VIPs, %v", len(s.VIPs), faults)
	}
}
