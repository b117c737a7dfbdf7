package quotacontroller

import (
	"encoding/json"
	"errors"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/quota"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

type amounts = quota.Stored

// object is what the controller remembers of an object of the broker. It is never changed.
type object struct {
	class   quota.Class
	owner   clusterset.ClusterID   // of an aggregate its author, "" if unknown
	service clusterset.ServiceName // by its labels
	name    string
	uid     types.UID
	created int64 // seconds since 1970, by the broker
	valid   bool  // readers judge it

	ports, endpoints int32
	bytes            int32 // of labels and annotations, or of the ports, regions and hints of a slice
	labels           int32 // bytes of the labels that each imported slice of a record has
	size             int64 // as stored
}

func newObject(class quota.Class, o client.Object) *object {
	name, _ := mcs.ServiceOf(o)
	return &object{
		class: class, owner: clusterset.ClusterID(mcs.Share(string(mcs.OwnerOf(o)))), name: o.GetName(), uid: o.GetUID(), created: o.GetCreationTimestamp().Unix(),
		service: clusterset.ServiceName{Namespace: mcs.Share(name.Namespace), Name: mcs.Share(name.Name)},
	}
}

func newRecord(r *v1alpha1.ExportRecord) *object {
	o := newObject(quota.RecordClass, r)
	if text, err := json.Marshal(r); err == nil { // as the API server stores it
		o.size = int64(len(text))
	}
	if r.Spec.WithdrawnAt != nil {
		o.class = quota.TombstoneClass
		return o
	}
	if e, _, err := mcs.ParseRecord(r); err == nil {
		size := quota.RecordOf(e, r.CreationTimestamp.Time)
		o.valid, o.ports, o.bytes, o.labels = true, int32(size.Ports), int32(size.Bytes), int32(size.Labels)
	}
	return o
}

func newSlice(es *discoveryv1.EndpointSlice) *object {
	o := newObject(quota.SliceClass, es)
	o.size = int64(es.Size())
	size := quota.SliceOf(mcs.Pack(es))
	o.valid, o.endpoints, o.bytes = true, int32(size.Endpoints), int32(size.Bytes)
	return o
}

// newAggregate returns an aggregate, whose service is empty if the name contradicts the labels: the controller ignores such an
// object, which no member can write.
func newAggregate(si *v1beta1.ServiceImport) *object {
	o := newObject(quota.AggregateClass, si)
	o.owner = clusterset.ClusterID(mcs.Share(si.Annotations[v1alpha1.AnnotationCreatedBy]))
	if o.name != mcs.AggregateName(o.service) {
		o.service = clusterset.ServiceName{}
	}
	return o
}

// uses returns what an object uses of its member's quota. Aggregates count only without a record beside them, see orphan.
func (o *object) uses() amounts {
	var uses amounts
	switch {
	case o == nil:
		return uses
	case o.class == quota.RecordClass:
		uses.Services, uses.Ports, uses.MetadataBytes = 1, int(o.ports), int(o.bytes)
	case o.class == quota.SliceClass:
		uses.Slices, uses.Endpoints, uses.MetadataBytes = 1, int(o.endpoints), int(o.bytes)
	case o.class == quota.TombstoneClass:
		uses.Tombstones = 1
	}
	uses.StorageBytes = int(o.size)
	return uses
}

// record and slice describe an object to quota.Judge.
func (o *object) record() quota.Record {
	return quota.Record{Service: o.service, Created: o.createdAt(), Ports: int(o.ports), Bytes: int(o.bytes), Labels: int(o.labels)}
}

func (o *object) slice() quota.Slice {
	return quota.Slice{Name: o.name, Service: o.service, Created: o.createdAt(), Endpoints: int(o.endpoints), Bytes: int(o.bytes)}
}

func (o *object) createdAt() time.Time { return time.Unix(o.created, 0).UTC() }

// createCaches prepares the caches.
func (c *Controller) createCaches(scheme *runtime.Scheme) error {
	var errs [4]error
	source := func(o client.Object) objectcache.Source {
		return objectcache.Source{Object: o, Namespace: c.cfg.Namespace, ManagedFields: true}
	}
	index := func(o *object) (clusterset.ServiceName, bool) { return o.service, o.service.Name != "" }
	c.configs, errs[0] = objectcache.New(scheme, objectcache.Config[*v1alpha1.ClusterSetConfig, string]{
		Source:  source(&v1alpha1.ClusterSetConfig{}),
		Compact: func(o client.Object) *v1alpha1.ClusterSetConfig { return o.(*v1alpha1.ClusterSetConfig) }, //nolint:forcetypeassert // Object says so
		After:   func(_, _ *v1alpha1.ClusterSetConfig, _ bool) { c.wake.Notify() },
	})
	c.records, errs[1] = objectcache.New(scheme, objectcache.Config[*object, clusterset.ServiceName]{
		Source:  source(&v1alpha1.ExportRecord{}),
		Compact: func(o client.Object) *object { return newRecord(o.(*v1alpha1.ExportRecord)) }, //nolint:forcetypeassert // Object says so
		Index:   index,
		After: func(was, is *object, _ bool) {
			c.count(was, is)
			c.countOrphan(objectcache.Either(was, is).service)
		},
	})
	c.slices, errs[2] = objectcache.New(scheme, objectcache.Config[*object, clusterset.ServiceName]{
		Source:  source(&discoveryv1.EndpointSlice{}),
		Compact: func(o client.Object) *object { return newSlice(o.(*discoveryv1.EndpointSlice)) }, //nolint:forcetypeassert // Object says so
		After:   func(was, is *object, _ bool) { c.count(was, is) },
	})
	c.aggregates, errs[3] = objectcache.New(scheme, objectcache.Config[*object, clusterset.ServiceName]{
		Source:  source(&v1beta1.ServiceImport{}),
		Compact: func(o client.Object) *object { return newAggregate(o.(*v1beta1.ServiceImport)) }, //nolint:forcetypeassert // Object says so
		Index:   index,
		After:   func(was, is *object, _ bool) { c.countOrphan(objectcache.Either(was, is).service) },
	})
	return errors.Join(errs[:]...)
}
