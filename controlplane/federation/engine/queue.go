package engine

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/util/workqueue"

	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
)

const (
	// workers is how many keys a Reconciler works on at the same time in each member. In a federation of more than
	// manyMembers it is fewWorkers: each call holds in memory what all members have under its key.
	workers, manyMembers, fewWorkers = 4, 8, 2
	// coalesce is how long a key waits for more changes of the same object.
	coalesce = 20 * time.Millisecond
	// firstRetry and lastRetry limit how long a key waits after an error.
	firstRetry = 50 * time.Millisecond
	lastRetry  = 15 * time.Second
	// staleReads is how often the creation of an object may fail because the object exists and was not read yet, before
	// that is an error.
	staleReads = 5
	// reconcileTimeout limits one call, so that a member that drops packets does not block a worker for long.
	reconcileTimeout = 30 * time.Second
)

// queue holds the keys that one Reconciler has to reconcile in one member that this process leads.
type queue struct {
	engine *Engine
	index  int // of the Reconciler
	member *managedMember
	writer reconcile.Writer
	log    *slog.Logger
	keys   workqueue.TypedRateLimitingInterface[reconcile.Key]
}

func newQueue(e *Engine, index int, m *managedMember, writer reconcile.Writer, log *slog.Logger) *queue {
	return &queue{engine: e, index: index, member: m, writer: writer, log: log, keys: workqueue.NewTypedRateLimitingQueue(
		workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Key](firstRetry, lastRetry),
	)}
}

func (q *queue) add(keys ...reconcile.Key) {
	for _, key := range keys {
		q.keys.AddAfter(key, coalesce)
	}
}

func (q *queue) workers() int {
	if len(q.engine.seenBy(q.index)) > manyMembers {
		return fewWorkers
	}
	return workers
}

// run works until ctx ends.
func (q *queue) run(ctx context.Context) {
	defer context.AfterFunc(ctx, q.keys.ShutDown)()
	var working sync.WaitGroup
	for range q.workers() {
		working.Go(func() {
			for q.next(ctx) {
			}
		})
	}
	working.Wait()
}

// next reconciles one key. It returns false when the queue has ended; keys that are left are not lost, because the next
// leader reconciles everything.
func (q *queue) next(ctx context.Context) bool {
	key, ended := q.keys.Get()
	if ended {
		return false
	}
	defer q.keys.Done(key)
	q.engine.limiter.acquire()
	defer q.engine.limiter.release()
	if ctx.Err() != nil {
		return false
	}
	r := q.engine.cfg.Reconcilers[q.index]
	working, cancel := context.WithTimeout(ctx, reconcileTimeout)
	defer cancel()
	began := time.Now()
	err := r.Reconcile(working, key, limitedWriter{q.writer, q.engine.limiter}, q.engine.seenBy(q.index))
	syncSeconds.WithLabelValues(r.Name()).Observe(time.Since(began).Seconds())
	switch {
	case ctx.Err() != nil:
		return true
	case err == nil:
		q.keys.Forget(key)
		return true
	case errors.Is(err, reconcile.ErrNotLeader): // a late renewal: the term may go on
	case apierrors.IsConflict(err), apierrors.IsAlreadyExists(err) && q.keys.NumRequeues(key) < staleReads:
	case q.keys.NumRequeues(key) == 0, apierrors.IsAlreadyExists(err) && q.keys.NumRequeues(key) == staleReads:
		syncErrors.WithLabelValues(r.Name()).Inc()
		q.log.Warn("an object cannot be reconciled; retrying", "kind", key.Kind, "namespace", key.Namespace, "name", key.Name, "err", err)
	default:
		syncErrors.WithLabelValues(r.Name()).Inc()
		q.log.Debug("an object still cannot be reconciled", "kind", key.Kind, "namespace", key.Namespace, "name", key.Name, "err", err)
	}
	q.keys.AddRateLimited(key)
	return true
}
