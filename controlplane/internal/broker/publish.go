package broker

import (
	"context"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/ssa"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// Publish makes the broker say what this member says: e, and endpoints as mcs.BrokerSlice made them.
// Nothing is written where the broker says so already, and wrote says whether anything was; what is written
// carries since, when the change began.
func (b *Broker) Publish(ctx context.Context, e clusterset.Export, endpoints []*discoveryv1.EndpointSlice, since time.Time) (wrote bool, err error) {
	wrote, err = b.publishSlices(ctx, e.Service, endpoints, since)
	if err != nil {
		return wrote, err
	}
	want := mcs.ExportRecord(e)
	want.Namespace = b.cfg.Namespace
	var have v1alpha1.ExportRecord
	err = b.cached.Get(ctx, client.ObjectKeyFromObject(want), &have)
	switch {
	case apierrors.IsNotFound(err):
	case err != nil:
		return wrote, wrap("read export record", want.Name, err)
	case mcs.Withdrawn(&have):
		// What comes back is a new export, not as old as the one before.
		if err := b.cached.Delete(ctx, &have, client.Preconditions{UID: &have.UID}); client.IgnoreNotFound(err) != nil {
			return wrote, wrap("delete tombstone", want.Name, err)
		}
	case equality.Semantic.DeepEqual(have.Spec, want.Spec) && equality.Semantic.DeepEqual(have.Labels, want.Labels):
		return wrote, nil
	}
	mcs.SetChangedAt(want, since)
	return true, wrap("write export record", want.Name, ssa.Own(ctx, b.cached, want))
}

// publishSlices makes endpoints this member's slices for a Service. New ones come before old ones go, so
// a pod that moves between slices is never missing, and what goes is emptied first, by which everybody knows
// that it is meant.
func (b *Broker) publishSlices(ctx context.Context, name clusterset.ServiceName, endpoints []*discoveryv1.EndpointSlice, since time.Time) (wrote bool, err error) {
	have, err := b.ownSlices(ctx, name)
	if err != nil {
		return wrote, err
	}
	for _, want := range endpoints {
		old, ok := have[want.Name]
		delete(have, want.Name)
		if ok && mcs.SameSlice(old, want) {
			continue
		}
		wrote = true
		if err := b.writeSlice(ctx, want.DeepCopy(), since); err != nil {
			return wrote, err
		}
	}
	for _, old := range have {
		wrote = true
		if len(old.Endpoints) > 0 {
			empty := &discoveryv1.EndpointSlice{
				ObjectMeta:  metav1.ObjectMeta{Name: old.Name, Labels: old.Labels},
				AddressType: old.AddressType, Endpoints: []discoveryv1.Endpoint{}, Ports: old.Ports,
			}
			if err := b.writeSlice(ctx, empty, since); err != nil {
				return wrote, err
			}
		}
		if err := b.cached.Delete(ctx, old); client.IgnoreNotFound(err) != nil {
			return wrote, wrap("delete broker slice", old.Name, err)
		}
	}
	return wrote, nil
}

func (b *Broker) writeSlice(ctx context.Context, es *discoveryv1.EndpointSlice, since time.Time) error {
	es.Namespace = b.cfg.Namespace
	mcs.SetChangedAt(es, since)
	return wrap("write broker slice", es.Name, ssa.Own(ctx, b.cached, es))
}

// ownSlices returns this member's slices for a Service, by name.
func (b *Broker) ownSlices(ctx context.Context, name clusterset.ServiceName) (map[string]*discoveryv1.EndpointSlice, error) {
	all, err := b.slices(ctx, name)
	if err != nil {
		return nil, err
	}
	own := map[string]*discoveryv1.EndpointSlice{}
	for i := range all {
		if mcs.OwnerOf(&all[i]) == b.cfg.Self {
			own[all[i].Name] = &all[i]
		}
	}
	return own, nil
}

// Withdraw takes back everything this member says about a Service: first its record becomes a tombstone, by
// which the others know; then its slices go, then its place on the aggregate, and the aggregate itself when
// nobody else is listed there. The tombstone goes after life; until then Withdraw returns how long that is
// off, and has to be called again. Withdrawing what is not there succeeds and writes nothing.
func (b *Broker) Withdraw(ctx context.Context, name clusterset.ServiceName, life time.Duration) (again time.Duration, err error) {
	record := &v1alpha1.ExportRecord{}
	err = b.cached.Get(ctx, types.NamespacedName{Namespace: b.cfg.Namespace, Name: mcs.RecordName(b.cfg.Self, name)}, record)
	if client.IgnoreNotFound(err) != nil {
		return 0, wrap("read export record", record.Name, err)
	}
	exists := err == nil
	if exists && !mcs.Withdrawn(record) {
		record.Spec.WithdrawnAt = new(metav1.Now())
		want := &v1alpha1.ExportRecord{
			ObjectMeta: metav1.ObjectMeta{Namespace: record.Namespace, Name: record.Name, Labels: record.Labels, Annotations: record.Annotations},
			Spec:       record.Spec,
		}
		if err := ssa.Own(ctx, b.cached, want); err != nil {
			return 0, wrap("withdraw export record", record.Name, err)
		}
	}
	own, err := b.ownSlices(ctx, name)
	if err != nil {
		return 0, err
	}
	for _, es := range own {
		if err := b.cached.Delete(ctx, es); client.IgnoreNotFound(err) != nil {
			return 0, wrap("delete broker slice", es.Name, err)
		}
	}
	if err := b.leave(ctx, name); err != nil || !exists {
		return 0, err
	}
	if again = time.Until(record.Spec.WithdrawnAt.Add(life)); again > 0 {
		return again, nil
	}
	err = b.cached.Delete(ctx, record, client.Preconditions{UID: &record.UID, ResourceVersion: &record.ResourceVersion})
	return 0, wrap("delete tombstone", record.Name, client.IgnoreNotFound(err))
}

// Forgot reports whether the broker has no record of this member about a Service, not even a tombstone.
func (b *Broker) Forgot(ctx context.Context, name clusterset.ServiceName) (bool, error) {
	var r v1alpha1.ExportRecord
	err := b.cached.Get(ctx, types.NamespacedName{Namespace: b.cfg.Namespace, Name: mcs.RecordName(b.cfg.Self, name)}, &r)
	return apierrors.IsNotFound(err), client.IgnoreNotFound(err)
}
