package objectcache

import (
	"slices"

	"k8s.io/apimachinery/pkg/types"
)

// store files items by namespace and name, and by their index. The zero T stands for no item. The Informer guards it.
type store[T, K comparable] struct {
	index func(T) (K, bool)

	objects map[string]map[string]T
	byIndex map[K][]T
}

func newStore[T, K comparable](index func(T) (K, bool)) store[T, K] {
	return store[T, K]{index: index, objects: map[string]map[string]T{}, byIndex: map[K][]T{}}
}

// sharesName is an item that has its name in memory that it may share with items of other caches.
type sharesName interface{ Name() string }

// put files an item in the place of an earlier one of that name.
func (s *store[T, K]) put(namespace, name string, item T) {
	s.unindex(s.objects[namespace][name])
	if n, ok := any(item).(sharesName); ok {
		name = n.Name()
	}
	named := s.objects[namespace]
	if named == nil {
		named = map[string]T{}
		s.objects[namespace] = named
	}
	named[name] = item
	if key, ok := s.index(item); ok {
		s.byIndex[key] = with(s.byIndex[key], item)
	}
}

// with appends an item to a list and lets the list grow by a fifth: there are many lists, and append would double them.
func with[T any](list []T, item T) []T {
	if n := len(list); n == cap(list) {
		list = append(make([]T, 0, n+1+n/5), list...)
	}
	return append(list, item)
}

// remove removes the item of that name, if there is one.
func (s *store[T, K]) remove(namespace, name string) {
	s.unindex(s.objects[namespace][name])
	delete(s.objects[namespace], name)
	if len(s.objects[namespace]) == 0 {
		delete(s.objects, namespace)
	}
}

// unindex removes an item from the index.
func (s *store[T, K]) unindex(item T) {
	var none T
	if item == none {
		return
	}
	key, ok := s.index(item)
	if !ok {
		return
	}
	s.byIndex[key] = slices.DeleteFunc(s.byIndex[key], func(other T) bool { return other == item })
	if len(s.byIndex[key]) == 0 {
		delete(s.byIndex, key)
	}
}

// get returns the item of that name.
func (s *store[T, K]) get(namespace, name string) T { return s.objects[namespace][name] }

// indexed returns a copy of the items with an index.
func (s *store[T, K]) indexed(key K) []T { return slices.Clone(s.byIndex[key]) }

// in returns the items of a namespace, "" for all, in no order.
func (s *store[T, K]) in(namespace string) []T {
	if namespace != "" {
		all := make([]T, 0, len(s.objects[namespace]))
		for _, item := range s.objects[namespace] {
			all = append(all, item)
		}
		return all
	}
	n := 0
	for _, named := range s.objects {
		n += len(named)
	}
	all := make([]T, 0, n)
	for _, named := range s.objects {
		for _, item := range named {
			all = append(all, item)
		}
	}
	return all
}

// names returns the names that match.
func (s *store[T, K]) names(match func(types.NamespacedName) bool) []types.NamespacedName {
	var all []types.NamespacedName
	for namespace, named := range s.objects {
		for name := range named {
			if n := (types.NamespacedName{Namespace: namespace, Name: name}); match(n) {
				all = append(all, n)
			}
		}
	}
	return all
}
