package reconcile

import (
	"maps"
	"sync"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// endingsKept is how long a deleted namespace is remembered: its objects are gone before it is.
const endingsKept = time.Hour

// Endings remembers which namespaces of members are being deleted, or were a while ago. What vanishes with its namespace was withdrawn
// by a person, while a namespace that is missing all at once, such as in a member that comes back empty, proves nothing. The
// zero value remembers none.
type Endings struct {
	mu       sync.Mutex
	at       map[namespaceOf]time.Time
	prunedAt time.Time
}

type namespaceOf struct {
	member    clusterset.ClusterID
	namespace string
}

// Note records a namespace of a member, which may be about to be deleted.
func (e *Endings) Note(member clusterset.ClusterID, namespace client.Object) {
	key, now := namespaceOf{member, namespace.GetName()}, time.Now()
	e.mu.Lock()
	defer e.mu.Unlock()
	if namespace.GetDeletionTimestamp() == nil {
		delete(e.at, key)
		return
	}
	if e.at == nil {
		e.at = map[namespaceOf]time.Time{}
	}
	e.at[key] = now
	if now.Sub(e.prunedAt) > endingsKept {
		maps.DeleteFunc(e.at, func(_ namespaceOf, at time.Time) bool { return now.Sub(at) > endingsKept })
		e.prunedAt = now
	}
}

// Ended reports whether a namespace of a member is being deleted, or was.
func (e *Endings) Ended(member clusterset.ClusterID, namespace string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	_, ended := e.at[namespaceOf{member, namespace}]
	return ended
}
