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

// observation records the events that one observer gets.
type observation struct {
	events []string
	stop   context.CancelFunc
	done   chan error
}

func observe(ctx context.Context, a *Agent, f EventFilter) *observation {
	ctx, stop := context.WithCancel(ctx)
	o := &observation{stop: stop, done: make(chan error, 1)}
	go func() {
		o.done <- a.Observe(ctx, f, func(e datapath.Event, lost uint64) error {
			text := e.Service.Name
			if e.Refused {
				text += " " + e.Reason.String()
			}
			if lost > 0 {
				text += fmt.Sprintf(" after %d lost", lost)
			}
			o.events = append(o.events, text)
			return nil
		})
	}()
	return o
}

// observeFunc is an eventSource.
type observeFunc func(ctx context.Context, rate uint32, handle func(datapath.Event)) error

func (f observeFunc) Observe(ctx context.Context, rate uint32, handle func(datapath.Event)) error {
	return f(ctx, rate, handle)
}

// The programs emit events only while there are observers, at the highest rate that any of them needs. Each observer gets
// the events that match its filter.
func TestObserve(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := datapath.NewFake(lb.NewState())
		a := mustNew(t, f)
		ctx, cancel := context.WithCancel(t.Context())
		run := make(chan error)
		go func() { run <- a.events.run(ctx) }()
		rate := func(want uint32) {
			t.Helper()
			synctest.Wait()
			if have := f.Rate.Load(); have != want {
				t.Fatalf("the programs emit one in %d choices, want %d", have, want)
			}
		}
		rate(0)
		all := observe(ctx, a, EventFilter{Rate: 4})
		rate(4)
		refusals := observe(ctx, a, EventFilter{Rate: 8, Refused: true})
		web := observe(ctx, a, EventFilter{Rate: 2, Service: cs.ServiceName{Namespace: "demo", Name: "web"}})
		rate(2)
		reason := observe(ctx, a, EventFilter{Rate: 2, Reason: bpf.DropNoBackend})
		synctest.Wait()
		for _, e := range []datapath.Event{
			chosen("web"), chosen("dns"), refused("web", bpf.DropNoBackend), chosen("web"), refused("", bpf.DropNoFrontend), chosen("dns"),
		} {
			f.Events <- e
		}
		synctest.Wait()
		for _, c := range []struct {
			name string
			o    *observation
			want string
		}{
			{"all, at half the rate", all, "[web web no_backend web  no_frontend]"},
			{"refusals", refusals, "[web no_backend  no_frontend]"},
			{"of a Service", web, "[web web no_backend web]"},
			{"of a reason", reason, "[web no_backend]"},
		} {
			if have := fmt.Sprint(c.o.events); have != c.want {
				t.Errorf("%s: got %s, want %s", c.name, have, c.want)
			}
		}
		web.stop()
		reason.stop()
		rate(4)
		all.stop()
		refusals.stop()
		rate(0)
		for _, o := range []*observation{all, refusals, web, reason} {
			if err := <-o.done; err != nil {
				t.Error(err)
			}
		}
		cancel()
		if err := <-run; err != nil {
			t.Error(err)
		}
	})
}

// A slow observer loses events and gets their number. Other observers lose none.
func TestSlowObserver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var h eventHub
		slow, quick := h.join(EventFilter{Rate: 1}), h.join(EventFilter{Rate: 1})
		for range bufferSize + 7 {
			h.deliver(chosen("web"), 1)
			<-quick.events
		}
		if n := h.takeLost(slow); n != 7 {
			t.Errorf("%d lost, want 7", n)
		}
		if n := h.takeLost(slow); n != 0 {
			t.Errorf("%d lost since, want 0", n)
		}
		if n := h.takeLost(quick); n != 0 {
			t.Errorf("the quick one lost %d, want 0", n)
		}
	})
}

// An error of the source ends all observers with that error; a later observer starts the source again. An error of an
// observer's handler ends that observer.
func TestObserveErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broken := errors.New("no ring buffer")
		f := datapath.NewFake(lb.NewState())
		a := mustNew(t, f)
		ctx, cancel := context.WithCancel(t.Context())
		failing := true
		run := make(chan error)
		a.events.source = observeFunc(func(ctx context.Context, rate uint32, handle func(datapath.Event)) error {
			if failing {
				failing = false
				return broken
			}
			return f.Observe(ctx, rate, handle)
		})
		go func() { run <- a.events.run(ctx) }()
		first := observe(ctx, a, EventFilter{Rate: 1})
		if err := <-first.done; !errors.Is(err, broken) {
			t.Errorf("%v, want %v", err, broken)
		}
		closed := errors.New("reader closed")
		ended := make(chan error, 1)
		go func() {
			ended <- a.Observe(ctx, EventFilter{Rate: 1}, func(datapath.Event, uint64) error { return closed })
		}()
		f.Events <- chosen("web")
		if err := <-ended; !errors.Is(err, closed) {
			t.Errorf("%v, want %v", err, closed)
		}
		cancel()
		if err := <-run; err != nil {
			t.Error(err)
		}
	})
}
