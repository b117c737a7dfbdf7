package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/isthmus-net/isthmus/gateway/api/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/controller/internal/agents"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/service"
)

// plan is what one gateway is to have, or why it cannot be told.
type plan struct {
	node   *v1alpha1.GatewayNode
	state  desired.State
	reason string // of the condition Applied; "" when there is a state
	err    error
}

// UpdateAgents makes a request of the book and sends it to all gateways. Those that do not answer get it when they do.
func (w *worker) UpdateAgents(ctx context.Context) error {
	neutron, err := w.updateAgents(ctx)
	if neutron != nil {
		w.requeue(gatewaysKey) // Neutron may have room later; the Service at hand need not wait for it
	}
	return err
}

// gatewaysKey asks the worker for Refresh. No Service has such a name, which has a namespace.
var gatewaysKey = types.NamespacedName{Name: "gateways"}

// Refresh is UpdateAgents after something changed that no Service tells: a gateway, an endpoint, a node.
func (w *worker) Refresh(ctx context.Context) error {
	w.secrets = nil
	neutron, err := w.updateAgents(ctx)
	return errors.Join(neutron, err)
}

// updateAgents is UpdateAgents. What Neutron does not do for gateways' own ports is no error of it.
func (w *worker) updateAgents(ctx context.Context) (neutron, err error) {
	plans, err := w.plans(ctx)
	if err != nil {
		return nil, err
	}
	failed := w.updatePairs(ctx, plans)
	w.agents.Set(ctx, targets(plans))
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	reports := w.agents.Reports()
	led := w.moveFailoverIPs(ctx, plans, reports)
	w.updateVerdicts(plans, reports, failed)
	return errors.Join(append(slices.Collect(maps.Values(failed)), led)...), w.reportGateways(ctx, plans, reports, failed)
}

// learn asks the gateways, once, which generations they have.
func (w *worker) readGenerations(ctx context.Context) error {
	if w.generationsRead {
		return nil
	}
	var nodes v1alpha1.GatewayNodeList
	if err := w.live.List(ctx, &nodes); err != nil {
		return fmt.Errorf("list gateway nodes: %w", err)
	}
	all := map[string]agents.Target{}
	for i := range nodes.Items {
		n := &nodes.Items[i]
		all[n.Name] = agents.Target{URL: n.Spec.URL, Identity: identity(n)}
	}
	w.agents.ReadGenerations(ctx, all)
	w.generationsRead = true
	return nil
}

// plans are one for each gateway, by name.
func (w *worker) plans(ctx context.Context) ([]plan, error) {
	var nodes v1alpha1.GatewayNodeList
	if err := w.client.List(ctx, &nodes); err != nil {
		return nil, fmt.Errorf("list gateway nodes: %w", err)
	}
	e, err := w.readEndpoints(ctx)
	if err != nil {
		return nil, err
	}
	services := w.sorted()
	for _, m := range services {
		m.missingPorts = e.missingPorts(m)
	}
	balancers, groups := map[string][]string{}, map[string][]desired.VIP{}
	for _, n := range nodes.Items {
		g := group(&n)
		if !slices.Contains(balancers[g], n.Spec.Balancer) {
			balancers[g] = append(balancers[g], n.Spec.Balancer)
		}
		if _, ok := groups[g]; !ok {
			groups[g] = vips(&w.settings, services, e, g)
		}
	}
	all := make([]plan, len(nodes.Items))
	for i := range nodes.Items {
		n := &nodes.Items[i]
		all[i] = plan{node: n}
		if b := balancers[group(n)]; len(b) > 1 {
			slices.Sort(b)
			all[i].reason, all[i].err = v1alpha1.ReasonMixedBalancers, fmt.Errorf("spec.balancer: group %s has %s; give all its gateways the same", group(n), strings.Join(b, " and "))
			continue
		}
		vips := groups[group(n)]
		if addr, ok := floatingTarget(n); ok {
			vips = slices.Concat(vips, failoverVIPs(&w.settings, services, e, group(n), addr))
			slices.SortFunc(vips, func(a, b desired.VIP) int { return a.Addr.Compare(b.Addr) })
		}
		if all[i].state, all[i].err = w.state(ctx, n, peersOf(n, nodes.Items), vips); all[i].err != nil {
			all[i].reason = v1alpha1.ReasonInvalid
		}
	}
	w.probes.Set(e.wantedProbes)
	slices.SortFunc(all, func(a, b plan) int { return strings.Compare(a.node.Name, b.node.Name) })
	return all, nil
}

// sorted are all mapped Services, by name.
func (w *worker) sorted() []*mapped {
	return slices.SortedFunc(maps.Values(w.services), func(a, b *mapped) int { return strings.Compare(a.name.String(), b.name.String()) })
}

func group(n *v1alpha1.GatewayNode) string {
	if n.Spec.Group == "" {
		return DefaultGroup
	}
	return n.Spec.Group
}

// identity is what the certificate of a gateway's agent must say.
func identity(n *v1alpha1.GatewayNode) string { return cmp.Or(n.Spec.CertificateName, n.Name) }

// agentPort is where a gateway's agent listens.
func agentPort(n *v1alpha1.GatewayNode) uint16 {
	u, err := url.Parse(n.Spec.URL)
	if err != nil {
		return 0 // the API server has refused it
	}
	port, err := strconv.ParseUint(u.Port(), 10, 16)
	if err != nil {
		return 443
	}
	return uint16(port)
}

// mates are the other gateways of a gateway's group, by name.
func peersOf(n *v1alpha1.GatewayNode, all []v1alpha1.GatewayNode) (peersOf []desired.PeerGateway) {
	for i := range all {
		if o := &all[i]; o.Name != n.Name && group(o) == group(n) {
			peersOf = append(peersOf, desired.PeerGateway{URL: strings.TrimSuffix(o.Spec.URL, "/"), Name: identity(o)})
		}
	}
	slices.SortFunc(peersOf, func(a, b desired.PeerGateway) int { return strings.Compare(a.Name, b.Name) })
	return peersOf
}

// state is what a gateway is to have. The error is about the gateway's own spec.
func (w *worker) state(ctx context.Context, n *v1alpha1.GatewayNode, mates []desired.PeerGateway, vips []desired.VIP) (desired.State, error) {
	s := desired.State{
		Cluster: w.settings.Cluster, Group: group(n), Balancer: desired.Balancer(n.Spec.Balancer), Cordoned: n.Spec.Cordoned || n.DeletionTimestamp != nil, Peers: mates, VIPs: vips,
	}
	var err error
	if n.Spec.BGP != nil {
		if s.BGP, err = w.bgp(ctx, n.Spec.BGP); err != nil {
			return s, err
		}
	}
	if n.Spec.VRRP != nil {
		s.VRRP = vrrp(n.Spec.VRRP)
	}
	if faults := s.Validate(); len(faults) > 0 {
		return s, faults
	}
	return s, nil
}

func (w *worker) bgp(ctx context.Context, b *v1alpha1.BGP) (*desired.BGP, error) {
	router, err := netip.ParseAddr(b.RouterID)
	if err != nil {
		return nil, fmt.Errorf("spec.bgp.routerID: %w", err)
	}
	is := &desired.BGP{
		ASN: uint32(b.ASN), RouterID: router, MED: number(b.MED), LocalPreference: number(b.LocalPreference),
		Communities: b.Communities, GracefulRestart: uint16(b.GracefulRestart),
	}
	for i, p := range b.Peers {
		addr, err := netip.ParseAddr(p.Address)
		if err != nil {
			return nil, fmt.Errorf("spec.bgp.peers[%d].address: %w", i, err)
		}
		peer := desired.Peer{Addr: addr, Port: uint16(p.Port), ASN: uint32(p.ASN), HoldTime: uint16(p.HoldTime)}
		if p.BFD != nil {
			peer.BFD = &desired.BFD{IntervalMillis: uint32(p.BFD.IntervalMillis), Multiplier: uint8(p.BFD.Multiplier)}
		}
		if p.PasswordSecret != "" {
			if peer.Password, err = w.password(ctx, p.PasswordSecret); err != nil {
				return nil, fmt.Errorf("spec.bgp.peers[%d].passwordSecret: %w", i, err)
			}
		}
		is.Peers = append(is.Peers, peer)
	}
	return is, nil
}

func number(n *int64) *uint32 {
	if n == nil {
		return nil
	}
	return new(uint32(*n))
}

// passwordKey is where a Secret has the password of BGP sessions.
const passwordKey = "password"

// password reads a Secret, once between two calls of Refresh.
func (w *worker) password(ctx context.Context, name string) (string, error) {
	if p, ok := w.secrets[name]; ok {
		return p, nil
	}
	var s corev1.Secret
	if err := w.live.Get(ctx, types.NamespacedName{Namespace: w.namespace, Name: name}, &s); err != nil {
		return "", err
	}
	p := string(s.Data[passwordKey])
	if p == "" {
		return "", fmt.Errorf("secret %s/%s has no key %q", w.namespace, name, passwordKey)
	}
	if w.secrets == nil {
		w.secrets = map[string]string{}
	}
	w.secrets[name] = p
	return p, nil
}

func vrrp(v *v1alpha1.VRRP) *desired.VRRP {
	is := &desired.VRRP{Interface: v.Interface, RouterID: uint8(v.RouterID), Priority: uint8(v.Priority), IntervalMillis: uint32(v.IntervalMillis)}
	is.Source, _ = netip.ParseAddr(v.Source) // Validate says what is wrong with it
	for _, p := range v.Peers {
		addr, _ := netip.ParseAddr(p)
		is.Peers = append(is.Peers, addr)
	}
	return is
}

// targets are all gateways; one whose state cannot be told keeps what it has, and is asked how it is.
func targets(plans []plan) map[string]agents.Target {
	all := map[string]agents.Target{}
	for _, p := range plans {
		all[p.node.Name] = agents.Target{URL: p.node.Spec.URL, Identity: identity(p.node), State: p.state, Hold: p.err != nil}
	}
	return all
}

// judge works out what gateways make of each Service, and asks for a look at those of which that changed.
func (w *worker) updateVerdicts(plans []plan, reports map[string]agents.Report, pairs map[string]error) {
	next := map[types.NamespacedName]verdict{}
	for _, m := range w.sorted() {
		pool := w.settings.pool(m.port.Pool)
		if pool == nil {
			continue // one that the settings have no more: the Service moves
		}
		v := verdict{service.ReasonNoGateway, "no gateway of group " + pool.Group + " has it; see kubectl get gatewaynodes"}
		if pool.FailoverIP != nil {
			v.message = "its floating IP leads to no gateway of group " + pool.Group + " that has it: at least one needs spec.neutronPort, an IPv4 spec.address, and an agent that answers; see kubectl get gatewaynodes"
		}
		for _, p := range plans {
			if group(p.node) != pool.Group || pool.FailoverIP != nil && !leadsTo(m.port.Floating, p.node) {
				continue
			}
			r := reports[p.node.Name]
			if text := refusal(r, m.name.String()); text != "" {
				v = verdict{service.ReasonRefused, "gateway " + p.node.Name + ": " + text}
				break
			}
			if err := w.blocked(p.node, m, pool, pairs[p.node.Name]); err != nil {
				v = verdict{service.ReasonRefused, "gateway " + p.node.Name + ": " + err.Error()}
				break
			}
			if r.Applied && p.err == nil {
				v = verdict{service.ReasonApplied, "gateways of group " + pool.Group + " have it"}
				if pool.FailoverIP != nil {
					v.message = "gateway " + p.node.Name + " has it; when its floating IP moves to another one, connections end"
				}
			}
		}
		if v.reason == service.ReasonApplied && m.missingPorts != "" {
			v = verdict{service.ReasonNoSuchPort, m.missingPorts}
		}
		next[m.name] = v
		if was, ok := w.verdicts[m.name]; !ok || was != v {
			w.requeue(m.name)
		}
	}
	w.verdicts = next
	servicesMapped.Set(float64(len(w.services)))
}

// refusal is what a gateway has against a Service, "" for nothing.
func refusal(r agents.Report, name string) string {
	if r.Refused == nil {
		return ""
	}
	var texts []string
	others := len(r.Refused.Faults) > 0
	for _, f := range r.Refused.Faults {
		if len(f.Services) == 0 || slices.Contains(f.Services, name) {
			texts = append(texts, f.Message)
		}
	}
	if len(texts) > 0 || others {
		return strings.Join(texts, "; ")
	}
	return r.Refused.Message
}

// errPairs says that a gateway's port does not let all VIPs pass.
var errPairs = errors.New("the gateway's port in Neutron does not let the address pass")
