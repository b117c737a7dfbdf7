package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"

	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/isthmus-net/isthmus/gateway/api/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/controller/internal/agents"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/openstack"
)

// updatePairs lets VIPs pass at the gateways' own Neutron ports, and returns errors by gateway. It records our pairs and
// their port in the status of the GatewayNode before it changes Neutron: only recorded pairs may be removed later.
func (w *worker) updatePairs(ctx context.Context, plans []plan) map[string]error {
	reports := w.agents.Reports()
	errs := make([]error, len(plans))
	var all sync.WaitGroup // in parallel: Neutron is slow
	for i, p := range plans {
		all.Go(func() {
			switch {
			case p.node.DeletionTimestamp != nil:
				errs[i] = w.release(ctx, p, reports[p.node.Name])
			case w.cloud != nil && w.settings.AddressPairs != PairNone && p.err == nil:
				errs[i] = w.setPairs(ctx, p.node, w.wantedPairs(p))
			}
		})
	}
	all.Wait()
	failed, paired, passes := map[string]error{}, map[string]string{}, map[string][]netip.Prefix{}
	for i, p := range plans {
		port := p.node.Spec.NeutronPort
		passes[port] = w.allowedPairs[port]
		if room, ok := errors.AsType[*openstack.PairsExhausted](errs[i]); ok {
			passes[port] = slices.DeleteFunc(w.wantedPairs(p), func(p netip.Prefix) bool { return slices.Contains(room.Missing, p) })
		} else if errs[i] == nil && p.err == nil {
			passes[port] = w.wantedPairs(p)
		}
		switch {
		case errs[i] != nil:
			failed[p.node.Name] = fmt.Errorf("%w: %w", errPairs, errs[i]) // retried later
		case p.err == nil:
			paired[p.node.Name] = port
		default: // unchanged
			paired[p.node.Name] = w.paired[p.node.Name]
		}
	}
	w.paired, w.allowedPairs = paired, passes
	return failed
}

// blocked returns why a Service's packets do not pass at a gateway whose pairs could not all be set. It returns nil if
// all VIPs of the Service pass.
func (w *worker) blocked(n *v1alpha1.GatewayNode, m *mapped, pool *Pool, failed error) error {
	if failed == nil || n.Spec.NeutronPort == "" || pool.FailoverIP != nil { // a gateway's own address needs no pair
		return nil
	}
	for _, vip := range m.port.vips(m.families(pool)) {
		if slices.ContainsFunc(w.allowedPairs[n.Spec.NeutronPort], func(p netip.Prefix) bool { return p.Contains(vip) }) {
			continue
		}
		if _, ok := errors.AsType[*openstack.PairsExhausted](failed); ok { // the other missing pairs do not matter to this Service
			return fmt.Errorf("%w: %s: %w", errPairs, vip, openstack.ErrPairs)
		}
		return failed
	}
	return nil
}

// release removes the pairs of a gateway whose GatewayNode is being deleted, and then its finalizer. The gateway first
// has time to withdraw its VIPs: packets that still arrive could not pass.
func (w *worker) release(ctx context.Context, p plan, r agents.Report) error {
	n := p.node
	if !controllerutil.ContainsFinalizer(n, v1alpha1.Finalizer) || p.err == nil && !w.drained(n, r) {
		return nil
	}
	if err := w.reread(ctx, n); err != nil {
		return client.IgnoreNotFound(err)
	}
	if w.cloud == nil {
		w.log.Warn("address pairs stay in Neutron: the controller has no cloud", "gateway", n.Name, "port", n.Status.AddressPairsPort)
	} else if err := w.removePairs(ctx, n); err != nil {
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

// wantedPairs returns the pairs of a gateway, sorted.
func (w *worker) wantedPairs(p plan) (want []netip.Prefix) {
	if w.settings.AddressPairs == PairPerVIP {
		at, _ := floatingTarget(p.node)
		for _, v := range p.state.VIPs {
			if v.Addr != at { // it needs none
				want = append(want, netip.PrefixFrom(v.Addr, v.Addr.BitLen()))
			}
		}
		return want
	}
	for i := range w.settings.Pools {
		if pool := &w.settings.Pools[i]; pool.Group == group(p.node) && slices.ContainsFunc(p.state.VIPs, func(v desired.VIP) bool { return has(pool, v.Addr) }) {
			want = append(want, pool.cidrs()...)
		}
	}
	slices.SortFunc(want, netip.Prefix.Compare)
	return slices.Compact(want)
}

func has(p *Pool, a netip.Addr) bool {
	return slices.ContainsFunc(p.cidrs(), func(c netip.Prefix) bool { return c.Contains(a) })
}

// setPairs sets the pairs of a gateway's port, and removes those at its previous port.
func (w *worker) setPairs(ctx context.Context, n *v1alpha1.GatewayNode, want []netip.Prefix) error {
	if n.Spec.NeutronPort == "" {
		want = nil
	}
	if n.Spec.NeutronPort == pairsPort(n) && slices.Equal(ourPairs(n), want) && w.paired[n.Name] == n.Spec.NeutronPort {
		return nil
	}
	if err := w.reread(ctx, n); err != nil {
		return client.IgnoreNotFound(err)
	}
	if n.Spec.NeutronPort != pairsPort(n) || n.Spec.NeutronPort == "" {
		if err := w.removePairs(ctx, n); err != nil || n.Spec.NeutronPort == "" {
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
	if err := w.recordPairs(ctx, n, n.Spec.NeutronPort, both); err != nil {
		return err
	}
	err := w.cloud.SetAddressPairs(ctx, n.Spec.NeutronPort, both, want)
	if _, ok := errors.AsType[*openstack.PairsExhausted](err); err != nil && !ok {
		return err
	}
	// Pairs beyond the limit stay recorded: the next attempt can set them at once.
	return errors.Join(err, w.recordPairs(ctx, n, n.Spec.NeutronPort, want))
}

// reread reads n from the API server. A cached copy may miss our last write, and a forgotten pair would count as foreign
// for ever.
func (w *worker) reread(ctx context.Context, n *v1alpha1.GatewayNode) error {
	return w.live.Get(ctx, client.ObjectKeyFromObject(n), n)
}

// removePairs removes all pairs that we set for a gateway. A missing port has none.
func (w *worker) removePairs(ctx context.Context, n *v1alpha1.GatewayNode) error {
	if had := ourPairs(n); len(had) > 0 {
		if err := w.cloud.SetAddressPairs(ctx, pairsPort(n), had, nil); err != nil && !errors.Is(err, openstack.ErrGone) {
			return err
		}
	}
	return w.recordPairs(ctx, n, "", nil)
}

// pairsPort returns the port that has our pairs.
func pairsPort(n *v1alpha1.GatewayNode) string {
	return cmp.Or(n.Status.AddressPairsPort, n.Spec.NeutronPort)
}

// ourPairs returns the pairs that we set for a gateway.
func ourPairs(n *v1alpha1.GatewayNode) (all []netip.Prefix) {
	for _, text := range n.Status.AddressPairs {
		if p, err := netip.ParsePrefix(text); err == nil {
			all = append(all, p)
		}
	}
	return all
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

// recordPairs records our pairs and their port.
func (w *worker) recordPairs(ctx context.Context, n *v1alpha1.GatewayNode, port string, pairs []netip.Prefix) error {
	texts := make([]string, len(pairs))
	for i, p := range pairs {
		texts[i] = p.String()
	}
	return w.patchNode(ctx, n, func(s *v1alpha1.GatewayNodeStatus) { s.AddressPairs, s.AddressPairsPort = texts, port })
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
