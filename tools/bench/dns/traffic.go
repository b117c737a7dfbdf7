package dns

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/tools/bench/dns/internal/names"
)

const (
	// window is the number of UDP questions in flight.
	window = 128
	// batch is the number of packets sent or received by one system call.
	batch = 32
	// connections is the number of TCP clients, each with one question at a time.
	connections = 16
	// timeout is the time to wait for an answer.
	timeout = 250 * time.Millisecond
	// answerSize is larger than every answer over UDP.
	answerSize = 4096
)

// tally sums up one or more phases.
type tally struct {
	cpu     time.Duration // of the server
	wall    time.Duration
	answers int
	lost    int
	trips   []time.Duration // of each answer, over UDP
}

// goesOn reports whether a phase continues. A phase without an answer is extended by one second, because the machine may be busy
// and a phase needs at least one answer.
func (t *tally) goesOn(since, phase time.Duration) bool {
	return since < phase || t.answers == 0 && since < phase+time.Second
}

func (t *tally) add(o tally) {
	t.cpu += o.cpu
	t.wall += o.wall
	t.answers += o.answers
	t.lost += o.lost
	t.trips = append(t.trips, o.trips...)
}

// sample is the result of one round, per answer.
type sample struct {
	cpu  time.Duration // of the server
	rate float64       // answers a second
	p99  time.Duration // of the round trip with a full window, over UDP
	lost int
}

// sample reduces t, which must hold an answer, and sorts its trips.
func (t *tally) sample() sample {
	s := sample{cpu: t.cpu / time.Duration(t.answers), rate: float64(t.answers) / t.wall.Seconds(), lost: t.lost}
	if n := len(t.trips); n > 0 {
		slices.Sort(t.trips)
		s.p99 = t.trips[n*99/100]
	}
	return s
}

// check returns an error if an answer is wrong.
func check(answer []byte, q *names.Question) error {
	if len(answer) < 12 || answer[2]&0x80 == 0 || answer[3]&0x0f != q.Rcode || binary.BigEndian.Uint16(answer[6:]) < q.Answers {
		return fmt.Errorf("wrong answer to %q, want code %d and %d records at least: %x", q.Wire, q.Rcode, q.Answers, answer[:min(len(answer), 64)])
	}
	return nil
}

// asker asks one server over UDP with a full window, on its own thread.
type asker struct {
	fd        int
	questions []names.Question
	verify    bool // the server is not an echo, so check its answers
	next      int  // of questions

	slots    [window]slot
	out, in  [batch]packet
	outIov   [batch]unix.Iovec
	inHead   [batch]mmsghdr
	sending  []int // slots to send from, batch at most
	received tally
}

// slot is a question in flight.
type slot struct {
	question int
	turn     uint16 // the number of uses of the slot, to recognize late answers
	sent     time.Time
}

type packet struct {
	iov unix.Iovec // of a received packet
	buf [answerSize]byte
}

// mmsghdr is struct mmsghdr of recvmmsg(2).
type mmsghdr struct {
	head   unix.Msghdr
	length uint32
	_      [4]byte
}

// newAsker connects to a server. All questions must have one length, because the kernel segments a batch into datagrams
// (UDP_SEGMENT). Sending datagrams one by one would make the client the bottleneck.
func newAsker(to netip.AddrPort, questions []names.Question, verify bool) (*asker, error) {
	length := len(questions[0].Wire)
	for _, q := range questions {
		if len(q.Wire) != length {
			return nil, fmt.Errorf("questions of %d and %d bytes, want one length", length, len(q.Wire))
		}
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make socket: %w", err)
	}
	c := &asker{fd: fd, questions: questions, verify: verify}
	timeout := unix.NsecToTimeval(int64(timeout))
	err = errors.Join(
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 8<<20),
		unix.SetsockoptInt(fd, unix.IPPROTO_UDP, unix.UDP_SEGMENT, length),
		unix.Connect(fd, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}),
	)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("connect: %w", err), unix.Close(fd))
	}
	for i := range batch {
		c.outIov[i].Base = &c.out[i].buf[0]
		in, head := &c.in[i], &c.inHead[i].head
		in.iov.Base = &in.buf[0]
		in.iov.SetLen(answerSize)
		head.Iov = &in.iov
		head.SetIovlen(1)
	}
	return c, nil
}

// run sends questions for one phase.
func (c *asker) run(ctx context.Context, phase time.Duration) (tally, error) {
	c.received = tally{trips: make([]time.Duration, 0, 1<<19)}
	begin := time.Now()
	if err := c.sendAll(); err != nil {
		return tally{}, err
	}
	for ctx.Err() == nil && c.received.goesOn(time.Since(begin), phase) {
		n, err := c.receive()
		switch {
		case errors.Is(err, unix.EAGAIN):
			c.received.lost += window
			if err := c.sendAll(); err != nil {
				return tally{}, err
			}
			continue
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return tally{}, fmt.Errorf("receive: %w", err)
		}
		if err := c.take(n); err != nil {
			return tally{}, err
		}
	}
	c.received.wall = time.Since(begin)
	if err := c.drain(); err != nil {
		return tally{}, err
	}
	return c.received, nil
}

// take reads n answers and asks as many questions.
func (c *asker) take(n int) error {
	now := time.Now()
	for i := range n {
		answer := c.in[i].buf[:c.inHead[i].length]
		if len(answer) < 12 {
			return fmt.Errorf("an answer of %d bytes", len(answer))
		}
		id := binary.BigEndian.Uint16(answer)
		s := &c.slots[id%window]
		if s.turn%(1<<16/window) != id/window {
			continue // a late answer, already counted as lost
		}
		if c.verify {
			if err := check(answer, &c.questions[s.question]); err != nil {
				return err
			}
		}
		c.received.answers++
		c.received.trips = append(c.received.trips, now.Sub(s.sent))
		c.sending = append(c.sending, int(id%window))
	}
	return c.send(now)
}

// sendAll sends a question from every slot.
func (c *asker) sendAll() error {
	for i := range window {
		c.sending = append(c.sending, i)
		if len(c.sending) == batch {
			if err := c.send(time.Now()); err != nil {
				return err
			}
		}
	}
	return nil
}

// send sends the next questions from the free slots.
func (c *asker) send(now time.Time) error {
	for i, at := range c.sending {
		s := &c.slots[at]
		*s = slot{question: c.next, turn: s.turn + 1, sent: now}
		n := copy(c.out[i].buf[:], c.questions[c.next].Wire)
		binary.BigEndian.PutUint16(c.out[i].buf[:], s.turn%(1<<16/window)*window+uint16(at))
		c.outIov[i].SetLen(n)
		c.next = (c.next + 1) % len(c.questions)
	}
	if len(c.sending) == 0 {
		return nil
	}
	head := unix.Msghdr{Iov: &c.outIov[0]}
	head.SetIovlen(len(c.sending))
	c.sending = c.sending[:0]
	for {
		_, _, errno := unix.Syscall(unix.SYS_SENDMSG, uintptr(c.fd), uintptr(unsafe.Pointer(&head)), 0)
		switch errno {
		case 0:
			return nil
		case unix.EINTR:
		default:
			return fmt.Errorf("send: %w", errno)
		}
	}
}

// receive waits for packets and returns their number. It polls instead of sleeping: waking this process would cost the server more
// than its own work, and clients on other machines do not cost it that.
func (c *asker) receive() (int, error) {
	for begin := time.Now(); ; {
		n, _, errno := unix.Syscall6(unix.SYS_RECVMMSG, uintptr(c.fd), uintptr(unsafe.Pointer(&c.inHead[0])), batch, unix.MSG_DONTWAIT, 0, 0)
		switch {
		case errno == 0:
			return int(n), nil
		case errno != unix.EAGAIN || time.Since(begin) > timeout:
			return 0, errno
		}
	}
}

// drain waits for the answers in flight, so that none of them arrives in the next phase.
func (c *asker) drain() error {
	for left := window; left > 0; {
		n, err := c.receive()
		switch {
		case errors.Is(err, unix.EAGAIN):
			return nil
		case err != nil && !errors.Is(err, unix.EINTR):
			return fmt.Errorf("receive: %w", err)
		}
		left -= n
	}
	return nil
}

// close closes the socket.
func (c *asker) close() error { return unix.Close(c.fd) }

// overTCP queries a server over several TCP connections for one phase.
func overTCP(ctx context.Context, to netip.AddrPort, questions []names.Question, phase time.Duration) (tally, error) {
	group, ctx := errgroup.WithContext(ctx)
	var mu sync.Mutex
	var all tally
	begin := time.Now()
	for range connections {
		group.Go(func() error {
			conn, err := new(net.Dialer).DialContext(ctx, "tcp", to.String())
			if err != nil {
				return err
			}
			defer conn.Close()
			if err := conn.SetDeadline(begin.Add(phase + 5*time.Second)); err != nil {
				return err
			}
			answers := 0
			for ; time.Since(begin) < phase && ctx.Err() == nil; answers++ {
				if err := exchangeTCP(conn, &questions[answers%len(questions)]); err != nil {
					return err
				}
			}
			mu.Lock()
			defer mu.Unlock()
			all.answers += answers
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return tally{}, fmt.Errorf("ask over TCP: %w", err)
	}
	all.wall = time.Since(begin)
	return all, nil
}

func exchangeTCP(conn net.Conn, q *names.Question) error {
	if _, err := conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(q.Wire))), q.Wire...)); err != nil {
		return err
	}
	var length [2]byte
	if _, err := io.ReadFull(conn, length[:]); err != nil {
		return err
	}
	answer := make([]byte, binary.BigEndian.Uint16(length[:]))
	if _, err := io.ReadFull(conn, answer); err != nil {
		return err
	}
	return check(answer, q)
}
