package edge

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/tools/netlab"
)

// echoPort is the port at which gateways answer.
const echoPort = 9000

// Echo answers datagrams to vip on a gateway, whether or not one of its devices has the address. The answer is the
// request and the gateway's number. The caller stops it.
func (l *Lab) Echo(gateway int, vip netip.Addr) (stop func() error, err error) {
	if err := l.take(gateway, vip); err != nil {
		return nil, err
	}
	var conn net.PacketConn
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error { return freebind(c, vip) }}
	if err := l.Gateways[gateway].Do(func() error {
		conn, err = lc.ListenPacket(context.Background(), "udp", netip.AddrPortFrom(vip, echoPort).String())
		return err
	}); err != nil {
		return nil, fmt.Errorf("listen on gateway %d: %w", gateway, err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		buf := make([]byte, 64)
		for {
			n, from, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = conn.WriteTo(append(buf[:n:n], byte(gateway)), from) // a client counts missing answers
		}
	}()
	return func() error {
		err := conn.Close()
		<-ended
		return err
	}, nil
}

func freebind(c syscall.RawConn, vip netip.Addr) error {
	var set error
	err := c.Control(func(fd uintptr) {
		if vip.Is4() {
			set = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_FREEBIND, 1)
		} else {
			set = unix.SetsockoptInt(int(fd), unix.SOL_IPV6, unix.IPV6_FREEBIND, 1)
		}
	})
	return errors.Join(err, set)
}

// interval is the time between two requests of a probe.
const interval = 5 * time.Millisecond

// Probe is a client that sends a request to a VIP every 5 ms.
type Probe struct {
	conn   *net.UDPConn
	stop   context.CancelFunc
	asking sync.WaitGroup
	heard  sync.WaitGroup

	mu      sync.Mutex
	sent    []time.Time
	answers []Answer // by request
}

// Answer is the answer to a request.
type Answer struct {
	Gateway int
	At      time.Time // zero: no answer
}

// Probe starts sending requests to vip. The caller stops it.
func (l *Lab) Probe(vip netip.Addr) (*Probe, error) { return probe(l.Client, vip) }

func probe(from *netlab.Namespace, vip netip.Addr) (*Probe, error) {
	p := &Probe{}
	if err := from.Do(func() error {
		// Unconnected, so that an ICMP error of a router does not end it.
		c, err := net.ListenUDP("udp", nil)
		p.conn = c
		return err
	}); err != nil {
		return nil, fmt.Errorf("open the client's socket: %w", err)
	}
	ctx, stop := context.WithCancel(context.Background())
	p.stop = stop
	p.asking.Go(func() { p.ask(ctx, netip.AddrPortFrom(vip, echoPort)) })
	p.heard.Go(p.hear)
	return p, nil
}

func (p *Probe) ask(ctx context.Context, to netip.AddrPort) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		p.mu.Lock()
		question := binary.BigEndian.AppendUint64(nil, uint64(len(p.sent)))
		p.sent, p.answers = append(p.sent, time.Now()), append(p.answers, Answer{})
		p.mu.Unlock()
		_, _ = p.conn.WriteToUDPAddrPort(question, to) // an unsent request has no answer
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (p *Probe) hear() {
	buf := make([]byte, 64)
	for {
		n, err := p.conn.Read(buf)
		if errors.Is(err, net.ErrClosed) || errors.Is(err, syscall.ETIMEDOUT) {
			return
		}
		if err != nil || n != 9 {
			if netErr := net.Error(nil); errors.As(err, &netErr) && netErr.Timeout() {
				return
			}
			continue
		}
		p.mu.Lock()
		if i := binary.BigEndian.Uint64(buf); i < uint64(len(p.answers)) && p.answers[i].At.IsZero() {
			p.answers[i] = Answer{Gateway: int(buf[8]), At: time.Now()}
		}
		p.mu.Unlock()
	}
}

// last is how long an answer may take.
const last = 500 * time.Millisecond

// Stop sends no more requests, and returns the result.
func (p *Probe) Stop() Result {
	p.stop()
	p.asking.Wait()
	_ = p.conn.SetReadDeadline(time.Now().Add(last))
	p.heard.Wait()
	_ = p.conn.Close()
	return Result{sent: p.sent, answers: p.answers}
}

// From returns when gateway first answered a request sent after a time; zero: not yet.
func (p *Probe) From(gateway int, after time.Time) time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	return Result{sent: p.sent, answers: p.answers}.From(gateway, after)
}

// Result is the result of a probe.
type Result struct {
	sent    []time.Time
	answers []Answer
}

// Sent returns the number of requests.
func (r Result) Sent() int { return len(r.sent) }

// Lost returns the number of requests without an answer.
func (r Result) Lost() int {
	lost := 0
	for _, a := range r.answers {
		if a.At.IsZero() {
			lost++
		}
	}
	return lost
}

// By returns the number of requests that a gateway answered.
func (r Result) By(gateway int) int {
	n := 0
	for _, a := range r.answers {
		if !a.At.IsZero() && a.Gateway == gateway {
			n++
		}
	}
	return n
}

// From returns when gateway first answered a request sent after a time; zero: never.
func (r Result) From(gateway int, after time.Time) time.Time {
	for i, a := range r.answers {
		if r.sent[i].After(after) && !a.At.IsZero() && a.Gateway == gateway {
			return a.At
		}
	}
	return time.Time{}
}

// Silence returns the longest time between two answers, from a moment on.
func (r Result) Silence(from time.Time) (longest time.Duration) {
	var at []time.Time
	for _, a := range r.answers {
		if a.At.After(from) {
			at = append(at, a.At)
		}
	}
	slices.SortFunc(at, time.Time.Compare)
	for _, a := range at {
		longest = max(longest, a.Sub(from))
		from = a
	}
	return longest
}

func (r Result) String() string {
	return fmt.Sprintf("%d sent, %d lost, %d answered by gateway 0, %d by gateway 1", r.Sent(), r.Lost(), r.By(0), r.By(1))
}
