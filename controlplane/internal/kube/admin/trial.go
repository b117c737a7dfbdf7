package admin

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
)

// Effect says what Apply would do with an object.
type Effect string

// All effects.
const (
	None    Effect = ""
	Creates Effect = "created"
	Changes Effect = "changed"
)

// Trial asks the API server what Apply would do with obj, and returns the object's kind and name besides. It writes nothing.
func Trial(ctx context.Context, c client.Client, obj client.Object) (name string, effect Effect, err error) {
	u, err := fieldsOf(c, obj)
	if err != nil {
		return "", None, err
	}
	name = u.GetKind() + " " + client.ObjectKeyFromObject(obj).String()
	if obj.GetNamespace() == "" {
		name = u.GetKind() + " " + obj.GetName()
	}
	have := &unstructured.Unstructured{}
	have.SetGroupVersionKind(u.GroupVersionKind())
	err = c.Get(ctx, client.ObjectKeyFromObject(obj), have)
	if IsAbsent(err) {
		return name, Creates, nil
	}
	if err != nil {
		return name, None, fmt.Errorf("read %s: %w", name, err)
	}
	if err := c.Apply(ctx, client.ApplyConfigurationFromUnstructured(u), FieldOwner, client.ForceOwnership, client.DryRunAll); err != nil {
		return name, None, fmt.Errorf("try to write %s: %w", name, err)
	}
	for _, o := range []*unstructured.Unstructured{have, u} {
		o.SetManagedFields(nil)
		o.SetResourceVersion("")
		o.SetGeneration(0)
	}
	if equality.Semantic.DeepEqual(have.Object, u.Object) {
		return name, None, nil
	}
	return name, Changes, nil
}

// fieldsOf returns the fields of obj that Apply writes.
func fieldsOf(c client.Client, obj client.Object) (*unstructured.Unstructured, error) {
	gvk, err := apiutil.GVKForObject(obj, c.Scheme())
	if err != nil {
		return nil, err
	}
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(obj)
	if err != nil {
		return nil, fmt.Errorf("encode %s %s: %w", gvk.Kind, client.ObjectKeyFromObject(obj), err)
	}
	u := &unstructured.Unstructured{Object: fields}
	u.SetGroupVersionKind(gvk)
	unstructured.RemoveNestedField(u.Object, "status")
	unstructured.RemoveNestedField(u.Object, "metadata", "creationTimestamp")
	return u, nil
}
