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

// plan is the desired state of one gateway, or the reason why there is none.
type plan struct {
	node    *v1alpha1.GatewayNode
	state   desired.State
	faults  desired.Faults // of Services that are left out of the state
	pairs   []netip.Prefix // that its port in Neutron should have
	others  []netip.Prefix // that the port has for other gateways
	waiting []netip.Addr   // new VIPs that its port does not let pass yet; the state lacks them
	reason  string         // of the condition Applied; "" when there is a state
	err     error
}

// gatewaysKey makes the worker call Refresh. It has no namespace, so no Service has this name.
var gatewaysKey = types.NamespacedName{Name: "gateways"}

// Refresh is UpdateAgents after a change of anything but a Service: a gateway, an endpoint or a node.
func (w *worker) Refresh(ctx context.Context) error {
	w.secrets = nil
	return w.UpdateAgents(ctx)
}

// UpdateAgents sends the current state to all gateways. A gateway that does not answer receives it later. Address pairs
// and failover IPs follow in lanes: a VIP is withdrawn before its pair is removed.
func (w *worker) UpdateAgents(ctx context.Context) error {
	plans, err := w.plans(ctx)
	if err != nil {
		return err
	}
	unrecorded := w.recordGiven(ctx, plans)
	w.agents.Set(ctx, targets(plans))
	if ctx.Err() != nil {
		return ctx.Err()
	}
	w.unsent = false
	reports := w.agents.Reports()
	w.noteSilence(plans, reports)
	if err := w.confirmWithdrawals(ctx, plans, reports); err != nil {
		return err
	}
	w.updatePairs(plans, reports)
	w.moveFailoverIPs(plans, reports)
	w.updateVerdicts(plans, reports)
	return errors.Join(unrecorded, w.reportGateways(ctx, plans, reports))
}

// readGenerations asks the gateways for their generations, once.
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
		w.givenTo(n)
	}
	w.agents.ReadGenerations(ctx, all)
	w.generationsRead = true
	return nil
}

// plans returns the plan of each gateway, by name.
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
		m.fault = e.importFault(m)
	}
	oldest, groups := map[string]*v1alpha1.GatewayNode{}, map[string][]desired.VIP{}
	for i := range nodes.Items {
		n := &nodes.Items[i]
		g := group(n)
		if first := oldest[g]; first == nil || older(n, first) {
			oldest[g] = n
		}
		if _, ok := groups[g]; !ok {
			groups[g] = vips(&w.settings, services, e, g)
		}
	}
	all := make([]plan, len(nodes.Items))
	for i := range nodes.Items {
		n := &nodes.Items[i]
		all[i] = plan{node: n, others: pairsOfOthers(n, nodes.Items)}
		if first := oldest[group(n)]; first.Spec.Balancer != n.Spec.Balancer {
			all[i].reason, all[i].err = v1alpha1.ReasonMixedBalancers, fmt.Errorf("spec.balancer is %s, but group %s has %s, as its oldest gateway %s says; give all its gateways the same", n.Spec.Balancer, group(n), first.Spec.Balancer, first.Name)
			continue
		}
		if first := oldestAt(n.Spec.NeutronPort, nodes.Items); first != nil && first.Name != n.Name {
			all[i].reason, all[i].err = v1alpha1.ReasonInvalid, fmt.Errorf("spec.neutronPort is the port of gateway %s; give each gateway its own", first.Name)
			continue
		}
		if s := w.unknown[group(n)]; s != "" {
			all[i].reason, all[i].err = v1alpha1.ReasonPending, fmt.Errorf("only OpenStack knows the address of service %s, and has not answered yet; the gateway keeps its state", s)
			continue
		}
		vips := groups[group(n)]
		if addr, ok := floatingTarget(n); ok {
			vips = slices.Concat(vips, failoverVIPs(&w.settings, services, e, group(n), addr))
			slices.SortStableFunc(vips, func(a, b desired.VIP) int { return a.Addr.Compare(b.Addr) })
		}
		all[i].pairs = w.wantedPairs(n, vips)
		vips, all[i].waiting = w.passing(n, vips)
		if all[i].state, all[i].faults, all[i].err = w.state(ctx, n, peersOf(n, nodes.Items), vips); all[i].err != nil {
			all[i].reason = v1alpha1.ReasonInvalid
		}
	}
	w.probes.Set(e.wantedProbes)
	slices.SortFunc(all, func(a, b plan) int { return strings.Compare(a.node.Name, b.node.Name) })
	return all, nil
}

// older orders gateways by age, and those of one age by name.
func older(a, b *v1alpha1.GatewayNode) bool {
	return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), strings.Compare(a.Name, b.Name)) < 0
}

// sorted returns all mapped Services by name.
func (w *worker) sorted() []*mapped {
	return slices.SortedFunc(maps.Values(w.services), func(a, b *mapped) int { return strings.Compare(a.name.String(), b.name.String()) })
}

func group(n *v1alpha1.GatewayNode) string {
	if n.Spec.Group == "" {
		return DefaultGroup
	}
	return n.Spec.Group
}

// identity returns the name that the certificate of a gateway's agent must have.
func identity(n *v1alpha1.GatewayNode) string { return cmp.Or(n.Spec.CertificateName, n.Name) }

// peerGateway describes a gateway to its peers.
func peerGateway(n *v1alpha1.GatewayNode) desired.PeerGateway {
	p := desired.PeerGateway{URL: strings.TrimSuffix(n.Spec.URL, "/"), Name: identity(n)}
	for _, text := range []string{hostOf(n.Spec.URL), n.Spec.Address} {
		addr, err := netip.ParseAddr(text)
		switch {
		case err != nil || !desired.Routable(addr):
		case !p.Address.IsValid():
			p.Address = addr
		case p.Address.Is4() != addr.Is4():
			p.OtherAddress = addr
		}
	}
	return p
}

func hostOf(address string) string {
	u, err := url.Parse(address)
	if err != nil {
		return "" // the API server refuses such URLs
	}
	return u.Hostname()
}

// agentPort returns the port of a gateway's agent.
func agentPort(n *v1alpha1.GatewayNode) uint16 {
	u, err := url.Parse(n.Spec.URL)
	if err != nil {
		return 0 // the API server refuses such URLs
	}
	port, err := strconv.ParseUint(u.Port(), 10, 16)
	if err != nil {
		return 443
	}
	return uint16(port)
}

// peersOf returns the other gateways of a gateway's group with its balancer, by identity.
func peersOf(n *v1alpha1.GatewayNode, all []v1alpha1.GatewayNode) (peers []*v1alpha1.GatewayNode) {
	for i := range all {
		if o := &all[i]; o.Name != n.Name && group(o) == group(n) && o.Spec.Balancer == n.Spec.Balancer {
			peers = append(peers, o)
		}
	}
	slices.SortFunc(peers, func(a, b *v1alpha1.GatewayNode) int {
		return cmp.Or(strings.Compare(identity(a), identity(b)), strings.Compare(a.Name, b.Name))
	})
	return peers
}

// state returns the desired state of a gateway, without the Services of faults. The error is about the gateway's own spec.
func (w *worker) state(ctx context.Context, n *v1alpha1.GatewayNode, peers []*v1alpha1.GatewayNode, vips []desired.VIP) (desired.State, desired.Faults, error) {
	s := desired.State{
		Cluster: w.settings.Cluster, Group: group(n), Balancer: desired.Balancer(n.Spec.Balancer), Cordoned: n.Spec.Cordoned || n.DeletionTimestamp != nil,
		VIPs: vips,
	}
	var names []string
	for _, o := range peers {
		names = append(names, o.Name)
		s.Peers = append(s.Peers, peerGateway(o))
	}
	s.Slots = desired.Slots(n.Name, names)
	var err error
	if n.Spec.BGP != nil {
		if s.BGP, err = w.bgp(ctx, n.Spec.BGP); err != nil {
			return s, nil, err
		}
	}
	if n.Spec.VRRP != nil {
		s.VRRP = vrrp(n.Spec.VRRP)
	}
	admitted, faults := s.Admit(nil)
	if len(faults) > 0 && len(faults[0].Services) == 0 {
		return s, nil, faults
	}
	return admitted, faults, nil
}

func (w *worker) bgp(ctx context.Context, b *v1alpha1.BGP) (*desired.BGP, error) {
	router, err := netip.ParseAddr(b.RouterID)
	if err != nil {
		return nil, fmt.Errorf("spec.bgp.routerID: %w", err)
	}
	is := &desired.BGP{
		ASN: uint32(b.ASN), RouterID: router, MED: number(b.MED), LocalPreference: number(b.LocalPreference),
		LinkBandwidth: uint32(b.LinkBandwidth), Communities: b.Communities, GracefulRestart: uint16(b.GracefulRestart),
	}
	for i, p := range b.Peers {
		addr, err := netip.ParseAddr(p.Address)
		if err != nil {
			return nil, fmt.Errorf("spec.bgp.peers[%d].address: %w", i, err)
		}
		peer := desired.Peer{
			Addr: addr, Port: uint16(p.Port), ASN: uint32(p.ASN), HoldTime: uint16(p.HoldTime),
			TTLSecurity: uint8(p.TTLSecurity), MaxPrefixes: uint32(p.MaxPrefixes),
		}
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

// passwordKey is the key of a BGP password in its Secret.
const passwordKey = "password"

// password reads a password from a Secret, and caches it until the next Refresh.
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
	for _, r := range v.Routers {
		is.Routers = append(is.Routers, desired.VirtualRouter{RouterID: uint8(r.RouterID), Priority: uint8(r.Priority)})
	}
	is.Source, _ = netip.ParseAddr(v.Source) // Validate reports an invalid address
	for _, p := range v.Peers {
		addr, _ := netip.ParseAddr(p)
		is.Peers = append(is.Peers, addr)
	}
	return is
}

// targets returns the target of every gateway. A gateway without a valid state keeps its current one and is still polled.
func targets(plans []plan) map[string]agents.Target {
	all := map[string]agents.Target{}
	for _, p := range plans {
		all[p.node.Name] = agents.Target{URL: p.node.Spec.URL, Identity: identity(p.node), State: p.state, Hold: p.err != nil}
	}
	return all
}

// updateVerdicts works out what the gateways report of each Service, and requeues the Services whose verdict changed.
func (w *worker) updateVerdicts(plans []plan, reports map[string]agents.Report) {
	refused := make([]refusals, len(plans))
	for i, p := range plans {
		refused[i] = refusalsOf(p, reports[p.node.Name])
	}
	next := map[types.NamespacedName]verdict{}
	for _, m := range w.sorted() {
		pool := w.settings.pool(m.port.Pool)
		if pool == nil {
			continue // the settings no longer have the pool: the Service moves
		}
		v := verdict{service.ReasonNoGateway, "no gateway of group " + pool.Group + " has applied it; see kubectl get gatewaynodes"}
		if pool.FailoverIP != nil {
			v.message = "its floating IP leads to no gateway of group " + pool.Group + " that has applied it: at least one needs spec.neutronPort, an IPv4 spec.address, and an agent that answers; see kubectl get gatewaynodes"
		}
		var waits []string // gateways
		for i, p := range plans {
			if group(p.node) != pool.Group || pool.FailoverIP != nil && !leadsTo(m.port.Floating, p.node) {
				continue
			}
			if text := cmp.Or(refused[i].services[m.name.String()], refused[i].all); text != "" {
				v = verdict{service.ReasonRefused, "gateway " + p.node.Name + ": " + text}
				break
			}
			if err := w.blocked(p.node, m, pool); err != nil {
				v = verdict{service.ReasonRefused, "gateway " + p.node.Name + ": " + err.Error()}
				break
			}
			if refused[i].held == "" && slices.ContainsFunc(p.waiting, func(a netip.Addr) bool { return slices.Contains(m.port.VIPs, a) }) {
				waits = append(waits, p.node.Name)
				continue
			}
			switch held := refused[i].held; {
			case held == "" && reports[p.node.Name].Applied:
				v = verdict{service.ReasonApplied, "the gateways of group " + pool.Group + " have applied it"}
				if pool.FailoverIP != nil {
					v.message = "gateway " + p.node.Name + " has applied it; connections break when its floating IP moves to another gateway"
				}
			case held != "" && v.reason == service.ReasonNoGateway:
				v.message += "; gateway " + p.node.Name + ": " + held
			}
		}
		if v.reason == service.ReasonNoGateway && len(waits) > 0 {
			if v = w.pairsPending(waits); v.reason == "" {
				continue // Neutron usually answers within a second
			}
		}
		if v.reason == service.ReasonApplied && m.fault.reason != "" {
			v = m.fault
		}
		v.message = shorten(v.message)
		next[m.name] = v
		if was, ok := w.verdicts[m.name]; !ok || was != v {
			w.requeue(m.name)
		}
	}
	w.verdicts = next
	w.countServices()
}

// refusals are the reasons for which a gateway does not serve Services as they ask.
type refusals struct {
	services map[string]string // by Service: it was left out of the state, or the gateway refuses it
	all      string            // the gateway refuses its state, whatever its Services
	held     string            // the gateway has another state because of itself or of another Service
}

func refusalsOf(p plan, r agents.Report) refusals {
	is := refusals{services: map[string]string{}}
	faults := slices.Clone(p.faults)
	switch {
	case p.err != nil:
		is.held = p.err.Error()
	case r.Refused != nil: // by an agent that applies all or nothing
		faults, is.held = append(faults, r.Refused.Faults...), r.Refused.Error()
		if len(r.Refused.Faults) == 0 {
			is.all = r.Refused.Message
		}
	case r.Applied:
		faults = append(faults, r.Status.Refused...)
	}
	join := func(a, b string) string { return strings.TrimPrefix(a+"; "+b, "; ") }
	for _, f := range faults {
		if len(f.Services) == 0 {
			is.all = join(is.all, f.Message)
		}
		for _, name := range f.Services {
			is.services[name] = join(is.services[name], f.Message)
		}
	}
	return is
}
