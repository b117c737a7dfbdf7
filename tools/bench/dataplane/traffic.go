package dataplane

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The kinds of traffic.
const (
	shortTCP         = "short TCP connections"
	rrTCP            = "TCP request-response"
	rrUDP            = "UDP connected"
	rrUDPUnconnected = "UDP unconnected"
	windowUDP        = "UDP, 32 in flight"
)

// window is how many questions are under way at a time with windowUDP.
const window = 32

// kind is one kind of traffic and its client.
type kind struct {
	name string
	// often is so many times the turns of a round.
	often int
	// open makes what the operations of a phase share; nil when each makes its own.
	open func(to netip.AddrPort) (int, error)
	// operate is the operation measured.
	operate func(fd int, to *unix.SockaddrInet4) error
}

var kinds = []kind{
	// Bars of hundredths want many turns: with 60 turns and 3 rounds the median of 1,440 pairs, a middle half of which are
	// within a tenth, is right within half a hundredth.
	{shortTCP, 8, nil, func(_ int, to *unix.SockaddrInet4) error { return connectAskClose(to) }},
	{rrTCP, 1, dialer(unix.SOCK_STREAM), func(fd int, _ *unix.SockaddrInet4) error { return ask(fd, goOn) }},
	{rrUDP, 1, dialer(unix.SOCK_DGRAM), func(fd int, _ *unix.SockaddrInet4) error { return ask(fd, goOn) }},
	{windowUDP, 8, dialWindow, func(fd int, _ *unix.SockaddrInet4) error { return answerAsk(fd) }},
	{rrUDPUnconnected, 1, func(netip.AddrPort) (int, error) { return socket(unix.SOCK_DGRAM) }, askFrom},
}

// goes reports whether this kind of traffic finds the backend by the path.
func (k kind) goes(r path) bool { return !r.connected || k.name != rrUDPUnconnected }

// Requests of a client to its TCP server, one byte each.
const (
	goOn byte = '+' // answer and wait for more
	stop byte = '.' // answer and close: the TIME_WAIT is the server's, the client's port is free again
)

// fewest is how many operations a phase has at least, also when the machine does something else meanwhile: the middle
// of one or two is anything.
const fewest = 16

// patience is how long a lost packet can hold the run up.
const patience = 5 * time.Second

// run repeats the operation for one phase and says what that took. The calling goroutine must own its thread.
func (k kind) run(ctx context.Context, to netip.AddrPort, phase time.Duration) (s sample, err error) {
	if err := pin(); err != nil {
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
	before, err := cpuTime()
	if err != nil {
		return sample{}, err
	}
	for start, last := time.Now(), time.Now(); (last.Sub(start) < phase || len(trips) < fewest) && ctx.Err() == nil; {
		if err := k.operate(fd, sa); err != nil {
			return sample{}, err
		}
		now := time.Now()
		trips = append(trips, now.Sub(last))
		last = now
	}
	after, err := cpuTime()
	if err != nil {
		return sample{}, err
	}
	if len(trips) == 0 {
		return sample{}, fmt.Errorf("not a single operation: %w", context.Cause(ctx))
	}
	return newSample(after-before, trips), nil
}

func connectAskClose(to *unix.SockaddrInet4) error {
	fd, err := socket(unix.SOCK_STREAM)
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

// dialWindow connects a UDP socket and asks as often as answers may be waited for.
func dialWindow(to netip.AddrPort) (int, error) {
	fd, err := dialer(unix.SOCK_DGRAM)(to)
	if err != nil {
		return -1, err
	}
	for range window {
		if _, err := unix.Write(fd, []byte{goOn}); err != nil {
			return -1, errors.Join(fmt.Errorf("send: %w", err), unix.Close(fd))
		}
	}
	return fd, nil
}

// answerAsk takes one answer and asks once more.
func answerAsk(fd int) error {
	if n, err := receive(fd); n != 1 {
		return fmt.Errorf("want one byte, got %d, %w", n, err)
	}
	if _, err := unix.Write(fd, []byte{goOn}); err != nil {
		return fmt.Errorf("send: %w", err)
	}
	return nil
}

// askFrom is ask on an unconnected socket, as resolvers do it.
func askFrom(fd int, to *unix.SockaddrInet4) error {
	if err := unix.Sendto(fd, []byte{goOn}, 0, to); err != nil {
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

func receive(fd int) (int, error) {
	var buf [8]byte
	for {
		n, err := unix.Read(fd, buf[:])
		if !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

// socket makes an IPv4 socket that gives up after patience.
func socket(kind int) (int, error) {
	fd, err := unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("make socket: %w", err)
	}
	if err := giveUpAfter(fd, patience); err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

func giveUpAfter(fd int, d time.Duration) error {
	tv := unix.NsecToTimeval(int64(d))
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		return fmt.Errorf("set timeout: %w", err)
	}
	return nil
}

// dialer returns what connects a socket.
func dialer(kind int) func(netip.AddrPort) (int, error) {
	return func(to netip.AddrPort) (int, error) {
		fd, err := socket(kind)
		if err != nil {
			return -1, err
		}
		if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}); err != nil {
			return -1, errors.Join(fmt.Errorf("connect: %w", err), unix.Close(fd))
		}
		return fd, nil
	}
}

// startServer runs the backend until the testbed is closed: two loops on threads of their own, one for
// TCP and one for UDP. Only one of them works at a time.
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

// nap is how long a server waits before it looks whether it should end.
const nap = 100 * time.Millisecond

// listen makes the server's socket and says on ready whether that worked.
func listen(kind int, ready chan<- error) (fd int, ok bool) {
	fd, err := func() (int, error) {
		if err := pin(); err != nil {
			return -1, err
		}
		fd, err := socket(kind)
		if err != nil {
			return -1, err
		}
		err = errors.Join(giveUpAfter(fd, nap), unix.Bind(fd, &unix.SockaddrInet4{Port: int(backend.Port())}))
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

// idle reports whether err only says that nothing came.
func idle(err error) bool { return errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) }

func serveTCP(ctx context.Context, ready chan<- error) error {
	l, ok := listen(unix.SOCK_STREAM, ready)
	if !ok {
		return nil
	}
	for ctx.Err() == nil {
		fd, _, err := unix.Accept4(l, unix.SOCK_CLOEXEC)
		if idle(err) {
			continue
		}
		if err != nil {
			return errors.Join(fmt.Errorf("accept: %w", err), unix.Close(l))
		}
		answer(ctx, fd)
		if err := unix.Close(fd); err != nil {
			return errors.Join(fmt.Errorf("hang up: %w", err), unix.Close(l))
		}
	}
	return unix.Close(l)
}

// answer serves one connection until either side has enough. What fails here fails at the client too,
// which reports it. The connection wakes up as often as its listener, whose timeout it has inherited.
func answer(ctx context.Context, fd int) {
	var buf [1]byte
	for ctx.Err() == nil {
		n, err := unix.Read(fd, buf[:])
		if idle(err) {
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
		if idle(err) {
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

// pin puts the calling thread on the last CPU this process may use, and before everything else there.
func pin() error {
	runtime.LockOSThread()
	var allowed unix.CPUSet
	if err := unix.SchedGetaffinity(unix.Getpid(), &allowed); err != nil {
		return fmt.Errorf("read CPU affinity: %w", err)
	}
	var last unix.CPUSet
	for cpu := range int(unsafe.Sizeof(allowed)) * 8 {
		if allowed.IsSet(cpu) {
			last.Zero()
			last.Set(cpu)
		}
	}
	if err := unix.SchedSetaffinity(0, &last); err != nil {
		return fmt.Errorf("pin to one CPU: %w", err)
	}
	if err := unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), -20); err != nil {
		return fmt.Errorf("raise priority: %w", err)
	}
	return nil
}

// cpuTime returns the CPU time this process has used, in which the client and the server of the phase are
// all that runs: the garbage collector is off and everything else waits.
func cpuTime() (time.Duration, error) {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &ts); err != nil {
		return 0, fmt.Errorf("read CPU clock: %w", err)
	}
	return time.Duration(ts.Nano()), nil
}
