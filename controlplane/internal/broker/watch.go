package broker

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/guard"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// ImportedSlice names the slice that a member makes of one of the broker.
type ImportedSlice struct {
	Service clusterset.ServiceName
	Name    string
}

// Changes returns sources that ask to reconcile a Service, as namespace and name, whenever something about
// it changes on the broker, or in what is believed of it. A controller that has all of them works only when
// the cache is complete and everything in it has been taken note of.
func (b *Broker) Changes() []source.Source {
	sources := []source.Source{&signal{nudge: &b.changes, synced: b.synced}}
	for _, obj := range []client.Object{&v1alpha1.ExportRecord{}, &v1beta1.ServiceImport{}, &discoveryv1.EndpointSlice{}} {
		sources = append(sources, source.Kind(b.cluster.GetCache(), obj, handler.EnqueueRequestsFromMapFunc(request)))
	}
	return sources
}

func request(_ context.Context, obj client.Object) []reconcile.Request {
	name, ok := mcs.ServiceOf(obj)
	if !ok {
		return nil
	}
	return []reconcile.Request{{NamespacedName: types.NamespacedName(name)}}
}

// Reconsider asks to reconcile everything that member id has to do with.
func (b *Broker) Reconsider(ctx context.Context, id clusterset.ClusterID) {
	names, err := b.services(ctx, client.MatchingFields{byCluster: string(id)})
	if err != nil {
		b.cfg.Log.Error("services of a member are not known", "cluster", string(id), "err", err)
	}
	b.changes.send(names...)
}

// nudge asks every controller to look at Services again.
type nudge struct {
	mu     sync.Mutex
	queues []workqueue.TypedRateLimitingInterface[reconcile.Request]
}

func (n *nudge) send(names ...clusterset.ServiceName) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, q := range n.queues {
		for _, name := range names {
			q.Add(reconcile.Request{NamespacedName: types.NamespacedName(name)})
		}
	}
}

// signal is a nudge as a source. Its controller starts when all watchers of the broker have seen what was
// there at first.
type signal struct {
	*nudge

	synced []toolscache.ResourceEventHandlerRegistration
}

func (s *signal) Start(_ context.Context, q workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.queues = append(s.queues, q)
	return nil
}

func (s *signal) WaitForSync(ctx context.Context) error {
	for _, registration := range s.synced {
		if !toolscache.WaitForCacheSync(ctx.Done(), registration.HasSynced) {
			return fmt.Errorf("wait for the broker: %w", ctx.Err())
		}
	}
	return nil
}

// watched is what is remembered of events: when slices came, and which of them went before their record did.
type watched struct {
	mu   sync.Mutex
	seen map[ImportedSlice]time.Time
	lost map[offer][]ImportedSlice
}

// offer is one Service of one member.
type offer struct {
	cluster clusterset.ClusterID
	service clusterset.ServiceName
}

// watch registers what has to be known of every event, whoever reconciles.
func (b *Broker) watch(ctx context.Context) error {
	b.watched.seen, b.watched.lost = map[ImportedSlice]time.Time{}, map[offer][]ImportedSlice{}
	for _, w := range []struct {
		obj     client.Object
		handler toolscache.ResourceEventHandler
	}{
		{&v1alpha1.Member{}, each(b.member, b.memberGone)},
		{&v1alpha1.ClusterSetConfig{}, each(b.config, func(*v1alpha1.ClusterSetConfig) {})},
		{&coordinationv1.Lease{}, each(b.lease, b.leaseGone)},
		{&v1alpha1.ExportRecord{}, each(b.record, b.recordGone)},
		{&discoveryv1.EndpointSlice{}, each(b.slice, b.sliceGone)},
	} {
		informer, err := b.cluster.GetCache().GetInformer(ctx, w.obj, cache.BlockUntilSynced(false))
		if err != nil {
			return fmt.Errorf("watch %T on the broker: %w", w.obj, err)
		}
		registration, err := informer.AddEventHandler(w.handler)
		if err != nil {
			return fmt.Errorf("watch %T on the broker: %w", w.obj, err)
		}
		b.synced = append(b.synced, registration)
	}
	return nil
}

// each calls have with an object that came or changed, and gone with the last known state of one that went.
func each[T client.Object](have func(obj T, first bool), gone func(T)) toolscache.ResourceEventHandler {
	return toolscache.ResourceEventHandlerDetailedFuncs{
		AddFunc: func(obj any, first bool) {
			if t, ok := obj.(T); ok {
				have(t, first)
			}
		},
		UpdateFunc: func(_, obj any) {
			if t, ok := obj.(T); ok {
				have(t, false)
			}
		},
		DeleteFunc: func(obj any) {
			if tombstone, ok := obj.(toolscache.DeletedFinalStateUnknown); ok {
				obj = tombstone.Obj
			}
			if t, ok := obj.(T); ok {
				gone(t)
			}
		},
	}
}

func (b *Broker) lease(l *coordinationv1.Lease, _ bool) {
	if id := mcs.OwnerOf(l); l.Name == v1alpha1.MemberLease(string(id)) && l.Spec.RenewTime != nil {
		b.cfg.Renewed(id, l.Spec.RenewTime.Time)
	}
}

func (b *Broker) leaseGone(l *coordinationv1.Lease) {
	if id := mcs.OwnerOf(l); l.Name == v1alpha1.MemberLease(string(id)) {
		b.cfg.Gone(id)
	}
}

func (b *Broker) record(r *v1alpha1.ExportRecord, _ bool) {
	name, ok := mcs.ServiceOf(r)
	if !ok {
		return
	}
	o := offer{mcs.OwnerOf(r), name}
	if !mcs.Withdrawn(r) {
		b.exportsOf.Has(o.cluster, name)
		return
	}
	b.exportsOf.Withdrew(o.cluster, name)
	b.watched.mu.Lock()
	lost := b.watched.lost[o]
	delete(b.watched.lost, o)
	b.watched.mu.Unlock()
	for _, s := range lost {
		b.slicesOf.Withdrew(o.cluster, s)
	}
}

func (b *Broker) recordGone(r *v1alpha1.ExportRecord) {
	name, ok := mcs.ServiceOf(r)
	switch {
	case !ok:
	case mcs.Withdrawn(r):
		b.exportsOf.Withdrew(mcs.OwnerOf(r), name)
	default:
		b.exportsOf.Lost(mcs.OwnerOf(r), name)
	}
}

func (b *Broker) slice(es *discoveryv1.EndpointSlice, first bool) {
	name, ok := mcs.ServiceOf(es)
	if !ok {
		return
	}
	owner, imported := mcs.OwnerOf(es), importedOf(es, name)
	b.watched.mu.Lock()
	if !first {
		b.watched.seen[imported] = time.Now()
	}
	b.watched.lost[offer{owner, name}] = without(b.watched.lost[offer{owner, name}], imported)
	if len(b.watched.lost[offer{owner, name}]) == 0 {
		delete(b.watched.lost, offer{owner, name})
	}
	b.watched.mu.Unlock()
	if len(es.Endpoints) > 0 {
		b.slicesOf.Has(owner, imported)
	} else {
		b.slicesOf.Withdrew(owner, imported)
	}
}

func (b *Broker) sliceGone(es *discoveryv1.EndpointSlice) {
	name, ok := mcs.ServiceOf(es)
	if !ok {
		return
	}
	owner, imported := mcs.OwnerOf(es), importedOf(es, name)
	o := offer{owner, name}
	b.watched.mu.Lock()
	delete(b.watched.seen, imported)
	b.watched.mu.Unlock()
	// A member empties a slice before it deletes it, unless it has said that the whole Service is withdrawn.
	if len(es.Endpoints) == 0 || b.withdrawn(o) {
		b.slicesOf.Withdrew(owner, imported)
		return
	}
	b.watched.mu.Lock()
	b.watched.lost[o] = append(without(b.watched.lost[o], imported), imported)
	b.watched.mu.Unlock()
	b.slicesOf.Lost(owner, imported)
}

// withdrawn reports whether the cache has a tombstone of o.
func (b *Broker) withdrawn(o offer) bool {
	var r v1alpha1.ExportRecord
	key := types.NamespacedName{Namespace: b.cfg.Namespace, Name: mcs.RecordName(o.cluster, o.service)}
	return b.cached.Get(b.running, key, &r) == nil && mcs.Withdrawn(&r)
}

func without(list []ImportedSlice, s ImportedSlice) []ImportedSlice {
	return slices.DeleteFunc(list, func(o ImportedSlice) bool { return o == s })
}

func importedOf(es *discoveryv1.EndpointSlice, name clusterset.ServiceName) ImportedSlice {
	return ImportedSlice{name, mcs.ImportedSliceName(mcs.OwnerOf(es), name.Name, es.Name)}
}

// SeenAt returns when the last change of what a slice is made of came from the broker, and whether one came
// since the last call.
func (b *Broker) SeenAt(s ImportedSlice) (time.Time, bool) {
	b.watched.mu.Lock()
	defer b.watched.mu.Unlock()
	t, ok := b.watched.seen[s]
	delete(b.watched.seen, s)
	return t, ok
}

// Baseline tells what a member has imported from before it started: by Service from whom, and by slice. What of
// it the broker no longer offers has gone while nobody looked.
func (b *Broker) Baseline(ctx context.Context, offers map[clusterset.ServiceName][]clusterset.ClusterID, imported map[ImportedSlice]clusterset.ClusterID) error {
	for name, from := range offers {
		for _, id := range from {
			var r v1alpha1.ExportRecord
			err := b.cached.Get(ctx, types.NamespacedName{Namespace: b.cfg.Namespace, Name: mcs.RecordName(id, name)}, &r)
			if client.IgnoreNotFound(err) != nil {
				return fmt.Errorf("read export record of %s: %w", name, err)
			}
			if err != nil {
				b.exportsOf.Has(id, name)
				b.exportsOf.Lost(id, name)
			}
		}
	}
	var list discoveryv1.EndpointSliceList
	if err := b.cached.List(ctx, &list, client.InNamespace(b.cfg.Namespace), client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("list broker slices: %w", err)
	}
	missing := maps.Clone(imported)
	for i := range list.Items {
		if name, ok := mcs.ServiceOf(&list.Items[i]); ok {
			delete(missing, importedOf(&list.Items[i], name))
		}
	}
	for s, id := range missing {
		if o := (offer{id, s.Service}); !b.withdrawn(o) {
			b.watched.mu.Lock()
			b.watched.lost[o] = append(b.watched.lost[o], s)
			b.watched.mu.Unlock()
			b.slicesOf.Has(id, s)
			b.slicesOf.Lost(id, s)
		}
	}
	return nil
}

// Kept returns those of from that the broker says nothing about, or nothing that counts, although nobody has
// seen them withdraw the Service or leave: what is here of them must be left as it is.
func (b *Broker) Kept(ctx context.Context, name clusterset.ServiceName, from []clusterset.ClusterID) ([]clusterset.ClusterID, error) {
	var kept []clusterset.ClusterID
	for _, id := range from {
		var r v1alpha1.ExportRecord
		err := b.cached.Get(ctx, types.NamespacedName{Namespace: b.cfg.Namespace, Name: mcs.RecordName(id, name)}, &r)
		switch {
		case client.IgnoreNotFound(err) != nil:
			return nil, fmt.Errorf("read export record of %s: %w", name, err)
		case b.roster.left(id), err == nil && mcs.Withdrawn(&r):
		case err == nil:
			if _, member := b.Roster().Member(id); !member {
				kept = append(kept, id) // its registration is lost, and it has not left
			}
		default:
			// The watcher may not have come to tell of it yet.
			b.exportsOf.Lost(id, name)
			if b.exportsOf.Keeps(id, name) {
				kept = append(kept, id)
			}
		}
	}
	return kept, nil
}

// KeepsSlice reports whether an imported slice of a member that still exports the Service must be left as it
// is, although the broker does not have what it was made of.
func (b *Broker) KeepsSlice(id clusterset.ClusterID, s ImportedSlice) bool {
	return b.slicesOf.Keeps(id, s)
}

// Holds returns what is held back of the withdrawals of each member, Services first.
func (b *Broker) Holds() []guard.Hold { return append(b.exportsOf.Holds(), b.slicesOf.Holds()...) }

// Release believes everything that is held of a member.
func (b *Broker) Release(id clusterset.ClusterID) {
	b.exportsOf.Release(id)
	b.slicesOf.Release(id)
}

// Endpoints returns where up to n of a member's ready endpoints accept TCP, of different Services if it has
// as many.
func (b *Broker) Endpoints(ctx context.Context, id clusterset.ClusterID, n int) ([]netip.AddrPort, error) {
	var list discoveryv1.EndpointSliceList
	if err := b.cached.List(ctx, &list, client.InNamespace(b.cfg.Namespace), client.MatchingFields{byCluster: string(id)}, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list broker slices of member %s: %w", id, err)
	}
	roster := b.Roster()
	var found []netip.AddrPort
	for i := range list.Items {
		if len(found) == n {
			break
		}
		es := &list.Items[i]
		p := slices.IndexFunc(es.Ports, func(p discoveryv1.EndpointPort) bool {
			return p.Port != nil && (p.Protocol == nil || *p.Protocol == corev1.ProtocolTCP)
		})
		e := slices.IndexFunc(es.Endpoints, func(e discoveryv1.Endpoint) bool {
			return e.Conditions.Ready == nil || *e.Conditions.Ready
		})
		if p < 0 || e < 0 {
			continue
		}
		a, err := netip.ParseAddr(es.Endpoints[e].Addresses[0])
		if err == nil && roster.CheckEndpoint(id, a) == nil {
			found = append(found, netip.AddrPortFrom(a, uint16(*es.Ports[p].Port)))
		}
	}
	return found, nil
}
