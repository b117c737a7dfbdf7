package dataplane

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/tools/bench/internal/traffic"
)

// The kinds of traffic.
const (
	shortTCP         = "short TCP connections"
	rrTCP            = "TCP request-response"
	rrUDP            = "UDP connected"
	rrUDPUnconnected = "UDP unconnected"
	windowUDP        = "UDP, 32 in flight"
)

// window is the number of requests in flight with windowUDP.
const window = 32

// kind is one kind of traffic and its client.
type kind struct {
	name string
	// turnFactor multiplies the turns of a round.
	turnFactor int
	// open makes the socket that the operations of a phase share; nil if each operation makes its own.
	open func(to netip.AddrPort) (int, error)
	// operate is the measured operation.
	operate func(fd int, to *unix.SockaddrInet4) error
}

var kinds = []kind{
	// Bars of a few percent need many turns. With 60 turns and 3 rounds there are 1,440 pairs; if half of them lie within
	// 10 %, their median is accurate to 0.5 %.
	{shortTCP, 8, nil, func(_ int, to *unix.SockaddrInet4) error { return connectAskClose(to) }},
	{rrTCP, 1, dialer(unix.SOCK_STREAM), func(fd int, _ *unix.SockaddrInet4) error { return ask(fd, keepOpen) }},
	{rrUDP, 1, dialer(unix.SOCK_DGRAM), func(fd int, _ *unix.SockaddrInet4) error { return ask(fd, keepOpen) }},
	{windowUDP, 8, dialWindow, func(fd int, _ *unix.SockaddrInet4) error { return answerAsk(fd) }},
	{rrUDPUnconnected, 1, func(netip.AddrPort) (int, error) { return traffic.Socket(unix.SOCK_DGRAM, timeout) }, askFrom},
}

// reaches reports whether this kind of traffic reaches the backend by a path.
func (k kind) reaches(via path) bool { return !via.connected || k.name != rrUDPUnconnected }

// The requests of a client to its TCP server.
const (
	keepOpen byte = '+' // answer and wait for the next request
	stop     byte = '.' // answer and close first, so that TIME_WAIT is at the server and the client's port is free again
)

// minOperations is the smallest number of operations in a phase, even on a busy machine. A median of one or two would be
// meaningless.
const minOperations = 16

// timeout bounds the wait for a lost packet.
const timeout = 5 * time.Second

// run repeats the operation for one phase and returns its cost. The calling goroutine must own its thread.
func (k kind) run(ctx context.Context, to netip.AddrPort, phase time.Duration) (s sample, err error) {
	if err := traffic.Pin(); err != nil {
		return sample{}, err
	}
	sa := &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}
	fd := -1
	if k.open != nil {
		if fd, err = k.open(to); err != nil {
			return sample{}, err
		}
		defer func() { err = errors.Join(err, unix.Close(fd)) }()
	}
	trips := make([]time.Duration, 0, int(phase/time.Microsecond))
	before := traffic.CPUTime()
	for start, last := time.Now(), time.Now(); (last.Sub(start) < phase || len(trips) < minOperations) && ctx.Err() == nil; {
		if err := k.operate(fd, sa); err != nil {
			return sample{}, err
		}
		now := time.Now()
		trips = append(trips, now.Sub(last))
		last = now
	}
	// It covers the client and the server alone: the garbage collector is off and all other goroutines wait.
	used := traffic.CPUTime() - before
	if len(trips) == 0 {
		return sample{}, fmt.Errorf("no operation completed: %w", context.Cause(ctx))
	}
	return newSample(used, trips), nil
}

func connectAskClose(to *unix.SockaddrInet4) error {
	fd, err := traffic.Socket(unix.SOCK_STREAM, timeout)
	if err != nil {
		return err
	}
	if err := unix.Connect(fd, to); err != nil {
		return errors.Join(fmt.Errorf("connect: %w", err), unix.Close(fd))
	}
	if err := ask(fd, stop); err != nil {
		return errors.Join(err, unix.Close(fd))
	}
	// The server closes first: wait for it.
	if n, err := receive(fd); n != 0 || err != nil {
		return errors.Join(fmt.Errorf("want the end of the stream, got %d bytes, %w", n, err), unix.Close(fd))
	}
	return unix.Close(fd)
}

// ask sends one byte on a connected socket and waits for one back.
func ask(fd int, what byte) error {
	if _, err := unix.Write(fd, []byte{what}); err != nil {
		return fmt.Errorf("send: %w", err)
	}
	if n, err := receive(fd); n != 1 {
		return fmt.Errorf("want one byte, got %d, %w", n, err)
	}
	return nil
}

// dialWindow connects a UDP socket and sends a full window of requests.
func dialWindow(to netip.AddrPort) (int, error) {
	fd, err := dialer(unix.SOCK_DGRAM)(to)
	if err != nil {
		return -1, err
	}
	for range window {
		if _, err := unix.Write(fd, []byte{keepOpen}); err != nil {
			return -1, errors.Join(fmt.Errorf("send: %w", err), unix.Close(fd))
		}
	}
	return fd, nil
}

// answerAsk receives one answer and sends the next request.
func answerAsk(fd int) error {
	if n, err := receive(fd); n != 1 {
		return fmt.Errorf("want one byte, got %d, %w", n, err)
	}
	if _, err := unix.Write(fd, []byte{keepOpen}); err != nil {
		return fmt.Errorf("send: %w", err)
	}
	return nil
}

// askFrom sends one byte on an unconnected socket and waits for the answer, as resolvers do.
func askFrom(fd int, to *unix.SockaddrInet4) error {
	if err := unix.Sendto(fd, []byte{keepOpen}, 0, to); err != nil {
		return fmt.Errorf("send: %w", err)
	}
	var buf [8]byte
	for {
		_, from, err := unix.Recvfrom(fd, buf[:], 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("receive: %w", err)
		}
		if got, ok := from.(*unix.SockaddrInet4); !ok || got.Addr != to.Addr || got.Port != to.Port {
			return fmt.Errorf("answer from %v, want one from %v", from, to)
		}
		return nil
	}
}

// receive receives up to eight bytes.
func receive(fd int) (int, error) {
	var buf [8]byte
	return traffic.Read(fd, buf[:])
}

// dialer returns a function that connects a socket of the given kind.
func dialer(kind int) func(netip.AddrPort) (int, error) {
	return func(to netip.AddrPort) (int, error) {
		fd, err := traffic.Socket(kind, timeout)
		if err != nil {
			return -1, err
		}
		if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}); err != nil {
			return -1, errors.Join(fmt.Errorf("connect: %w", err), unix.Close(fd))
		}
		return fd, nil
	}
}

// startServer runs the backend until the testbed is closed. TCP and UDP have a loop each, on separate threads; only one of
// them is busy at a time.
func (b *testbed) startServer(context.Context) error {
	ctx, cancel := context.WithCancel(context.Background())
	var ended []chan error
	for _, loop := range []func(context.Context, chan<- error) error{serveTCP, serveUDP} {
		ready, end := make(chan error, 1), make(chan error, 1)
		go func() { end <- b.server.Do(func() error { return loop(ctx, ready) }) }()
		ended = append(ended, end)
		if err := <-ready; err != nil {
			cancel()
			return err
		}
	}
	b.undo = append(b.undo, func() error {
		cancel()
		return errors.Join(<-ended[0], <-ended[1])
	})
	return nil
}

// pollInterval is the interval at which a waiting server checks whether it should end.
const pollInterval = 100 * time.Millisecond

// listen makes the server's socket and sends the outcome on ready.
func listen(kind int, ready chan<- error) (fd int, ok bool) {
	fd, err := func() (int, error) {
		if err := traffic.Pin(); err != nil {
			return -1, err
		}
		fd, err := traffic.Socket(kind, pollInterval)
		if err != nil {
			return -1, err
		}
		err = unix.Bind(fd, &unix.SockaddrInet4{Port: int(backend.Port())})
		if kind == unix.SOCK_STREAM {
			err = errors.Join(err, unix.Listen(fd, 128))
		}
		if err != nil {
			return -1, errors.Join(fmt.Errorf("listen: %w", err), unix.Close(fd))
		}
		return fd, nil
	}()
	ready <- err
	return fd, err == nil
}

func serveTCP(ctx context.Context, ready chan<- error) error {
	l, ok := listen(unix.SOCK_STREAM, ready)
	if !ok {
		return nil
	}
	for ctx.Err() == nil {
		fd, _, err := unix.Accept4(l, unix.SOCK_CLOEXEC)
		if traffic.Idle(err) {
			continue
		}
		if err != nil {
			return errors.Join(fmt.Errorf("accept: %w", err), unix.Close(l))
		}
		answer(ctx, fd)
		if err := unix.Close(fd); err != nil {
			return errors.Join(fmt.Errorf("close connection: %w", err), unix.Close(l))
		}
	}
	return unix.Close(l)
}

// answer serves one connection until either side ends it. The client sees and reports every failure. The connection inherits
// the timeout of its listener, pollInterval.
func answer(ctx context.Context, fd int) {
	var buf [1]byte
	for ctx.Err() == nil {
		n, err := unix.Read(fd, buf[:])
		if traffic.Idle(err) {
			continue
		}
		if err != nil || n == 0 {
			return
		}
		if _, err := unix.Write(fd, buf[:]); err != nil || buf[0] == stop {
			return
		}
	}
}

func serveUDP(ctx context.Context, ready chan<- error) error {
	fd, ok := listen(unix.SOCK_DGRAM, ready)
	if !ok {
		return nil
	}
	var buf [8]byte
	for ctx.Err() == nil {
		n, from, err := unix.Recvfrom(fd, buf[:], 0)
		if traffic.Idle(err) {
			continue
		}
		if err == nil {
			err = unix.Sendto(fd, buf[:n], 0, from)
		}
		if err != nil {
			return errors.Join(fmt.Errorf("answer: %w", err), unix.Close(fd))
		}
	}
	return unix.Close(fd)
}
