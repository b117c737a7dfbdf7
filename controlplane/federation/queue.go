package federation

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
	// workers is how many keys a Part works on at a time, in each member; in a federation of more than many members it is fewer:
	// each look at a key holds what all members offer under it.
	workers, many, fewer = 4, 8, 2
	// coalesce is how long a key waits for more changes of the same thing.
	coalesce = 20 * time.Millisecond
	// firstRetry and lastRetry bound how long a key waits after an error.
	firstRetry = 50 * time.Millisecond
	lastRetry  = 15 * time.Second
	// unseen is how often what was created may be found there without having been seen, before that is a fault.
	unseen = 5
	// syncTimeout bounds one look at one key, so that a member that swallows packets holds no worker for long.
	syncTimeout = 30 * time.Second
)

// queue is what one Part has to look at in one member that is led here.
type queue struct {
	crew   *crew
	index  int // of the Part
	site   *site
	leader reconcile.Leader
	log    *slog.Logger
	keys   workqueue.TypedRateLimitingInterface[reconcile.Key]
}

func newQueue(c *crew, index int, s *site, leader reconcile.Leader, log *slog.Logger) *queue {
	return &queue{crew: c, index: index, site: s, leader: leader, log: log, keys: workqueue.NewTypedRateLimitingQueue(
		workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Key](firstRetry, lastRetry),
	)}
}

func (q *queue) add(keys ...reconcile.Key) {
	for _, key := range keys {
		q.keys.AddAfter(key, coalesce)
	}
}

func (q *queue) workers() int {
	if len(q.crew.all(q.index)) > many {
		return fewer
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

// next looks at one key. It returns false when the queue has ended, whatever is left in it: the next leader looks at
// everything.
func (q *queue) next(ctx context.Context) bool {
	key, ended := q.keys.Get()
	if ended {
		return false
	}
	defer q.keys.Done(key)
	q.crew.looks.begin()
	defer q.crew.looks.end()
	if ctx.Err() != nil {
		return false
	}
	p := q.crew.parts[q.index]
	syncing, cancel := context.WithTimeout(ctx, syncTimeout)
	defer cancel()
	began := time.Now()
	err := p.Sync(syncing, key, pausing{q.leader, q.crew.looks}, q.crew.all(q.index))
	syncSeconds.WithLabelValues(p.Name()).Observe(time.Since(began).Seconds())
	switch {
	case ctx.Err() != nil, errors.Is(err, reconcile.ErrNotLeader):
		return true
	case err == nil:
		q.keys.Forget(key)
		return true
	case apierrors.IsConflict(err), apierrors.IsAlreadyExists(err) && q.keys.NumRequeues(key) < unseen:
	case q.keys.NumRequeues(key) == 0, apierrors.IsAlreadyExists(err) && q.keys.NumRequeues(key) == unseen:
		syncErrors.WithLabelValues(p.Name()).Inc()
		q.log.Warn("something cannot be brought in line, and is tried again", "kind", key.Kind, "namespace", key.Namespace, "name", key.Name, "err", err)
	default:
		syncErrors.WithLabelValues(p.Name()).Inc()
		q.log.Debug("something still cannot be brought in line", "kind", key.Kind, "namespace", key.Namespace, "name", key.Name, "err", err)
	}
	q.keys.AddRateLimited(key)
	return true
}
