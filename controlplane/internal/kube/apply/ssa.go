// Package apply writes typed objects by server-side apply: a request contains the wanted fields, and the API server removes
// those that Isthmus wrote before and keeps those of other writers. One request creates or updates.
package apply

import (
	"context"
	"encoding/json"
	"maps"
	"reflect"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

// Apply writes the fields of obj on the server behind c under Isthmus' field owner, and takes them from other owners. It
// omits fields with a zero value. Afterwards obj is the stored object.
func Apply(ctx context.Context, c client.Client, obj client.Object) error {
	config, err := configuration(c, obj)
	if err != nil {
		return err
	}
	return c.Apply(ctx, config, client.FieldOwner(v1alpha1.FieldOwner), client.ForceOwnership)
}

// Status is Apply for the status of obj, which must exist.
func Status(ctx context.Context, c client.Client, obj client.Object) error {
	config, err := configuration(c, obj)
	if err != nil {
		return err
	}
	return c.Status().Apply(ctx, config, client.FieldOwner(v1alpha1.FieldOwner), client.ForceOwnership)
}

// typed wraps an object as an apply configuration, which must not be an object itself.
type typed struct{ obj client.Object }

func configuration(c client.Client, obj client.Object) (*typed, error) {
	gvk, err := apiutil.GVKForObject(obj, c.Scheme())
	if err != nil {
		return nil, err
	}
	obj.GetObjectKind().SetGroupVersionKind(gvk)
	obj.SetManagedFields(nil)
	return &typed{obj}, nil
}

func (*typed) IsApplyConfiguration() {}

func (t *typed) GetName() *string      { return new(t.obj.GetName()) }
func (t *typed) GetNamespace() *string { return new(t.obj.GetNamespace()) }
func (t *typed) GetKind() *string      { return new(t.obj.GetObjectKind().GroupVersionKind().Kind) }
func (t *typed) GetAPIVersion() *string {
	return new(t.obj.GetObjectKind().GroupVersionKind().GroupVersion().String())
}

func (t *typed) MarshalJSON() ([]byte, error) { return json.Marshal(t.obj) }

func (t *typed) UnmarshalJSON(text []byte) error { return json.Unmarshal(text, t.obj) }

// Create creates obj, which belongs to Isthmus as a whole. For built-in kinds that is less than half the work of Own for the
// server (docs/performance.md). If an object of the name exists although the caller's cache lacks it, Create writes it as Own
// does, unless check returns an error for it. A nil check accepts every object.
func Create(ctx context.Context, c client.Client, obj client.Object, check func(existing client.Object) error, keep ...string) error {
	err := c.Create(ctx, obj, client.FieldOwner(v1alpha1.FieldOwner))
	if !apierrors.IsAlreadyExists(err) {
		return err
	}
	if check != nil {
		existing := reflect.New(reflect.TypeOf(obj).Elem()).Interface().(client.Object) //nolint:forcetypeassert // of the type of obj
		if err := c.Get(ctx, client.ObjectKeyFromObject(obj), existing); err != nil {
			return err
		}
		if err := check(existing); err != nil {
			return err
		}
	}
	obj.SetResourceVersion("")
	return Own(ctx, c, obj, keep...)
}

// Own is Apply for an object that belongs to Isthmus as a whole: it also removes labels, annotations and owners of other
// writers, and former ones of Create. It keeps the labels and annotations that keep names.
func Own(ctx context.Context, c client.Client, obj client.Object, keep ...string) error {
	labels, annotations, owners := maps.Clone(obj.GetLabels()), maps.Clone(obj.GetAnnotations()), slices.Clone(obj.GetOwnerReferences())
	if err := Apply(ctx, c, obj); err != nil {
		return err
	}
	extra := map[string]any{}
	if gone := foreign(obj.GetLabels(), labels, keep); gone != nil {
		extra["labels"] = gone
	}
	if gone := foreign(obj.GetAnnotations(), annotations, keep); gone != nil {
		extra["annotations"] = gone
	}
	if len(obj.GetOwnerReferences()) > len(owners) {
		extra["ownerReferences"] = owners
	}
	if len(extra) == 0 {
		return nil
	}
	patch, err := json.Marshal(map[string]any{"metadata": extra})
	if err != nil {
		return err
	}
	return c.Patch(ctx, obj, client.RawPatch(types.MergePatchType, patch), client.FieldOwner(v1alpha1.FieldOwner))
}

// foreign returns the part of a merge patch that removes the keys of have that are not in want.
func foreign(have, want map[string]string, keep []string) map[string]any {
	var gone map[string]any
	for k := range have {
		if _, ok := want[k]; ok || slices.Contains(keep, k) {
			continue
		}
		if gone == nil {
			gone = map[string]any{}
		}
		gone[k] = nil
	}
	return gone
}
