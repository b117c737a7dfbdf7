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
	// batchLen is how many datagrams enter the kernel in one call, or leave it.
	batchLen = 32

	// maxQuery is how much is read of a question, in bytes. We announce that we take [maxUDP].
	maxQuery = 2 * maxUDP
)

// batch moves datagrams between a socket and memory, several in a call: on virtual machines a call costs more than an
// answer. (x/net has the same, with garbage for each datagram.) And several answers to one client go through the kernel's
// network stack as one, which it cuts up at the end: UDP segmentation, udp(7). It is for one goroutine.
type batch struct {
	conn     syscall.RawConn
	slots    [batchLen]slot
	in       [batchLen]mmsghdr
	received int // by the last call

	queue  [batchLen]*slot // with an answer
	queued int
	whole  bool // nothing is to be cut up: the kernel cannot, or not on the way to some client
	out    outbox
	errno  unix.Errno // of the last call

	receive, send func(fd uintptr) (done bool) // tryReceive and trySend: as values they are made once
}

// slot holds a question and its answer.
type slot struct {
	peer    [unix.SizeofSockaddrInet6]byte // a struct sockaddr_in or sockaddr_in6
	peerLen uint32
	query   [maxQuery]byte
	answer  []byte
	iov     unix.Iovec // of query
}

// outbox holds what a queue of answers is for the kernel: messages of one or more answers to one client.
type outbox struct {
	messages [batchLen]mmsghdr
	first    [batchLen]int // of each message, in the queue
	cut      [batchLen]segmentSize
	answers  [batchLen]unix.Iovec // as in the queue
	count    int                  // of messages
	sent     int                  // of them
}

// segmentSize is the control message that says how long the datagrams are that a message is cut into. The last one may be
// shorter.
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

// newBatch makes one for a socket of package net, which never blocks.
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

// wait waits for datagrams and returns how many came.
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
	for i := range b.received { // where the kernel wrote
		b.in[i].Namelen = unix.SizeofSockaddrInet6
	}
	b.received, b.errno = call(unix.SYS_RECVMMSG, fd, b.in[:])
	return b.errno != unix.EAGAIN
}

// query returns the question number i, and whether that is all of it. It is valid until wait is called again.
func (b *batch) query(i int) (query []byte, whole bool) {
	return b.slots[i].query[:b.in[i].length], b.in[i].Flags&unix.MSG_TRUNC == 0
}

// peer returns who asked the question number i.
func (b *batch) peer(i int) netip.AddrPort {
	name := &b.slots[i].peer
	port := binary.BigEndian.Uint16(name[2:])
	if binary.NativeEndian.Uint16(name[:]) == unix.AF_INET {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(name[4:8])), port)
	}
	return netip.AddrPortFrom(netip.AddrFrom16([16]byte(name[8:24])), port)
}

// memory returns where the answer to the question number i may be written.
func (b *batch) memory(i int) []byte { return b.slots[i].answer[:0] }

// reply queues an answer, which stays where it is until flush, to who asked the question number i.
func (b *batch) reply(i int, answer []byte) {
	s := &b.slots[i]
	s.answer, s.peerLen = answer, b.in[i].Namelen
	b.queue[b.queued] = s
	b.queued++
}

// flush sends the answers that are queued, all that can be: the error is of the others. Those to one client may go in
// another order.
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
		default: // it is of the first of those that were left
			failed = os.NewSyscallError("sendmmsg", b.errno)
			b.out.sent++
		}
	}
	return failed
}

// bySize sorts answers by client, and those to one from the longest to the shortest.
func bySize(x, y *slot) int {
	if c := bytes.Compare(x.peer[:], y.peer[:]); c != 0 {
		return c
	}
	return len(y.answer) - len(x.answer)
}

// cannotCut reports whether an error may be of the cutting, such as on a way whose packets are shorter than an answer.
func cannotCut(errno unix.Errno) bool {
	return errno == unix.EINVAL || errno == unix.EIO || errno == unix.EMSGSIZE || errno == unix.EOPNOTSUPP
}

// pack makes messages of the queue, from this answer on.
func (b *batch) pack(from int) {
	o := &b.out
	o.count, o.sent = 0, 0
	size := 0 // of the answers of the last message, 0 when it has its last one
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

// call calls recvmmsg or sendmmsg and returns how many datagrams it moved: some, or none and why.
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
