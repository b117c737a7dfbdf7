package controller

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/gateway/api/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/controller/internal/agents"
	"github.com/isthmus-net/isthmus/gateway/openstack"
	"github.com/isthmus-net/isthmus/gateway/service"
)

// moved keeps addresses as floating IPs that lead to a gateway's own port: one a pool, because a gateway has one address for
// them. The id of a port is the floating IP's; its VIP stands for the address of whichever gateway it leads to.
type failoverIP struct{ cloud Cloud }

func (m *failoverIP) ports(ctx context.Context, _ []string) (all []port, err error) {
	floating, err := m.cloud.FloatingIPs(ctx)
	if err != nil {
		return nil, err
	}
	for _, f := range floating {
		if pool, _, ok := strings.Cut(f.Purpose, "."); ok {
			all = append(all, port{ID: f.ID, Pool: pool, VIPs: []netip.Addr{f.Addr}, Purpose: f.Purpose, Floating: f})
		}
	}
	return all, nil
}

// create returns the pool's floating IP, unless Services have it that collide with the one that asks.
func (m *failoverIP) create(ctx context.Context, r request, all map[string]port, held []string) (port, error) {
	for id, p := range all {
		if p.Pool != r.Pool.Name {
			continue
		}
		if slices.Contains(held, id) {
			return port{}, invalid{fmt.Errorf("spec.ports: pool %s has one floating IP, where another Service has one of these ports; choose other ports, or another pool by the annotation %s", r.Pool.Name, service.AnnotationPool)}
		}
		return p, nil
	}
	f, err := m.cloud.ReserveFloatingIP(ctx, r.Pool.FailoverIP.FloatingNetwork, r.Pool.Name+"."+r.Purpose)
	return port{ID: f.ID, Pool: r.Pool.Name, VIPs: []netip.Addr{f.Addr}, Purpose: f.Purpose, Floating: f}, err
}

// float has nothing to do: a port is a floating IP, and lead says where it leads.
func (*failoverIP) float(_ context.Context, p port, _ service.FloatingIP) (port, error) {
	return p, nil
}

func (m *failoverIP) clean(ctx context.Context, used func(id string) bool) (gone []string, err error) {
	all, err := m.ports(ctx, nil)
	errs := []error{err}
	for _, p := range all {
		if used(p.ID) {
			continue
		}
		if err := m.cloud.DeleteFloatingIP(ctx, p.ID); err != nil {
			errs = append(errs, err)
			continue
		}
		gone = append(gone, fmt.Sprintf("floating IP %s %s", p.ID, p.Floating.Addr))
	}
	return gone, errors.Join(errs...)
}

// fits returns what a Service asks for that a pool whose floating IP moves cannot have.
func (w *worker) checkFailoverIP(ctx context.Context, s *corev1.Service, want service.Want, pool *Pool) error {
	if pool.FailoverIP == nil {
		return nil
	}
	if value, ok := s.Annotations[service.AnnotationFloatingIP]; ok && value != "allocate" {
		return invalid{fmt.Errorf("annotation %s is %q, but pool %s has one floating IP for all; remove the annotation, or name another pool by %s", service.AnnotationFloatingIP, value, pool.Name, service.AnnotationPool)}
	}
	if s.Annotations[service.AnnotationFloatingIPAfterwards] == "retain" {
		return invalid{fmt.Errorf("annotation %s is \"retain\", but the floating IP of pool %s goes with its last Service; remove the annotation, or name another pool by %s", service.AnnotationFloatingIPAfterwards, pool.Name, service.AnnotationPool)}
	}
	var nodes v1alpha1.GatewayNodeList
	if err := w.client.List(ctx, &nodes); err != nil {
		return fmt.Errorf("list gateway nodes: %w", err)
	}
	for i := range nodes.Items {
		n := &nodes.Items[i]
		if group(n) != pool.Group {
			continue
		}
		for _, l := range want.L4 {
			if l.Protocol == "TCP" && l.Port == agentPort(n) {
				return invalid{fmt.Errorf("spec.ports: at %s the agent of gateway %s listens, to which the floating IP of pool %s may lead; choose another port, or another pool by the annotation %s", l, n.Name, pool.Name, service.AnnotationPool)}
			}
		}
	}
	return nil
}

// silence is how long a gateway that does not answer keeps floating IPs: an agent that is restarted is back before.
const silenceTimeout = 10 * time.Second

// lead lets the floating IPs of pools that move lead to a gateway of the group: to the one that has it for as long as that is
// not cordoned and answers, else to the first by name that has the Services. Where there is none, all stays.
func (w *worker) moveFailoverIPs(ctx context.Context, plans []plan, reports map[string]agents.Report) error {
	w.noteSilence(plans, reports)
	var errs []error
	for i := range w.settings.Pools {
		pool := &w.settings.Pools[i]
		if pool.FailoverIP == nil {
			continue
		}
		f := w.failoverIPOf(pool)
		if f.ID == "" || slices.ContainsFunc(plans, func(p plan) bool {
			return leadsTo(f, p.node) && group(p.node) == pool.Group && w.keepsFailoverIP(p, reports[p.node.Name])
		}) {
			continue
		}
		errs = append(errs, w.moveFailoverIP(ctx, pool, f, plans, reports))
	}
	return errors.Join(errs...)
}

// listen notes since when gateways do not answer, and when to look again.
func (w *worker) noteSilence(plans []plan, reports map[string]agents.Report) {
	silent := map[string]time.Time{}
	w.recheckAfter = 0
	for _, p := range plans {
		if answers(p, reports[p.node.Name]) {
			continue
		}
		since, ok := w.silentSince[p.node.Name]
		if !ok {
			since = w.now()
		}
		silent[p.node.Name] = since
		if left := since.Add(silenceTimeout).Sub(w.now()); left > 0 && (w.recheckAfter == 0 || left < w.recheckAfter) {
			w.recheckAfter = left
		}
	}
	w.silentSince = silent
}

// keeps reports whether a gateway keeps a floating IP that leads to it. One that has refused a state still has the one before.
func (w *worker) keepsFailoverIP(p plan, r agents.Report) bool {
	if p.node.Spec.Cordoned || p.node.DeletionTimestamp != nil {
		return false
	}
	return answers(p, r) || !w.silentTooLong(p.node.Name)
}

// gaveUp reports whether a gateway has not answered for too long.
func (w *worker) silentTooLong(name string) bool {
	since, silent := w.silentSince[name]
	return silent && w.now().Sub(since) >= silenceTimeout
}

// answers reports whether a gateway does. One whose state cannot be told, and that did not answer before, is not asked.
func answers(p plan, r agents.Report) bool { return r.Err == nil && (p.err == nil || r.Asked) }

// move lets a floating IP lead to the first gateway that can have it.
func (w *worker) moveFailoverIP(ctx context.Context, pool *Pool, f openstack.FloatingIP, plans []plan, reports map[string]agents.Report) error {
	var errs []error
	for _, p := range plans {
		addr, ok := floatingTarget(p.node)
		if r := reports[p.node.Name]; !ok || group(p.node) != pool.Group || p.state.Cordoned || p.err != nil || r.Err != nil || !r.Applied {
			continue
		}
		err := w.cloud.AssociateFloatingIP(ctx, f.ID, p.node.Spec.NeutronPort, addr)
		if errors.Is(err, openstack.ErrTaken) { // another one leads there
			errs = append(errs, fmt.Errorf("gateway %s: %w", p.node.Name, err))
			continue
		}
		if err != nil {
			return err
		}
		w.log.Info("floating IP moved", "vip", f.Addr, "pool", pool.Name, "gateway", p.node.Name)
		f.Port, f.Fixed = p.node.Spec.NeutronPort, addr
		for _, m := range w.services {
			if m.port.ID == f.ID {
				m.port.Floating = f
			}
		}
		return nil
	}
	return errors.Join(errs...)
}

// floatingOf is the floating IP that Services of a pool have; its ID is "" while there are none.
func (w *worker) failoverIPOf(pool *Pool) openstack.FloatingIP {
	for _, m := range w.services {
		if m.port.Pool == pool.Name {
			return m.port.Floating
		}
	}
	return openstack.FloatingIP{}
}

// leading are the floating IPs that move and lead to a gateway.
func (w *worker) failoverIPsAt(n *v1alpha1.GatewayNode) (all []string) {
	for i := range w.settings.Pools {
		if pool := &w.settings.Pools[i]; pool.FailoverIP != nil {
			if f := w.failoverIPOf(pool); leadsTo(f, n) {
				all = append(all, f.Addr.String())
			}
		}
	}
	return all
}

// own is the address of a gateway to which floating IPs can be led.
func floatingTarget(n *v1alpha1.GatewayNode) (netip.Addr, bool) {
	addr, err := netip.ParseAddr(n.Spec.Address)
	return addr, err == nil && addr.Is4() && n.Spec.NeutronPort != ""
}

func leadsTo(f openstack.FloatingIP, n *v1alpha1.GatewayNode) bool {
	addr, ok := floatingTarget(n)
	return ok && f.Port == n.Spec.NeutronPort && f.Fixed == addr
}
