package ebpf

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/flows"
)

const (
	// pollInterval is how long a new flow waits at most until it is sent: the program does not wake the reader.
	pollInterval = 5 * time.Millisecond
	// resendInterval is how often all flows are sent, so that other gateways keep those that live and forget the
	// others.
	resendInterval = 2 * time.Minute
	// standbyTimeout is how long a flow of another gateway is kept without being sent again.
	standbyTimeout = 5 * time.Minute
	// openTimeout is the idle timeout of an open TCP connection in the program (OPEN_S in bpf/flow.h), openUDPTimeout
	// that of UDP.
	openTimeout    = 6 * time.Hour
	openUDPTimeout = 5 * time.Minute
)

// Export sends all flows of this gateway that another one can continue, then each flow that opens, each flow of another
// gateway whose client's packet that one has handed over, since it has lost the flow, and all flows again every two
// minutes. It returns when ctx is done or send fails. Only one Export may run at a time.
func (b *Balancer) Export(ctx context.Context, send func(flows.Flow) error) error {
	r, err := ringbuf.NewReader(b.k.maps[bpf.MapGatewayOpened])
	if err != nil {
		return fmt.Errorf("read opened flows: %w", err)
	}
	defer r.Close()
	if err := b.setAnnounce(true); err != nil {
		return err
	}
	defer func() { _ = b.setAnnounce(false) }() // flows that are still announced are only lost
	var record ringbuf.Record
	var resendAt time.Time
	lost := uint64(0)
	for ctx.Err() == nil {
		if now := time.Now(); now.After(resendAt) || b.lost() != lost {
			resendAt, lost = now.Add(resendInterval), b.lost()
			if err := errors.Join(b.sendAll(bpf.MapFlows, send), b.sendAll(bpf.MapUDPFlows, send)); err != nil {
				return err
			}
		}
		r.SetDeadline(time.Now().Add(pollInterval))
		for {
			if err := r.ReadInto(&record); errors.Is(err, os.ErrDeadlineExceeded) {
				break
			} else if err != nil {
				return fmt.Errorf("read opened flows: %w", err)
			}
			if len(record.RawSample) < binary.Size(bpf.GatewayOpened{}) {
				continue // of an older build; the next full export has the flow
			}
			var o bpf.GatewayOpened
			if err := decode(record.RawSample, &o); err != nil {
				return err
			}
			to := send
			if o.Conn.Flags&bpf.GatewayStandby != 0 {
				to = flows.Resend(send)
			} else {
				b.countOpened(&o)
			}
			if err := b.export(&o.Key, &o.Conn, to); err != nil {
				return err
			}
		}
	}
	return ctx.Err()
}

func (b *Balancer) setAnnounce(on bool) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.changeSettings(func(s *bpf.GatewaySettings) {
		s.Announce = 0
		if on {
			s.Announce = 1
		}
	})
}

// lost returns how many flows did not fit into the ring buffer.
func (b *Balancer) lost() (n uint64) {
	_ = b.k.maps[bpf.MapGatewayLost].Lookup(uint32(0), &n) // an array always has index 0
	return n
}

// All sends all flows of this gateway that another one can continue, until send fails. It is safe for concurrent use.
func (b *Balancer) All(send func(flows.Flow) error) error {
	return errors.Join(b.sendAll(bpf.MapHandshakes, send), b.sendAll(bpf.MapUDPFlows, send), b.sendAll(bpf.MapFlows, send))
}

// sendAll sends the flows of one map.
func (b *Balancer) sendAll(name string, send func(flows.Flow) error) error {
	resend := flows.Resend(send)
	return b.eachActive(name, func(key *bpf.GatewayConnKey, c *bpf.GatewayConn) error { return b.export(key, c, resend) })
}

// eachActive calls do for each entry of a map whose flow is alive and was used here, until do fails.
func (b *Balancer) eachActive(name string, do func(*bpf.GatewayConnKey, *bpf.GatewayConn) error) error {
	keys, values := make([]bpf.GatewayConnKey, 4096), make([]bpf.GatewayConn, 4096)
	var cursor ebpf.MapBatchCursor
	for {
		n, err := b.k.maps[name].BatchLookup(&cursor, keys, values, nil)
		last := errors.Is(err, ebpf.ErrKeyNotExist)
		if err != nil && !last {
			return fmt.Errorf("read flows: %w", err)
		}
		for i := range n {
			if values[i].Flags&bpf.GatewayStandby != 0 || !alive(&keys[i], &values[i]) {
				continue
			}
			if err := do(&keys[i], &values[i]); err != nil {
				return err
			}
		}
		if last {
			return nil
		}
	}
}

// alive reports whether both sides of a flow have spoken and it has not ended or timed out. In UDP the first answer is
// enough.
func alive(key *bpf.GatewayConnKey, c *bpf.GatewayConn) bool {
	state := bpf.ConnState(c.State)
	open := state == bpf.ConnOpen || state == bpf.ConnHalf || key.Proto == unix.IPPROTO_UDP && state == bpf.ConnAnswered
	return open && time.Duration(now()-c.Seen) < idleTimeout(key.Proto)
}

func idleTimeout(proto uint8) time.Duration {
	if proto == unix.IPPROTO_UDP {
		return openUDPTimeout
	}
	return openTimeout
}

// now returns the time of the clock that the program uses for flows: CLOCK_MONOTONIC in ns.
func now() uint64 { return clock(unix.CLOCK_MONOTONIC) }

func clock(id int32) uint64 {
	var t unix.Timespec
	_ = unix.ClockGettime(id, &t) // every Linux has these clocks
	return uint64(t.Nano())
}

// export sends the flow of an entry, if the entry is the flow's first.
func (b *Balancer) export(key *bpf.GatewayConnKey, c *bpf.GatewayConn, send func(flows.Flow) error) error {
	if key.Reply != 0 {
		return nil
	}
	b.mu.Lock()
	vip, ok := b.have.vips[key.Server]
	_, served := b.have.frontends[bpf.GatewayFrontendKey{Addr: key.Server, Port: key.ServerPort, Proto: key.Proto}]
	_, serves := b.have.backends[c.BackendId]
	b.mu.Unlock()
	if !ok || !served || !serves {
		return nil // an entry of the reply direction, or of a removed VIP or backend
	}
	f := flows.Flow{
		Protocol: protocolName(key.Proto),
		Client:   netip.AddrPortFrom(bpf.AddrOf(key.Client), key.ClientPort), VIP: netip.AddrPortFrom(bpf.AddrOf(key.Server), key.ServerPort),
		Backend: netip.AddrPortFrom(bpf.AddrOf(c.Addr), c.ServerPort), Source: netip.AddrPortFrom(bpf.AddrOf(key.Client), c.ClientPort),
		HalfOpen: key.Proto == unix.IPPROTO_TCP && bpf.ConnState(c.State) == bpf.ConnAnswered,
	}
	if c.Flags&bpf.GatewayDoubleNAT != 0 {
		f.Source = netip.AddrPortFrom(bpf.AddrOf(vip.Source), c.ClientPort)
	}
	return send(f)
}

// Import stores flows of another gateway, as standby until one of their packets comes here. Flows that are already
// known stay unchanged. A flow that has just opened takes the place of one that came before with the same port at the backend, so
// they come in the order in which they opened. Import returns the flows whose VIP or backend this gateway does not have. It keeps all
// others for at least five minutes, and stores the session affinity of their clients.
func (b *Balancer) Import(all []flows.Flow) (early []flows.Flow, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, f := range all {
		proto := protocol(f.Protocol)
		service, served := b.ids.frontends[endpoint(f.VIP, proto)]
		number, known := b.ids.backends[endpoint(f.Backend, proto)]
		if !served || !known || b.applied == nil {
			early = append(early, f)
			continue
		}
		if f.HalfOpen {
			if err := b.answer(&f, proto); err != nil {
				return nil, err
			}
			continue
		}
		if f.Masqueraded() {
			err = b.storePeerFlow(&f, proto)
		} else {
			err = b.storeFlow(&f, proto, bpf.GatewayConn{
				BackendId: number, Service: service, State: uint8(bpf.ConnOpen), Flags: bpf.GatewayStandby, Seen: now() - uint64(max(0, idleTimeout(proto)-standbyTimeout)),
			})
		}
		if err != nil {
			return nil, err
		}
		if err := b.storeAffinity(&f, proto, bpf.GatewayClient{BackendId: number, FrontendId: service}); err != nil {
			return nil, err
		}
	}
	return early, nil
}

// storePeerFlow stores the owner of a masqueraded flow, which gets the packets of its client. A flow whose owner has no address to hand
// them to is not stored.
func (b *Balancer) storePeerFlow(f *flows.Flow, proto uint8) error {
	is := bpf.GatewayPeerFlow{Seen: now()}
	for _, p := range b.applied.Peers {
		if p.Name == f.Gateway && p.Address.IsValid() {
			is.Owner.Addr = bpf.Addr16(p.Address)
		}
	}
	if is.Owner.Addr == [16]byte{} {
		return nil
	}
	key := clientKey(f, proto)
	if err := b.k.maps[bpf.MapGatewayPeerFlows].Put(key, is); err != nil {
		return fmt.Errorf("store the owner of flow %s: %w", f, err)
	}
	return nil
}

// clientKey returns the key of the client's packets of a flow.
func clientKey(f *flows.Flow, proto uint8) bpf.GatewayConnKey {
	return bpf.GatewayConnKey{
		Client: bpf.Addr16(f.Client.Addr()), ClientPort: f.Client.Port(), Server: bpf.Addr16(f.VIP.Addr()), ServerPort: f.VIP.Port(), Proto: proto,
	}
}

// answer notes that the backend of a flow has spoken, if only its client has here. The client's next packet then opens the flow. A
// flow whose client has not spoken here is not stored: a backend that makes up clients would crowd out others.
func (b *Balancer) answer(f *flows.Flow, proto uint8) error {
	m := b.k.maps[bpf.MapHandshakes]
	key := clientKey(f, proto)
	reply := bpf.GatewayConnKey{
		Client: key.Client, ClientPort: f.Source.Port(), Server: bpf.Addr16(f.Backend.Addr()), ServerPort: f.Backend.Port(), Proto: proto, Reply: 1,
	}
	for _, k := range []bpf.GatewayConnKey{reply, key} {
		var c bpf.GatewayConn
		err := m.Lookup(k, &c)
		if err == nil && bpf.ConnState(c.State) == bpf.ConnOpening {
			c.State, c.Window = uint8(bpf.ConnAnswered), 0 // the windows of the answer are unknown
			err = m.Update(k, c, ebpf.UpdateExist)
		}
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("note the answer of flow %s: %w", f, err)
		}
	}
	return nil
}

// storeAffinity stores the backend that a client of another gateway has, unless the client already has one here.
func (b *Balancer) storeAffinity(f *flows.Flow, proto uint8, c bpf.GatewayClient) error {
	frontend := b.have.frontends[endpoint(f.VIP, proto)]
	if frontend.AffinityS == 0 {
		return nil
	}
	m := b.k.maps[bpf.MapAffinities]
	key := bpf.GatewayAffinityKey{Client: bpf.Addr16(f.Client.Addr()), FrontendId: c.FrontendId}
	c.Last = clock(unix.CLOCK_BOOTTIME)
	var old bpf.GatewayClient
	err := m.Lookup(key, &old)
	stays := time.Duration(c.Last-old.Last) <= time.Duration(frontend.AffinityS)*time.Second && b.have.members[bpf.GatewayMember{FrontendId: c.FrontendId, BackendId: old.BackendId}] != 0
	if err == nil && old.BackendId != c.BackendId && stays {
		return nil
	}
	if err == nil || errors.Is(err, ebpf.ErrKeyNotExist) {
		err = m.Put(key, c)
	}
	if err != nil {
		return fmt.Errorf("store the client of flow %s: %w", f, err)
	}
	return nil
}

// storeFlow stores the entries of a flow. Those of the reply direction come first: otherwise a reply could find no
// flow.
func (b *Balancer) storeFlow(f *flows.Flow, proto uint8, c bpf.GatewayConn) error {
	type entry struct {
		client, server netip.AddrPort
		reply          uint8
		becomes        netip.AddrPort // the new server
		clientPort     uint16
		window         uint8
	}
	known := netip.AddrPortFrom(f.Client.Addr(), f.Source.Port()) // the client between the two translations, or as the backend sees it
	entries := []entry{{known, f.Backend, 1, f.VIP, f.Client.Port(), 0}}
	if f.Source.Addr() != f.Client.Addr() {
		c.Flags |= bpf.GatewayDoubleNAT
		entries = append(entries,
			entry{f.Backend, f.Source, 0, known, f.Backend.Port(), bpf.GatewaySecond},
			entry{f.Backend, known, 1, f.Source, f.Backend.Port(), bpf.GatewaySecond})
	}
	for _, e := range append(entries, entry{f.Client, f.VIP, 0, f.Backend, f.Source.Port(), 0}) {
		key := bpf.GatewayConnKey{
			Client: bpf.Addr16(e.client.Addr()), ClientPort: e.client.Port(), Server: bpf.Addr16(e.server.Addr()), ServerPort: e.server.Port(), Proto: proto, Reply: e.reply,
		}
		c.Addr, c.ServerPort, c.ClientPort, c.Window = bpf.Addr16(e.becomes.Addr()), e.becomes.Port(), e.clientPort, e.window
		if err := b.storeEntry(&key, &c, f); err != nil {
			return fmt.Errorf("store flow %s: %w", f, err)
		}
	}
	return nil
}

// takesPort reports whether a flow takes the place of one that is in use here and has the same port: the sender owns the port, so it
// knows which of them has ended.
func (b *Balancer) takesPort(f *flows.Flow) bool {
	if f.Source.Addr() != f.VIP.Addr() || len(b.applied.Slots) == 0 {
		return false
	}
	owner := b.applied.Slots[f.Source.Port()/desired.SlotPorts].Owner
	return owner > 0 && b.applied.Peers[owner-1].Name == f.Gateway
}

// flowsOf returns the map that has the open flows of a protocol.
func (b *Balancer) flowsOf(proto uint8) *ebpf.Map {
	if proto == unix.IPPROTO_UDP {
		return b.k.maps[bpf.MapUDPFlows]
	}
	return b.k.maps[bpf.MapFlows]
}

// storeEntry stores an entry of a flow, unless the flow does not take its port and the key is that of another flow which is alive: one of
// this gateway, or any if the flow is resent.
func (b *Balancer) storeEntry(key *bpf.GatewayConnKey, c *bpf.GatewayConn, f *flows.Flow) error {
	m := b.flowsOf(key.Proto)
	err := m.Update(key, c, ebpf.UpdateNoExist)
	if !errors.Is(err, ebpf.ErrKeyExist) {
		return err
	}
	var old bpf.GatewayConn
	err = m.Lookup(key, &old)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	if err == nil && alive(key, &old) {
		same := old.Addr == c.Addr && old.ServerPort == c.ServerPort && old.ClientPort == c.ClientPort
		used := old.Flags&bpf.GatewayStandby == 0
		if used && same || !same && (used || f.Resent) && !b.takesPort(f) {
			return nil
		}
	}
	return m.Put(key, c)
}

func decode(b []byte, o *bpf.GatewayOpened) error {
	if _, err := binary.Decode(b, binary.NativeEndian, o); err != nil {
		return fmt.Errorf("read an opened flow: %w", err)
	}
	return nil
}
