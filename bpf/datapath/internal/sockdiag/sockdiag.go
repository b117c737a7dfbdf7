// Package sockdiag lists and closes UDP sockets over netlink (sock_diag(7)), on kernels without a BPF helper that closes
// sockets. Sockets are identified by their cookies, so a new socket with the same address is never closed by mistake.
package sockdiag

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// From linux/sock_diag.h and linux/inet_diag.h.
const (
	sockDestroy = 21     // SOCK_DESTROY
	established = 1 << 1 // the bit of TCP_ESTABLISHED, which a connected UDP socket is in

	sizeOfID  = 48 // struct inet_diag_sockid, whose last 8 bytes are the cookie
	sizeOfReq = 8 + sizeOfID
	sizeOfMsg = 4 + sizeOfID + 20 // struct inet_diag_msg, whose first byte is the family
)

// Socket is a connected UDP socket.
type Socket struct {
	// Cookie identifies the socket, as returned by bpf_get_socket_cookie.
	Cookie uint64

	family uint8
	id     [sizeOfID]byte // as the kernel sent it
}

// request is struct inet_diag_req_v2.
type request struct {
	family uint8
	id     [sizeOfID]byte // zeros: every socket
}

// Len and Serialize make a request part of a netlink message.
func (r request) Len() int { return sizeOfReq }

// Serialize returns the request in the kernel's format.
func (r request) Serialize() []byte {
	b := make([]byte, sizeOfReq)
	b[0], b[1] = r.family, unix.IPPROTO_UDP
	binary.NativeEndian.PutUint32(b[4:], established)
	copy(b[8:], r.id[:])
	return b
}

// List returns the connected UDP sockets of the calling thread's network namespace. Listing a socket gives it its
// cookie.
func List() ([]Socket, error) {
	var found []Socket
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		req := nl.NewNetlinkRequest(nl.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP)
		req.AddData(request{family: family})
		replies, err := req.Execute(unix.NETLINK_INET_DIAG, nl.SOCK_DIAG_BY_FAMILY)
		if err != nil {
			return nil, fmt.Errorf("list UDP sockets: %w", err)
		}
		for _, reply := range replies {
			if len(reply) < sizeOfMsg {
				return nil, fmt.Errorf("list UDP sockets: reply of %d bytes", len(reply))
			}
			s := Socket{family: reply[0], id: [sizeOfID]byte(reply[4:])}
			words := s.id[sizeOfID-8:] // two of 32 bits, the lower one first
			s.Cookie = uint64(binary.NativeEndian.Uint32(words[4:]))<<32 | uint64(binary.NativeEndian.Uint32(words))
			found = append(found, s)
		}
	}
	return found, nil
}

// Close closes a socket of the calling thread's network namespace: its program gets ECONNABORTED. It returns false
// when the socket no longer exists.
func (s Socket) Close() (bool, error) {
	req := nl.NewNetlinkRequest(sockDestroy, unix.NLM_F_ACK)
	req.AddData(request{family: s.family, id: s.id})
	_, err := req.Execute(unix.NETLINK_INET_DIAG, 0)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("close UDP socket: %w", err)
	}
	return true, nil
}
