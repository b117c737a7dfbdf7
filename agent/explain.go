package agent

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// frontendReader reads frontends from the kernel.
type frontendReader interface {
	Frontend(a lb.Address) (datapath.Entry, bool, error)
}

// Explanation is the state of one Service on this node: what the snapshot says, and what the kernel holds.
type Explanation struct {
	Known     bool // the last snapshot has the Service; without it only Counters are set
	Import    clusterset.Import
	Endpoints []ExplainedEndpoint // by cluster
	Frontends []ExplainedFrontend // that the kernel should hold, by address
	Problems  []lb.Problem
	Counters  datapath.Counters
}

// EndpointState is the state of an endpoint on this node.
type EndpointState string

// The states of endpoints. The last three keep their clients as long as they serve.
const (
	EndpointServes      EndpointState = "serves"      // it gets new clients
	EndpointNotReady    EndpointState = "not ready"   // its pod is not ready
	EndpointTerminating EndpointState = "terminating" // and other endpoints are ready
	EndpointDrained     EndpointState = "drained"     // this node gets no answer from its cluster
	EndpointStandby     EndpointState = "standby"     // the Service prefers others, or the endpoint lacks its ports
)

// ExplainedEndpoint is one endpoint of a Service.
type ExplainedEndpoint struct {
	Addr    netip.Addr
	Cluster clusterset.ClusterID
	Node    string
	State   EndpointState
}

// FrontendState compares a frontend in the kernel with the intended one.
type FrontendState string

// The states of frontends.
const (
	FrontendCorrect  FrontendState = "correct"
	FrontendMissing  FrontendState = "missing"
	FrontendWrong    FrontendState = "wrong"    // it has other backends than it should, or broken slots
	FrontendConflict FrontendState = "conflict" // it belongs to another Service
)

// ExplainedFrontend is one VIP, port and protocol of a Service.
type ExplainedFrontend struct {
	Address  lb.Address
	State    FrontendState
	Owner    clusterset.ServiceName // of a frontend in conflict
	Backends []lb.Address           // that get new clients, as the kernel has them, each once; without any, clients are refused
}

// Explain compares one Service with the kernel.
func (a *Agent) Explain(name clusterset.ServiceName) (Explanation, error) {
	a.syncing.Lock() // no Sync may come between reading the snapshot and the kernel
	defer a.syncing.Unlock()
	if a.isClosed() {
		return Explanation{}, ErrClosed
	}
	counters, err := a.counters.Counters()
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
	// Plan this Service alone; a VIP of another Service shows up in the kernel.
	in := a.input
	in.Snapshot = &clusterset.Snapshot{Services: []clusterset.Service{svc}}
	planner := lb.NewPlanner(lb.NewState())
	planner.Plan(in)
	want := planner.State()
	if e.Frontends, err = a.explainFrontends(want, name); err != nil {
		return Explanation{}, err
	}
	e.Endpoints = explainEndpoints(want, &in, &svc)
	return e, nil
}

// find returns a Service of the last snapshot. The caller holds syncing.
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

// explainFrontends compares the frontends of want with the kernel.
func (a *Agent) explainFrontends(want lb.State, name clusterset.ServiceName) ([]ExplainedFrontend, error) {
	var all []ExplainedFrontend
	for _, at := range slices.SortedFunc(maps.Keys(want.Frontends), lb.Address.Compare) {
		have, found, err := a.frontends.Frontend(at)
		if err != nil {
			return nil, err
		}
		fe := ExplainedFrontend{Address: at, State: FrontendCorrect}
		slices.SortFunc(have.Backends, lb.Address.Compare)
		switch {
		case !found:
			fe.State = FrontendMissing
		case have.Service != name:
			fe.State, fe.Owner = FrontendConflict, have.Service
		case have.Broken > 0 || !slices.Equal(have.Backends, table(want, want.Frontends[at])):
			fe.State = FrontendWrong
		}
		fe.Backends = slices.Compact(have.Backends)
		all = append(all, fe)
	}
	return all, nil
}

// table returns the backend of each slot of a frontend, sorted.
func table(s lb.State, fe lb.Frontend) []lb.Address {
	var all []lb.Address
	for i := range fe.Count {
		all = append(all, s.Backends[s.Slots[lb.Slot{Frontend: fe.ID, Index: i}]].Address)
	}
	slices.SortFunc(all, lb.Address.Compare)
	return all
}

// explainEndpoints returns the state of each endpoint of svc in want.
func explainEndpoints(want lb.State, in *lb.Input, svc *clusterset.Service) []ExplainedEndpoint {
	serving := map[netip.Addr]bool{}
	for _, id := range want.Slots {
		serving[want.Backends[id].AddrPort.Addr()] = true
	}
	var all []ExplainedEndpoint
	for _, s := range svc.Slices {
		for _, e := range s.Endpoints {
			if len(e.Addrs) == 0 {
				continue
			}
			x := ExplainedEndpoint{Addr: e.Addrs[0].Unmap(), Cluster: s.Cluster, Node: e.NodeName.String(), State: EndpointStandby}
			switch {
			case serving[x.Addr]:
				x.State = EndpointServes
			case svc.Type != clusterset.ClusterSetIP && e.Ready:
				x.State = EndpointServes // through DNS
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
