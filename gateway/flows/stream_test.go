package flows

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

// receiver is a peer that receives streams, without a network.
type receiver struct {
	arrays chan []Flow // that it got by streams
	acks   chan ack    // what it answers
	opened chan bool   // gets a value for each stream
	deaf   bool        // does not end its answers
}

func newReceiver() *receiver {
	return &receiver{arrays: make(chan []Flow, 2*maxUnacknowledged), acks: make(chan ack), opened: make(chan bool, 10)}
}

func (r *receiver) RoundTrip(request *http.Request) (*http.Response, error) {
	if request.Header.Get("Content-Type") != streamType {
		return &http.Response{StatusCode: http.StatusNoContent, Header: http.Header{"Accept-Post": {streamType}}, Body: http.NoBody}, nil
	}
	r.opened <- true
	ended := make(chan struct{})
	go func() {
		defer func() {
			if !r.deaf {
				close(ended)
			}
		}()
		for arrays := json.NewDecoder(request.Body); ; {
			var some []Flow
			if arrays.Decode(&some) != nil {
				return
			}
			r.arrays <- some
		}
	}()
	body, to := io.Pipe()
	go func() {
		for answers := json.NewEncoder(to); ; {
			select {
			case <-request.Context().Done():
				to.CloseWithError(request.Context().Err())
				return
			case <-ended:
				to.Close()
				return
			case a := <-r.acks:
				_ = answers.Encode(a)
			}
		}
	}()
	return &http.Response{StatusCode: http.StatusOK, Body: body}, nil
}

// streaming runs a test in a bubble, with a peer that receives streams. The first one is open.
func streaming(t *testing.T, run func(*testing.T, *peer, *receiver)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := newReceiver()
		p := newPeer(desired.PeerGateway{URL: "https://gateway-2"}, "one", r)
		ctx, stop := context.WithCancel(t.Context())
		var sending sync.WaitGroup
		sending.Go(func() { p.sendLoop(ctx, slog.New(slog.DiscardHandler)) })
		<-r.opened
		synctest.Wait()
		run(t, p, r)
		stop()
		sending.Wait()
	})
}

func sizes(arrays chan []Flow) (all []int) {
	for {
		select {
		case some := <-arrays:
			all = append(all, len(some))
		default:
			return all
		}
	}
}

// A flow is sent at once by a stream, without waiting for acknowledgements. Those that open just after it go together.
func TestFlowsAreStreamedAtOnce(t *testing.T) {
	t.Parallel()
	streaming(t, func(t *testing.T, p *peer, r *receiver) {
		p.add(flow(1))
		synctest.Wait()
		for port := range uint16(maxBatch + 10) {
			p.add(flow(2 + port))
		}
		if have := sizes(r.arrays); !slices.Equal(have, []int{1}) {
			t.Errorf("the first flow is sent as %d", have)
		}
		<-time.After(2*batchInterval + 1)
		synctest.Wait()
		if have := sizes(r.arrays); !slices.Equal(have, []int{maxBatch, 10}) {
			t.Errorf("those that follow are sent as %d", have)
		}
		r.acks <- ack{Imported: 2}
		synctest.Wait()
		if p.stats.Sent != 1+maxBatch {
			t.Errorf("%d flows are said to be accepted", p.stats.Sent)
		}
	})
}

// A stream stays open for a while, and another one follows, also if the peer does not notice the end.
func TestStreamsFollow(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		deaf   bool
		open   time.Duration
		failed uint64
	}{
		"ends":  {false, streamLifetime, 0},
		"stays": {true, streamLifetime + requestTimeout + retryInterval, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			streaming(t, func(t *testing.T, p *peer, r *receiver) {
				r.deaf = tc.deaf
				start := time.Now()
				p.add(flow(1))
				<-r.arrays
				r.acks <- ack{Imported: 1}
				<-r.opened
				if open := time.Since(start); open != tc.open {
					t.Errorf("the next one follows after %s", open)
				}
				if s := p.stats; s.Sent != 1 || s.Failed != tc.failed || p.queued() != 0 {
					t.Errorf("%+v, queued are %d", s, p.queued())
				}
			})
		})
	}
}

// Flows that a peer does not acknowledge in time, or refuses, are sent again.
func TestUnacknowledgedFlows(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		answer ack
		after  time.Duration
		fault  string
	}{
		"silence": {ack{}, requestTimeout, errSilent.Error()},
		"refusal": {ack{Imported: 1, Refused: "[0]: protocol is \"SCTP\""}, 0, "SCTP"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			streaming(t, func(t *testing.T, p *peer, r *receiver) {
				p.add(flow(1))
				<-r.arrays
				<-time.After(batchInterval)
				r.acks <- ack{Imported: 1}
				p.add(flow(2))
				<-r.arrays
				start := time.Now()
				if tc.answer.Refused != "" {
					r.acks <- tc.answer
				}
				synctest.Wait()
				<-time.After(tc.after)
				synctest.Wait()
				if p.queued() != 1 || !strings.Contains(p.stats.Fault, tc.fault) || p.stats.Failed != 1 {
					t.Errorf("after %s queued are %d, %+v", time.Since(start), p.queued(), p.stats)
				}
				<-r.opened
				synctest.Wait()
				if p.queued() != 0 || p.stats.Sent != 2 || p.stats.Fault != "" { // by the request before the next stream
					t.Errorf("afterwards queued are %d, %+v", p.queued(), p.stats)
				}
			})
		})
	}
}

// A peer that acknowledges nothing has a bounded number of arrays to import.
func TestStreamIsBounded(t *testing.T) {
	t.Parallel()
	streaming(t, func(t *testing.T, p *peer, r *receiver) {
		for port := range uint16(maxUnacknowledged + 10) {
			p.add(flow(port + 1))
			<-time.After(batchInterval)
		}
		synctest.Wait()
		if have := len(sizes(r.arrays)); have != maxUnacknowledged || p.queued() != 10 {
			t.Errorf("%d arrays were sent, and %d flows are queued", have, p.queued())
		}
		r.acks <- ack{Imported: 1}
		synctest.Wait()
		if have := sizes(r.arrays); !slices.Equal(have, []int{10}) {
			t.Errorf("with room for one, arrays of %d are sent", have)
		}
	})
}

// A stream outlives the server's timeouts, and tells what is wrong with an array. It ends with the last word of the administrator who
// removes the peer.
func TestReceive(t *testing.T) {
	t.Parallel()
	g := newImpatient(t, 200*time.Millisecond, "gateway-1", "gateway-2")
	g[1].SetPeers([]desired.PeerGateway{g[0].self})
	g[0].SetPeers([]desired.PeerGateway{g[1].self})
	stats := func() PeerStats { return g[0].Stats().Peers[0] }
	g[0].balancer.opens <- flow(1)
	await(t, func() bool { return g[1].balancer.knows(flow(1)) }, "new flows are not sent")
	streams := g[1].streams.Load()
	<-time.After(3 * g[1].timeout)
	g[0].balancer.opens <- flow(2)
	await(t, func() bool { return g[1].balancer.knows(flow(2)) && stats().Sent == 2 }, "flows are not sent after a while")
	if n := g[1].streams.Load() - streams; n != 0 {
		t.Errorf("%d other streams followed meanwhile", n)
	}
	wrong := flow(3)
	wrong.Protocol = "SCTP"
	g[0].balancer.opens <- wrong
	await(t, func() bool { return strings.Contains(stats().Fault, "SCTP") && g[1].Stats().Refused > 0 }, "an invalid flow was not refused")

	p := g[0].peers[g[1].self]
	p.mu.Lock()
	p.opened = nil // a balancer has no such flow
	p.mu.Unlock()
	g[0].balancer.opens <- flow(4)
	await(t, func() bool { return g[1].balancer.knows(flow(4)) }, "an invalid flow stops others")
	g[1].SetPeers(nil)
	await(t, func() bool { return strings.Contains(stats().Fault, "403") }, "what is no peer any more may still send flows")
}

// Arrays of any size would take any memory.
func TestOversizedArray(t *testing.T) {
	t.Parallel()
	g := newGateways(t, "gateway-1", "gateway-2")
	g[0].SetPeers([]desired.PeerGateway{g[1].self})
	body, to := io.Pipe()
	go func() {
		err := json.NewEncoder(to).Encode(slices.Repeat([]Flow{flow(1)}, 100_000))
		to.CloseWithError(errors.Join(err, io.ErrUnexpectedEOF))
	}()
	p := newPeer(g[0].self, "one", &http.Transport{TLSClientConfig: g[1].own.Client("gateway-1")})
	request, err := p.post(t.Context(), streamType, body)
	if err != nil {
		t.Fatal(err)
	}
	response, err := p.streams.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	var a ack
	if err := json.NewDecoder(response.Body).Decode(&a); err != nil || !strings.Contains(a.Refused, "more than 4194304 bytes") || a.Imported != 0 {
		t.Errorf("%+v, %v", a, err)
	}
}
