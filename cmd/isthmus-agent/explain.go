package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/agent"
	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/dns"
)

// resolved is the answer of a name server.
type resolved struct {
	server netip.AddrPort // the zero value if none was asked
	addrs  []netip.Addr   // sorted
	err    error          // there was no answer, or the name does not exist
}

// answers holds the answers of the node's own name server and of the cluster's DNS.
type answers struct{ own, cluster resolved }

// ask asks the node's own name server, and the cluster's DNS if its address is valid.
func ask(ctx context.Context, names *nameserver, cluster netip.Addr, n clusterset.ServiceName) answers {
	var a answers
	own, _ := names.Status()
	if len(own.Listening) == 0 {
		a.own.err = fmt.Errorf("the node's name server does not listen: %s", own.Error)
	} else {
		a.own = resolve(ctx, own.Listening[0], dns.Name(n))
	}
	if cluster.IsValid() {
		a.cluster = resolve(ctx, netip.AddrPortFrom(cluster, dns.DefaultPort).String(), dns.Name(n))
	}
	return a
}

// resolve asks one name server for the addresses of a name, as pods do.
func resolve(ctx context.Context, server, name string) resolved {
	const timeout = 2 * time.Second
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	at, err := netip.ParseAddrPort(server)
	if err != nil {
		return resolved{err: err}
	}
	a := resolved{server: at}
	r := net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, server)
	}}
	a.addrs, a.err = r.LookupNetIP(ctx, "ip", name)
	for i := range a.addrs {
		a.addrs[i] = a.addrs[i].Unmap()
	}
	slices.SortFunc(a.addrs, netip.Addr.Compare)
	return a
}

// explanation follows a Service from the agent to the backends on this node and reports the state of each link.
func explanation(s status.Agent, n clusterset.ServiceName, x agent.Explanation, a answers) status.Explanation {
	e := status.Explanation{Node: s.Node, Service: n.String(), Chosen: x.Counters.Chosen, Refused: map[string]uint64{}}
	for r, n := range x.Counters.Refused {
		e.Refused[r.String()] = n
	}
	for _, p := range x.Endpoints {
		e.Endpoints = append(e.Endpoints, status.ExplainedEndpoint{Address: p.Addr, Cluster: string(p.Cluster), Node: p.Node, State: string(p.State)})
	}
	for _, fe := range x.Frontends {
		shown := status.ExplainedFrontend{VIP: fe.Address.AddrPort, Protocol: fe.Address.Protocol.String(), State: string(fe.State)}
		for _, b := range fe.Backends {
			shown.Backends = append(shown.Backends, b.AddrPort)
		}
		e.Frontends = append(e.Frontends, shown)
	}
	e.Links = append(e.Links, agentLink(s), importLink(x))
	if reserved := s.View.LabelsReserved; x.Known && reserved != nil && !*reserved {
		e.Links = append(e.Links, note("writer", "may be anyone who may create ServiceImports: no admission policy reserves the labels of Isthmus, see isthmusctl status"))
	}
	if !x.Known {
		return e
	}
	vip := x.Import.Type == clusterset.ClusterSetIP && len(x.Import.IPs) > 0
	e.Links = append(e.Links, nameLink(x, a.own))
	if a.cluster.server.IsValid() {
		e.Links = append(e.Links, clusterDNSLink(a))
	}
	refused := refusedVIPs(x)
	e.Links = append(e.Links, refused...)
	if vip && (len(x.Frontends) > 0 || len(refused) == 0) {
		e.Links = append(e.Links, mapLink(x))
	}
	e.Links = append(e.Links, backendsLink(x))
	for _, p := range x.Problems {
		if !p.Reason.RefusesVIP() {
			e.Links = append(e.Links, note("problem", "%s: %s", p.Reason, p.Message))
		}
	}
	if vip {
		e.Links = append(e.Links, note("clients", "%s", clients(e)))
	}
	return e
}

func ok(link, format string, args ...any) status.Link {
	return status.Link{Link: link, State: status.LinkOK, Text: fmt.Sprintf(format, args...)}
}

func note(link, format string, args ...any) status.Link {
	return status.Link{Link: link, State: status.LinkNote, Text: fmt.Sprintf(format, args...)}
}

func broken(link, fix, format string, args ...any) status.Link {
	return status.Link{Link: link, State: status.LinkBroken, Text: fmt.Sprintf(format, args...), Fix: fix}
}

func agentLink(s status.Agent) status.Link {
	if !s.Ready {
		return broken("agent", "see isthmusctl status and the log of this node's agent", "%s", strings.Join(s.Waiting, "; "))
	}
	return ok("agent", "ready")
}

func importLink(x agent.Explanation) status.Link {
	if !x.Known {
		return broken("import", "check that the ServiceImport exists and is valid, and that Isthmus wrote it, as its label app.kubernetes.io/managed-by says; the log of this node's agent names those with errors",
			"the agent knows no such ServiceImport")
	}
	return ok("import", "read by the agent")
}

// nameLink checks the addresses in the answer of the node's own name server.
func nameLink(x agent.Explanation, a resolved) status.Link {
	const fix = "see isthmusctl status and the log of this node's agent"
	want := slices.Clone(x.Import.IPs)
	byName := x.Import.Type != clusterset.ClusterSetIP || len(want) == 0
	if byName {
		for _, e := range x.Endpoints {
			if e.State == agent.EndpointServes {
				want = append(want, e.Addr)
			}
		}
	}
	slices.SortFunc(want, netip.Addr.Compare)
	want = slices.Compact(want)
	switch {
	case len(want) == 0 && notFound(a.err):
		return ok("name", "%s has no such name, because no endpoint is ready", a.server)
	case a.err != nil:
		return broken("name", fix, "the node's name server returns no address: %s", oneLine(a.err))
	case !slices.Equal(a.addrs, want) && !(byName && subset(a.addrs, want)): // a long answer is truncated
		return broken("name", fix, "%s answers %s, not %s", a.server, addrList(a.addrs), addrList(want))
	}
	return ok("name", "%s answers %s", a.server, addrList(a.addrs))
}

// clusterDNSLink compares the answer of the cluster's DNS, which pods use, with that of the node's own server.
func clusterDNSLink(a answers) status.Link {
	const fix = "make the cluster's DNS forward clusterset.local to the agents: isthmusctl dns install"
	switch c := a.cluster; {
	case a.own.err != nil && notFound(c.err):
		return ok("cluster DNS", "%s has no such name either", c.server)
	case notFound(c.err):
		return broken("cluster DNS", fix, "%s has no such name, although the node's own server has it", c.server)
	case c.err != nil:
		return broken("cluster DNS", "check that the cluster's DNS runs and can reach the agents: kubectl get pods -n kube-system",
			"%s returns no address: %s", c.server, oneLine(c.err))
	case !slices.Equal(c.addrs, a.own.addrs):
		return broken("cluster DNS", fix, "%s answers %s, and the node's own server %s", c.server, addrList(c.addrs), addrList(a.own.addrs))
	default:
		return ok("cluster DNS", "%s answers the same", c.server)
	}
}

// refusedVIPs returns a link for each VIP that the node does not serve.
func refusedVIPs(x agent.Explanation) []status.Link {
	var links []status.Link
	for _, p := range x.Problems {
		if p.Reason.RefusesVIP() {
			text, fix, _ := strings.Cut(p.Message, "; ")
			links = append(links, broken("VIP", fix, "%s: %s", p.Reason, text))
		}
	}
	return links
}

// mapLink checks the frontends in the BPF maps.
func mapLink(x agent.Explanation) status.Link {
	const fix = "the agent corrects it within two minutes; if not, see its log"
	for _, fe := range x.Frontends {
		switch fe.State {
		case agent.FrontendMissing:
			return broken("map", fix, "%s is not in the kernel", fe.Address)
		case agent.FrontendWrong:
			return broken("map", fix, "%s has the wrong backends in the kernel: %s", fe.Address, backendList(fe))
		case agent.FrontendConflict:
			return broken("map", "two Services have the same VIP: unexport one of them in all clusters and export it again", "%s belongs to %s", fe.Address, fe.Owner)
		case agent.FrontendCorrect:
		}
	}
	if len(x.Frontends) == 0 {
		return broken("map", "give the Service a port and a valid VIP", "the ServiceImport has no VIP and port that a client can connect to")
	}
	return ok("map", "%s in the kernel", count(len(x.Frontends), "entry", "entries"))
}

// backendsLink reports how many endpoints of each cluster get clients, and why the others do not.
func backendsLink(x agent.Explanation) status.Link {
	// A dual-stack Service lists each endpoint once per family. Count the family that has more.
	type key struct {
		state   agent.EndpointState
		cluster clusterset.ClusterID
		family  clusterset.Family
	}
	seen := map[key]int{}
	by := map[agent.EndpointState]map[clusterset.ClusterID]int{}
	for _, e := range x.Endpoints {
		k := key{e.State, e.Cluster, clusterset.FamilyOf(e.Addr)}
		seen[k]++
		if by[e.State] == nil {
			by[e.State] = map[clusterset.ClusterID]int{}
		}
		by[e.State][e.Cluster] = max(by[e.State][e.Cluster], seen[k])
	}
	spell := func(s agent.EndpointState) string {
		var parts []string
		for _, c := range slices.Sorted(maps.Keys(by[s])) {
			parts = append(parts, fmt.Sprintf("%d of %s", by[s][c], c))
		}
		return strings.Join(parts, ", ")
	}
	var others []string
	for _, s := range []agent.EndpointState{agent.EndpointNotReady, agent.EndpointTerminating, agent.EndpointDrained, agent.EndpointStandby} {
		if len(by[s]) > 0 {
			others = append(others, fmt.Sprintf("%s: %s", s, spell(s)))
		}
	}
	namespace, name := x.Import.Service.Namespace, x.Import.Service.Name
	rest := strings.Join(others, "; ")
	switch {
	case len(by[agent.EndpointServes]) > 0 && rest == "":
		return ok("backends", "%s", spell(agent.EndpointServes))
	case len(by[agent.EndpointServes]) > 0:
		return ok("backends", "%s; %s", spell(agent.EndpointServes), rest)
	case x.Import.InternalTrafficPolicy == "Local" && len(by[agent.EndpointStandby]) > 0:
		return note("backends", "none: internalTrafficPolicy is Local and no endpoint runs on this node; clients are refused")
	case len(x.Endpoints) == 0:
		return broken("backends", fmt.Sprintf("start pods for the Service where it is exported: kubectl get endpointslices -n %s -l kubernetes.io/service-name=%s", namespace, name),
			"no cluster offers an endpoint; clients are refused")
	case len(by[agent.EndpointNotReady]) == 0 && len(by[agent.EndpointDrained]) > 0:
		return broken("backends", "find out why these clusters are unreachable: isthmusctl show clusters, and the network in between",
			"no endpoint gets clients; clients are refused; %s", rest)
	default:
		return broken("backends", fmt.Sprintf("make the pods of the Service ready: kubectl get pods -n %s in these clusters", namespace),
			"no endpoint gets clients; clients are refused; %s", rest)
	}
}

// clients formats the counters.
func clients(e status.Explanation) string {
	text := fmt.Sprintf("%d got a backend", e.Chosen)
	var total uint64
	var reasons []string
	for _, r := range slices.Sorted(maps.Keys(e.Refused)) {
		total += e.Refused[r]
		reasons = append(reasons, fmt.Sprintf("%s %d", r, e.Refused[r]))
	}
	if total > 0 {
		text += fmt.Sprintf(", %d refused (%s)", total, strings.Join(reasons, ", "))
	}
	return text
}

func notFound(err error) bool {
	var d *net.DNSError
	return errors.As(err, &d) && d.IsNotFound
}

func subset(some, all []netip.Addr) bool {
	return len(some) > 0 && !slices.ContainsFunc(some, func(a netip.Addr) bool { return !slices.Contains(all, a) })
}

func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

// listed is the largest number of addresses in one sentence.
const listed = 4

func addrList(addrs []netip.Addr) string {
	var texts []string
	for _, a := range addrs[:min(listed, len(addrs))] {
		texts = append(texts, a.String())
	}
	if n := len(addrs) - listed; n > 0 {
		texts = append(texts, fmt.Sprintf("and %d more", n))
	}
	if len(texts) == 0 {
		return "nothing"
	}
	return strings.Join(texts, " ")
}

func backendList(fe agent.ExplainedFrontend) string {
	var addrs []string
	for _, b := range fe.Backends[:min(listed, len(fe.Backends))] {
		addrs = append(addrs, b.AddrPort.String())
	}
	if len(addrs) == 0 {
		return "none"
	}
	return strings.Join(addrs, " ")
}

func count(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}
