// Package traffic has connections whose every break is noticed: idle ones, downloads and uploads.
package traffic

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/isthmus-net/isthmus/tools/netlab"
)

// Traffic of a connection while it is open.
const (
	silent   = "idle"     // no side sends
	download = "download" // only the server sends
	upload   = "upload"   // only the client sends
)

var habits = []string{silent, download, upload}

const (
	// beat is the time between two messages of a sender.
	beat = 250 * time.Millisecond
	// recovery is how long a connection may take to continue, with time for TCP retransmissions.
	recovery = 20 * time.Second
	// poll is the time between two looks at a condition.
	poll = 20 * time.Millisecond
)

// Connection is a connection between a client and a server, both in this process. A message is its sending time, in ns
// since 1970, in 8 bytes.
type Connection struct {
	net.Conn
	Name   string         // of those that were opened together
	Source netip.AddrPort // that the server sees

	habit string
	heard atomic.Int64 // the last message received
	ended chan struct{}
	err   error // why it ended; read after the end
}

// Connections are a server and the client's connections to it. The caller closes them.
type Connections struct {
	client  *netlab.Namespace
	serving sync.WaitGroup
	stop    func() error // stops listening

	mu   sync.Mutex // guards what follows
	all  []*Connection
	ends []net.Conn // ends at the server
}

// NewConnections starts the server at all of its addresses.
func NewConnections(ctx context.Context, client, server *netlab.Namespace, port uint16) (*Connections, error) {
	s := &Connections{client: client}
	var l net.Listener
	if err := server.Do(func() (err error) {
		l, err = new(net.ListenConfig).Listen(ctx, "tcp", fmt.Sprintf(":%d", port))
		return err
	}); err != nil {
		return nil, err
	}
	s.stop = l.Close
	s.serving.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			s.mu.Lock()
			s.ends = append(s.ends, c)
			s.mu.Unlock()
			s.serving.Go(func() { s.talk(c) })
		}
	})
	return s, nil
}

// Count returns the number of connections that were opened.
func (s *Connections) Count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.all)
}

// Close ends everything.
func (s *Connections) Close() error {
	err := s.stop()
	s.mu.Lock()
	for _, c := range s.all {
		_ = c.Close() // it may be broken
	}
	for _, c := range s.ends {
		_ = c.Close()
	}
	s.mu.Unlock()
	s.serving.Wait()
	return err
}

// talk serves a connection, on which the client first sends its number. A failure here also fails at the client, which
// counts it.
func (s *Connections) talk(end net.Conn) {
	var number int64
	if binary.Read(end, binary.BigEndian, &number) != nil {
		return
	}
	s.mu.Lock()
	c := s.all[number]
	from := end.RemoteAddr().(*net.TCPAddr).AddrPort()
	c.Source = netip.AddrPortFrom(from.Addr().Unmap(), from.Port())
	s.mu.Unlock()
	if say(end) != nil {
		return
	}
	switch c.habit {
	case download:
		_ = speak(end)
	case upload:
		_ = listen(end, &c.heard)
	default:
		_, _ = io.Copy(end, end)
	}
}

// say sends a message.
func say(to io.Writer) error {
	return binary.Write(to, binary.BigEndian, time.Now().UnixNano())
}

// speak sends a message with every beat until it fails.
func speak(to io.Writer) error {
	tick := time.NewTicker(beat)
	defer tick.Stop()
	for range tick.C {
		if err := say(to); err != nil {
			return err
		}
	}
	return nil
}

// listen records the last message until reading fails.
func listen(to io.Reader, last *atomic.Int64) error {
	for words := bufio.NewReader(to); ; {
		var word int64
		if err := binary.Read(words, binary.BigEndian, &word); err != nil {
			return err
		}
		last.Store(word)
	}
}

// Open opens n connections to an address, with the kinds of traffic in turn. All of them have been answered.
func (s *Connections) Open(ctx context.Context, name string, to netip.AddrPort, n int) error {
	return s.client.Do(func() error {
		for i := range n {
			c, err := new(net.Dialer).DialContext(ctx, "tcp", to.String())
			if err != nil {
				return err
			}
			if err := s.begin(&Connection{Conn: c, Name: name, habit: habits[i%len(habits)], ended: make(chan struct{})}); err != nil {
				return err
			}
		}
		return nil
	})
}

func (s *Connections) begin(c *Connection) error {
	s.mu.Lock()
	s.all = append(s.all, c)
	number := int64(len(s.all) - 1)
	s.mu.Unlock()
	var word int64
	if err := errors.Join(binary.Write(c, binary.BigEndian, number), binary.Read(c, binary.BigEndian, &word)); err != nil {
		return fmt.Errorf("connection %d: %w", number, err)
	}
	go func() {
		defer close(c.ended)
		switch c.habit {
		case download:
			c.err = listen(c, &c.heard)
		case upload:
			c.err = speak(c)
		}
	}()
	return nil
}

// goesOn returns nil if a message sent after the given time arrives at the other end. An idle client sends one now.
func (c *Connection) goesOn(after time.Time) error {
	if c.habit == silent {
		var word int64
		return errors.Join(c.SetDeadline(time.Now().Add(recovery)), say(c), binary.Read(c, binary.BigEndian, &word))
	}
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for end := time.Now().Add(recovery); c.heard.Load() <= after.UnixNano(); {
		select {
		case <-c.ended:
			return c.err
		case now := <-tick.C:
			if now.After(end) {
				return errors.New("nothing comes")
			}
		}
	}
	return nil
}

// Broken returns the connections over which no message sent after the given time arrives.
func (s *Connections) Broken(after time.Time) (all []Broken) {
	var mu sync.Mutex // guards all
	var group errgroup.Group
	for _, c := range s.all {
		group.Go(func() error {
			if err := c.goesOn(after); err != nil {
				mu.Lock()
				defer mu.Unlock()
				all = append(all, Broken{c, err})
			}
			return nil
		})
	}
	_ = group.Wait() // no function returns an error
	return all
}

// Broken is a connection that does not continue, with the reason.
type Broken struct {
	*Connection
	Why error
}

func (b Broken) String() string {
	return fmt.Sprintf("%s, %s, from %s, which the server sees as %s: %v", b.Name, b.habit, b.LocalAddr(), b.Source, b.Why)
}
