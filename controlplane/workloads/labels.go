package workloads

import (
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
)

// policyLabels returns those of a machine's labels by which policies may select it: valid ones of Kubernetes, except for those of our
// own domain.
func policyLabels(labels map[string]string) map[string]string {
	all := map[string]string{}
	for key, value := range labels {
		domain, _, prefixed := strings.Cut(key, "/")
		ours := prefixed && (domain == "isthmus.dev" || strings.HasSuffix(domain, ".isthmus.dev"))
		if !ours && len(validation.IsQualifiedName(key)) == 0 && len(validation.IsValidLabelValue(value)) == 0 {
			all[key] = value
		}
	}
	return all
}
