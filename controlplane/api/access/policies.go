package access

import (
	"embed"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/fences"
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
	return fences.Load(templates, placeholder, namespace)
}
