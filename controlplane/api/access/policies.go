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

// templates are the policies of any broker, as people read them.
//
//go:embed policies/*.yaml
var templates embed.FS

// placeholder stands in templates for the broker's namespace.
const placeholder = "BROKER_NAMESPACE"

// Policies returns the ValidatingAdmissionPolicies of the broker in namespace, and their bindings: all of them
// cluster-scoped, with the namespace in their names, so that several brokers may share an API server. They hold
// the members of this broker in this namespace, and nobody else. Writing them again changes nothing; deleting
// them takes the protection away and leaves everything else alone. The result is the caller's.
//
// Their parameter is the namespace's ClusterSetConfig: while it is missing, or its definition not served, nobody
// creates or updates the broker's objects, but everything can be deleted.
//
// The error says that namespace cannot be the name of one, or that this build is broken.
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

// parse returns the policy or the binding that a YAML document holds.
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
