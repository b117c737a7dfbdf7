package lb

import (
	"net/netip"
	"testing"

	"pgregory.net/rapid"

	cs "github.com/isthmus-net/isthmus/controlplane/clusterset"
)

func differences(p *Planner, have State) int {
	a := p.Audit()
	a.State(have)
	return a.Differences()
}

func TestAuditOfUpToDateMapsFindsNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		planner, have := NewPlanner(NewState()), NewState()
		for range rapid.IntRange(1, 4).Draw(t, "plans") {
			plan, _ := planner.Plan(Input{Snapshot: snapshots().Draw(t, "snapshot")})
			have.Apply(plan)
			if n := differences(planner, have); n != 0 {
				t.Fatalf("%d differences:\n%s", n, have.Text())
			}
		}
	})
}

// A missing, changed or additional entry is one difference, in every map.
func TestAuditCountsEveryEntry(t *testing.T) {
	in := snapshotOf(service("a", "243.0.0.5", slice("10.1.0.1", "10.1.0.2")))
	in.Ranges = []netip.Prefix{netip.MustParsePrefix("243.0.0.0/8")}
	at := Address{netip.MustParseAddrPort("243.0.0.5:80"), cs.TCP}
	elsewhere := Address{netip.MustParseAddrPort("243.0.0.6:80"), cs.TCP}
	for name, corrupt := range map[string]func(State){
		"frontend missing":    func(s State) { delete(s.Frontends, at) },
		"frontend changed":    func(s State) { fe := s.Frontends[at]; fe.Count--; s.Frontends[at] = fe },
		"frontend added":      func(s State) { s.Frontends[elsewhere] = Frontend{ID: 99} },
		"slot missing":        func(s State) { delete(s.Slots, Slot{1, 1}) },
		"slot changed":        func(s State) { s.Slots[Slot{1, 1}] = s.Slots[Slot{1, 0}] },
		"slot added":          func(s State) { s.Slots[Slot{1, 2}] = s.Slots[Slot{1, 0}] },
		"slot of no frontend": func(s State) { s.Slots[Slot{99, 0}] = 1 },
		"backend missing":     func(s State) { delete(s.Backends, 1) },
		"backend changed":     func(s State) { b := s.Backends[1]; b.Draining = !b.Draining; s.Backends[1] = b },
		"backend added":       func(s State) { s.Backends[99] = Backend{Address: elsewhere} },
		"service missing":     func(s State) { delete(s.Services, 1) },
		"service changed":     func(s State) { s.Services[1] = cs.ServiceName{Namespace: "demo", Name: "b"} },
		"service added":       func(s State) { s.Services[99] = cs.ServiceName{Namespace: "demo", Name: "b"} },
		"cluster missing":     func(s State) { delete(s.Clusters, 1) },
		"cluster changed":     func(s State) { s.Clusters[1] = "z" },
		"cluster added":       func(s State) { s.Clusters[2] = "z" },
		"range missing":       func(s State) { clear(s.Ranges) },
		"range added":         func(s State) { s.Ranges[netip.MustParsePrefix("fd00::/8")] = true },
	} {
		t.Run(name, func(t *testing.T) {
			planner, have := NewPlanner(NewState()), NewState()
			plan, _ := planner.Plan(in)
			have.Apply(plan)
			corrupt(have)
			if n := differences(planner, have); n != 1 {
				t.Errorf("%d differences, want 1:\n%s", n, have.Text())
			}
		})
	}
}
