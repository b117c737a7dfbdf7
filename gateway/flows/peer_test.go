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
