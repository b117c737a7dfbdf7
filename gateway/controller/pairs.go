package controller

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/gateway/api/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/desired"
)

// updatePairs lets VIPs pass at the gateways' own ports in Neutron, and returns where that failed, by gateway. What we set
// stands in the status of the GatewayNode, written before Neutron is told: only that may be taken away again.
func (w *worker) updatePairs(ctx context.Context, plans []plan) map[string]error {
	failed := map[string]error{}
	if w.cloud == nil || w.settings.AddressPairs == PairNone {
		return failed
	}
	for _, p := range plans {
		if p.node.Spec.NeutronPort == "" || p.err != nil {
			continue
		}
		if err := w.pair(ctx, p.node, w.wantedPairs(p)); err != nil {
			delete(w.paired, p.node.Name) // to be tried again
			failed[p.node.Name] = fmt.Errorf("%w: %w", errPairs, err)
		}
	}
	return failed
}

// wantedPairs are those of a gateway, sorted.
func (w *worker) wantedPairs(p plan) (want []netip.Prefix) {
	if w.settings.AddressPairs == PairPerVIP {
		for _, v := range p.state.VIPs {
			want = append(want, netip.PrefixFrom(v.Addr, v.Addr.BitLen()))
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

// pair sets the pairs of one gateway's port.
func (w *worker) pair(ctx context.Context, n *v1alpha1.GatewayNode, want []netip.Prefix) error {
	var had []netip.Prefix
	for _, text := range n.Status.AddressPairs {
		if p, err := netip.ParsePrefix(text); err == nil {
			had = append(had, p)
		}
	}
	if slices.Equal(had, want) && w.paired[n.Name] == n.Spec.NeutronPort {
		return nil
	}
	both := append(slices.Clone(had), want...)
	slices.SortFunc(both, netip.Prefix.Compare)
	both = slices.Compact(both)
	if err := w.notePairs(ctx, n, both); err != nil {
		return err
	}
	if err := w.cloud.SetAddressPairs(ctx, n.Spec.NeutronPort, both, want); err != nil {
		return err
	}
	if w.paired == nil {
		w.paired = map[string]string{}
	}
	w.paired[n.Name] = n.Spec.NeutronPort
	return w.notePairs(ctx, n, want)
}

// notePairs writes which pairs are ours.
func (w *worker) notePairs(ctx context.Context, n *v1alpha1.GatewayNode, pairs []netip.Prefix) error {
	texts := make([]string, len(pairs))
	for i, p := range pairs {
		texts[i] = p.String()
	}
	return w.patchNode(ctx, n, func(s *v1alpha1.GatewayNodeStatus) { s.AddressPairs = texts })
}

// patchNode changes the status of a GatewayNode. It writes nothing when nothing changes.
func (w *worker) patchNode(ctx context.Context, n *v1alpha1.GatewayNode, change func(*v1alpha1.GatewayNodeStatus)) error {
	before := n.DeepCopy()
	change(&n.Status)
	if sameNode(&before.Status, &n.Status) {
		return nil
	}
	if err := w.client.Status().Patch(ctx, n, client.MergeFrom(before), client.FieldOwner(fieldOwner)); err != nil {
		return fmt.Errorf("write status of gateway node %s: %w", n.Name, err)
	}
	return nil
}
