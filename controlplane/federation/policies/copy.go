package policies

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"maps"
	"reflect"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

// copyFrom returns the copy of origin, an object in cluster, for another member: the users' content with our marks instead
// of the request to replicate. It keeps nothing of origin.
func copyFrom(cluster string, origin *unstructured.Unstructured) *unstructured.Unstructured {
	want := &unstructured.Unstructured{Object: body(origin)}
	want.SetGroupVersionKind(origin.GroupVersionKind())
	want.SetNamespace(origin.GetNamespace())
	want.SetName(origin.GetName())
	labels, annotations := map[string]string{}, map[string]string{}
	for k, v := range origin.GetLabels() {
		if travels(k) {
			labels[k] = v
		}
	}
	for k, v := range origin.GetAnnotations() {
		if travels(k) {
			annotations[k] = v
		}
	}
	labels[v1alpha1.LabelManagedBy] = federationv1alpha1.ManagedBy
	annotations[annotationOrigin] = originMark(cluster, origin)
	want.SetLabels(labels)
	want.SetAnnotations(annotations)
	annotations[annotationContent] = digest(want.Object)
	annotations[annotationOriginUID] = string(origin.GetUID())
	want.SetAnnotations(annotations)
	return want
}

// body returns a copy of the content of o, without metadata and status.
func body(o *unstructured.Unstructured) map[string]any {
	kept := map[string]any{}
	for field, value := range o.Object {
		switch field {
		case "apiVersion", "kind", "metadata", "status":
		default:
			kept[field] = value
		}
	}
	return (&unstructured.Unstructured{Object: kept}).DeepCopy().Object
}

// digest returns a short text that is equal for equal values.
func digest(v any) string {
	text, err := json.Marshal(v) // it sorts the keys of maps
	if err != nil {
		panic(err) // it was decoded from JSON
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:8])
}

// matches reports whether the copy have has the content of want. Labels and annotations that others added do not matter.
func matches(have, want *unstructured.Unstructured) bool {
	if !includes(have.GetLabels(), want.GetLabels()) || !includes(have.GetAnnotations(), want.GetAnnotations()) {
		return false
	}
	if slices.ContainsFunc(requests, func(name string) bool { return have.GetAnnotations()[name] != "" }) {
		return false
	}
	is := body(have)
	if reflect.DeepEqual(is, body(want)) {
		return true
	}
	stored := have.GetAnnotations()[annotationStored]
	return stored != "" && stored == digest(is)
}

func includes(have, want map[string]string) bool {
	for k, v := range want {
		if h, ok := have[k]; !ok || h != v {
			return false
		}
	}
	return true
}

// over returns want as the replacement of have, an older copy. edited states that a user changed have, which was noticed at
// now.
func over(have, want *unstructured.Unstructured, edited bool, now time.Time) *unstructured.Unstructured {
	next := want.DeepCopy()
	next.SetResourceVersion(have.GetResourceVersion())
	next.SetUID(have.GetUID())
	next.SetFinalizers(have.GetFinalizers())
	next.SetOwnerReferences(have.GetOwnerReferences())
	if status, ok := have.Object["status"]; ok {
		next.Object["status"] = status
	}
	if edited {
		annotations := maps.Clone(next.GetAnnotations())
		annotations[annotationRestored] = now.UTC().Format(time.RFC3339)
		next.SetAnnotations(annotations)
	}
	return next
}
