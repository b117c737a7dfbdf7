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
	// importedLifetime is how long an imported connection is kept without a packet. The first packet extends that to the
	// kernel's timeout: days for TCP (net.netfilter.nf_conntrack_tcp_timeout_established), or five minutes while data is
	// unacknowledged. So a TCP connection with more than importedLifetime left, or a UDP one with a reply, is local.
	importedLifetime = 4 * time.Minute
	// eventTimeout bounds a read of events, after which the end of ctx is checked.
	eventTimeout = 250 * time.Millisecond
	// eventBuffer holds the events of some seconds with many connections.
	eventBuffer = 8 << 20
)

// sharedState is the part of the state that Export and Import read from any goroutine.
type sharedState struct {
	vips  map[netip.Addr]*desired.VIP
	peers map[string]*desired.PeerGateway // by name
}

// newSharedState returns the shared part of s.
func newSharedState(s *desired.State) *sharedState {
	is := &sharedState{vips: make(map[netip.Addr]*desired.VIP, len(s.VIPs)), peers: make(map[string]*desired.PeerGateway, len(s.Peers))}
	for i := range s.VIPs {
		is.vips[s.VIPs[i].Addr] = &s.VIPs[i]
	}
	for i := range s.Peers {
		is.peers[s.Peers[i].Name] = &s.Peers[i]
	}
	return is
}

// peerAddrs returns the addresses of all peers.
func (is *sharedState) peerAddrs() map[netip.Addr]bool {
	all := map[netip.Addr]bool{}
	if is == nil {
		return all
	}
	for _, p := range is.peers {
		for _, v4 := range []bool{true, false} {
			if a := p.AddressOf(v4); a.IsValid() {
				all[a] = true
			}
		}
	}
	return all
}

// frontend returns the frontend at an address, or nil.
func (is *sharedState) frontend(protocol string, at netip.AddrPort) *desired.Frontend {
	v := is.vips[at.Addr()]
	if v == nil {
		return nil
	}
	for i := range v.Frontends {
		if f := &v.Frontends[i]; f.Protocol == protocol && f.Port == at.Port() {
			return f
		}
	}
	return nil
}

// has reports whether the VIP and backend of a flow are there.
func (is *sharedState) has(f *flows.Flow) bool {
	frontend := is.frontend(f.Protocol, f.VIP)
	return frontend != nil && slices.ContainsFunc(frontend.Backends, func(b desired.Backend) bool {
		return b.Addr == f.Backend.Addr() && b.Port == f.Backend.Port()
	})
}

// affinity returns the affinity timeout of a flow's frontend; 0: none.
func (is *sharedState) affinity(f *flows.Flow) time.Duration {
	if frontend := is.frontend(f.Protocol, f.VIP); frontend != nil {
		return time.Duration(frontend.Affinity) * time.Second
	}
	return 0
}

// Export implements flows.Sharer. The full export repeats every two minutes.
func (b *Balancer) Export(ctx context.Context, send func(flows.Flow) error) error {
	events, err := dialConntrack()
	if err != nil {
		return err
	}
	defer events.Close()
	if err := errors.Join(events.SetReadBuffer(eventBuffer), events.JoinGroup(groupUpdates)); err != nil {
		return fmt.Errorf("receive events of connections: %w", err)
	}
	var again time.Time
	every := firstExport
	which := answered // a new peer needs all of these; later only long-lived ones
	for ctx.Err() == nil {
		if now := time.Now(); now.After(again) {
			again, every = now.Add(every), min(2*every, exportEvery)
			if err := b.all(which, false, send); err != nil {
				return err
			}
			which = lasting
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
			if !e.isLocal() && !e.ended {
				continue // a peer's announcement has made it live longer
			}
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

// All implements flows.Sharer. It includes imported connections that were not used here: a gateway that starts may have been the one that
// had them, and no other gateway sends those.
func (b *Balancer) All(send func(flows.Flow) error) error { return b.all(answered, true, send) }

func (b *Balancer) all(which uint32, unused bool, send func(flows.Flow) error) error {
	var failed error
	resend := flows.Resend(send)
	err := b.list(func(e entry) {
		if failed == nil && e.open && (unused || e.isLocal()) {
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

// export sends an entry if it is a connection that peers share, and open or just ended. A UDP entry must have the status bit in which.
func (b *Balancer) export(e *entry, which uint32, send func(flows.Flow) error) error {
	f, ok := e.flow()
	is := b.state.Load()
	if e.original.protocol != unix.IPPROTO_UDP {
		which = lasting
	}
	if !ok || e.status&which == 0 || !e.open && !e.ended || is == nil || !is.has(&f) {
		return nil
	}
	f.Ended = e.ended
	return send(f)
}

// Import implements flows.Sharer. Known connections stay as they are. New ones are kept for at least four minutes, and ended ones are
// deleted. Clients with affinity keep their backend here, too.
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
		t, ok := is.track(f)
		switch {
		case !ok:
			continue
		case f.Ended:
			err = t.delete(c)
		case !is.has(f):
			pending = append(pending, *f)
			continue
		default:
			err = t.store(c)
			known = append(known, f)
		}
		if err != nil {
			return nil, fmt.Errorf("import connection %s: %w", f, err)
		}
	}
	return pending, b.importClients(is, known)
}

// tracked is a flow as connection tracking has it here. If a peer keeps the flow, Backend is that peer. No packet is translated so.
type tracked struct {
	*flows.Flow
	protocol uint8
	kept     bool
}

// track returns how a flow of a peer is tracked here. A masqueraded one is not if its keeper has no address of its family.
func (is *sharedState) track(f *flows.Flow) (t tracked, ok bool) {
	t = tracked{Flow: f, protocol: unix.IPPROTO_TCP, kept: f.Masqueraded()}
	if f.Protocol == "UDP" {
		t.protocol = unix.IPPROTO_UDP
	}
	if !t.kept {
		return t, true
	}
	keeper, ok := is.peers[f.Gateway]
	if !ok || !keeper.AddressOf(f.VIP.Addr().Is4()).IsValid() {
		return t, false
	}
	own := *f
	own.Source, own.Backend = f.Client, netip.AddrPortFrom(keeper.AddressOf(f.VIP.Addr().Is4()), f.VIP.Port())
	t.Flow = &own
	return t, true
}

// original is the direction of the client's packets.
func (t *tracked) original() tuple { return tuple{t.protocol, t.Client, t.VIP} }

// store creates the entry. One that opened a moment ago takes the place of entries that have its client's port at the VIP, or its port at
// the backend: their connections have ended.
func (t *tracked) store(c *netlink.Conn) error {
	m, err := createMessage(t, importedLifetime)
	if err != nil {
		return err
	}
	_, err = c.Execute(m)
	if !errors.Is(err, unix.EEXIST) {
		return err
	}
	e, err := lookup(c, t.original())
	if err != nil {
		return err
	}
	switch ours := e != nil && e.is(t); {
	case ours && !t.kept: // the kernel does not extend the lifetime of a kept one, so it is made again
		return t.refresh(c, e)
	case !ours && t.Resent:
		return nil
	}
	others := []tuple{t.original()}
	if !t.kept {
		others = append(others, tuple{t.protocol, t.Backend, t.Source})
	}
	for _, of := range others {
		if err := deleteEntry(c, of); err != nil {
			return err
		}
	}
	if _, err = c.Execute(m); errors.Is(err, unix.EEXIST) {
		return nil // a packet has just created it
	}
	return err
}

// delete deletes the entry, unless that of another flow has taken its place.
func (t *tracked) delete(c *netlink.Conn) error {
	e, err := lookup(c, t.original())
	if err != nil || e == nil || !e.is(t) {
		return err
	}
	return deleteEntry(c, e.original)
}

// refresh extends the lifetime of an imported connection again. A local one lives longer, and stays as it is.
func (t *tracked) refresh(c *netlink.Conn, e *entry) error {
	if e.isLocal() {
		return nil
	}
	m, err := timeoutMessage(t, importedLifetime)
	if err != nil {
		return err
	}
	_, err = c.Execute(m)
	if errors.Is(err, unix.ENOENT) {
		return nil // it has just ended
	}
	return err
}

// is reports whether an entry is that of a flow, whichever end sent the first packet here.
func (e *entry) is(t *tracked) bool {
	if e.isKept() || t.kept {
		return e.isKept() && t.kept && e.original == t.original() && e.reply.from.Addr() == t.Backend.Addr()
	}
	there, back := t.original(), tuple{t.protocol, t.Backend, t.Source}
	return e.original == there && e.reply == back || e.original == back && e.reply == there
}

// isKept reports whether a peer keeps the connection.
func (e *entry) isKept() bool { return e.status&ipsFixedTimeout != 0 }

// lookup returns the entry that has a direction, or nil.
func lookup(c *netlink.Conn, of tuple) (*entry, error) {
	ask, err := lookupMessage(of)
	if err != nil {
		return nil, err
	}
	found, err := c.Execute(ask)
	if errors.Is(err, unix.ENOENT) || err == nil && len(found) == 0 {
		return nil, nil //nolint:nilnil // there is none
	}
	if err != nil {
		return nil, err
	}
	e, err := parse(found[0].Data)
	return &e, err
}

// deleteEntry deletes the entry that has a direction, if there is one.
func deleteEntry(c *netlink.Conn, of tuple) error {
	m, err := deleteMessage(of)
	if err != nil {
		return err
	}
	if _, err = c.Execute(m); errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}
