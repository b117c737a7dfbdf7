package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/isthmus-net/isthmus/gateway/api/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/controller/internal/agents"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/openstack"
	"github.com/isthmus-net/isthmus/gateway/service"
)

// pairsState is what the worker knows of the address pairs of a gateway.
type pairsState struct {
	port    string         // of the gateway, which the rest is about
	passes  []netip.Prefix // that Neutron accepted, or that were recorded before the start
	missing []netip.Prefix // that Neutron refused: the port has no room for them
	want    []netip.Prefix // of the last attempt
	set     bool           // since the last full sync
	err     error          // of the last attempt
}

// errPairs means that a gateway's port does not let all VIPs pass.
var errPairs = errors.New("the gateway's port in Neutron does not let the address pass")

// pairsOf returns the state of the address pairs at a gateway's port.
func (w *worker) pairsOf(n *v1alpha1.GatewayNode) *pairsState {
	is := w.pairs[n.Name]
	if is == nil || is.port != n.Spec.NeutronPort {
		is = &pairsState{port: n.Spec.NeutronPort}
		if pairsPort(n) == is.port {
			is.missing = prefixes(n.Status.AddressPairsMissing)
			is.passes = without(ourPairs(n), is.missing)
		}
		w.pairs[n.Name] = is
	}
	return is
}

// usesPairs reports whether VIPs need address pairs at a gateway's port.
func (w *worker) usesPairs(n *v1alpha1.GatewayNode) bool {
	return w.cloud != nil && w.settings.AddressPairs != PairNone && n.Spec.NeutronPort != ""
}

// passing returns the VIPs that a gateway gets, and those that wait: a router would send it packets to a new VIP before
// Neutron lets them pass, and one without room at its port is announced where it has room. VIPs that were in use at the
// start, and those of lists, do not wait for Neutron to answer.
func (w *worker) passing(n *v1alpha1.GatewayNode, vips []desired.VIP) (pass []desired.VIP, waiting []netip.Addr) {
	if !w.usesPairs(n) {
		return vips, nil
	}
	is := w.pairsOf(n)
	for _, v := range vips {
		if w.newVIPs[v.Addr] && !contains(is.passes, v.Addr) || contains(is.missing, v.Addr) {
			waiting = append(waiting, v.Addr)
			continue
		}
		pass = append(pass, v)
	}
	return pass, waiting
}

func contains(all []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(all, func(p netip.Prefix) bool { return p.Contains(a) })
}

// updatePairs lets VIPs pass at the gateways' own Neutron ports, in a lane for each gateway. It begins when the ports have
// been read: a VIP that is not known yet would lose its pair.
func (w *worker) updatePairs(plans []plan, reports map[string]agents.Report) {
	maps.DeleteFunc(w.pairs, func(name string, _ *pairsState) bool {
		return !slices.ContainsFunc(plans, func(p plan) bool { return p.node.Name == name })
	})
	for _, p := range plans {
		n := p.node.DeepCopy()
		switch {
		case slices.ContainsFunc(w.sources, func(src *cloudPorts) bool { return !src.known }):
		case n.DeletionTimestamp != nil:
			if controllerutil.ContainsFinalizer(n, v1alpha1.Finalizer) && (p.err != nil || w.drained(n, reports[n.Name])) {
				w.lanes.start(lanePairs+n.Name, gatewaysKey, func(ctx context.Context) (func(), error) {
					err := w.release(ctx, n, p.others)
					return func() { w.pairsDone(n, nil, err) }, err
				})
			}
		case w.cloud != nil && w.settings.AddressPairs != PairNone && p.err == nil:
			if is := w.pairsOf(n); !is.set || is.err != nil || !slices.Equal(is.want, p.pairs) {
				w.lanes.start(lanePairs+n.Name, gatewaysKey, func(ctx context.Context) (func(), error) {
					err := w.setPairs(ctx, n, p.pairs, p.others)
					return func() { w.pairsDone(n, p.pairs, err) }, err
				})
			}
		}
	}
}

// pairsDone stores the result of setPairs or release.
func (w *worker) pairsDone(n *v1alpha1.GatewayNode, want []netip.Prefix, err error) {
	w.requeue(gatewaysKey)
	is := w.pairs[n.Name]
	if is == nil || is.port != n.Spec.NeutronPort {
		return // it has another port by now
	}
	is.want, is.err, is.set, is.missing = want, nil, err == nil, nil
	if err != nil {
		is.err = fmt.Errorf("%w: %w", errPairs, err) // retried later
	}
	if room, ok := errors.AsType[*openstack.PairsExhausted](err); ok {
		is.missing = room.Missing
		is.passes = without(want, room.Missing)
	} else if err == nil {
		is.passes = want
	}
}

// pairsPending is the verdict of a Service whose new VIP waits at gateways; zero until that takes long.
func (w *worker) pairsPending(gateways []string) verdict {
	for _, name := range gateways {
		if w.lanes.age(lanePairs+name) >= waitingNotice {
			return verdict{service.ReasonPending, "waits for Neutron, which has to let the address pass at the ports of gateways " + strings.Join(gateways, ", ")}
		}
	}
	if w.recheckAfter == 0 || w.recheckAfter > waitingNotice {
		w.recheckAfter = waitingNotice
	}
	return verdict{}
}

// blocked returns why a Service's packets do not pass at a gateway whose pairs could not all be set. It returns nil if
// all VIPs of the Service pass.
func (w *worker) blocked(n *v1alpha1.GatewayNode, m *mapped, pool *Pool) error {
	if !w.usesPairs(n) || pool.FailoverIP != nil { // a gateway's own address needs no pair
		return nil
	}
	is := w.pairsOf(n)
	if is.err == nil {
		return nil
	}
	for _, vip := range m.port.vips(m.families(pool)) {
		if contains(is.passes, vip) {
			continue
		}
		if _, ok := errors.AsType[*openstack.PairsExhausted](is.err); ok { // the other missing pairs do not matter to this Service
			return fmt.Errorf("%w: %s: %w", errPairs, vip, openstack.ErrPairs)
		}
		return is.err
	}
	return nil
}

// release removes the pairs of a gateway whose GatewayNode is being deleted, and then its finalizer. The gateway has had
// time to withdraw its VIPs: packets that still arrive could not pass. Pairs of others at its port stay.
func (w *worker) release(ctx context.Context, n *v1alpha1.GatewayNode, others []netip.Prefix) error {
	if err := w.reread(ctx, n); err != nil {
		return client.IgnoreNotFound(err)
	}
	if w.cloud == nil {
		w.log.Warn("address pairs stay in Neutron: the controller has no cloud", "gateway", n.Name, "port", n.Status.AddressPairsPort)
	} else if err := w.removePairs(ctx, n, others); err != nil {
		return err
	}
	before := n.DeepCopy()
	controllerutil.RemoveFinalizer(n, v1alpha1.Finalizer)
	if err := w.client.Patch(ctx, n, client.MergeFrom(before), client.FieldOwner(fieldOwner)); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("remove the finalizer of gateway node %s: %w", n.Name, err)
	}
	return nil
}

// drained reports whether a gateway announces nothing, or has been silent for too long. It is false for a gateway that
// was never asked.
func (w *worker) drained(n *v1alpha1.GatewayNode, r agents.Report) bool {
	if r.Err != nil {
		return w.silentTooLong(n.Name)
	}
	return r.Asked && r.Applied && len(r.Status.Announced) == 0
}

// wantedPairs returns the pairs of a gateway, sorted. An address that no CIDR of the settings covers any more, because an operator
// edited them, keeps the CIDR that its port has, or has a pair of its own: a port has room for few.
func (w *worker) wantedPairs(n *v1alpha1.GatewayNode, vips []desired.VIP) (want []netip.Prefix) {
	var had []netip.Prefix
	if w.settings.AddressPairs == PairPerCIDR {
		had = ourPairs(n)
		for i := range w.settings.Pools {
			if pool := &w.settings.Pools[i]; pool.Group == group(n) && slices.ContainsFunc(vips, func(v desired.VIP) bool { return has(pool, v.Addr) }) {
				want = append(want, pool.cidrs()...)
			}
		}
	}
	at, _ := floatingTarget(n) // it needs none
	for _, v := range vips {
		if v.Addr != at && !slices.ContainsFunc(want, func(p netip.Prefix) bool { return p.Contains(v.Addr) }) {
			want = append(want, pairFor(v.Addr, had))
		}
	}
	slices.SortFunc(want, netip.Prefix.Compare)
	return slices.Compact(want)
}

// pairFor returns that of some pairs which covers an address, or else one for the address alone.
func pairFor(a netip.Addr, of []netip.Prefix) netip.Prefix {
	if i := slices.IndexFunc(of, func(p netip.Prefix) bool { return p.Contains(a) }); i >= 0 {
		return of[i]
	}
	return netip.PrefixFrom(a, a.BitLen())
}

func has(p *Pool, a netip.Addr) bool {
	return slices.ContainsFunc(p.cidrs(), func(c netip.Prefix) bool { return c.Contains(a) })
}

// setPairs sets the pairs of a gateway's port, and removes those at its previous port. It records our pairs and their port
// in the status of the GatewayNode before it changes Neutron: only recorded pairs may be removed later.
func (w *worker) setPairs(ctx context.Context, n *v1alpha1.GatewayNode, want, others []netip.Prefix) error {
	if n.Spec.NeutronPort == "" {
		want = nil
	}
	if err := w.reread(ctx, n); err != nil {
		return client.IgnoreNotFound(err)
	}
	if n.Spec.NeutronPort != pairsPort(n) || n.Spec.NeutronPort == "" {
		if err := w.removePairs(ctx, n, others); err != nil || n.Spec.NeutronPort == "" {
			return err
		}
	}
	had := ourPairs(n)
	both := append(slices.Clone(had), want...)
	slices.SortFunc(both, netip.Prefix.Compare)
	both = slices.Compact(both)
	if err := w.addFinalizer(ctx, n, len(both) > 0); err != nil {
		return err
	}
	if err := w.recordPairs(ctx, n, n.Spec.NeutronPort, both, prefixes(n.Status.AddressPairsMissing)); err != nil {
		return err
	}
	err := w.cloud.SetAddressPairs(ctx, n.Spec.NeutronPort, both, want)
	var missing []netip.Prefix
	if room, ok := errors.AsType[*openstack.PairsExhausted](err); ok {
		missing = room.Missing
	} else if err != nil {
		return err
	}
	// Pairs beyond the limit stay recorded: the next attempt can set them at once. A controller that starts while Neutron is
	// away learns from the record that the gateway must not announce them.
	return errors.Join(err, w.recordPairs(ctx, n, n.Spec.NeutronPort, want, missing))
}

// reread reads n from the API server. A cached copy may miss our last write, and a forgotten pair would count as foreign
// for ever.
func (w *worker) reread(ctx context.Context, n *v1alpha1.GatewayNode) error {
	return w.live.Get(ctx, client.ObjectKeyFromObject(n), n)
}

// removePairs removes all pairs that we set for a gateway, except those of others. A missing port has none.
func (w *worker) removePairs(ctx context.Context, n *v1alpha1.GatewayNode, others []netip.Prefix) error {
	if had := without(ourPairs(n), others); len(had) > 0 {
		if err := w.cloud.SetAddressPairs(ctx, pairsPort(n), had, nil); err != nil && !errors.Is(err, openstack.ErrGone) {
			return err
		}
	}
	return w.recordPairs(ctx, n, "", nil, nil)
}

// oldestAt returns the oldest gateway that names a port in Neutron, nil for none.
func oldestAt(port string, all []v1alpha1.GatewayNode) (first *v1alpha1.GatewayNode) {
	for i := range all {
		if n := &all[i]; port != "" && n.Spec.NeutronPort == port && (first == nil || older(n, first)) {
			first = n
		}
	}
	return first
}

// pairsOfOthers returns the pairs that we set at a gateway's port for other gateways: GatewayNodes may name the same port.
func pairsOfOthers(n *v1alpha1.GatewayNode, all []v1alpha1.GatewayNode) (pairs []netip.Prefix) {
	for i := range all {
		if o := &all[i]; o.Name != n.Name && pairsPort(n) != "" && pairsPort(o) == pairsPort(n) {
			pairs = append(pairs, ourPairs(o)...)
		}
	}
	return pairs
}

// pairsPort returns the port that has our pairs.
func pairsPort(n *v1alpha1.GatewayNode) string {
	return cmp.Or(n.Status.AddressPairsPort, n.Spec.NeutronPort)
}

// ourPairs returns the pairs that we set for a gateway.
func ourPairs(n *v1alpha1.GatewayNode) []netip.Prefix { return prefixes(n.Status.AddressPairs) }

// prefixes parses recorded pairs.
func prefixes(texts []string) (all []netip.Prefix) {
	for _, text := range texts {
		if p, err := netip.ParsePrefix(text); err == nil {
			all = append(all, p)
		}
	}
	return all
}

// without returns pairs that are not in others.
func without(pairs, others []netip.Prefix) []netip.Prefix {
	return slices.DeleteFunc(slices.Clone(pairs), func(p netip.Prefix) bool { return slices.Contains(others, p) })
}

// addFinalizer makes a GatewayNode with pairs wait for their removal when it is deleted.
func (w *worker) addFinalizer(ctx context.Context, n *v1alpha1.GatewayNode, pairs bool) error {
	before := n.DeepCopy()
	if !pairs || !controllerutil.AddFinalizer(n, v1alpha1.Finalizer) {
		return nil
	}
	if err := w.client.Patch(ctx, n, client.MergeFrom(before), client.FieldOwner(fieldOwner)); err != nil {
		return fmt.Errorf("add a finalizer to gateway node %s: %w", n.Name, err)
	}
	return nil
}

// recordPairs records our pairs, their port, and those for which it has no room.
func (w *worker) recordPairs(ctx context.Context, n *v1alpha1.GatewayNode, port string, pairs, missing []netip.Prefix) error {
	return w.patchNode(ctx, n, func(s *v1alpha1.GatewayNodeStatus) {
		s.AddressPairs, s.AddressPairsMissing, s.AddressPairsPort = texts(pairs), texts(missing), port
	})
}

func texts(pairs []netip.Prefix) []string {
	all := make([]string, len(pairs))
	for i, p := range pairs {
		all[i] = p.String()
	}
	return all
}

// patchNode changes the status of a GatewayNode. It writes nothing when nothing changes.
func (w *worker) patchNode(ctx context.Context, n *v1alpha1.GatewayNode, change func(*v1alpha1.GatewayNodeStatus)) error {
	before := n.DeepCopy()
	change(&n.Status)
	if sameNode(&before.Status, &n.Status) {
		return nil
	}
	if err := w.client.Status().Patch(ctx, n, client.MergeFrom(before), client.FieldOwner(fieldOwner)); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("write status of gateway node %s: %w", n.Name, err)
	}
	return nil
}
