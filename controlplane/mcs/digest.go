package mcs

import (
	"cmp"
	"encoding/json"
	"fmt"
	"hash/maphash"
	"maps"
	"slices"
	"unique"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

// seed is per process: digests of different processes are not comparable.
var seed = maphash.MakeSeed()

var yes, no = true, false

// Trim removes the unread fields of a slice before it enters a cache, and shares equal strings between slices.
func Trim(es *discoveryv1.EndpointSlice) {
	es.ManagedFields = nil
	es.GenerateName = ""
	for i := range es.Endpoints {
		e := &es.Endpoints[i]
		e.TargetRef, e.DeprecatedTopology = nil, nil
		e.NodeName, e.Zone = shared(e.NodeName), shared(e.Zone)
		e.Conditions.Ready, e.Conditions.Serving, e.Conditions.Terminating =
			sharedBool(e.Conditions.Ready), sharedBool(e.Conditions.Serving), sharedBool(e.Conditions.Terminating)
	}
}

func shared(s *string) *string {
	if s == nil {
		return nil
	}
	return new(unique.Make(*s).Value())
}

func sharedBool(b *bool) *bool {
	switch {
	case b == nil:
		return nil
	case *b:
		return &yes
	default:
		return &no
	}
}

// Digest is a hash: equal objects have equal digests within one process.
type Digest uint64

// SliceDigest returns the digest of the fields that this package writes into a slice: type, labels, regions, owners, endpoints
// and ports. It ignores ChangedAt, and fields that the API server adds.
func SliceDigest(es *discoveryv1.EndpointSlice) Digest {
	var w digester
	w.h.SetSeed(seed)
	w.text(string(es.AddressType))
	w.labels(es.Labels)
	w.text(es.Annotations[v1alpha1.AnnotationRegions])
	for _, o := range es.OwnerReferences {
		w.text(string(o.UID))
	}
	w.mark()
	for i := range es.Endpoints {
		w.endpoint(&es.Endpoints[i])
	}
	w.mark()
	w.text(formatPorts(es.Ports))
	return Digest(w.h.Sum64())
}

// ImportDigest returns the digest of the fields that this package writes into a ServiceImport, without the status.
func ImportDigest(si *v1beta1.ServiceImport) Digest {
	var w digester
	w.h.SetSeed(seed)
	w.labels(si.Labels)
	w.labels(si.Annotations)
	w.text(formatJSON(normalSpec(si.Spec)))
	return Digest(w.h.Sum64())
}

// RecordDigest returns the digest of the fields that this package writes into a record.
func RecordDigest(r *v1alpha1.ExportRecord) Digest {
	var w digester
	w.h.SetSeed(seed)
	w.labels(r.Labels)
	spec := r.Spec
	spec.Import = normalSpec(spec.Import)
	spec.ExportedAt = metav1.NewTime(spec.ExportedAt.UTC())
	w.text(formatJSON(spec))
	return Digest(w.h.Sum64())
}

// normalSpec returns spec with nil instead of an empty list of ports.
func normalSpec(spec v1beta1.ServiceImportSpec) v1beta1.ServiceImportSpec {
	if len(spec.Ports) == 0 {
		spec.Ports = nil
	}
	return spec
}

func formatJSON(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("mcs: encode %T: %v", v, err)) // API types can be encoded
	}
	return string(text)
}

// formatPorts returns equal texts for equivalent ports.
func formatPorts(ports []discoveryv1.EndpointPort) string {
	normal := make([]discoveryv1.EndpointPort, 0, len(ports))
	for _, p := range ports {
		normal = append(normal, discoveryv1.EndpointPort{
			Name: new(deref(p.Name)), Protocol: new(cmp.Or(deref(p.Protocol), corev1.ProtocolTCP)), Port: p.Port, AppProtocol: p.AppProtocol,
		})
	}
	return formatJSON(normal)
}

// digester writes values into a hash so that different values give different bytes.
type digester struct{ h maphash.Hash }

func (w *digester) mark() { _ = w.h.WriteByte('\n') }

func (w *digester) text(s string) {
	_, _ = w.h.WriteString(s)
	_ = w.h.WriteByte(0)
}

func (w *digester) optional(s *string) {
	if s == nil {
		_ = w.h.WriteByte(1)
		return
	}
	w.text(*s)
}

func (w *digester) flag(b *bool) {
	switch {
	case b == nil:
		_ = w.h.WriteByte(0)
	case *b:
		_ = w.h.WriteByte(1)
	default:
		_ = w.h.WriteByte(2)
	}
}

func (w *digester) labels(m map[string]string) {
	for _, k := range slices.Sorted(maps.Keys(m)) {
		w.text(k)
		w.text(m[k])
	}
	w.mark()
}

func (w *digester) endpoint(e *discoveryv1.Endpoint) {
	for _, a := range e.Addresses {
		w.text(a)
	}
	w.flag(e.Conditions.Ready)
	w.flag(e.Conditions.Serving)
	w.flag(e.Conditions.Terminating)
	w.optional(e.Hostname)
	w.text(podOf(e))
	w.optional(e.NodeName)
	w.optional(e.Zone)
	if e.Hints != nil {
		w.text(formatJSON(e.Hints))
	}
	w.mark()
}
