package imports

import (
	"maps"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// isRefused reports whether the API server, or an admission policy or webhook of it, refused the content of an object.
func isRefused(err error) bool {
	return apierrors.IsInvalid(err) || apierrors.IsForbidden(err) || apierrors.IsBadRequest(err)
}

// maxRefusals bounds refusals; when it is full, every refused object is tried once more with its metadata.
const maxRefusals = 10_000

// refusals remember the objects that this cluster refused with their exported metadata, so that they are written without it
// at once, until they change. Safe for concurrent use.
type refusals struct {
	mu      sync.Mutex
	digests map[refusalKey]mcs.Digest
}

// refusalKey names an EndpointSlice of a Service, or with an empty slice the ServiceImport.
type refusalKey struct {
	service clusterset.ServiceName
	slice   string
}

// add records that this cluster refused an object with a digest.
func (r *refusals) add(key refusalKey, d mcs.Digest) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.digests == nil || len(r.digests) >= maxRefusals {
		r.digests = map[refusalKey]mcs.Digest{}
	}
	r.digests[key] = d
}

// has reports whether this cluster refused an object with a digest. It forgets the refusal of an object that changed.
func (r *refusals) has(key refusalKey, d mcs.Digest) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	refused, ok := r.digests[key]
	if ok && refused != d {
		delete(r.digests, key)
	}
	return ok && refused == d
}

// remove forgets the refusal of one object.
func (r *refusals) remove(key refusalKey) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.digests, key)
}

// forget forgets all refusals of a Service.
func (r *refusals) forget(name clusterset.ServiceName) {
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(r.digests, func(key refusalKey, _ mcs.Digest) bool { return key.service == name })
}
