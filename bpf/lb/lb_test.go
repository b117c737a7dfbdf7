package lb

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	cs "github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// service returns a ClusterSetIP Service "demo/<name>" with port 80/TCP, named http, over slices.
func service(name string, vips string, slices ...cs.Slice) cs.Service {
	s := cs.Service{Import: cs.Import{
		Service: cs.ServiceName{Namespace: "demo", Name: name},
		Type:    cs.ClusterSetIP,
		Ports:   []cs.Port{{Name: "http", Protocol: cs.TCP, Port: 80}},
	}, Slices: slices}
	if vips != "" {
		s.IPs = []netip.Addr{netip.MustParseAddr(vips)}
	}
	return s
}

// slice returns a slice of cluster a with target port 8080/TCP, named http, and ready endpoints.
func slice(addrs ...string) cs.Slice {
	s := cs.Slice{
		Name: "a", Cluster: "a", Family: cs.FamilyOf(netip.MustParseAddr(addrs[0])),
		Ports: []cs.EndpointPort{{Name: "http", Protocol: cs.TCP, Port: 8080}},
	}
	for _, a := range addrs {
		s.Endpoints = append(s.Endpoints, cs.Endpoint{Addrs: []netip.Addr{netip.MustParseAddr(a)}, Ready: true, Serving: true})
	}
	return s
}

// snapshotOf returns an Input with a Snapshot of services.
func snapshotOf(services ...cs.Service) Input {
	return Input{Snapshot: &cs.Snapshot{Services: services}}
}

// build plans in once, for maps that hold have, and returns what they hold then.
func build(in Input, have State, ids *idAllocator) (State, []Problem) {
	p := newPlanner(have, *ids)
	_, problems := p.Plan(in)
	*ids = p.ids
	return p.State(), problems
}

// diff returns the fewest writes that turn have into want.
func diff(have, want State) Plan {
	var p Plan
	for _, t := range tables() {
		t.diff(&have, &want, &p)
	}
	return p
}

func TestPlannedState(t *testing.T) {
	notReady := slice("10.1.0.1")
	notReady.Endpoints[0].Ready = false
	otherName := slice("10.1.0.1")
	otherName.Ports[0].Name = "metrics"
	otherProtocol := slice("10.1.0.1")
	otherProtocol.Ports[0].Protocol = cs.UDP
	wrongFamily := slice("10.1.0.1")
	wrongFamily.Endpoints[0].Addrs[0] = netip.MustParseAddr("fd00::1")
	noPort := slice("10.1.0.1")
	noPort.Ports[0].Port = 0
	second := slice("10.1.0.1")
	second.Endpoints[0].Addrs = append(second.Endpoints[0].Addrs, netip.MustParseAddr("10.1.0.9"))
	headless := service("hello", "")
	headless.Type = cs.Headless
	dual := service("hello", "243.0.0.5", slice("10.1.0.1"), slice("fd00:1::1"))
	dual.IPs = append(dual.IPs, netip.MustParseAddr("fd00:243::5"))
	multi := service("hello", "243.0.0.5", slice("10.1.0.1"))
	multi.Ports = append(multi.Ports, cs.Port{Name: "dns", Protocol: cs.UDP, Port: 80})
	multi.Slices[0].Ports = append(multi.Slices[0].Ports, cs.EndpointPort{Name: "dns", Protocol: cs.UDP, Port: 5353})
	sctp := service("hello", "243.0.0.5")
	sctp.Ports[0].Protocol = cs.SCTP
	zero := service("hello", "0.0.0.0")

	tests := map[string]struct {
		services []cs.Service
		want     string
		problems []Reason
	}{
		"nothing":                   {},
		"headless has no VIP":       {services: []cs.Service{headless}},
		"no VIP yet":                {services: []cs.Service{service("hello", "", slice("10.1.0.1"))}},
		"no slice refuses":          {services: []cs.Service{service("hello", "243.0.0.5")}, want: "FE 243.0.0.5:80/TCP id=1 service=demo/hello backends=[]\n"},
		"no ready endpoint refuses": {services: []cs.Service{service("hello", "243.0.0.5", notReady)}, want: "FE 243.0.0.5:80/TCP id=1 service=demo/hello backends=[]\n"},
		"port of another name":      {services: []cs.Service{service("hello", "243.0.0.5", otherName)}, want: "FE 243.0.0.5:80/TCP id=1 service=demo/hello backends=[]\n"},
		"port of another protocol":  {services: []cs.Service{service("hello", "243.0.0.5", otherProtocol)}, want: "FE 243.0.0.5:80/TCP id=1 service=demo/hello backends=[]\n"},
		"two slices, one backend twice": {
			services: []cs.Service{service("hello", "243.0.0.5", slice("10.1.0.2", "10.1.0.1"), slice("10.1.0.1", "10.1.0.3"))},
			want: "FE 243.0.0.5:80/TCP id=1 service=demo/hello backends=[10.1.0.1:8080 10.1.0.2:8080 10.1.0.3:8080]\n" +
				"BE id=1 10.1.0.1:8080/TCP cluster=a\nBE id=2 10.1.0.2:8080/TCP cluster=a\nBE id=3 10.1.0.3:8080/TCP cluster=a\n",
		},
		"only the first address takes traffic": {
			services: []cs.Service{service("hello", "243.0.0.5", second)},
			want:     "FE 243.0.0.5:80/TCP id=1 service=demo/hello backends=[10.1.0.1:8080]\nBE id=1 10.1.0.1:8080/TCP cluster=a\n",
		},
		"families do not mix": {
			services: []cs.Service{dual},
			want: "FE 243.0.0.5:80/TCP id=1 service=demo/hello backends=[10.1.0.1:8080]\nFE [fd00:243::5]:80/TCP id=2 service=demo/hello backends=[[fd00:1::1]:8080]\n" +
				"BE id=1 10.1.0.1:8080/TCP cluster=a\nBE id=2 [fd00:1::1]:8080/TCP cluster=a\n",
		},
		"protocols do not mix": {
			services: []cs.Service{multi},
			want: "FE 243.0.0.5:80/TCP id=1 service=demo/hello backends=[10.1.0.1:8080]\nFE 243.0.0.5:80/UDP id=2 service=demo/hello backends=[10.1.0.1:5353]\n" +
				"BE id=1 10.1.0.1:8080/TCP cluster=a\nBE id=2 10.1.0.1:5353/UDP cluster=a\n",
		},
		"two services share a backend": {
			services: []cs.Service{service("hello", "243.0.0.5", slice("10.1.0.1")), service("world", "243.0.0.6", slice("10.1.0.1"))},
			want: "FE 243.0.0.5:80/TCP id=1 service=demo/hello backends=[10.1.0.1:8080]\nFE 243.0.0.6:80/TCP id=2 service=demo/world backends=[10.1.0.1:8080]\n" +
				"BE id=1 10.1.0.1:8080/TCP cluster=a\n",
		},
		"SCTP is for the packet path, which a Problem says": {
			services: []cs.Service{sctp}, want: "FE 243.0.0.5:80/SCTP id=1 service=demo/hello backends=[]\n", problems: []Reason{UnsupportedProtocol},
		},
		"unspecified VIP": {services: []cs.Service{zero}, problems: []Reason{InvalidVIP}},
		"VIP of two services goes to the first": {
			services: []cs.Service{service("hello", "243.0.0.5", slice("10.1.0.1")), service("world", "243.0.0.5", slice("10.1.0.2"))},
			want:     "FE 243.0.0.5:80/TCP id=1 service=demo/hello backends=[10.1.0.1:8080]\nBE id=1 10.1.0.1:8080/TCP cluster=a\n",
			problems: []Reason{VIPTaken},
		},
		"endpoint of the wrong family": {
			services: []cs.Service{service("hello", "243.0.0.5", wrongFamily)},
			want:     "FE 243.0.0.5:80/TCP id=1 service=demo/hello backends=[]\n", problems: []Reason{InvalidEndpoint},
		},
		"endpoint without a port": {
			services: []cs.Service{service("hello", "243.0.0.5", noPort)},
			want:     "FE 243.0.0.5:80/TCP id=1 service=demo/hello backends=[]\n", problems: []Reason{InvalidEndpoint},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got, problems := build(snapshotOf(test.services...), NewState(), new(idAllocator))
			if diff := cmp.Diff(test.want, got.Text()); diff != "" {
				t.Errorf("state (-want +got):\n%s", diff)
			}
			var reasons []Reason
			for _, p := range problems {
				reasons = append(reasons, p.Reason)
			}
			if diff := cmp.Diff(test.problems, reasons); diff != "" {
				t.Errorf("problems (-want +got):\n%s\n%v", diff, problems)
			}
		})
	}
}

// An endpoint that is added, removed or replaced costs a handful of writes, however large the Service is.
func TestOneEndpointCostsFewWrites(t *testing.T) {
	addrs := make([]string, 1000)
	for i := range addrs {
		addrs[i] = fmt.Sprintf("10.1.%d.%d", i/250, i%250+1)
	}
	snap := func(addrs []string) *cs.Snapshot {
		return &cs.Snapshot{Services: []cs.Service{service("hello", "243.0.0.5", slice(addrs...))}}
	}
	ids := new(idAllocator)
	have, _ := build(Input{Snapshot: snap(addrs)}, NewState(), ids)
	tests := map[string]struct {
		addrs []string
		want  int
	}{
		"one added":         {append([]string{"10.0.0.1"}, addrs...), 3},     // backend, slot, frontend
		"the first removed": {addrs[1:], 4},                                  // slot moved, frontend, slot, backend
		"one replaced":      {append([]string{"10.0.0.1"}, addrs[1:]...), 3}, // backend, slot, old backend
		"unchanged":         {addrs, 0},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			want, _ := build(Input{Snapshot: snap(test.addrs)}, have, ids)
			if n := diff(have, want).Writes(); n != test.want {
				t.Errorf("%d writes, want %d", n, test.want)
			}
		})
	}
}

func TestTextShowsLeftovers(t *testing.T) {
	s := NewState()
	fe := Address{netip.MustParseAddrPort("243.0.0.5:80"), cs.TCP}
	s.Frontends[fe] = Frontend{ID: 1, Count: 2}
	s.Slots[Slot{1, 0}] = 7
	s.Slots[Slot{9, 3}] = 7
	s.Backends[7] = Backend{Address: Address{netip.MustParseAddrPort("10.1.0.1:8080"), cs.TCP}}
	want := "FE 243.0.0.5:80/TCP id=1 backends=[10.1.0.1:8080 nothing-in-slot-1]\n" +
		"BE id=7 10.1.0.1:8080/TCP\nSLOT frontend=9 slot=3 backend=7\n"
	if diff := cmp.Diff(want, s.Text()); diff != "" {
		t.Error(diff)
	}
}

// snapshots draws small snapshots over few names, so that the same VIPs, ports and pods come back often.
func snapshots() *rapid.Generator[*cs.Snapshot] {
	return rapid.Custom(func(t *rapid.T) *cs.Snapshot {
		snap := &cs.Snapshot{}
		for i := range rapid.IntRange(0, 4).Draw(t, "services") {
			svc := cs.Service{Import: cs.Import{
				Service: cs.ServiceName{Namespace: "demo", Name: fmt.Sprint("s", i)},
				Type:    rapid.SampledFrom([]cs.ServiceType{cs.ClusterSetIP, cs.ClusterSetIP, cs.Headless}).Draw(t, "type"),
			}}
			for _, ip := range []string{"243.0.0.%d", "fd00:243::%d"} {
				if rapid.Bool().Draw(t, "vip") {
					n := rapid.IntRange(1, 4).Draw(t, "ip")
					svc.IPs = append(svc.IPs, netip.MustParseAddr(fmt.Sprintf(ip, n)))
				}
			}
			for p := range rapid.IntRange(0, 2).Draw(t, "ports") {
				svc.Ports = append(svc.Ports, cs.Port{
					Name: fmt.Sprint("p", p), Port: uint16(80 + p),
					Protocol: rapid.SampledFrom([]cs.Protocol{cs.TCP, cs.UDP, cs.SCTP}).Draw(t, "protocol"),
				})
			}
			for range rapid.IntRange(0, 3).Draw(t, "slices") {
				svc.Slices = append(svc.Slices, drawSlice(t, svc.Ports))
			}
			drawPolicy(t, &svc.Import)
			snap.Services = append(snap.Services, svc)
		}
		return snap
	})
}

func drawSlice(t *rapid.T, ports []cs.Port) cs.Slice {
	s := cs.Slice{Cluster: rapid.SampledFrom([]cs.ClusterID{"a", "b"}).Draw(t, "cluster"), Family: rapid.SampledFrom([]cs.Family{cs.IPv4, cs.IPv6}).Draw(t, "family")}
	for _, p := range ports {
		if rapid.IntRange(0, 3).Draw(t, "exposed") > 0 {
			s.Ports = append(s.Ports, cs.EndpointPort{Name: p.Name, Protocol: p.Protocol, Port: p.Port + 8000})
		}
	}
	format := map[cs.Family]string{cs.IPv4: "10.1.0.%d", cs.IPv6: "fd00:1::%d"}[s.Family]
	for range rapid.IntRange(0, 5).Draw(t, "endpoints") {
		a := netip.MustParseAddr(fmt.Sprintf(format, rapid.IntRange(1, 7).Draw(t, "pod")))
		e := cs.Endpoint{
			Addrs: []netip.Addr{a}, Ready: rapid.IntRange(0, 2).Draw(t, "ready") > 0,
			NodeName: cs.Share(rapid.SampledFrom([]string{"n1", "n2"}).Draw(t, "node")), Zone: cs.Share(rapid.SampledFrom([]string{"z1", "z2", ""}).Draw(t, "zone")),
		}
		e.Serving = e.Ready || rapid.Bool().Draw(t, "serving")
		e.Terminating = !e.Ready && rapid.Bool().Draw(t, "terminating")
		s.Endpoints = append(s.Endpoints, e)
	}
	s.Regions = cs.NewRegions(map[string]string{"z1": rapid.SampledFrom([]string{"", "r1", "r2"}).Draw(t, "region")})
	return s
}

// drawPolicy gives an import a traffic policy. Some annotations cannot be parsed.
func drawPolicy(t *rapid.T, imp *cs.Import) {
	imp.TrafficDistribution = rapid.SampledFrom([]string{"", "", "PreferClose", "PreferSameNode"}).Draw(t, "distribution")
	imp.InternalTrafficPolicy = rapid.SampledFrom([]string{"", "", "Local"}).Draw(t, "policy")
	imp.SessionAffinity.ClientIP = rapid.IntRange(0, 3).Draw(t, "affinity") == 0
	imp.Annotations = map[string]string{}
	for _, a := range []struct {
		key    string
		values []string
	}{
		{AnnotationPrefer, []string{"node,remote", "zone", "region,cluster", "moon"}},
		{AnnotationClusterWeights, []string{"a=3,b=1", "a=0", "b=7,c=2", "a"}},
		{AnnotationBalancer, []string{"maglev", "random", "fair"}},
	} {
		if i := rapid.IntRange(-4, len(a.values)-1).Draw(t, a.key); i >= 0 {
			imp.Annotations[a.key] = a.values[i]
		}
	}
}

// inputs draws the input of a node; nearly all changes are in the snapshot.
func inputs() *rapid.Generator[Input] {
	return rapid.Custom(func(t *rapid.T) Input {
		in := Input{Snapshot: snapshots().Draw(t, "snapshot"), Node: Node{Cluster: "a", Name: "n1", Zone: "z1", Region: "r1"}}
		seldom := func(label string) bool { return rapid.IntRange(0, 5).Draw(t, label) == 0 }
		if seldom("elsewhere") {
			in.Node = rapid.SampledFrom([]Node{{}, {Cluster: "b", Name: "n1", Zone: "z2"}}).Draw(t, "node")
		}
		in.ZonesSpanClusters, in.RegionsSpanClusters = seldom("zones span clusters"), seldom("regions span clusters")
		if seldom("drained") {
			in.Drained = map[cs.ClusterID]bool{rapid.SampledFrom([]cs.ClusterID{"a", "b"}).Draw(t, "cluster"): true}
		}
		for _, r := range []string{"243.0.0.0/8", "fd00:243::/48"} {
			if !seldom("range") {
				in.Ranges = append(in.Ranges, netip.MustParsePrefix(r))
			}
		}
		return in
	})
}

// However small the maps, no write finds one full, and a Problem names each Service without room. Maps that are large
// enough serve all.
func TestPlansStayWithinLimits(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		have := NewState()
		planner := NewPlanner(have)
		draw := func(what string, most int) int { return rapid.IntRange(1, most).Draw(t, what) }
		limits := Limits{Frontends: draw("frontends", 12), Slots: draw("slots", 500), Backends: draw("backends", 20), Services: draw("services", 5)}
		for range draw("inputs", 5) {
			in := inputs().Draw(t, "input")
			in.Limits = limits
			if rapid.IntRange(0, 4).Draw(t, "restart") == 0 {
				planner = NewPlanner(have)
			}
			unlimited, _ := build(Input{
				Snapshot: in.Snapshot, Node: in.Node, ZonesSpanClusters: in.ZonesSpanClusters, RegionsSpanClusters: in.RegionsSpanClusters,
				Ranges: in.Ranges, Drained: in.Drained,
			}, NewState(), new(idAllocator))
			var problems []Problem
			for round := 0; ; round++ {
				var plan Plan
				plan, problems = planner.Plan(in)
				want := planner.State()
				for n := range plan.Writes() + 1 {
					s := have.Clone()
					s.Apply(plan.Prefix(n))
					if len(s.Frontends) > limits.Frontends || len(s.Slots) > limits.Slots || len(s.Backends) > limits.Backends || len(s.Services) > limits.Services {
						t.Fatalf("after %d of %d writes there are %d frontends, %d slots, %d backends and %d Services, for %+v",
							n, plan.Writes(), len(s.Frontends), len(s.Slots), len(s.Backends), len(s.Services), limits)
					}
					checkSafe(t, s, have, want)
				}
				if rapid.IntRange(0, 7).Draw(t, "cut") == 0 {
					have.Apply(plan.Prefix(rapid.IntRange(0, plan.Writes()).Draw(t, "cut at")))
					planner.Reset(have)
					continue
				}
				have.Apply(plan)
				if plan.Writes() == 0 {
					break
				}
				if round == 20 {
					t.Fatalf("the same input still costs %d writes after %d plans", plan.Writes(), round)
				}
			}
			named := slices.ContainsFunc(problems, func(p Problem) bool { return p.Reason == NoRoom })
			whole := cmp.Diff(numberless(unlimited), numberless(have)) == ""
			if whole == named {
				t.Fatalf("all Services are served: %t; problems %v", whole, problems)
			}
			if rapid.IntRange(0, 2).Draw(t, "larger maps") == 0 {
				in.Limits = Limits{}
				plan, _ := newPlanner(have, planner.ids).Plan(in)
				all := have.Clone()
				all.Apply(plan)
				if diff := cmp.Diff(numberless(unlimited), numberless(all)); diff != "" {
					t.Fatalf("with room for all (-want +got):\n%s", diff)
				}
			}
		}
	})
}

// Between two inputs the agent may restart, and an update may stop after any write. Clients must be safe after every
// single write. A Planner that plans many inputs must plan each as a new Planner would.
func TestEveryPrefixOfEveryPlanIsSafe(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		have := NewState()
		planner := NewPlanner(have)
		var snap *cs.Snapshot
		for range rapid.IntRange(1, 6).Draw(t, "inputs") {
			if rapid.IntRange(0, 4).Draw(t, "restart") == 0 {
				planner = NewPlanner(have)
			}
			in := inputs().Draw(t, "input")
			in.Snapshot = mixed(t, snap, in.Snapshot)
			snap = in.Snapshot
			ids := planner.ids
			fresh, freshProblems := build(in, have, &ids)
			plan, problems := planner.Plan(in)
			want := planner.State()
			if diff := cmp.Diff(fresh, want, cmpopts.EquateComparable(Address{}, netip.Prefix{}), cmpopts.EquateEmpty()); diff != "" {
				t.Fatalf("the Planner plans another state than a new one (-new +planner):\n%s", diff)
			}
			if diff := cmp.Diff(freshProblems, problems, cmpopts.EquateEmpty()); diff != "" {
				t.Fatalf("problems (-new +planner):\n%s", diff)
			}

			checkNumbersAreFresh(t, have, plan)
			for n := range plan.Writes() + 1 {
				s := have.Clone()
				s.Apply(plan.Prefix(n))
				checkSafe(t, s, have, want)
			}
			whole := have.Clone()
			whole.Apply(plan)
			if diff := cmp.Diff(want, whole, cmpopts.EquateComparable(Address{}, netip.Prefix{})); diff != "" {
				t.Fatalf("have + plan is not want (-want +got):\n%s", diff)
			}
			if n := diff(have, want).Writes(); n < plan.Writes() {
				t.Fatalf("%d writes, %d are enough", plan.Writes(), n)
			}
			whole = have.Clone()
			whole.Apply(diff(have, want))
			if n := diff(whole, want).Writes(); n != 0 {
				t.Fatalf("have + diff(have, want) is %d writes from want", n)
			}
			if again, _ := NewPlanner(want).Plan(in); again.Writes() != 0 {
				t.Fatalf("the same input after a restart costs %d writes: %+v", again.Writes(), again)
			}
			if again, _ := planner.Plan(in); again.Writes() != 0 {
				t.Fatalf("the same input again costs %d writes: %+v", again.Writes(), again)
			}
			if rapid.IntRange(0, 3).Draw(t, "cut") == 0 {
				have.Apply(plan.Prefix(rapid.IntRange(0, plan.Writes()).Draw(t, "cut at")))
				planner.Reset(have)
			} else {
				have = want
			}
		}
	})
}

// mixed returns next with some of its Services replaced by those of last, in the same memory.
func mixed(t *rapid.T, last, next *cs.Snapshot) *cs.Snapshot {
	if last == nil {
		return next
	}
	mix := &cs.Snapshot{Services: slices.Clone(next.Services)}
	for i := range mix.Services {
		if i < len(last.Services) && rapid.IntRange(0, 3).Draw(t, "unchanged") > 0 {
			mix.Services[i] = last.Services[i]
		}
	}
	return mix
}

// checkSafe fails if a client of s would get no backend, or one that belongs neither to have nor to want.
func checkSafe(t *rapid.T, s, have, want State) {
	t.Helper()
	for a, fe := range s.Frontends {
		allowed := append(have.slotTable(have.Frontends[a]), want.slotTable(want.Frontends[a])...)
		if _, ok := s.Services[fe.Service]; !ok && fe.Service != 0 {
			t.Fatalf("%s is of Service %d, which has no name\n%s", a, fe.Service, s.Text())
		}
		for i := range fe.Count {
			id, ok := s.Slots[Slot{fe.ID, i}]
			if !ok {
				t.Fatalf("%s has no slot %d\n%s", a, i, s.Text())
			}
			be, ok := s.Backends[id]
			if !ok {
				t.Fatalf("slot %d of %s names backend %d, which is missing\n%s", i, a, id, s.Text())
			}
			if _, ok := s.Clusters[be.Cluster]; !ok {
				t.Fatalf("backend %d of %s is of member %d, which has no name\n%s", id, a, be.Cluster, s.Text())
			}
			if !slices.Contains(allowed, be.Address) {
				t.Fatalf("slot %d of %s leads to %s, a backend of neither state\n%s", i, a, be.Address, s.Text())
			}
		}
	}
}

// checkNumbersAreFresh fails if p reuses a number of have.
func checkNumbersAreFresh(t *rapid.T, have State, p Plan) {
	t.Helper()
	for _, w := range p.Backends.Put {
		if a, ok := have.Backends[w.Key]; ok && a.Address != w.Value.Address || w.Key == 0 {
			t.Fatalf("backend number %d of %s given to %s", w.Key, a.Address, w.Value.Address)
		}
	}
	for _, w := range p.Frontends.Put {
		if _, had := have.Frontends[w.Key]; had {
			continue
		}
		for a, fe := range have.Frontends {
			if fe.ID == w.Value.ID {
				t.Fatalf("frontend number %d of %s given to %s", fe.ID, a, w.Key)
			}
		}
	}
}

// One plan repairs any content of the maps.
func TestGarbageIsRepaired(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		have := NewState()
		small := rapid.Uint32Range(0, 5)
		addrs := rapid.SampledFrom([]string{"243.0.0.1:80", "243.0.0.2:80", "10.1.0.1:8080", "10.1.0.2:8080", "[fd00:243::1]:80"})
		for range rapid.IntRange(0, 6).Draw(t, "entries") {
			a := Address{netip.MustParseAddrPort(addrs.Draw(t, "addr")), cs.TCP}
			have.Frontends[a] = Frontend{ID: FrontendID(small.Draw(t, "fe")), Count: rapid.Uint32().Draw(t, "count")}
			have.Slots[Slot{FrontendID(small.Draw(t, "fe")), small.Draw(t, "slot")}] = BackendID(small.Draw(t, "be"))
			have.Backends[BackendID(small.Draw(t, "be"))] = Backend{Address: Address{netip.MustParseAddrPort(addrs.Draw(t, "addr")), cs.TCP}}
			have.Services[ServiceID(small.Draw(t, "svc"))] = cs.ServiceName{Namespace: "demo", Name: fmt.Sprint("s", small.Draw(t, "name"))}
			have.Clusters[ClusterIndex(small.Draw(t, "index"))] = rapid.SampledFrom([]cs.ClusterID{"a", "b"}).Draw(t, "cluster")
		}
		planner := NewPlanner(have)
		plan, _ := planner.Plan(inputs().Draw(t, "input"))
		have.Apply(plan)
		want := planner.State()
		if diff := cmp.Diff(want, have, cmpopts.EquateComparable(Address{}, netip.Prefix{})); diff != "" {
			t.Fatalf("not repaired (-want +got):\n%s", diff)
		}
		checkSafe(t, have, want, want)

		in, ids := inputs().Draw(t, "input"), planner.ids
		want, _ = build(in, have, &ids)
		planner.Plan(in)
		if diff := cmp.Diff(want, planner.State(), cmpopts.EquateComparable(Address{}, netip.Prefix{})); diff != "" {
			t.Fatalf("the garbage is remembered (-new +planner):\n%s", diff)
		}
	})
}

// Numbers wrap around after four billion; 0 and numbers in use are skipped.
func TestNumbersWrap(t *testing.T) {
	ids := &idAllocator{backend: ^uint32(0), frontend: ^uint32(0)}
	have := NewState()
	have.Backends[1] = Backend{Address: Address{netip.MustParseAddrPort("10.9.9.9:1"), cs.TCP}}
	want, _ := build(snapshotOf(service("hello", "243.0.0.5", slice("10.1.0.1"))), have, ids)
	text := "FE 243.0.0.5:80/TCP id=1 service=demo/hello backends=[10.1.0.1:8080]\nBE id=2 10.1.0.1:8080/TCP cluster=a\n"
	if diff := cmp.Diff(text, want.Text()); diff != "" {
		t.Error(diff)
	}
}

// A new Planner counts on from the highest number in the maps, also in orphan slots of a half-finished update.
func TestNumbersGoOnAfterRestart(t *testing.T) {
	have := NewState()
	have.Frontends[Address{netip.MustParseAddrPort("243.0.0.9:80"), cs.TCP}] = Frontend{ID: 3}
	have.Slots[Slot{Frontend: 9}] = 7
	have.Backends[5] = Backend{Address: Address{netip.MustParseAddrPort("10.9.9.9:1"), cs.TCP}}
	want, _ := build(snapshotOf(service("hello", "243.0.0.5", slice("10.1.0.1"))), have, new(idAllocator))
	text := "FE 243.0.0.5:80/TCP id=10 service=demo/hello backends=[10.1.0.1:8080]\nBE id=8 10.1.0.1:8080/TCP cluster=a\n"
	if diff := cmp.Diff(text, want.Text()); diff != "" {
		t.Error(diff)
	}
}
