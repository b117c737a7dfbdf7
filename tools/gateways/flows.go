package gateways

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

// Flows are open connections of the client, over HTTP with servers of package echo: idle ones, downloads, and uploads.
type Flows struct{ all []*flow }

// flow is one connection.
type flow struct {
	net.Conn
	kind  string
	heard atomic.Int64  // downloads: time of the last data, in ns since 1970
	stop  chan struct{} // uploads: closed when the client has sent everything
	ended chan error
}

const (
	// spell is the duration of a download, longer than any test watches it.
	spell = 10 * time.Minute
	// beat is the time between two pieces of an upload.
	beat = 50 * time.Millisecond
	// after is the time after which arriving data was surely sent after a given moment.
	after = time.Second
)

// Open opens n connections of each kind to a Service. All but uploads have been answered when it returns.
func (e *Edge) Open(ctx context.Context, to netip.Addr, n int) (f *Flows, err error) {
	f = &Flows{}
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	for range n {
		for kind, begin := range map[string]func(*flow) error{"idle": (*flow).ask, "download": (*flow).download, "upload": (*flow).upload} {
			c := &flow{kind: kind, stop: make(chan struct{}), ended: make(chan error, 1)}
			if err := e.Client.Do(func() (err error) {
				c.Conn, err = new(net.Dialer).DialContext(ctx, "tcp", netip.AddrPortFrom(to, 80).String())
				return err
			}); err != nil {
				return f, err
			}
			f.all = append(f.all, c)
			if err := begin(c); err != nil {
				return f, fmt.Errorf("%s: %w", kind, err)
			}
		}
	}
	return f, nil
}

// Close closes all of them.
func (f *Flows) Close() {
	for _, c := range f.all {
		_ = c.Close() // it may be broken
	}
}

// GoOn returns an error for each connection that does not continue after a moment, within a duration: idle connections
// send another request, downloads must receive more, and uploads must arrive unchanged.
func (f *Flows) GoOn(moment time.Time, within time.Duration) error {
	all := make([]error, len(f.all))
	var group errgroup.Group
	for i, c := range f.all {
		group.Go(func() error {
			if err := c.goesOn(moment, time.Now().Add(within)); err != nil {
				all[i] = fmt.Errorf("%s from %s: %w", c.kind, c.LocalAddr(), err)
			}
			return nil
		})
	}
	_ = group.Wait() // no function returns an error
	return errors.Join(all...)
}

func (c *flow) goesOn(moment, end time.Time) error {
	if err := c.SetDeadline(end); err != nil {
		return err
	}
	switch c.kind {
	case "idle":
		return c.ask()
	case "upload":
		close(c.stop)
		return <-c.ended
	}
	tick := time.NewTicker(beat)
	defer tick.Stop()
	for c.heard.Load() < moment.Add(after).UnixNano() {
		select {
		case err := <-c.ended:
			return err
		case <-tick.C:
		}
	}
	return nil
}

// request sends a request and returns the answer with an unread body.
func (c *flow) request(method, path string, body io.Reader) (*http.Response, error) {
	r, err := http.NewRequestWithContext(context.Background(), method, "http://"+c.RemoteAddr().String()+path, body)
	if err != nil {
		return nil, err
	}
	if err := r.Write(c); err != nil {
		return nil, err
	}
	answer, err := http.ReadResponse(bufio.NewReader(c), r)
	if err == nil && answer.StatusCode != http.StatusOK {
		return nil, errors.Join(errors.New(answer.Status), answer.Body.Close())
	}
	return answer, err
}

// ask sends a small request.
func (c *flow) ask() error {
	answer, err := c.request(http.MethodGet, "/", nil)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	_, err = io.Copy(io.Discard, answer.Body)
	return err
}

// download starts a download, which records the time of the last data.
func (c *flow) download() error {
	answer, err := c.request(http.MethodGet, fmt.Sprintf("/stream?seconds=%.0f", spell.Seconds()), nil) //nolint:bodyclose // the goroutine closes it
	if err != nil {
		return err
	}
	go func() {
		defer answer.Body.Close()
		b := make([]byte, 64<<10)
		for {
			if _, err := answer.Body.Read(b); err != nil {
				c.ended <- err
				return
			}
			c.heard.Store(time.Now().UnixNano())
		}
	}()
	return nil
}

// upload starts an upload, which ends when stop is closed. It succeeds if the server counted all bytes.
func (c *flow) upload() error {
	pieces, sent := &pieces{stop: c.stop, tick: time.NewTicker(beat)}, 0
	go func() {
		answer, err := c.request(http.MethodPut, "/upload", pieces)
		pieces.tick.Stop()
		if err != nil {
			c.ended <- err
			return
		}
		defer answer.Body.Close()
		if _, err = fmt.Fscan(answer.Body, &sent); err == nil && sent != pieces.n {
			err = fmt.Errorf("%d of %d bytes arrived", sent, pieces.n)
		}
		c.ended <- err
	}()
	return nil
}

// pieces is the body of an upload: a piece with every tick.
type pieces struct {
	stop chan struct{}
	tick *time.Ticker
	n    int // bytes so far
}

func (p *pieces) Read(b []byte) (int, error) {
	select {
	case <-p.stop:
		return 0, io.EOF
	case <-p.tick.C:
		n := min(len(b), 1<<10)
		p.n += n
		return n, nil
	}
}

// OnlyYoung returns an error unless the lost connections are few, and began so shortly before the death of a gateway that
// its peer did not know them: sending them takes some milliseconds (docs/gateway.md), and a tenth of a second on a busy machine.
// first and last are the times at which the lost connections began.
func OnlyYoung(lost int, first, last, death time.Time) error {
	const (
		young = time.Second
		few   = 10 // of 100 in a second
	)
	if lost > few || lost > 0 && (first.Before(death.Add(-young)) || last.After(death)) {
		return fmt.Errorf("%d connections are lost: the first of them began %s before the death, the last %s before it", lost, death.Sub(first), death.Sub(last))
	}
	return nil
}
