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
