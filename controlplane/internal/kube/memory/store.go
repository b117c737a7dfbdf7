package memory

import (
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
)

// store has the objects of one kind, packed where the Watch does that, as open and own read them. Safe for concurrent
// use.
type store struct {
	watch reconcile.Watch

	mu      sync.RWMutex
	objects map[string]map[string]any // by namespace and name: a client.Object or a reconcile.Packed
	labeled map[string][]any          // the same by the value of the Watch's IndexLabel
}

func newStore(w reconcile.Watch) *store {
	return &store{watch: w, objects: map[string]map[string]any{}, labeled: map[string][]any{}}
}

// open returns the object that is stored as v. It may be shared, and must not be changed.
func open(v any) client.Object {
	if packed, ok := v.(reconcile.Packed); ok {
		return packed.Unpack()
	}
	return v.(client.Object) //nolint:forcetypeassert // nothing else is put in
}

// own returns the object that is stored as v, the caller's to change. o is what open returned of it.
func own(v any, o client.Object) client.Object {
	if _, packed := v.(reconcile.Packed); packed {
		return o // made for him
	}
	return o.DeepCopyObject().(client.Object) //nolint:forcetypeassert // a copy of an object is one
}

// pack returns what is stored of an object.
func (s *store) pack(o client.Object) any {
	if s.watch.Pack != nil {
		if packed := s.watch.Pack(o); packed != nil {
			return packed
		}
	}
	return o
}

// put stores an object as v, in the place of one of the same name.
func (s *store) put(o client.Object, v any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.take(o.GetNamespace(), o.GetName())
	named := s.objects[o.GetNamespace()]
	if named == nil {
		named = map[string]any{}
		s.objects[o.GetNamespace()] = named
	}
	named[o.GetName()] = v
	if value, ok := s.value(o); ok {
		s.labeled[value] = with(s.labeled[value], v)
	}
}

// with appends v to a list, which gets a fifth longer than it must be: there are many, and append would double them.
func with(list []any, v any) []any {
	if n := len(list); n == cap(list) {
		list = append(make([]any, 0, n+1+n/5), list...)
	}
	return append(list, v)
}

// value returns by which value of the IndexLabel an object is found.
func (s *store) value(o client.Object) (string, bool) {
	if s.watch.IndexLabel == "" {
		return "", false
	}
	value, ok := o.GetLabels()[s.watch.IndexLabel]
	return value, ok
}

func (s *store) remove(namespace, name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.take(namespace, name)
}

// take removes an object, if there is one of the name. The lock is held.
func (s *store) take(namespace, name string) {
	v, ok := s.objects[namespace][name]
	if !ok {
		return
	}
	delete(s.objects[namespace], name)
	if len(s.objects[namespace]) == 0 {
		delete(s.objects, namespace)
	}
	value, ok := s.value(open(v))
	if !ok {
		return
	}
	s.labeled[value] = slices.DeleteFunc(s.labeled[value], func(w any) bool { return w == v })
	if len(s.labeled[value]) == 0 {
		delete(s.labeled, value)
	}
}

// get returns what is stored under a name, nil for nothing.
func (s *store) get(namespace, name string) any {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.objects[namespace][name]
}

// of returns what has a value of the IndexLabel.
func (s *store) of(value string) []any {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return slices.Clone(s.labeled[value])
}

// in returns what is in a namespace, "" for all, in no order.
func (s *store) in(namespace string) []any {
	var all []any
	s.mu.RLock()
	defer s.mu.RUnlock()
	if namespace != "" {
		for _, v := range s.objects[namespace] {
			all = append(all, v)
		}
	} else {
		for _, named := range s.objects {
			for _, v := range named {
				all = append(all, v)
			}
		}
	}
	return all
}

// names returns what is stored.
func (s *store) names() []types.NamespacedName {
	s.mu.RLock()
	defer s.mu.RUnlock()
	var all []types.NamespacedName
	for namespace, named := range s.objects {
		for name := range named {
			all = append(all, types.NamespacedName{Namespace: namespace, Name: name})
		}
	}
	return all
}
