package nft

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/flows"
)

// split sends the client's packets through gateway 0, and those of the servers through gateway 1.
func (w *testbed) split() {
	w.t.Helper()
	w.steerClient(0)
	w.steerServers(1)
}

// everyWay runs a test in its own testbed for each kind of VIP whose answers are handed over.
func everyWay(t *testing.T, test func(w *testbed, s *desired.State)) {
	t.Helper()
	for name, change := range map[string]func(*desired.VIP){
		"snat":   func(v *desired.VIP) { v.Return = desired.SNAT },
		"routed": func(v *desired.VIP) { v.Return = desired.Routed },
		"routed, several frontends": func(v *desired.VIP) {
			for _, f := range v.Frontends {
				f.Port++
				v.Frontends = append(v.Frontends, f)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newTestbed(t)
			test(w, w.state(change))
		})
	}
}

// Answers that arrive at another gateway than their questions reach the client, from the first one on and without that gateway
// knowing of any connection.
func TestAnswersByAnotherGateway(t *testing.T) {
	t.Parallel()
	everyWay(t, func(w *testbed, s *desired.State) {
		server := w.serve()
		w.applySlots(s)
		w.split()
		for family, name := range familyNames {
			all := w.openStreams(family, 8)
			if idle, download, upload := all.broken(server); idle+download+upload > 0 {
				w.t.Errorf("%s: broken are %d idle, %d download, %d upload of 8 each", name, idle, download, upload)
			}
			for port := uint16(30000); port < 30000+8*desired.SlotPorts; port += desired.SlotPorts {
				if _, err := w.ask(family, port); err != nil {
					w.t.Errorf("%s, UDP from port %d: %v", name, port, err)
				}
			}
		}
	})
}

// Nothing goes to all peers that are absent, whatever state is applied meanwhile. A peer that is back gets packets again.
func TestAbsentPeers(t *testing.T) {
	t.Parallel()
	w := newTestbed(t)
	w.serve()
	s := w.state(func(v *desired.VIP) { v.Return = desired.Routed })
	w.applySlots(s)
	w.split()
	absent := func(names ...string) {
		t.Helper()
		all := map[string]bool{}
		for _, name := range names {
			all[name] = true
		}
		in(t, w.gateways[1].ns, func() error { return w.gateways[1].SetAbsent(all) })
	}
	reaches := func(want bool) {
		t.Helper()
		wait := time.Second
		if want {
			wait = patience
		}
		for family, name := range familyNames {
			err := w.client.Do(func() error {
				from := net.TCPAddrFromAddrPort(netip.AddrPortFrom(clientAddrs[family], 0))
				c, err := (&net.Dialer{LocalAddr: from, Timeout: wait}).DialContext(t.Context(), "tcp", netip.AddrPortFrom(vips[family], vipPort).String())
				if err == nil {
					err = c.Close()
				}
				return err
			})
			if (err == nil) != want {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	absent("another")
	reaches(true)
	absent(withSlots(s, 0, func(int) int { return 0 }).Peers[0].Name)
	reaches(false)
	w.applySlots(s)
	reaches(false)
	absent()
	reaches(true)
}

// A connection goes on when its port's slot gets another owner, which does not know it and may be the one that gets the answers.
func TestSlotsMove(t *testing.T) {
	t.Parallel()
	w := newTestbed(t)
	server := w.serve()
	w.applySlots(w.snatState())
	var all [2]streams
	for family := range familyNames {
		all[family] = w.openStreams(family, 4)
	}
	for g := range w.gateways {
		w.applyTo(g, withSlots(w.snatState(), 1-g, func(int) int { return 1 - g })) // gateway 1 owns all
	}
	for through := range w.gateways {
		w.steerServers(through)
		for family, name := range familyNames {
			if idle, download, upload := all[family].broken(server); idle+download+upload > 0 {
				t.Errorf("%s: with answers through gateway %d are broken %d idle, %d download, %d upload of 4 each", name, through, idle, download, upload)
			}
		}
	}
}

// When each gateway sees one end of a connection, both learn that it has ended, whichever end does that.
func TestEndsAreSeen(t *testing.T) {
	t.Parallel()
	endings := map[string]func(f *flow, server *served) error{
		"the client closes": func(f *flow, server *served) error {
			return errors.Join(f.Conn.(*net.TCPConn).CloseWrite(), hears(<-server.ended, nil), f.hears(io.EOF), f.Close())
		},
		"the client resets": endings["the client resets"],
		"the backend closes": func(f *flow, server *served) error {
			return errors.Join(server.CloseWrite(), f.hears(io.EOF), f.Close())
		},
		"the backend resets": endings["the backend resets"],
	}
	eachWay(t, func(w *testbed, returns func(*desired.VIP)) {
		s := w.serve()
		w.applySlots(w.state(returns))
		defer w.tells(0, 1)()
		defer w.tells(1, 0)()
		w.split()
		w.awaitEvents()
		all := map[string]*flow{}
		for family, name := range familyNames {
			for kind := range endings {
				all[name+", "+kind] = w.open(family, "echo")
			}
			for kind, end := range endings {
				f := all[name+", "+kind]
				if err := end(f, s.of(f)); err != nil {
					w.t.Errorf("%s, %s: %v", name, kind, err)
				}
			}
		}
		for g := range w.gateways {
			// The kernel waits five minutes if a RST comes before the acknowledgement of data (nf_conntrack_tcp_timeout_unacknowledged).
			w.poll(func() bool { return w.lasting(g, 5*time.Minute) == 0 }, fmt.Sprintf("gateway %d has open connections", g))
		}
		if w.isSNAT() {
			// The owner of the ports sees both ends close. Its peers need not wait until they believe that.
			w.poll(func() bool { return w.lasting(1, 10*time.Second) == 0 }, "gateway 1 waits for the end of connections that have ended")
		}
	})
}

// A client connects again by a port whose earlier connection has ended, and is still known to the gateway that gets the answers. With
// routed, that may also be the one that gets the client's packets.
func TestAnswersToKnownPorts(t *testing.T) {
	t.Parallel()
	eachWay(t, func(w *testbed, returns func(*desired.VIP)) {
		server := w.serve()
		w.applySlots(w.state(returns, each(func(f *desired.Frontend) { f.Backends = f.Backends[:1] })))
		defer w.tells(0, 1)()
		w.split()
		w.awaitEvents()
		known := func(family int, port uint16) netip.AddrPort {
			client, vip := netip.AddrPortFrom(clientAddrs[family], port), netip.AddrPortFrom(vips[family], vipPort)
			earlier := flows.Flow{Protocol: "TCP", Client: client, VIP: vip, Source: client, Backend: netip.AddrPortFrom(backendAddr(family, 1), backendPort)}
			if w.isSNAT() {
				earlier.Client, earlier.Source = netip.AddrPortFrom(otherAddrs[family], port), netip.AddrPortFrom(vips[family], port)
			}
			in(w.t, w.gateways[1].ns, func() error { return w.gateways[1].knows([]flows.Flow{earlier}) })
			return client
		}
		for family, name := range familyNames {
			const port = 40 * desired.SlotPorts // of gateway 0, which keeps it therefore
			all := streams{idle: []*flow{w.openFrom(known(family, port), family, "echo")}}
			if !w.isSNAT() {
				w.steerClient(1)
				all.idle = append(all.idle, w.openFrom(known(family, port+1), family, "echo"))
			}
			if idle, _, _ := all.broken(server); idle > 0 {
				w.t.Errorf("%s: %d of the next connections are broken", name, idle)
			}
			w.steerClient(0)
		}
	})
}

func (w *testbed) isSNAT() bool { return w.gateways[0].contents.vips[vips[0]].Return == desired.SNAT }

// awaitOpened opens connections until gateway 0 tells of one at once: the kernel makes no events of those that opened before.
func (w *testbed) awaitOpened() {
	w.t.Helper()
	w.poll(func() bool {
		_ = w.open(0, "echo").Close()
		return w.counts(0)[flows.CountKey{Service: "shop/web", Protocol: "TCP"}].Opened > 0
	}, "no connection is counted")
}

// awaitEvents does the same, and makes gateway 1 forget those connections.
func (w *testbed) awaitEvents() {
	w.t.Helper()
	w.awaitOpened()
	in(w.t, w.gateways[1].ns, func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) })
}

// entries returns the TCP connections that a gateway knows.
func (w *testbed) entries(gateway int) (all []entry) {
	w.t.Helper()
	in(w.t, w.gateways[gateway].ns, func() error {
		return w.gateways[gateway].list(func(e entry) {
			if e.original.protocol == unix.IPPROTO_TCP {
				all = append(all, e)
			}
		})
	})
	return all
}

// lasting returns the number of those that last for longer than some time without a packet.
func (w *testbed) lasting(gateway int, longer time.Duration) (n int) {
	w.t.Helper()
	for _, e := range w.entries(gateway) {
		if e.left > longer {
			n++
		}
	}
	return n
}

// An announced flow that has just opened takes the place of those that have ended: of one with its client's port, and of one with its
// port at the backend. One that was announced before takes nobody's place, and one that has ended goes.
func TestPortsAreTakenAgain(t *testing.T) {
	t.Parallel()
	w := newTestbed(t)
	w.applySlots(w.snatState())
	flow := func(family int, client uint16, backend int, port uint16) flows.Flow {
		return flows.Flow{
			Protocol: "TCP", Client: netip.AddrPortFrom(clientAddrs[family], client), VIP: netip.AddrPortFrom(vips[family], vipPort),
			Source: netip.AddrPortFrom(vips[family], port), Backend: netip.AddrPortFrom(backendAddr(family, backend), backendPort),
		}
	}
	has := func(f *flows.Flow) (is bool) {
		for _, e := range w.entries(0) {
			is = is || e.is(&tracked{Flow: f, protocol: unix.IPPROTO_TCP})
		}
		return is
	}
	for family, name := range familyNames {
		tell := func(f flows.Flow) {
			in(t, w.gateways[0].ns, func() error { return w.gateways[0].knows([]flows.Flow{f}) })
		}
		first := flow(family, 1000, 1, 5000)
		tell(first)
		for what, next := range map[string]flows.Flow{"port at the backend": flow(family, 2000, 1, 5000), "client's port": flow(family, 1000, 2, 6000)} {
			resent, ended := next, next
			resent.Resent, ended.Ended = true, true
			if tell(resent); !has(&first) || has(&next) {
				t.Errorf("%s, %s: a flow that was announced before takes the place of another", name, what)
			}
			if tell(next); has(&first) || !has(&next) {
				t.Errorf("%s, %s: a new flow does not take its place", name, what)
			}
			if tell(first); !has(&first) || has(&next) {
				t.Errorf("%s, %s: a new flow does not take the place of the second", name, what)
			}
			if tell(ended); !has(&first) {
				t.Errorf("%s, %s: a flow that has ended takes another one along", name, what)
			}
		}
		first.Ended = true
		if tell(first); has(&first) {
			t.Errorf("%s: a flow that has ended stays", name)
		}
	}
}

// A backend's packets go on to a peer once, and never in a circle, whatever they claim to answer.
func TestNoPacketCircles(t *testing.T) {
	t.Parallel()
	everyWay(t, func(w *testbed, s *desired.State) {
		w.applySlots(s)
		arrived := func() (n uint64) {
			for g := range w.gateways {
				n += w.ruleCounter(g, "drop what a peer handed over in vain")
			}
			return n
		}
		for g := range w.gateways {
			w.steer(g)
			for family, name := range familyNames {
				to := netip.AddrPortFrom(clientAddrs[family], 40000)
				if s.VIPs[family].Return == desired.SNAT {
					to = netip.AddrPortFrom(vips[family], 40000)
				}
				before := arrived()
				if err := w.answer(family, to); err != nil {
					w.t.Fatal(err)
				}
				w.poll(func() bool { return arrived() > before }, name+": the answer does not reach the peer")
				if after := arrived(); after != before+1 {
					w.t.Errorf("%s: the answer was handed over %d times", name, after-before)
				}
			}
		}
	})
}

// All rules that send one packet to all peers have a limit.
func TestRulesToPeersAreLimited(t *testing.T) {
	t.Parallel()
	seen := 0
	for _, f := range families {
		for _, c := range f.chains() {
			for _, r := range c.rules {
				toPeers := slices.ContainsFunc(r.exprs, func(e expr.Any) bool { v, ok := e.(*expr.Verdict); return ok && v.Chain == "to-peers" })
				limited := slices.ContainsFunc(r.exprs, func(e expr.Any) bool { _, ok := e.(*expr.Limit); return ok })
				if toPeers && !limited {
					t.Errorf("%s has no limit", r.why)
				}
				if toPeers {
					seen++
				}
			}
		}
	}
	if seen != 2*5 {
		t.Errorf("%d rules send packets to all peers, want five for each family", seen)
	}
}

// answer sends a SYN+ACK from a backend.
func (w *testbed) answer(family int, to netip.AddrPort) error {
	header := make([]byte, 20) // without checksum, which the gateways do not check (nf_conntrack_checksum)
	from := netip.AddrPortFrom(backendAddr(family, 1), backendPort)
	header[0], header[1], header[2], header[3] = byte(from.Port()>>8), byte(from.Port()), byte(to.Port()>>8), byte(to.Port())
	header[12], header[13] = 5<<4, synAck
	return w.servers.Do(func() error {
		fd, err := unix.Socket([2]int{unix.AF_INET, unix.AF_INET6}[family], unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		local, remote := sockaddr(from.Addr()), sockaddr(to.Addr())
		return errors.Join(unix.Bind(fd, local), unix.Sendto(fd, header, 0, remote))
	})
}

func sockaddr(a netip.Addr) unix.Sockaddr {
	if a.Is4() {
		return &unix.SockaddrInet4{Addr: a.As4()}
	}
	return &unix.SockaddrInet6{Addr: a.As16()}
}
