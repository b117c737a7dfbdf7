package agents

import (
	"context"
	"errors"
	"net/http"
	"reflect"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

// firstRetry is when a gateway is tried again after the first failure; each further one doubles it, up to Config.Retry.
const firstRetry = 50 * time.Millisecond

// link is the conversation with one gateway.
type client struct {
	clients  *Clients
	gateway  string
	url      string
	identity string
	api      *api
	stop     context.CancelFunc
	wake     chan struct{}

	mu      sync.Mutex
	request *desired.Request // what it is to have; nil: not said yet
	waiting []chan struct{}  // for request to have been tried
	report  Report
}

func (f *Clients) newClient(gateway string, t Target) *client {
	ctx, stop := context.WithCancel(f.ctx)
	l := &client{
		clients: f, gateway: gateway, url: t.URL, identity: t.Identity, api: newAPI(t.URL, f.cfg.TLS(t.Identity), f.cfg.Timeout),
		stop: stop, wake: make(chan struct{}, 1),
	}
	f.group.Go(func() { l.run(ctx) })
	return l
}

// want says what the gateway is to have. The channel is closed when it was tried; nil where nobody should wait: it has it
// already, or it did not answer the last time. The fleet's lock is held.
func (l *client) set(s desired.State) <-chan struct{} {
	request := desired.NewRequest(0, s) // its generation comes when it is sent
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.request != nil && l.request.Hash == request.Hash {
		return nil
	}
	l.request = &request
	l.report.Applied, l.report.Refused = l.report.Asked && l.report.Err == nil && l.report.Status.Hash == request.Hash, nil
	select {
	case l.wake <- struct{}{}:
	default:
	}
	if l.report.Err != nil {
		return nil
	}
	done := make(chan struct{})
	l.waiting = append(l.waiting, done)
	return done
}

func (l *client) current() Report {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.report
}

// run goes on until ctx ends.
func (l *client) run(ctx context.Context) {
	defer l.api.close()
	defer l.release()
	retry := time.Duration(0)
	for ctx.Err() == nil {
		err := l.once(ctx)
		pause := l.clients.cfg.Poll
		if err != nil {
			retry = min(max(firstRetry, 2*retry), l.clients.cfg.Retry)
			pause = retry
		} else {
			retry = 0
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-l.wake:
		case <-ctx.Done():
		}
		timer.Stop()
	}
}

// once asks the gateway what it has and tells it what it is to have, where that is something else.
func (l *client) once(ctx context.Context) error {
	l.mu.Lock()
	request, before := l.request, l.report
	l.mu.Unlock()
	status, err := l.api.state(ctx)
	after := Report{Err: err, Status: status, Asked: true}
	if err != nil {
		after.Status = before.Status
	}
	if err == nil && request != nil {
		if after.Applied = status.Hash == request.Hash; !after.Applied {
			after = l.send(ctx, request, after)
		}
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	l.publish(request, before, after)
	if after.Refused != nil && after.Refused.Status >= http.StatusInternalServerError {
		return after.Refused // it may pass soon; what is wrong with the state itself will not
	}
	return after.Err
}

// tell sends a request under a generation that is newer than what the gateway has.
func (l *client) send(ctx context.Context, request *desired.Request, is Report) Report {
	if is.Status.Generation > l.clients.currentGeneration() {
		// Another controller has spoken to it while it could not be reached, or speaks to it now.
		if err := l.clients.cfg.Fence(ctx); err != nil {
			is.Err = err
			return is
		}
		l.clients.raiseGeneration(is.Status.Generation)
	}
	send := *request
	send.Generation = l.clients.nextGeneration()
	status, err := l.api.reconfigure(ctx, send)
	var refused *Refused
	switch {
	case errors.As(err, &refused):
		is.Refused = refused
	case err != nil: // ErrOlder too: it is asked again, and the fence before it
		is.Err = err
	default:
		is.Applied = true
		is.Status = status
		l.clients.cfg.Log.Info("gateway reconfigured", "gateway", l.gateway, "generation", send.Generation, "vips", len(send.State.VIPs))
	}
	return is
}

// known is the highest generation that this fleet knows of.
func (f *Clients) currentGeneration() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.generation
}

// settle publishes what came of a request, unless another one is wanted meanwhile.
func (l *client) publish(request *desired.Request, before, after Report) {
	l.mu.Lock()
	if l.request != request {
		after.Applied, after.Refused = false, nil
		select { // at once
		case l.wake <- struct{}{}:
		default:
		}
	}
	l.report = after
	l.mu.Unlock()
	if after.Err == nil && before.Err != nil {
		l.clients.cfg.Log.Info("gateway answers again", "gateway", l.gateway)
	}
	if after.Err != nil && (before.Err == nil || !before.Asked) {
		l.clients.cfg.Log.Warn("gateway does not answer", "gateway", l.gateway, "err", after.Err)
	}
	if !same(before, after) {
		l.clients.cfg.Changed()
	}
	l.releaseIfCurrent(request)
}

// tried lets go who waits for a request.
func (l *client) releaseIfCurrent(request *desired.Request) {
	l.mu.Lock()
	current := l.request == request
	l.mu.Unlock()
	if current {
		l.release()
	}
}

// release lets everybody go who waits.
func (l *client) release() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, done := range l.waiting {
		close(done)
	}
	l.waiting = nil
}

// same reports whether two reports tell a person the same.
func same(a, b Report) bool {
	text := func(err error) string {
		if err == nil {
			return ""
		}
		return err.Error()
	}
	return a.Asked == b.Asked && a.Applied == b.Applied && text(a.Err) == text(b.Err) && reflect.DeepEqual(a.Refused, b.Refused) && reflect.DeepEqual(a.Status, b.Status)
}
