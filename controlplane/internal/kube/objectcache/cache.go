package objectcache

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
)

// Kind is one kind of a Cache.
type Kind struct {
	Source

	// Pack, if not nil, returns a form of a trimmed object that takes less memory, or nil for an object without one.
	Pack func(client.Object) Packed
	// IndexLabel, if not empty, is a label by whose value List finds objects fast (client.MatchingLabels), however many
	// there are. A namespace is always such an index.
	IndexLabel string
	// Local, if not nil, reports whether an object matters only in the cluster that holds it.
	Local func(client.Object) bool
}

// Packed is an object in a form that takes little memory. Its type is comparable. A Packed with a method Local() bool answers
// Kind.Local without being unpacked, and one with a method Name() string saves the memory of the object's name: the cache uses the result.
type Packed interface {
	// Unpack returns the trimmed object, which the caller owns.
	Unpack() client.Object
}

// Local makes List return only the objects that are Local (true), or only the others (false). Packed objects that are left
// out are not unpacked.
type Local bool

// ApplyToList is part of client.ListOption.
func (Local) ApplyToList(*client.ListOptions) {}

// ObjectInformer is the Informer of one kind of a Cache. Its items are a client.Object or a Packed, its index is the value
// of Kind.IndexLabel.
type ObjectInformer = Informer[any, string]

// Cache is a client.Reader of several kinds of one API server. Safe for concurrent use.
type Cache struct {
	scheme *runtime.Scheme
	kinds  []*cachedKind
	byGVK  map[schema.GroupVersionKind]*cachedKind

	changes atomic.Uint64
}

// cachedKind is one kind of a Cache.
type cachedKind struct {
	*ObjectInformer
	Kind

	mu sync.Mutex
	// recent are the last two items that were packed or unpacked. A change needs its old and its new object several times,
	// and unpacking takes most of the time of a change.
	recent [2]struct {
		item   any
		object client.Object
	}
}

// NewCache returns an empty Cache. changed, if not nil, is called after each change became readable, by one goroutine for
// each kind: with the kind's place in kinds, the old and the new object, nil for one that does not exist, and whether a list
// showed the change, whose moment is unknown. Both objects are shared and must not be changed. settled, if not nil, is called when a kind becomes readable, is found missing, or is
// skipped.
func NewCache(scheme *runtime.Scheme, kinds []Kind, changed func(kind int, was, is client.Object, listed bool), settled func()) (*Cache, error) {
	c := &Cache{scheme: scheme, byGVK: map[schema.GroupVersionKind]*cachedKind{}}
	for i, kind := range kinds {
		k := &cachedKind{Kind: kind}
		var err error
		k.ObjectInformer, err = New(scheme, Config[any, string]{
			Source: kind.Source, Compact: k.pack, Index: k.index,
			After: func(was, is any, listed bool) {
				old, now := k.open(was), k.open(is)
				if old != nil && now != nil && old.GetUID() == now.GetUID() && old.GetResourceVersion() == now.GetResourceVersion() {
					return // a new list repeated it
				}
				c.changes.Add(1)
				if changed != nil {
					changed(i, old, now, listed)
				}
			},
			Settled: func() {
				c.changes.Add(1)
				if settled != nil {
					settled()
				}
			},
		})
		if err != nil {
			return nil, err
		}
		if c.byGVK[k.gvk] != nil {
			return nil, fmt.Errorf("watch %s: the kind is listed twice", k.gvk)
		}
		c.kinds, c.byGVK[k.gvk] = append(c.kinds, k), k
	}
	return c, nil
}

// pack returns the item of a trimmed object.
func (k *cachedKind) pack(o client.Object) any {
	if k.Pack != nil {
		if packed := k.Pack(o); packed != nil {
			k.remember(packed, o)
			return packed
		}
	}
	return o
}

// remember keeps an item and its object until two others follow.
func (k *cachedKind) remember(item any, o client.Object) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.recent[1] = k.recent[0]
	k.recent[0].item, k.recent[0].object = item, o
}

// open returns the object of an item, nil for none. The object is shared and must not be changed.
func (k *cachedKind) open(item any) client.Object {
	packed, ok := item.(Packed)
	if !ok {
		o, _ := item.(client.Object)
		return o
	}
	k.mu.Lock()
	for _, r := range k.recent {
		if r.item == item {
			k.mu.Unlock()
			return r.object
		}
	}
	k.mu.Unlock()
	o := packed.Unpack()
	k.remember(item, o)
	return o
}

// index returns the value of IndexLabel.
func (k *cachedKind) index(item any) (string, bool) {
	if k.IndexLabel == "" {
		return "", false
	}
	value, ok := k.open(item).GetLabels()[k.IndexLabel]
	return value, ok
}

// unpack returns the object of an item. It may be shared and must not be changed.
func unpack(item any) client.Object {
	if packed, ok := item.(Packed); ok {
		return packed.Unpack()
	}
	return item.(client.Object) //nolint:forcetypeassert // an item is nothing else
}

// own returns the object of an item for the caller to keep. o is the result of unpack.
func own(item any, o client.Object) client.Object {
	if _, packed := item.(Packed); packed {
		return o // unpacked for this caller
	}
	return o.DeepCopyObject().(client.Object) //nolint:forcetypeassert // the copy of an object is an object
}

// candidates returns at least the items in namespace that match selector.
func (k *cachedKind) candidates(namespace string, selector labels.Selector) []any {
	if value, exact := selector.RequiresExactMatch(k.IndexLabel); exact && k.IndexLabel != "" {
		return k.Indexed(value)
	}
	return k.In(namespace)
}

// isLocal reports whether an item is Local. It returns the object of an item that is not, or that had to be unpacked.
func (k *cachedKind) isLocal(item any) (local bool, o client.Object) {
	if known, ok := item.(interface{ Local() bool }); ok {
		local = known.Local()
	} else if k.Local != nil {
		o = unpack(item)
		local = k.Local(o)
	}
	if o == nil && !local {
		o = unpack(item)
	}
	return local, o
}

// Informers returns the Informer of each kind, in the order of the kinds.
func (c *Cache) Informers() []*ObjectInformer {
	all := make([]*ObjectInformer, 0, len(c.kinds))
	for _, k := range c.kinds {
		all = append(all, k.ObjectInformer)
	}
	return all
}

// Synced reports whether every kind was read completely once, is missing, or is skipped.
func (c *Cache) Synced() bool {
	return !slices.ContainsFunc(c.kinds, func(k *cachedKind) bool { return k.Pending() })
}

// Forbidden returns the kinds that the API server denied at the last attempt to read them.
func (c *Cache) Forbidden() []schema.GroupVersionKind {
	var all []schema.GroupVersionKind
	for _, k := range c.kinds {
		if k.Forbidden() {
			all = append(all, k.gvk)
		}
	}
	return all
}

// Changes returns a number that differs after each change of the Cache. Results derived from reads stay valid while it
// stays the same.
func (c *Cache) Changes() uint64 { return c.changes.Load() }

// Each calls f with every object and its kind's place. f must not change the object.
func (c *Cache) Each(f func(kind int, o client.Object)) { c.each(true, f) }

// EachShared calls f with every object that is not Local.
func (c *Cache) EachShared(f func(kind int, o client.Object)) { c.each(false, f) }

// EachOf calls f with every object of one kind, by its place. f must not change the object.
func (c *Cache) EachOf(kind int, f func(client.Object)) {
	k := c.kinds[kind]
	if k.Err() != nil {
		return
	}
	for _, item := range k.All() {
		f(unpack(item))
	}
}

func (c *Cache) each(locals bool, f func(int, client.Object)) {
	for i, k := range c.kinds {
		if locals {
			c.EachOf(i, func(o client.Object) { f(i, o) })
			continue
		}
		if k.Err() != nil {
			continue
		}
		for _, item := range k.All() {
			if local, o := k.isLocal(item); !local {
				f(i, o)
			}
		}
	}
}

// Get is part of client.Reader. The caller owns into.
func (c *Cache) Get(_ context.Context, key client.ObjectKey, into client.Object, _ ...client.GetOption) error {
	gvk, err := apiutil.GVKForObject(into, c.scheme)
	if err != nil {
		return err
	}
	k, err := c.kind(gvk)
	if err != nil {
		return err
	}
	found := k.Get(key.Namespace, key.Name)
	if found == nil {
		return apierrors.NewNotFound(schema.GroupResource{Group: gvk.Group, Resource: gvk.Kind}, key.Name)
	}
	o := unpack(found)
	have, want := reflect.ValueOf(own(found, o)), reflect.ValueOf(into)
	if have.Type() != want.Type() {
		return fmt.Errorf("read %s: it is cached as %T, not as %T", gvk, o, into)
	}
	want.Elem().Set(have.Elem())
	return nil
}

// List is part of client.Reader. It knows the options client.InNamespace, client.MatchingLabels,
// client.MatchingLabelsSelector and Local.
func (c *Cache) List(_ context.Context, into client.ObjectList, opts ...client.ListOption) error {
	gvk, err := apiutil.GVKForObject(into, c.scheme)
	if err != nil {
		return err
	}
	k, err := c.kind(itemsOf(gvk))
	if err != nil {
		return err
	}
	options := (&client.ListOptions{}).ApplyOptions(opts)
	selector := options.LabelSelector
	if selector == nil {
		selector = labels.Everything()
	}
	var found []runtime.Object
	for _, item := range k.candidates(options.Namespace, selector) {
		local, o := k.isLocal(item)
		if !includes(opts, local) {
			continue
		}
		if o == nil {
			o = unpack(item)
		}
		if (options.Namespace == "" || o.GetNamespace() == options.Namespace) && selector.Matches(labels.Set(o.GetLabels())) {
			found = append(found, own(item, o))
		}
	}
	return meta.SetList(into, found)
}

// includes reports whether options of List include objects that are Local, or else those that are not.
func includes(opts []client.ListOption, local bool) bool {
	return !slices.Contains(opts, client.ListOption(Local(!local)))
}

// itemsOf returns the kind of the items of a list.
func itemsOf(list schema.GroupVersionKind) schema.GroupVersionKind {
	const suffix = "List"
	if n := len(list.Kind) - len(suffix); n > 0 && list.Kind[n:] == suffix {
		list.Kind = list.Kind[:n]
	}
	return list
}

func (c *Cache) kind(gvk schema.GroupVersionKind) (*cachedKind, error) {
	k := c.byGVK[gvk]
	if k == nil {
		return nil, fmt.Errorf("read %s: the cache does not have the kind", gvk)
	}
	return k, k.Err()
}
