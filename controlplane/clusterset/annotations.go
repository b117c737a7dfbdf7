package clusterset

// The annotations of a ServiceImport by which the owners of a Service set its traffic policy. They come from the
// exportedAnnotations of its ServiceExports. bpf/lb describes their values.
const (
	AnnotationPrefer         = "isthmus.dev/prefer"
	AnnotationClusterWeights = "isthmus.dev/cluster-weights"
	AnnotationBalancer       = "isthmus.dev/balancer"
)

// IsPolicyAnnotation reports whether an annotation sets a traffic policy.
func IsPolicyAnnotation(key string) bool {
	return key == AnnotationPrefer || key == AnnotationClusterWeights || key == AnnotationBalancer
}
