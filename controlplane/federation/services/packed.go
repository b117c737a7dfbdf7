package services

import (
	"fmt"
	"maps"
	"strconv"
	"unique"

	discoveryv1 "k8s.io/api/discovery/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/federation/services/internal/offers"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
)

// packed is an object of type T in its protobuf encoding, compressed. It takes a twentieth of the memory of the Go object.
type packed[T any, P encoded[T]] string

// encoded is a pointer to an object with a protobuf encoding.
type encoded[T any] interface {
	*T
	client.Object
	Marshal() ([]byte, error)
	Unmarshal(data []byte) error
}

// pack is the Pack of a Watch.
func pack[T any, P encoded[T]](o client.Object) objectcache.Packed {
	data, err := o.(P).Marshal() //nolint:forcetypeassert // the Watch is of this type
	if err != nil {
		return nil
	}
	return packed[T, P](deflate(data))
}

// Unpack is part of objectcache.Packed.
func (p packed[T, P]) Unpack() client.Object {
	o := P(new(T))
	if err := inflate(string(p), o.Unmarshal); err != nil {
		panic(fmt.Sprintf("decode %T: %v", o, err)) // pack encoded it
	}
	return o
}

// packSlice is the Pack of the Watch of EndpointSlices.
func packSlice(o client.Object) objectcache.Packed {
	if es, ok := o.(*discoveryv1.EndpointSlice); ok {
		if p := packOwn(es); p != nil {
			return p
		}
	}
	return pack[discoveryv1.EndpointSlice](o)
}

// ownSlice is a slice of ours as trimSlice leaves it. A federation of 20 members with 500 Services each has 200,000.
type ownSlice struct {
	objectcache.Identity

	leads  unique.Handle[way]
	digest uint64
}

// way holds the labels and annotations of a slice of ours, which are the same in all members. imported states that a
// ServiceImport has the slice as well.
type way struct {
	namespace, service, cluster, source, host string
	imported                                  bool
}

// labels returns the labels that Federated.Slices and wantSlices set.
func (w way) labels() map[string]string {
	m := map[string]string{discoveryv1.LabelServiceName: w.service, discoveryv1.LabelManagedBy: v1alpha1.ManagedBy, v1alpha1.MarkCluster: w.cluster}
	if w.imported {
		m[v1beta1.LabelServiceName], m[v1beta1.LabelSourceCluster] = w.service, w.cluster
	}
	return m
}

func (w way) annotations() map[string]string {
	m := map[string]string{offers.AnnotationSource: w.source}
	if w.host != "" {
		m[offers.AnnotationHost] = w.host
	}
	return m
}

// packOwn returns a slice of ours packed, nil if it differs from the form that we write and API servers store.
func packOwn(es *discoveryv1.EndpointSlice) *ownSlice {
	_, imported := es.Labels[v1beta1.LabelServiceName]
	w := way{
		namespace: es.Namespace, service: es.Labels[discoveryv1.LabelServiceName], cluster: es.Labels[v1alpha1.MarkCluster],
		source: es.Annotations[offers.AnnotationSource], host: es.Annotations[offers.AnnotationHost], imported: imported,
	}
	if !maps.Equal(es.Labels, w.labels()) || !maps.Equal(es.Annotations, w.annotations()) {
		return nil
	}
	digest, err := strconv.ParseUint(es.GenerateName, 16, 64)
	if err != nil {
		return nil
	}
	identity, ok := objectcache.Identify(es)
	if !ok {
		return nil
	}
	return &ownSlice{identity, unique.Make(w), digest}
}

// Local is part of objectcache.Packed. All slices of ours are local.
func (*ownSlice) Local() bool { return true }

// Unpack is part of objectcache.Packed.
func (p *ownSlice) Unpack() client.Object {
	w := p.leads.Value()
	meta := p.Meta(w.namespace)
	meta.GenerateName, meta.Labels, meta.Annotations = strconv.FormatUint(p.digest, 16), w.labels(), w.annotations()
	return &discoveryv1.EndpointSlice{ObjectMeta: meta}
}
