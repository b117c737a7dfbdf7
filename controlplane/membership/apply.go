package membership

import (
	"context"
	"errors"
	"fmt"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
	mcsv1beta1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/about"
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
		v1alpha1.AddToScheme(s), about.AddToScheme(s), mcsv1beta1.Install(s))
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

// deleteIfThere deletes obj. That there is no such object, or no such kind, is no error.
func deleteIfThere(ctx context.Context, c client.Client, obj client.Object, opts ...client.DeleteOption) error {
	if err := c.Delete(ctx, obj, opts...); err != nil && !isAbsent(err) {
		return fmt.Errorf("delete %s %s: %w", kindOf(c, obj), client.ObjectKeyFromObject(obj), err)
	}
	return nil
}

// deleteOwn deletes the object that obj names if it carries our label. Anybody else's stays, which is no error.
func deleteOwn(ctx context.Context, c client.Client, obj client.Object) error {
	err := c.Get(ctx, client.ObjectKeyFromObject(obj), obj)
	switch {
	case err != nil && isAbsent(err):
		return nil
	case err != nil:
		return fmt.Errorf("read %s %s: %w", kindOf(c, obj), client.ObjectKeyFromObject(obj), err)
	case obj.GetLabels()[v1alpha1.LabelManagedBy] != v1alpha1.ManagedBy:
		return nil
	}
	uid := obj.GetUID()
	return deleteIfThere(ctx, c, obj, client.Preconditions{UID: &uid})
}

func kindOf(c client.Client, obj client.Object) string {
	gvk, err := apiutil.GVKForObject(obj, c.Scheme())
	if err != nil {
		return fmt.Sprintf("%T", obj)
	}
	return gvk.Kind
}

// await asks done until it says so, fails, or settle is over; then overdue is the error.
func await(ctx context.Context, overdue string, done func() (bool, error)) error {
	return awaitFor(ctx, settle, overdue, done)
}

// awaitFor is await with another limit.
func awaitFor(ctx context.Context, limit time.Duration, overdue string, done func() (bool, error)) error {
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
