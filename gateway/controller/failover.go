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

// failoverIP allocates floating IPs that lead to a gateway's own port. Each pool has one, because a gateway has one
// address for them. The id of a port is that of the floating IP; its VIP stands for the address of the gateway that it
// leads to.
type failoverIP struct{ cloud Cloud }

func (*failoverIP) lane() string { return laneFailoverIP }

func (m *failoverIP) read(ctx context.Context) (all []port, err error) {
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

// reuse returns the floating IP of the pool, unless its Services collide with the new one.
func (*failoverIP) reuse(r request, all map[string]port, held []string) (port, bool, error) {
	for id, p := range all {
		if p.Pool != r.Pool.Name {
			continue
		}
		if slices.Contains(held, id) {
			return port{}, false, invalid{fmt.Errorf("spec.ports: pool %s has one floating IP, at which another Service uses one of these ports, or Services of another namespace do not share it; choose other ports, give all the same key in the annotation %s, or name another pool by %s", r.Pool.Name, service.AnnotationSharing, service.AnnotationPool)}
		}
		return p, true, nil
	}
	return port{}, false, nil
}

// create creates the floating IP of the pool.
func (m *failoverIP) create(ctx context.Context, r request, _ map[string]port) (port, error) {
	f, err := m.cloud.ReserveFloatingIP(ctx, r.Pool.FailoverIP.FloatingNetwork, r.Pool.Name+"."+r.Purpose)
	return port{ID: f.ID, Pool: r.Pool.Name, VIPs: []netip.Addr{f.Addr}, Purpose: f.Purpose, Floating: f}, err
}

// complete implements provider: the port is a floating IP, and moveFailoverIPs associates it.
func (*failoverIP) complete(port, service.FloatingIP) bool { return true }

// float implements provider.
func (*failoverIP) float(_ context.Context, p port, _ request) (port, error) {
	return p, nil
}

func (m *failoverIP) clean(ctx context.Context, used map[string]bool) (gone []string, err error) {
	all, err := m.read(ctx)
	errs := []error{err}
	for _, p := range all {
		if used[p.ID] {
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

// checkFailoverIP returns the error of a Service that asks for something that a pool with a failover IP cannot provide.
func (w *worker) checkFailoverIP(ctx context.Context, s *corev1.Service, want service.Want, pool *Pool) error {
	if pool.FailoverIP == nil {
		return nil
	}
	if value, ok := s.Annotations[service.AnnotationFloatingIP]; ok && value != "allocate" {
		return invalid{fmt.Errorf("annotation %s is %q, but pool %s has one floating IP for all; remove the annotation, or name another pool by %s", service.AnnotationFloatingIP, value, pool.Name, service.AnnotationPool)}
	}
	if s.Annotations[service.AnnotationFloatingIPAfterwards] == "retain" {
		return invalid{fmt.Errorf("annotation %s is \"retain\", but the floating IP of pool %s is deleted with its last Service; remove the annotation, or name another pool by %s", service.AnnotationFloatingIPAfterwards, pool.Name, service.AnnotationPool)}
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
				return invalid{fmt.Errorf("spec.ports: the agent of gateway %[2]s listens on %[1]s, and the floating IP of pool %[3]s may lead there; choose another port, or another pool by the annotation %[4]s", l, n.Name, pool.Name, service.AnnotationPool)}
			}
		}
	}
	return nil
}

// silenceTimeout is how long a gateway may be silent before it loses a failover IP. An agent restarts faster.
const silenceTimeout = 10 * time.Second

// moveFailoverIPs associates the failover IP of each pool with a gateway of its group. It stays at its gateway as long as
// that is not cordoned and answers; else it moves to the first gateway by name that has applied the Services. Without
// such a gateway it stays.
func (w *worker) moveFailoverIPs(plans []plan, reports map[string]agents.Report) {
	for i := range w.settings.Pools {
		pool := &w.settings.Pools[i]
		src := w.pools[pool.Name]
		if pool.FailoverIP == nil || !src.known { // before, it may lead to another gateway than recorded
			continue
		}
		f := w.failoverIPOf(pool)
		if f.ID == "" || slices.ContainsFunc(plans, func(p plan) bool {
			return leadsTo(f, p.node) && group(p.node) == pool.Group && w.keepsFailoverIP(p, reports[p.node.Name])
		}) {
			continue
		}
		w.moveFailoverIP(src, pool, f, plans, reports)
	}
}

// noteSilence records since when gateways are silent, and when to check again.
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

// keepsFailoverIP reports whether a gateway keeps a failover IP. One that refused a state still has the previous one.
func (w *worker) keepsFailoverIP(p plan, r agents.Report) bool {
	if p.node.Spec.Cordoned || p.node.DeletionTimestamp != nil {
		return false
	}
	return answers(p, r) || !w.silentTooLong(p.node.Name)
}

// silentTooLong reports whether a gateway has exceeded silenceTimeout.
func (w *worker) silentTooLong(name string) bool {
	since, silent := w.silentSince[name]
	return silent && w.now().Sub(since) >= silenceTimeout
}

// answers reports whether a gateway answers. One without a valid state that never answered is not polled.
func answers(p plan, r agents.Report) bool { return r.Err == nil && (p.err == nil || r.Asked) }

// moveFailoverIP associates a failover IP with the first suitable gateway.
func (w *worker) moveFailoverIP(src *cloudPorts, pool *Pool, f openstack.FloatingIP, plans []plan, reports map[string]agents.Report) {
	var to []*v1alpha1.GatewayNode
	for _, p := range plans {
		_, ok := floatingTarget(p.node)
		if r := reports[p.node.Name]; ok && group(p.node) == pool.Group && !p.state.Cordoned && p.err == nil && r.Err == nil && r.Applied {
			to = append(to, p.node.DeepCopy())
		}
	}
	if len(to) == 0 {
		return
	}
	w.lanes.start(src.lane()+"/"+pool.Name, gatewaysKey, func(ctx context.Context) (func(), error) {
		moved, err := w.associate(ctx, f, to)
		return func() {
			if p, ok := src.ports[f.ID]; ok && err == nil {
				p.Floating = moved
				w.replacePort(src, p)
			}
		}, err
	})
}

// associate associates a failover IP with the first of several gateways whose address has no other floating IP.
func (w *worker) associate(ctx context.Context, f openstack.FloatingIP, to []*v1alpha1.GatewayNode) (openstack.FloatingIP, error) {
	var errs []error
	for _, n := range to {
		addr, _ := floatingTarget(n)
		err := w.cloud.AssociateFloatingIP(ctx, f.ID, n.Spec.NeutronPort, addr)
		if errors.Is(err, openstack.ErrTaken) {
			errs = append(errs, fmt.Errorf("gateway %s: %w", n.Name, err))
			continue
		}
		if err != nil {
			return f, err
		}
		w.log.Info("floating IP moved", "vip", f.Addr, "pool", f.Purpose, "gateway", n.Name)
		f.Port, f.Fixed = n.Spec.NeutronPort, addr
		return f, nil
	}
	return f, errors.Join(errs...)
}

// failoverIPOf returns the failover IP of a pool; its ID is "" without Services.
func (w *worker) failoverIPOf(pool *Pool) openstack.FloatingIP {
	for _, m := range w.services {
		if m.port.Pool == pool.Name {
			return m.port.Floating
		}
	}
	return openstack.FloatingIP{}
}

// failoverIPsAt returns the failover IPs that lead to a gateway.
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

// floatingTarget returns the address of a gateway that floating IPs can lead to.
func floatingTarget(n *v1alpha1.GatewayNode) (netip.Addr, bool) {
	addr, err := netip.ParseAddr(n.Spec.Address)
	return addr, err == nil && addr.Is4() && n.Spec.NeutronPort != ""
}

func leadsTo(f openstack.FloatingIP, n *v1alpha1.GatewayNode) bool {
	addr, ok := floatingTarget(n)
	return ok && f.Port == n.Spec.NeutronPort && f.Fixed == addr
}
