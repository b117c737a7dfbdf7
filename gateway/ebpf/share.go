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
	"github.com/isthmus-net/isthmus/gateway/flows"
)

const (
	// lookEvery is how long a new flow waits at most until it is told: the program wakes nobody.
	lookEvery = 5 * time.Millisecond
	// tellAgain is how often all flows are told, so that others keep those that live and forget those that ended.
	tellAgain = 2 * time.Minute
	// standby is how long a flow that another gateway told of is kept without a word of it.
	standby = 5 * time.Minute
	// open is how long the program keeps an open TCP connection that is silent (OPEN_S in bpf/conntrack.h), openUDP the
	// same of UDP.
	open    = 6 * time.Hour
	openUDP = 5 * time.Minute
)

// Export tells of all flows of this gateway that can go on without it, then of each that opens, and of all again every two
// minutes, until ctx is done or tell fails. One at a time may run.
func (b *Balancer) Export(ctx context.Context, tell func(flows.Flow) error) error {
	r, err := ringbuf.NewReader(b.k.maps[bpf.MapGatewayOpened])
	if err != nil {
		return fmt.Errorf("read opened flows: %w", err)
	}
	defer r.Close()
	if err := b.share(true); err != nil {
		return err
	}
	defer func() { _ = b.share(false) }() // what it goes on to tell is lost, no more
	var record ringbuf.Record
	var again time.Time
	lost := uint64(0)
	for ctx.Err() == nil {
		if now := time.Now(); now.After(again) || b.lost() != lost {
			again, lost = now.Add(tellAgain), b.lost()
			if err := b.All(tell); err != nil {
				return err
			}
		}
		r.SetDeadline(time.Now().Add(lookEvery))
		for {
			if err := r.ReadInto(&record); errors.Is(err, os.ErrDeadlineExceeded) {
				break
			} else if err != nil {
				return fmt.Errorf("read opened flows: %w", err)
			}
			var o bpf.GatewayOpened
			if err := decode(record.RawSample, &o); err != nil {
				return err
			}
			if err := b.export(&o.Key, &o.Conn, tell); err != nil {
				return err
			}
		}
	}
	return ctx.Err()
}

func (b *Balancer) share(on bool) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.setting(func(s *bpf.GatewaySettings) {
		s.Announce = 0
		if on {
			s.Announce = 1
		}
	})
}

// lost is how many flows found no room to be told.
func (b *Balancer) lost() (n uint64) {
	_ = b.k.maps[bpf.MapGatewayLost].Lookup(uint32(0), &n) // an array has it
	return n
}

// All tells of all flows of this gateway that can go on without it, until tell fails. Any goroutine may call it.
func (b *Balancer) All(tell func(flows.Flow) error) error {
	keys, values := make([]bpf.GatewayConnKey, 4096), make([]bpf.GatewayConn, 4096)
	var cursor ebpf.MapBatchCursor
	for {
		n, err := b.k.maps[bpf.MapConns].BatchLookup(&cursor, keys, values, nil)
		last := errors.Is(err, ebpf.ErrKeyNotExist)
		if err != nil && !last {
			return fmt.Errorf("read flows: %w", err)
		}
		for i := range n {
			if values[i].Flags&bpf.GatewayStandby != 0 || !alive(&keys[i], &values[i]) {
				continue
			}
			if err := b.export(&keys[i], &values[i], tell); err != nil {
				return err
			}
		}
		if last {
			return nil
		}
	}
}

// alive reports whether a flow is open and was heard of lately enough to go on.
func alive(key *bpf.GatewayConnKey, c *bpf.GatewayConn) bool {
	silent := time.Duration(now() - c.Seen)
	return (bpf.ConnState(c.State) == bpf.ConnOpen || bpf.ConnState(c.State) == bpf.ConnHalf) && silent < kept(key.Proto)
}

func kept(proto uint8) time.Duration {
	if proto == unix.IPPROTO_UDP {
		return openUDP
	}
	return open
}

// now is the time by the clock of the program's flows: CLOCK_MONOTONIC in ns.
func now() uint64 { return clock(unix.CLOCK_MONOTONIC) }

func clock(id int32) uint64 {
	var t unix.Timespec
	_ = unix.ClockGettime(id, &t) // every Linux has these
	return uint64(t.Nano())
}

// export tells of the flow whose first entry this is.
func (b *Balancer) export(key *bpf.GatewayConnKey, c *bpf.GatewayConn, tell func(flows.Flow) error) error {
	if key.Reply != 0 {
		return nil
	}
	b.mu.Lock()
	vip, ok := b.have.vips[key.Server]
	_, served := b.have.frontends[bpf.GatewayFrontendKey{Addr: key.Server, Port: key.ServerPort, Proto: key.Proto}]
	_, serves := b.have.backends[c.BackendId]
	b.mu.Unlock()
	if !ok || !served || !serves {
		return nil // an entry of the way back, or of a VIP or backend that has gone
	}
	f := flows.Flow{
		Protocol: protocolName(key.Proto),
		Client:   netip.AddrPortFrom(bpf.AddrOf(key.Client), key.ClientPort), VIP: netip.AddrPortFrom(bpf.AddrOf(key.Server), key.ServerPort),
		Backend: netip.AddrPortFrom(bpf.AddrOf(c.Addr), c.ServerPort), Source: netip.AddrPortFrom(bpf.AddrOf(key.Client), c.ClientPort),
	}
	if c.Flags&bpf.GatewayDoubleNAT != 0 {
		f.Source = netip.AddrPortFrom(f.VIP.Addr(), c.ClientPort)
		if vip.Source != [16]byte{} && vip.Source != key.Server {
			return nil // masqueraded: nobody else has that address
		}
	}
	return tell(f)
}

// Import makes flows of another gateway known here, as standby until a packet of theirs comes. Those that are known already
// stay as they are, and those whose VIP or backend this gateway does not have are returned. All are kept for five minutes
// at least. Clients that stay with a backend stay with it here, too.
func (b *Balancer) Import(all []flows.Flow) (early []flows.Flow, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, f := range all {
		proto := protocol(f.Protocol)
		service, served := b.ids.frontends[endpoint(f.VIP, proto)]
		number, known := b.ids.backends[endpoint(f.Backend, proto)]
		if !served || !known {
			early = append(early, f)
			continue
		}
		c := bpf.GatewayConn{
			BackendId: number, Service: service, State: uint8(bpf.ConnOpen), Flags: bpf.GatewayStandby, Seen: now() - uint64(max(0, kept(proto)-standby)),
		}
		if err := b.insert(&f, proto, c); err != nil {
			return nil, err
		}
		if err := b.meet(&f, proto, bpf.GatewayClient{BackendId: number, FrontendId: service}); err != nil {
			return nil, err
		}
	}
	return early, nil
}

// meet makes known with which backend another gateway's client stays. One that has come here before stays where it is.
func (b *Balancer) meet(f *flows.Flow, proto uint8, c bpf.GatewayClient) error {
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

// insert stores the entries of a flow, the way back first: no answer may come unknown.
func (b *Balancer) insert(f *flows.Flow, proto uint8, c bpf.GatewayConn) error {
	type entry struct {
		client, server netip.AddrPort
		reply          uint8
		becomes        netip.AddrPort // the server
		clientPort     uint16
	}
	known := netip.AddrPortFrom(f.Client.Addr(), f.Source.Port()) // the client between two translations, or to the backend
	entries := []entry{{known, f.Backend, 1, f.VIP, f.Client.Port()}}
	if f.Source.Addr() != f.Client.Addr() {
		c.Flags |= bpf.GatewayDoubleNAT
		entries = append(entries, entry{f.Backend, f.Source, 0, known, f.Backend.Port()}, entry{f.Backend, known, 1, f.Source, f.Backend.Port()})
	}
	for _, e := range append(entries, entry{f.Client, f.VIP, 0, f.Backend, f.Source.Port()}) {
		key := bpf.GatewayConnKey{
			Client: bpf.Addr16(e.client.Addr()), ClientPort: e.client.Port(), Server: bpf.Addr16(e.server.Addr()), ServerPort: e.server.Port(), Proto: proto, Reply: e.reply,
		}
		c.Addr, c.ServerPort, c.ClientPort = bpf.Addr16(e.becomes.Addr()), e.becomes.Port(), e.clientPort
		if err := b.keep(&key, &c); err != nil {
			return fmt.Errorf("store flow %s: %w", f, err)
		}
	}
	return nil
}

// keep stores an entry, unless a flow of this gateway has it.
func (b *Balancer) keep(key *bpf.GatewayConnKey, c *bpf.GatewayConn) error {
	m := b.k.maps[bpf.MapConns]
	err := m.Update(key, c, ebpf.UpdateNoExist)
	if !errors.Is(err, ebpf.ErrKeyExist) {
		return err
	}
	var old bpf.GatewayConn
	if err := m.Lookup(key, &old); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	} else if err == nil && old.Flags&bpf.GatewayStandby == 0 && alive(key, &old) {
		return nil // it is our own
	}
	return m.Put(key, c)
}

func decode(b []byte, o *bpf.GatewayOpened) error {
	if _, err := binary.Decode(b, binary.NativeEndian, o); err != nil {
		return fmt.Errorf("read an opened flow: %w", err)
	}
	return nil
}
