package lb

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	cs "github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Other Services and the node's own place can affect an unchanged Service.
func TestPlannerRebuildsAffectedServices(t *testing.T) {
	first, second := service("a", "", slice("10.1.0.1")), service("b", "243.0.0.5", slice("10.1.0.2"))
	claims := service("a", "243.0.0.5", slice("10.1.0.1"))
	far := slice("10.1.0.2")
	far.Cluster, far.Endpoints[0].NodeName = "b", cs.Share("n1")
	near := slice("10.1.0.1")
	near.Endpoints[0].NodeName, near.Endpoints[0].Zone = cs.Share("n1"), cs.Share("z")
	far.Endpoints[0].Zone = cs.Share("z")
	spread := service("a", "243.0.0.5", near, far)
	spread.TrafficDistribution = "PreferClose"
	both := snapshotOf(spread)
	regional := service("a", "243.0.0.5", near, far)
	regional.Annotations = map[string]string{AnnotationPrefer: "region"}
	regional.Slices[0].Regions = cs.NewRegions(map[string]string{"z": "r"})
	moved := service("a", "243.0.0.5", near, far)
	moved.Annotations = regional.Annotations
	moved.Slices[1].Regions = regional.Slices[0].Regions
	inRegion, inMoved := snapshotOf(regional), snapshotOf(moved)
	inRegion.Node, inRegion.RegionsSpanClusters = Node{Cluster: "a", Region: "r"}, true
	inMoved.Node, inMoved.RegionsSpanClusters = inRegion.Node, true
	alone := inMoved
	alone.RegionsSpanClusters = false
	elsewhere, spans, drained := both, both, both
	elsewhere.Node = Node{Cluster: "a", Zone: "z"}
	spans.Node, spans.ZonesSpanClusters = elsewhere.Node, true
	drained.Drained = map[cs.ClusterID]bool{"a": true}

	tests := map[string]struct {
		inputs []Input
		want   []string // the backends of 243.0.0.5:80, input by input
	}{
		"an earlier Service claims the VIP, and releases it": {
			inputs: []Input{snapshotOf(first, second), snapshotOf(claims, second), snapshotOf(first, second)},
			want:   []string{"10.1.0.2:8080", "10.1.0.1:8080", "10.1.0.2:8080"},
		},
		"the owner is removed": {
			inputs: []Input{snapshotOf(claims, second), snapshotOf(second)},
			want:   []string{"10.1.0.1:8080", "10.1.0.2:8080"},
		},
		"the owner becomes headless": {
			inputs: []Input{snapshotOf(claims, second), snapshotOf(headless(claims), second), snapshotOf(claims, second)},
			want:   []string{"10.1.0.1:8080", "10.1.0.2:8080", "10.1.0.1:8080"},
		},
		"the first Service of a name counts": {
			inputs: []Input{snapshotOf(second, claims, second), snapshotOf(claims, claims, second), snapshotOf(second, second), snapshotOf(second)},
			want:   []string{"10.1.0.2:8080", "10.1.0.1:8080", "10.1.0.2:8080", "10.1.0.2:8080"},
		},
		"the node learns its cluster and zone": {
			inputs: []Input{both, elsewhere, spans, both},
			want:   []string{"10.1.0.1:8080 10.1.0.2:8080", "10.1.0.1:8080", "10.1.0.1:8080 10.1.0.2:8080", "10.1.0.1:8080 10.1.0.2:8080"},
		},
		"only the regions of slices change": {
			inputs: []Input{inRegion, inMoved, alone},
			want:   []string{"10.1.0.1:8080", "10.1.0.2:8080", "10.1.0.1:8080 10.1.0.2:8080"},
		},
		"a member is drained and restored": {
			inputs: []Input{both, drained, both},
			want:   []string{"10.1.0.1:8080 10.1.0.2:8080", "10.1.0.2:8080", "10.1.0.1:8080 10.1.0.2:8080"},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			planner, have := NewPlanner(NewState()), NewState()
			for i, in := range test.inputs {
				plan, _ := planner.Plan(in)
				have.Apply(plan)
				fe := have.Frontends[Address{netip.MustParseAddrPort("243.0.0.5:80"), cs.TCP}]
				var serving []string
				for _, a := range have.slotTable(fe) {
					serving = append(serving, a.AddrPort.String())
				}
				slices.Sort(serving)
				if diff := cmp.Diff(test.want[i], join(serving)); diff != "" {
					t.Errorf("input %d (-want +got):\n%s", i, diff)
				}
				if diff := cmp.Diff(planner.State(), have, entries); diff != "" {
					t.Errorf("input %d: the maps differ from the planner's state (-planner +maps):\n%s", i, diff)
				}
			}
		})
	}
}

var entries = cmp.Options{cmpopts.EquateComparable(Address{}, netip.Prefix{})}

func headless(svc cs.Service) cs.Service {
	svc.Type, svc.IPs = cs.Headless, nil
	return svc
}

func join(words []string) string {
	text := ""
	for i, w := range words {
		if i > 0 {
			text += " "
		}
		text += w
	}
	return text
}

// A half-finished update, or another writer, may leave any of these.
func TestPlannerRepairs(t *testing.T) {
	in := snapshotOf(service("hello", "243.0.0.5", slice("10.1.0.1", "10.1.0.2")))
	whole, _ := build(in, NewState(), new(idAllocator))
	fe := Address{netip.MustParseAddrPort("243.0.0.5:80"), cs.TCP}
	tests := map[string]func(*State){
		"slots were written, the frontend was not": func(s *State) { s.Frontends[fe] = Frontend{ID: 1, Service: 1} },
		"slots were written with other backends, the frontend was not": func(s *State) {
			s.Frontends[fe] = Frontend{ID: 1, Service: 1}
			s.Slots[Slot{1, 0}], s.Slots[Slot{1, 1}] = s.Slots[Slot{1, 1}], s.Slots[Slot{1, 0}]
		},
		"slots beyond the count": func(s *State) { s.Slots[Slot{1, 2}], s.Slots[Slot{1, 900}] = 1, 2 },
		"two frontends of one number": func(s *State) {
			s.Frontends[Address{netip.MustParseAddrPort("1.2.3.4:80"), cs.TCP}] = s.Frontends[fe] // comes first
		},
		"two indices of one member": func(s *State) { s.Clusters[9] = "a" },
		"two indices of one member, both in use": func(s *State) {
			s.Clusters[9] = "a"
			be := s.Backends[2]
			be.Cluster = 9
			s.Backends[2] = be
		},
		"two numbers of one Service": func(s *State) { s.Services[9] = s.Services[1] },
		"two numbers of one backend": func(s *State) { s.Backends[9] = s.Backends[1]; s.Slots[Slot{1, 0}] = 9 },
		"a missing backend":          func(s *State) { delete(s.Backends, 2) },
		"a missing slot":             func(s *State) { delete(s.Slots, Slot{1, 1}) },
		"entries of number 0":        func(s *State) { s.Services[0], s.Clusters[0], s.Backends[0] = s.Services[1], "b", s.Backends[1] },
		"an unknown range":           func(s *State) { s.Ranges[netip.MustParsePrefix("10.0.0.0/8")] = true },
	}
	for name, spoil := range tests {
		t.Run(name, func(t *testing.T) {
			have := whole.Clone()
			spoil(&have)
			planner := NewPlanner(have)
			for i := range 3 {
				plan, _ := planner.Plan(in)
				have.Apply(plan)
				if diff := cmp.Diff(planner.State(), have, entries); diff != "" {
					t.Fatalf("plan %d: the maps differ from the planner's state (-planner +maps):\n%s", i, diff)
				}
				if diff := cmp.Diff(numberless(whole), numberless(have)); diff != "" {
					t.Fatalf("plan %d (-want +got):\n%s", i, diff)
				}
				in.ZonesSpanClusters = !in.ZonesSpanClusters // makes the Planner rebuild every Service
			}
		})
	}
}

// numberless is the text of a consistent state without its numbers.
func numberless(s State) []string {
	var lines []string
	for a, fe := range s.Frontends {
		lines = append(lines, "FE "+a.String()+" "+s.Services[fe.Service].String()+" "+join(s.shares(fe)))
	}
	for _, be := range s.Backends {
		lines = append(lines, "BE "+be.String()+" "+string(s.Clusters[be.Cluster]))
	}
	for k := range s.Slots {
		lines = append(lines, "SLOT "+s.Backends[s.Slots[k]].String())
	}
	for _, n := range s.Services {
		lines = append(lines, "SERVICE "+n.String())
	}
	for _, id := range s.Clusters {
		lines = append(lines, "CLUSTER "+string(id))
	}
	for r := range s.Ranges {
		lines = append(lines, "RANGE "+r.String())
	}
	slices.Sort(lines)
	return lines
}

// A client with session affinity must leave a backend that was removed from its Service and still serves another one.
func TestStaleAffinities(t *testing.T) {
	sticky := service("a", "243.0.0.5", slice("10.1.0.1"), slice("10.1.0.2"))
	sticky.SessionAffinity = cs.SessionAffinity{ClientIP: true}
	less, loose := sticky, sticky
	less.Slices = less.Slices[1:]
	loose.SessionAffinity = cs.SessionAffinity{}
	looseLess := loose
	looseLess.Slices = less.Slices
	other := service("b", "243.0.0.6", slice("10.1.0.1"))
	tests := map[string]struct {
		from, to Input
		want     []string // frontend and backend
	}{
		"the backend serves another Service":          {snapshotOf(sticky, other), snapshotOf(less, other), []string{"243.0.0.5 10.1.0.1"}},
		"the backend begins to serve another Service": {snapshotOf(sticky), snapshotOf(less, other), []string{"243.0.0.5 10.1.0.1"}},
		"the backend is deleted":                      {snapshotOf(sticky), snapshotOf(less), nil},
		"the backend is added":                        {snapshotOf(less, other), snapshotOf(sticky, other), nil},
		"the other Service is removed":                {snapshotOf(sticky, other), snapshotOf(sticky), nil},
		"no session affinity":                         {snapshotOf(loose, other), snapshotOf(looseLess, other), nil},
		"session affinity begins":                     {snapshotOf(loose, other), snapshotOf(sticky, other), nil},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			planner, have := NewPlanner(NewState()), NewState()
			plan, _ := planner.Plan(test.from)
			if len(plan.StaleAffinities) > 0 {
				t.Errorf("at first: %v", plan.StaleAffinities)
			}
			have.Apply(plan)
			for _, p := range []*Planner{planner, NewPlanner(have)} { // the same Planner, and a new one
				plan, _ := p.Plan(test.to)
				after := have.Clone()
				after.Apply(plan)
				var got []string
				for _, stale := range plan.StaleAffinities {
					for a, fe := range after.Frontends {
						if fe.ID == stale.Frontend {
							got = append(got, a.AddrPort.Addr().String()+" "+after.Backends[stale.Backend].AddrPort.Addr().String())
						}
					}
				}
				if diff := cmp.Diff(test.want, got); diff != "" {
					t.Errorf("stale affinities (-want +got):\n%s", diff)
				}
			}
		})
	}
}
