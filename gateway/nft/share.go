package nft

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/flows"
)

const (
	// tellAgain is how often all connections are told, so that others keep those that live and forget those that ended.
	// It begins with tellSoon and doubles: of a connection that opens just when Export begins there may be no news.
	firstExport, exportEvery = time.Second, 2 * time.Minute
	// freeEvery is how often connections are let go, so that they may come back. That begins with tellSoon and doubles, too.
	relaxEvery = 10 * time.Second
	// standby is how long a connection that another gateway told of is kept without a packet. The first one makes that
	// as long as the kernel keeps what is open: of TCP days (net.netfilter.nf_conntrack_tcp_timeout_established), or five
	// minutes while something is not acknowledged. So one that has longer than standby is ours; of UDP one that was answered.
	importedLifetime = 4 * time.Minute
	// waitForNews is how long a read waits until it looks whether it is to end.
	eventTimeout = 250 * time.Millisecond
	// newsBuffer has room for the news of some seconds with many connections.
	eventBuffer = 8 << 20
)

// shared is what Export and Import know of the state, from any goroutine: its VIPs, by their addresses.
type sharedState map[netip.Addr]*desired.VIP

// share returns what s says of connections that are shared.
func newSharedState(s *desired.State) *sharedState {
	is := make(sharedState, len(s.VIPs))
	for i := range s.VIPs {
		is[s.VIPs[i].Addr] = &s.VIPs[i]
	}
	return &is
}

// frontend returns that of an address, nil without one, and its VIP.
func (is sharedState) frontend(protocol string, at netip.AddrPort) (*desired.VIP, *desired.Frontend) {
	v := is[at.Addr()]
	if v == nil {
		return nil, nil
	}
	for i := range v.Frontends {
		if f := &v.Frontends[i]; f.Protocol == protocol && f.Port == at.Port() {
			return v, f
		}
	}
	return v, nil
}

// has reports whether the connection of a flow is shared. With masquerade nobody else has the address that backends know.
func (is sharedState) has(f *flows.Flow) bool {
	v, frontend := is.frontend(f.Protocol, f.VIP)
	return frontend != nil && v.Return != desired.Masquerade && slices.ContainsFunc(frontend.Backends, func(b desired.Backend) bool {
		return b.Addr == f.Backend.Addr() && b.Port == f.Backend.Port()
	})
}

// stays returns how long the client of a flow stays with its backend, 0 for not.
func (is sharedState) affinity(f *flows.Flow) time.Duration {
	if _, frontend := is.frontend(f.Protocol, f.VIP); frontend != nil {
		return time.Duration(frontend.Affinity) * time.Second
	}
	return 0
}

// Export tells of all connections of this gateway that can go on without it, then of each that opens, and of all again
// every two minutes, until ctx is done or tell fails. One at a time may run. Connections that are some seconds old may go on
// at another gateway from then on, and come back after any number of bytes.
func (b *Balancer) Export(ctx context.Context, tell func(flows.Flow) error) error {
	news, err := dialConntrack()
	if err != nil {
		return err
	}
	defer news.Close()
	if err := errors.Join(news.SetReadBuffer(eventBuffer), news.JoinGroup(groupUpdates)); err != nil {
		return fmt.Errorf("hear of connections: %w", err)
	}
	var again, free time.Time
	every, pass := firstExport, firstExport
	which := answered // those that somebody new may have to know; later on those that last
	for ctx.Err() == nil {
		if now := time.Now(); now.After(again) {
			again, every = now.Add(every), min(2*every, exportEvery)
			if err := b.all(which, tell); err != nil {
				return err
			}
			which = lasting
		}
		if now := time.Now(); now.After(free) {
			free, pass = now.Add(pass), min(2*pass, relaxEvery)
			if err := b.relaxWindows(); err != nil {
				return err
			}
		}
		if err := news.SetReadDeadline(time.Now().Add(eventTimeout)); err != nil {
			return err
		}
		heard, err := news.Receive()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			continue
		case errors.Is(err, unix.ENOBUFS):
			again = time.Time{} // some were lost
			continue
		case err != nil:
			return fmt.Errorf("hear of connections: %w", err)
		}
		for _, m := range heard {
			e, err := parse(m.Data)
			if err != nil {
				return fmt.Errorf("read a connection: %w", err)
			}
			if err := b.export(&e, lasting, tell); err != nil {
				return err
			}
		}
	}
	return ctx.Err()
}

// answered are the bits of an entry's status of which it has one when it was answered, and lasting those when it is more than a
// question and its answer: of UDP when it was heard of for two seconds.
const (
	answered uint32 = statusSeenReply
	lasting  uint32 = statusAssured
)

// All tells of all connections that are there, but for those that others told of and nobody has used here, until tell fails. Any
// goroutine may call it.
func (b *Balancer) All(tell func(flows.Flow) error) error { return b.all(answered, tell) }

func (b *Balancer) all(which uint32, tell func(flows.Flow) error) error {
	var failed error
	err := b.list(func(e entry) {
		if failed == nil && e.isLocal() {
			failed = b.export(&e, which, tell)
		}
	})
	return errors.Join(err, failed)
}

// ours reports whether an entry is of this gateway, and not one that another gateway told of and nobody has used here.
func (e *entry) isLocal() bool {
	if e.original.protocol == unix.IPPROTO_UDP {
		return e.status&statusSeenReply != 0
	}
	return e.left > importedLifetime
}

// free lets the connections of this gateway go on at others and come back. The kernel here knows the windows of TCP only as far as
// packets came through: what comes back after more than a window would belong to nothing.
func (b *Balancer) relaxWindows() error {
	is := b.state.Load()
	if is == nil {
		return nil
	}
	var bound []flows.Flow
	if err := b.list(func(e entry) {
		if f, ok := e.flow(); ok && e.checksWindows && e.open && is.has(&f) {
			bound = append(bound, f)
		}
	}); err != nil || len(bound) == 0 {
		return err
	}
	c, err := dialConntrack()
	if err != nil {
		return err
	}
	defer c.Close()
	for i := range bound {
		m, err := beLiberalMessage(&bound[i])
		if err != nil {
			return err
		}
		if _, err := c.Execute(m); err != nil && !errors.Is(err, unix.ENOENT) { // that has ended
			return fmt.Errorf("let connection %s come back: %w", &bound[i], err)
		}
	}
	return nil
}

// list calls each with all connections that are tracked here.
func (*Balancer) list(each func(entry)) error {
	c, err := dialConntrack()
	if err != nil {
		return err
	}
	defer c.Close()
	for _, a := range []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()} {
		all, err := c.Execute(dumpMessage(a))
		if err != nil {
			return fmt.Errorf("list connections: %w", err)
		}
		for _, m := range all {
			e, err := parse(m.Data)
			if err != nil {
				return fmt.Errorf("read a connection: %w", err)
			}
			each(e)
		}
	}
	return nil
}

// export tells of an entry if it is an open connection that others could go on with. One of UDP has to be answered or lasting, by
// the bit of its status.
func (b *Balancer) export(e *entry, which uint32, tell func(flows.Flow) error) error {
	f, ok := e.flow()
	is := b.state.Load()
	if e.original.protocol != unix.IPPROTO_UDP {
		which = lasting
	}
	if !ok || e.status&which == 0 || !e.open || is == nil || !is.has(&f) {
		return nil
	}
	return tell(f)
}

// Import makes connections of another gateway known here. Those that are known already stay as they are, and those whose
// VIP or backend this gateway does not have are returned. All are kept for four minutes at least. Clients that stay with a
// backend stay with it here, too.
func (b *Balancer) Import(all []flows.Flow) (early []flows.Flow, err error) {
	is := b.state.Load()
	if is == nil {
		return all, nil
	}
	c, err := dialConntrack()
	if err != nil {
		return nil, err
	}
	defer c.Close()
	var known []*flows.Flow
	for i := range all {
		f := &all[i]
		protocol := uint8(unix.IPPROTO_TCP)
		if f.Protocol == "UDP" {
			protocol = unix.IPPROTO_UDP
		}
		if !is.has(f) {
			early = append(early, *f)
			continue
		}
		m, err := createMessage(f, protocol, importedLifetime)
		if err != nil {
			return nil, err
		}
		if _, err = c.Execute(m); errors.Is(err, unix.EEXIST) {
			err = b.refresh(c, f, protocol)
		}
		if err != nil {
			return nil, fmt.Errorf("make connection %s known: %w", f, err)
		}
		known = append(known, f)
	}
	return early, b.importClients(*is, known)
}

// prolong gives a connection that waits for its gateway's death as long again. One of our own lives longer: it stays.
func (b *Balancer) refresh(c *netlink.Conn, f *flows.Flow, protocol uint8) error {
	ask, err := lookupMessage(f, protocol)
	if err != nil {
		return err
	}
	found, err := c.Execute(ask)
	if errors.Is(err, unix.ENOENT) || err == nil && len(found) == 0 {
		return nil // it has just ended
	}
	if err != nil {
		return err
	}
	e, err := parse(found[0].Data)
	if err != nil || e.isLocal() {
		return err
	}
	m, err := timeoutMessage(f, protocol, importedLifetime)
	if err != nil {
		return err
	}
	_, err = c.Execute(m)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}
