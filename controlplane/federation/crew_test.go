package federation

import (
	"log/slog"
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
