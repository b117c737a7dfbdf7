package main

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// serviceRow is one VIP, port and protocol.
type serviceRow struct {
	Service  string         `json:"service"`
	VIP      netip.AddrPort `json:"vip"`
	Protocol string         `json:"protocol"`
	// Backends is how many different ones take new clients; with none, clients are refused.
	Backends int      `json:"backends"`
	Clusters []string `json:"clusters"` // of these backends
	Balancer string   `json:"balancer"` // "random" or "maglev"
	// AffinitySeconds is how long a client keeps its backend; 0 without session affinity.
	AffinitySeconds uint32 `json:"affinitySeconds"`
	// Chosen is how often a backend was picked, by all VIPs of the Service together.
	Chosen uint64 `json:"chosen"`
}

type serviceRows []serviceRow

func (serviceRows) header() []string {
	return []string{"SERVICE", "VIP", "PROTOCOL", "BACKENDS", "CLUSTERS", "BALANCER", "AFFINITY", "CHOSEN"}
}

func (s serviceRows) rows() [][]string {
	var out [][]string
	for _, r := range s {
		affinity := ""
		if r.AffinitySeconds > 0 {
			affinity = (time.Duration(r.AffinitySeconds) * time.Second).String()
		}
		out = append(out, []string{
			r.Service, r.VIP.String(), r.Protocol, strconv.Itoa(r.Backends), strings.Join(r.Clusters, ","), r.Balancer, affinity,
			strconv.FormatUint(r.Chosen, 10),
		})
	}
	return out
}

func (serviceRows) nothing() string { return "no Service has a VIP on this node" }

func showServices(ctx context.Context, r *datapath.Reader) (table, error) {
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

// services makes the rows of a state, by Service, then by address.
func services(s lb.State, chosen map[lb.ServiceID]uint64) serviceRows {
	used := map[lb.FrontendID]map[lb.BackendID]bool{}
	for slot, be := range s.Slots {
		if used[slot.Frontend] == nil {
			used[slot.Frontend] = map[lb.BackendID]bool{}
		}
		used[slot.Frontend][be] = true
	}
	rows := serviceRows{}
	for a, fe := range s.Frontends {
		row := serviceRow{
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
	slices.SortFunc(rows, func(a, b serviceRow) int {
		return cmp.Or(strings.Compare(a.Service, b.Service), a.VIP.Compare(b.VIP), strings.Compare(a.Protocol, b.Protocol))
	})
	return rows
}

// serviceText is the name of a Service, "" when it has none.
func serviceText(s lb.State, id lb.ServiceID) string {
	if n, ok := s.Services[id]; ok {
		return n.String()
	}
	return ""
}

// backendRow is one backend.
type backendRow struct {
	Backend  netip.AddrPort `json:"backend"`
	Protocol string         `json:"protocol"`
	Cluster  string         `json:"cluster"`
	// Draining ones keep the clients they have and get no new ones.
	Draining bool `json:"draining"`
	// Services are those that send new clients there.
	Services []string `json:"services"`
}

type backendRows []backendRow

func (backendRows) header() []string {
	return []string{"BACKEND", "PROTOCOL", "CLUSTER", "STATE", "SERVICES"}
}

func (b backendRows) rows() [][]string {
	var out [][]string
	for _, r := range b {
		state := "ready"
		switch {
		case r.Draining:
			state = "draining"
		case len(r.Services) == 0:
			state = "unused"
		}
		out = append(out, []string{r.Backend.String(), r.Protocol, r.Cluster, state, strings.Join(r.Services, ",")})
	}
	return out
}

func (backendRows) nothing() string { return "no backends on this node" }

func showBackends(ctx context.Context, r *datapath.Reader) (table, error) {
	state, err := r.Load(ctx)
	if err != nil {
		return nil, err
	}
	return backends(state), nil
}

// backends makes the rows of a state, by address.
func backends(s lb.State) backendRows {
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
	rows := backendRows{}
	for id, be := range s.Backends {
		row := backendRow{
			Backend: be.AddrPort, Protocol: be.Protocol.String(), Cluster: string(s.Clusters[be.Cluster]), Draining: be.Draining,
			Services: slices.Sorted(maps.Keys(users[id])),
		}
		if row.Services == nil {
			row.Services = []string{}
		}
		rows = append(rows, row)
	}
	slices.SortFunc(rows, func(a, b backendRow) int {
		return cmp.Or(a.Backend.Compare(b.Backend), strings.Compare(a.Protocol, b.Protocol), strings.Compare(a.Cluster, b.Cluster))
	})
	return rows
}

// connectionRow is one connection of the packet path.
type connectionRow struct {
	Protocol string         `json:"protocol"`
	Client   netip.AddrPort `json:"client"`
	VIP      netip.AddrPort `json:"vip"`
	Backend  netip.AddrPort `json:"backend"`
	Cluster  string         `json:"cluster"`
	Service  string         `json:"service"`
	State    string         `json:"state"`
	// Fast ones pass the node's routing and netfilter.
	Fast          bool `json:"fast"`
	SilentSeconds int  `json:"silentSeconds"`
}

type connectionRows []connectionRow

func (connectionRows) header() []string {
	return []string{"PROTOCOL", "CLIENT", "VIP", "BACKEND", "CLUSTER", "SERVICE", "STATE", "ROAD", "SILENT"}
}

func (c connectionRows) rows() [][]string {
	var out [][]string
	for _, r := range c {
		road := "slow"
		if r.Fast {
			road = "fast"
		}
		out = append(out, []string{
			r.Protocol, r.Client.String(), r.VIP.String(), r.Backend.String(), r.Cluster, r.Service, r.State, road,
			(time.Duration(r.SilentSeconds) * time.Second).String(),
		})
	}
	return out
}

func (connectionRows) nothing() string {
	return "the packet path translates no connection; sockets of pods are translated when they connect, and not followed"
}

func showConnections(r *datapath.Reader, limit int) (table, error) {
	if limit < 1 {
		return nil, fmt.Errorf("--limit=%d is less than 1", limit)
	}
	found, err := r.Connections(limit)
	if err != nil {
		return nil, err
	}
	return connections(found), nil
}

// connections makes the rows of what was found, the latest packet first.
func connections(found []datapath.Connection) connectionRows {
	rows := connectionRows{}
	for _, c := range found {
		rows = append(rows, connectionRow{
			Protocol: c.Protocol.String(), Client: c.Client, VIP: c.VIP, Backend: c.Backend, Cluster: string(c.Cluster), Service: nameText(c.Service),
			State: c.State, Fast: c.Fast, SilentSeconds: int(c.Silent / time.Second),
		})
	}
	slices.SortFunc(rows, func(a, b connectionRow) int {
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

// hookRow is one program at one place.
type hookRow struct {
	Hook    string `json:"hook"`
	Kind    string `json:"kind"`  // "cgroup", "tcx" or "clsact"
	Where   string `json:"where"` // the cgroup or the device; "" when it is gone
	Program uint32 `json:"program"`
	Runs    uint64 `json:"runs"`
	// NanosecondsPerRun is 0 when the kernel has counted no runs.
	NanosecondsPerRun uint64 `json:"nanosecondsPerRun"`
}

type hookRows []hookRow

func (hookRows) header() []string {
	return []string{"HOOK", "KIND", "WHERE", "PROGRAM", "RUNS", "NS/RUN"}
}

func (h hookRows) rows() [][]string {
	var out [][]string
	for _, r := range h {
		where, runs, time := r.Where, "", ""
		if where == "" {
			where = "(detached)"
		}
		if r.Runs > 0 {
			runs, time = strconv.FormatUint(r.Runs, 10), strconv.FormatUint(r.NanosecondsPerRun, 10)
		}
		out = append(out, []string{r.Hook, r.Kind, where, strconv.FormatUint(uint64(r.Program), 10), runs, time})
	}
	return out
}

func (hookRows) nothing() string { return "no program of Isthmus is attached on this node" }

func showHooks(r *datapath.Reader, cgroupRoot string) (table, error) {
	found, err := r.Attachments(cgroupRoot)
	if err != nil {
		return nil, err
	}
	return hooks(found), nil
}

func hooks(found []datapath.Attachment) hookRows {
	rows := hookRows{}
	for _, a := range found {
		row := hookRow{Hook: a.Hook, Kind: a.Kind, Where: a.Where, Program: a.Program, Runs: a.Runs}
		if a.Runs > 0 {
			row.NanosecondsPerRun = uint64(a.Time.Nanoseconds()) / a.Runs
		}
		rows = append(rows, row)
	}
	return rows
}

// dropRow is how many clients of a Service were refused for one reason.
type dropRow struct {
	Service string `json:"service"` // "" when there is none to blame
	Reason  string `json:"reason"`  // as in metrics
	Count   uint64 `json:"count"`
	Meaning string `json:"meaning"`
}

type dropRows []dropRow

func (dropRows) header() []string { return []string{"SERVICE", "REASON", "COUNT", "MEANING"} }

func (d dropRows) rows() [][]string {
	var out [][]string
	for _, r := range d {
		out = append(out, []string{r.Service, r.Reason, strconv.FormatUint(r.Count, 10), r.Meaning})
	}
	return out
}

func (dropRows) nothing() string { return "nobody was refused on this node" }

func showDrops(ctx context.Context, r *datapath.Reader) (table, error) {
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

// drops makes the rows of counts, the largest first. Services that are gone are told by their numbers.
func drops(s lb.State, counts map[datapath.Refusal]uint64) dropRows {
	rows := dropRows{}
	for refusal, n := range counts {
		row := dropRow{Service: serviceText(s, refusal.Service), Reason: refusal.Reason.String(), Count: n, Meaning: meanings[refusal.Reason]}
		if row.Service == "" && refusal.Service != 0 {
			row.Service = fmt.Sprintf("(gone, number %d)", refusal.Service)
		}
		rows = append(rows, row)
	}
	slices.SortFunc(rows, func(a, b dropRow) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), strings.Compare(a.Service, b.Service), strings.Compare(a.Reason, b.Reason))
	})
	return rows
}

// meanings say for people what a reason is.
var meanings = map[bpf.DropReason]string{
	bpf.DropNoBackend:    "no backend is ready",
	bpf.DropBackendGone:  "the backend went while it was picked, twice",
	bpf.DropNoMemory:     "no room to remember which VIP a UDP socket spoke to",
	bpf.DropNoFrontend:   "an address of the ClusterSet that nobody serves, at this port or at all",
	bpf.DropMalformed:    "a packet shorter than its headers say, or with a header that cannot be",
	bpf.DropFragment:     "a fragment whose first one was not seen",
	bpf.DropProtocol:     "neither TCP, UDP, SCTP nor an ICMP error about them",
	bpf.DropSCTPPort:     "SCTP to another port than the backend's, in a packet too large to checksum",
	bpf.DropNoConnection: "in the middle of a connection that is not known",
	bpf.DropItself:       "the only backends were the client itself",
}
