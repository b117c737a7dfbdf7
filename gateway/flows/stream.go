package flows

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/clusterset/signal"
)

// streamType is the Content-Type of a POST whose body stays open: arrays of Flow, one after the other, each written when its flows open.
// The answer, values of ack, begins before the body ends. Requests for each array take several times as much CPU. A gateway that receives
// streams says so in the header Accept-Post of other answers; one of an older version gets requests.
const streamType = "application/x-isthmus-flows"

const (
	// streamLifetime is how long a stream stays open. The next one verifies the certificates again.
	streamLifetime = time.Minute
	// ackInterval is the pause between two acknowledgements. It is long, because nothing waits for them: they bound what is sent again
	// when a stream breaks.
	ackInterval = 100 * time.Millisecond
	// maxUnacknowledged bounds the flows that wait for their acknowledgement.
	maxUnacknowledged = 4 * maxBatch
	// maxAck and maxRefusal bound an acknowledgement and its text, in bytes.
	maxAck     = 4 << 10
	maxRefusal = 1 << 10
)

var (
	errSilent     = fmt.Errorf("no answer within %s", requestTimeout)
	errEnded      = errors.New("the peer ended the stream")
	errMiscounted = errors.New("the peer acknowledges what was not sent")
)

// ack acknowledges arrays of flows.
type ack struct {
	Imported int    `json:"imported"`          // arrays since the beginning of the stream
	Refused  string `json:"refused,omitempty"` // why the stream ends here
}

// sending is a stream to a peer.
type sending struct {
	p        *peer
	watchdog *time.Timer   // ends the stream if the peer is silent
	absence  *time.Timer   // notes before that the peer is absent
	room     signal.Signal // notified when arrays were acknowledged

	mu      sync.Mutex
	acked   int      // arrays
	unacked [][]Flow // in the order in which they were sent
	flows   int      // in unacked
	began   bool     // the peer answers
	ending  bool     // nothing follows, and the peer is to end its answer
}

// stream sends queued flows as they come until streamLifetime is over. An error means that the peer did not accept all of them, or that
// ctx is done. Those that it has not acknowledged are queued again. It reports whether the peer can receive streams, as far as this one
// shows.
func (p *peer) stream(ctx context.Context) (accepts bool, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	body, to := io.Pipe()
	remains := context.AfterFunc(ctx, func() { body.CloseWithError(context.Cause(ctx)) }) // ends a write that waits
	defer remains()
	request, err := p.post(ctx, streamType, body)
	if err != nil {
		return false, err
	}
	s := &sending{
		p: p, room: signal.New(), watchdog: time.AfterFunc(requestTimeout, func() { cancel(errSilent) }),
		absence: time.AfterFunc(silence, func() { p.setAbsent(true) }),
	}
	defer s.watchdog.Stop()
	defer s.absence.Stop()
	answered := make(chan error, 1)
	go func() {
		defer cancel(nil)
		answered <- s.listen(request)
	}()
	lived := s.write(ctx, to)
	s.end()
	_ = to.Close() // the peer acknowledges the rest and ends its answer
	err = <-answered
	left := s.left()
	p.takeBack(left)
	switch {
	case errors.Is(context.Cause(ctx), errSilent):
		err = errSilent
	case err == nil && (!lived || len(left) > 0):
		err = errEnded
	}
	return s.acked > 0 || s.began && len(left) == 0, err
}

// write writes queued flows to the body of the request. It reports whether streamLifetime is over; else the request has ended.
func (s *sending) write(ctx context.Context, body io.Writer) bool {
	end := time.NewTimer(streamLifetime)
	defer end.Stop()
	question := time.NewTimer(questionInterval)
	defer question.Stop()
	for arrays := json.NewEncoder(body); ; {
		wake, asks := s.p.waits, false
		if s.isFull() {
			wake = s.room
		}
		select {
		case <-ctx.Done():
			return false
		case <-end.C:
			return true
		case <-question.C:
			asks = true
		case <-wake.C():
		}
		if s.isFull() {
			continue
		}
		some := s.p.take()
		if len(some) == 0 && !asks {
			continue
		}
		question.Reset(questionInterval)
		s.await(some)
		if arrays.Encode(some) != nil {
			return false // listen knows why
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(batchInterval):
		}
	}
}

// listen sends the request and reads the answer to its end.
func (s *sending) listen(request *http.Request) error {
	response, err := s.p.streams.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return refusal(response)
	}
	s.begin()
	s.p.noteInstance(response.Header.Get(instanceHeader))
	body := &io.LimitedReader{R: response.Body}
	for answers := json.NewDecoder(body); ; {
		var a ack
		body.N = maxAck
		if err := answers.Decode(&a); errors.Is(err, io.EOF) && body.N > 0 {
			return nil
		} else if err != nil {
			return fmt.Errorf("acknowledgement: %w", err)
		}
		if err := s.acknowledge(a.Imported); err != nil {
			return err
		}
		s.p.setAbsent(false)
		if a.Refused != "" {
			return errors.New(a.Refused)
		}
	}
}

// refusal returns the error of a response to a request that was not accepted.
func refusal(response *http.Response) error {
	message, _ := io.ReadAll(io.LimitReader(response.Body, maxRefusal)) // a truncated message is good enough
	return fmt.Errorf("%s: %s", response.Status, bytes.TrimSpace(message))
}

// begin notes that the peer answers.
func (s *sending) begin() {
	defer s.p.setAbsent(false)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.began = true
	s.watch()
}

// await expects an acknowledgement of some.
func (s *sending) await(some []Flow) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.unacked, s.flows = append(s.unacked, some), s.flows+len(some)
	if len(s.unacked) == 1 {
		s.watch()
	}
}

// end expects the end of the answer.
func (s *sending) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ending = true
	s.watch()
}

// watch starts the watchdog anew, or stops it if nothing is expected of the peer. The caller holds mu.
func (s *sending) watch() {
	if len(s.unacked) == 0 && !s.ending {
		s.watchdog.Stop()
		s.absence.Stop()
		return
	}
	s.watchdog.Reset(requestTimeout)
	s.absence.Reset(silence)
}

// acknowledge forgets arrays that the peer has imported, given their number since the beginning of the stream.
func (s *sending) acknowledge(imported int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := imported - s.acked
	if n < 0 || n > len(s.unacked) {
		return errMiscounted
	}
	for _, some := range s.unacked[:n] {
		s.flows -= len(some)
		s.p.countSent(len(some), nil)
	}
	s.unacked = slices.Delete(s.unacked, 0, n)
	s.acked = imported
	if n > 0 { // no progress is as good as no answer
		s.watch()
	}
	s.room.Notify()
	return nil
}

func (s *sending) isFull() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.flows >= maxUnacknowledged
}

// left returns the flows that were not acknowledged.
func (s *sending) left() []Flow {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Concat(s.unacked...)
}

// receiving is a stream of a peer.
type receiving struct {
	ctx   context.Context // ends when another one takes its place, or the peer is no peer any more
	stop  context.CancelFunc
	ended chan struct{}
}

// nextStream begins a stream of the peer, and ends the one before: what is left of that is sent again, and was sent before what follows.
func (p *peer) nextStream() *receiving {
	r := &receiving{ended: make(chan struct{})}
	r.ctx, r.stop = context.WithCancel(p.ctx)
	p.mu.Lock()
	former := p.received
	p.received = r
	p.mu.Unlock()
	if former != nil {
		former.stop()
		<-former.ended
	}
	return r
}

// receive imports the arrays of a stream until the peer ends it, begins another one, is no peer any more, or has sent for twice the
// lifetime of a stream.
func (x *Exchange) receive(w http.ResponseWriter, r *http.Request, from *peer) {
	stream := from.nextStream()
	defer close(stream.ended)
	defer stream.stop()
	control := http.NewResponseController(w)
	deadline := time.Now().Add(2 * streamLifetime)
	a := &acks{answer: json.NewEncoder(w), flush: control.Flush}
	defer a.end()
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Connection", "close") // the next handshake verifies the certificates again, and nobody reads what is left of the body
	w.WriteHeader(http.StatusOK)
	if err := errors.Join(control.SetReadDeadline(deadline), control.SetWriteDeadline(deadline), control.Flush()); err != nil {
		x.log.Warn("cannot receive flows of a peer", "gateway", from.Name, "err", err)
		return
	}
	stopped := make(chan struct{})
	goesOn := context.AfterFunc(stream.ctx, func() {
		defer close(stopped)
		_ = control.SetReadDeadline(time.Now())
	})
	defer func() {
		if !goesOn() {
			<-stopped // control may not be used after this
		}
	}()
	body := &stickyReader{Reader: r.Body}
	limited := &io.LimitedReader{R: body}
	for arrays := json.NewDecoder(limited); ; {
		limited.N = maxBody
		some, err := read(arrays, from.Name)
		if errors.Is(err, io.EOF) || body.err != nil && !errors.Is(body.err, io.EOF) || stream.ctx.Err() != nil {
			return
		}
		if err != nil && limited.N == 0 {
			err = fmt.Errorf("an array of flows has more than %d bytes", maxBody)
		}
		if err == nil {
			err = x.importFlows(some, nil)
		}
		if err != nil {
			x.countRefused()
			a.refuse(err)
			return
		}
		from.countReceived(len(some))
		a.imported()
	}
}

// stickyReader remembers the error that ended it.
type stickyReader struct {
	io.Reader
	err error
}

func (r *stickyReader) Read(b []byte) (n int, err error) {
	n, err = r.Reader.Read(b)
	if err != nil {
		r.err = err
	}
	return n, err
}

// acks writes acknowledgements, at most one each ackInterval. Any goroutine may use it.
type acks struct {
	answer *json.Encoder
	flush  func() error

	mu    sync.Mutex
	now   ack
	news  bool      // now was not written yet
	at    time.Time // when the last one was
	later *time.Timer
	ended bool
}

// imported acknowledges one more array, now or soon.
func (a *acks) imported() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.now.Imported++
	a.news = true
	wait := ackInterval - time.Since(a.at)
	switch {
	case wait <= 0:
		a.tell()
	case a.later == nil:
		a.later = time.AfterFunc(wait, func() {
			a.mu.Lock()
			defer a.mu.Unlock()
			a.later = nil
			if !a.ended {
				a.tell()
			}
		})
	}
}

// refuse tells why the next array is not imported.
func (a *acks) refuse(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.now.Refused = err.Error()
	a.now.Refused = strings.ToValidUTF8(a.now.Refused[:min(maxRefusal, len(a.now.Refused))], "")
	a.news = true
	a.tell()
}

// end acknowledges what was imported, and writes nothing afterwards.
func (a *acks) end() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.tell()
	a.ended = true
}

// tell writes the news. An error means that the peer is gone. The caller holds mu.
func (a *acks) tell() {
	if !a.news {
		return
	}
	a.news, a.at = false, time.Now()
	if a.answer.Encode(a.now) == nil {
		_ = a.flush()
	}
}
