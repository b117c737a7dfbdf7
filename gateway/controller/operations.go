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

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/isthmus-net/isthmus/gateway/portmap"
	"github.com/isthmus-net/isthmus/gateway/service"
)

// The operations are not safe for concurrent use: one replica holds the Lease, and it has one worker.

// setManaged takes a Service over. It adds the finalizer before the first object in the cloud exists.
func (w *worker) setManaged(ctx context.Context, s *corev1.Service) error {
	err := w.patch(ctx, s, func(s *corev1.Service) {
		controllerutil.AddFinalizer(s, service.Finalizer)
		annotate(s, service.AnnotationManaged, "true")
	})
	if err == nil {
		w.event(s, corev1.EventTypeNormal, "TakenOver", "the gateway controller manages this Service")
	}
	return err
}

// setUnmanaged releases a Service that has no port any more. If it was being deleted, it is gone then.
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
		w.event(s, corev1.EventTypeNormal, "Released", "the gateway controller no longer manages this Service")
	}
	return err
}

// MapService gives a Service an L2 port and updates the gateways.
func (w *worker) MapService(ctx context.Context, s *corev1.Service, want service.Want, update agentUpdate) error {
	var has port
	if m := w.services[s.UID]; m != nil {
		has = m.port
	}
	pool, families, want, err := w.place(ctx, s, want, has)
	if err != nil {
		return w.reportRefused(ctx, s, err)
	}
	had := s.Annotations[service.AnnotationPort]
	p, err := w.choosePort(s, want, pool, families)
	if err != nil {
		return w.reportRefused(ctx, s, err)
	}
	c := w.claim(s, want, p)
	if err := w.allocations.Collision(c); err != nil {
		return w.reportRefused(ctx, s, invalid{fmt.Errorf("pool %s: %w; give its network other addresses than the other pools of group %s have", pool.Name, err, pool.Group)})
	}
	addresses := p.external(families)
	if err := w.assign(ctx, s, p, want, addresses); err != nil {
		return err
	}
	if err := w.allocations.Take(c); err != nil {
		return err
	}
	w.services[s.UID] = &mapped{name: nameOf(s), want: want, port: p, ports: s.Spec.Ports}
	w.recorded(s, had, p.ID)
	if update == immediate {
		if err := w.UpdateAgents(ctx); err != nil {
			return err
		}
	}
	switch {
	case had == "":
		w.event(s, corev1.EventTypeNormal, "Mapped", "reachable at "+list(addresses))
	case had != p.ID, addressesChanged(s, addresses):
		w.event(s, corev1.EventTypeNormal, "Remapped", "now reachable at "+list(addresses))
	}
	return w.reportMapped(ctx, s, addresses)
}

// place returns the pool of a Service that has a port, or none, with the families that the pool serves, and the request
// completed for that pool. With an error, which names what the Service must change, the pool is nil if none is chosen.
func (w *worker) place(ctx context.Context, s *corev1.Service, want service.Want, has port) (*Pool, []corev1.IPFamily, service.Want, error) {
	pool, err := w.choosePool(ctx, s, want, has)
	if err != nil {
		return nil, nil, want, err
	}
	families := common(want.Families, pool.familiesWith(has))
	if len(families) == 0 {
		return pool, nil, want, invalid{fmt.Errorf("spec.ipFamilies %v: pool %s has only %v; name another pool by the annotation %s", want.Families, pool.Name, pool.families(), service.AnnotationPool)}
	}
	if err := w.checkFailoverIP(ctx, s, want, pool); err != nil {
		return pool, nil, want, err
	}
	want.Floating = w.floating(s, want, pool, families)
	return pool, families, want, w.checkAddresses(s, want, pool)
}

// addressesChanged reports whether the status of a Service has other addresses. Another Service may have caused that: of
// Services that share a port, the first one processed changes the floating IP of all.
func addressesChanged(s *corev1.Service, to []netip.Addr) bool {
	was := s.Status.LoadBalancer.Ingress
	return len(was) > 0 && !slices.EqualFunc(was, to, func(i corev1.LoadBalancerIngress, a netip.Addr) bool { return i.IP == a.String() })
}

// RemapService is MapService for a Service with an L2 port. It keeps the port as long as the port exists and satisfies
// it.
func (w *worker) RemapService(ctx context.Context, s *corev1.Service, want service.Want, update agentUpdate) error {
	return w.MapService(ctx, s, want, update)
}

// choosePort returns the port for a Service: its current one if that satisfies it, whatever its annotation names now, else the
// first suitable one of other Services by id, else a new one. It asks the cloud only for a port, or a floating IP, that does not
// exist yet; the error is then errWaiting, until the cloud has answered.
func (w *worker) choosePort(s *corev1.Service, want service.Want, pool *Pool, families []corev1.IPFamily) (port, error) {
	last := w.answers[s.UID]
	delete(w.answers, s.UID)
	// The annotation may name a port that is not allocated to this Service.
	has, src := s.Annotations[service.AnnotationPort], w.pools[pool.Name]
	if err := w.checkNamedPort(has, s, want, pool); err != nil {
		return port{}, err
	}
	ports := w.knownPorts(append(w.held(), has))
	if _, ok := ports[has]; has != "" && !ok && src != nil && !src.known {
		w.readPorts(src, nameOf(s))
		return port{}, errWaiting
	}
	own := "" // its port
	if m := w.services[s.UID]; m != nil {
		own = m.port.ID
	}
	asked := askedVIPs(want)
	satisfies := func(p port) bool {
		return p.Pool == pool.Name && p.covers(families) && containsAll(p.VIPs, asked) && (p.ID == own || len(p.VIPs) == 0 || !slices.Contains(pool.kept, p.VIPs[0])) &&
			!slices.ContainsFunc(w.sharers(p.ID, s.UID), func(m *mapped) bool { return !sameFloating(m.want.Floating, want.Floating, p.Floating) })
	}
	var candidates []portmap.Claim
	for id, p := range ports {
		if (id == has || id == own || len(w.sharers(id, s.UID)) > 0) && satisfies(p) {
			c := w.claim(s, want, p)
			candidates = append(candidates, c)
			if id == has && own == "" {
				_ = w.allocations.Take(c) // the Service moves if another one uses its L4 ports there
			}
		}
	}
	if err := w.checkSharedFloatingIP(ports, want, s, satisfies); err != nil {
		return port{}, err
	}
	r := request{Pool: pool, Families: common(families, pool.families()), Floating: want.Floating, Purpose: string(s.UID), Namespace: s.Namespace, Addresses: asked, AddressesField: want.AddressesField}
	chosen, ok := w.allocations.Choose(candidates)
	if !ok || chosen.Port != own {
		if err := cmp.Or(w.checkQuota(s, r, ports[chosen.Port]), w.checkWithdrawn(s, ports[chosen.Port])); err != nil {
			w.allocations.Release(string(s.UID)) // of the port that its annotation names
			return port{}, err
		}
	}
	if src == nil {
		return w.listed(r, ports, chosen.Port)
	}
	return w.cloudPort(s, src, r, ports[chosen.Port], last)
}

// cloudPort returns p, the port chosen for a Service, or one for its request if that has no id, with the floating IP that it wants.
func (w *worker) cloudPort(s *corev1.Service, src *cloudPorts, r request, p port, last answer) (port, error) {
	if p.ID == "" {
		var err error
		if p, _, err = src.reuse(r, src.ports, w.held()); err != nil {
			return port{}, err
		}
	}
	if p.ID != "" {
		if src.complete(p, r.Floating) {
			return p, nil
		}
		return port{}, w.CreateAndAssignPort(s, src, r, p, last)
	}
	for _, former := range src.ports { // of a former Service, which waits to be deleted
		if !containsAny(former.VIPs, r.Addresses) {
			continue
		}
		if err := w.checkWithdrawn(s, former); err != nil {
			return port{}, err
		}
	}
	return port{}, w.CreateAndAssignPort(s, src, r, port{}, last)
}

// checkNamedPort refuses an annotation that names an address of another Service which does not share it, or not by the id of
// its port: by half of a pair, or in another spelling.
func (w *worker) checkNamedPort(id string, s *corev1.Service, want service.Want, pool *Pool) error {
	for uid, m := range w.services {
		if uid != s.UID && m.port.ID == id && w.allocations.Port(string(s.UID)) == "" && w.foreign(s, want, m.port) {
			return foreignError("annotation "+service.AnnotationPort, id, "remove the annotation")
		}
	}
	for text := range strings.SplitSeq(id, staticSeparator) {
		addr, err := netip.ParseAddr(text)
		if err != nil {
			continue
		}
		for uid, m := range w.services {
			if of := w.settings.pool(m.port.Pool); uid != s.UID && m.port.ID != id && of != nil && of.Group == pool.Group && slices.Contains(m.port.VIPs, addr.Unmap().WithZone("")) {
				if w.foreign(s, want, m.port) {
					return foreignError("annotation "+service.AnnotationPort, id, "remove the annotation")
				}
				return invalid{fmt.Errorf("annotation %s: %s is no port, but %s is an address of the port %s of another Service; name that port to share it, or remove the annotation", service.AnnotationPort, id, text, m.port.ID)}
			}
		}
	}
	return nil
}

// foreign reports whether Services of another namespace have a port, and do not share it with this Service.
func (w *worker) foreign(s *corev1.Service, want service.Want, p port) bool {
	return errors.Is(w.allocations.Collision(w.claim(s, want, p)), portmap.ErrForeign)
}

// foreignError refuses what a field names. It tells a tenant nothing about the Services that have it.
func foreignError(field, value, otherwise string) error {
	return invalid{fmt.Errorf("%s: Services of another namespace have %s; %s, or share it: they and this Service need the same key in the annotation %s", field, value, otherwise, service.AnnotationSharing)}
}

// listed returns the port with an id, or a new one, of a list of addresses.
func (w *worker) listed(r request, ports map[string]port, id string) (port, error) {
	if p, ok := ports[id]; ok {
		return p, w.list.checkFloatingIP(p.Pool, r.Floating)
	}
	p, err := w.list.create(r, w.held(), w.allGiven())
	if errors.Is(err, errExhausted) { // but some may become free
		if p, other := w.list.create(r, w.held(), nil); other == nil {
			return port{}, withdrawing(p.VIPs, w.mayServe(p.VIPs))
		}
	}
	return p, err
}

// floating returns the floating IP that a Service gets. The default does not apply to pools without floating IPs.
func (w *worker) floating(s *corev1.Service, want service.Want, pool *Pool, families []corev1.IPFamily) service.FloatingIP {
	if pool.FailoverIP != nil {
		return service.FloatingIP{Allocate: true}
	}
	_, asked := s.Annotations[service.AnnotationFloatingIP]
	none := pool.Neutron == nil || pool.Neutron.FloatingNetwork == "" && !w.keepsFloatingIP(s) || !slices.Contains(families, corev1.IPv4Protocol)
	if none && !asked {
		return service.FloatingIP{}
	}
	if i := slices.IndexFunc(want.Addresses, netip.Addr.Is4); i >= 0 && want.Floating.Allocate { // the address that clients use
		return service.FloatingIP{Use: want.Addresses[i].String(), Retain: true}
	}
	return want.Floating
}

// checkSharedFloatingIP refuses a named floating IP that other Services use in an incompatible way.
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
		if w.foreign(s, want, p) {
			return foreignError("annotation "+service.AnnotationFloatingIP, want.Floating.Use, "name another one")
		}
		for _, m := range others {
			if !sameFloating(m.want.Floating, want.Floating, p.Floating) {
				return invalid{fmt.Errorf("annotation %s: floating IP %s was allocated for service %s; name another one", service.AnnotationFloatingIP, want.Floating.Use, m.name)}
			}
			if i := slices.IndexFunc(want.L4, func(l portmap.L4) bool { return slices.Contains(m.want.L4, l) }); i >= 0 {
				return invalid{fmt.Errorf("spec.ports: %s of floating IP %s already belongs to service %s; choose another port or another floating IP", want.L4[i], want.Floating.Use, m.name)}
			}
		}
		if !satisfies(p) { // moving it would take it away from the other Services
			return invalid{fmt.Errorf("annotation %s: floating IP %s leads to the address of service %s, which has pool %s and other families; ask for the same spec.ipFamilies and annotation %s, or name another floating IP",
				service.AnnotationFloatingIP, want.Floating.Use, others[0].name, p.Pool, service.AnnotationPool)}
		}
	}
	return nil
}

// assign records the port and the external IPs of a Service, in one request.
func (w *worker) assign(ctx context.Context, s *corev1.Service, p port, want service.Want, addresses []netip.Addr) error {
	return w.patch(ctx, s, func(s *corev1.Service) {
		annotate(s, service.AnnotationPort, p.ID)
		if !want.ExternalIPs {
			addresses = nil
		}
		setExternalIPs(s, addresses)
	})
}

// UnmapService takes the port away from a Service, updates the gateways, and deletes what no Service uses any more.
func (w *worker) UnmapService(ctx context.Context, s *corev1.Service, update agentUpdate) error {
	had := s.Annotations[service.AnnotationPort]
	err := w.patch(ctx, s, func(s *corev1.Service) {
		annotate(s, service.AnnotationPort, "")
		setExternalIPs(s, nil)
	})
	if err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	w.leaves(s, had)
	w.forget(s.UID)
	w.event(s, corev1.EventTypeNormal, "Unmapped", "no longer reachable through the gateways")
	if update == deferred {
		return nil
	}
	return w.updateAndClean(ctx)
}

// updateAndClean updates the gateways, and then deletes what Services have left.
func (w *worker) updateAndClean(ctx context.Context) error {
	if err := w.UpdateAgents(ctx); err != nil {
		return err
	}
	return w.Clean(ctx)
}

// patch changes a Service, unless it was changed since it was read. It writes nothing when nothing changes.
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

// same reports whether the fields that patch may change are equal.
func same(a, b *corev1.Service) bool {
	return maps.Equal(a.Annotations, b.Annotations) && slices.Equal(a.Finalizers, b.Finalizers) && slices.Equal(a.Spec.ExternalIPs, b.Spec.ExternalIPs)
}

// annotate sets an annotation, or removes it when value is empty.
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

// setExternalIPs makes spec.externalIPs contain want and the IPs of the user, and records which ones are ours.
func setExternalIPs(s *corev1.Service, want []netip.Addr) {
	var ours []string
	if list := s.Annotations[service.AnnotationOwnExternalIPs]; list != "" {
		ours = strings.Split(list, ",")
	}
	all := slices.DeleteFunc(slices.Clone(s.Spec.ExternalIPs), func(ip string) bool { return slices.Contains(ours, ip) })
	ours = nil
	for _, a := range want {
		if !slices.Contains(all, a.String()) { // otherwise the user added it
			all, ours = append(all, a.String()), append(ours, a.String())
		}
	}
	s.Spec.ExternalIPs = all
	annotate(s, service.AnnotationOwnExternalIPs, strings.Join(ours, ","))
}
