package admin

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

// ErrNewerDefinitions is of a cluster whose definitions a later version of Isthmus wrote.
var ErrNewerDefinitions = errors.New("the cluster has definitions of a later Isthmus")

// Definitions is which definitions a cluster needs, and which of them have to be written.
type Definitions struct {
	all, write []*apiextensionsv1.CustomResourceDefinition
}

// PlanDefinitions looks at the definitions of a cluster. One of the MCS API or of ClusterProperty stays if it is newer
// than ours, or has all that ours has: others use it too. One of our own that is newer is an error
// (ErrNewerDefinitions): what this version writes would take from objects what a later one has put there.
func PlanDefinitions(ctx context.Context, c client.Reader) (Definitions, error) {
	var plan Definitions
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
		case own(crd.Spec.Group):
			if more := crds.Lacks(crd, have); len(more) > 0 {
				return plan, fmt.Errorf("%w: CustomResourceDefinition %s knows %s, which this isthmusctl does not; use the isthmusctl of that version",
					ErrNewerDefinitions, crd.Name, Some(more))
			}
		case newer(have, crd) || sameRelease(have, crd) && len(crds.Lacks(have, crd)) == 0:
			continue
		}
		plan.write = append(plan.write, crd)
	}
	return plan, nil
}

// Apply writes the definitions and waits until all that are needed are served.
func (p Definitions) Apply(ctx context.Context, c client.Client) error {
	for _, crd := range p.write {
		if err := Apply(ctx, c, crd); err != nil {
			return err
		}
	}
	for _, crd := range p.all {
		err := Await(ctx, fmt.Sprintf("the API server serves no %s; look at the conditions of CustomResourceDefinition %s", crd.Spec.Names.Plural, crd.Name),
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

// own reports whether the kinds of an API group are Isthmus's alone.
func own(group string) bool {
	return group == v1alpha1.GroupVersion.Group || strings.HasSuffix(group, ".isthmus.dev")
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

// Some names the first of several things.
func Some(names []string) string {
	if len(names) == 1 {
		return names[0]
	}
	return fmt.Sprintf("%s and %d more", names[0], len(names)-1)
}
