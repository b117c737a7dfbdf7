package services

import (
	"encoding/hex"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"unique"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
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
	name            unique.Handle[string]
	leads           unique.Handle[way]
	uid             [16]byte
	version, digest uint64
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
	p := &ownSlice{name: unique.Make(es.Name)}
	digits, err := hex.DecodeString(strings.ReplaceAll(string(es.UID), "-", ""))
	if err != nil || copy(p.uid[:], digits) != len(p.uid) || formatUID(p.uid) != es.UID {
		return nil
	}
	if p.version, err = strconv.ParseUint(es.ResourceVersion, 10, 64); err != nil {
		return nil
	}
	if p.digest, err = strconv.ParseUint(es.GenerateName, 16, 64); err != nil {
		return nil
	}
	p.leads = unique.Make(w)
	return p
}

// formatUID formats a uid as API servers do (RFC 9562, section 4).
func formatUID(u [16]byte) types.UID {
	h := hex.EncodeToString(u[:])
	return types.UID(h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:])
}

// Name is part of objectcache.Packed. All members have slices of the same names.
func (p *ownSlice) Name() string { return p.name.Value() }

// Local is part of objectcache.Packed. All slices of ours are local.
func (*ownSlice) Local() bool { return true }

// Unpack is part of objectcache.Packed.
func (p *ownSlice) Unpack() client.Object {
	w := p.leads.Value()
	return &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{
		Namespace: w.namespace, Name: p.name.Value(), UID: formatUID(p.uid), ResourceVersion: strconv.FormatUint(p.version, 10),
		GenerateName: strconv.FormatUint(p.digest, 16), Labels: w.labels(), Annotations: w.annotations(),
	}}
}
