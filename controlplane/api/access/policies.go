package access

import (
	"bytes"
	"embed"
	"fmt"
	"io/fs"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"
)

// templates are the policies, with a placeholder for the namespace.
//
//go:embed policies/*.yaml
var templates embed.FS

// placeholder is replaced by the broker's namespace.
const placeholder = "BROKER_NAMESPACE"

// Policies returns the ValidatingAdmissionPolicies of the broker in namespace, and their bindings. All are cluster-scoped
// with the namespace in their names, so that several brokers may share an API server. They apply only to the members of
// this broker in this namespace. Writing them again changes nothing; deleting them only removes the protection. The caller
// owns the result.
//
// Their parameter is the namespace's ClusterSetConfig. While it is missing, or its definition is not served, no client can
// create or update the broker's objects, but deletions succeed.
//
// The error means that namespace is not a valid name, or that this build is broken.
func Policies(namespace string) ([]client.Object, error) {
	if faults := validation.IsDNS1123Label(namespace); len(faults) > 0 {
		return nil, fmt.Errorf("namespace %q of a broker: %s", namespace, faults[0])
	}
	names, err := fs.Glob(templates, "policies/*.yaml")
	if err != nil {
		return nil, fmt.Errorf("list embedded policies: %w", err)
	}
	var objects []client.Object
	for _, name := range names {
		text, err := templates.ReadFile(name)
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
