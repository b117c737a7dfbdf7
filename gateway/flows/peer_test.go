package flows

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

// roundTrip answers requests without a network.
type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// Flows that have just opened go before those that are sent again, and in their order, also after a failed request.
func TestOpenedFlowsGoFirst(t *testing.T) {
	t.Parallel()
	p := newPeer(desired.PeerGateway{URL: "https://gateway-2"}, "one", nil)
	for port := range uint16(4 * maxBatch) {
		f := flow(port + 1)
		f.Resent = port%2 == 0
		p.add(f)
	}
	for range 2 {
		first := p.take()
		for i, f := range first {
			if want := flow(2 * uint16(i+1)); f != want {
				t.Fatalf("flow %d is %v, want %v", i, f, want)
			}
		}
		p.takeBack(first)
	}
	p.add(flow(1)) // was queued to be sent again, and has its port again
	for i := range 4 {
		if have := len(p.take()); have != maxBatch {
			t.Errorf("request %d has %d flows", i, have)
		}
	}
	if p.queued() > 0 {
		t.Errorf("%d flows stay", p.queued())
	}
}

// A gateway that starts sends its first request at once. A single flow is sent at once; flows that open during a request,
// or just after it, go together.
func TestFlowsAreSentAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const rtt = 2 * time.Millisecond // round trip to the peer
		start := time.Now()
		type request struct {
			after time.Duration
			flows int
		}
		requests := make(chan request, 10)
		m := newPeer(desired.PeerGateway{URL: "https://gateway-2"}, "one", roundTrip(func(r *http.Request) (*http.Response, error) {
			var some []Flow
			if err := json.NewDecoder(r.Body).Decode(&some); err != nil {
				return nil, err
			}
			requests <- request{time.Since(start), len(some)}
			<-time.After(rtt)
			return &http.Response{StatusCode: http.StatusNoContent, Body: io.NopCloser(strings.NewReader(""))}, nil
		}))
		ctx, stop := context.WithCancel(t.Context())
		var sending sync.WaitGroup
		sending.Go(func() { m.sendLoop(ctx, slog.New(slog.DiscardHandler)) })
		if have, want := <-requests, (request{0, 0}); have != want {
			t.Errorf("the first request is %v, want %v", have, want)
		}
		<-time.After(rtt + batchInterval)
		synctest.Wait()
		start = time.Now()
		m.add(flow(1))
		if have, want := <-requests, (request{0, 1}); have != want {
			t.Errorf("the first flow is sent as %v, want %v", have, want)
		}
		for port := range uint16(maxBatch + 10) {
			m.add(flow(2 + port))
		}
		for i, want := range []request{{rtt + batchInterval, maxBatch}, {2 * (rtt + batchInterval), 10}} {
			if have := <-requests; have != want {
				t.Errorf("request %d afterwards is %v, want %v", i+1, have, want)
			}
		}
		stop()
		sending.Wait()
	})
}
