package client

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
	"github.com/isthmus-net/isthmus/controlplane/internal/withdrawal"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// ImportedSlice names the slice that a member makes of one of the broker.
type ImportedSlice struct {
	Service clusterset.ServiceName
	Name    string
}

// Changes is a source that asks to reconcile a Service, as namespace and name, whenever something about it
// changes on the broker, or in what is believed of it. A controller that has it works only when everything is
// known and has been taken note of.
func (b *Broker) Changes() source.Source {
	return b.changes.Source(b.known, b.records.WaitForSync, b.slices.WaitForSync, b.aggregates.WaitForSync, b.waitForRoster)
}

// known returns every Service that the broker says anything about.
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

func (b *Broker) waitForRoster(ctx context.Context) error {
	for _, registration := range b.synced {
		if !toolscache.WaitForCacheSync(ctx.Done(), registration.HasSynced) {
			return fmt.Errorf("wait for the broker's registrations: %w", ctx.Err())
		}
	}
	return nil
}

// Reconsider asks to reconcile everything that member id has to do with.
func (b *Broker) Reconsider(id clusterset.ClusterID) {
	b.changes.Send(b.services(func(r *record) bool { return r.owner == id })...)
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

// watch follows the small kinds.
func (b *Broker) watch(ctx context.Context) error {
	for _, w := range []struct {
		obj     client.Object
		handler toolscache.ResourceEventHandler
	}{
		{&v1alpha1.Member{}, each(b.member, b.memberGone)},
		{&v1alpha1.ClusterSetConfig{}, each(b.config, func(*v1alpha1.ClusterSetConfig) {})},
		{&coordinationv1.Lease{}, each(b.lease, b.leaseGone)},
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

// recordChanges tells the guard of a record before anybody else can see what became of it.
func (b *Broker) recordChanges(was, is *record, listed bool) {
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
	for _, s := range b.watched.found(offer{r.owner, r.service}) {
		b.slicesOf.Withdrawn(r.owner, s)
	}
}

// sliceChanges tells the guard of a slice before anybody else can see what became of it.
func (b *Broker) sliceChanges(was, is *mcs.Packed, listed bool) {
	p := objectcache.Either(was, is)
	o, s := offer{p.Owner, p.Service}, importedOf(p)
	switch {
	case is != nil:
		b.watched.came(o, s, listed)
		if !is.Empty() {
			b.slicesOf.Offered(p.Owner, s)
			return
		}
		b.slicesOf.Withdrawn(p.Owner, s)
	// A member empties a slice before it deletes it, unless it has said that the whole Service is withdrawn.
	case was.Empty(), b.record(p.Owner, p.Service).isWithdrawn():
		b.watched.went(o, s, false)
		b.slicesOf.Withdrawn(p.Owner, s)
	default:
		b.watched.went(o, s, true)
		vanished(b.slicesOf, listed)(p.Owner, s)
	}
}

// vanished returns how to tell a guard of what vanished without a word: seen to, or found by listing anew.
func vanished[K comparable](g *withdrawal.Guard[K], listed bool) func(clusterset.ClusterID, K) {
	if listed {
		return g.VanishedUnseen
	}
	return g.Vanished
}

func importedOf(p *mcs.Packed) ImportedSlice {
	return ImportedSlice{p.Service, mcs.ImportedSliceName(p.Owner, p.Service.Name, p.Name)}
}

// came notes that a slice is there: seen to come, or found by listing.
func (w *watched) came(o offer, s ImportedSlice, listed bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !listed {
		if w.seen == nil {
			w.seen = map[ImportedSlice]time.Time{}
		}
		w.seen[s] = time.Now()
	}
	if len(w.lost[o]) > 0 {
		w.lost[o] = without(w.lost[o], s)
	}
}

// went notes that a slice is not there any more, and whether it is to be doubted.
func (w *watched) went(o offer, s ImportedSlice, lost bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.seen, s)
	if !lost {
		return
	}
	if w.lost == nil {
		w.lost = map[offer][]ImportedSlice{}
	}
	w.lost[o] = append(without(w.lost[o], s), s)
}

// found returns the slices of an offer that went before it was known to be withdrawn, and forgets them.
func (w *watched) found(o offer) []ImportedSlice {
	w.mu.Lock()
	defer w.mu.Unlock()
	lost := w.lost[o]
	delete(w.lost, o)
	return lost
}

func without(list []ImportedSlice, s ImportedSlice) []ImportedSlice {
	return slices.DeleteFunc(list, func(o ImportedSlice) bool { return o == s })
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
			b.watched.went(offer{id, s.Service}, s, true)
			b.slicesOf.Offered(id, s)
			b.slicesOf.VanishedUnseen(id, s)
		}
	}
}

// Kept returns those of from that the broker says nothing about, or nothing that counts, although nobody has
// seen them withdraw the Service or leave: what is here of them must be left as it is.
func (b *Broker) Kept(name clusterset.ServiceName, from []clusterset.ClusterID) []clusterset.ClusterID {
	var kept []clusterset.ClusterID
	for _, id := range from {
		r := b.record(id, name)
		switch {
		case b.roster.left(id), r.isWithdrawn():
		case r != nil:
			if _, member := b.Roster().Member(id); !member {
				kept = append(kept, id) // its registration is lost, and it has not left
			}
		case b.exportsOf.Keeps(id, name):
			kept = append(kept, id)
		}
	}
	return kept
}

// KeepsSlice reports whether an imported slice of a member that still exports the Service must be left as it
// is, although the broker does not have what it was made of.
func (b *Broker) KeepsSlice(id clusterset.ClusterID, s ImportedSlice) bool {
	return b.slicesOf.Keeps(id, s)
}

// Holds returns what is held back of the withdrawals of each member, Services first.
func (b *Broker) Holds() []withdrawal.Hold { return append(b.exportsOf.Holds(), b.slicesOf.Holds()...) }

// Release believes everything that is held of a member.
func (b *Broker) Release(id clusterset.ClusterID) {
	b.exportsOf.Release(id)
	b.slicesOf.Release(id)
}

// Endpoints returns where up to n of a member's ready endpoints accept TCP, of different slices if it has as
// many.
func (b *Broker) Endpoints(id clusterset.ClusterID, n int) []netip.AddrPort {
	roster := b.Roster()
	var found []netip.AddrPort
	for _, p := range b.slices.All() {
		if len(found) == n {
			break
		}
		if p.Owner != id {
			continue
		}
		if a, ok := p.TCP(); ok && roster.CheckEndpoint(id, a.Addr()) == nil {
			found = append(found, a)
		}
	}
	return found
}
