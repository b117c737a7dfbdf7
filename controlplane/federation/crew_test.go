package federation

import (
	"context"
	"log/slog"
	"strconv"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-net/isthmus/controlplane/federation/internal/fleet"
	"github.com/isthmus-net/isthmus/controlplane/federation/part"
)

// What matters in one member alone is looked at there, by its Part.
func TestWhereAChangeIsLookedAt(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		a, b := new(fleet.Member), new(fleet.Member)
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
		c.enqueueAt(0, a, part.Key{Name: "here"})
		if diff := cmp.Diff([]int{1, 0, 0}, waiting()); diff != "" {
			t.Errorf("keys after a change that matters in one member (-want +have):\n%s", diff)
		}
		c.enqueue(0, part.Key{Name: "everywhere"})
		if diff := cmp.Diff([]int{2, 0, 1}, waiting()); diff != "" {
			t.Errorf("keys after one that matters in all (-want +have):\n%s", diff)
		}
	})
}

// endless is a Part that has always more to look at.
type endless struct {
	part.Part
	looks atomic.Int64
	end   func()
}

func (*endless) Name() string { return "endless" }

func (p *endless) Sync(context.Context, part.Key, part.Leader, []part.Member) error {
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
		q := newQueue(&crew{parts: []part.Part{p}}, 0, &site{}, nil, slog.New(slog.DiscardHandler))
		for i := range 100 {
			q.add(part.Key{Name: strconv.Itoa(i)})
		}
		q.run(ctx)
		if n := p.looks.Load(); n < 1 || n > workers {
			t.Errorf("%d keys were looked at, want no more than the %d that may be under way", n, workers)
		}
	})
}
