package membership

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/version"
	"sigs.k8s.io/controller-runtime/pkg/client"
	mcscrd "sigs.k8s.io/mcs-api/config/crd"

	"github.com/isthmus-net/isthmus/controlplane/api/crds"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

// Errors of a cluster whose definitions are not those of this version of Isthmus.
var (
	ErrNewerDefinitions = errors.New("the cluster has definitions of a later Isthmus")
	ErrOlderDefinitions = errors.New("the cluster has definitions of an older Isthmus")
)

// crdPlan is which definitions a cluster needs, and which of them have to be written.
type crdPlan struct {
	all, write []*apiextensionsv1.CustomResourceDefinition
}

// planCRDs looks at the definitions of a cluster. One of the MCS API or of ClusterProperty stays if it is newer
// than ours, or has all that ours has: others use it too. One of our own that is newer is an error
// (ErrNewerDefinitions): what this version writes would take from objects what a later one has put there.
func planCRDs(ctx context.Context, c client.Reader) (crdPlan, error) {
	var plan crdPlan
	var err error
	if plan.all, err = crds.All(); err != nil {
		return plan, err
	}
	for _, crd := range plan.all {
		have := &apiextensionsv1.CustomResourceDefinition{}
		err := c.Get(ctx, client.ObjectKeyFromObject(crd), have)
		switch {
		case apierrors.IsNotFound(err):
		case err != nil:
			return plan, fmt.Errorf("read CustomResourceDefinition %s: %w", crd.Name, err)
		case crd.Spec.Group == v1alpha1.GroupVersion.Group:
			if more := crds.Lacks(crd, have); len(more) > 0 {
				return plan, fmt.Errorf("%w: CustomResourceDefinition %s knows %s, which this isthmusctl does not; use the isthmusctl of that version",
					ErrNewerDefinitions, crd.Name, some(more))
			}
		case newer(have, crd) || sameRelease(have, crd) && len(crds.Lacks(have, crd)) == 0:
			continue
		}
		plan.write = append(plan.write, crd)
	}
	return plan, nil
}

// apply writes the definitions and waits until all that are needed are served.
func (p crdPlan) apply(ctx context.Context, c client.Client) error {
	for _, crd := range p.write {
		if err := apply(ctx, c, crd); err != nil {
			return err
		}
	}
	for _, crd := range p.all {
		err := await(ctx, fmt.Sprintf("the API server serves no %s; look at the conditions of CustomResourceDefinition %s", crd.Spec.Names.Plural, crd.Name),
			func() (bool, error) {
				if err := c.Get(ctx, client.ObjectKeyFromObject(crd), crd); err != nil {
					return false, fmt.Errorf("read CustomResourceDefinition %s: %w", crd.Name, err)
				}
				return slices.ContainsFunc(crd.Status.Conditions, func(cond apiextensionsv1.CustomResourceDefinitionCondition) bool {
					return cond.Type == apiextensionsv1.Established && cond.Status == apiextensionsv1.ConditionTrue
				}), nil
			})
		if err != nil {
			return err
		}
	}
	return nil
}

// newer reports whether have is newer than ours: of a later release, or a later schema, by the labels that
// the MCS API puts on its definitions, or stored in a version that ours does not know.
func newer(have, ours *apiextensionsv1.CustomResourceDefinition) bool {
	for _, v := range have.Spec.Versions {
		if v.Storage && !slices.ContainsFunc(ours.Spec.Versions, func(o apiextensionsv1.CustomResourceDefinitionVersion) bool { return o.Name == v.Name }) {
			return true
		}
	}
	theirRelease, err1 := version.ParseSemantic(have.Labels[mcscrd.ReleaseVersionLabel])
	ourRelease, err2 := version.ParseSemantic(ours.Labels[mcscrd.ReleaseVersionLabel])
	if err1 == nil && err2 == nil && !theirRelease.EqualTo(ourRelease) {
		return theirRelease.GreaterThan(ourRelease)
	}
	theirSchema, err1 := strconv.Atoi(have.Labels[mcscrd.CustomResourceDefinitionSchemaRevisionLabel])
	ourSchema, err2 := strconv.Atoi(ours.Labels[mcscrd.CustomResourceDefinitionSchemaRevisionLabel])
	return err1 == nil && err2 == nil && theirSchema > ourSchema
}

// sameRelease reports whether two definitions have the same labels of the MCS API, or none.
func sameRelease(have, ours *apiextensionsv1.CustomResourceDefinition) bool {
	for _, l := range []string{mcscrd.ReleaseVersionLabel, mcscrd.CustomResourceDefinitionSchemaRevisionLabel} {
		if have.Labels[l] != ours.Labels[l] {
			return false
		}
	}
	return true
}

// OldDefinition is a definition in a cluster that does not know all that this version of Isthmus uses.
type OldDefinition struct {
	Name  string   // of the CustomResourceDefinition
	Lacks []string // versions and fields, as crds.Lacks says; none when there is no such definition
}

// String says what is wrong, without the fix.
func (d OldDefinition) String() string {
	if len(d.Lacks) == 0 {
		return fmt.Sprintf("CustomResourceDefinition %s is missing", d.Name)
	}
	return fmt.Sprintf("CustomResourceDefinition %s is older than this isthmusctl, it lacks %s", d.Name, some(d.Lacks))
}

// OldDefinitions returns the definitions in the cluster behind c that this version of Isthmus must not rely
// on, sorted by name: missing or older ones. join and deploy-broker renew them, nothing else does.
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

// checkDefinitions reports ErrOlderDefinitions when the broker would silently forget what is written there.
func checkDefinitions(ctx context.Context, broker client.Reader) error {
	old, err := OldDefinitions(ctx, broker)
	if err != nil {
		return err
	}
	for _, d := range old {
		if strings.HasSuffix(d.Name, "."+v1alpha1.GroupVersion.Group) {
			return fmt.Errorf("%w: %s; run isthmusctl deploy-broker, which renews it and keeps all settings", ErrOlderDefinitions, d)
		}
	}
	return nil
}

// some names the first of several things.
func some(names []string) string {
	if len(names) == 1 {
		return names[0]
	}
	return fmt.Sprintf("%s and %d more", names[0], len(names)-1)
}
