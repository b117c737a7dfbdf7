package flows

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

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

// A peer that has no state yet refuses flows. They are sent at once when its first request shows that it has one.
func TestPeerBegins(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		requests := make(chan int, 10)
		code := http.StatusForbidden
		p := newPeer(desired.PeerGateway{URL: "https://gateway-2"}, "one", roundTrip(func(r *http.Request) (*http.Response, error) {
			var some []Flow
			err := json.NewDecoder(r.Body).Decode(&some)
			requests <- len(some)
			return &http.Response{StatusCode: code, Body: io.NopCloser(strings.NewReader(""))}, err
		}))
		p.add(flow(1))
		ctx, stop := context.WithCancel(t.Context())
		var sending sync.WaitGroup
		sending.Go(func() { p.sendLoop(ctx, slog.New(slog.DiscardHandler)) })
		<-requests // refused
		synctest.Wait()
		code = http.StatusNoContent
		begins := time.Now()
		New(&fake{}, nil, slog.New(slog.DiscardHandler)).onPeerInstance(p, "two")
		if have := <-requests; have != 1 || time.Since(begins) > 0 {
			t.Errorf("%d flows are sent after %s, want 1 at once", have, time.Since(begins))
		}
		stop()
		sending.Wait()
	})
}

// A gateway whose network is not up yet asks its peers again, and gives up at the deadline. One that is refused asks once.
func TestPullReachable(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		errs  []error // of the first requests
		tries int
		ok    bool
	}{
		"reachable":              {nil, 1, true},
		"no neighbour, no route": {[]error{unix.EHOSTUNREACH, unix.ENETUNREACH}, 3, true},
		"no address, no device":  {[]error{unix.EADDRNOTAVAIL, unix.ENETDOWN}, 3, true},
		"nobody listens":         {[]error{unix.ECONNREFUSED}, 1, false},
		"never":                  {slices.Repeat([]error{unix.EHOSTUNREACH}, 100), int(syncTimeout/reachInterval) + 1, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				tries := 0
				p := newPeer(desired.PeerGateway{URL: "https://gateway-2"}, "one", roundTrip(func(*http.Request) (*http.Response, error) {
					if tries++; tries <= len(tc.errs) {
						return nil, &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", tc.errs[tries-1])}
					}
					return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader("[]"))}, nil
				}))
				ctx, cancel := context.WithTimeout(t.Context(), syncTimeout+time.Millisecond)
				defer cancel()
				if _, err := p.pullReachable(ctx); (err == nil) != tc.ok || tries != tc.tries {
					t.Errorf("%d requests, %v; want %d", tries, err, tc.tries)
				}
			})
		})
	}
}
