package server

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
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
// answer. (x/net has the same, with garbage for each datagram.) It is for one goroutine.
type batch struct {
	conn     syscall.RawConn
	slots    [batchLen]slot
	in, out  [batchLen]mmsghdr
	received int // by the last call
	queued   int // of out
	sent     int
	errno    unix.Errno // of the last call

	receive, send func(fd uintptr) (done bool) // tryReceive and trySend: as values they are made once
}

// slot holds a question and its answer.
type slot struct {
	peer   [unix.SizeofSockaddrInet6]byte // a struct sockaddr_in or sockaddr_in6
	query  [maxQuery]byte
	answer []byte
	iov    struct{ query, answer unix.Iovec }
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
		s.iov.query.Base = &s.query[0]
		s.iov.query.SetLen(maxQuery)
		b.in[i].Name, b.in[i].Iov = &s.peer[0], &s.iov.query
		b.in[i].SetIovlen(1)
		b.out[i].SetIovlen(1)
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
	s, head := &b.slots[i], &b.out[b.queued]
	s.answer = answer
	s.iov.answer.Base = &answer[0]
	s.iov.answer.SetLen(len(answer))
	head.Name, head.Namelen, head.Iov = &s.peer[0], b.in[i].Namelen, &s.iov.answer
	b.queued++
}

// flush sends the answers that are queued, all that can be: the error is of the others.
func (b *batch) flush() error {
	defer func() { b.queued = 0 }()
	var failed error
	for b.sent = 0; b.sent < b.queued; {
		if err := b.conn.Write(b.send); err != nil {
			return errors.Join(failed, err)
		}
		if b.errno != 0 {
			failed = os.NewSyscallError("sendmmsg", b.errno)
			b.sent++ // it is of the first of those that were left
		}
	}
	return failed
}

func (b *batch) trySend(fd uintptr) bool {
	n, errno := call(unix.SYS_SENDMMSG, fd, b.out[b.sent:b.queued])
	b.sent, b.errno = b.sent+n, errno
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
