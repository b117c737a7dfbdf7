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
	// exportEvery is the period of a full export: peers keep the connections in it and forget the others. It starts with
	// firstExport and doubles, because the event of a connection that opens while Export starts may be lost.
	firstExport, exportEvery = time.Second, 2 * time.Minute
	// relaxEvery is how often TCP windows are relaxed, so that connections may leave and come back. It starts with
	// firstExport and doubles, too.
	relaxEvery = 10 * time.Second
	// importedLifetime is how long an imported connection is kept without a packet. The first packet extends that to the
	// kernel's timeout: days for TCP (net.netfilter.nf_conntrack_tcp_timeout_established), or five minutes while data is
	// unacknowledged. So a TCP connection with more than importedLifetime left, or a UDP one with a reply, is local.
	importedLifetime = 4 * time.Minute
	// eventTimeout bounds a read of events, after which the end of ctx is checked.
	eventTimeout = 250 * time.Millisecond
	// eventBuffer holds the events of some seconds with many connections.
	eventBuffer = 8 << 20
)

// sharedState is the part of the state that Export and Import read from any goroutine: its VIPs by address.
type sharedState map[netip.Addr]*desired.VIP

// newSharedState returns the shared part of s.
func newSharedState(s *desired.State) *sharedState {
	is := make(sharedState, len(s.VIPs))
	for i := range s.VIPs {
		is[s.VIPs[i].Addr] = &s.VIPs[i]
	}
	return &is
}

// frontend returns the frontend at an address, or nil, and its VIP.
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

// has reports whether peers share the connection of a flow. With masquerade they cannot: the backend knows this gateway's
// address.
func (is sharedState) has(f *flows.Flow) bool {
	v, frontend := is.frontend(f.Protocol, f.VIP)
	return frontend != nil && v.Return != desired.Masquerade && slices.ContainsFunc(frontend.Backends, func(b desired.Backend) bool {
		return b.Addr == f.Backend.Addr() && b.Port == f.Backend.Port()
	})
}

// affinity returns the affinity timeout of a flow's frontend; 0: none.
func (is sharedState) affinity(f *flows.Flow) time.Duration {
	if _, frontend := is.frontend(f.Protocol, f.VIP); frontend != nil {
		return time.Duration(frontend.Affinity) * time.Second
	}
	return 0
}

// Export implements flows.Sharer. The full export repeats every two minutes. Connections that are some seconds old may
// from then on continue at a peer, and come back after any number of bytes.
func (b *Balancer) Export(ctx context.Context, send func(flows.Flow) error) error {
	events, err := dialConntrack()
	if err != nil {
		return err
	}
	defer events.Close()
	if err := errors.Join(events.SetReadBuffer(eventBuffer), events.JoinGroup(groupUpdates)); err != nil {
		return fmt.Errorf("receive events of connections: %w", err)
	}
	var again, free time.Time
	every, pass := firstExport, firstExport
	which := answered // a new peer needs all of these; later only long-lived ones
	for ctx.Err() == nil {
		if now := time.Now(); now.After(again) {
			again, every = now.Add(every), min(2*every, exportEvery)
			if err := b.all(which, send); err != nil {
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
		if err := events.SetReadDeadline(time.Now().Add(eventTimeout)); err != nil {
			return err
		}
		received, err := events.Receive()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			continue
		case errors.Is(err, unix.ENOBUFS):
			again = time.Time{} // some events were lost
			continue
		case err != nil:
			return fmt.Errorf("receive events of connections: %w", err)
		}
		for _, m := range received {
			e, err := parse(m.Data)
			if err != nil {
				return fmt.Errorf("read a connection: %w", err)
			}
			b.countOpened(&e)
			if err := b.export(&e, lasting, send); err != nil {
				return err
			}
		}
	}
	return ctx.Err()
}

// answered is the status bit of connections with a reply, and lasting that of connections with more than one request and
// reply: UDP sets it after two seconds.
const (
	answered uint32 = statusSeenReply
	lasting  uint32 = statusAssured
)

// All implements flows.Sharer. It omits imported connections that were not used here.
func (b *Balancer) All(send func(flows.Flow) error) error { return b.all(answered, send) }

func (b *Balancer) all(which uint32, send func(flows.Flow) error) error {
	var failed error
	resend := flows.Resend(send)
	err := b.list(func(e entry) {
		if failed == nil && e.isLocal() {
			failed = b.export(&e, which, resend)
		}
	})
	return errors.Join(err, failed)
}

// isLocal reports whether the connection was used here. An imported one was not until its first packet.
func (e *entry) isLocal() bool {
	if e.original.protocol == unix.IPPROTO_UDP {
		return e.status&statusSeenReply != 0
	}
	return e.left > importedLifetime
}

// relaxWindows lets local connections continue at peers and come back. The kernel knows the TCP windows only from packets
// that passed here: without this, packets that come back after more than a window would be invalid.
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
		if _, err := c.Execute(m); err != nil && !errors.Is(err, unix.ENOENT) { // the connection has ended
			return fmt.Errorf("relax the windows of connection %s: %w", &bound[i], err)
		}
	}
	return nil
}

// list calls each for every tracked connection.
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

// export sends an entry if it is an open connection that peers share. A UDP entry must have the status bit in which.
func (b *Balancer) export(e *entry, which uint32, send func(flows.Flow) error) error {
	f, ok := e.flow()
	is := b.state.Load()
	if e.original.protocol != unix.IPPROTO_UDP {
		which = lasting
	}
	if !ok || e.status&which == 0 || !e.open || is == nil || !is.has(&f) {
		return nil
	}
	return send(f)
}

// Import implements flows.Sharer. Known connections stay as they are. New ones are kept for at least four minutes.
// Clients with affinity keep their backend here, too.
func (b *Balancer) Import(all []flows.Flow) (pending []flows.Flow, err error) {
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
			pending = append(pending, *f)
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
			return nil, fmt.Errorf("import connection %s: %w", f, err)
		}
		known = append(known, f)
	}
	return pending, b.importClients(*is, known)
}

// refresh extends the lifetime of an imported connection again. A local one lives longer, and stays as it is.
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
