package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/cmd/internal/status"
)

// dnsService is the Service of all agents' name servers, in the installation namespace.
const dnsService = "isthmus-dns"

// otherNodes is how many nodes a stub names.
const otherNodes = 2

// agentAnswers are the addresses of one agent's name server.
type agentAnswers struct {
	node      string
	ready     bool
	own       []netip.Addr // of its node
	listening []netip.AddrPort
}

// upstreams returns the upstreams of a stub, in this order: the agent of the same node, at an address that all nodes have;
// the Service of all agents, which never becomes outdated; and a few nodes, for the moment in which the Service still
// leads to an agent that has just died. It prefers nodes that a stub already names, so that a stub seldom changes.
func (c *collector) upstreams(ctx context.Context, named []string) ([]string, error) {
	agents, err := c.nameservers(ctx)
	if err != nil {
		return nil, err
	}
	v6, err := c.overIPv6(ctx)
	if err != nil {
		return nil, err
	}
	local, err := nodeLocal(agents, v6)
	if err != nil {
		return nil, err
	}
	found := []string{upstream(local)}
	service, err := c.agentsService(ctx, v6)
	if err != nil {
		return nil, err
	}
	if service.IsValid() {
		found = append(found, service.String())
	}
	return append(found, others(agents, v6, named)...), nil
}

// others returns the addresses of a few nodes, already named ones first.
func others(agents []agentAnswers, v6 bool, named []string) []string {
	var all []string
	for _, a := range agents {
		i := slices.IndexFunc(a.listening, func(l netip.AddrPort) bool { return slices.Contains(a.own, l.Addr()) && l.Addr().Is6() == v6 })
		if a.ready && i >= 0 {
			all = append(all, upstream(a.listening[i]))
		}
	}
	slices.SortStableFunc(all, func(a, b string) int {
		return cmp.Compare(notIn(named, a), notIn(named, b))
	})
	all = all[:min(len(all), otherNodes)]
	slices.Sort(all)
	return all
}

func notIn(list []string, s string) int {
	if slices.Contains(list, s) {
		return 0
	}
	return 1
}

// upstream formats an address for the forward plugin.
func upstream(a netip.AddrPort) string {
	if a.Port() == 53 {
		return a.Addr().String()
	}
	return a.String()
}

// nodeLocal returns the address at which every agent serves its own node.
func nodeLocal(agents []agentAnswers, v6 bool) (netip.AddrPort, error) {
	var candidates []netip.AddrPort
	known := false
	for _, a := range agents {
		if len(a.listening) == 0 {
			continue // it will listen on the same addresses as the others
		}
		local := slices.DeleteFunc(slices.Clone(a.listening), func(l netip.AddrPort) bool {
			return slices.Contains(a.own, l.Addr()) || l.Addr().IsLoopback() || l.Addr().Is6() != v6
		})
		if !known {
			known, candidates = true, local
		}
		candidates = slices.DeleteFunc(candidates, func(l netip.AddrPort) bool { return !slices.Contains(local, l) })
	}
	switch {
	case !known:
		return netip.AddrPort{}, errors.New("no agent serves DNS; see isthmusctl status, or give the upstreams of the cluster's DNS with --upstream")
	case len(candidates) == 0:
		return netip.AddrPort{}, fmt.Errorf("the agents have no common %s address that serves DNS; leave --dns-listen at its default, or give the upstreams of the cluster's DNS with --upstream",
			map[bool]string{true: "IPv6", false: "IPv4"}[v6])
	}
	return candidates[0], nil
}

// nameservers returns the name server addresses of all agents, including agents that do not answer.
func (c *collector) nameservers(ctx context.Context) ([]agentAnswers, error) {
	pods, err := c.agentPods(ctx, nil)
	if err != nil {
		return nil, err
	}
	var all []agentAnswers
	for _, pod := range pods {
		a := agentAnswers{node: pod.Spec.NodeName}
		for _, ip := range pod.Status.HostIPs {
			if addr, err := netip.ParseAddr(ip.IP); err == nil {
				a.own = append(a.own, addr)
			}
		}
		if said, err := ask[status.Agent](ctx, c, pod, status.AgentPort); err == nil {
			a.ready = said.Ready
			for _, l := range said.DNS.Listening {
				if at, err := netip.ParseAddrPort(l); err == nil {
					a.listening = append(a.listening, at)
				}
			}
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		all = append(all, a)
	}
	return all, nil
}

// overIPv6 reports whether the first address of the cluster's DNS is IPv6. Pods of such a cluster have IPv6 and may lack
// IPv4.
func (c *collector) overIPv6(ctx context.Context) (bool, error) {
	service := &corev1.Service{}
	found, err := c.find(ctx, client.ObjectKey{Namespace: "kube-system", Name: "kube-dns"}, service)
	if err != nil || !found {
		return false, err
	}
	addr, err := netip.ParseAddr(service.Spec.ClusterIP)
	return err == nil && addr.Is6(), nil
}

// agentsService returns the address of the Service of all agents; zero if it has none of the family.
func (c *collector) agentsService(ctx context.Context, v6 bool) (netip.Addr, error) {
	service := &corev1.Service{}
	err := c.client.Get(ctx, client.ObjectKey{Namespace: c.namespace, Name: dnsService}, service)
	if apierrors.IsNotFound(err) {
		return netip.Addr{}, nil // agent.dns.service=false
	}
	if err != nil {
		return netip.Addr{}, fmt.Errorf("read Service %s/%s: %w", c.namespace, dnsService, err)
	}
	for _, ip := range service.Spec.ClusterIPs {
		if addr, err := netip.ParseAddr(ip); err == nil && addr.Is6() == v6 {
			return addr, nil
		}
	}
	return netip.Addr{}, nil
}
