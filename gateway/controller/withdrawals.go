package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/gateway/api/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/controller/internal/agents"
	"github.com/isthmus-net/isthmus/gateway/portmap"
	"github.com/isthmus-net/isthmus/gateway/service"
)

// A freed address is given to another Service only when no gateway can still serve it for the former one.
//
// For example, gateway 2 is cut off from the controller, but not from the router, and Service a is deleted. If Service b got
// its address at once, half of the clients of b would reach the pods of a, by gateway 2. So the status of each GatewayNode
// records a VIP before the gateway gets it, and until the gateway has confirmed that it withdrew it, or was fenced: Neutron
// lets the VIP no longer pass at its port, an operator had it forgotten, or its GatewayNode was deleted.

// errWithdrawing means that gateways may still serve an address that no Service has.
var errWithdrawing = errors.New("gateways have not confirmed yet that they withdrew it")

func withdrawing(addresses []netip.Addr, by []string) error {
	return fmt.Errorf("%s was freed, but %w: %s; if one of them is off for good, run isthmusctl gateway forget NAME", list(addresses), errWithdrawing, strings.Join(by, ", "))
}

// checkWithdrawn refuses a port of a list that gateways may still serve for another Service.
func (w *worker) checkWithdrawn(s *corev1.Service, p port) error {
	if by := w.mayServe(p.VIPs); len(w.sharers(p.ID, s.UID)) == 0 && len(by) > 0 {
		return withdrawing(p.VIPs, by)
	}
	return nil
}

// withdrawn returns claims without those to ports that gateways may still serve for a former Service: no status records them.
func (w *worker) withdrawn(services []corev1.Service, claims []portmap.Claim, entries map[string]*mapped) []portmap.Claim {
	recorded := map[string]bool{} // ports
	for i := range services {
		if r, ok := readRecord(&services[i]); ok {
			recorded[r.ID] = true
		}
	}
	return slices.DeleteFunc(claims, func(c portmap.Claim) bool {
		is := !c.Confirmed && !recorded[c.Port] && len(w.mayServe(entries[c.Service].port.VIPs)) > 0
		if is {
			delete(entries, c.Service)
		}
		return is
	})
}

// givenTo returns the VIPs that a gateway may have.
func (w *worker) givenTo(n *v1alpha1.GatewayNode) map[netip.Addr]bool {
	has := w.given[n.Name]
	if has == nil {
		has = map[netip.Addr]bool{}
		for _, text := range n.Status.Addresses {
			if a, err := netip.ParseAddr(text); err == nil {
				has[a] = true
			}
		}
		w.given[n.Name] = has
	}
	return has
}

// recordGiven records the VIPs of states before the gateways get them. A gateway whose record can not be written keeps its
// state.
func (w *worker) recordGiven(ctx context.Context, plans []plan) error {
	var errs []error
	had := len(w.given)
	maps.DeleteFunc(w.given, func(name string, _ map[netip.Addr]bool) bool {
		return !slices.ContainsFunc(plans, func(p plan) bool { return p.node.Name == name })
	})
	if len(w.given) < had {
		w.wakeWithheld()
	}
	for i := range plans {
		p := &plans[i]
		had := w.givenTo(p.node)
		has := maps.Clone(had)
		own, _ := floatingTarget(p.node)
		for _, v := range p.state.VIPs {
			if v.Addr != own {
				has[v.Addr] = true
			}
		}
		if p.err != nil || len(has) == len(had) {
			continue
		}
		if err := w.patchNode(ctx, p.node, func(s *v1alpha1.GatewayNodeStatus) { s.Addresses = sortedTexts(has) }); err != nil {
			p.reason, p.err = v1alpha1.ReasonPending, err
			errs = append(errs, err)
			continue
		}
		w.given[p.node.Name] = has
	}
	return errors.Join(errs...)
}

// confirmWithdrawals frees the VIPs that gateways have withdrawn, or that they can no longer serve.
func (w *worker) confirmWithdrawals(ctx context.Context, plans []plan, reports map[string]agents.Report) error {
	freed := false
	for _, p := range plans {
		has, r := w.givenTo(p.node), reports[p.node.Name]
		forgotten := p.node.Annotations[v1alpha1.AnnotationForget] == "true"
		state := map[netip.Addr]bool{}
		for _, v := range p.state.VIPs {
			state[v.Addr] = true
		}
		confirmed := p.err == nil && r.Err == nil && r.Applied
		maps.DeleteFunc(has, func(a netip.Addr, _ bool) bool {
			gone := !state[a] && (confirmed && !slices.Contains(r.Status.Announced, a) || forgotten && r.Err != nil || w.fenced(p.node, a))
			freed = freed || gone
			return gone
		})
		if forgotten {
			if err := w.removeForget(ctx, p.node); err != nil {
				return err
			}
		}
	}
	if freed {
		w.wakeWithheld()
	}
	return nil
}

// fenced reports whether Neutron drops the packets of a VIP at a gateway's port.
func (w *worker) fenced(n *v1alpha1.GatewayNode, a netip.Addr) bool {
	if !w.usesPairs(n) {
		return false
	}
	is := w.pairsOf(n)
	return is.set && !contains(is.passes, a) && !contains(is.want, a)
}

func (w *worker) removeForget(ctx context.Context, n *v1alpha1.GatewayNode) error {
	before := n.DeepCopy()
	delete(n.Annotations, v1alpha1.AnnotationForget)
	if err := w.client.Patch(ctx, n, client.MergeFrom(before), client.FieldOwner(fieldOwner)); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("remove an annotation of gateway node %s: %w", n.Name, err)
	}
	return nil
}

// wakeWithheld makes the worker handle what waits for addresses.
func (w *worker) wakeWithheld() {
	for name, reason := range w.unmapped {
		if reason == service.ReasonWithdrawing || reason == service.ReasonQuotaExceeded {
			w.requeue(name)
		}
	}
	if w.withheld {
		w.withheld = false
		for _, src := range w.sources {
			src.due = true
		}
		w.requeue(cleanKey)
	}
}

// mayServe returns the gateways that may serve any of several VIPs, by name.
func (w *worker) mayServe(vips []netip.Addr) (by []string) {
	for _, name := range slices.Sorted(maps.Keys(w.given)) {
		if slices.ContainsFunc(vips, func(a netip.Addr) bool { return w.given[name][a] }) {
			by = append(by, name)
		}
	}
	return by
}

// allGiven returns the VIPs that any gateway may serve.
func (w *worker) allGiven() map[netip.Addr]bool {
	all := map[netip.Addr]bool{}
	for _, has := range w.given {
		maps.Copy(all, has)
	}
	return all
}

// sortedTexts returns addresses as a status has them.
func sortedTexts(set map[netip.Addr]bool) []string {
	var all []string
	for _, a := range slices.SortedFunc(maps.Keys(set), netip.Addr.Compare) {
		all = append(all, a.String())
	}
	return all
}
