package flows

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/controlplane/clusterset/signal"
	"github.com/isthmus-net/isthmus/gateway/desired"
)

// peer is another gateway of the group, with the flows that wait to be sent to it.
type peer struct {
	desired.PeerGateway
	client       *http.Client // of single requests
	streams      *http.Client
	ctx          context.Context // ends when this is no peer any more
	stop         context.CancelFunc
	selfInstance string       // of this process
	noteInstance func(string) // called with the instance of the peer
	noteAbsence  func()       // called when absent has changed
	instance     string       // of the peer, "" until known; guarded by the mutex of the exchange
	pulled       bool         // whether PullAll has asked it

	waits    signal.Signal // notified when the queue may hold flows
	returned signal.Signal // notified when the peer has started and can be reached

	mu     sync.Mutex
	opened []Flow        // go first, in the order in which they opened: one may have the port of another that has ended
	resent map[ends]Flow // the other queued flows
	stats  PeerStats     // without Queued
	absent bool          // see Hander

	received *receiving // the last stream that it sent; guarded by mu
}

// ends are what a backend knows of a flow. No two flows of a gateway have the same ends at once.
type ends struct {
	protocol        string
	source, backend netip.AddrPort
}

func (f *Flow) ends() ends { return ends{f.Protocol, f.Source, f.Backend} }

func newPeer(id desired.PeerGateway, self string, transport http.RoundTripper) *peer {
	return &peer{
		PeerGateway: id, selfInstance: self, noteInstance: func(string) {}, noteAbsence: func() {},
		client: &http.Client{Transport: transport, Timeout: requestTimeout}, streams: &http.Client{Transport: transport},
		waits: signal.New(), returned: signal.New(), resent: map[ends]Flow{}, stats: PeerStats{Gateway: id.Name, URL: id.URL},
	}
}

func (p *peer) add(f Flow) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.queued() >= maxQueued:
		p.stats.Dropped++
		return
	case f.Resent:
		p.resent[f.ends()] = f
	default:
		p.opened = append(p.opened, f)
		delete(p.resent, f.ends()) // it has ended
	}
	p.waits.Notify()
}

// queued returns the length of the queue. The caller holds mu.
func (p *peer) queued() int { return len(p.opened) + len(p.resent) }

// take removes and returns up to maxBatch queued flows.
func (p *peer) take() []Flow {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := min(len(p.opened), maxBatch)
	some := append([]Flow{}, p.opened[:n]...)
	p.opened = slices.Delete(p.opened, 0, n)
	for key, f := range p.resent {
		if len(some) == maxBatch {
			break
		}
		some = append(some, f)
		delete(p.resent, key)
	}
	if p.queued() > 0 {
		p.waits.Notify()
	}
	return some
}

// takeBack queues flows again that were not received.
func (p *peer) takeBack(some []Flow) {
	p.mu.Lock()
	defer p.mu.Unlock()
	later := p.opened
	p.opened = nil
	for _, f := range some {
		if f.Resent {
			p.resent[f.ends()] = f
		} else {
			p.opened = append(p.opened, f)
		}
	}
	p.opened = append(p.opened, later...)
	for i := range p.opened {
		delete(p.resent, p.opened[i].ends())
	}
	p.waits.Notify()
}

// sendLoop sends queued flows until ctx is done: some by a request, and then by streams as long as the peer receives them. The first request
// goes out at once, even without flows: it tells the peer that this gateway has started, and the peer then sends its own flows.
func (p *peer) sendLoop(ctx context.Context, log *slog.Logger) {
	silent := false
	var requestsUntil time.Time // because a stream did not work
	for {
		some := p.take()
		streams, err := p.send(ctx, some)
		if err != nil {
			p.takeBack(some)
		} else if silent {
			log.Info("a peer receives flows again", "gateway", p.Name)
			silent = false
		}
		streams = streams && time.Now().After(requestsUntil)
		if err == nil && streams {
			var accepts bool
			if accepts, err = p.stream(ctx); err != nil {
				p.countSent(0, err)
				p.heard(err)
				if !accepts {
					requestsUntil = time.Now().Add(streamLifetime)
				}
			}
		}
		if err != nil && ctx.Err() == nil && !silent {
			log.Warn("a peer does not receive flows", "gateway", p.Name, "err", err)
			silent = true
		}
		if !p.pause(ctx, streams, err) {
			return
		}
	}
}

// pause waits until a peer gets the next request, given the outcome of the last one. It reports false if ctx is done.
func (p *peer) pause(ctx context.Context, streams bool, err error) bool {
	sleep := batchInterval
	switch {
	case err != nil:
		p.client.CloseIdleConnections() // a machine that died leaves them open
		sleep = retryInterval
	case streams:
		return ctx.Err() == nil
	}
	select {
	case <-ctx.Done():
		return false
	case <-p.returned.C():
	case <-time.After(sleep):
	}
	for err == nil && !p.isWaiting() {
		select {
		case <-ctx.Done():
			return false
		case <-p.waits.C():
		}
	}
	return true
}

// isWaiting reports whether flows are queued.
func (p *peer) isWaiting() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.queued() > 0
}

// post returns a request that sends flows.
func (p *peer) post(ctx context.Context, contentType string, body io.Reader) (*http.Request, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, p.URL+Path, body)
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", contentType)
	request.Header.Set(instanceHeader, p.selfInstance)
	return request, nil
}

// send sends flows by a request of their own, and returns when the peer has imported them. It reports whether the peer receives streams.
func (p *peer) send(ctx context.Context, some []Flow) (streams bool, err error) {
	defer func() {
		p.countSent(len(some), err)
		p.heard(err)
	}()
	body, err := json.Marshal(some)
	if err != nil {
		return false, err
	}
	request, err := p.post(ctx, "application/json", bytes.NewReader(body))
	if err != nil {
		return false, err
	}
	response, err := p.client.Do(request)
	if err != nil {
		return false, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusNoContent {
		return false, refusal(response)
	}
	p.noteInstance(response.Header.Get(instanceHeader))
	return response.Header.Get("Accept-Post") == streamType, nil
}

// heard notes the outcome of a request. A peer that answers in any other way than by accepting it may be a machine whose agent does not run,
// which translates packets as before, unless it was silent meanwhile: then it may have been started again.
func (p *peer) heard(err error) {
	silent := func(target error) bool { return errors.Is(err, target) }
	timeout := net.Error(nil)
	switch {
	case err == nil:
		p.setAbsent(false)
	case p.ctx != nil && p.ctx.Err() != nil:
	case slices.ContainsFunc([]error{errSilent, unix.EHOSTUNREACH, unix.ENETUNREACH, unix.ETIMEDOUT}, silent), errors.As(err, &timeout) && timeout.Timeout():
		p.setAbsent(true)
	}
}

func (p *peer) setAbsent(absent bool) {
	p.mu.Lock()
	changed := p.absent != absent
	p.absent = absent
	p.mu.Unlock()
	if changed {
		p.noteAbsence()
	}
}

func (p *peer) isAbsent() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.absent
}

// pullReachable is pull, again and again until the network leads to the peer or ctx is done. An IPv6 address of this machine cannot be
// used while it is tentative (RFC 4862, section 5.4).
func (p *peer) pullReachable(ctx context.Context) ([]Flow, error) {
	for {
		all, err := p.pull(ctx)
		if !slices.ContainsFunc([]error{unix.EHOSTUNREACH, unix.ENETUNREACH, unix.ENETDOWN, unix.EADDRNOTAVAIL}, func(target error) bool { return errors.Is(err, target) }) {
			return all, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(reachInterval):
		}
	}
}

// pull returns all flows of the peer.
func (p *peer) pull(ctx context.Context) ([]Flow, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, p.URL+Path, http.NoBody)
	if err != nil {
		return nil, err
	}
	response, err := p.client.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return nil, errors.New(response.Status)
	}
	return read(json.NewDecoder(io.LimitReader(response.Body, maxAnswer)), p.Name)
}
