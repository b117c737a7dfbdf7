package agent

import (
	"context"
	"sync"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// EventFilter says which events somebody wants to be told.
type EventFilter struct {
	Rate    uint32                 // of so many choices one is told, all of them by 1; never 0
	Service clusterset.ServiceName // the zero value means any, and clients of none
	Refused bool                   // no choices
	Reason  bpf.DropReason         // of refusals alone; DropNone means any, and choices
}

func (w EventFilter) wants(e datapath.Event) bool {
	return (w.Service == clusterset.ServiceName{} || w.Service == e.Service) &&
		(!w.Refused || e.Refused) && (w.Reason == bpf.DropNone || w.Reason == e.Reason)
}

// buffered is how many events wait for one who is slow. Later ones are lost to them, and to nobody else.
const buffered = 1024

// watcher is one who is told.
type watcher struct {
	EventFilter

	events chan datapath.Event
	broken chan error // why there will be no more events; holds one
	// Guarded by watched.mu:
	seen uint64 // choices that it wants, told or not
	lost uint64 // events that found no room, since they were last told of
}

// watched shares the one stream of events of a node among all who watch. The programs make events only while
// somebody does, at the rate of whoever wants the most. The zero value is ready.
type watched struct {
	mu       sync.Mutex // guards what follows
	watchers map[*watcher]bool
	rate     uint32        // what the watchers want together, 0 without any
	changed  chan struct{} // closed when rate is another one; nil until somebody waits
}

// Observe calls tell for the events that w wants, from this goroutine, until ctx ends; then it returns nil. lost is how
// many of them were lost before e because tell was slow. An error of tell ends it and is returned. Several may
// observe at once; nothing comes unless Run runs.
func (a *Agent) Observe(ctx context.Context, w EventFilter, tell func(e datapath.Event, lost uint64) error) error {
	me := a.watched.join(w)
	defer a.watched.leave(me)
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-me.broken:
			return err
		case e := <-me.events:
			if err := tell(e, a.watched.takeLost(me)); err != nil {
				return err
			}
		}
	}
}

func (o *watched) join(w EventFilter) *watcher {
	me := &watcher{EventFilter: w, events: make(chan datapath.Event, buffered), broken: make(chan error, 1)}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.watchers == nil {
		o.watchers = map[*watcher]bool{}
	}
	o.watchers[me] = true
	o.setRate()
	return me
}

func (o *watched) leave(w *watcher) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.watchers, w)
	o.setRate()
}

// setRate finds out what the watchers want together. The caller holds mu.
func (o *watched) setRate() {
	var rate uint32
	for w := range o.watchers {
		if rate == 0 || w.Rate < rate {
			rate = w.Rate
		}
	}
	if rate != o.rate {
		o.rate = rate
		if o.changed != nil {
			close(o.changed)
			o.changed = nil
		}
	}
}

// wanted returns the rate and what is closed when it is another one.
func (o *watched) wanted() (rate uint32, changed <-chan struct{}) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.changed == nil {
		o.changed = make(chan struct{})
	}
	return o.rate, o.changed
}

// run observes while somebody watches, until ctx ends. When the rate changes, events of a moment are lost.
func (o *watched) run(ctx context.Context, observe func(context.Context, uint32, func(datapath.Event)) error) error {
	for ctx.Err() == nil {
		rate, changed := o.wanted()
		if rate == 0 {
			select {
			case <-ctx.Done():
			case <-changed:
			}
			continue
		}
		until, stop := context.WithCancel(ctx)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			select {
			case <-until.Done():
			case <-changed:
				stop()
			}
		}()
		err := observe(until, rate, func(e datapath.Event) { o.tell(e, rate) })
		stop()
		<-ended
		if err != nil && ctx.Err() == nil {
			o.fail(err)
		}
	}
	return nil
}

// tell hands an event to all who want it. One in rate choices comes here.
func (o *watched) tell(e datapath.Event, rate uint32) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for w := range o.watchers {
		if !w.wants(e) {
			continue
		}
		if !e.Refused {
			w.seen++
			if every := uint64(max(1, w.Rate/rate)); w.seen%every != 1%every {
				continue
			}
		}
		select {
		case w.events <- e:
		default:
			w.lost++
		}
	}
}

func (o *watched) takeLost(w *watcher) uint64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	lost := w.lost
	w.lost = 0
	return lost
}

// fail tells all who watch that there will be no more events, and lets nobody watch.
func (o *watched) fail(err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for w := range o.watchers {
		w.broken <- err
	}
	clear(o.watchers)
	o.setRate()
}
