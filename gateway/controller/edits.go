package controller

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/gateway/service"
)

// Edit is what edited settings would take from a Service. The Service keeps it until an administrator agrees: its record
// says what it has, so that the controller serves it without the settings that it had it from.
//
// For example, an operator removes the pool "old" from the settings, and thinks that it is unused. Without the record the
// controller would withdraw the addresses of all its Services when it starts.
type Edit struct {
	Namespace string       `json:"namespace"`
	Service   string       `json:"service"`
	Pool      string       `json:"pool"`
	Addresses []netip.Addr `json:"addresses"`
	// Change says what the settings would change.
	Change string `json:"change"`
	// Agreement is the value of the annotation with which the Service agrees to this change, and to no other.
	Agreement string `json:"agreement"`
	Agreed    bool   `json:"agreed"`
}

// Edits returns what settings would take from Services, in their order.
func Edits(settings *Settings, services []corev1.Service) (all []Edit) {
	for i := range services {
		if e, ok := editOf(settings, &services[i]); ok {
			all = append(all, e)
		}
	}
	return all
}

// editOf returns what settings would take from a Service, if anything.
func editOf(settings *Settings, s *corev1.Service) (Edit, bool) {
	r, ok := readRecord(s)
	if !ok || !managed(s) || s.DeletionTimestamp != nil {
		return Edit{}, false
	}
	change := settings.change(s, r)
	if change == "" {
		return Edit{}, false
	}
	sum := sha256.Sum256([]byte(string(s.UID) + " " + r.ID + " " + change))
	e := Edit{Namespace: s.Namespace, Service: s.Name, Pool: r.Pool, Change: change, Agreement: hex.EncodeToString(sum[:4])}
	for _, i := range s.Status.LoadBalancer.Ingress {
		if addr, err := netip.ParseAddr(i.IP); err == nil {
			e.Addresses = append(e.Addresses, addr)
		}
	}
	e.Agreed = s.Annotations[service.AnnotationAgree] == e.Agreement
	return e, true
}

// change says what settings would take from a Service with a record, "" for nothing.
func (s *Settings) change(svc *corev1.Service, r record) string {
	if svc.Spec.LoadBalancerClass == nil && !s.DefaultClass {
		return "defaultClass is false, and the Service has no class"
	}
	pool := s.pool(r.Pool)
	switch {
	case pool == nil:
		return "the settings have no pool " + r.Pool
	case r.group != pool.Group:
		return fmt.Sprintf("pool %s has the group %s instead of %s", pool.Name, pool.Group, r.group)
	case r.announce != pool.Announce:
		return fmt.Sprintf("pool %s has announce %s instead of %s", pool.Name, pool.Announce, r.announce)
	case r.router != pool.routerID(): // until its master has them, the addresses are nowhere
		return fmt.Sprintf("pool %s has vrrp.routerID %d instead of %d", pool.Name, pool.routerID(), r.router)
	}
	for _, vip := range r.VIPs {
		if r.listed() && !pool.lists(vip) || !slices.Contains(pool.families(), familyOf(vip)) {
			return fmt.Sprintf("pool %s no longer has the address %s", pool.Name, vip)
		}
	}
	if _, asks := svc.Annotations[service.AnnotationFloatingIP]; !asks && pool.Neutron != nil && r.floats != s.floats(pool) {
		if r.floats {
			return fmt.Sprintf("pool %s gives Services no floating IP unless they ask for one", pool.Name)
		}
		return fmt.Sprintf("pool %s gives Services a floating IP", pool.Name)
	}
	return ""
}

// floats reports whether Services of a pool get a floating IP without asking for it.
func (s *Settings) floats(p *Pool) bool {
	return s.FloatingIPs == "allocate" && p.Neutron != nil && p.Neutron.FloatingNetwork != ""
}

// keeping returns the settings with what the records of Services have, and the settings do not.
func (s *Settings) keeping(records []record) Settings {
	is := *s
	is.Pools = slices.Clone(s.Pools)
	for _, r := range records {
		pool := is.pool(r.Pool)
		if pool == nil {
			is.Pools = append(is.Pools, Pool{Name: r.Pool, Return: r.returns, removed: true})
			pool = &is.Pools[len(is.Pools)-1]
			switch {
			case r.listed():
			case r.Floating.ID == r.ID:
				pool.FailoverIP = &FailoverIPPool{}
			default:
				pool.Neutron = &NeutronPool{}
			}
		}
		if pool.removed || pool.Announce != r.announce {
			pool.BGP = r.route()
		}
		pool.Group, pool.Announce, pool.VRRP = r.group, r.announce, r.virtualRouter()
		for _, vip := range r.VIPs {
			if r.listed() && !pool.lists(vip) && !slices.Contains(pool.kept, vip) {
				pool.kept = append(pool.kept, vip)
			}
		}
	}
	return is
}

// lists reports whether a pool lists an address.
func (p *Pool) lists(a netip.Addr) bool { return contains(p.Addresses, a) }

// familiesWith returns the families of a pool and of a port in it, which the pool may no longer offer.
func (p *Pool) familiesWith(has port) []corev1.IPFamily {
	all := p.families()
	for _, vip := range has.VIPs {
		if f := familyOf(vip); has.Pool == p.Name && !slices.Contains(all, f) {
			all = append(all, f)
		}
	}
	return all
}

// takes reports whether the gateways handle a Service. One that they handle stays with them until its edit is agreed to.
func (w *worker) takes(s *corev1.Service) bool { return w.notTaken(s) == "" }

// notTaken says why the gateways do not handle a Service, "" if they do.
func (w *worker) notTaken(s *corev1.Service) string {
	c := w.settings.services()
	if e, ok := editOf(&w.configured, s); ok && !e.Agreed {
		c.Default = true
	}
	return c.NotTaken(s)
}

// read returns what a Service asks for. Without an annotation it keeps its pool, whichever is the default by now, and its
// floating IP.
func (w *worker) read(s *corev1.Service) (service.Want, error) {
	c := w.settings.services()
	r, ok := readRecord(s)
	e, edited := editOf(&w.configured, s)
	if pool := w.settings.pool(r.Pool); ok && pool != nil && !(e.Agreed && pool.removed) {
		c.Pools = service.Preferred(r.Pool, c.Pools...)
	}
	if edited && !e.Agreed {
		c.Floating.Allocate = r.floats
	}
	return c.Read(s)
}

// keepEdited makes the settings keep what Services have, unless their edits are agreed to.
func (w *worker) keepEdited(services []corev1.Service) {
	var records []record
	w.edited = map[string]bool{}
	for i := range services {
		if e, ok := editOf(&w.configured, &services[i]); ok && !e.Agreed {
			r, _ := readRecord(&services[i])
			records = append(records, r)
			w.edited[e.Agreement] = true
		}
	}
	w.usePools(w.configured.keeping(records))
}

// keepsFloatingIP reports whether a Service keeps a floating IP that the settings no longer give it.
func (w *worker) keepsFloatingIP(s *corev1.Service) bool {
	r, _ := readRecord(s)
	return r.floats && w.pendingEdit(s) != ""
}

// leavesRemovedPool reports whether a Service has agreed to leave a removed pool, and names no other.
func (w *worker) leavesRemovedPool(s *corev1.Service) bool {
	e, _ := editOf(&w.configured, s)
	return e.Agreed && w.configured.pool(e.Pool) == nil && s.Annotations[service.AnnotationPool] == e.Pool
}

// noteAgreement makes the worker rebuild its state when a Service has agreed to its edit.
func (w *worker) noteAgreement(s *corev1.Service) {
	if e, ok := editOf(&w.configured, s); ok && e.Agreed && w.edited[e.Agreement] {
		delete(w.edited, e.Agreement)
		w.rebuildNeeded = true
		w.requeue(nameOf(s))
	}
}

// pendingEdit describes the edit that a Service does not agree to, for its condition; "" for none.
func (w *worker) pendingEdit(s *corev1.Service) string {
	e, ok := editOf(&w.configured, s)
	if !ok || e.Agreed {
		return ""
	}
	return fmt.Sprintf("%s; the Service keeps what it has until isthmusctl gateway plan --agree, or the annotation %s: %q", e.Change, service.AnnotationAgree, e.Agreement)
}

// recordOf returns the record of a Service's port. The default of floating IPs stays as it was until an edit of it is agreed
// to, as the pool does.
func (w *worker) recordOf(s *corev1.Service, p port, pool *Pool) record {
	r := record{port: p, group: pool.Group, announce: pool.Announce, returns: pool.Return, router: pool.routerID(), floats: w.configured.floats(pool)}
	if pool.BGP != nil {
		r.peers = pool.BGP.Peers
	}
	if had, ok := readRecord(s); ok && w.pendingEdit(s) != "" {
		r.floats = had.floats
	}
	return r
}
