// Package writers reads the flag --imports: the controllers that wrote the ServiceImports and EndpointSlices to use.
package writers

import (
	"fmt"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

// The values of --imports.
const (
	Isthmus = "isthmus" // objects that controllers of Isthmus wrote
	Any     = "any"     // objects of every MCS implementation
)

// Own returns the values of the managed-by labels of the objects that controllers of Isthmus wrote.
func Own() []string { return []string{v1alpha1.ManagedBy, federationv1alpha1.ManagedBy} }

// ManagedBy returns the values of the managed-by labels of the objects to use; none for all objects.
func ManagedBy(imports string) ([]string, error) {
	switch imports {
	case Isthmus:
		return Own(), nil
	case Any:
		return nil, nil
	}
	return nil, fmt.Errorf("--imports=%s is unknown; use %s or %s", imports, Isthmus, Any)
}
