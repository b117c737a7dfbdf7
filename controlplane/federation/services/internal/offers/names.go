package offers

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Marks of what a federation writes.
const (
	// MarkFederated is the annotation of a federated Service, MarkCluster the annotation and label of its
	// EndpointSlices that tells which cluster they lead to.
	MarkFederated = "fed-svc.antreaplus.vmware-tanzu.com"
	MarkCluster   = "cluster.federated.antreaplus.vmware-tanzu.com"
	// ManagedBy is the value of endpointslice.kubernetes.io/managed-by and app.kubernetes.io/managed-by by which
	// a federation knows its own.
	ManagedBy = "federation.isthmus.dev"
)

// Annotations of member Services, each in all its spellings. Of several on one Service the first one here counts.
var (
	globalNames = []string{
		"svc.global.federated.antreaplus.vmware-tanzu.com",
		"svc.global.federated.antreaplus.vmware.com",
		"federation.isthmus.dev/global-service",
	}
	namespacedNames = []string{
		"svc.federated.antreaplus.vmware.com",
		"svc.federated.antreaplus.vmware-tanzu.com",
		"federation.isthmus.dev/service",
	}
	vmMarks = []string{
		"vm.antreaplus.vmware-tanzu.com",
		"vm.antreaplus.vmware.com",
		"federation.isthmus.dev/vm",
	}
)

// Names returns the federated Services that svc is a member of: a global one, which stands in the namespace system,
// one of svc's own namespace, or both. The errors are for the Service's owner. A federated Service is no member of any.
func Names(svc *corev1.Service, system string) ([]clusterset.ServiceName, []error) {
	if IsFederated(svc) {
		return nil, nil
	}
	var (
		names []clusterset.ServiceName
		errs  []error
	)
	for _, kind := range []struct {
		spellings []string
		namespace string
	}{{globalNames, system}, {namespacedNames, svc.Namespace}} {
		annotation, name, ok := first(svc, kind.spellings)
		if !ok {
			continue
		}
		switch faults := validation.IsDNS1035Label(name); {
		case len(faults) > 0:
			errs = append(errs, fmt.Errorf("annotation %s: %q cannot name a Service (%s); write one such as %q", annotation, name, strings.Join(faults, ", "), svc.Name))
		case kind.namespace != system && !clusterset.IsShared(kind.namespace):
			errs = append(errs, fmt.Errorf("annotation %s: namespace %s is each cluster's own; use %s instead", annotation, kind.namespace, globalNames[0]))
		default:
			names = append(names, clusterset.ServiceName{Namespace: kind.namespace, Name: name})
		}
	}
	return names, errs
}

// IsFederated reports whether svc says that it is a federated Service, ours or not.
func IsFederated(svc metav1.Object) bool {
	_, marked := svc.GetAnnotations()[MarkFederated]
	return marked
}

// IsOurs reports whether a federation wrote o.
func IsOurs(o metav1.Object) bool { return o.GetLabels()[labelManagedBy] == ManagedBy }

// Asks reports whether svc has an annotation that this package reads.
func Asks(svc metav1.Object) bool {
	for _, spellings := range [][]string{globalNames, namespacedNames} {
		if _, _, ok := first(svc, spellings); ok {
			return true
		}
	}
	return false
}

// KeptAnnotations returns the annotations of a Service that this package reads, nil when there are none.
func KeptAnnotations(svc metav1.Object) map[string]string {
	var kept map[string]string
	for _, spellings := range [][]string{globalNames, namespacedNames, vmMarks, {MarkFederated}} {
		for _, key := range spellings {
			if value, ok := svc.GetAnnotations()[key]; ok {
				if kept == nil {
					kept = map[string]string{}
				}
				kept[key] = value
			}
		}
	}
	return kept
}

// isVM reports whether virtual machines are behind svc.
func isVM(svc metav1.Object) bool {
	_, _, ok := first(svc, vmMarks)
	return ok
}

// first returns the first of spellings that o is annotated with, and its value.
func first(o metav1.Object, spellings []string) (key, value string, ok bool) {
	for _, key := range spellings {
		if value, ok := o.GetAnnotations()[key]; ok {
			return key, value, true
		}
	}
	return "", "", false
}
