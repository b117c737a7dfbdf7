package client

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/quota"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/apply"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/slicesync"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// Publish writes this member's export e, and its endpoints as made by mcs.BrokerSlice, to the broker. It writes only what
// differs, and reports whether it wrote anything. Written objects carry since, the beginning of the change. A slice that the
// broker refuses stops neither the other slices nor the record.
func (b *Broker) Publish(ctx context.Context, e clusterset.Export, endpoints []*discoveryv1.EndpointSlice, since time.Time) (wrote bool, err error) {
	wrote, err = b.publishSlices(ctx, e.Service, endpoints, since)
	if err != nil && !apierrors.IsInvalid(err) && !apierrors.IsForbidden(err) {
		return wrote, err
	}
	recorded, recordErr := b.publishRecord(ctx, e, since)
	return wrote || recorded, errors.Join(quota.WithRefusal(recordErr, true), quota.WithRefusal(err, false))
}

// publishRecord writes this member's record of e if it differs, and reports whether it did.
func (b *Broker) publishRecord(ctx context.Context, e clusterset.Export, since time.Time) (wrote bool, err error) {
	want := mcs.ExportRecord(e)
	want.Namespace = b.cfg.Namespace
	switch have := b.record(b.cfg.Self, e.Service); {
	case have == nil:
	case have.isWithdrawn():
		// A withdrawn export that returns is a new one, with a new creation time.
		err := b.client.Delete(ctx, want.DeepCopy(), client.Preconditions{UID: &have.uid})
		if client.IgnoreNotFound(err) != nil {
			return wrote, wrap("delete tombstone", want.Name, err)
		}
	case have.digest == mcs.RecordDigest(want):
		return wrote, nil
	}
	mcs.SetChangedAt(want, since)
	return true, wrap("write export record", want.Name, apply.Own(ctx, b.client, want))
}

// publishSlices makes endpoints this member's slices for a Service, and reports whether it wrote any. It writes new slices
// before it deletes old ones, so that a pod that moves between slices is never missing. It empties a slice before it deletes
// it, which tells the other members that the deletion is intended.
func (b *Broker) publishSlices(ctx context.Context, name clusterset.ServiceName, endpoints []*discoveryv1.EndpointSlice, since time.Time) (wrote bool, err error) {
	own := b.ownSlices(name)
	if time.Now().UnixNano() < b.bareUntil.Load() {
		for _, es := range endpoints {
			mcs.DropRegions(es)
		}
	}
	return slicesync.Sync[*mcs.Packed]{
		Existing: slices.Collect(maps.Values(own)), Wanted: slices.Values(endpoints),
		Name:     func(p *mcs.Packed) string { return p.Name },
		UpToDate: func(p *mcs.Packed, es *discoveryv1.EndpointSlice) bool { return p.Digest == mcs.SliceDigest(es) },
		Create: func(ctx context.Context, es *discoveryv1.EndpointSlice) error {
			return b.writeSlice(ctx, es.DeepCopy(), true, since)
		},
		Update: func(ctx context.Context, es *discoveryv1.EndpointSlice) error {
			return b.writeSlice(ctx, es.DeepCopy(), false, since)
		},
		Delete: func(ctx context.Context, p *mcs.Packed) error {
			if es := p.Unpack(); !p.Empty() {
				es.Endpoints = []discoveryv1.Endpoint{}
				if err := b.writeSlice(ctx, es, false, since); err != nil {
					return err
				}
			}
			return b.deleteSlice(ctx, p)
		},
	}.Run(ctx)
}

// bareTime is for how long slices are written without regions after the broker refused these. Then an upgraded broker may accept
// them.
const bareTime = time.Hour

// writeSlice writes a slice with the time of its change. The policies of a broker of an earlier version refuse slices with
// regions; writeSlice then writes it without. Otherwise a controller that is upgraded before its broker could add no endpoint.
func (b *Broker) writeSlice(ctx context.Context, es *discoveryv1.EndpointSlice, create bool, since time.Time) error {
	es.Namespace = b.cfg.Namespace
	mcs.SetChangedAt(es, since)
	err := b.putSlice(ctx, es, create)
	if !refusesAnnotations(err) || !mcs.DropRegions(es) || b.putSlice(ctx, es, create) != nil {
		return err
	}
	b.bareUntil.Store(time.Now().Add(bareTime).UnixNano())
	b.cfg.Log.Warn("the broker's policies refuse the regions of endpoints, which are exported without; run isthmusctl deploy-broker of this version", "err", err)
	return nil
}

// refusesAnnotations reports whether a policy of the broker, of any version, refuses an annotation.
func refusesAnnotations(err error) bool {
	return apierrors.IsForbidden(err) && strings.Contains(err.Error(), "metadata.annotations may have only these keys")
}

func (b *Broker) putSlice(ctx context.Context, es *discoveryv1.EndpointSlice, create bool) error {
	if create {
		return wrap("create broker slice", es.Name, apply.Create(ctx, b.client, es, nil))
	}
	return wrap("write broker slice", es.Name, apply.Own(ctx, b.client, es))
}

func (b *Broker) deleteSlice(ctx context.Context, p *mcs.Packed) error {
	es := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: b.cfg.Namespace, Name: p.Name}}
	return wrap("delete broker slice", p.Name, client.IgnoreNotFound(b.client.Delete(ctx, es)))
}

// ownSlices returns this member's slices for a Service, by name.
func (b *Broker) ownSlices(name clusterset.ServiceName) map[string]*mcs.Packed {
	own := map[string]*mcs.Packed{}
	for _, p := range b.packed(name) {
		if p.Owner == b.cfg.Self {
			own[p.Name] = p
		}
	}
	return own
}

// Withdraw removes this member's export of a Service. It first turns the record into a tombstone, which tells the other
// members that the removal is intended; then it deletes the slices, leaves the aggregate, and deletes that if no other
// member is listed. It deletes the tombstone after life; until then it returns the remaining time, after which the caller
// must call it again. Without an export it succeeds and writes nothing.
func (b *Broker) Withdraw(ctx context.Context, name clusterset.ServiceName, life time.Duration) (again time.Duration, err error) {
	have := b.record(b.cfg.Self, name)
	withdrawn := time.Now()
	switch {
	case have.isWithdrawn():
		withdrawn = have.withdrawn
	case have != nil:
		if err := b.writeTombstone(ctx, name, withdrawn); err != nil {
			return 0, err
		}
	}
	for _, p := range b.ownSlices(name) {
		if err := b.deleteSlice(ctx, p); err != nil {
			return 0, err
		}
	}
	if err := b.leave(ctx, name); err != nil || have == nil {
		return 0, err
	}
	if again = time.Until(withdrawn.Add(life)); again > 0 {
		return again, b.dropTombstones(ctx)
	}
	return 0, b.deleteTombstone(ctx, have)
}

// dropTombstones deletes the oldest tombstones of this member when they are more than half of its quota. The broker counts
// them, so that Services which come and go all the time would otherwise use up what the others of the cluster need.
func (b *Broker) dropTombstones(ctx context.Context) error {
	limit := quota.MaxTombstones(b.quotas.current())
	if int(b.tombstones.Load()) <= limit/2 {
		return nil
	}
	own := slices.DeleteFunc(b.records.All(), func(r *record) bool { return r.owner != b.cfg.Self || !r.isWithdrawn() })
	slices.SortFunc(own, func(a, b *record) int { return a.withdrawn.Compare(b.withdrawn) })
	for _, r := range own[:max(0, len(own)-limit*2/5)] {
		if err := b.deleteTombstone(ctx, r); err != nil {
			return err
		}
	}
	return nil
}

// deleteTombstone deletes a tombstone of this member.
func (b *Broker) deleteTombstone(ctx context.Context, r *record) error {
	tombstone := &v1alpha1.ExportRecord{ObjectMeta: metav1.ObjectMeta{Namespace: b.cfg.Namespace, Name: mcs.RecordName(b.cfg.Self, r.service)}}
	err := b.client.Delete(ctx, tombstone, client.Preconditions{UID: &r.uid})
	return wrap("delete tombstone", tombstone.Name, client.IgnoreNotFound(err))
}

// writeTombstone turns this member's record into a tombstone.
func (b *Broker) writeTombstone(ctx context.Context, name clusterset.ServiceName, t time.Time) error {
	have := &v1alpha1.ExportRecord{}
	key := types.NamespacedName{Namespace: b.cfg.Namespace, Name: mcs.RecordName(b.cfg.Self, name)}
	if err := b.client.Get(ctx, key, have); err != nil {
		return wrap("read export record", key.Name, client.IgnoreNotFound(err))
	}
	if have.Spec.WithdrawnAt != nil {
		return nil // done; the cache lags
	}
	want := &v1alpha1.ExportRecord{
		ObjectMeta: metav1.ObjectMeta{Namespace: have.Namespace, Name: have.Name, Labels: have.Labels, Annotations: have.Annotations},
		Spec:       have.Spec,
	}
	want.Spec.WithdrawnAt = new(metav1.NewTime(t))
	return wrap("withdraw export record", have.Name, apply.Own(ctx, b.client, want))
}

// HasNoRecord reports whether the broker has no record of this member about a Service, not even a tombstone.
func (b *Broker) HasNoRecord(name clusterset.ServiceName) bool {
	return b.record(b.cfg.Self, name) == nil
}
