package main

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/cmd/internal/tables"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

func showServices(ctx context.Context, r *datapath.Reader) (tables.Table, error) {
	state, err := r.Load(ctx)
	if err != nil {
		return nil, err
	}
	chosen, err := r.Chosen()
	if err != nil {
		return nil, err
	}
	return services(state, chosen), nil
}

// services returns the rows for a state, sorted by Service, then by address.
func services(s lb.State, chosen map[lb.ServiceID]uint64) tables.Services {
	used := map[lb.FrontendID]map[lb.BackendID]bool{}
	for slot, be := range s.Slots {
		if used[slot.Frontend] == nil {
			used[slot.Frontend] = map[lb.BackendID]bool{}
		}
		used[slot.Frontend][be] = true
	}
	rows := tables.Services{}
	for a, fe := range s.Frontends {
		row := tables.Service{
			Service: serviceText(s, fe.Service), VIP: a.AddrPort, Protocol: a.Protocol.String(), Clusters: []string{}, Balancer: "random",
			AffinitySeconds: fe.Affinity, Chosen: chosen[fe.Service],
		}
		if fe.Maglev {
			row.Balancer = "maglev"
		}
		if fe.Count > 0 {
			row.Backends = len(used[fe.ID])
			for be := range used[fe.ID] {
				if c := string(s.Clusters[s.Backends[be].Cluster]); c != "" && !slices.Contains(row.Clusters, c) {
					row.Clusters = append(row.Clusters, c)
				}
			}
		}
		slices.Sort(row.Clusters)
		rows = append(rows, row)
	}
	slices.SortFunc(rows, func(a, b tables.Service) int {
		return cmp.Or(strings.Compare(a.Service, b.Service), a.VIP.Compare(b.VIP), strings.Compare(a.Protocol, b.Protocol))
	})
	return rows
}

// serviceText returns the name of a Service, "" if the state has none for the id.
func serviceText(s lb.State, id lb.ServiceID) string {
	if n, ok := s.Services[id]; ok {
		return n.String()
	}
	return ""
}

func showBackends(ctx context.Context, r *datapath.Reader) (tables.Table, error) {
	state, err := r.Load(ctx)
	if err != nil {
		return nil, err
	}
	return backends(state), nil
}

// backends returns the rows for a state, sorted by address.
func backends(s lb.State) tables.Backends {
	names := map[lb.FrontendID]string{}
	for _, fe := range s.Frontends {
		names[fe.ID] = serviceText(s, fe.Service)
	}
	users := map[lb.BackendID]map[string]bool{}
	for slot, be := range s.Slots {
		if users[be] == nil {
			users[be] = map[string]bool{}
		}
		if n := names[slot.Frontend]; n != "" {
			users[be][n] = true
		}
	}
	rows := tables.Backends{}
	for id, be := range s.Backends {
		row := tables.Backend{
			Backend: be.AddrPort, Protocol: be.Protocol.String(), Cluster: string(s.Clusters[be.Cluster]), Draining: be.Draining,
			Services: slices.Sorted(maps.Keys(users[id])),
		}
		if row.Services == nil {
			row.Services = []string{}
		}
		rows = append(rows, row)
	}
	slices.SortFunc(rows, func(a, b tables.Backend) int {
		return cmp.Or(a.Backend.Compare(b.Backend), strings.Compare(a.Protocol, b.Protocol), strings.Compare(a.Cluster, b.Cluster))
	})
	return rows
}

func showConnections(r *datapath.Reader, limit int) (tables.Table, error) {
	if limit < 1 {
		return nil, fmt.Errorf("--limit=%d is less than 1", limit)
	}
	found, err := r.Connections(limit)
	if err != nil {
		return nil, err
	}
	return connections(found), nil
}

// connections returns the rows for connections, the one with the latest packet first.
func connections(found []datapath.Connection) tables.Connections {
	rows := tables.Connections{}
	for _, c := range found {
		rows = append(rows, tables.Connection{
			Protocol: c.Protocol.String(), Client: c.Client, VIP: c.VIP, Backend: c.Backend, Cluster: string(c.Cluster), Service: nameText(c.Service),
			State: c.State, Fast: c.Fast, SilentSeconds: int(c.Silent / time.Second),
		})
	}
	slices.SortFunc(rows, func(a, b tables.Connection) int {
		return cmp.Or(cmp.Compare(a.SilentSeconds, b.SilentSeconds), a.Client.Compare(b.Client), a.VIP.Compare(b.VIP))
	})
	return rows
}

func nameText(n clusterset.ServiceName) string {
	if n == (clusterset.ServiceName{}) {
		return ""
	}
	return n.String()
}

func showHooks(r *datapath.Reader, cgroupRoot string) (tables.Table, error) {
	found, err := r.Attachments(cgroupRoot)
	if err != nil {
		return nil, err
	}
	return hooks(found), nil
}

func hooks(found []datapath.Attachment) tables.Hooks {
	rows := tables.Hooks{}
	for _, a := range found {
		row := tables.Hook{Hook: a.Hook, Kind: a.Kind, Where: a.Where, Program: a.Program, Runs: a.Runs}
		if a.Runs > 0 {
			row.NanosecondsPerRun = uint64(a.Time.Nanoseconds()) / a.Runs
		}
		rows = append(rows, row)
	}
	return rows
}

func showDrops(ctx context.Context, r *datapath.Reader) (tables.Table, error) {
	state, err := r.Load(ctx)
	if err != nil {
		return nil, err
	}
	counts, err := r.Refusals()
	if err != nil {
		return nil, err
	}
	return drops(state, counts), nil
}

// drops returns the rows for counters, the largest first. Removed Services appear by their id.
func drops(s lb.State, counts map[datapath.Refusal]uint64) tables.Drops {
	rows := tables.Drops{}
	for refusal, n := range counts {
		row := tables.Drop{Service: serviceText(s, refusal.Service), Reason: refusal.Reason.String(), Count: n, Meaning: meanings[refusal.Reason]}
		if row.Service == "" && refusal.Service != 0 {
			row.Service = fmt.Sprintf("(removed, id %d)", refusal.Service)
		}
		rows = append(rows, row)
	}
	slices.SortFunc(rows, func(a, b tables.Drop) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), strings.Compare(a.Service, b.Service), strings.Compare(a.Reason, b.Reason))
	})
	return rows
}

// meanings explains each drop reason.
var meanings = map[bpf.DropReason]string{
	bpf.DropNoBackend:    "no backend is ready",
	bpf.DropBackendGone:  "the chosen backend was removed meanwhile, twice in a row",
	bpf.DropNoMemory:     "no space to remember the VIP of a UDP socket",
	bpf.DropNoFrontend:   "no Service has the ClusterSetIP, or none at this port",
	bpf.DropMalformed:    "the packet is shorter than its headers claim, or has an invalid header",
	bpf.DropFragment:     "a fragment whose first fragment was not seen",
	bpf.DropProtocol:     "neither TCP, UDP, SCTP nor an ICMP error about them",
	bpf.DropSCTPPort:     "SCTP to a port other than the backend's, in a packet too large to checksum",
	bpf.DropNoConnection: "a packet in the middle of an unknown connection",
	bpf.DropItself:       "the client itself is the only backend",
	bpf.DropUnanswered:   "refused without an answer, because of the rate limit for these",
	bpf.DropNewFlows:     "a new connection of the packet path beyond the limit of its CPU or client, dropped without an answer",
}
