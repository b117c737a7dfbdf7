package agent

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/bpf/lb"
	cs "github.com/isthmus-net/isthmus/controlplane/clusterset"
)

func chosen(service string) datapath.Event {
	return datapath.Event{Service: cs.ServiceName{Namespace: "demo", Name: service}}
}

func refused(service string, reason bpf.DropReason) datapath.Event {
	e := chosen(service)
	e.Refused, e.Reason = true, reason
	return e
}

// watching is somebody who observes and writes down what comes.
type watching struct {
	told []string
	stop context.CancelFunc
	done chan error
}

func watch(ctx context.Context, a *Agent, w EventFilter) *watching {
	ctx, stop := context.WithCancel(ctx)
	me := &watching{stop: stop, done: make(chan error, 1)}
	go func() {
		me.done <- a.Observe(ctx, w, func(e datapath.Event, lost uint64) error {
			text := e.Service.Name
			if e.Refused {
				text += " " + e.Reason.String()
			}
			if lost > 0 {
				text += fmt.Sprintf(" after %d lost", lost)
			}
			me.told = append(me.told, text)
			return nil
		})
	}()
	return me
}

// The programs make events only while somebody watches, at the rate of whoever wants the most; everybody is told
// what they want.
func TestObserve(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := datapath.NewFake(lb.NewState())
		a := mustNew(t, f)
		ctx, cancel := context.WithCancel(t.Context())
		run := make(chan error)
		go func() { run <- a.watched.run(ctx, f.Observe) }()
		rate := func(want uint32) {
			t.Helper()
			synctest.Wait()
			if have := f.Rate.Load(); have != want {
				t.Fatalf("the programs make an event of one in %d choices, want %d", have, want)
			}
		}
		rate(0)
		all := watch(ctx, a, EventFilter{Rate: 4})
		rate(4)
		refusals := watch(ctx, a, EventFilter{Rate: 8, Refused: true})
		web := watch(ctx, a, EventFilter{Rate: 2, Service: cs.ServiceName{Namespace: "demo", Name: "web"}})
		rate(2)
		reason := watch(ctx, a, EventFilter{Rate: 2, Reason: bpf.DropNoBackend})
		synctest.Wait()
		for _, e := range []datapath.Event{
			chosen("web"), chosen("dns"), refused("web", bpf.DropNoBackend), chosen("web"), refused("", bpf.DropNoFrontend), chosen("dns"),
		} {
			f.Events <- e
		}
		synctest.Wait()
		for _, c := range []struct {
			name string
			w    *watching
			want string
		}{
			{"all, at half the rate", all, "[web web no_backend web  no_frontend]"},
			{"refusals", refusals, "[web no_backend  no_frontend]"},
			{"of a Service", web, "[web web no_backend web]"},
			{"of a reason", reason, "[web no_backend]"},
		} {
			if have := fmt.Sprint(c.w.told); have != c.want {
				t.Errorf("%s: told %s, want %s", c.name, have, c.want)
			}
		}
		web.stop()
		reason.stop()
		rate(4)
		all.stop()
		refusals.stop()
		rate(0)
		for _, w := range []*watching{all, refusals, web, reason} {
			if err := <-w.done; err != nil {
				t.Error(err)
			}
		}
		cancel()
		if err := <-run; err != nil {
			t.Error(err)
		}
	})
}

// Who is slow loses events, is told how many, and costs nobody else any.
func TestObserveSlowly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o watched
		slow, quick := o.join(EventFilter{Rate: 1}), o.join(EventFilter{Rate: 1})
		for range buffered + 7 {
			o.tell(chosen("web"), 1)
			<-quick.events
		}
		if n := o.takeLost(slow); n != 7 {
			t.Errorf("%d lost, want 7", n)
		}
		if n := o.takeLost(slow); n != 0 {
			t.Errorf("%d lost since, want 0", n)
		}
		if n := o.takeLost(quick); n != 0 {
			t.Errorf("the quick one lost %d, want 0", n)
		}
	})
}

// A stream that breaks ends all who watch with the reason; the next one begins anew. So does whoever cannot go on.
func TestObserveBroken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broken := errors.New("no ring buffer")
		f := datapath.NewFake(lb.NewState())
		a := mustNew(t, f)
		ctx, cancel := context.WithCancel(t.Context())
		failing := true
		run := make(chan error)
		go func() {
			run <- a.watched.run(ctx, func(ctx context.Context, rate uint32, tell func(datapath.Event)) error {
				if failing {
					failing = false
					return broken
				}
				return f.Observe(ctx, rate, tell)
			})
		}()
		first := watch(ctx, a, EventFilter{Rate: 1})
		if err := <-first.done; !errors.Is(err, broken) {
			t.Errorf("%v, want %v", err, broken)
		}
		gone := errors.New("reader is gone")
		ended := make(chan error, 1)
		go func() {
			ended <- a.Observe(ctx, EventFilter{Rate: 1}, func(datapath.Event, uint64) error { return gone })
		}()
		f.Events <- chosen("web")
		if err := <-ended; !errors.Is(err, gone) {
			t.Errorf("%v, want %v", err, gone)
		}
		cancel()
		if err := <-run; err != nil {
			t.Error(err)
		}
	})
}
