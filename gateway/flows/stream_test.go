package flows

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

// receiver is a peer that receives streams, without a network. It acknowledges empty arrays by itself, unless it is silent: those of arrays
// and acks have flows.
type receiver struct {
	arrays   chan []Flow // that it got by streams
	acks     chan ack    // what it answers
	opened   chan bool   // gets a value for each stream
	requests chan []Flow // that it got by single requests
	silent   bool        // does not acknowledge empty arrays
	deaf     bool        // does not end its answers
	ends     bool        // ends them at once
	status   int         // of its answers to streams
}

func newReceiver() *receiver {
	return &receiver{
		arrays: make(chan []Flow, 100), acks: make(chan ack), opened: make(chan bool, 10), requests: make(chan []Flow, 100), status: http.StatusOK,
	}
}

func (r *receiver) RoundTrip(request *http.Request) (*http.Response, error) {
	if request.Header.Get("Content-Type") != streamType {
		var some []Flow
		err := json.NewDecoder(request.Body).Decode(&some)
		r.requests <- some
		return &http.Response{StatusCode: http.StatusNoContent, Header: http.Header{"Accept-Post": {streamType}}, Body: http.NoBody}, err
	}
	r.opened <- true
	if r.status != http.StatusOK || r.ends {
		return &http.Response{StatusCode: r.status, Body: http.NoBody}, nil
	}
	ended, came := make(chan struct{}), make(chan int, 1000)
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
			came <- len(some)
			if len(some) > 0 {
				r.arrays <- some
			}
		}
	}()
	body, to := io.Pipe()
	go func() {
		acked, flows, all := 0, 0, 0 // arrays
		for answers := json.NewEncoder(to); ; {
			select {
			case n := <-came:
				all++
				if n > 0 {
					flows++
				} else if acked == flows && !r.silent {
					_ = answers.Encode(ack{Imported: all})
				}
			case <-request.Context().Done():
				to.CloseWithError(request.Context().Err())
				return
			case <-ended:
				to.Close()
				return
			case a := <-r.acks:
				acked = a.Imported
				a.Imported += all - flows
				_ = answers.Encode(a)
			}
		}
	}()
	return &http.Response{StatusCode: http.StatusOK, Body: body}, nil
}

// streaming runs a test in a bubble, with a peer that receives streams. The first one is open.
func streaming(t *testing.T, run func(*peer, *receiver), is ...func(*receiver)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := newReceiver()
		for _, set := range is {
			set(r)
		}
		p := newPeer(desired.PeerGateway{URL: "https://gateway-2"}, "one", r)
		ctx, stop := context.WithCancel(t.Context())
		var sending sync.WaitGroup
		sending.Go(func() { p.sendLoop(ctx, slog.New(slog.DiscardHandler)) })
		<-r.requests
		<-r.opened
		synctest.Wait()
		run(p, r)
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
	streaming(t, func(p *peer, r *receiver) {
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
			streaming(t, func(p *peer, r *receiver) {
				start := time.Now()
				<-time.After(streamLifetime - batchInterval)
				p.add(flow(1))
				<-r.arrays
				if !tc.deaf {
					r.acks <- ack{Imported: 1}
				} else {
					<-time.After(batchInterval + 1)
					r.acks <- ack{Imported: 1} // the last word
					tc.open++
				}
				<-r.opened
				if open := time.Since(start); open != tc.open {
					t.Errorf("the next one follows after %s, want %s", open, tc.open)
				}
				if s := p.stats; s.Sent != 1 || s.Failed != tc.failed || p.queued() != 0 {
					t.Errorf("%+v, queued are %d", s, p.queued())
				}
			}, func(r *receiver) { r.deaf = tc.deaf })
		})
	}
}

// Flows that a peer does not acknowledge in time, or refuses, are sent again, in their order.
func TestUnacknowledgedFlows(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		answers []ack
		after   time.Duration
		fault   string
	}{
		"silence":     {nil, requestTimeout, errSilent.Error()},
		"no progress": {[]ack{{Imported: 1}, {Imported: 1}}, requestTimeout, errSilent.Error()},
		"refusal":     {[]ack{{Imported: 1, Refused: "[0]: protocol is \"SCTP\""}}, 0, "SCTP"},
		"too many":    {[]ack{{Imported: 4}}, 0, errMiscounted.Error()},
		"fewer":       {[]ack{{Imported: 0}}, 0, errMiscounted.Error()},
		"too long":    {[]ack{{Imported: 1, Refused: strings.Repeat("a", maxAck)}}, 0, "acknowledgement: unexpected EOF"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			streaming(t, func(p *peer, r *receiver) {
				send := func(port uint16) {
					p.add(flow(port))
					<-r.arrays
					<-time.After(batchInterval + 1)
				}
				send(1)
				r.acks <- ack{Imported: 1}
				synctest.Wait()
				start := time.Now()
				send(2)
				p.add(flow(3))
				<-r.arrays
				p.add(flow(4)) // stays in the queue for a moment
				for _, a := range tc.answers {
					r.acks <- a
				}
				if tc.after > 0 {
					<-r.arrays
				}
				<-time.After(time.Until(start.Add(tc.after + 2*batchInterval)))
				synctest.Wait()
				if !strings.Contains(p.stats.Fault, tc.fault) || p.stats.Failed != 1 {
					t.Errorf("afterwards: %+v", p.stats)
				}
				want := []Flow{flow(2), flow(3), flow(4)}
				if have := p.opened; !slices.Equal(have, want) {
					t.Errorf("queued are %v, want %v", have, want)
				}
				if have := <-r.requests; !slices.Equal(have, want) || time.Since(start) > tc.after+2*retryInterval {
					t.Errorf("after %s %v are sent again, want %v", time.Since(start), have, want)
				}
				<-r.opened
				synctest.Wait()
				if p.queued() != 0 || p.stats.Sent != 4 || p.stats.Fault != "" {
					t.Errorf("afterwards queued are %d, %+v", p.queued(), p.stats)
				}
			})
		})
	}
}

// A peer that ends each stream at once gets one a second.
func TestStreamsThatEnd(t *testing.T) {
	t.Parallel()
	streaming(t, func(p *peer, r *receiver) {
		if !strings.Contains(p.stats.Fault, errEnded.Error()) {
			t.Errorf("statistics: %+v", p.stats)
		}
		start := time.Now()
		for range 3 {
			<-r.opened
		}
		if took := time.Since(start); took != 3*retryInterval {
			t.Errorf("three streams took %s", took)
		}
	}, func(r *receiver) { r.ends = true })
}

// A peer to which streams do not get gets requests for a while.
func TestStreamsAreRefused(t *testing.T) {
	t.Parallel()
	streaming(t, func(p *peer, r *receiver) {
		if p.stats.Failed != 1 {
			t.Errorf("statistics: %+v", p.stats)
		}
		<-time.After(retryInterval + batchInterval)
		<-r.requests
		for port := range uint16(3) {
			start := time.Now()
			p.add(flow(port + 1))
			if have := <-r.requests; len(have) != 1 || time.Since(start) > batchInterval {
				t.Errorf("after %s a request has %d flows", time.Since(start), len(have))
			}
		}
		synctest.Wait()
		if len(r.opened) > 0 || len(r.requests) > 0 {
			t.Errorf("%d streams and %d requests followed", len(r.opened), len(r.requests))
		}
		<-time.After(streamLifetime)
		p.add(flow(4))
		<-r.opened
	}, func(r *receiver) { r.status = http.StatusInternalServerError })
}

// A peer that acknowledges nothing has a bounded number of flows to import.
func TestStreamIsBounded(t *testing.T) {
	t.Parallel()
	streaming(t, func(p *peer, r *receiver) {
		const most = maxUnacknowledged / maxBatch
		for n := range (most + 1) * maxBatch {
			f := flow(uint16(n) | 1)
			f.Backend = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, byte(n >> 16), byte(n >> 8)}), uint16(n)|1)
			p.add(f)
		}
		<-time.After((most + 1) * batchInterval)
		synctest.Wait()
		sent := sizes(r.arrays)
		if len(sent) < most || p.queued() == 0 {
			t.Errorf("arrays of %d flows were sent, and %d flows are queued", sent, p.queued())
		}
		r.acks <- ack{Imported: len(sent)}
		synctest.Wait()
		if have := sizes(r.arrays); len(have) != 1 {
			t.Errorf("with room again, arrays of %d are sent", have)
		}
	})
}

// open opens a stream to a gateway as one of its peers does. What is written to the returned writer is the body.
func (g *gateway) open(t *testing.T, to *gateway) (body *io.PipeWriter, answers *json.Decoder) {
	t.Helper()
	from, body := io.Pipe()
	p := newPeer(to.self, "one", &http.Transport{TLSClientConfig: g.own.Client(to.self.Name)})
	request, err := p.post(t.Context(), streamType, from)
	if err != nil {
		t.Fatal(err)
	}
	response, err := p.streams.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { body.Close(); response.Body.Close() })
	if response.StatusCode != http.StatusOK {
		t.Fatal(response.Status)
	}
	return body, json.NewDecoder(response.Body)
}

// expect reads the next acknowledgement.
func expect(t *testing.T, answers *json.Decoder, imported int, refused string) {
	t.Helper()
	var a ack
	if err := answers.Decode(&a); err != nil || a.Imported != imported || !strings.Contains(a.Refused, refused) || (a.Refused == "") != (refused == "") {
		t.Errorf("%+v, %v; want %d imported, refused %q", a, err, imported, refused)
	}
}

// put writes one array.
func put(t *testing.T, body io.Writer, some ...Flow) {
	t.Helper()
	if err := json.NewEncoder(body).Encode(some); err != nil {
		t.Fatal(err)
	}
}

// A stream outlives the server's timeouts.
func TestStreamStaysOpen(t *testing.T) {
	t.Parallel()
	g := newImpatient(t, time.Second, "gateway-1", "gateway-2")
	g[1].SetPeers([]desired.PeerGateway{g[0].self})
	body, answers := g[0].open(t, g[1])
	for port := range uint16(3) {
		put(t, body, flow(port+1))
		expect(t, answers, int(port)+1, "")
		<-time.After(g[1].timeout * 3 / 4)
	}
	if err := body.Close(); err != nil {
		t.Fatal(err)
	}
	if err := answers.Decode(new(ack)); !errors.Is(err, io.EOF) {
		t.Errorf("at its end: %v", err)
	}
}

// A stream ends when its sender begins another one, and when that is no peer any more.
func TestStreamIsStopped(t *testing.T) {
	t.Parallel()
	g := newGateways(t, "gateway-1", "gateway-2")
	g[1].SetPeers([]desired.PeerGateway{g[0].self})
	first, answers := g[0].open(t, g[1])
	put(t, first, flow(1))
	expect(t, answers, 1, "")
	second, later := g[0].open(t, g[1])
	if err := answers.Decode(new(ack)); !errors.Is(err, io.EOF) {
		t.Errorf("a stream goes on beside another one: %v", err)
	}
	put(t, second, flow(2))
	expect(t, later, 1, "")
	g[1].SetPeers(nil)
	if err := later.Decode(new(ack)); !errors.Is(err, io.EOF) {
		t.Errorf("the stream of a former peer goes on: %v", err)
	}
	if g[1].Stats().Refused != 0 {
		t.Error("a stream that was stopped counts as refused")
	}
}

// A peer hears what is wrong with an array, and that those before it were imported.
func TestRefusedArrays(t *testing.T) {
	t.Parallel()
	wrong, long := flow(2), flow(2)
	wrong.Protocol, long.Protocol = "SCTP", strings.Repeat("a", 2*maxRefusal)
	for name, tc := range map[string]struct {
		body    any
		refused string
	}{
		"protocol": {[]Flow{wrong}, "[0]: protocol is \"SCTP\""},
		"long":     {[]Flow{long}, "[0]: protocol is \"aaa"},
		"no array": {"flows", "read flows: "},
		"large":    {slices.Repeat([]Flow{flow(1)}, 100_000), "an array of flows has more than 4194304 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := newGateways(t, "gateway-1", "gateway-2")
			g[1].SetPeers([]desired.PeerGateway{g[0].self})
			body, answers := g[0].open(t, g[1])
			put(t, body, flow(1))
			expect(t, answers, 1, "")
			go func() { _ = json.NewEncoder(body).Encode(tc.body) }() // the peer may not read all of it
			expect(t, answers, 1, tc.refused)
			if s := g[1].Stats(); s.Refused != 1 || s.Peers[0].Received != 1 {
				t.Errorf("statistics: %+v", s)
			}
		})
	}
}

// A peer is absent once it leaves an array without acknowledgement, and until it acknowledges one or accepts a request.
func TestAbsence(t *testing.T) {
	t.Parallel()
	for name, back := range map[string]func(*receiver){
		"a late acknowledgement": func(r *receiver) { r.acks <- ack{Imported: 1} },
		"another stream":         func(r *receiver) { <-r.requests },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			streaming(t, func(p *peer, r *receiver) {
				told := 0
				p.noteAbsence = func() { told++ }
				<-time.After(streamLifetime/2 + questionInterval/2) // without flows
				if p.isAbsent() || told > 0 {
					t.Fatal("a peer that answers is absent")
				}
				r.silent = true
				p.add(flow(1))
				<-time.After(silence - 1)
				if p.isAbsent() {
					t.Error("a peer is absent too soon")
				}
				<-time.After(2)
				if !p.isAbsent() || told != 1 {
					t.Errorf("a peer that is silent is not absent, told %d times", told)
				}
				back(r)
				synctest.Wait()
				if p.isAbsent() || told != 2 {
					t.Errorf("a peer that is back is absent, told %d times", told)
				}
			})
		})
	}
}

// A peer whose machine is silent is absent. One that refuses, or whose agent does not run, is not, unless it was before.
func TestHeard(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		err           error
		first, second bool // whether it is absent, if it was not and if it was
	}{
		{nil, false, false},
		{fmt.Errorf("read: %w", unix.ECONNREFUSED), false, true},
		{fmt.Errorf("read: %w", unix.ECONNRESET), false, true},
		{errEnded, false, true},
		{errors.New("403 Forbidden: no peer"), false, true},
		{fmt.Errorf("dial: %w", unix.EHOSTUNREACH), true, true},
		{fmt.Errorf("dial: %w", unix.ETIMEDOUT), true, true},
		{fmt.Errorf("request: %w", context.DeadlineExceeded), true, true},
		{errSilent, true, true},
	} {
		for was, want := range map[bool]bool{false: tc.first, true: tc.second} {
			p := newPeer(desired.PeerGateway{}, "one", nil)
			p.ctx = t.Context()
			p.setAbsent(was)
			if p.heard(tc.err); p.isAbsent() != want {
				t.Errorf("%v: absent is %t after %t", tc.err, p.isAbsent(), was)
			}
		}
	}
}
