package tables

import (
	"net/netip"
	"strconv"
	"strings"
	"time"
)

// Service is the row of one VIP, port and protocol.
type Service struct {
	Service  string         `json:"service"`
	VIP      netip.AddrPort `json:"vip"`
	Protocol string         `json:"protocol"`
	// Backends is the number of distinct backends for new clients. If it is 0, clients are refused.
	Backends int      `json:"backends"`
	Clusters []string `json:"clusters"` // of these backends
	Balancer string   `json:"balancer"` // "random" or "maglev"
	// AffinitySeconds is the time for which a client keeps its backend; 0 without session affinity.
	AffinitySeconds uint32 `json:"affinitySeconds"`
	// Chosen is the number of clients that got a backend, over all VIPs of the Service.
	Chosen uint64 `json:"chosen"`
}

// Services is the table of a node's VIPs.
type Services []Service

// Header is part of Table.
func (Services) Header() []string {
	return []string{"SERVICE", "VIP", "PROTOCOL", "BACKENDS", "CLUSTERS", "BALANCER", "AFFINITY", "CHOSEN"}
}

// Rows is part of Table.
func (s Services) Rows() [][]string {
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

// Nothing is part of Table.
func (Services) Nothing() string { return "no Service has a VIP on this node" }

// Backend is the row of one backend.
type Backend struct {
	Backend  netip.AddrPort `json:"backend"`
	Protocol string         `json:"protocol"`
	Cluster  string         `json:"cluster"`
	// Draining backends keep their clients and get no new ones.
	Draining bool `json:"draining"`
	// Services lists the Services that send new clients to the backend.
	Services []string `json:"services"`
}

// Backends is the table of a node's backends.
type Backends []Backend

// Header is part of Table.
func (Backends) Header() []string {
	return []string{"BACKEND", "PROTOCOL", "CLUSTER", "STATE", "SERVICES"}
}

// Rows is part of Table.
func (b Backends) Rows() [][]string {
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

// Nothing is part of Table.
func (Backends) Nothing() string { return "no backends on this node" }

// Connection is the row of one connection of the packet path.
type Connection struct {
	Protocol string         `json:"protocol"`
	Client   netip.AddrPort `json:"client"`
	VIP      netip.AddrPort `json:"vip"`
	Backend  netip.AddrPort `json:"backend"`
	Cluster  string         `json:"cluster"`
	Service  string         `json:"service"`
	State    string         `json:"state"`
	// Fast connections take the fast path, which bypasses the node's routing and netfilter.
	Fast          bool `json:"fast"`
	SilentSeconds int  `json:"silentSeconds"`
}

// Connections is the table of a node's connections.
type Connections []Connection

// Header is part of Table.
func (Connections) Header() []string {
	return []string{"PROTOCOL", "CLIENT", "VIP", "BACKEND", "CLUSTER", "SERVICE", "STATE", "PATH", "SILENT"}
}

// Rows is part of Table.
func (c Connections) Rows() [][]string {
	var out [][]string
	for _, r := range c {
		path := "slow"
		if r.Fast {
			path = "fast"
		}
		out = append(out, []string{
			r.Protocol, r.Client.String(), r.VIP.String(), r.Backend.String(), r.Cluster, r.Service, r.State, path,
			(time.Duration(r.SilentSeconds) * time.Second).String(),
		})
	}
	return out
}

// Nothing is part of Table.
func (Connections) Nothing() string {
	return "the packet path has no connections; those of pods' sockets are translated when they connect and are not listed"
}

// Hook is the row of one attached BPF program.
type Hook struct {
	Hook    string `json:"hook"`
	Kind    string `json:"kind"`  // "cgroup", "tcx" or "clsact"
	Where   string `json:"where"` // the cgroup or device; "" if the program was detached
	Program uint32 `json:"program"`
	Runs    uint64 `json:"runs"`
	// NanosecondsPerRun is 0 if the kernel counted no runs.
	NanosecondsPerRun uint64 `json:"nanosecondsPerRun"`
}

// Hooks is the table of a node's BPF programs.
type Hooks []Hook

// Header is part of Table.
func (Hooks) Header() []string {
	return []string{"HOOK", "KIND", "WHERE", "PROGRAM", "RUNS", "NS/RUN"}
}

// Rows is part of Table.
func (h Hooks) Rows() [][]string {
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

// Nothing is part of Table.
func (Hooks) Nothing() string { return "no BPF program of Isthmus is attached on this node" }

// Drop is the row of the clients of one Service that were refused for one reason.
type Drop struct {
	Service string `json:"service"` // "" if the address belongs to none
	Reason  string `json:"reason"`  // as in metrics
	Count   uint64 `json:"count"`
	Meaning string `json:"meaning"`
}

// Drops is the table of a node's refused clients.
type Drops []Drop

// Header is part of Table.
func (Drops) Header() []string { return []string{"SERVICE", "REASON", "COUNT", "MEANING"} }

// Rows is part of Table.
func (d Drops) Rows() [][]string {
	var out [][]string
	for _, r := range d {
		out = append(out, []string{r.Service, r.Reason, strconv.FormatUint(r.Count, 10), r.Meaning})
	}
	return out
}

// Nothing is part of Table.
func (Drops) Nothing() string { return "no client was refused on this node" }
