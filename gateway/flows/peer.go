package flows

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/clusterset/signal"
	"github.com/isthmus-net/isthmus/gateway/desired"
)

// peer is another gateway of the group, with the flows that wait to be sent to it.
type peer struct {
	desired.PeerGateway
	client       *http.Client
	stop         context.CancelFunc
	selfInstance string       // of this process
	noteInstance func(string) // called with the instance of the peer
	instance     string       // of the peer, "" until known; guarded by the mutex of the exchange
	pulled       bool         // whether PullAll has asked it

	queued   signal.Signal // notified when the queue may hold flows
	returned signal.Signal // notified when the peer has restarted and can be reached again

	mu    sync.Mutex
	queue map[Flow]struct{}
	stats PeerStats // without Queued
}

func newPeer(id desired.PeerGateway, self string, transport http.RoundTripper) *peer {
	return &peer{
		PeerGateway: id, selfInstance: self, noteInstance: func(string) {}, client: &http.Client{Transport: transport, Timeout: requestTimeout},
		queued: signal.New(), returned: signal.New(), queue: map[Flow]struct{}{}, stats: PeerStats{Gateway: id.Name, URL: id.URL},
	}
}

func (p *peer) add(f Flow) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.queue) >= maxQueued {
		p.stats.Dropped++
		return
	}
	p.queue[f] = struct{}{}
	p.queued.Notify()
}

// take removes and returns up to maxBatch queued flows.
func (p *peer) take() (some []Flow) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for f := range p.queue {
		if len(some) == maxBatch {
			p.queued.Notify()
			break
		}
		some = append(some, f)
		delete(p.queue, f)
	}
	return some
}

// sendLoop sends queued flows until ctx is done. The first request goes out at once, even without flows: it tells the
// peer that this gateway has started, and the peer then sends its own flows.
func (p *peer) sendLoop(ctx context.Context, log *slog.Logger) {
	for silent, met := false, false; ; {
		if met {
			select {
			case <-ctx.Done():
				return
			case <-p.queued.C():
			}
		}
		some := p.take()
		if len(some) == 0 && met {
			continue
		}
		wait := batchInterval
		err := p.send(ctx, some)
		p.countSent(len(some), err)
		if err != nil && ctx.Err() == nil {
			for _, f := range some {
				p.add(f)
			}
			p.client.CloseIdleConnections() // a machine that died leaves them open
			wait = retryInterval
			if !silent {
				log.Warn("a peer does not receive flows", "gateway", p.Name, "err", err)
			}
		}
		if err == nil && silent {
			log.Info("a peer receives flows again", "gateway", p.Name)
		}
		silent, met = err != nil, met || err == nil
		select {
		case <-ctx.Done():
			return
		case <-p.returned.C():
		case <-time.After(wait):
		}
	}
}

func (p *peer) send(ctx context.Context, some []Flow) error {
	if some == nil {
		some = []Flow{}
	}
	body, err := json.Marshal(some)
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, p.URL+Path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set(instanceHeader, p.selfInstance)
	response, err := p.client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	message, _ := io.ReadAll(io.LimitReader(response.Body, 1<<10)) // a truncated message is good enough
	if response.StatusCode != http.StatusNoContent {
		return fmt.Errorf("%s: %s", response.Status, bytes.TrimSpace(message))
	}
	p.noteInstance(response.Header.Get(instanceHeader))
	return nil
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
	return read(io.LimitReader(response.Body, maxAnswer), p.Name)
}
