package federation

import (
	"context"
	"log/slog"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/federation/internal/member"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
)

// What matters in one member alone is looked at there, by its Part.
func TestWhereAChangeIsLookedAt(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		a, b := new(member.Member), new(member.Member)
		c := &crew{queues: map[*queue]bool{}}
		all := []*queue{
			newQueue(c, 0, &site{Member: a}, nil, slog.New(slog.DiscardHandler)),
			newQueue(c, 1, &site{Member: a}, nil, slog.New(slog.DiscardHandler)),
			newQueue(c, 0, &site{Member: b}, nil, slog.New(slog.DiscardHandler)),
		}
		for _, q := range all {
			c.queues[q] = true
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
		c.enqueueAt(0, a, reconcile.Key{Name: "here"})
		if diff := cmp.Diff([]int{1, 0, 0}, waiting()); diff != "" {
			t.Errorf("keys after a change that matters in one member (-want +have):\n%s", diff)
		}
		c.enqueue(0, reconcile.Key{Name: "everywhere"})
		if diff := cmp.Diff([]int{2, 0, 1}, waiting()); diff != "" {
			t.Errorf("keys after one that matters in all (-want +have):\n%s", diff)
		}
	})
}

// endless is a Part that has always more to look at.
type endless struct {
	reconcile.Part
	looks atomic.Int64
	end   func()
}

func (*endless) Name() string { return "endless" }

func (p *endless) Sync(context.Context, reconcile.Key, reconcile.Leader, []reconcile.Member) error {
	p.looks.Add(1)
	p.end()
	return nil
}

// A supervisor that ends, or leads no more, leaves what is still to be looked at to the next one.
func TestQueueEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		p := &endless{end: cancel}
		q := newQueue(&crew{parts: []reconcile.Part{p}, looks: newLooks()}, 0, &site{}, nil, slog.New(slog.DiscardHandler))
		for i := range 100 {
			q.add(reconcile.Key{Name: strconv.Itoa(i)})
		}
		q.run(ctx)
		if n := p.looks.Load(); n < 1 || n > workers {
			t.Errorf("%d keys were looked at, want no more than the %d that may be under way", n, workers)
		}
	})
}

// silent is a Leader of a member whose API server answers when answer is closed.
type silent struct {
	reconcile.Leader
	asked  *atomic.Int64
	answer chan struct{}
}

func (l silent) Create(context.Context, client.Object) error {
	l.asked.Add(1)
	<-l.answer
	return nil
}

// crowded is a Part that notes how many of its looks go on at a time.
type crowded struct {
	reconcile.Part
	now, most atomic.Int64
}

func (*crowded) Name() string { return "crowded" }

func (p *crowded) Sync(ctx context.Context, _ reconcile.Key, into reconcile.Leader, _ []reconcile.Member) error {
	look := func() {
		n := p.now.Add(1)
		for m := p.most.Load(); n > m && !p.most.CompareAndSwap(m, n); m = p.most.Load() {
		}
		<-time.After(time.Millisecond)
		p.now.Add(-1)
	}
	look()
	err := into.Create(ctx, nil)
	look()
	return err
}

// However many members there are, few keys are looked at a time; API servers that are silent hold no look up.
func TestFewLooksAtATime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const members = 10
		ctx, cancel := context.WithCancel(t.Context())
		p := new(crowded)
		c := &crew{parts: []reconcile.Part{p}, looks: newLooks()}
		leader := silent{asked: new(atomic.Int64), answer: make(chan struct{})}
		var running sync.WaitGroup
		for range members {
			q := newQueue(c, 0, &site{}, leader, slog.New(slog.DiscardHandler))
			for i := range workers {
				q.add(reconcile.Key{Name: strconv.Itoa(i)})
			}
			running.Go(func() { q.run(ctx) })
		}
		<-time.After(time.Second)
		if n := leader.asked.Load(); n != members*workers {
			t.Errorf("%d writes are under way, want %d", n, members*workers)
		}
		close(leader.answer)
		<-time.After(time.Second)
		cancel()
		running.Wait()
		if n := p.most.Load(); n != int64(cap(c.looks)) || len(c.looks) != 0 {
			t.Errorf("%d keys were looked at a time and %d still are, want %d and none", n, len(c.looks), cap(c.looks))
		}
	})
}
