package policies

import (
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

// ours begins the names of all annotations of the federation.
const ours = "federation.isthmus.dev/"

// Annotations of policies.
const (
	// AnnotationStatus is what became of a federated policy, on the object that people made: a Status as JSON.
	AnnotationStatus = federationv1alpha1.AnnotationPolicyStatus
	// annotationOrigin marks a copy, which our label does too: CLUSTER/NAMESPACE/NAME of what it was made from, or
	// CLUSTER/NAME. Somebody's object that was made from the text of a copy has another name, and is theirs.
	annotationOrigin = ours + "origin"
	// annotationContent on a copy is the digest of what its origin said when it was written: whatever else a copy
	// says with the same digest is somebody's edit.
	annotationContent = ours + "content"
	// annotationStored is the digest of what the API server made of that, where it has other defaults than that
	// of the origin.
	annotationStored = ours + "stored"
	// annotationMended is when an edit of a copy was put right, until its origin changes.
	annotationMended = ours + "mended"
)

// requests are the annotations that make an object a federated policy when they are "true".
var requests = []string{federationv1alpha1.AnnotationPolicy, federationv1alpha1.AnnotationPolicyAntrea}

// bookkeeping are domains whose labels and annotations say who applied the original: on a copy they would let that
// program take it for one of its own, and prune it.
var bookkeeping = []string{
	"kubectl.kubernetes.io", "argocd.argoproj.io", "meta.helm.sh", "kustomize.toolkit.fluxcd.io", "helm.toolkit.fluxcd.io",
}

// federated reports whether a person asked for copies of o. A copy never is, nor is what is being deleted.
func federated(o metav1.Object) bool {
	if _, ok := copyOf(o); ok || o.GetDeletionTimestamp() != nil {
		return false
	}
	return slices.ContainsFunc(requests, func(name string) bool { return o.GetAnnotations()[name] == "true" })
}

// copyOf returns the cluster of which o is a copy, and whether it is one.
func copyOf(o metav1.Object) (cluster string, ok bool) {
	if o.GetLabels()[v1alpha1.LabelManagedBy] != federationv1alpha1.ManagedBy {
		return "", false
	}
	cluster, path, ok := strings.Cut(o.GetAnnotations()[annotationOrigin], "/")
	return cluster, ok && path == pathOf(o)
}

// originMark is the value of annotationOrigin on copies of o, which cluster has.
func originMark(cluster string, o metav1.Object) string { return cluster + "/" + pathOf(o) }

// pathOf returns NAMESPACE/NAME, or NAME.
func pathOf(o metav1.Object) string {
	if o.GetNamespace() == "" {
		return o.GetName()
	}
	return o.GetNamespace() + "/" + o.GetName()
}

// travels reports whether a label or annotation of an origin belongs on copies.
func travels(name string) bool {
	return !strings.HasPrefix(name, ours) && !slices.Contains(requests, name) &&
		!slices.ContainsFunc(bookkeeping, func(domain string) bool { return strings.HasPrefix(name, domain+"/") })
}
