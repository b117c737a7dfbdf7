// Package fences holds the admission policies of a member cluster, which API servers enforce without a webhook:
//
//   - isthmus-reserved-labels.isthmus.dev reserves the labels, annotations and managed-by values of isthmus.dev to the accounts
//     of Isthmus. A tenant who writes a ServiceImport of their own cannot pass it off as one of the controller.
//   - isthmus-controller.isthmus.dev and isthmus-gateway-controller.isthmus.dev restrict these accounts to what they need, so a
//     stolen token of one changes no object of others.
//
// The input is the installation namespace, the output are the policies and their bindings. The chart, the manifests, isthmusctl
// join and isthmusctl federation all install these. docs/security.md describes them.
package fences

import (
	"bytes"
	"embed"
	"fmt"
	"io/fs"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"
)

// Names of the policies and of their bindings.
const (
	ReservedName          = "isthmus-reserved-labels.isthmus.dev"
	ControllerName        = "isthmus-controller.isthmus.dev"
	GatewayControllerName = "isthmus-gateway-controller.isthmus.dev"
)

// Placeholder stands for the installation namespace in the files of the policies.
const Placeholder = "ISTHMUS_NAMESPACE"

// files are the policies, with the placeholder for the namespace.
//
//go:embed policies/*.yaml
var files embed.FS

// Policies returns the policies of a member with Isthmus in namespace, and their bindings. They are cluster-scoped. Writing
// them again changes nothing. The caller owns the result.
//
// The error means that namespace is not a valid name, or that this build is broken.
func Policies(namespace string) ([]client.Object, error) { return Load(files, Placeholder, namespace) }

// Load returns the policies and bindings in policies/*.yaml of files, with namespace in place of placeholder.
func Load(files fs.FS, placeholder, namespace string) ([]client.Object, error) {
	if faults := validation.IsDNS1123Label(namespace); len(faults) > 0 {
		return nil, fmt.Errorf("namespace %q: %s", namespace, faults[0])
	}
	names, err := fs.Glob(files, "policies/*.yaml")
	if err != nil {
		return nil, fmt.Errorf("list embedded policies: %w", err)
	}
	var objects []client.Object
	for _, name := range names {
		text, err := fs.ReadFile(files, name)
		if err != nil {
			return nil, fmt.Errorf("read embedded policy: %w", err)
		}
		text = bytes.ReplaceAll(text, []byte(placeholder), []byte(namespace))
		for document := range bytes.SplitSeq(text, []byte("\n---\n")) {
			object, err := parse(document)
			if err != nil {
				return nil, fmt.Errorf("parse embedded %s: %w", name, err)
			}
			objects = append(objects, object)
		}
	}
	return objects, nil
}

// parse parses the policy or the binding in a YAML document.
func parse(document []byte) (client.Object, error) {
	var kind metav1.TypeMeta
	if err := yaml.Unmarshal(document, &kind); err != nil {
		return nil, err
	}
	var object client.Object
	switch kind.Kind {
	case "ValidatingAdmissionPolicy":
		object = &admissionv1.ValidatingAdmissionPolicy{}
	case "ValidatingAdmissionPolicyBinding":
		object = &admissionv1.ValidatingAdmissionPolicyBinding{}
	default:
		return nil, fmt.Errorf("%q is neither a policy nor a binding", kind.Kind)
	}
	return object, yaml.UnmarshalStrict(document, object)
}

// MayUseReserved returns the rule that allows the use of reserved labels in namespaces. It counts only in a ClusterRole that is
// bound by a ClusterRoleBinding, so a user with rights in one namespace alone never has it.
func MayUseReserved(namespaces ...string) rbacv1.PolicyRule {
	return rbacv1.PolicyRule{APIGroups: []string{"isthmus.dev"}, Resources: []string{"reserved"}, ResourceNames: namespaces, Verbs: []string{"use"}}
}
