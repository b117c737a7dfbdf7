package policies

import (
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

// ours is the prefix of the federation's annotations.
const ours = "federation.isthmus.dev/"

// Annotations of policies.
const (
	// AnnotationStatus on an origin is its Status, as JSON.
	AnnotationStatus = federationv1alpha1.AnnotationPolicyStatus
	// annotationOrigin marks a copy, together with our label. It is CLUSTER/NAMESPACE/NAME or CLUSTER/NAME of the origin. A
	// user's object that was made from the text of a copy has another name, and is therefore not taken for a copy.
	annotationOrigin = ours + "origin"
	// annotationOriginUID on a copy is the uid of its origin. An origin that was deleted and created again has another one.
	annotationOriginUID = ours + "origin-uid"
	// annotationContent on a copy is the digest of its origin's content when it was written. A copy with that digest and
	// other content was edited.
	annotationContent = ours + "content"
	// annotationStored is the digest of the content that the API server stored, if it has other defaults than the API
	// server of the origin.
	annotationStored = ours + "stored"
	// annotationRestored is the time when an edit of a copy was undone, until its origin changes.
	annotationRestored = ours + "restored"
)

// requests are the annotations that make an object a federated policy if their value is "true".
var requests = []string{federationv1alpha1.AnnotationPolicy, federationv1alpha1.AnnotationPolicyAntrea}

// bookkeeping are domains of labels and annotations that record which program applied the original. On a copy they would make
// that program treat it as its own object and prune it.
var bookkeeping = []string{
	"kubectl.kubernetes.io", "argocd.argoproj.io", "meta.helm.sh", "kustomize.toolkit.fluxcd.io", "helm.toolkit.fluxcd.io",
}

// federated reports whether users asked to replicate o. A copy never is, nor an object that is being deleted.
func federated(o metav1.Object) bool {
	if _, ok := copyOf(o); ok || o.GetDeletionTimestamp() != nil {
		return false
	}
	return slices.ContainsFunc(requests, func(name string) bool { return o.GetAnnotations()[name] == "true" })
}

// askedBy returns the annotations by which users ask to replicate o.
func askedBy(o metav1.Object) string {
	asked := slices.DeleteFunc(slices.Clone(requests), func(name string) bool { return o.GetAnnotations()[name] != "true" })
	return strings.Join(asked, " ")
}

// copyOf returns the cluster of the origin of o, and whether o is a copy.
func copyOf(o metav1.Object) (cluster string, ok bool) {
	if o.GetLabels()[v1alpha1.LabelManagedBy] != federationv1alpha1.ManagedBy {
		return "", false
	}
	cluster, path, ok := strings.Cut(o.GetAnnotations()[annotationOrigin], "/")
	return cluster, ok && path == pathOf(o)
}

// originMark returns the value of annotationOrigin on the copies of o, an object in cluster.
func originMark(cluster string, o metav1.Object) string { return cluster + "/" + pathOf(o) }

// isCopyOf reports whether the annotations of a copy mark it as one of o, an object in cluster.
func isCopyOf(marks map[string]string, cluster string, o metav1.Object) bool {
	return marks[annotationOrigin] == originMark(cluster, o) && marks[annotationOriginUID] == string(o.GetUID())
}

// pathOf returns NAMESPACE/NAME, or NAME.
func pathOf(o metav1.Object) string {
	if o.GetNamespace() == "" {
		return o.GetName()
	}
	return o.GetNamespace() + "/" + o.GetName()
}

// travels reports whether copies get a label or annotation of the origin.
func travels(name string) bool {
	return !strings.HasPrefix(name, ours) && !slices.Contains(requests, name) &&
		!slices.ContainsFunc(bookkeeping, func(domain string) bool { return strings.HasPrefix(name, domain+"/") })
}
