package membership

import (
	"context"
	"errors"
	"fmt"
	"strings"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/crds"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
)

// ErrOlderDefinitions means that a cluster has definitions of an older Isthmus.
var ErrOlderDefinitions = errors.New("the cluster has definitions of an older Isthmus")

// OldDefinition is a definition that is missing, or lacks fields that this version of Isthmus uses.
type OldDefinition struct {
	Name  string   // of the CustomResourceDefinition
	Lacks []string // versions and fields, as returned by crds.Lacks; empty if the definition is missing
}

// String describes the fault, without the remedy.
func (d OldDefinition) String() string {
	if len(d.Lacks) == 0 {
		return fmt.Sprintf("CustomResourceDefinition %s is missing", d.Name)
	}
	return fmt.Sprintf("CustomResourceDefinition %s is older than this isthmusctl, it lacks %s", d.Name, admin.Some(d.Lacks))
}

// OldDefinitions returns the missing and older definitions in the cluster behind c, sorted by name. Only join and
// deploy-broker update them.
func OldDefinitions(ctx context.Context, c client.Reader) ([]OldDefinition, error) {
	all, err := crds.All()
	if err != nil {
		return nil, err
	}
	var old []OldDefinition
	for _, crd := range all {
		have := &apiextensionsv1.CustomResourceDefinition{}
		err := c.Get(ctx, client.ObjectKeyFromObject(crd), have)
		switch {
		case apierrors.IsNotFound(err):
			old = append(old, OldDefinition{Name: crd.Name})
		case err != nil:
			return nil, fmt.Errorf("read CustomResourceDefinition %s: %w", crd.Name, err)
		default:
			if lacks := crds.Lacks(have, crd); len(lacks) > 0 {
				old = append(old, OldDefinition{Name: crd.Name, Lacks: lacks})
			}
		}
	}
	return old, nil
}

// checkDefinitions returns ErrOlderDefinitions if the broker would silently drop fields of objects written to it.
func checkDefinitions(ctx context.Context, broker client.Reader) error {
	old, err := OldDefinitions(ctx, broker)
	if err != nil {
		return err
	}
	for _, d := range old {
		if strings.HasSuffix(d.Name, "."+v1alpha1.GroupVersion.Group) {
			return fmt.Errorf("%w: %s; run isthmusctl deploy-broker, which updates it and keeps all settings", ErrOlderDefinitions, d)
		}
	}
	return nil
}
