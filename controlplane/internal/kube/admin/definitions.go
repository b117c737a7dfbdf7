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

// ErrNewerDefinitions means that a cluster has definitions of a later Isthmus.
var ErrNewerDefinitions = errors.New("the cluster has definitions of a later Isthmus")

// Definitions are the definitions that a cluster needs, and those of them to write.
type Definitions struct {
	all, write []*apiextensionsv1.CustomResourceDefinition
	extended   []string // names of Isthmus's definitions that the cluster has without some fields
}

// Extends reports whether the plan adds fields to a definition of Isthmus that the cluster has, given its name.
func (p Definitions) Extends(name string) bool { return slices.Contains(p.extended, name) }

// PlanDefinitions compares the definitions of a cluster with those of this build. A definition of the MCS API or of
// ClusterProperty stays if it is newer, or has all fields of this build's: other software uses it too. A newer definition
// of Isthmus is an error (ErrNewerDefinitions), because this version would drop the later one's fields from objects. more are
// definitions beside those that every cluster needs.
func PlanDefinitions(ctx context.Context, c client.Reader, more ...*apiextensionsv1.CustomResourceDefinition) (Definitions, error) {
	var plan Definitions
	all, err := crds.All()
	if err != nil {
		return plan, err
	}
	plan.all = append(slices.Clone(all), more...)
	for _, crd := range plan.all {
		have := &apiextensionsv1.CustomResourceDefinition{}
		err := c.Get(ctx, client.ObjectKeyFromObject(crd), have)
		switch {
		case apierrors.IsNotFound(err):
		case err != nil:
			return plan, fmt.Errorf("read CustomResourceDefinition %s: %w", crd.Name, err)
		case own(crd.Spec.Group):
			if more := crds.Lacks(crd, have); len(more) > 0 {
				return plan, fmt.Errorf("%w: CustomResourceDefinition %s has %s, which this isthmusctl does not know; use the isthmusctl of that version",
					ErrNewerDefinitions, crd.Name, Some(more))
			}
			if len(crds.Lacks(have, crd)) > 0 {
				plan.extended = append(plan.extended, crd.Name)
			}
		case newer(have, crd) || sameRelease(have, crd) && len(crds.Lacks(have, crd)) == 0:
			continue
		}
		plan.write = append(plan.write, crd)
	}
	return plan, nil
}

// Objects returns the definitions to write.
func (p Definitions) Objects() []client.Object {
	var all []client.Object
	for _, crd := range p.write {
		all = append(all, crd)
	}
	return all
}

// Apply writes the definitions and waits until the API server serves all needed ones.
func (p Definitions) Apply(ctx context.Context, c client.Client) error {
	for _, crd := range p.write {
		if err := Apply(ctx, c, crd); err != nil {
			return err
		}
	}
	for _, crd := range p.all {
		err := Await(ctx, fmt.Sprintf("the API server does not serve %s; see the conditions of CustomResourceDefinition %s", crd.Spec.Names.Plural, crd.Name),
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

// own reports whether an API group belongs to Isthmus.
func own(group string) bool {
	return group == v1alpha1.GroupVersion.Group || strings.HasSuffix(group, ".isthmus.dev")
}

// newer reports whether have is newer than ours: it has a later release or schema, by the labels of the MCS API's
// definitions, or a storage version that ours lacks.
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

// sameRelease reports whether two definitions have the same release labels of the MCS API, or none.
func sameRelease(have, ours *apiextensionsv1.CustomResourceDefinition) bool {
	for _, l := range []string{mcscrd.ReleaseVersionLabel, mcscrd.CustomResourceDefinitionSchemaRevisionLabel} {
		if have.Labels[l] != ours.Labels[l] {
			return false
		}
	}
	return true
}

// Some returns the first of names and the number of the others, such as "demo/a and 2 more".
func Some(names []string) string {
	if len(names) == 1 {
		return names[0]
	}
	return fmt.Sprintf("%s and %d more", names[0], len(names)-1)
}
