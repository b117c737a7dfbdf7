package membership

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/version"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
	mcscrd "sigs.k8s.io/mcs-api/config/crd"
	mcsv1beta1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/crds"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

// fieldOwner is the field manager of what an administrator's commands write; the controllers have
// another one, so neither takes fields from the other.
const fieldOwner = client.FieldOwner("isthmusctl")

// settle bounds every wait for a server to act on what was written.
const settle = 20 * time.Second

// NewScheme returns the kinds that clients given to this package must know.
func NewScheme() (*runtime.Scheme, error) {
	s := runtime.NewScheme()
	err := errors.Join(clientgoscheme.AddToScheme(s), apiextensionsv1.AddToScheme(s),
		v1alpha1.AddToScheme(s), mcsv1beta1.Install(s))
	if err != nil {
		return nil, fmt.Errorf("register API kinds: %w", err)
	}
	return s, nil
}

// apply makes the fields set in obj so, and leaves all others alone.
func apply(ctx context.Context, c client.Client, obj client.Object) error {
	gvk, err := apiutil.GVKForObject(obj, c.Scheme())
	if err != nil {
		return err
	}
	what := fmt.Sprintf("%s %s", gvk.Kind, client.ObjectKeyFromObject(obj))
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(obj)
	if err != nil {
		return fmt.Errorf("encode %s: %w", what, err)
	}
	u := &unstructured.Unstructured{Object: fields}
	u.SetGroupVersionKind(gvk)
	unstructured.RemoveNestedField(u.Object, "status")
	unstructured.RemoveNestedField(u.Object, "metadata", "creationTimestamp")
	if err := c.Apply(ctx, client.ApplyConfigurationFromUnstructured(u), fieldOwner, client.ForceOwnership); err != nil {
		return fmt.Errorf("write %s: %w", what, err)
	}
	return nil
}

// applyCRDs installs the definitions that Isthmus needs and waits until they are served. One that is
// newer than ours stays: its schema knows more than we do.
func applyCRDs(ctx context.Context, c client.Client) error {
	all, err := crds.All()
	if err != nil {
		return err
	}
	for _, crd := range all {
		have := &apiextensionsv1.CustomResourceDefinition{}
		err := c.Get(ctx, client.ObjectKeyFromObject(crd), have)
		switch {
		case apierrors.IsNotFound(err):
		case err != nil:
			return fmt.Errorf("read CustomResourceDefinition %s: %w", crd.Name, err)
		case newer(have, crd):
			continue
		}
		if err := apply(ctx, c, crd); err != nil {
			return err
		}
	}
	for _, crd := range all {
		err := await(ctx, fmt.Sprintf("the API server serves no %s; look at the conditions of CustomResourceDefinition %s", crd.Spec.Names.Plural, crd.Name),
			func() (bool, error) {
				if err := c.Get(ctx, client.ObjectKeyFromObject(crd), crd); err != nil {
					return false, fmt.Errorf("read CustomResourceDefinition %s: %w", crd.Name, err)
				}
				for _, cond := range crd.Status.Conditions {
					if cond.Type == apiextensionsv1.Established && cond.Status == apiextensionsv1.ConditionTrue {
						return true, nil
					}
				}
				return false, nil
			})
		if err != nil {
			return err
		}
	}
	return nil
}

// newer reports whether have is of a later release, or a later schema, than ours, by the labels that
// the MCS API puts on its definitions. Without labels it is not.
func newer(have, ours *apiextensionsv1.CustomResourceDefinition) bool {
	theirRelease, err1 := version.ParseSemantic(have.Labels[mcscrd.ReleaseVersionLabel])
	ourRelease, err2 := version.ParseSemantic(ours.Labels[mcscrd.ReleaseVersionLabel])
	if err1 == nil && err2 == nil && !theirRelease.EqualTo(ourRelease) {
		return theirRelease.GreaterThan(ourRelease)
	}
	theirSchema, err1 := strconv.Atoi(have.Labels[mcscrd.CustomResourceDefinitionSchemaRevisionLabel])
	ourSchema, err2 := strconv.Atoi(ours.Labels[mcscrd.CustomResourceDefinitionSchemaRevisionLabel])
	return err1 == nil && err2 == nil && theirSchema > ourSchema
}

// await asks done until it says so, fails, or settle is over; then overdue is the error.
func await(ctx context.Context, overdue string, done func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, settle)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		if ok, err := done(); ok || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: %w", overdue, ctx.Err())
		case <-tick.C:
		}
	}
}
