// Package objectcache keeps the objects of an API server in memory, cut down on arrival to what the caller needs.
//
// For example, a member of a ClusterSet reads 10,000 EndpointSlices of its broker. An [Informer] turns each into a compact
// item while it streams in, so that the cache takes a tenth of the memory that the objects would. A [Cache] joins the
// Informers of several kinds into a client.Reader, which unpacks the objects that are read.
//
// A cache outlives the silence of its API server: only the server's next answer replaces what it holds.
package objectcache

import (
	"errors"
	"fmt"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
)

var (
	// ErrNotSynced is returned by reads of a kind that was never read completely. Its objects are unknown.
	ErrNotSynced = errors.New("not read completely yet")
	// ErrKindMissing is returned by reads and writes of an optional kind that the API server does not have.
	ErrKindMissing = errors.New("the API server does not have the kind")
)

// Source selects the objects that an Informer reads.
type Source struct {
	// Object names the kind. It is typed, unstructured.Unstructured or metav1.PartialObjectMetadata; the latter two have
	// their kind set.
	Object client.Object
	// Namespace, if not empty, is the only namespace that is read, so that rights in it suffice.
	Namespace string
	// Selector selects objects by their labels; nil selects all.
	Selector labels.Selector
	// Optional accepts an API server without the kind: reads then return ErrKindMissing.
	Optional bool
	// SkipIfForbidden stops Pending from waiting for a kind that the API server denied before it was ever read. Reads of
	// it fail with ErrNotSynced.
	SkipIfForbidden bool
	// Keep, if not nil, reports whether an object is kept. It is called before Trim.
	Keep func(client.Object) bool
	// Trim, if not nil, returns the object without the fields that the caller does not need. Managed fields are removed
	// before, unless ManagedFields is set.
	Trim toolscache.TransformFunc
	// ManagedFields keeps the managed fields, for a caller that needs the size of an object.
	ManagedFields bool
}

// Config describes an Informer of items of type T that are found by an index of type K.
type Config[T, K comparable] struct {
	Source

	// Compact returns the item that represents an object. The object is not used afterwards, and the item is never
	// changed.
	Compact func(client.Object) T
	// Index, if not nil, returns the index of an item, and false for an item that has none.
	Index func(T) (K, bool)
	// Before and After, if not nil, are called with each change before and after readers see it, by one goroutine and in
	// order. An old or new item that does not exist is the zero T. listed is true for differences that a list showed, whose
	// moment is unknown.
	Before, After func(was, is T, listed bool)
	// Settled, if not nil, is called when the kind becomes readable, is found missing, or is skipped.
	Settled func()
}

// Informer holds one item for each object of a kind. The zero T stands for no item. Safe for concurrent use; a Reflector
// fills it through Add, Update, Delete, Replace, Resync and Transformer.
type Informer[T, K comparable] struct {
	cfg    Config[T, K]
	gvk    schema.GroupVersionKind
	status status
	synced chan struct{}
	once   sync.Once

	mu     sync.RWMutex
	store  store[T, K]
	latest string
}

// New returns an Informer that is empty until it follows an API server. The scheme knows the kind and its list.
func New[T, K comparable](scheme *runtime.Scheme, cfg Config[T, K]) (*Informer[T, K], error) {
	gvk, err := apiutil.GVKForObject(cfg.Object, scheme)
	if err != nil {
		return nil, fmt.Errorf("watch %T: %w", cfg.Object, err)
	}
	ignore := func(_, _ T, _ bool) {}
	if cfg.Before == nil {
		cfg.Before = ignore
	}
	if cfg.After == nil {
		cfg.After = ignore
	}
	if cfg.Settled == nil {
		cfg.Settled = func() {}
	}
	if cfg.Index == nil {
		cfg.Index = func(T) (none K, ok bool) { return none, false }
	}
	return &Informer[T, K]{
		cfg: cfg, gvk: gvk, synced: make(chan struct{}), store: newStore(cfg.Index),
		status: status{err: fmt.Errorf("%s: %w", gvk.Kind, ErrNotSynced)},
	}, nil
}

// Either returns the item that exists, the new one if both do.
func Either[T comparable](was, is T) T {
	var none T
	if is != none {
		return is
	}
	return was
}

// Get returns the item of an object.
func (i *Informer[T, K]) Get(namespace, name string) T {
	i.mu.RLock()
	defer i.mu.RUnlock()
	return i.store.get(namespace, name)
}

// Swap replaces the item of an object by another one that represents the same version of it, such as a smaller one, and
// reports whether the object still had the former item. It calls neither Before nor After.
func (i *Informer[T, K]) Swap(namespace, name string, was, is T) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.store.get(namespace, name) != was {
		return false
	}
	i.store.put(namespace, name, is)
	return true
}

// Indexed returns the items with an index, in no order. The caller owns the result.
func (i *Informer[T, K]) Indexed(key K) []T {
	i.mu.RLock()
	defer i.mu.RUnlock()
	return i.store.indexed(key)
}

// In returns the items of a namespace, "" for all, in no order. The caller owns the result.
func (i *Informer[T, K]) In(namespace string) []T {
	i.mu.RLock()
	defer i.mu.RUnlock()
	return i.store.in(namespace)
}

// All returns all items, in no order. The caller owns the result.
func (i *Informer[T, K]) All() []T { return i.In("") }

// Latest returns the resource version up to which the Informer has seen all changes, "" before its first list.
func (i *Informer[T, K]) Latest() string {
	i.mu.RLock()
	defer i.mu.RUnlock()
	return i.latest
}

// arrival is an object on its way from the API server, already compacted. It has a name, by which a Reflector files it
// while a list is incomplete.
type arrival[T any] struct {
	name    types.NamespacedName
	version string
	item    T // the zero T for an object that Keep drops
}

// GetObjectMeta is part of metav1.ObjectMetaAccessor.
func (a *arrival[T]) GetObjectMeta() metav1.Object {
	return &metav1.ObjectMeta{Namespace: a.name.Namespace, Name: a.name.Name, ResourceVersion: a.version}
}

// Transformer compacts objects while they stream in, before a list is complete.
func (i *Informer[T, K]) Transformer() toolscache.TransformFunc {
	return func(obj any) (any, error) { return i.arrive(obj) }
}

// arrive returns the arrival of an object. It returns an arrival as it is.
func (i *Informer[T, K]) arrive(obj any) (*arrival[T], error) {
	if a, ok := obj.(*arrival[T]); ok {
		return a, nil
	}
	o, ok := obj.(client.Object)
	if !ok {
		return nil, fmt.Errorf("watch %s: %T is not an object", i.gvk.Kind, obj)
	}
	if i.cfg.Keep != nil && !i.cfg.Keep(o) {
		return &arrival[T]{name: client.ObjectKeyFromObject(o), version: strings.Clone(o.GetResourceVersion())}, nil
	}
	if !i.cfg.ManagedFields {
		o.SetManagedFields(nil)
	}
	if i.cfg.Trim != nil {
		trimmed, err := i.cfg.Trim(o)
		if err != nil {
			return nil, err
		}
		if o, ok = trimmed.(client.Object); !ok {
			return nil, fmt.Errorf("watch %s: trimmed to %T, which is not an object", i.gvk.Kind, trimmed)
		}
	}
	return &arrival[T]{client.ObjectKeyFromObject(o), strings.Clone(o.GetResourceVersion()), i.cfg.Compact(o)}, nil
}

// Add takes the current state of an object.
func (i *Informer[T, K]) Add(obj any) error {
	a, err := i.arrive(obj)
	if err != nil {
		return err
	}
	i.put(a.name, a.item, a.version, false)
	return nil
}

// Update is Add.
func (i *Informer[T, K]) Update(obj any) error { return i.Add(obj) }

// Delete removes an object from the cache.
func (i *Informer[T, K]) Delete(obj any) error {
	o, err := meta.Accessor(obj)
	if err != nil {
		return err
	}
	var none T
	i.put(types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()}, none, strings.Clone(o.GetResourceVersion()), false)
	return nil
}

// Replace takes a complete list. Objects that are not in it were deleted while the Informer was not watching.
func (i *Informer[T, K]) Replace(list []any, version string) error {
	defer i.status.release()
	listed := make(map[types.NamespacedName]bool, len(list))
	for _, obj := range list {
		a, err := i.arrive(obj)
		if err != nil {
			return err
		}
		listed[a.name] = true
		i.put(a.name, a.item, i.latest, true)
	}
	i.settle(nil)
	i.mu.RLock()
	deleted := i.store.names(func(name types.NamespacedName) bool { return !listed[name] })
	i.mu.RUnlock()
	var none T
	for _, name := range deleted {
		i.put(name, none, i.latest, true)
	}
	i.mu.Lock()
	i.latest = version
	i.mu.Unlock()
	i.once.Do(func() { close(i.synced) })
	return nil
}

// Resync does nothing: items do not age.
func (i *Informer[T, K]) Resync() error { return nil }

// put makes is the item of an object and reports the change. version is the resource version of the change.
func (i *Informer[T, K]) put(name types.NamespacedName, is T, version string, listed bool) {
	var none T
	was := i.Get(name.Namespace, name.Name)
	if was == none && is == none {
		return
	}
	i.cfg.Before(was, is, listed)
	i.mu.Lock()
	i.latest = version
	if is == none {
		i.store.remove(name.Namespace, name.Name)
	} else {
		i.store.put(name.Namespace, name.Name, is)
	}
	i.mu.Unlock()
	i.cfg.After(was, is, listed)
}
