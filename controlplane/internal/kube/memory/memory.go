// Package memory keeps what a Part watches of one member: a [Memory] is filled by one [Kind] for each Watch, and read
// like an API server. What it keeps outlives the member's silence: it is only replaced by what the member says next.
package memory

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"sync/atomic"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"

	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
)

// Memory is what is known of one member for one Part. Safe for concurrent use.
type Memory struct {
	scheme *runtime.Scheme
	kinds  []*Kind
	byGVK  map[schema.GroupVersionKind]*Kind

	changes atomic.Uint64
}

// New returns a Memory of watches that knows nothing yet. changed is told of each change after it can be read: was is
// nil for what came, is for what went; both are shared and must not be changed. It is told so by one goroutine a kind.
// settled, if not nil, is told whenever a kind can be read for the first time, or is found missing or to wait Alone.
func New(scheme *runtime.Scheme, watches []reconcile.Watch, changed func(w reconcile.Watch, was, is client.Object), settled func()) (*Memory, error) {
	m := &Memory{scheme: scheme, byGVK: map[schema.GroupVersionKind]*Kind{}}
	for _, w := range watches {
		gvk, err := apiutil.GVKForObject(w.Object, scheme)
		if err != nil {
			return nil, fmt.Errorf("watch %T: %w", w.Object, err)
		}
		if m.byGVK[gvk] != nil {
			return nil, fmt.Errorf("watch %s: it is watched twice", gvk)
		}
		k := newKind(gvk, w, func(was, is client.Object) {
			m.changes.Add(1)
			changed(w, was, is)
		})
		k.settled = func() {
			m.changes.Add(1)
			if settled != nil {
				settled()
			}
		}
		m.kinds, m.byGVK[gvk] = append(m.kinds, k), k
	}
	return m, nil
}

// Kinds returns a Kind for each Watch, in their order.
func (m *Memory) Kinds() []*Kind { return m.kinds }

// Read reports whether everything was read completely once, is known to be missing, or is denied and can wait Alone.
func (m *Memory) Read() bool {
	return !slices.ContainsFunc(m.kinds, (*Kind).awaited)
}

// Denied returns the kinds that the API server does not let be read, in the order of the watches.
func (m *Memory) Denied() []schema.GroupVersionKind {
	var all []schema.GroupVersionKind
	for _, k := range m.kinds {
		if k.Denied() {
			all = append(all, k.gvk)
		}
	}
	return all
}

// Changes is another number after each change of what can be read: what was read before and what follows from it holds as long
// as it stays.
func (m *Memory) Changes() uint64 { return m.changes.Load() }

// Each calls f with everything that is known. What f gets is shared and must not be changed.
func (m *Memory) Each(f func(reconcile.Watch, client.Object)) { m.each(true, f) }

// EachShared calls f with everything that is known but for what is Local.
func (m *Memory) EachShared(f func(reconcile.Watch, client.Object)) { m.each(false, f) }

func (m *Memory) each(locals bool, f func(reconcile.Watch, client.Object)) {
	for _, k := range m.kinds {
		if k.check() != nil {
			continue
		}
		for _, v := range k.objects.in("") {
			if locals {
				f(k.watch, open(v))
			} else if local, o := k.local(v); !local {
				f(k.watch, o)
			}
		}
	}
}

// Count returns how many objects are Counted.
func (m *Memory) Count() (n int) {
	for _, k := range m.kinds {
		if k.watch.Counted == nil || k.check() != nil {
			continue
		}
		for _, v := range k.objects.in("") {
			if k.watch.Counted(open(v)) {
				n++
			}
		}
	}
	return n
}

// Get is client.Reader's.
func (m *Memory) Get(_ context.Context, key client.ObjectKey, into client.Object, _ ...client.GetOption) error {
	gvk, err := apiutil.GVKForObject(into, m.scheme)
	if err != nil {
		return err
	}
	k, err := m.kind(gvk)
	if err != nil {
		return err
	}
	found := k.objects.get(key.Namespace, key.Name)
	if found == nil {
		return apierrors.NewNotFound(schema.GroupResource{Group: gvk.Group, Resource: gvk.Kind}, key.Name)
	}
	o := open(found)
	have, want := reflect.ValueOf(own(found, o)), reflect.ValueOf(into)
	if have.Type() != want.Type() {
		return fmt.Errorf("read %s: it is watched as %T, not as %T", gvk, o, into)
	}
	want.Elem().Set(have.Elem())
	return nil
}

// List is client.Reader's, of the options that reconcile.Member names.
func (m *Memory) List(_ context.Context, into client.ObjectList, opts ...client.ListOption) error {
	gvk, err := apiutil.GVKForObject(into, m.scheme)
	if err != nil {
		return err
	}
	k, err := m.kind(listed(gvk))
	if err != nil {
		return err
	}
	options := (&client.ListOptions{}).ApplyOptions(opts)
	selector := options.LabelSelector
	if selector == nil {
		selector = labels.Everything()
	}
	var found []runtime.Object
	for _, v := range k.candidates(options.Namespace, selector) {
		local, o := k.local(v)
		if !asksFor(opts, local) {
			continue
		}
		if o == nil {
			o = open(v)
		}
		if (options.Namespace == "" || o.GetNamespace() == options.Namespace) && selector.Matches(labels.Set(o.GetLabels())) {
			found = append(found, own(v, o))
		}
	}
	return meta.SetList(into, found)
}

// asksFor reports whether options of List ask for what is Local, or else for what is not.
func asksFor(opts []client.ListOption, local bool) bool {
	return !slices.Contains(opts, client.ListOption(reconcile.Local(!local)))
}

// listed returns the kind of the items of a list.
func listed(list schema.GroupVersionKind) schema.GroupVersionKind {
	const suffix = "List"
	if n := len(list.Kind) - len(suffix); n > 0 && list.Kind[n:] == suffix {
		list.Kind = list.Kind[:n]
	}
	return list
}

func (m *Memory) kind(gvk schema.GroupVersionKind) (*Kind, error) {
	k := m.byGVK[gvk]
	if k == nil {
		return nil, fmt.Errorf("read %s: it is none of the Part's watches", gvk)
	}
	return k, k.check()
}
