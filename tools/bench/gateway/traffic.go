package gateway

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/tools/bench/internal/traffic"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// kind is one kind of traffic. Client and server run on one CPU, so the result is the cost of the whole path.
type kind struct {
	name string
	run  func(to netip.AddrPort) (pace, error)
}

// pace is the result of a phase.
type pace struct {
	perSecond   float64 // per second of the CPU that all sides share, which excludes other work of the machine
	done, reset int     // operations
}

var kinds = []kind{
	{"short TCP connections", func(to netip.AddrPort) (pace, error) {
		return repeat(phase, func() error { return connectOnce(to) })
	}},
	{"UDP replies", func(to netip.AddrPort) (pace, error) { return udpReplies(phase, to) }},
}

// repeat repeats an operation for some time. A reset operation costs time, but does not count.
func repeat(lasting time.Duration, operate func() error) (p pace, err error) {
	if err := traffic.Pin(); err != nil {
		return pace{}, err
	}
	start, used := time.Now(), traffic.CPUTime()
	for time.Since(start) < lasting {
		err := operate()
		if errors.Is(err, unix.ECONNRESET) {
			p.reset++
			continue
		}
		if err != nil {
			return pace{}, err
		}
		p.done++
	}
	p.perSecond = float64(p.done) / (traffic.CPUTime() - used).Seconds()
	return p, nil
}

// loss bounds the delay by a lost packet. nap is how long the server waits before it checks whether to stop.
const (
	loss = 5 * time.Second
	nap  = 100 * time.Millisecond
)

func dial(kind int, to netip.AddrPort) (int, error) {
	fd, err := traffic.Socket(kind, loss)
	if err != nil {
		return -1, err
	}
	if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}); err != nil {
		return -1, errors.Join(fmt.Errorf("connect to %s: %w", to, err), unix.Close(fd))
	}
	return fd, nil
}

// connectOnce connects, sends a request, reads the answer, and waits for the server to close.
func connectOnce(to netip.AddrPort) error {
	fd, err := dial(unix.SOCK_STREAM, to)
	if err != nil {
		return err
	}
	var b [8]byte
	if _, err = unix.Write(fd, b[:1]); err == nil {
		_, err = traffic.Read(fd, b[:])
	}
	if err == nil {
		_, err = traffic.Read(fd, b[:])
	}
	return errors.Join(err, unix.Close(fd))
}

// window is the number of requests in flight.
const window = 32

func udpReplies(lasting time.Duration, to netip.AddrPort) (pace, error) {
	fd, err := dial(unix.SOCK_DGRAM, to)
	if err != nil {
		return pace{}, err
	}
	var b [8]byte
	for range window {
		if _, err := unix.Write(fd, b[:1]); err != nil {
			return pace{}, errors.Join(fmt.Errorf("send: %w", err), unix.Close(fd))
		}
	}
	p, err := repeat(lasting, func() error {
		if _, err := traffic.Read(fd, b[:]); err != nil {
			return fmt.Errorf("receive: %w", err)
		}
		_, err := unix.Write(fd, b[:1])
		return err
	})
	return p, errors.Join(err, unix.Close(fd))
}

// serve answers at an address of a namespace until stop is called.
func serve(ns *netlab.Namespace, at netip.Addr) (stop func() error, err error) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 2)
	for _, loop := range []struct {
		kind int
		run  func(context.Context, int) error
	}{{unix.SOCK_STREAM, acceptAll}, {unix.SOCK_DGRAM, answerAll}} {
		var fd int
		if err := ns.Do(func() (err error) {
			if fd, err = traffic.Socket(loop.kind, nap); err != nil {
				return err
			}
			return unix.Bind(fd, &unix.SockaddrInet4{Addr: at.As4(), Port: served})
		}); err != nil {
			cancel()
			return nil, fmt.Errorf("listen: %w", err)
		}
		go func() {
			err := traffic.Pin()
			if err == nil {
				err = loop.run(ctx, fd)
			}
			ended <- errors.Join(err, unix.Close(fd))
		}()
	}
	return func() error {
		cancel()
		return errors.Join(<-ended, <-ended)
	}, nil
}

func acceptAll(ctx context.Context, l int) error {
	if err := unix.Listen(l, 128); err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	var b [8]byte
	for ctx.Err() == nil {
		fd, _, err := unix.Accept4(l, unix.SOCK_CLOEXEC)
		if traffic.Idle(err) {
			continue
		}
		if err != nil {
			return fmt.Errorf("accept: %w", err)
		}
		// A failure here also fails at the client, which reports it.
		if n, err := unix.Read(fd, b[:]); err == nil {
			_, _ = unix.Write(fd, b[:n])
		}
		_ = unix.Close(fd)
	}
	return nil
}

func answerAll(ctx context.Context, fd int) error {
	var b [8]byte
	for ctx.Err() == nil {
		n, from, err := unix.Recvfrom(fd, b[:], 0)
		if traffic.Idle(err) {
			continue
		}
		if err == nil {
			err = unix.Sendto(fd, b[:n], 0, from)
		}
		if err != nil && !errors.Is(err, unix.ECONNREFUSED) { // the client has gone
			return fmt.Errorf("answer: %w", err)
		}
	}
	return nil
}
