// Package objectcache keeps what an API server says of all objects of a kind, cut down on arrival to what somebody
// needs. A [Mirror] of 10,000 EndpointSlices is a tenth of what a cache of the objects is.
//
// What it keeps outlives the server's silence: it is only replaced by what the server says next.
package objectcache

import (
	"context"
	"fmt"
	"strings"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Config says what to mirror. Of T nothing may be changed after Compact has made it.
type Config[T any] struct {
	Client  client.WithWatch
	List    func() client.ObjectList
	Object  client.Object
	Options []client.ListOption
	// Compact returns what is kept of an object, which is the Mirror's no longer.
	Compact func(client.Object) *T
	// Service is what an item is about; items without a name are about nothing.
	Service func(*T) clusterset.ServiceName
	// Before is told each change before it can be seen in the Mirror, After after that, both by one goroutine
	// and in order. was is nil for what came, is for what went. first says that it was there when the Mirror
	// began, or came to light with a new list.
	Before, After func(was, is *T, first bool)
}

// Mirror is a copy of all objects of a kind, as items of type T. Safe for concurrent use.
type Mirror[T any] struct {
	cfg    Config[T]
	synced chan struct{}
	once   sync.Once

	mu        sync.RWMutex
	items     map[types.NamespacedName]*T
	byService map[clusterset.ServiceName][]*T
	latest    string
}

// New returns a Mirror that is empty until it runs.
func New[T any](cfg Config[T]) *Mirror[T] {
	nothing := func(_, _ *T, _ bool) {}
	if cfg.Before == nil {
		cfg.Before = nothing
	}
	if cfg.After == nil {
		cfg.After = nothing
	}
	return &Mirror[T]{
		cfg: cfg, synced: make(chan struct{}),
		items: map[types.NamespacedName]*T{}, byService: map[clusterset.ServiceName][]*T{},
	}
}

// Run follows the server until ctx ends. It tries again for as long as the server is away.
func (m *Mirror[T]) Run(ctx context.Context) error {
	source := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			list := m.cfg.List()
			err := m.cfg.Client.List(ctx, list, append(m.cfg.Options, &client.ListOptions{Raw: &o})...)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			return m.cfg.Client.Watch(ctx, m.cfg.List(), append(m.cfg.Options, &client.ListOptions{Raw: &o})...)
		},
	}
	reflector := cache.NewReflectorWithOptions(source, m.cfg.Object, (*store[T])(m), cache.ReflectorOptions{Name: fmt.Sprintf("%T", m.cfg.Object)})
	reflector.RunWithContext(ctx)
	return nil
}

// WaitForSync waits until the Mirror has been complete once, and everything in it has been told.
func (m *Mirror[T]) WaitForSync(ctx context.Context) error {
	select {
	case <-m.synced:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for %T: %w", m.cfg.Object, ctx.Err())
	}
}

// Either returns the one that is not nil, what is now if both are not.
func Either[T any](was, is *T) *T {
	if is != nil {
		return is
	}
	return was
}

// Get returns the item of an object, nil when there is none.
func (m *Mirror[T]) Get(namespace, name string) *T {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.items[types.NamespacedName{Namespace: namespace, Name: name}]
}

// Of returns the items about a Service, in no order. The result is the caller's.
func (m *Mirror[T]) Of(name clusterset.ServiceName) []*T {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return append([]*T(nil), m.byService[name]...)
}

// All returns all items, in no order. The result is the caller's.
func (m *Mirror[T]) All() []*T {
	m.mu.RLock()
	defer m.mu.RUnlock()
	all := make([]*T, 0, len(m.items))
	for _, t := range m.items {
		all = append(all, t)
	}
	return all
}

// Latest returns the resource version up to which the Mirror knows everything, "" before it knows anything.
func (m *Mirror[T]) Latest() string {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.latest
}

// put makes is the item of key, nil for none, as it is since a version, and tells everybody.
func (m *Mirror[T]) put(key types.NamespacedName, is *T, version string, first bool) {
	m.mu.RLock()
	was := m.items[key]
	m.mu.RUnlock()
	if was == nil && is == nil {
		return
	}
	m.cfg.Before(was, is, first)
	m.mu.Lock()
	m.latest = version
	if was != nil {
		m.unfile(was)
	}
	if is == nil {
		delete(m.items, key)
	} else {
		m.items[key] = is
		if name := m.cfg.Service(is); name.Name != "" {
			m.byService[name] = append(m.byService[name], is)
		}
	}
	m.mu.Unlock()
	m.cfg.After(was, is, first)
}

// unfile takes t out of the index. The lock is held.
func (m *Mirror[T]) unfile(t *T) {
	name := m.cfg.Service(t)
	list := m.byService[name]
	for i := range list {
		if list[i] != t {
			continue
		}
		if len(list) == 1 {
			delete(m.byService, name)
			return
		}
		// A new list, because Of may be reading the old one's memory.
		rest := make([]*T, 0, len(list)-1)
		m.byService[name] = append(append(rest, list[:i]...), list[i+1:]...)
		return
	}
}

// store is a Mirror as a Reflector fills it: by one goroutine.
type store[T any] Mirror[T]

// arrived is what became of an object on its way from the server.
type arrived[T any] struct {
	key     types.NamespacedName
	item    *T
	version string
}

// Transformer cuts objects down while they stream in, before the list is complete.
func (s *store[T]) Transformer() cache.TransformFunc {
	return func(obj any) (any, error) { return s.compact(obj), nil }
}

func (s *store[T]) compact(obj any) arrived[T] {
	switch o := obj.(type) {
	case arrived[T]:
		return o
	case client.Object:
		return arrived[T]{client.ObjectKeyFromObject(o), s.cfg.Compact(o), strings.Clone(o.GetResourceVersion())}
	default:
		panic(fmt.Sprintf("mirror: %T is no object", obj)) // the Reflector lets nothing else pass
	}
}

func (s *store[T]) Add(obj any) error {
	a := s.compact(obj)
	(*Mirror[T])(s).put(a.key, a.item, a.version, false)
	return nil
}

func (s *store[T]) Update(obj any) error { return s.Add(obj) }

func (s *store[T]) Delete(obj any) error {
	a := s.compact(obj)
	(*Mirror[T])(s).put(a.key, nil, a.version, false)
	return nil
}

// Replace takes a whole list. What is not in it has gone while nobody looked.
func (s *store[T]) Replace(list []any, version string) error {
	m := (*Mirror[T])(s)
	listed := make(map[types.NamespacedName]bool, len(list))
	for _, obj := range list {
		a := s.compact(obj)
		listed[a.key] = true
		m.put(a.key, a.item, m.latest, true)
	}
	m.mu.RLock()
	var gone []types.NamespacedName
	for key := range m.items {
		if !listed[key] {
			gone = append(gone, key)
		}
	}
	m.mu.RUnlock()
	for _, key := range gone {
		m.put(key, nil, m.latest, true)
	}
	m.mu.Lock()
	m.latest = version
	m.mu.Unlock()
	m.once.Do(func() { close(m.synced) })
	return nil
}

func (s *store[T]) Resync() error { return nil }
