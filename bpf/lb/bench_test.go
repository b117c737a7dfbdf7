package lb

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	cs "github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// large returns n Services of 10 pods each, in two slices of two members.
func large(n int) *cs.Snapshot {
	snap := &cs.Snapshot{}
	for i := range n {
		var of [2]cs.Slice
		for c := range of {
			addrs := make([]string, 5)
			for e := range addrs {
				addrs[e] = fmt.Sprintf("10.%d.%d.%d", 1+5*c+e, i/250, i%250+1)
			}
			of[c] = slice(addrs...)
			of[c].Cluster = cs.ClusterID(fmt.Sprint("c", c))
		}
		svc := service(fmt.Sprintf("s%05d", i), fmt.Sprintf("243.0.%d.%d", i/250, i%250+1), of[:]...)
		snap.Services = append(snap.Services, svc)
	}
	return snap
}

// manyNodes returns the VIPs of a cluster of 1,000 nodes that each have a range of pods.
func manyNodes() *VIPs {
	own := slices.Clone(clusterOf[:3])
	for i := range 1000 {
		own = append(own, Own{netip.PrefixFrom(netip.AddrFrom4([4]byte{100, 64 + byte(i/256), byte(i), 0}), 24), "pods"})
	}
	return NewVIPs(prefixes("243.0.0.0/8", "fd00:243::/48"), own, nil)
}

// 10,000 Services of 10 pods, from the snapshot to the plan: for empty maps, and for maps that hold everything.
func BenchmarkPlan10k(b *testing.B) {
	in := Input{Snapshot: large(10000), VIPs: manyNodes()}
	empty := NewState()
	b.Run("empty", func(b *testing.B) {
		for b.Loop() {
			if plan, _ := NewPlanner(empty).Plan(in); plan.Writes() != 220002 {
				b.Fatal(plan.Writes())
			}
		}
	})
	have, _ := build(in, empty, new(idAllocator))
	b.Run("restart", func(b *testing.B) {
		for b.Loop() {
			if plan, _ := NewPlanner(have).Plan(in); plan.Writes() != 0 {
				b.Fatal(plan.Writes())
			}
		}
	})
}

// One of 100,000 endpoints is added or removed, from the snapshot to the plan.
func BenchmarkOneEndpoint(b *testing.B) {
	planner := NewPlanner(NewState())
	vips := manyNodes()
	inputs := [2]Input{{Snapshot: large(10000), VIPs: vips}, {VIPs: vips}}
	changed := slices.Clone(inputs[0].Snapshot.Services)
	svc := &changed[5000]
	svc.Slices = slices.Clone(svc.Slices)
	svc.Slices[1].Endpoints = slices.Clone(svc.Slices[1].Endpoints[1:])
	inputs[1].Snapshot = &cs.Snapshot{Services: changed}
	planner.Plan(inputs[0])
	turn := 0
	for b.Loop() {
		turn = 1 - turn
		if plan, _ := planner.Plan(inputs[turn]); plan.Writes() < 3 || plan.Writes() > 4 {
			b.Fatal(plan.Writes())
		}
	}
}
