package memory

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
)

// As many kinds as there are places are read whole at a time. One that was waited for long enough holds nobody up.
func TestKindsTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		outside := reading
		reading = make(chan struct{}, 2)
		defer func() { reading = outside }()
		var kinds []*Kind
		for range 4 {
			kinds = append(kinds, newKind(corev1.SchemeGroupVersion.WithKind("Service"), reconcile.Watch{Object: &corev1.Service{}}, nil))
		}
		took := func(ctx context.Context, k *Kind) time.Duration {
			begin := time.Now()
			k.begin(ctx)
			return time.Since(begin)
		}
		for _, k := range []*Kind{kinds[0], kinds[1], kinds[1]} {
			if d := took(t.Context(), k); d != 0 || !k.hasTurn() {
				t.Fatalf("with a place free, or as one that has one, a kind waits %v", d)
			}
		}
		go func() {
			<-time.After(time.Second)
			_ = kinds[0].Replace(nil, "")
		}()
		if d := took(t.Context(), kinds[2]); d != time.Second || !kinds[2].hasTurn() {
			t.Errorf("a kind waits %v until another one was read, want 1s", d)
		}
		if d := took(t.Context(), kinds[3]); d != longest || kinds[3].hasTurn() {
			t.Errorf("a kind waits %v for others that are never read, want %v, and no place", d, longest)
		}
		gone, cancel := context.WithCancel(t.Context())
		cancel()
		kinds[1].end()
		for range 20 {
			if took(gone, kinds[3]); kinds[3].hasTurn() {
				t.Fatal("whoever is gone has a place")
			}
		}
		kinds[2].end()
		kinds[3].end()
		if n := len(reading); n != 0 {
			t.Errorf("%d places are taken in the end", n)
		}
	})
}

// What a Reflector keeps of a list until it is complete is packed, under its name, and is found afterwards.
func TestListsArePacked(t *testing.T) {
	t.Parallel()
	var changes []string
	k := newKind(corev1.SchemeGroupVersion.WithKind("ConfigMap"), reconcile.Watch{
		Object: &corev1.ConfigMap{},
		Keep:   func(o client.Object) bool { return o.GetName() != "unwanted" },
		Trim: func(o any) (any, error) {
			o.(*corev1.ConfigMap).Annotations = nil
			return o, nil
		},
		Pack: func(o client.Object) reconcile.Packed { return &packed{o.(*corev1.ConfigMap).ObjectMeta} },
	}, func(was, is client.Object) { changes = append(changes, fmt.Sprintf("%v to %v", was != nil, is != nil)) })
	list := func(names ...string) []any {
		t.Helper()
		incomplete := toolscache.NewStore(toolscache.DeletionHandlingMetaNamespaceKeyFunc, toolscache.WithTransformer(k.Transformer()))
		for _, name := range names {
			o := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "demo", Name: name, ResourceVersion: "1", Annotations: map[string]string{"long": "text"}}}
			if err := errors.Join(incomplete.Add(o), incomplete.Update(o)); err != nil {
				t.Fatal(err)
			}
		}
		if n := len(incomplete.ListKeys()); n != len(names) {
			t.Fatalf("%d of %d objects have a name of their own: %v", n, len(names), incomplete.ListKeys())
		}
		return incomplete.List()
	}
	first := list("one", "two", "unwanted")
	for _, obj := range first {
		if o, whole := obj.(client.Object); whole {
			t.Errorf("%s waits as a whole", o.GetName())
		}
	}
	for _, l := range [][]any{first, list("two", "unwanted")} {
		if err := k.Replace(l, "1"); err != nil {
			t.Fatal(err)
		}
	}
	if o := k.known("demo", "two"); o == nil || len(o.GetAnnotations()) > 0 || k.known("demo", "one") != nil || k.known("demo", "unwanted") != nil {
		t.Errorf("left are %v, of them %v", k.objects.names(), o)
	}
	if want := []string{"false to true", "false to true", "true to false"}; !slices.Equal(changes, want) {
		t.Errorf("told were %v, want %v", changes, want)
	}
}
