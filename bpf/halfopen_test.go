package bpf_test

import (
	"errors"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/cilium/ebpf/ringbuf"

	"github.com/isthmus-net/isthmus/bpf"
)

// announce turns the announcements of a gateway on. No packet of the flow waits for another gateway's.
func (p *path) announce(s side) {
	p.t.Helper()
	p.announced()
	p.put(bpf.MapGatewaySettings, uint32(0), bpf.GatewaySettings{Announce: 1})
	p.t.Cleanup(func() { p.put(bpf.MapGatewaySettings, uint32(0), bpf.GatewaySettings{}) })
	p.put("unknown_flows", connKey(s.client, s.vip, tcp, 0), monotonic(p.t)-uint64(time.Second))
}

// announced returns how many flows to the VIP were announced since the last call.
func (p *path) announced() (n int) {
	p.t.Helper()
	m := p.coll.Maps[bpf.MapGatewayOpened]
	if m == nil {
		return 0
	}
	r, err := ringbuf.NewReader(m)
	if err != nil {
		p.t.Fatal(err)
	}
	defer r.Close()
	r.SetDeadline(time.Unix(1, 0)) // only what is there already
	for {
		record, err := r.Read()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return n
		}
		if err != nil {
			p.t.Fatal(err)
		}
		// The second translation's entries are announced too, and ignored by the reader: their server is no frontend.
		if port := uint16(record.RawSample[34]) | uint16(record.RawSample[35])<<8; port == 80 {
			n++
		}
	}
}

// wantState checks the state of both directions of a TCP flow.
func (p *path) wantState(s side, want bpf.ConnState) {
	p.t.Helper()
	if there, back := p.states(s, tcp); there != want || back != want {
		p.t.Errorf("states %d and %d, want %d", there, back, want)
	}
}

// A flow that begins in the middle of a connection is half-open until its backend has answered and its client has sent again.
// Until then it is short-lived, a FIN changes nothing, and a gateway announces it to no other.
func TestHalfOpen(t *testing.T) {
	for family, s := range sides {
		for name, source := range map[string]netip.Addr{"node": {}, "gateway": {}, "gateway by the VIP": s.vip.Addr()} {
			t.Run(family+"/"+name, func(t *testing.T) {
				there, back, known := bpf.ProgGateway, bpf.ProgGateway, s.client
				var p *path
				if name == "node" {
					there, back = bpf.ProgFromClient, bpf.ProgToClient
					p = newPath(t)
					p.set(bpf.PacketAdopt)
					p.serve(1, tcp, s.vip, s.backend)
				} else {
					p = newGateway(t)
					p.balance(1, tcp, s.vip, s.backend, source)
					p.announce(s)
				}
				if source.IsValid() {
					known = netip.AddrPortFrom(source, s.client.Port())
				}
				sends := func(flags uint8, want bpf.ConnState) {
					t.Helper()
					f := s.tcp(flags)
					p.translated(there, f, f.to(s.backend).from(known))
					p.wantState(s, want)
				}
				sends(ack, bpf.ConnOpening)
				sends(fin|ack, bpf.ConnOpening)
				p.age(59 * time.Second)
				sends(ack, bpf.ConnOpening)
				f := s.tcpBack(ack)
				p.translated(back, f.to(known), f.from(s.vip))
				p.wantState(s, bpf.ConnAnswered)
				if n := p.announced(); n != 0 {
					t.Errorf("%d flows are announced while half-open", n)
				}
				sends(ack, bpf.ConnOpen)
				if n := p.announced(); name != "node" && n != 1 {
					t.Errorf("%d flows are announced once open, want 1", n)
				}
				p.age(5 * time.Hour)
				sends(ack, bpf.ConnOpen)
			})
		}
		t.Run(family+"/over", func(t *testing.T) {
			p := newPath(t)
			p.set(bpf.PacketAdopt)
			p.serve(1, tcp, s.vip, s.backend)
			p.run(bpf.ProgFromClient, s.tcp(ack).bytes())
			p.age(61 * time.Second)
			p.untouched(bpf.ProgToClient, s.tcpBack(ack).bytes())
		})
	}
}

// A flow that its backend begins at a gateway opens when the client has sent a packet. If that is a SYN, the client connects anew, to any
// backend. Its half is announced once, for the gateway that may have seen the client, and then the open flow.
func TestBegunByBackend(t *testing.T) {
	s := sides["IPv4"]
	d := newDriven(t)
	d.balance(1, tcp, s.vip, s.backend, netip.Addr{})
	d.announce(s)
	send := func(f frame, want bpf.ConnState) {
		t.Helper()
		if verdict, _ := d.drive(bpf.ProgGateway, f.bytes()); verdict == dropped {
			t.Errorf("a packet from %s is dropped: %v", f.src, d.refusals())
		}
		d.wantState(s, want)
	}
	for range 2 {
		send(s.tcpBack(ack), bpf.ConnAnswered)
		send(s.tcpBack(fin|ack), bpf.ConnAnswered)
		d.age(time.Second)
	}
	if n := d.announced(); n != 1 {
		t.Errorf("%d flows are announced before the client has spoken, want the half of one", n)
	}
	send(s.tcp(syn), bpf.ConnOpening)
	d.clearFlows()
	send(s.tcpBack(ack), bpf.ConnAnswered)
	send(s.tcp(ack), bpf.ConnOpen)
	if n := d.announced(); n != 2 {
		t.Errorf("%d flows are announced, want a half and the whole", n)
	}
	send(s.tcp(fin|ack), bpf.ConnOpen) // the window is unknown
}
