package reconciletest_test

import (
	"context"
	"errors"
	"os"
	"testing"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile/reconciletest"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
	"github.com/isthmus-net/isthmus/tools/apitest"
)

var a, b apitest.Server

func TestMain(m *testing.M) {
	ctrllog.SetLogger(logr.Discard())
	os.Exit(apitest.Run(m, &a, &b))
}

// label is on the ConfigMaps that copier copies.
const label = "copied"

// copier is a Reconciler that copies labelled ConfigMaps to where they are not.
type copier struct{}

func (copier) Name() string { return "copier" }

func (copier) Watches() []reconcile.Watch {
	widget := &metav1.PartialObjectMetadata{}
	widget.SetGroupVersionKind(schema.GroupVersionKind{Group: "example.org", Version: "v1", Kind: "Widget"})
	none := func(reconcile.Member, client.Object) []reconcile.Key { return nil }
	return []reconcile.Watch{
		{
			Kind: objectcache.Kind{Source: objectcache.Source{
				Object: &corev1.ConfigMap{},
				Keep:   func(o client.Object) bool { _, ok := o.GetLabels()[label]; return ok },
			}, IndexLabel: label},
			Counted: func(o client.Object) bool { return o.GetLabels()[label] == "yes" },
			Keys: func(_ reconcile.Member, o client.Object) []reconcile.Key {
				return []reconcile.Key{{Namespace: o.GetNamespace(), Name: o.GetName()}}
			},
		},
		{Kind: objectcache.Kind{Source: objectcache.Source{Object: widget, Optional: true}}, Keys: none},
	}
}

func (copier) Reconcile(ctx context.Context, key reconcile.Key, into reconcile.Writer, all []reconcile.Member) error {
	name := client.ObjectKey{Namespace: key.Namespace, Name: key.Name}
	for _, m := range all {
		found := &corev1.ConfigMap{}
		err := m.Get(ctx, name, found)
		if m.ID() == into.ID() || apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return err
		}
		have := &corev1.ConfigMap{}
		if err := into.Get(ctx, name, have); !apierrors.IsNotFound(err) {
			return err
		}
		into.Event(found, corev1.EventTypeNormal, "Copied", "copied to another member")
		return into.Create(ctx, &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name, Labels: found.Labels}, Data: found.Data,
		})
	}
	return nil
}

func TestReconcilerSeesAllMembers(t *testing.T) {
	ctx := t.Context()
	scheme := runtime.NewScheme()
	if err := corev1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	f := reconciletest.New(t, scheme, copier{}, map[clusterset.ClusterID]*rest.Config{"b": b.Config(t), "a": a.Config(t)})
	here, there := f.Member("a"), f.Member("b")
	if err := here.List(ctx, &corev1.ConfigMapList{}); !errors.Is(err, objectcache.ErrNotSynced) || here.Synced() {
		t.Fatalf("a read before the first sync: %v", err)
	}
	for name, labels := range map[string]map[string]string{"kept": {label: "yes"}, "dropped": nil} {
		cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Labels: labels}, Data: map[string]string{"k": "v"}}
		if err := here.Client().Create(ctx, cm); err != nil {
			t.Fatal(err)
		}
	}
	there.Silence()
	if err := f.Reconcile(ctx); !errors.Is(err, objectcache.ErrNotSynced) {
		t.Fatalf("b was never synced: %v", err)
	}
	there.Back()
	for range 2 { // the second call finds the copy
		if err := f.Reconcile(ctx); err != nil {
			t.Fatal(err)
		}
	}
	var copies corev1.ConfigMapList
	if err := there.List(ctx, &copies, client.InNamespace("default")); err != nil {
		t.Fatal(err)
	}
	if len(copies.Items) != 1 || copies.Items[0].Data["k"] != "v" || copies.Items[0].Annotations[federationv1alpha1.AnnotationEpoch] != "1" {
		t.Errorf("copies in b: %+v", copies.Items)
	}
	var labeled corev1.ConfigMapList
	if err := there.List(ctx, &labeled, client.MatchingLabels{label: "yes"}); err != nil || len(labeled.Items) != 1 || f.Count("b") != 1 {
		t.Errorf("%d copies are found by their label, and %d counted, want 1: %v", len(labeled.Items), f.Count("b"), err)
	}
	if events := there.Events(); len(events) != 1 {
		t.Errorf("events: %q, want one", events)
	}
	widgets := &metav1.PartialObjectMetadataList{}
	widgets.SetGroupVersionKind(schema.GroupVersionKind{Group: "example.org", Version: "v1", Kind: "WidgetList"})
	if err := there.List(ctx, widgets); !errors.Is(err, objectcache.ErrKindMissing) {
		t.Errorf("a read of a kind that no member has: %v", err)
	}
}

// A write that depends on what was read is refused when the object has changed since.
func TestStaleWritesAreRefused(t *testing.T) {
	ctx := t.Context()
	scheme := runtime.NewScheme()
	if err := corev1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	m := reconciletest.New(t, scheme, copier{}, map[clusterset.ClusterID]*rest.Config{"a": a.Config(t)}).Member("a")
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "late", Labels: map[string]string{label: "yes"}}}
	if err := m.Lead(1).Create(ctx, cm); err != nil {
		t.Fatal(err)
	}
	read := cm.DeepCopy()
	if err := m.Lead(2).Annotate(ctx, cm, map[string]string{"example.org/changed": "yes"}); err != nil {
		t.Fatal(err)
	}
	if err := m.Lead(1).Delete(ctx, read); !apierrors.IsConflict(err) {
		t.Errorf("delete of a changed object: %v, want a conflict", err)
	}
	if err := m.Lead(2).Annotate(ctx, read, map[string]string{"example.org/changed": "again"}); !apierrors.IsConflict(err) {
		t.Errorf("annotation of a changed object: %v, want a conflict", err)
	}
	if err := m.Client().Get(ctx, client.ObjectKeyFromObject(cm), read); err != nil || read.Annotations[federationv1alpha1.AnnotationEpoch] != "2" {
		t.Fatalf("read: %v, %v", read.Annotations, err)
	}
	if err := errors.Join(m.Lead(2).Delete(ctx, read), m.Lead(2).Delete(ctx, read)); err != nil {
		t.Errorf("delete twice: %v", err)
	}
}
