package engine

import (
	"context"
	"errors"
	"log/slog"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/internal/member"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
)

// A key of a Local object is queued in its own member only, for its own Reconciler.
func TestEnqueueLocalKeys(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		a, errA := member.New(member.Config{}, federationv1alpha1.MemberCluster{ClusterID: "a"}, "")
		b, errB := member.New(member.Config{}, federationv1alpha1.MemberCluster{ClusterID: "b"}, "")
		if err := errors.Join(errA, errB); err != nil {
			t.Fatal(err)
		}
		e := &Engine{queues: map[*queue]bool{}}
		all := []*queue{
			newQueue(e, 0, &managedMember{Member: a}, nil, slog.New(slog.DiscardHandler)),
			newQueue(e, 1, &managedMember{Member: a}, nil, slog.New(slog.DiscardHandler)),
			newQueue(e, 0, &managedMember{Member: b}, nil, slog.New(slog.DiscardHandler)),
		}
		for _, q := range all {
			e.queues[q] = true
			defer q.keys.ShutDown()
		}
		waiting := func() (n []int) {
			<-time.After(2 * coalesce)
			synctest.Wait()
			for _, q := range all {
				n = append(n, q.keys.Len())
			}
			return n
		}
		e.enqueueAt(0, a, reconcile.Key{Name: "here"})
		if diff := cmp.Diff([]int{1, 0, 0}, waiting()); diff != "" {
			t.Errorf("keys after a change of a local object (-want +have):\n%s", diff)
		}
		e.enqueue(0, reconcile.Key{Name: "everywhere"})
		if diff := cmp.Diff([]int{2, 0, 1}, waiting()); diff != "" {
			t.Errorf("keys after a change of a shared object (-want +have):\n%s", diff)
		}
		e.enqueueIn(0, reconcile.Key{Name: "in b"}, []clusterset.ClusterID{"b"})
		if diff := cmp.Diff([]int{2, 0, 2}, waiting()); diff != "" {
			t.Errorf("keys of one member (-want +have):\n%s", diff)
		}
	})
}

// endless is a Reconciler that counts its calls.
type endless struct {
	reconcile.Reconciler
	calls atomic.Int64
	end   func()
}

func (*endless) Name() string { return "endless" }

func (r *endless) Reconcile(context.Context, reconcile.Key, reconcile.Writer, []reconcile.Member) error {
	r.calls.Add(1)
	r.end()
	return nil
}

// A supervisor that ends, or no longer leads, leaves the remaining keys to the next leader.
func TestQueueEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		r := &endless{end: cancel}
		q := newQueue(&Engine{cfg: Config{Reconcilers: []reconcile.Reconciler{r}}, limiter: newSyncLimiter()}, 0, &managedMember{}, nil, slog.New(slog.DiscardHandler))
		for i := range 100 {
			q.add(reconcile.Key{Name: strconv.Itoa(i)})
		}
		q.run(ctx)
		if n := r.calls.Load(); n < 1 || n > workers {
			t.Errorf("%d keys were reconciled, want at most the %d that may be in progress", n, workers)
		}
	})
}

// silent is a Writer of a member whose API server answers when answer is closed.
type silent struct {
	reconcile.Writer
	asked  *atomic.Int64
	answer chan struct{}
}

func (w silent) Create(context.Context, client.Object) error {
	w.asked.Add(1)
	<-w.answer
	return nil
}

// crowded is a Reconciler that records how many of its calls run at the same time, writes excluded.
type crowded struct {
	reconcile.Reconciler
	now, most atomic.Int64
}

func (*crowded) Name() string { return "crowded" }

func (r *crowded) Reconcile(ctx context.Context, _ reconcile.Key, into reconcile.Writer, _ []reconcile.Member) error {
	compute := func() {
		n := r.now.Add(1)
		for m := r.most.Load(); n > m && !r.most.CompareAndSwap(m, n); m = r.most.Load() {
		}
		<-time.After(time.Millisecond)
		r.now.Add(-1)
	}
	compute()
	err := into.Create(ctx, nil)
	compute()
	return err
}

// However many members there are, no more keys are reconciled at the same time than the limiter has slots. Silent API
// servers hold no slot.
func TestSyncLimiter(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const members = 10
		ctx, cancel := context.WithCancel(t.Context())
		r := new(crowded)
		e := &Engine{cfg: Config{Reconcilers: []reconcile.Reconciler{r}}, limiter: newSyncLimiter()}
		writer := silent{asked: new(atomic.Int64), answer: make(chan struct{})}
		var running sync.WaitGroup
		for range members {
			q := newQueue(e, 0, &managedMember{}, writer, slog.New(slog.DiscardHandler))
			for i := range workers {
				q.add(reconcile.Key{Name: strconv.Itoa(i)})
			}
			running.Go(func() { q.run(ctx) })
		}
		<-time.After(time.Second)
		if n := writer.asked.Load(); n != members*workers {
			t.Errorf("%d writes are in progress, want %d", n, members*workers)
		}
		close(writer.answer)
		<-time.After(time.Second)
		cancel()
		running.Wait()
		if n := r.most.Load(); n != int64(cap(e.limiter)) || len(e.limiter) != 0 {
			t.Errorf("%d keys were reconciled at the same time and %d still are, want %d and none", n, len(e.limiter), cap(e.limiter))
		}
	})
}

// doubtful is a Reconciler whose writes fail while held is false.
type doubtful struct {
	reconcile.Reconciler
	held    atomic.Bool
	written atomic.Int64
}

func (*doubtful) Name() string { return "doubtful" }

func (r *doubtful) Reconcile(context.Context, reconcile.Key, reconcile.Writer, []reconcile.Member) error {
	if !r.held.Load() {
		return reconcile.ErrNotLeader
	}
	r.written.Add(1)
	return nil
}

// A process whose renewal is late is for a moment not certain that it leads, and then leads on in the same term. It
// reconciles the keys of that moment afterwards: no next leader does.
func TestLateRenewalLosesNoKey(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		r := new(doubtful)
		q := newQueue(&Engine{cfg: Config{Reconcilers: []reconcile.Reconciler{r}}, limiter: newSyncLimiter()}, 0, &managedMember{}, nil, slog.New(slog.DiscardHandler))
		var running sync.WaitGroup
		running.Go(func() { q.run(ctx) })
		q.add(reconcile.Key{Name: "web"})
		<-time.After(10 * time.Second)
		r.held.Store(true)
		<-time.After(2 * lastRetry)
		cancel()
		running.Wait()
		if n := r.written.Load(); n != 1 {
			t.Errorf("the key was written %d times, want once", n)
		}
	})
}
