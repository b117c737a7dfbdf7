package agents

import (
	"context"
	"errors"
	"net/http"
	"reflect"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/clusterset/signal"
	"github.com/isthmus-net/isthmus/gateway/desired"
)

// firstRetry is the pause after the first failure. Each further failure doubles it, up to Config.Retry.
const firstRetry = 50 * time.Millisecond

// client keeps one gateway at its desired state.
type client struct {
	clients  *Clients
	gateway  string
	url      string
	identity string
	api      *api
	stop     context.CancelFunc
	wake     signal.Signal
	// renewAfter is when the certificate is looked at again, after an attempt to renew it.
	renewAfter time.Time

	mu      sync.Mutex
	request *desired.Request // the desired state; nil: none yet
	waiting []chan struct{}  // closed when request was tried
	report  Report
}

func (f *Clients) newClient(gateway string, t Target) *client {
	ctx, stop := context.WithCancel(f.ctx)
	l := &client{
		clients: f, gateway: gateway, url: t.URL, identity: t.Identity, api: newAPI(t.URL, f.cfg.TLS(t.Identity), f.cfg.Timeout, f.cfg.MaxAge),
		stop: stop, wake: signal.New(),
	}
	f.group.Go(func() { l.run(ctx) })
	return l
}

// set replaces the desired state. The returned channel is closed when it was tried. It is nil if waiting makes no sense:
// the gateway already has the state, or did not answer last time. The lock of Clients is held.
func (l *client) set(s desired.State) <-chan struct{} {
	l.mu.Lock()
	last := l.request // only set changes it
	l.mu.Unlock()
	request := last.Next(0, s) // the generation is set when it is sent
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.request != nil && l.request.Hash == request.Hash {
		return nil
	}
	l.request = &request
	l.report.Applied, l.report.Refused = l.report.Asked && l.report.Err == nil && l.report.Status.Hash == request.Hash, nil
	l.wake.Notify()
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

// run works until ctx ends.
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
		case <-l.wake.C():
		case <-ctx.Done():
		}
		timer.Stop()
	}
}

// once reads the status of the gateway, and sends the desired state if the gateway has another one.
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
	if err == nil {
		l.renew(ctx)
	}
	after.Certificate = l.api.certificate
	l.publish(request, before, after)
	if after.Refused != nil && after.Refused.Status >= http.StatusInternalServerError {
		return after.Refused // a retry may help, unlike with an invalid state
	}
	return after.Err
}

// send sends a request with a higher generation than the gateway has.
func (l *client) send(ctx context.Context, request *desired.Request, is Report) Report {
	if is.Status.Generation > l.clients.currentGeneration() {
		// Another controller has written while this one could not reach the gateway, or still does.
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
	case err != nil: // includes ErrOlder: the next attempt asks the fence first
		is.Err = err
	default:
		is.Applied = true
		is.Status = status
		l.clients.cfg.Log.Info("gateway reconfigured", "gateway", l.gateway, "generation", send.Generation, "vips", len(send.State.VIPs))
	}
	return is
}

// currentGeneration returns the highest known generation.
func (f *Clients) currentGeneration() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.generation
}

// publish publishes the result of a request, unless another state is desired meanwhile.
func (l *client) publish(request *desired.Request, before, after Report) {
	l.mu.Lock()
	if l.request != request {
		after.Applied, after.Refused = false, nil
		l.wake.Notify() // try again at once
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

// releaseIfCurrent releases the waiters of a request, if it is still the desired one.
func (l *client) releaseIfCurrent(request *desired.Request) {
	l.mu.Lock()
	current := l.request == request
	l.mu.Unlock()
	if current {
		l.release()
	}
}

// release releases all waiters.
func (l *client) release() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, done := range l.waiting {
		close(done)
	}
	l.waiting = nil
}

// same reports whether two reports look the same to a person.
func same(a, b Report) bool {
	text := func(err error) string {
		if err == nil {
			return ""
		}
		return err.Error()
	}
	return a.Asked == b.Asked && a.Applied == b.Applied && text(a.Err) == text(b.Err) && reflect.DeepEqual(a.Refused, b.Refused) && reflect.DeepEqual(a.Status, b.Status) &&
		a.Certificate == b.Certificate
}
