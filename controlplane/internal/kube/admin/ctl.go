// Package admin contains the operations that administrators' commands share: they write objects by server-side apply, delete
// only objects of Isthmus, update definitions ([PlanDefinitions]), read tokens ([Token]) and wait for the API server. All
// of them may be repeated.
package admin

import (
	"context"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

// FieldOwner is the field manager of isthmusctl. The controllers use another one, so that a command and a controller do
// not take over each other's fields.
const FieldOwner = client.FieldOwner("isthmusctl")

// Settle bounds every wait for the API server to act on a write.
const Settle = 20 * time.Second

// Ours returns a new map with the label that marks objects of Isthmus.
func Ours() map[string]string { return map[string]string{v1alpha1.LabelManagedBy: v1alpha1.ManagedBy} }

// IsAbsent reports whether err means that an object or its kind does not exist.
func IsAbsent(err error) bool { return meta.IsNoMatchError(err) || apierrors.IsNotFound(err) }

// Apply writes the fields that are set in obj, and no others. It does not change obj.
func Apply(ctx context.Context, c client.Client, obj client.Object) error {
	return applyAs(ctx, c, obj, FieldOwner)
}

// applyAs is Apply with another field manager.
func applyAs(ctx context.Context, c client.Client, obj client.Object, owner client.FieldOwner) error {
	u, err := fieldsOf(c, obj)
	if err != nil {
		return err
	}
	if err := c.Apply(ctx, client.ApplyConfigurationFromUnstructured(u), owner, client.ForceOwnership); err != nil {
		return fmt.Errorf("write %s %s: %w", u.GetKind(), client.ObjectKeyFromObject(obj), err)
	}
	return nil
}

// DeleteIfThere deletes obj. It succeeds if the object or its kind does not exist.
func DeleteIfThere(ctx context.Context, c client.Client, obj client.Object, opts ...client.DeleteOption) error {
	if err := c.Delete(ctx, obj, opts...); err != nil && !IsAbsent(err) {
		return fmt.Errorf("delete %s %s: %w", kindOf(c, obj), client.ObjectKeyFromObject(obj), err)
	}
	return nil
}

// DeleteOwn deletes the object that obj names if it has Isthmus' label. It keeps any other object and succeeds.
func DeleteOwn(ctx context.Context, c client.Client, obj client.Object) error {
	err := c.Get(ctx, client.ObjectKeyFromObject(obj), obj)
	switch {
	case err != nil && IsAbsent(err):
		return nil
	case err != nil:
		return fmt.Errorf("read %s %s: %w", kindOf(c, obj), client.ObjectKeyFromObject(obj), err)
	case obj.GetLabels()[v1alpha1.LabelManagedBy] != v1alpha1.ManagedBy:
		return nil
	}
	uid := obj.GetUID()
	return DeleteIfThere(ctx, c, obj, client.Preconditions{UID: &uid})
}

func kindOf(c client.Client, obj client.Object) string {
	gvk, err := apiutil.GVKForObject(obj, c.Scheme())
	if err != nil {
		return fmt.Sprintf("%T", obj)
	}
	return gvk.Kind
}

// Await polls done until it returns true or an error. After Settle it returns an error with the message overdue.
func Await(ctx context.Context, overdue string, done func() (bool, error)) error {
	return AwaitFor(ctx, Settle, overdue, done)
}

// AwaitFor is Await with limit instead of Settle.
func AwaitFor(ctx context.Context, limit time.Duration, overdue string, done func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
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
