package lb

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	cs "github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// pod parses an endpoint: "cluster/node/zone", after "~" when it terminates, after "!" when it does not serve. Its slice knows
// the region that follows the zone as "@region".
func pod(t *testing.T, n int, text string) (cs.ClusterID, cs.Endpoint, cs.Regions) {
	t.Helper()
	e := cs.Endpoint{Addrs: []netip.Addr{netip.AddrFrom4([4]byte{10, 0, 0, byte(n)})}, Ready: true, Serving: true}
	if rest, ok := strings.CutPrefix(text, "~"); ok {
		text, e.Ready, e.Terminating = rest, false, true
	}
	if rest, ok := strings.CutPrefix(text, "!"); ok {
		text, e.Ready, e.Serving = rest, false, false
	}
	text, region, _ := strings.Cut(text, "@")
	f := strings.Split(text, "/")
	e.NodeName, e.Zone = cs.Share(f[1]), cs.Share(f[2])
	return cs.ClusterID(f[0]), e, cs.NewRegions(map[string]string{f[2]: region})
}

// Pods are numbered from 1; their addresses end in that number.
func TestServingEndpoints(t *testing.T) {
	node := Node{Cluster: "a", Name: "n1", Zone: "z1"}
	everywhere := []string{"a/n1/z1", "a/n2/z1", "a/n3/z2", "b/n1/z1", "b/n9/z9"}
	inRegion := &Node{Cluster: "a", Name: "n1", Zone: "z1", Region: "r1"}
	regions := []string{"a/n2/z2@r1", "a/n3/z3@r2", "b/n1/z1@r1", "b/n9/z9@r9", "b/n8/z8"}
	tiers := map[string]string{AnnotationPrefer: "node,zone,region,cluster,remote"}
	tests := map[string]struct {
		node         *Node // the default is a/n1/z1
		spans        bool
		regionsSpan  bool
		drained      []cs.ClusterID
		distribution string
		policy       string
		annotations  map[string]string
		pods         []string
		serve        string // the last bytes of the addresses with slots, *n for n slots
		drain        string // and of those without
		problems     int
	}{
		"no policy": {pods: everywhere, serve: "1 2 3 4 5"},
		"a terminating endpoint drains while others are ready": {pods: []string{"a/n1/z1", "~a/n2/z1"}, serve: "1", drain: "2"},
		"a terminating endpoint serves when none is ready":     {pods: []string{"~a/n1/z1", "~b/n1/z1", "!a/n2/z1"}, serve: "1 2"},
		"an endpoint that does not serve is left out":          {pods: []string{"!a/n1/z1", "!~a/n2/z1"}},

		"the same node": {distribution: "PreferSameNode", pods: everywhere, serve: "1", drain: "2 3 4 5"},
		"the same node of the same cluster": {
			distribution: "PreferSameNode", pods: []string{"b/n1/z1", "a/n2/z2"}, serve: "2", drain: "1",
		},
		"no pod on the node, so the zone":                      {distribution: "PreferSameNode", pods: everywhere[1:], serve: "1", drain: "2 3 4"},
		"the same zone":                                        {distribution: "PreferSameZone", pods: everywhere, serve: "1 2", drain: "3 4 5"},
		"close is the same zone":                               {distribution: "PreferClose", pods: everywhere, serve: "1 2", drain: "3 4 5"},
		"zones of two clusters differ":                         {distribution: "PreferClose", pods: everywhere[2:], serve: "1", drain: "2 3"},
		"zones of two clusters are one if zones span clusters": {distribution: "PreferClose", spans: true, pods: everywhere, serve: "1 2 4", drain: "3 5"},
		"no pod in the cluster, so the others":                 {distribution: "PreferClose", pods: everywhere[3:], serve: "1 2"},
		"a tier without ready pods spills over": {
			distribution: "PreferSameNode", pods: []string{"~a/n1/z1", "a/n2/z2", "b/n1/z1"}, serve: "2", drain: "1 3",
		},
		"the nearest pod terminates, and no other is ready": {distribution: "PreferSameNode", pods: []string{"~a/n1/z1", "~b/n1/z1"}, serve: "1", drain: "2"},
		"no endpoint is near an unknown node":               {node: &Node{}, distribution: "PreferSameNode", pods: everywhere, serve: "1 2 3 4 5"},
		"an endpoint without a zone is in no zone": {
			node: &Node{Cluster: "a"}, distribution: "PreferClose", pods: []string{"a/n1/", "b//"}, serve: "1", drain: "2",
		},
		"an unknown distribution": {distribution: "PreferMoon", pods: everywhere, serve: "1 2 3 4 5"},

		"local is the same node":                  {policy: "Local", pods: everywhere, serve: "1"},
		"local without a pod on the node refuses": {policy: "Local", pods: everywhere[1:]},
		"local with only a terminating pod": {
			policy: "Local", pods: []string{"~a/n1/z1", "a/n2/z1"}, serve: "1",
		},

		"annotated tiers": {
			annotations: map[string]string{AnnotationPrefer: "cluster, node"}, distribution: "PreferSameNode", pods: everywhere, serve: "1 2 3", drain: "4 5",
		},
		"remote first": {annotations: map[string]string{AnnotationPrefer: "remote"}, pods: everywhere, serve: "4 5", drain: "1 2 3"},
		"all endpoints are in no tier": {
			annotations: map[string]string{AnnotationPrefer: "node,zone"}, pods: everywhere[2:], serve: "1 2 3",
		},
		"invalid tiers": {
			annotations: map[string]string{AnnotationPrefer: "node,moon"}, pods: everywhere, serve: "1 2 3 4 5", problems: 1,
		},
		"the same region of the same cluster":  {node: inRegion, annotations: tiers, pods: regions, serve: "1", drain: "2 3 4 5"},
		"no pod in the region, so the cluster": {node: inRegion, annotations: tiers, pods: regions[1:], serve: "1", drain: "2 3 4"},
		"no pod in the cluster either":         {node: inRegion, annotations: tiers, pods: regions[2:], serve: "1 2 3"},
		"regions of two clusters are one if regions span clusters": {
			node: inRegion, regionsSpan: true, annotations: tiers, pods: regions, serve: "1 3", drain: "2 4 5",
		},
		"another cluster's pods of the region come before the own cluster's": {
			node: inRegion, regionsSpan: true, annotations: tiers, pods: regions[1:], serve: "2", drain: "1 3 4",
		},
		"zones that span clusters do not make their regions do so": {
			node: inRegion, spans: true, annotations: map[string]string{AnnotationPrefer: "region"}, pods: []string{"a/n2/z2@r1", "b/n1/z1@r1"}, serve: "1", drain: "2",
		},
		"the zone comes before the region": {node: inRegion, annotations: tiers, pods: []string{"a/n2/z1@r1", "a/n3/z2@r1"}, serve: "1", drain: "2"},
		"a node of an unknown region":      {annotations: tiers, pods: []string{"a/n2/z2", "b/n1/z1"}, serve: "1", drain: "2"},
		"a pod without a zone in the member's only region": {
			node: inRegion, annotations: map[string]string{AnnotationPrefer: "region"}, pods: []string{"a//@r1", "a//"}, serve: "1", drain: "2",
		},
		"the last tier of five serves before the others' terminating pods": {
			node: inRegion, annotations: tiers, pods: []string{"~a/n1/z1@r1", "b/n9/z9@r9"}, serve: "2", drain: "1",
		},
		"a distribution knows no region": {node: inRegion, distribution: "PreferSameZone", pods: []string{"a/n2/z2@r1", "a/n3/z3@r2", "b/n1/z1@r1"}, serve: "1 2", drain: "3"},
		"a tier twice":                   {annotations: map[string]string{AnnotationPrefer: "node,node"}, pods: everywhere, serve: "1 2 3 4 5", problems: 1},

		"weights belong to clusters, not to pods": {
			annotations: map[string]string{AnnotationClusterWeights: "a=3,b=1"}, pods: everywhere, serve: "1*2 2*2 3*2 4 5",
		},
		"a cluster without a weight weighs 1": {
			annotations: map[string]string{AnnotationClusterWeights: "b = 4"}, pods: []string{"a/n/z", "b/n/z", "c/n/z"}, serve: "1 2*4 3",
		},
		"weights are reduced": {
			annotations: map[string]string{AnnotationClusterWeights: "a=300,b=100"}, pods: []string{"a/n/z", "b/n/z"}, serve: "1*3 2",
		},
		"weight 0 drains while others are ready": {
			annotations: map[string]string{AnnotationClusterWeights: "a=0"}, pods: []string{"a/n1/z1", "b/n1/z1"}, serve: "2", drain: "1",
		},
		"weight 0 serves when no other is ready": {
			annotations: map[string]string{AnnotationClusterWeights: "a=0,c=0"}, pods: []string{"a/n1/z1", "~b/n1/z1", "c/n/z"}, serve: "1 3", drain: "2",
		},
		"weights within a tier": {
			annotations: map[string]string{AnnotationClusterWeights: "b=3", AnnotationPrefer: "remote,cluster"},
			pods:        []string{"a/n/z", "b/n/z", "c/n/z"}, serve: "2*3 3", drain: "1",
		},
		"a group divides its own share": {
			annotations: map[string]string{AnnotationClusterWeights: "a=3,b=1;"}, pods: []string{"a/n/z", "b/n/z", "c/n/z", "c/n/z"}, serve: "1*3 2 3*2 4*2",
		},
		"two groups": {
			annotations: map[string]string{AnnotationClusterWeights: "a=3,b=1;c=1,d=3;"}, pods: []string{"a/n/z", "b/n/z", "c/n/z", "d/n/z", "e/n/z"}, serve: "1*3 2 3 4*3 5*2",
		},
		"a cluster drains itself": {
			annotations: map[string]string{AnnotationClusterWeights: "b=0;"}, pods: []string{"a/n/z", "a/n/z", "b/n/z", "c/n/z"}, serve: "1 2 4", drain: "3",
		},
		"a group that serves by itself": {
			annotations: map[string]string{AnnotationClusterWeights: "a=0,b=0;"}, pods: []string{"a/n/z", "b/n/z"}, serve: "1 2",
		},
		"a group without an end": {annotations: map[string]string{AnnotationClusterWeights: "a=1;b=2"}, pods: everywhere, serve: "1 2 3 4 5", problems: 1},
		"invalid weights": {
			annotations: map[string]string{AnnotationClusterWeights: "a=many"}, pods: everywhere, serve: "1 2 3 4 5", problems: 1,
		},
		"too large a weight": {annotations: map[string]string{AnnotationClusterWeights: "a=1001"}, pods: everywhere, serve: "1 2 3 4 5", problems: 1},
		"a cluster twice":    {annotations: map[string]string{AnnotationClusterWeights: "a=1,a=2"}, pods: everywhere, serve: "1 2 3 4 5", problems: 1},
		"invalid cluster id": {annotations: map[string]string{AnnotationClusterWeights: "A=1"}, pods: everywhere, serve: "1 2 3 4 5", problems: 1},
		"unknown balancer":   {annotations: map[string]string{AnnotationBalancer: "fair"}, pods: everywhere, serve: "1 2 3 4 5", problems: 1},

		"a drained member": {drained: []cs.ClusterID{"b"}, pods: everywhere, serve: "1 2 3", drain: "4 5"},
		"a drained member and a terminating endpoint": {drained: []cs.ClusterID{"b"}, pods: []string{"~a/n/z", "b/n/z"}, serve: "1", drain: "2"},
		"only a drained member":                       {drained: []cs.ClusterID{"b"}, pods: everywhere[3:], drain: "1 2"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			svc := service("hello", "243.0.0.5")
			svc.TrafficDistribution, svc.InternalTrafficPolicy, svc.Annotations = test.distribution, test.policy, test.annotations
			for i, text := range test.pods {
				c, e, regions := pod(t, i+1, text)
				s := slice("10.0.0.1")
				s.Cluster, s.Endpoints, s.Regions = c, []cs.Endpoint{e}, regions
				svc.Slices = append(svc.Slices, s)
			}
			in := snapshotOf(svc)
			in.Node, in.ZonesSpanClusters, in.RegionsSpanClusters, in.Drained = node, test.spans, test.regionsSpan, map[cs.ClusterID]bool{}
			if test.node != nil {
				in.Node = *test.node
			}
			for _, c := range test.drained {
				in.Drained[c] = true
			}
			got, problems := build(in, NewState(), new(idAllocator))
			if len(problems) != test.problems {
				t.Errorf("problems %v, want %d", problems, test.problems)
			}
			for _, p := range problems {
				if p.Reason != InvalidAnnotation || !strings.Contains(p.Message, "isthmus.dev/") {
					t.Errorf("problem %v names no annotation", p)
				}
			}
			short := strings.NewReplacer("10.0.0.", "", ":8080", "")
			var drain []string
			for _, be := range got.Backends {
				if be.Draining {
					drain = append(drain, short.Replace(be.AddrPort.String()))
				}
			}
			slices.Sort(drain)
			for _, fe := range got.Frontends {
				if diff := cmp.Diff(test.serve, short.Replace(strings.Join(got.shares(fe), " "))); diff != "" {
					t.Errorf("serving endpoints (-want +got):\n%s", diff)
				}
			}
			if diff := cmp.Diff(test.drain, strings.Join(drain, " ")); diff != "" {
				t.Errorf("draining endpoints (-want +got):\n%s", diff)
			}
		})
	}
}

// A pod that moves from one slice to another is in both for a while. It serves if it is ready in one of them.
func TestEndpointInTwoSlicesIsReadyOnce(t *testing.T) {
	for _, readyFirst := range []bool{true, false} {
		svc := service("hello", "243.0.0.5", slice("10.1.0.1"), slice("10.1.0.1"))
		worse := 0
		if readyFirst {
			worse = 1
		}
		svc.Slices[worse].Endpoints[0].Ready, svc.Slices[worse].Endpoints[0].Terminating = false, true
		got, _ := build(snapshotOf(svc), NewState(), new(idAllocator))
		want := "FE 243.0.0.5:80/TCP id=1 service=demo/hello backends=[10.1.0.1:8080]\nBE id=1 10.1.0.1:8080/TCP cluster=a\n"
		if diff := cmp.Diff(want, got.Text()); diff != "" {
			t.Errorf("ready first %v:\n%s", readyFirst, diff)
		}
	}
}

func TestAffinity(t *testing.T) {
	for timeout, want := range map[time.Duration]uint32{0: 10800, 90 * time.Second: 90, 24 * time.Hour: 86400} {
		svc := service("hello", "243.0.0.5")
		svc.SessionAffinity = cs.SessionAffinity{ClientIP: true, Timeout: timeout}
		got, _ := build(snapshotOf(svc), NewState(), new(idAllocator))
		for _, fe := range got.Frontends {
			if fe.Affinity != want {
				t.Errorf("affinity with a timeout of %s is %d s, want %d", timeout, fe.Affinity, want)
			}
		}
	}
}

// Another member may use the addresses of a former member: the backends differ.
func TestBackendsBelongToMembers(t *testing.T) {
	svc := service("hello", "243.0.0.5", slice("10.1.0.1"))
	ids := new(idAllocator)
	have, _ := build(snapshotOf(svc), NewState(), ids)
	svc = service("hello", "243.0.0.5", slice("10.1.0.1"))
	svc.Slices[0].Cluster = "b"
	want, _ := build(snapshotOf(svc), have, ids)
	text := "FE 243.0.0.5:80/TCP id=1 service=demo/hello backends=[10.1.0.1:8080]\nBE id=2 10.1.0.1:8080/TCP cluster=b\n"
	if diff := cmp.Diff(text, want.Text()); diff != "" {
		t.Error(diff)
	}
}

// Members beyond the array's size have no index; their backends serve all the same.
func TestMoreMembersThanIndices(t *testing.T) {
	svc := service("hello", "243.0.0.5")
	for i := range MaxClusters + 10 {
		s := slice(fmt.Sprintf("10.1.%d.%d", i/250, i%250+1))
		s.Cluster = cs.ClusterID(fmt.Sprint("c", i))
		svc.Slices = append(svc.Slices, s)
	}
	got, _ := build(snapshotOf(svc), NewState(), new(idAllocator))
	if len(got.Clusters) != MaxClusters-1 || len(got.Slots) != MaxClusters+10 {
		t.Errorf("%d members with an index and %d slots, want %d and %d", len(got.Clusters), len(got.Slots), MaxClusters-1, MaxClusters+10)
	}
}

// Clients that take random slots reach the clusters in the proportion of the weights: chi-square, at one in a million.
func TestWeightsAreShares(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		groups := make([]group, rapid.IntRange(1, 5).Draw(t, "clusters"))
		var sum float64
		for i := range groups {
			groups[i] = group{size: rapid.IntRange(1, 60).Draw(t, "pods"), weight: rapid.Uint32Range(1, 20).Draw(t, "weight")}
			sum += float64(groups[i].weight)
		}
		each := slotsPerBackend(groups)
		total := 0
		for i, g := range groups {
			if each[i] == 0 {
				t.Fatalf("group %d has no slot", i)
			}
			total += g.size * int(each[i])
		}
		if total > maxSlots+60*len(groups) {
			t.Fatalf("%d slots", total)
		}
		const clients = 10000
		var chi float64
		for i, g := range groups {
			want := clients * float64(g.weight) / sum
			got := clients * float64(g.size*int(each[i])) / float64(total)
			chi += (got - want) * (got - want) / want
		}
		// The quantile 1-1e-6 for 4 degrees of freedom; the expectation of many clients has no noise.
		if chi > 33.4 {
			t.Fatalf("chi-square %.1f for %v: %v slots each", chi, groups, each)
		}
	})
}

func TestWeightsAreExactWherePossible(t *testing.T) {
	tests := map[string]struct {
		groups []group
		want   []uint32
	}{
		"equal":             {[]group{{3, 1}, {3, 1}}, []uint32{1, 1}},
		"sizes differ":      {[]group{{3, 1}, {2, 1}}, []uint32{2, 3}},
		"both":              {[]group{{3, 3}, {2, 1}}, []uint32{2, 1}},
		"one":               {[]group{{7, 5}}, []uint32{1}},
		"no weight at all":  {[]group{{1, 0}, {2, 0}}, []uint32{2, 1}},
		"a thousand to one": {[]group{{1, 1000}, {1, 1}}, []uint32{1000, 1}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, slotsPerBackend(test.groups)); diff != "" {
				t.Error(diff)
			}
		})
	}
	if each := slotsPerBackend([]group{{997, 999}, {991, 1000}, {983, 1}, {977, 3}}); slices.Min(each) == 0 || slices.Max(each) > maxSlots {
		t.Errorf("large primes: %v", each)
	}
	if each := slotsPerBackend([]group{{1, math.MaxUint32}, {65000, 1}}); slices.Min(each) == 0 {
		t.Errorf("out of all proportion: %v", each)
	}
}

// A new annotation needs no line but its own in annotations: a change of it must be noticed.
func TestChangeOfAnyAnnotationIsPlanned(t *testing.T) {
	const unheard = "isthmus.dev/unheard-of"
	known := annotations
	t.Cleanup(func() { annotations = known })
	annotations = append(slices.Clone(known), annotation{key: unheard, parse: func(p *policy, value string) error {
		p.maglev = value == "maglev"
		return nil
	}})
	svc := service("hello", "243.0.0.5", slice("10.1.0.1"))
	annotated := svc // in the same memory but for the annotations
	annotated.Annotations = map[string]string{unheard: "maglev"}
	planner := NewPlanner(NewState())
	for i, step := range []struct {
		svc   cs.Service
		slots int
	}{{svc, 1}, {annotated, 101}, {svc, 1}} {
		planner.Plan(snapshotOf(step.svc))
		if n := len(planner.State().Slots); n != step.slots {
			t.Errorf("step %d: %d slots, want %d", i, n, step.slots)
		}
	}
}

// A Problem tells the owner about the annotation as it is now.
func TestChangeOfInvalidAnnotationIsReported(t *testing.T) {
	svc := service("hello", "243.0.0.5", slice("10.1.0.1"))
	planner := NewPlanner(NewState())
	for _, value := range []string{"fair", "fairer"} {
		svc.Annotations = map[string]string{AnnotationBalancer: value}
		_, problems := planner.Plan(snapshotOf(svc))
		if len(problems) != 1 || !strings.Contains(problems[0].Message, "\""+value+"\"") {
			t.Errorf("balancer %q: problems %v, want one that quotes it", value, problems)
		}
	}
}

// An annotation that is no policy, such as one of a deployment tool, must not make the Planner rebuild a Service.
func TestOtherAnnotationsAreIgnored(t *testing.T) {
	svc := service("hello", "243.0.0.5", slice("10.1.0.1"))
	annotated := svc
	annotated.Annotations = map[string]string{"example.org/revision": "7"}
	if !same(&svc, &annotated) {
		t.Error("an annotation of another domain changes how a Service is balanced")
	}
	annotated.Annotations = map[string]string{AnnotationBalancer: "random"}
	if !same(&svc, &annotated) {
		t.Error("an annotation that asks for the default changes how a Service is balanced")
	}
}
