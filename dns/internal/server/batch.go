package server

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// batchLen is the largest number of datagrams that one system call receives or sends.
	batchLen = 32

	// maxQuery is the number of bytes read of a question. EDNS announces [maxUDP].
	maxQuery = 2 * maxUDP
)

// batch receives and sends datagrams of a socket, several in one system call: on virtual machines a call costs more than
// computing an answer. Several answers to one client pass the kernel's network stack as one message, which UDP segmentation
// (UDP_SEGMENT, udp(7)) splits at the end. Package x/net also batches, but allocates for each datagram. Only one goroutine
// may use a batch.
type batch struct {
	conn     syscall.RawConn
	slots    [batchLen]slot
	in       [batchLen]mmsghdr
	received int // by the last call

	queue  [batchLen]*slot // slots with an answer to send
	queued int
	whole  bool // segmentation is off: the kernel lacks it, or a path to a client cannot take it
	out    outbox
	errno  unix.Errno // of the last call

	receive, send func(fd uintptr) (done bool) // tryReceive and trySend; as method values made once, they do not allocate
}

// slot holds a question, its sender and its answer.
type slot struct {
	peer    [unix.SizeofSockaddrInet6]byte // a struct sockaddr_in or sockaddr_in6
	peerLen uint32
	query   [maxQuery]byte
	answer  []byte
	iov     unix.Iovec // of query
}

// outbox is the queue of answers as messages for sendmmsg. Each message holds one or more answers to one client.
type outbox struct {
	messages [batchLen]mmsghdr
	first    [batchLen]int // index in the queue of each message's first answer
	cut      [batchLen]segmentSize
	answers  [batchLen]unix.Iovec // parallel to the queue
	count    int                  // of messages
	sent     int                  // of these
}

// segmentSize is the control message with the size of the datagrams into which the kernel splits a message. The last
// datagram may be shorter.
type segmentSize struct {
	unix.Cmsghdr
	size uint16
	_    [6]byte
}

// mmsghdr is struct mmsghdr of recvmmsg(2) and sendmmsg(2).
type mmsghdr struct {
	unix.Msghdr
	length uint32
}

// newBatch returns a batch for a socket of package net, which must be non-blocking, as they all are.
func newBatch(conn *net.UDPConn) (*batch, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("use udp %s: %w", conn.LocalAddr(), err)
	}
	b := &batch{conn: raw, received: batchLen}
	b.receive, b.send = b.tryReceive, b.trySend
	for i := range b.slots {
		s := &b.slots[i]
		s.answer = make([]byte, 0, maxUDP)
		s.iov.Base = &s.query[0]
		s.iov.SetLen(maxQuery)
		b.in[i].Name, b.in[i].Iov = &s.peer[0], &s.iov
		b.in[i].SetIovlen(1)
		cut := &b.out.cut[i]
		cut.Level, cut.Type = unix.IPPROTO_UDP, unix.UDP_SEGMENT
		cut.SetLen(unix.CmsgLen(int(unsafe.Sizeof(cut.size))))
	}
	return b, nil
}

// wait waits for datagrams and returns the number received.
func (b *batch) wait() (int, error) {
	if err := b.conn.Read(b.receive); err != nil {
		return 0, err
	}
	if b.errno != 0 {
		return 0, os.NewSyscallError("recvmmsg", b.errno)
	}
	return b.received, nil
}

func (b *batch) tryReceive(fd uintptr) bool {
	for i := range b.received { // the kernel overwrote these
		b.in[i].Namelen = unix.SizeofSockaddrInet6
	}
	b.received, b.errno = call(unix.SYS_RECVMMSG, fd, b.in[:])
	return b.errno != unix.EAGAIN
}

// query returns question i, and whether it was received whole. It is valid until the next call of wait.
func (b *batch) query(i int) (query []byte, whole bool) {
	return b.slots[i].query[:b.in[i].length], b.in[i].Flags&unix.MSG_TRUNC == 0
}

// peer returns the sender of question i.
func (b *batch) peer(i int) netip.AddrPort {
	name := &b.slots[i].peer
	port := binary.BigEndian.Uint16(name[2:])
	if binary.NativeEndian.Uint16(name[:]) == unix.AF_INET {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(name[4:8])), port)
	}
	return netip.AddrPortFrom(netip.AddrFrom16([16]byte(name[8:24])), port)
}

// memory returns the buffer for the answer to question i.
func (b *batch) memory(i int) []byte { return b.slots[i].answer[:0] }

// reply queues the answer to question i. answer must not change until flush.
func (b *batch) reply(i int, answer []byte) {
	s := &b.slots[i]
	s.answer, s.peerLen = answer, b.in[i].Namelen
	b.queue[b.queued] = s
	b.queued++
}

// flush sends the queued answers. One that cannot be sent does not keep back the others; the error is that of the last such
// answer. Answers to one client may be reordered.
func (b *batch) flush() error {
	defer func() { b.queued = 0 }()
	if !b.whole {
		slices.SortStableFunc(b.queue[:b.queued], bySize)
	}
	var failed error
	for b.pack(0); b.out.sent < b.out.count; {
		if err := b.conn.Write(b.send); err != nil {
			return errors.Join(failed, err)
		}
		switch at := b.out.sent; {
		case b.errno == 0:
		case b.out.messages[at].Iovlen > 1 && cannotCut(b.errno):
			b.whole = true
			b.pack(b.out.first[at])
		default: // the first unsent message failed
			failed = os.NewSyscallError("sendmmsg", b.errno)
			b.out.sent++
		}
	}
	return failed
}

// bySize orders answers by client, then from the longest to the shortest.
func bySize(x, y *slot) int {
	if c := bytes.Compare(x.peer[:], y.peer[:]); c != 0 {
		return c
	}
	return len(y.answer) - len(x.answer)
}

// cannotCut reports whether segmentation may have caused an error, for example on a path whose MTU is below an answer.
func cannotCut(errno unix.Errno) bool {
	return errno == unix.EINVAL || errno == unix.EIO || errno == unix.EMSGSIZE || errno == unix.EOPNOTSUPP
}

// pack fills the outbox with the answers of the queue from index from on.
func (b *batch) pack(from int) {
	o := &b.out
	o.count, o.sent = 0, 0
	size := 0 // of the answers of the last message; 0 if no further answer may join it
	for i, s := range b.queue[from:b.queued] {
		iov := &o.answers[from+i]
		iov.Base = &s.answer[0]
		iov.SetLen(len(s.answer))
		if size != 0 && len(s.answer) <= size && s.peer == b.queue[from+i-1].peer {
			last := o.count - 1
			m, cut := &o.messages[last], &o.cut[last]
			cut.size = uint16(size)
			m.SetIovlen(int(m.Iovlen) + 1)
			m.Control = (*byte)(unsafe.Pointer(cut))
			m.SetControllen(int(unsafe.Sizeof(*cut)))
			if len(s.answer) < size {
				size = 0
			}
			continue
		}
		m := &o.messages[o.count]
		m.Name, m.Namelen, m.Iov = &s.peer[0], s.peerLen, iov
		m.SetIovlen(1)
		m.Control = nil
		m.SetControllen(0)
		o.first[o.count] = from + i
		o.count++
		size = len(s.answer)
		if b.whole {
			size = 0
		}
	}
}

func (b *batch) trySend(fd uintptr) bool {
	n, errno := call(unix.SYS_SENDMMSG, fd, b.out.messages[b.out.sent:b.out.count])
	b.out.sent, b.errno = b.out.sent+n, errno
	return errno != unix.EAGAIN
}

// call calls recvmmsg or sendmmsg. It returns the number of messages moved, or 0 and the error.
func call(number, fd uintptr, heads []mmsghdr) (int, unix.Errno) {
	for {
		n, _, errno := unix.Syscall6(number, fd, uintptr(unsafe.Pointer(&heads[0])), uintptr(len(heads)), unix.MSG_DONTWAIT, 0, 0)
		switch errno {
		case 0:
			return int(n), 0
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}
