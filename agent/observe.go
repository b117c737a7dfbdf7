package agent

import (
	"context"
	"sync"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// eventSource emits the events of the node: all refusals, and one in rate choices. One Observe may run at a time.
type eventSource interface {
	Observe(ctx context.Context, rate uint32, handle func(datapath.Event)) error
}

// EventFilter selects the events that an observer gets.
type EventFilter struct {
	Rate    uint32                 // one in Rate choices, all of them with 1; never 0
	Service clusterset.ServiceName // the zero value selects all, and clients without a Service
	Refused bool                   // refusals only
	Reason  bpf.DropReason         // refusals of this reason only; DropNone selects all, and choices
}

func (f EventFilter) matches(e datapath.Event) bool {
	return (f.Service == clusterset.ServiceName{} || f.Service == e.Service) &&
		(!f.Refused || e.Refused) && (f.Reason == bpf.DropNone || f.Reason == e.Reason)
}

// bufferSize is how many events wait for a slow observer. Later events are lost for this observer only.
const bufferSize = 1024

// observer is one call of Observe.
type observer struct {
	EventFilter

	events chan datapath.Event
	failed chan error // the reason why no more events will come; holds one
	// Guarded by eventHub.mu:
	seen uint64 // choices that match, delivered or not
	lost uint64 // events that found the buffer full, since the last delivery
}

// eventHub shares the one stream of events of a node among all observers. The programs emit events only while there
// are observers, at the highest rate that any of them asks for.
type eventHub struct {
	source eventSource

	mu        sync.Mutex // guards what follows
	observers map[*observer]bool
	rate      uint32        // that the observers need together, 0 without any
	changed   chan struct{} // closed when rate changes; nil while run does not wait
}

// Observe calls handle for the events that match f until ctx ends; then it returns nil. It calls handle from its own
// goroutine. lost is the number of events before e that were lost because handle was slow. An error of handle ends Observe
// and is returned. Several may observe at once. Events come only while Run runs.
func (a *Agent) Observe(ctx context.Context, f EventFilter, handle func(e datapath.Event, lost uint64) error) error {
	o := a.events.join(f)
	defer a.events.leave(o)
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-o.failed:
			return err
		case e := <-o.events:
			if err := handle(e, a.events.takeLost(o)); err != nil {
				return err
			}
		}
	}
}

func (h *eventHub) join(f EventFilter) *observer {
	o := &observer{EventFilter: f, events: make(chan datapath.Event, bufferSize), failed: make(chan error, 1)}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.observers == nil {
		h.observers = map[*observer]bool{}
	}
	h.observers[o] = true
	h.setRate()
	return o
}

func (h *eventHub) leave(o *observer) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.observers, o)
	h.setRate()
}

// setRate computes the rate that the observers need together. The caller holds mu.
func (h *eventHub) setRate() {
	var rate uint32
	for o := range h.observers {
		if rate == 0 || o.Rate < rate {
			rate = o.Rate
		}
	}
	if rate != h.rate {
		h.rate = rate
		if h.changed != nil {
			close(h.changed)
			h.changed = nil
		}
	}
}

// currentRate returns the rate, and a channel that is closed when it changes.
func (h *eventHub) currentRate() (rate uint32, changed <-chan struct{}) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.changed == nil {
		h.changed = make(chan struct{})
	}
	return h.rate, h.changed
}

// run observes the source while there are observers, until ctx ends. Events are lost for a moment when the rate changes.
func (h *eventHub) run(ctx context.Context) error {
	for ctx.Err() == nil {
		rate, changed := h.currentRate()
		if rate == 0 {
			select {
			case <-ctx.Done():
			case <-changed:
			}
			continue
		}
		if err := h.observeAt(ctx, rate, changed); err != nil && ctx.Err() == nil {
			h.fail(err)
		}
	}
	return nil
}

// observeAt observes the source at one rate, until changed is closed or ctx ends.
func (h *eventHub) observeAt(ctx context.Context, rate uint32, changed <-chan struct{}) error {
	ctx, stop := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		select {
		case <-ctx.Done():
		case <-changed:
			stop()
		}
	}()
	err := h.source.Observe(ctx, rate, func(e datapath.Event) { h.deliver(e, rate) })
	stop()
	<-ended
	return err
}

// deliver passes an event to all observers whose filter it matches. The source emits one in rate choices.
func (h *eventHub) deliver(e datapath.Event, rate uint32) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for o := range h.observers {
		if !o.matches(e) {
			continue
		}
		if !e.Refused {
			o.seen++
			if every := uint64(max(1, o.Rate/rate)); o.seen%every != 1%every {
				continue
			}
		}
		select {
		case o.events <- e:
		default:
			o.lost++
		}
	}
}

func (h *eventHub) takeLost(o *observer) uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	lost := o.lost
	o.lost = 0
	return lost
}

// fail ends all observers with an error and removes them.
func (h *eventHub) fail(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for o := range h.observers {
		o.failed <- err
	}
	clear(h.observers)
	h.setRate()
}
