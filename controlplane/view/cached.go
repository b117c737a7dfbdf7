package view

import (
	"errors"
	"fmt"
	"strings"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	mcsv1beta1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// cached is the cached form of an object: its translation, made once per change, or the reason why there is none. A node in
// a large ClusterSet has many of them, so it keeps no other field.
type cached[T any] struct {
	namespace, name string
	version         string // of the resource
	value           T
	err             error
}

// GetObjectMeta returns the metadata that a cache needs.
func (c *cached[T]) GetObjectMeta() metav1.Object {
	return &metav1.ObjectMeta{Namespace: c.namespace, Name: c.name, ResourceVersion: c.version}
}

// errAggregate marks a ServiceImport that imports nothing. A cluster that is both broker and member also has the aggregates,
// named SERVICE.NAMESPACE. The name of a Service, and of its import, has no dot. Labels do not tell them apart: an exporter may
// give its imports any.
var errAggregate = errors.New("an aggregate of the broker")

// cachedImport and cachedSlice translate objects before an informer stores them. They are idempotent, because client-go may call a
// cache.TransformFunc twice for an object.
func cachedImport(obj any) (any, error) {
	o, ok := obj.(*mcsv1beta1.ServiceImport)
	if !ok {
		return passThrough[clusterset.Import](obj)
	}
	imp, err := importOf(o)
	if strings.Contains(o.Name, ".") {
		err = errAggregate
	}
	return &cached[clusterset.Import]{namespace: o.Namespace, name: o.Name, version: o.ResourceVersion, value: imp, err: err}, nil
}

func cachedSlice(obj any) (any, error) {
	o, ok := obj.(*discoveryv1.EndpointSlice)
	if !ok {
		return passThrough[member](obj)
	}
	slice, service, err := mcs.Slice(o)
	return &cached[member]{namespace: o.Namespace, name: o.Name, version: o.ResourceVersion, value: member{service, slice}, err: err}, nil
}

// importOf translates an import, without its labels: no node reads them, and maps are large.
func importOf(o *mcsv1beta1.ServiceImport) (clusterset.Import, error) {
	imp, err := mcs.Import(o)
	imp.Labels = nil
	return imp, err
}

// passThrough accepts the values that a transform receives besides new objects.
func passThrough[T any](obj any) (any, error) {
	switch obj.(type) {
	case *cached[T], cache.DeletedFinalStateUnknown:
		return obj, nil
	default:
		return nil, fmt.Errorf("cache an object of type %T", obj)
	}
}

// cachedIn returns the cached form in an event, also if the event of a deletion has only the last known state; nil for none.
func cachedIn[T any](obj any) *cached[T] {
	if last, ok := obj.(cache.DeletedFinalStateUnknown); ok {
		obj = last.Obj
	}
	c, _ := obj.(*cached[T])
	return c
}

// understood returns the translation; nil without one.
func (c *cached[T]) understood() *T {
	if c == nil || c.err != nil {
		return nil
	}
	return &c.value
}
