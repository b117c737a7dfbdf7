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

// Flows are connections of the client that stay open, over HTTP with servers of package echo: idle ones, downloads, and uploads.
type Flows struct{ all []*flow }

// flow is one connection.
type flow struct {
	net.Conn
	kind  string
	heard atomic.Int64  // downloads: when something came last, in ns since 1970
	stop  chan struct{} // uploads: closed when the client has said all
	ended chan error
}

const (
	// spell is how long a download takes: longer than anybody looks at it.
	spell = 10 * time.Minute
	// beat is between two pieces of an upload.
	beat = 50 * time.Millisecond
	// after is how long after a moment what comes was sent after it: nothing is under way for so long.
	after = time.Second
)

// Open opens n connections of each kind with a Service, which all have been answered when it returns, but for uploads.
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

// Close ends all of them.
func (f *Flows) Close() {
	for _, c := range f.all {
		_ = c.Close() // it may be broken
	}
}

// GoOn returns an error for each connection that does not go on after a moment, within a while: who was idle asks again,
// downloads bring more, and what was uploaded has come as it was sent.
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
	_ = group.Wait() // none has an error
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

// request sends one and returns the answer, whose body is still to be read.
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

// ask asks something small.
func (c *flow) ask() error {
	answer, err := c.request(http.MethodGet, "/", nil)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	_, err = io.Copy(io.Discard, answer.Body)
	return err
}

// download begins one, which notes when something comes.
func (c *flow) download() error {
	answer, err := c.request(http.MethodGet, fmt.Sprintf("/stream?seconds=%.0f", spell.Seconds()), nil) //nolint:bodyclose // the goroutine does
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

// upload begins one, which ends when stop is closed. It ends well when the server has counted what was sent.
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
			err = fmt.Errorf("%d bytes came of %d", sent, pieces.n)
		}
		c.ended <- err
	}()
	return nil
}

// pieces is what is uploaded: a little with every tick.
type pieces struct {
	stop chan struct{}
	tick *time.Ticker
	n    int // bytes until now
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

// OnlyYoung returns an error unless the connections that were lost are a few that began so shortly before the death of a gateway
// that the other one had not been told of them: it takes some milliseconds (docs/gateway.md), and a busy machine more. The first
// and the last of them are when they began.
func OnlyYoung(lost int, first, last, death time.Time) error {
	const (
		young = time.Second
		few   = 3
	)
	if lost > few || lost > 0 && (first.Before(death.Add(-young)) || last.After(death)) {
		return fmt.Errorf("%d connections are lost: the first of them began %s before the death, the last %s before it", lost, death.Sub(first), death.Sub(last))
	}
	return nil
}
