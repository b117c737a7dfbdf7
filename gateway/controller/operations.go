package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/isthmus-net/isthmus/gateway/portmap"
	"github.com/isthmus-net/isthmus/gateway/service"
)

// The operations are not safe for concurrent use: the Lease leaves one controller at work, and that has one worker.

// setManaged takes a Service over. The finalizer comes before the first object of the cloud.
func (w *worker) setManaged(ctx context.Context, s *corev1.Service) error {
	err := w.patch(ctx, s, func(s *corev1.Service) {
		controllerutil.AddFinalizer(s, service.Finalizer)
		annotate(s, service.AnnotationManaged, "true")
	})
	if err == nil {
		w.event(s, corev1.EventTypeNormal, "TakenOver", "the gateways' controller takes care of this Service")
	}
	return err
}

// setUnmanaged lets a Service go that has no port any more. Where the finalizer was all that kept it, it is gone then.
func (w *worker) setUnmanaged(ctx context.Context, s *corev1.Service) error {
	if err := w.clearStatus(ctx, s); err != nil {
		return err
	}
	err := w.patch(ctx, s, func(s *corev1.Service) {
		controllerutil.RemoveFinalizer(s, service.Finalizer)
		if s.Annotations[service.AnnotationManaged] == "true" {
			annotate(s, service.AnnotationManaged, "")
		}
	})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err == nil {
		w.event(s, corev1.EventTypeNormal, "Released", "the gateways' controller no longer takes care of this Service")
	}
	return err
}

// MapService gives a Service an L2 port and tells the gateways.
func (w *worker) MapService(ctx context.Context, s *corev1.Service, want service.Want, sc notify) error {
	pool := w.settings.pool(want.Pool)
	families := common(want.Families, pool.families())
	if len(families) == 0 {
		return w.reportRefused(ctx, s, invalid{fmt.Errorf("spec.ipFamilies %v: pool %s has only %v; name another pool by the annotation %s", want.Families, pool.Name, pool.families(), service.AnnotationPool)})
	}
	if err := w.checkFailoverIP(ctx, s, want, pool); err != nil {
		return w.reportRefused(ctx, s, err)
	}
	want.Floating = floating(s, want.Floating, pool, families)
	had, unclean := s.Annotations[service.AnnotationPort], w.cleanupNeeded
	p, settled := w.unchanged(s, want, families)
	if !settled || sc == batch {
		var err error
		if p, err = w.choosePort(ctx, s, want, pool, families); err != nil {
			return w.reportRefused(ctx, s, err)
		}
	}
	addresses := p.external(families)
	if err := w.assign(ctx, s, p, want, addresses); err != nil {
		return err
	}
	if err := w.allocations.Take(claim(s, want, p.ID)); err != nil {
		return err // place has looked
	}
	w.cleanupNeeded = unclean || had != "" && had != p.ID // what was made is the Service's now
	w.services[s.UID] = &mapped{name: nameOf(s), want: want, port: p, ports: s.Spec.Ports}
	for _, m := range w.sharers(p.ID, s.UID) { // its floating IP may be another one now
		if m.port.Floating != p.Floating {
			m.port = p
			w.requeue(m.name)
		}
	}
	if sc == single {
		if err := w.UpdateAgents(ctx); err != nil {
			return err
		}
	}
	switch {
	case had == "":
		w.event(s, corev1.EventTypeNormal, "Mapped", "reached at "+list(addresses))
	case had != p.ID, addressesChanged(s, addresses):
		w.event(s, corev1.EventTypeNormal, "Remapped", "reached at "+list(addresses)+" from now on")
	}
	return w.reportMapped(ctx, s, addresses)
}

// movedFrom reports whether a Service's status says other addresses than these. Whose doing that is is no matter: of Services that
// share a port the first one that is looked at gives all of them another floating IP.
func addressesChanged(s *corev1.Service, to []netip.Addr) bool {
	was := s.Status.LoadBalancer.Ingress
	return len(was) > 0 && !slices.EqualFunc(was, to, func(i corev1.LoadBalancerIngress, a netip.Addr) bool { return i.IP == a.String() })
}

// RemapService is MapService for a Service that has an L2 port, which it keeps as long as that is there and satisfies it.
func (w *worker) RemapService(ctx context.Context, s *corev1.Service, want service.Want, sc notify) error {
	return w.MapService(ctx, s, want, sc)
}

// settled returns the port of a Service that has, as far as is known, what it asks for: the cloud, which may be slow or away,
// need not be asked between two looks at everything.
func (w *worker) unchanged(s *corev1.Service, want service.Want, families []corev1.IPFamily) (port, bool) {
	m := w.services[s.UID]
	if m == nil || m.port.ID != s.Annotations[service.AnnotationPort] || !reflect.DeepEqual(m.want, want) {
		return port{}, false
	}
	_, has4 := ipv4(m.port.VIPs)
	return m.port, m.port.Pool == want.Pool && m.port.covers(families) && (!has4 || matchesFloatingIP(m.port.Floating, want.Floating))
}

// place returns the port that a Service has from now on: the one that it has if that satisfies it, else the first by id of
// those that others have, else a new one.
func (w *worker) choosePort(ctx context.Context, s *corev1.Service, want service.Want, pool *Pool, families []corev1.IPFamily) (port, error) {
	// The annotation may name a port that the book does not know this Service by.
	has := s.Annotations[service.AnnotationPort]
	ports, err := w.knownPorts(ctx, has)
	if err != nil {
		return port{}, err
	}
	satisfies := func(p port) bool {
		return p.Pool == pool.Name && p.covers(families) &&
			!slices.ContainsFunc(w.sharers(p.ID, s.UID), func(m *mapped) bool { return !sameFloating(m.want.Floating, want.Floating, p.Floating) })
	}
	var candidates []string
	for id, p := range ports {
		if (id == has || len(w.sharers(id, s.UID)) > 0) && satisfies(p) {
			candidates = append(candidates, id)
		}
	}
	c := claim(s, want, has)
	if w.allocations.Port(c.Service) == "" && slices.Contains(candidates, has) {
		_ = w.allocations.Take(c) // another Service may have its L4 ports there; then it moves
	}
	if err := w.checkSharedFloatingIP(ports, want, s, satisfies); err != nil {
		return port{}, err
	}
	id, ok := w.allocations.Choose(c, candidates)
	p := ports[id]
	if !ok {
		p, err = w.CreateAndAssignPort(ctx, s, want, pool, families, ports)
		if !errors.As(err, new(invalid)) {
			w.cleanupNeeded = true // until the Service says that it has it: it may ask for something else by then
		}
		if err != nil {
			return port{}, err
		}
	}
	if p, err = w.backends[pool.Name].float(ctx, p, want.Floating); err == nil {
		ports[p.ID] = p
	}
	return p, err
}

// known are all ports, with one that a Service's annotation names; while many Services are looked at they are read once.
func (w *worker) knownPorts(ctx context.Context, has string) (map[string]port, error) {
	if w.portCache != nil {
		return w.portCache, nil
	}
	held := w.held()
	if has != "" && !slices.Contains(held, has) {
		held = append(held, has)
	}
	return w.ports(ctx, held)
}

// CreateAndAssignPort makes a port for a Service; place leads a floating IP there.
func (w *worker) CreateAndAssignPort(ctx context.Context, s *corev1.Service, want service.Want, pool *Pool, families []corev1.IPFamily, all map[string]port) (port, error) {
	r := request{Pool: pool, Families: families, Floating: want.Floating, Purpose: string(s.UID)}
	return w.backends[pool.Name].create(ctx, r, all, w.held())
}

// floating is what a Service gets of floating IPs: the default is nothing where there are none.
func floating(s *corev1.Service, want service.FloatingIP, pool *Pool, families []corev1.IPFamily) service.FloatingIP {
	if pool.FailoverIP != nil {
		return service.FloatingIP{Allocate: true}
	}
	_, asked := s.Annotations[service.AnnotationFloatingIP]
	none := pool.Neutron == nil || pool.Neutron.FloatingNetwork == "" || !slices.Contains(families, corev1.IPv4Protocol)
	if none && !asked {
		return service.FloatingIP{}
	}
	return want
}

// lent refuses a floating IP by name that other Services use in a way that cannot be shared.
func (w *worker) checkSharedFloatingIP(ports map[string]port, want service.Want, s *corev1.Service, satisfies func(port) bool) error {
	if want.Floating.Use == "" {
		return nil
	}
	for _, id := range slices.Sorted(maps.Keys(ports)) {
		p := ports[id]
		others := w.sharers(id, s.UID)
		if !matchesFloatingIP(p.Floating, want.Floating) || len(others) == 0 {
			continue
		}
		for _, m := range others {
			if !sameFloating(m.want.Floating, want.Floating, p.Floating) {
				return invalid{fmt.Errorf("annotation %s: floating IP %s was allocated for service %s; name another one", service.AnnotationFloatingIP, want.Floating.Use, m.name)}
			}
			if i := slices.IndexFunc(want.L4, func(l portmap.L4) bool { return slices.Contains(m.want.L4, l) }); i >= 0 {
				return invalid{fmt.Errorf("spec.ports: %s of floating IP %s is of service %s already; choose another port or another floating IP", want.L4[i], want.Floating.Use, m.name)}
			}
		}
		if !satisfies(p) { // to lead it elsewhere would take it away from them
			return invalid{fmt.Errorf("annotation %s: floating IP %s leads to the address of service %s, which is of pool %s and of other families; ask for the same spec.ipFamilies and annotation %s, or name another floating IP",
				service.AnnotationFloatingIP, want.Floating.Use, others[0].name, p.Pool, service.AnnotationPool)}
		}
	}
	return nil
}

// assign writes into a Service, in one request, which port and which external IPs it has.
func (w *worker) assign(ctx context.Context, s *corev1.Service, p port, want service.Want, addresses []netip.Addr) error {
	return w.patch(ctx, s, func(s *corev1.Service) {
		annotate(s, service.AnnotationPort, p.ID)
		if !want.ExternalIPs {
			addresses = nil
		}
		setExternalIPs(s, addresses)
	})
}

// UnmapService takes the port away from a Service, tells the gateways, and gives back what nobody has any more.
func (w *worker) UnmapService(ctx context.Context, s *corev1.Service, sc notify) error {
	err := w.patch(ctx, s, func(s *corev1.Service) {
		annotate(s, service.AnnotationPort, "")
		setExternalIPs(s, nil)
	})
	if err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	w.forget(s.UID)
	w.cleanupNeeded = true
	w.event(s, corev1.EventTypeNormal, "Unmapped", "no longer reached through the gateways")
	if sc == batch {
		return nil
	}
	return w.updateAndClean(ctx)
}

// giveBack tells the gateways what they have no more, and then gives it back.
func (w *worker) updateAndClean(ctx context.Context) error {
	w.cleanupNeeded = true
	if err := errors.Join(w.UpdateAgents(ctx), w.CleanUnusedPorts(ctx)); err != nil {
		return err
	}
	w.cleanupNeeded = false
	return nil
}

// CleanUnusedPorts gives back the ports that no Service has, and the floating IPs that lead to none.
func (w *worker) CleanUnusedPorts(ctx context.Context) error {
	// Services are asked once more: what one of them has must not go because the book is wrong.
	var list corev1.ServiceList
	if err := w.live.List(ctx, &list); err != nil {
		return fmt.Errorf("list services: %w", err)
	}
	used := map[string]bool{}
	for i := range list.Items {
		if s := &list.Items[i]; managed(s) {
			used[s.Annotations[service.AnnotationPort]] = true
		}
	}
	var errs []error
	for _, c := range w.cleaners {
		gone, err := c.clean(ctx, func(id string) bool { return used[id] || w.allocations.Used(id) })
		errs = append(errs, err)
		for _, what := range gone {
			w.log.Info("given back", "what", what)
		}
	}
	return errors.Join(errs...)
}

// patch changes a Service, unless somebody else has changed it since it was read. It writes nothing when nothing changes.
func (w *worker) patch(ctx context.Context, s *corev1.Service, change func(*corev1.Service)) error {
	before := s.DeepCopy()
	change(s)
	patch := client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
	if same(before, s) {
		return nil
	}
	if err := w.client.Patch(ctx, s, patch, client.FieldOwner(fieldOwner)); err != nil {
		return fmt.Errorf("write service %s/%s: %w", s.Namespace, s.Name, err)
	}
	return nil
}

// same reports whether nothing changed of what patch may change.
func same(a, b *corev1.Service) bool {
	return maps.Equal(a.Annotations, b.Annotations) && slices.Equal(a.Finalizers, b.Finalizers) && slices.Equal(a.Spec.ExternalIPs, b.Spec.ExternalIPs)
}

// annotate sets an annotation, or removes it.
func annotate(s *corev1.Service, name, value string) {
	if value == "" {
		delete(s.Annotations, name)
		return
	}
	if s.Annotations == nil {
		s.Annotations = map[string]string{}
	}
	s.Annotations[name] = value
}

// setExternalIPs makes want stand in spec.externalIPs, besides what a user put there, and remembers which are ours.
func setExternalIPs(s *corev1.Service, want []netip.Addr) {
	var ours []string
	if list := s.Annotations[service.AnnotationOwnExternalIPs]; list != "" {
		ours = strings.Split(list, ",")
	}
	all := slices.DeleteFunc(slices.Clone(s.Spec.ExternalIPs), func(ip string) bool { return slices.Contains(ours, ip) })
	ours = nil
	for _, a := range want {
		if !slices.Contains(all, a.String()) { // else it is the user's
			all, ours = append(all, a.String()), append(ours, a.String())
		}
	}
	s.Spec.ExternalIPs = all
	annotate(s, service.AnnotationOwnExternalIPs, strings.Join(ours, ","))
}
