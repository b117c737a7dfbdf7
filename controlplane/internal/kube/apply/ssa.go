// Package apply writes typed objects by server-side apply: the API server is told the fields that we want, takes
// away those that we wanted before, and leaves everybody else's alone. One request creates or updates.
package apply

import (
	"context"
	"encoding/json"
	"maps"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

// Apply makes the fields of obj so on the server behind c, under our field owner and whoever else claims
// them. Fields with a zero value are not wanted. Afterwards obj is what the server stores.
func Apply(ctx context.Context, c client.Client, obj client.Object) error {
	config, err := configuration(c, obj)
	if err != nil {
		return err
	}
	return c.Apply(ctx, config, client.FieldOwner(v1alpha1.FieldOwner), client.ForceOwnership)
}

// ApplyStatus is Apply for the status of obj, which must exist.
func ApplyStatus(ctx context.Context, c client.Client, obj client.Object) error {
	config, err := configuration(c, obj)
	if err != nil {
		return err
	}
	return c.Status().Apply(ctx, config, client.FieldOwner(v1alpha1.FieldOwner), client.ForceOwnership)
}

// typed is an object as an apply configuration, which must not be an object itself.
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

// Create creates obj, which belongs to us as a whole and is not there as far as we know; if it is, it is written
// as by Own. For built-in kinds that is less than half the work for the server (docs/performance.md).
func Create(ctx context.Context, c client.Client, obj client.Object, keep ...string) error {
	err := c.Create(ctx, obj, client.FieldOwner(v1alpha1.FieldOwner))
	if apierrors.IsAlreadyExists(err) {
		obj.SetResourceVersion("")
		return Own(ctx, c, obj, keep...)
	}
	return err
}

// Own is Apply for an object that belongs to us as a whole: labels, annotations and owners that somebody else put on
// it go too, those labels and annotations apart that keep names. So do our own from before, which Create wrote.
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

// foreign returns what a merge patch has to say so that have loses the keys that want has not.
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
