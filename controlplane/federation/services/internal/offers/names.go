package offers

import (
	"fmt"
	"strings"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	isthmus "github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Annotations of member Services, each in all its spellings. If a Service has several, the first one here takes precedence.
var (
	globalNames = []string{
		v1alpha1.AnnotationGlobalServiceAntreaTanzu, v1alpha1.AnnotationGlobalServiceAntrea, v1alpha1.AnnotationGlobalService,
	}
	namespacedNames = []string{
		v1alpha1.AnnotationServiceAntrea, v1alpha1.AnnotationServiceAntreaTanzu, v1alpha1.AnnotationService,
	}
)

// Name returns the federated Service that svc is a member of: a global one, whose namespace is system, or one in the
// namespace of svc. ok is false if there is none; a federated Service is never a member of another. The error is for the
// owner of the Service.
func Name(svc metav1.Object, system string) (name clusterset.ServiceName, ok bool, err error) {
	if IsFederated(svc) {
		return name, false, nil
	}
	global, text, isGlobal := first(svc, globalNames)
	annotation, own, isOwn := first(svc, namespacedNames)
	name = clusterset.ServiceName{Namespace: system, Name: text}
	switch {
	case isGlobal && isOwn:
		return name, false, fmt.Errorf("annotations %s and %s: a Service is a member of one federated Service; remove one of them", global, annotation)
	case isGlobal:
		annotation = global
	case isOwn:
		name = clusterset.ServiceName{Namespace: svc.GetNamespace(), Name: own}
	default:
		return name, false, nil
	}
	if faults := validation.IsDNS1123Label(name.Name); len(faults) > 0 {
		return name, false, fmt.Errorf("annotation %s: %q cannot name a Service (%s); write one such as %s", annotation, name.Name, strings.Join(faults, ", "), svc.GetName())
	}
	if !clusterset.IsShared(svc.GetNamespace()) {
		return name, false, fmt.Errorf("annotation %s: namespace %s belongs to each cluster alone; its Services are members of no federated Service", annotation, svc.GetNamespace())
	}
	return name, true, nil
}

// IsFederated reports whether svc is marked as a federated Service, ours or not.
func IsFederated(svc metav1.Object) bool {
	_, marked := svc.GetAnnotations()[v1alpha1.MarkFederatedService]
	return marked
}

// IsOurs reports whether a federation wrote o.
func IsOurs(o metav1.Object) bool {
	return o.GetLabels()[isthmus.LabelManagedBy] == v1alpha1.ManagedBy || o.GetLabels()[discoveryv1.LabelManagedBy] == v1alpha1.ManagedBy
}

// isVM reports whether svc is marked as a Service of virtual machines.
func isVM(svc metav1.Object) bool {
	_, marked := svc.GetAnnotations()[v1alpha1.MarkVirtualMachines]
	return marked
}

// first returns the first of spellings among the annotations of o, and its value.
func first(o metav1.Object, spellings []string) (key, value string, ok bool) {
	for _, key := range spellings {
		if value, ok := o.GetAnnotations()[key]; ok {
			return key, value, true
		}
	}
	return "", "", false
}
