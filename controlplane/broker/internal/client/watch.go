package client

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/statement"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
	"github.com/isthmus-net/isthmus/controlplane/internal/withdrawal"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// ImportedSlice names the slice that a member imports for a slice of the broker.
type ImportedSlice struct {
	Service clusterset.ServiceName
	Name    string
}

// Changes returns a source that enqueues a Service when its objects on the broker change, or when the withdrawal guards
// decide about them. A controller with this source starts only when all caches are complete.
func (b *Broker) Changes() source.Source {
	return b.changes.Source(b.known, b.records.WaitForSync, b.slices.WaitForSync, b.aggregates.WaitForSync, b.waitForRegistry, b.waitForQuotas)
}

// known returns every Service that has an object on the broker.
func (b *Broker) known() []clusterset.ServiceName {
	names := map[clusterset.ServiceName]bool{}
	for _, r := range b.records.All() {
		names[r.service] = true
	}
	for _, p := range b.slices.All() {
		names[p.Service] = true
	}
	for _, a := range b.aggregates.All() {
		names[a.Service] = true
	}
	delete(names, clusterset.ServiceName{})
	return slices.Collect(maps.Keys(names))
}

func (b *Broker) waitForRegistry(ctx context.Context) error {
	for _, registration := range b.synced {
		if !toolscache.WaitForCacheSync(ctx.Done(), registration.HasSynced) {
			return fmt.Errorf("wait for the broker's registrations: %w", ctx.Err())
		}
	}
	return nil
}

// ReconcileMember enqueues every Service that member id exports.
func (b *Broker) ReconcileMember(id clusterset.ClusterID) {
	b.changes.Send(b.services(func(r *record) bool { return r.owner == id })...)
}

// watch watches the small kinds.
func (b *Broker) watch(ctx context.Context) error {
	for _, w := range []struct {
		obj     client.Object
		handler toolscache.ResourceEventHandler
	}{
		{&v1alpha1.Member{}, each(b.member, b.memberDeleted)},
		{&v1alpha1.ClusterSetConfig{}, each(b.config, func(*v1alpha1.ClusterSetConfig) {})},
		{&coordinationv1.Lease{}, each(b.lease, b.leaseDeleted)},
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

// each calls have with an added or changed object, and gone with the last known state of a deleted one.
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

func (b *Broker) lease(l *coordinationv1.Lease, first bool) {
	id := mcs.OwnerOf(l)
	if l.Name != v1alpha1.MemberLease(string(id)) || l.Spec.RenewTime == nil {
		return
	}
	b.cfg.LeaseRenewed(id, l.Spec.RenewTime.Time)
	if b.registry.extend(id, l.Annotations[v1alpha1.AnnotationPodCIDRs], time.Now()) {
		b.cfg.Log.Info("a member extends its pod CIDRs inside of its supernets", "cluster", string(id))
		if !first {
			b.ReconcileMember(id)
		}
	}
	if b.statements.Confirms(id, l.Annotations[v1alpha1.AnnotationExports], l.Spec.RenewTime.Time) {
		b.exportsOf.Confirm(id)
		b.slicesOf.Confirm(id)
	}
}

func (b *Broker) leaseDeleted(l *coordinationv1.Lease) {
	if id := mcs.OwnerOf(l); l.Name == v1alpha1.MemberLease(string(id)) {
		b.cfg.LeaseDeleted(id)
	}
}

// recordChanges reports a change of a record to the guard, before the cache shows it to readers.
func (b *Broker) recordChanges(was, is *record, listed bool) {
	b.countRecord(was, is)
	b.countTombstone(was, is)
	if was != nil && !was.isWithdrawn() {
		b.statements.Change(was.owner, func(s *statement.Statement) { s.RemoveExport(was.service) })
	}
	if is != nil && !is.isWithdrawn() {
		b.statements.Change(is.owner, func(s *statement.Statement) { s.AddExport(is.service) })
	}
	r := objectcache.Either(was, is)
	switch {
	case is == nil && !was.isWithdrawn():
		vanished(b.exportsOf, listed)(r.owner, r.service)
		return
	case is != nil && !is.isWithdrawn():
		b.exportsOf.Offered(r.owner, r.service)
		return
	}
	b.exportsOf.Withdrawn(r.owner, r.service)
	for _, s := range b.sliceEvents.takeVanished(r.owner, r.service) {
		b.slicesOf.Withdrawn(r.owner, s)
	}
}

// countTombstone counts the tombstones of this member.
func (b *Broker) countTombstone(was, is *record) {
	own := func(r *record) bool { return r.isWithdrawn() && r.owner == b.cfg.Self }
	if own(was) {
		b.tombstones.Add(-1)
	}
	if own(is) {
		b.tombstones.Add(1)
	}
}

// sliceChanges reports a change of a slice to the guard, before the cache shows it to readers.
func (b *Broker) sliceChanges(was, is *mcs.Packed, listed bool) {
	b.countSlice(was, is)
	if was != nil {
		b.statements.Change(was.Owner, func(s *statement.Statement) { s.RemoveSlice(was.Service, was.Name) })
	}
	if is != nil {
		b.statements.Change(is.Owner, func(s *statement.Statement) { s.AddSlice(is.Service, is.Name) })
	}
	p := objectcache.Either(was, is)
	s := importedOf(p)
	switch {
	case is != nil:
		b.sliceEvents.added(p.Owner, s, listed)
		if !is.Empty() {
			b.slicesOf.Offered(p.Owner, s)
			return
		}
		b.slicesOf.Withdrawn(p.Owner, s)
	// A member empties a slice before it deletes it, unless it has withdrawn the whole Service.
	case was.Empty(), b.record(p.Owner, p.Service).isWithdrawn():
		b.sliceEvents.removed(p.Owner, s, false)
		b.slicesOf.Withdrawn(p.Owner, s)
	default:
		b.sliceEvents.removed(p.Owner, s, true)
		vanished(b.slicesOf, listed)(p.Owner, s)
	}
}

// vanished returns the method that reports a deletion without a tombstone: one seen by the watch, or one found by a list.
func vanished[K comparable](g *withdrawal.Guard[K], listed bool) func(clusterset.ClusterID, K) {
	if listed {
		return g.VanishedUnseen
	}
	return g.Vanished
}

func importedOf(p *mcs.Packed) ImportedSlice {
	return ImportedSlice{p.Service, mcs.ImportedSliceName(p.Owner, p.Service.Name, p.Name)}
}

// Baseline records the imports from before the process started: the exporters of each Service, and the source of each
// slice. Those that the broker no longer has vanished unseen.
func (b *Broker) Baseline(offers map[clusterset.ServiceName][]clusterset.ClusterID, imported map[ImportedSlice]clusterset.ClusterID) {
	for name, from := range offers {
		for _, id := range from {
			if b.record(id, name) == nil {
				b.exportsOf.Offered(id, name)
				b.exportsOf.VanishedUnseen(id, name)
			}
		}
	}
	missing := maps.Clone(imported)
	for _, p := range b.slices.All() {
		delete(missing, importedOf(p))
	}
	for s, id := range missing {
		if !b.record(id, s.Service).isWithdrawn() {
			b.sliceEvents.removed(id, s, true)
			b.slicesOf.Offered(id, s)
			b.slicesOf.VanishedUnseen(id, s)
		}
	}
}

// Kept returns those of from whose imports must stay as they are: their record vanished and the guard keeps it, or their
// registration vanished without leftAt.
func (b *Broker) Kept(name clusterset.ServiceName, from []clusterset.ClusterID) []clusterset.ClusterID {
	var kept []clusterset.ClusterID
	for _, id := range from {
		r := b.record(id, name)
		switch {
		case b.registry.left(id), r.isWithdrawn():
		case r != nil:
			if _, member := b.Registry().Member(id); !member {
				kept = append(kept, id) // its registration vanished, and it has not left
			}
		case b.exportsOf.Keeps(id, name):
			kept = append(kept, id)
		}
	}
	return kept
}

// KeepsSlice reports whether an imported slice of a present exporter must stay as it is, although its source vanished from
// the broker.
func (b *Broker) KeepsSlice(id clusterset.ClusterID, s ImportedSlice) bool {
	return b.slicesOf.Keeps(id, s)
}

// Holds returns the holds of each member, those of Services first.
func (b *Broker) Holds() []withdrawal.Hold { return append(b.exportsOf.Holds(), b.slicesOf.Holds()...) }

// Release releases all holds of a member.
func (b *Broker) Release(id clusterset.ClusterID) {
	b.exportsOf.Release(id)
	b.slicesOf.Release(id)
}

// Endpoints returns up to n TCP addresses of a member's ready endpoints, of different slices if it has that many.
func (b *Broker) Endpoints(id clusterset.ClusterID, n int) []netip.AddrPort {
	registry := b.Registry()
	var found []netip.AddrPort
	for _, p := range b.slices.All() {
		if len(found) == n {
			break
		}
		if p.Owner != id {
			continue
		}
		if a, ok := p.TCP(); ok && registry.CheckEndpointFor(b.cfg.Self, id, a.Addr(), true) == nil {
			found = append(found, a)
		}
	}
	return found
}
