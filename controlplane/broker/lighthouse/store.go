package lighthouse

import (
	"context"
	"errors"

	"golang.org/x/sync/errgroup"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/source"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
)

// store has the objects of Submariner's broker. It keeps them while the API server is silent. Safe for concurrent use.
type store struct {
	client     client.WithWatch
	aggregates *objectcache.Informer[*v1beta1.ServiceImport, clusterset.ServiceName]
	slices     *objectcache.Informer[*discoveryv1.EndpointSlice, clusterset.ServiceName]
	changes    objectcache.Trigger
}

// newStore prepares a store of a namespace, which run fills.
func newStore(c client.WithWatch, scheme *runtime.Scheme, namespace string) (*store, error) {
	s := &store{client: c}
	var errs [2]error
	s.aggregates, errs[0] = objectcache.New(scheme, objectcache.Config[*v1beta1.ServiceImport, clusterset.ServiceName]{
		Source:  objectcache.Source{Object: &v1beta1.ServiceImport{}, Namespace: namespace},
		Compact: func(obj client.Object) *v1beta1.ServiceImport { return obj.(*v1beta1.ServiceImport) }, //nolint:forcetypeassert // Object says so
		Index:   serviceOfAggregate,
		After: func(was, is *v1beta1.ServiceImport, _ bool) {
			if name, ok := serviceOfAggregate(objectcache.Either(was, is)); ok {
				s.changes.Send(name)
			}
		},
	})
	s.slices, errs[1] = objectcache.New(scheme, objectcache.Config[*discoveryv1.EndpointSlice, clusterset.ServiceName]{
		Source: objectcache.Source{
			Object: &discoveryv1.EndpointSlice{}, Namespace: namespace,
			Selector: labels.SelectorFromSet(labels.Set{discoveryv1.LabelManagedBy: managedBy}),
		},
		Compact: func(obj client.Object) *discoveryv1.EndpointSlice { return obj.(*discoveryv1.EndpointSlice) }, //nolint:forcetypeassert // Object says so
		Index:   serviceOfSlice,
		After: func(was, is *discoveryv1.EndpointSlice, _ bool) {
			if name, ok := serviceOfSlice(objectcache.Either(was, is)); ok {
				s.changes.Send(name)
			}
		},
	})
	return s, errors.Join(errs[:]...)
}

// run fills the store and keeps it current until ctx ends.
func (s *store) run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return s.aggregates.Run(ctx, s.client) })
	group.Go(func() error { return s.slices.Run(ctx, s.client) })
	return group.Wait()
}

// source returns a source that enqueues a Service when its objects change. A controller with this source starts only when the
// store is complete.
func (s *store) source() source.Source {
	return s.changes.Source(s.known, s.aggregates.WaitForSync, s.slices.WaitForSync)
}

// enqueueAll enqueues all Services.
func (s *store) enqueueAll() {
	for _, name := range s.known() {
		s.changes.Send(name)
	}
}

// known returns all Services.
func (s *store) known() []clusterset.ServiceName {
	names := map[clusterset.ServiceName]struct{}{}
	for _, si := range s.aggregates.All() {
		if name, ok := serviceOfAggregate(si); ok {
			names[name] = struct{}{}
		}
	}
	for _, es := range s.slices.All() {
		if name, ok := serviceOfSlice(es); ok {
			names[name] = struct{}{}
		}
	}
	all := make([]clusterset.ServiceName, 0, len(names))
	for name := range names {
		all = append(all, name)
	}
	return all
}

// aggregate returns the aggregate of a Service; nil without one. The caller must not change it.
func (s *store) aggregate(name clusterset.ServiceName) *v1beta1.ServiceImport {
	for _, si := range s.aggregates.Indexed(name) {
		return si
	}
	return nil
}
