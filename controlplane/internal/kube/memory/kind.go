package memory

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
)

// Kind is what is known of one kind. Its methods Add, Update, Delete, Replace, Resync and Transformer are those that a
// Reflector fills it by.
type Kind struct {
	gvk     schema.GroupVersionKind
	watch   reconcile.Watch
	objects *store
	changed func(was, is client.Object)
	settled func() // may be nil

	mu     sync.Mutex
	err    error // why nothing can be read: reconcile.ErrUnread at first
	denied bool  // the API server refused the last try for want of a right
	waived bool  // it is Alone, and was denied before it was ever read
	turn   bool  // it has a place of reading
}

// reading has as many places as kinds of all members may be read whole at a time: until it is packed, an object takes a multiple
// of what is kept of it.
var reading = make(chan struct{}, 4)

// longest is how long a kind waits for its turn: a member that answers slowly holds the others up no longer.
const longest = 5 * time.Second

// begin waits for the kind's turn to be read whole.
func (k *Kind) begin(ctx context.Context) {
	if k.hasTurn() {
		return
	}
	late := time.NewTimer(longest)
	defer late.Stop()
	select {
	case reading <- struct{}{}:
	case <-late.C:
		return
	case <-ctx.Done():
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if ctx.Err() != nil || k.turn { // whoever asked is gone, and would not end it
		<-reading
		return
	}
	k.turn = true
}

func (k *Kind) hasTurn() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.turn
}

// end gives the turn to another kind.
func (k *Kind) end() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.turn {
		k.turn = false
		<-reading
	}
}

func newKind(gvk schema.GroupVersionKind, w reconcile.Watch, changed func(was, is client.Object)) *Kind {
	return &Kind{gvk: gvk, watch: w, changed: changed, objects: newStore(w), err: fmt.Errorf("%s: %w", gvk.Kind, reconcile.ErrUnread)}
}

// check returns why the kind cannot be read, or nil.
func (k *Kind) check() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.err
}

// awaited reports whether nothing is to be done before the kind was read.
func (k *Kind) awaited() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return errors.Is(k.err, reconcile.ErrUnread) && !k.waived
}

// Load reads the kind behind c once. That an optional kind is missing is noted, and no error.
func (k *Kind) Load(ctx context.Context, c client.Reader, scheme *runtime.Scheme) error {
	list := k.newList(scheme)
	if err := c.List(ctx, list, k.options(nil)); err != nil {
		return k.explain(err)
	}
	var objects []any
	err := meta.EachListItem(list, func(o runtime.Object) error {
		objects = append(objects, o)
		return nil
	})
	if err != nil {
		return err
	}
	return k.Replace(objects, list.GetResourceVersion())
}

// Denied reports whether the API server refused to let the kind be read when it was asked last. What was read before
// counts on.
func (k *Kind) Denied() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.denied
}

// explain notes that an optional kind is missing and returns nil, and any other error with the kind's name. It notes
// that a right is missing.
func (k *Kind) explain(err error) error {
	k.mu.Lock()
	k.denied = apierrors.IsForbidden(err)
	news := k.denied && k.watch.Alone && !k.waived && errors.Is(k.err, reconcile.ErrUnread)
	k.waived = k.waived || news
	k.mu.Unlock()
	if news && k.settled != nil {
		k.settled()
	}
	if k.watch.Optional && (meta.IsNoMatchError(err) || apierrors.IsNotFound(err)) {
		k.settle(fmt.Errorf("%s: %w", k.gvk, reconcile.ErrKindMissing))
		return nil
	}
	return fmt.Errorf("watch %s: %w", k.gvk.Kind, err)
}

// retry is how a Reflector waits between tries while an API server is away.
var retry = wait.Backoff{Duration: 100 * time.Millisecond, Factor: 2, Jitter: 0.5, Steps: 10, Cap: 5 * time.Second}

// Follower returns a function that reads the kind behind c and watches it until something fails, which it returns, or
// until its ctx ends. Called again, it goes on where it was. That an optional kind is missing is noted, and no error.
func (k *Kind) Follower(c client.WithWatch) func(context.Context) error {
	var failed atomic.Pointer[error] // a Reflector asks from goroutines of its own
	note := func(err error) error {
		failed.Store(&err)
		return err
	}
	source := &toolscache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			list := k.newList(c.Scheme())
			k.begin(ctx)
			return list, note(c.List(ctx, list, k.options(&o)))
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			w, err := c.Watch(ctx, k.newList(c.Scheme()), k.options(&o))
			if err == nil && o.SendInitialEvents != nil && *o.SendInitialEvents {
				k.begin(ctx) // it answers; what it sends waits
			}
			return w, note(err)
		},
	}
	reflector := toolscache.NewReflectorWithOptions(source, k.watch.Object, k, toolscache.ReflectorOptions{Name: k.gvk.Kind, Backoff: &retry})
	return func(ctx context.Context) error {
		defer k.end()
		err := reflector.ListAndWatchWithContext(ctx)
		if last := failed.Load(); err == nil && last != nil {
			err = *last // which a Reflector may keep to itself
		}
		if err != nil && ctx.Err() == nil {
			return k.explain(err)
		}
		return nil
	}
}

// options are what the Watch asks for.
func (k *Kind) options(raw *metav1.ListOptions) client.ListOption {
	return &client.ListOptions{Raw: raw, Namespace: k.watch.Namespace, LabelSelector: k.watch.Selector}
}

// newList returns an empty list that is decoded to what the Watch asks for.
func (k *Kind) newList(scheme *runtime.Scheme) client.ObjectList {
	gvk := k.gvk
	gvk.Kind += "List"
	switch k.watch.Object.(type) {
	case *unstructured.Unstructured:
		list := &unstructured.UnstructuredList{}
		list.SetGroupVersionKind(gvk)
		return list
	case *metav1.PartialObjectMetadata:
		list := &metav1.PartialObjectMetadataList{}
		list.SetGroupVersionKind(gvk)
		return list
	}
	list, err := scheme.New(gvk)
	if err != nil {
		panic(err) // New found the kind in the same scheme, and every kind has a list
	}
	return list.(client.ObjectList) //nolint:forcetypeassert // as every list
}

// settle says why the kind cannot be read, nil if it can.
func (k *Kind) settle(err error) {
	k.mu.Lock()
	news := (err == nil) != (k.err == nil) || errors.Is(err, reconcile.ErrKindMissing) != errors.Is(k.err, reconcile.ErrKindMissing)
	k.err, k.denied = err, false
	k.mu.Unlock()
	if news && k.settled != nil {
		k.settled()
	}
}

// candidates returns at least what is in namespace and matches selector.
func (k *Kind) candidates(namespace string, selector labels.Selector) []any {
	if value, exact := selector.RequiresExactMatch(k.watch.IndexLabel); exact && k.watch.IndexLabel != "" {
		return k.objects.of(value)
	}
	return k.objects.in(namespace)
}

// local reports whether what is stored as v is Local, and returns it if that is not. What is packed is opened for it once at most.
func (k *Kind) local(v any) (local bool, o client.Object) {
	if told, tells := v.(interface{ Local() bool }); tells {
		local = told.Local()
	} else if k.watch.Local != nil {
		o = open(v)
		local = k.watch.Local(o)
	}
	if o == nil && !local {
		o = open(v)
	}
	return local, o
}

// dropped is what becomes of an object that the Watch does not keep.
type dropped struct{ metav1.ObjectMeta }

// arrived is an object of a list that is not complete, packed.
type arrived struct {
	reconcile.Packed

	namespace, name string
}

// GetObjectMeta tells a Reflector the object's name.
func (a *arrived) GetObjectMeta() metav1.Object {
	return &metav1.ObjectMeta{Namespace: a.namespace, Name: a.name}
}

// Transformer cuts objects down and packs them while they stream in, before a list is complete.
func (k *Kind) Transformer() toolscache.TransformFunc {
	return func(obj any) (any, error) {
		trimmed, err := k.trim(obj)
		if o, ok := trimmed.(client.Object); ok && err == nil {
			if packed, ok := k.objects.pack(o).(reconcile.Packed); ok {
				return &arrived{packed, o.GetNamespace(), o.GetName()}, nil
			}
		}
		return trimmed, err
	}
}

// trim returns what is kept of an object, or a dropped.
func (k *Kind) trim(obj any) (any, error) {
	o, ok := obj.(client.Object)
	if !ok {
		return obj, nil // already dropped, or packed
	}
	if k.watch.Keep != nil && !k.watch.Keep(o) {
		return &dropped{metav1.ObjectMeta{Namespace: o.GetNamespace(), Name: o.GetName(), ResourceVersion: o.GetResourceVersion()}}, nil
	}
	o.SetManagedFields(nil)
	if k.watch.Trim == nil {
		return o, nil
	}
	return k.watch.Trim(o)
}

// Add takes an object as it is now.
func (k *Kind) Add(obj any) error {
	if a, ok := obj.(*arrived); ok {
		k.add(a.Unpack(), a.Packed)
		return nil
	}
	trimmed, err := k.trim(obj)
	if err != nil {
		return err
	}
	o, keep := trimmed.(client.Object)
	if !keep {
		return k.Delete(trimmed)
	}
	k.add(o, k.objects.pack(o))
	return nil
}

// add takes a trimmed object, which is kept as v.
func (k *Kind) add(o client.Object, v any) {
	was := k.known(o.GetNamespace(), o.GetName())
	if was != nil && was.GetUID() == o.GetUID() && was.GetResourceVersion() == o.GetResourceVersion() {
		return
	}
	k.objects.put(o, v)
	k.changed(was, o)
}

// Update is Add.
func (k *Kind) Update(obj any) error { return k.Add(obj) }

// Delete forgets an object.
func (k *Kind) Delete(obj any) error {
	o, err := meta.Accessor(obj)
	if err != nil {
		return err
	}
	k.forget(o.GetNamespace(), o.GetName())
	return nil
}

// Replace takes a whole list. What is not in it has gone while nobody looked.
func (k *Kind) Replace(list []any, _ string) error {
	defer k.end()
	listed := make(map[types.NamespacedName]bool, len(list))
	for _, obj := range list {
		o, err := meta.Accessor(obj)
		if err != nil {
			return err
		}
		listed[types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()}] = true
		if err := k.Add(obj); err != nil {
			return err
		}
	}
	k.settle(nil)
	for _, name := range k.objects.names() {
		if !listed[name] {
			k.forget(name.Namespace, name.Name)
		}
	}
	return nil
}

// Resync does nothing: nothing of what is known gets old.
func (k *Kind) Resync() error { return nil }

// known returns what is known of an object, nil for nothing.
func (k *Kind) known(namespace, name string) client.Object {
	v := k.objects.get(namespace, name)
	if v == nil {
		return nil
	}
	return open(v)
}

// forget takes an object as gone.
func (k *Kind) forget(namespace, name string) {
	was := k.known(namespace, name)
	if was == nil {
		return
	}
	k.objects.remove(namespace, name)
	k.changed(was, nil)
}
