// Package controller keeps Neutron ports, floating IPs and gateways in step with Services of type LoadBalancer.
//
// One worker has all state and does everything, one operation after another, on the replica that holds the Lease. It
// never waits for OpenStack: lanes make the calls and hand it their results. So endpoints reach the gateways, and lists of
// addresses work, while Keystone or Neutron hangs or is down.
//
// The worker may be killed between any two calls. Services record their ports in annotations and conditions, and objects
// in the cloud record their owner, so Sync can recover all state: from the cloud, or without it until it answers.
package controller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/isthmus-net/isthmus/gateway/controller/internal/agents"
	"github.com/isthmus-net/isthmus/gateway/controller/internal/probes"
	"github.com/isthmus-net/isthmus/gateway/portmap"
	"github.com/isthmus-net/isthmus/gateway/service"
)

// agentClients are the clients of the gateways' agents; package agents implements them.
type agentClients interface {
	ReadGenerations(ctx context.Context, targets map[string]agents.Target)
	Set(ctx context.Context, targets map[string]agents.Target)
	Reports() map[string]agents.Report
}

// worker is the single worker with its state. It is for one goroutine.
type worker struct {
	configured Settings // of the file
	settings   Settings // those, with what Services keep in spite of an edit
	namespace  string   // of Secrets with passwords
	managedBy  []string // see Config
	client     client.Client
	live       client.Reader // not cached
	cloud      Cloud         // nil without OpenStack; only lanes call it
	lanes      *lanes
	agents     agentClients
	probes     *probes.Prober
	events     events.EventRecorder
	log        *slog.Logger
	// requeue enqueues a Service or a key.
	requeue func(types.NamespacedName)

	// now returns the time; tests replace it.
	now func() time.Time

	allocations     *portmap.Allocations
	services        map[types.UID]*mapped
	list            *static                // the pools with addresses
	network         *cloudPorts            // Neutron ports
	failover        *cloudPorts            // failover IPs
	sources         []*cloudPorts          // of the cloud, with or without a pool that uses them
	pools           map[string]*cloudPorts // by pool; none for a list of addresses
	answers         map[types.UID]answer
	waitingSince    map[types.NamespacedName]time.Time // Services without an address that wait for the cloud
	newVIPs         map[netip.Addr]bool                // created since the start
	unknown         map[string]string                  // by group: a Service whose address only the cloud knows yet
	generationsRead bool                               // from the gateways
	restored        bool                               // the allocations, at least once
	rebuildNeeded   bool                               // the cloud has other ports than the worker knew
	cleanupQueued   bool                               // cleanKey is enqueued
	given           map[string]map[netip.Addr]bool     // by gateway: VIPs that it has, and those that it may still have
	withheld        bool                               // ports wait for gateways that may still have their VIPs
	edited          map[string]bool                    // agreements that the settings wait for
	unsent          bool                               // the gateways were not told yet what Services have given up
	pairs           map[string]*pairsState             // by gateway
	secrets         map[string]string
	verdicts        map[types.NamespacedName]verdict
	unmapped        map[types.NamespacedName]string // reasons of Services that do not get what they ask for
	silentSince     map[string]time.Time            // by gateway: start of its silence
	recheckAfter    time.Duration                   // when Refresh must run again without an event; 0: never
}

// mapped is a Service with a port.
type mapped struct {
	name  types.NamespacedName
	want  service.Want
	port  port
	ports []corev1.ServicePort
	fault verdict // of its backends, such as ports that its import does not have; zero for none
}

// families returns the IP families in which a Service is reachable.
func (m *mapped) families(p *Pool) []corev1.IPFamily {
	return common(m.want.Families, p.familiesWith(m.port))
}

// init completes a worker.
func (w *worker) init() {
	w.allocations, w.services, w.unmapped = new(portmap.Allocations), map[types.UID]*mapped{}, map[types.NamespacedName]string{}
	w.answers, w.waitingSince, w.newVIPs, w.given, w.pairs = map[types.UID]answer{}, map[types.NamespacedName]time.Time{}, map[netip.Addr]bool{}, map[string]map[netip.Addr]bool{}, map[string]*pairsState{}
	w.network, w.failover = newCloudPorts(&neutron{w.cloud}), newCloudPorts(&failoverIP{w.cloud})
	if w.cloud != nil {
		w.sources = []*cloudPorts{w.network, w.failover}
	}
	w.usePools(w.configured)
	if w.requeue == nil {
		w.requeue = func(types.NamespacedName) {}
	}
	if w.now == nil {
		w.now = time.Now
	}
}

// usePools makes the worker use settings with these pools.
func (w *worker) usePools(s Settings) {
	w.settings, w.list, w.pools = s, &static{}, map[string]*cloudPorts{}
	for i := range w.settings.Pools {
		switch p := &w.settings.Pools[i]; {
		case p.Neutron != nil:
			w.pools[p.Name] = w.network
		case p.FailoverIP != nil:
			w.pools[p.Name] = w.failover
		default:
			w.list.pools = append(w.list.pools, p)
		}
	}
}

// Sync runs at start and then periodically. It rebuilds the state from the Services, and then again from the cloud once
// that has answered.
func (w *worker) Sync(ctx context.Context) error {
	if err := w.readGenerations(ctx); err != nil {
		return err
	}
	for _, p := range w.pairs {
		p.set = false
	}
	w.secrets = nil
	for _, src := range w.sources {
		w.readPorts(src, cleanKey)
	}
	return w.rebuild(ctx)
}

// rebuild rebuilds the allocations from the Services' annotations, reconciles every Service, updates the gateways, and
// deletes unused objects.
func (w *worker) rebuild(ctx context.Context) error {
	var list corev1.ServiceList
	if err := w.live.List(ctx, &list); err != nil {
		return fmt.Errorf("list services: %w", err)
	}
	ours := slices.DeleteFunc(list.Items, func(s corev1.Service) bool { return !managed(&s) && !w.takes(&s) })
	if err := w.restore(ctx, ours); err != nil {
		return err
	}
	w.restored, w.rebuildNeeded = true, false
	for i := range ours {
		for range maxSteps {
			again, err := w.step(ctx, &ours[i], deferred)
			if err != nil {
				w.log.Debug("service is retried", "namespace", ours[i].Namespace, "service", ours[i].Name, "err", err)
				if !errors.Is(err, errWaiting) {
					w.requeue(nameOf(&ours[i])) // on its own, so that the others do not wait for it
				}
			}
			if err != nil || !again {
				break
			}
		}
	}
	if err := w.UpdateAgents(ctx); err != nil {
		return err
	}
	return w.CleanUnusedPorts(ctx)
}

// Collect stores the results of calls to OpenStack.
func (w *worker) Collect() error { return w.lanes.collect() }

// maxSteps bounds the operations on one Service: taking it over and mapping it, or unmapping and releasing it.
const maxSteps = 3

// restore rebuilds the allocations from the Services' annotations. Services whose port is missing or belongs to an older
// Service are mapped again later.
func (w *worker) restore(ctx context.Context, services []corev1.Service) error {
	w.keepEdited(services)
	held := map[string]bool{}
	for i := range services {
		if id := services[i].Annotations[service.AnnotationPort]; id != "" && managed(&services[i]) {
			held[id] = true
		}
	}
	ports := w.knownPorts(slices.Sorted(maps.Keys(held)))
	w.unknown = map[string]string{}
	var claims []portmap.Claim
	entries := map[string]*mapped{}
	for i := range services {
		s := &services[i]
		p, ok, err := w.portOf(ctx, s, ports)
		if err != nil {
			return err
		}
		if !ok {
			continue
		}
		want, err := w.read(s) // step reports the error later
		if was := w.services[s.UID]; was != nil {
			want = was.want // the last valid one
		} else if err != nil {
			want = failClosed(s, want)
		}
		if pool := w.settings.pool(p.Pool); pool != nil {
			want.Floating = w.floating(s, want, pool, common(want.Families, pool.familiesWith(p)))
		}
		// L4 ports that the Service added since may belong to another Service, which keeps them.
		want.L4 = reachablePorts(s, want.L4)
		c := w.claim(s, want, p)
		was, known := w.services[s.UID]
		c.Confirmed = known && was.port.ID == p.ID || confirmed(s, p, c)
		claims = append(claims, c)
		entries[string(s.UID)] = &mapped{name: nameOf(s), want: want, port: p, ports: s.Spec.Ports}
	}
	claims = w.withdrawn(services, claims, entries)
	allocations, collided := portmap.Restore(claims)
	w.allocations, w.services = allocations, map[types.UID]*mapped{}
	for _, c := range collided {
		delete(entries, c.Service)
	}
	for uid, m := range entries {
		w.services[types.UID(uid)] = m
	}
	return nil
}

// noSource matches no packet.
var noSource = []netip.Prefix{netip.MustParsePrefix("0.0.0.0/32"), netip.MustParsePrefix("::/128")}

// failClosed returns the request of a Service that was restored with an invalid spec. It takes what can be read, but
// never allows more sources than the spec names.
func failClosed(s *corev1.Service, read service.Want) service.Want {
	if len(s.Spec.LoadBalancerSourceRanges) > 0 && len(read.Sources) == 0 {
		read.Sources = noSource
	}
	return read
}

// portOf returns the port of a Service: that of its annotation, or, before its source was read, the recorded one.
func (w *worker) portOf(ctx context.Context, s *corev1.Service, ports map[string]port) (port, bool, error) {
	id := s.Annotations[service.AnnotationPort]
	p, ok := ports[id]
	if ok || id == "" || !managed(s) {
		return p, ok && managed(s), nil
	}
	unread := slices.DeleteFunc(slices.Clone(w.sources), func(src *cloudPorts) bool { return src.known })
	if len(unread) == 0 {
		return port{}, false, nil // it was deleted
	}
	if p, ok := readRecord(s); ok {
		if src := w.pools[p.Pool]; slices.Contains(unread, src) {
			err := w.leadRecorded(ctx, &p.port)
			src.ports[p.ID] = p.port
			return p.port, true, err
		}
		return port{}, false, nil
	}
	want, _ := w.read(s) // step reports the error later
	if pool := w.settings.pool(want.Pool); pool != nil && len(s.Status.LoadBalancer.Ingress) > 0 {
		w.unknown[pool.Group] = nameOf(s).String()
	}
	return port{}, false, nil
}

// knownPorts returns the known ports of all pools; of lists, those with the given ids.
func (w *worker) knownPorts(held []string) map[string]port {
	all := map[string]port{}
	for _, p := range w.list.ports(held) {
		all[p.ID] = p
	}
	for _, src := range w.sources {
		maps.Copy(all, src.ports)
	}
	return all
}

// held returns the ids of the ports that Services use, sorted.
func (w *worker) held() []string {
	ids := map[string]bool{}
	for _, m := range w.services {
		ids[m.port.ID] = true
	}
	return slices.Sorted(maps.Keys(ids))
}

// Handle reconciles a Service after any event.
func (w *worker) Handle(ctx context.Context, name types.NamespacedName) error {
	var s corev1.Service
	err := w.client.Get(ctx, name, &s)
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("read service %s: %w", name, err)
	}
	lost := w.replacedUID(name, s.UID)
	if m := w.services[lost]; m != nil { // the finalizer was removed
		w.leaves(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name, UID: lost}}, m.port.ID)
		w.forget(lost)
		if err := w.updateAndClean(ctx); err != nil {
			return err
		}
	}
	maps.DeleteFunc(w.answers, func(uid types.UID, a answer) bool { return a.name == name && uid != s.UID })
	err = nil
	if s.UID != "" {
		_, err = w.step(ctx, &s, immediate)
	} else {
		delete(w.unmapped, name)
		w.waitsNoMore(name)
	}
	if (err == nil || errors.Is(err, errWaiting)) && w.hasUnclean() && !w.cleanupQueued {
		w.cleanupQueued = true
		w.requeue(cleanKey) // on its own, so that no Service waits for the cloud because of another one
	}
	return err
}

// cleanKey makes the worker call Clean.
var cleanKey = types.NamespacedName{Name: "clean"}

// replacedUID returns the UID of a mapped Service that had this name and no longer exists.
func (w *worker) replacedUID(name types.NamespacedName, uid types.UID) types.UID {
	for had, m := range w.services {
		if m.name == name && had != uid {
			return had
		}
	}
	return ""
}

// agentUpdate says whether an operation updates the gateways itself, or its caller does so after many.
type agentUpdate bool

const (
	immediate agentUpdate = false
	deferred  agentUpdate = true
)

// step runs the next operation on a Service. It depends only on the state of the Service, not on the event, so a missed
// event has no effect. It reports whether another step follows.
//
//	managed  can be managed  has an L2 port
//	no       no              -                ignore
//	no       yes             -                set to managed
//	yes      yes             no               MapService
//	yes      yes             yes              RemapService
//	yes      no              yes              UnmapService, set to unmanaged
//	yes      no              no               set to unmanaged
func (w *worker) step(ctx context.Context, s *corev1.Service, update agentUpdate) (more bool, err error) {
	w.noteAgreement(s)
	can := s.DeletionTimestamp == nil && w.takes(s)
	switch is := managed(s); {
	case !is && !can:
		return false, nil
	case !is:
		return true, w.setManaged(ctx, s)
	case can && w.leavesRemovedPool(s):
		if err := w.UnmapService(ctx, s, update); err != nil {
			return false, err
		}
		return true, w.clearStatus(ctx, s) // its annotation names no pool now, which the next step reports
	case can:
		want, err := w.read(s)
		if err != nil {
			return false, w.reportRefused(ctx, s, invalid{err})
		}
		if s.Annotations[service.AnnotationPort] == "" {
			return false, w.MapService(ctx, s, want, update)
		}
		return false, w.RemapService(ctx, s, want, update)
	}
	if s.Annotations[service.AnnotationPort] != "" {
		if err := w.UnmapService(ctx, s, update); err != nil {
			return false, err
		}
	}
	delete(w.answers, s.UID)
	w.waitsNoMore(nameOf(s))
	if w.unsent && update == immediate { // a previous attempt stopped half way
		if err := w.UpdateAgents(ctx); err != nil {
			return false, err
		}
	}
	if w.isUnclean(s.UID) {
		return false, errWaiting // its name is handled again when its objects are gone
	}
	return false, w.setUnmanaged(ctx, s)
}

// managed reports whether the controller manages a Service.
func managed(s *corev1.Service) bool { return controllerutil.ContainsFinalizer(s, service.Finalizer) }

func nameOf(s *corev1.Service) types.NamespacedName {
	return types.NamespacedName{Namespace: s.Namespace, Name: s.Name}
}

// claim returns the claim of a Service to a port.
func (w *worker) claim(s *corev1.Service, want service.Want, p port) portmap.Claim {
	c := portmap.Claim{Service: string(s.UID), Namespace: s.Namespace, Sharing: want.Sharing, Created: s.CreationTimestamp.Time, L4: want.L4, Port: p.ID}
	if pool := w.settings.pool(p.Pool); pool != nil {
		for _, vip := range p.VIPs {
			c.Of = append(c.Of, portmap.Address{Group: pool.Group, Addr: vip})
		}
		for _, vip := range p.vips(common(want.Families, pool.familiesWith(p))) {
			c.At = append(c.At, portmap.Address{Group: pool.Group, Addr: vip})
		}
	}
	return c
}

// confirmed reports whether the status of a Service, which only the controller writes, has the addresses that it claims. Its
// annotations, which users write as well, may claim the port of another Service.
func confirmed(s *corev1.Service, p port, c portmap.Claim) bool {
	return len(c.At) > 0 && !slices.ContainsFunc(c.At, func(a portmap.Address) bool {
		addr := p.externalOf(a.Addr).String()
		return !slices.ContainsFunc(s.Status.LoadBalancer.Ingress, func(i corev1.LoadBalancerIngress) bool { return i.IP == addr })
	})
}

// forget releases the allocations of a Service.
func (w *worker) forget(uid types.UID) {
	w.unsent = true
	delete(w.answers, uid)
	w.allocations.Release(string(uid))
	delete(w.services, uid)
}

// sharers returns the other Services of a port, by name.
func (w *worker) sharers(id string, uid types.UID) (all []*mapped) {
	for other, m := range w.services {
		if m.port.ID == id && other != uid {
			all = append(all, m)
		}
	}
	slices.SortFunc(all, func(a, b *mapped) int { return strings.Compare(a.name.String(), b.name.String()) })
	return all
}
