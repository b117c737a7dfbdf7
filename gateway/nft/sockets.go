package nft

import (
	"errors"
	"fmt"

	"github.com/google/nftables"
	mdlayher "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// sockets are the netlink sockets to the kernel. They stay open between changes: closing one makes the kernel wait for an
// RCU grace period after a removal, which takes tens of milliseconds.
type sockets struct {
	rules   *nftables.Conn
	tracked *netlink.Handle
	ask     *nl.NetlinkSocket
}

// open returns the sockets, in the network namespace of its first caller.
func (b *Balancer) open() (s *sockets, err error) {
	if b.sockets != nil {
		return b.sockets, nil
	}
	s = new(sockets)
	if s.rules, err = dial(); err != nil {
		return nil, err
	}
	if s.ask, err = nl.GetNetlinkSocketAt(netns.None(), netns.None(), unix.NETLINK_NETFILTER); err == nil {
		s.tracked, err = netlink.NewHandle(unix.NETLINK_NETFILTER)
	}
	if err != nil {
		s.close()
		return nil, fmt.Errorf("reach the kernel's netfilter: %w", err)
	}
	b.sockets = s
	return s, nil
}

// reopen makes the next call of open return new sockets. Old ones may hold messages of a failed change.
func (b *Balancer) reopen() {
	if b.sockets != nil {
		b.sockets.close()
		b.sockets = nil
	}
}

func (s *sockets) close() {
	_ = s.rules.CloseLasting()
	if s.ask != nil {
		s.ask.Close()
	}
	if s.tracked != nil {
		s.tracked.Close()
	}
}

// request returns a request about rules.
func (s *sockets) request(message, flags int) *nl.NetlinkRequest {
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|message, flags)
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_NETFILTER: {Socket: s.ask}}
	return req
}

func dial() (*nftables.Conn, error) {
	conn, err := nftables.New(nftables.AsLasting(), nftables.WithSockOptions(func(c *mdlayher.Conn) error {
		return errors.Join(c.SetReadBuffer(readBuffer), c.SetWriteBuffer(writeBuffer))
	}))
	if err != nil {
		return nil, fmt.Errorf("reach nftables: %w", err)
	}
	return conn, nil
}
