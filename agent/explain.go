package agent

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Explanation is how one Service fares on this node: what the agent was told, and what clients meet in the kernel.
type Explanation struct {
	Known     bool // the last snapshot has it; without that there is nothing but the counters
	Import    clusterset.Import
	Endpoints []ExplainedEndpoint // by cluster
	Frontends []ExplainedFrontend // that there should be, by address
	Problems  []lb.Problem
	Counters  datapath.Counters
}

// EndpointState says what an endpoint is for this node.
type EndpointState string

// The states of endpoints. All but the first two keep the clients they have, as long as they serve.
const (
	EndpointServes      EndpointState = "serves"      // it gets new clients
	EndpointNotReady    EndpointState = "not ready"   // its pod says so
	EndpointTerminating EndpointState = "terminating" // and others are ready
	EndpointDrained     EndpointState = "drained"     // the packets of its cluster die, as this node sees them
	EndpointStandsBy    EndpointState = "stands by"   // the Service prefers others, or its ports are not the Service's
)

// ExplainedEndpoint is one endpoint of a Service.
type ExplainedEndpoint struct {
	Addr    netip.Addr
	Cluster clusterset.ClusterID
	Node    string
	State   EndpointState
}

// FrontendState says whether a frontend is in the kernel as it should be.
type FrontendState string

// The states of frontends.
const (
	FrontendRight   FrontendState = "right"
	FrontendMissing FrontendState = "missing"
	FrontendWrong   FrontendState = "wrong" // it leads to others than it should, or nowhere
	FrontendTaken   FrontendState = "taken" // it belongs to another Service
)

// ExplainedFrontend is one VIP, port and protocol of a Service.
type ExplainedFrontend struct {
	Address  lb.Address
	State    FrontendState
	Owner    clusterset.ServiceName // when it is taken
	Backends []lb.Address           // that get new clients, in the kernel, each once; with none clients are refused
}

// Explain asks the kernel about one Service.
func (a *Agent) Explain(name clusterset.ServiceName) (Explanation, error) {
	a.syncing.Lock() // so that snapshot and kernel are of one time
	defer a.syncing.Unlock()
	if a.isClosed() {
		return Explanation{}, ErrClosed
	}
	counters, err := a.dp.Counters()
	if err != nil {
		return Explanation{}, err
	}
	e := Explanation{Counters: counters[name]}
	svc, known := a.find(name)
	if !known {
		return e, nil
	}
	e.Known, e.Import = true, svc.Import
	a.mu.Lock()
	for _, p := range a.status.Problems {
		if p.Service == name {
			e.Problems = append(e.Problems, p)
		}
	}
	a.mu.Unlock()
	// What there should be, of this Service alone; what other Services have shows in the kernel.
	in := a.input
	in.Snapshot = &clusterset.Snapshot{Services: []clusterset.Service{svc}}
	planner := lb.NewPlanner(lb.NewState())
	planner.Plan(in)
	want := planner.State()
	if e.Frontends, err = a.frontends(want, name); err != nil {
		return Explanation{}, err
	}
	e.Endpoints = endpoints(want, &in, &svc)
	return e, nil
}

// find looks a Service up in the last snapshot, of which the caller holds the lock.
func (a *Agent) find(name clusterset.ServiceName) (clusterset.Service, bool) {
	if a.input.Snapshot == nil {
		return clusterset.Service{}, false
	}
	services := a.input.Snapshot.Services
	i, ok := slices.BinarySearchFunc(services, name, func(s clusterset.Service, n clusterset.ServiceName) int { return s.Service.Compare(n) })
	if !ok {
		return clusterset.Service{}, false
	}
	return services[i], true
}

// frontends compares those of want with the kernel.
func (a *Agent) frontends(want lb.State, name clusterset.ServiceName) ([]ExplainedFrontend, error) {
	var all []ExplainedFrontend
	for _, at := range slices.SortedFunc(maps.Keys(want.Frontends), lb.Address.Compare) {
		have, found, err := a.dp.Frontend(at)
		if err != nil {
			return nil, err
		}
		fe := ExplainedFrontend{Address: at, State: FrontendRight}
		slices.SortFunc(have.Backends, lb.Address.Compare)
		switch {
		case !found:
			fe.State = FrontendMissing
		case have.Service != name:
			fe.State, fe.Owner = FrontendTaken, have.Service
		case have.Broken > 0 || !slices.Equal(have.Backends, table(want, want.Frontends[at])):
			fe.State = FrontendWrong
		}
		fe.Backends = slices.Compact(have.Backends)
		all = append(all, fe)
	}
	return all, nil
}

// table lists the backends of a frontend, sorted and as often as they have slots.
func table(s lb.State, fe lb.Frontend) []lb.Address {
	var all []lb.Address
	for i := range fe.Count {
		all = append(all, s.Backends[s.Slots[lb.Slot{Frontend: fe.ID, Index: i}]].Address)
	}
	slices.SortFunc(all, lb.Address.Compare)
	return all
}

// endpoints says of each endpoint of svc what it is by want.
func endpoints(want lb.State, in *lb.Input, svc *clusterset.Service) []ExplainedEndpoint {
	serve := map[netip.Addr]bool{}
	for _, id := range want.Slots {
		serve[want.Backends[id].AddrPort.Addr()] = true
	}
	var all []ExplainedEndpoint
	for _, s := range svc.Slices {
		for _, e := range s.Endpoints {
			if len(e.Addrs) == 0 {
				continue
			}
			x := ExplainedEndpoint{Addr: e.Addrs[0].Unmap(), Cluster: s.Cluster, Node: e.NodeName.String(), State: EndpointStandsBy}
			switch {
			case serve[x.Addr]:
				x.State = EndpointServes
			case svc.Type != clusterset.ClusterSetIP && e.Ready:
				x.State = EndpointServes // by name
			case in.Drained[s.Cluster]:
				x.State = EndpointDrained
			case e.Serving && e.Terminating:
				x.State = EndpointTerminating
			case !e.Ready:
				x.State = EndpointNotReady
			}
			all = append(all, x)
		}
	}
	return all
}

// Counters returns what clients of each Service that anybody asked for have met. Those of none, or of one that is
// gone, count for the zero name. It is nil after Close.
func (a *Agent) Counters() (map[clusterset.ServiceName]datapath.Counters, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return nil, nil
	}
	return a.dp.Counters()
}

// EvictedUDPVIPs returns how many VIPs of unconnected UDP sockets had to make room for others; 0 after Close.
func (a *Agent) EvictedUDPVIPs() (uint64, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return 0, nil
	}
	return a.dp.EvictedUDPVIPs()
}
