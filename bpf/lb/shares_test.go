package lb

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	cs "github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// sharedService returns a Service of members with a number of ports, created at second age.
func sharedService(n, ports, age int, members ...cs.ClusterID) cs.Service {
	svc := cs.Service{Import: cs.Import{
		Service: cs.ServiceName{Namespace: "shop", Name: fmt.Sprintf("s%02d", n)}, Type: cs.ClusterSetIP, Clusters: members,
		IPs: []netip.Addr{netip.AddrFrom4([4]byte{243, 0, 0, byte(n)})}, Created: time.Unix(int64(age), 0),
	}}
	for i := range ports {
		svc.Ports = append(svc.Ports, cs.Port{Name: fmt.Sprint(i), Protocol: cs.TCP, Port: uint16(i + 1)})
	}
	return svc
}

// Member east fills the map. Its youngest Services wait, in whatever order and over however many plans the Services come;
// west's are served although their names come last and they are the youngest of all.
func TestFrontendsAreSharedByMember(t *testing.T) {
	var all []cs.Service
	for n := range 10 {
		all = append(all, sharedService(n, 10, 100-n, "east"))
	}
	all = append(all, sharedService(20, 10, 1000, "west"), sharedService(21, 10, 1001, "west"), sharedService(22, 10, 1, "east", "west"))
	const limit = 60
	want := []string{"s07", "s08", "s09", "s20", "s21", "s22"} // east's oldest have the highest numbers
	served := func(p *Planner, services []cs.Service) []string {
		var names []string
		for range 2 { // a frontend that goes has room from the next plan on
			_, _ = p.Plan(Input{Snapshot: &cs.Snapshot{Services: services}, Limits: Limits{Frontends: limit}})
		}
		found := map[cs.ServiceName]bool{}
		for a := range p.State().Frontends {
			i := slices.IndexFunc(services, func(s cs.Service) bool { return s.IPs[0] == a.AddrPort.Addr() })
			found[services[i].Service] = true
		}
		for n := range maps.Keys(found) {
			names = append(names, n.Name)
		}
		slices.Sort(names)
		return names
	}
	p := NewPlanner(NewState())
	if got := served(p, all[:10]); len(got) != 6 {
		t.Errorf("alone, east has %v, want six of its Services", got)
	}
	if got := served(p, all); !slices.Equal(got, want) {
		t.Errorf("with both, %v are served, want %v", got, want)
	}
	if got := served(NewPlanner(p.State()), all); !slices.Equal(got, want) {
		t.Errorf("after a restart %v are served, want %v", got, want)
	}
	if got := served(NewPlanner(NewState()), all); !slices.Equal(got, want) {
		t.Errorf("after a reboot %v are served, want %v", got, want)
	}
	_, problems := p.Plan(Input{Snapshot: &cs.Snapshot{Services: all}, Limits: Limits{Frontends: limit}})
	if len(problems) != 7 || problems[0].Reason != NoRoom {
		t.Errorf("the problems are %v, want one for each of seven waiting Services", problems)
	}
	if got := served(p, all[5:]); len(got) != 6 {
		t.Errorf("after five of east's went, %v are served", got)
	}
}

// The map has room for one frontend, and three Services claim it. Only the first one is told of the room; the others are told of
// its claim, whether it is served or waits too.
func TestWaitingServiceOfATakenVIP(t *testing.T) {
	for name, tc := range map[string]struct {
		ages []int // of s00, s01 and s02
		want map[string]Reason
	}{
		"the first is the oldest":   {[]int{1, 2, 3}, map[string]Reason{"s01": VIPTaken, "s02": VIPTaken}},
		"the first waits":           {[]int{3, 2, 1}, map[string]Reason{"s00": NoRoom, "s01": VIPTaken}},
		"the first is not the last": {[]int{2, 1, 3}, map[string]Reason{"s00": NoRoom, "s02": VIPTaken}},
	} {
		var all []cs.Service
		for n, age := range tc.ages {
			svc := sharedService(n, 1, age, "east")
			svc.IPs = []netip.Addr{netip.MustParseAddr("243.0.0.1")}
			all = append(all, svc)
		}
		p := NewPlanner(NewState())
		for range 2 {
			_, problems := p.Plan(Input{Snapshot: &cs.Snapshot{Services: all}, Limits: Limits{Frontends: 1}})
			have := map[string]Reason{}
			for _, problem := range problems {
				have[problem.Service.Name] = problem.Reason
				if problem.Reason == VIPTaken && problem.Message != "243.0.0.1:1/TCP belongs to shop/s00" {
					t.Errorf("%s: the problem is %q", name, problem.Message)
				}
			}
			if !maps.Equal(have, tc.want) || len(problems) != len(tc.want) {
				t.Errorf("%s: the problems are %v, want %v", name, problems, tc.want)
			}
		}
	}
}
