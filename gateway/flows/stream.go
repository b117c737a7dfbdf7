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
	// maxUnacknowledged bounds the arrays that wait for their acknowledgement.
	maxUnacknowledged = 64
)

var errSilent = fmt.Errorf("no answer within %s", requestTimeout)

// ack acknowledges arrays of flows.
type ack struct {
	Imported int    `json:"imported"`          // arrays since the beginning of the stream
	Refused  string `json:"refused,omitempty"` // why the stream ends here
}

// sending is a stream to a peer.
type sending struct {
	p        *peer
	watchdog *time.Timer   // ends the stream if the peer is silent
	room     signal.Signal // notified when arrays were acknowledged

	mu      sync.Mutex
	acked   int      // arrays
	unacked [][]Flow // in the order in which they were sent
}

// stream sends queued flows as they come until ctx is done, the peer does not accept them, or streamLifetime is over. Flows that the peer
// has not acknowledged are queued again.
func (p *peer) stream(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	body, to := io.Pipe()
	remains := context.AfterFunc(ctx, func() { body.CloseWithError(context.Cause(ctx)) }) // ends a write that waits
	defer remains()
	request, err := p.post(ctx, streamType, body)
	if err != nil {
		return err
	}
	s := &sending{p: p, room: signal.New(), watchdog: time.AfterFunc(requestTimeout, func() { cancel(errSilent) })}
	defer s.watchdog.Stop()
	answered := make(chan error, 1)
	go func() {
		defer cancel(nil)
		answered <- s.listen(request)
	}()
	s.write(ctx, to)
	s.watchdog.Reset(requestTimeout)
	_ = to.Close() // the peer acknowledges the rest and ends its answer
	err = <-answered
	if cause := context.Cause(ctx); errors.Is(cause, errSilent) {
		err = cause
	}
	p.takeBack(s.left())
	return err
}

// write writes queued flows to the body of the request until ctx is done or streamLifetime is over.
func (s *sending) write(ctx context.Context, body io.Writer) {
	end := time.NewTimer(streamLifetime)
	defer end.Stop()
	for arrays := json.NewEncoder(body); ; {
		wake := s.p.waits
		if s.isFull() {
			wake = s.room
		}
		select {
		case <-ctx.Done():
			return
		case <-end.C:
			return
		case <-wake.C():
		}
		if s.isFull() {
			continue
		}
		some := s.p.take()
		if len(some) == 0 {
			continue
		}
		s.await(some)
		if arrays.Encode(some) != nil {
			return // listen knows why
		}
		select {
		case <-ctx.Done():
			return
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
	s.acknowledge(0)
	s.p.noteInstance(response.Header.Get(instanceHeader))
	for answers := json.NewDecoder(response.Body); ; {
		var a ack
		if err := answers.Decode(&a); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("acknowledgement: %w", err)
		}
		s.acknowledge(a.Imported)
		if a.Refused != "" {
			return errors.New(a.Refused)
		}
	}
}

// refusal returns the error of a response to a request that was not accepted.
func refusal(response *http.Response) error {
	message, _ := io.ReadAll(io.LimitReader(response.Body, 1<<10)) // a truncated message is good enough
	return fmt.Errorf("%s: %s", response.Status, bytes.TrimSpace(message))
}

// await expects an acknowledgement of some.
func (s *sending) await(some []Flow) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.unacked = append(s.unacked, some)
	if len(s.unacked) == 1 {
		s.watchdog.Reset(requestTimeout)
	}
}

// acknowledge forgets arrays that the peer has imported, given their number since the beginning of the stream.
func (s *sending) acknowledge(imported int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := max(0, min(imported-s.acked, len(s.unacked)))
	for _, some := range s.unacked[:n] {
		s.p.countSent(len(some), nil)
	}
	s.unacked = slices.Delete(s.unacked, 0, n)
	s.acked += n
	if len(s.unacked) == 0 {
		s.watchdog.Stop()
	} else {
		s.watchdog.Reset(requestTimeout)
	}
	s.room.Notify()
}

func (s *sending) isFull() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.unacked) >= maxUnacknowledged
}

// left returns the flows that were not acknowledged.
func (s *sending) left() []Flow {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Concat(s.unacked...)
}

// receive imports the arrays of a stream until the peer ends it, is no peer any more, or has sent for twice its lifetime.
func (x *Exchange) receive(w http.ResponseWriter, r *http.Request, from *peer) {
	control := http.NewResponseController(w)
	deadline := time.Now().Add(2 * streamLifetime)
	a := &acks{answer: json.NewEncoder(w), flush: control.Flush}
	defer a.end()
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	if err := errors.Join(control.SetReadDeadline(deadline), control.SetWriteDeadline(deadline), control.Flush()); err != nil {
		x.log.Warn("cannot receive flows of a peer", "gateway", from.Name, "err", err)
		return
	}
	removed := make(chan struct{})
	remains := context.AfterFunc(from.ctx, func() {
		defer close(removed)
		_ = control.SetReadDeadline(time.Now())
	})
	defer func() {
		if !remains() {
			<-removed // control may not be used after this
		}
	}()
	body := &stickyReader{Reader: r.Body}
	limited := &io.LimitedReader{R: body}
	for arrays := json.NewDecoder(limited); ; {
		limited.N = maxBody
		some, err := read(arrays, from.Name)
		if errors.Is(err, io.EOF) || body.err != nil && !errors.Is(body.err, io.EOF) {
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
	told  int       // arrays
	at    time.Time // when told was written
	later *time.Timer
	ended bool
}

// imported acknowledges one more array, now or soon.
func (a *acks) imported() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.now.Imported++
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
	a.told = -1
	a.tell()
}

// end acknowledges what was imported, and writes nothing afterwards.
func (a *acks) end() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.tell()
	a.ended = true
}

// tell writes what was not told yet. An error means that the peer is gone. The caller holds mu.
func (a *acks) tell() {
	if a.told == a.now.Imported {
		return
	}
	a.told, a.at = a.now.Imported, time.Now()
	if a.answer.Encode(a.now) == nil {
		_ = a.flush()
	}
}
