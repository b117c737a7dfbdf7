package objectcache

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
)

// No more kinds are listed at the same time than there are slots. A kind that waited long enough goes ahead without one.
func TestListingSlots(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		outside := listings
		listings = make(chan struct{}, 2)
		defer func() { listings = outside }()
		var informers []*ObjectInformer
		for range 4 {
			i, err := New(newScheme(t), Config[any, string]{Source: Source{Object: &corev1.Service{}}})
			if err != nil {
				t.Fatal(err)
			}
			informers = append(informers, i)
		}
		took := func(ctx context.Context, i *ObjectInformer) time.Duration {
			begin := time.Now()
			i.status.acquire(ctx)
			return time.Since(begin)
		}
		for _, i := range []*ObjectInformer{informers[0], informers[1], informers[1]} {
			if d := took(t.Context(), i); d != 0 || !i.status.isListing() {
				t.Fatalf("with a free slot, or holding one, a kind waits %v", d)
			}
		}
		go func() {
			<-time.After(time.Second)
			_ = informers[0].Replace(nil, "")
		}()
		if d := took(t.Context(), informers[2]); d != time.Second || !informers[2].status.isListing() {
			t.Errorf("a kind waits %v until another one is listed, want 1s", d)
		}
		if d := took(t.Context(), informers[3]); d != listingWait || informers[3].status.isListing() {
			t.Errorf("a kind waits %v for others that are never listed, want %v, and no slot", d, listingWait)
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		informers[1].status.release()
		for range 20 {
			if took(ended, informers[3]); informers[3].status.isListing() {
				t.Fatal("a caller that has ended holds a slot")
			}
		}
		informers[2].status.release()
		informers[3].status.release()
		if n := len(listings); n != 0 {
			t.Errorf("%d slots are held in the end", n)
		}
	})
}

// A Reflector holds the objects of an incomplete list packed, under their names, and the Cache finds them afterwards.
func TestListsArePacked(t *testing.T) {
	t.Parallel()
	var changes []string
	c, err := NewCache(newScheme(t), []Kind{{
		Source: Source{
			Object: &corev1.ConfigMap{},
			Keep:   func(o client.Object) bool { return o.GetName() != "unwanted" },
			Trim: func(o any) (any, error) {
				o.(*corev1.ConfigMap).Annotations = nil
				return o, nil
			},
		},
		Pack: func(o client.Object) Packed { return &packed{o.(*corev1.ConfigMap).ObjectMeta} },
	}}, func(_ int, was, is client.Object, _ bool) {
		changes = append(changes, fmt.Sprintf("%v to %v", was != nil, is != nil))
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	i := c.Informers()[0]
	list := func(names ...string) []any {
		t.Helper()
		incomplete := toolscache.NewStore(toolscache.DeletionHandlingMetaNamespaceKeyFunc, toolscache.WithTransformer(i.Transformer()))
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
		a, ok := obj.(*arrival[any])
		if !ok {
			t.Fatalf("a %T waits in the list, want an arrival", obj)
		}
		if o, whole := a.item.(client.Object); whole {
			t.Errorf("%s waits unpacked", o.GetName())
		}
	}
	for _, l := range [][]any{first, list("two", "unwanted")} {
		if err := i.Replace(l, "1"); err != nil {
			t.Fatal(err)
		}
	}
	two, _ := i.Get("demo", "two").(Packed)
	if two == nil || len(two.Unpack().GetAnnotations()) > 0 || len(i.All()) != 1 {
		t.Errorf("%d are left, and two is %v", len(i.All()), two)
	}
	if want := []string{"false to true", "false to true", "true to false"}; !slices.Equal(changes, want) {
		t.Errorf("the reported changes are %v, want %v", changes, want)
	}
}
