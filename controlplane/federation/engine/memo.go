package engine

import (
	"sync"

	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
)

// memo is a result that was derived from a cache, valid until the cache changes.
type memo[T any] struct {
	mu      sync.Mutex
	known   bool
	changes uint64 // of the cache, when the result was derived
	result  T
}

// get returns the result, which it derives anew if the cache has changed. The caller does not change the result.
func (m *memo[T]) get(cache *objectcache.Cache, derive func() T) T {
	m.mu.Lock()
	defer m.mu.Unlock()
	if changes := cache.Changes(); !m.known || m.changes != changes {
		m.result, m.changes, m.known = derive(), changes, true
	}
	return m.result
}
