package ebpf

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/flows"
	"github.com/isthmus-net/isthmus/tools/netlab/edge"
)

// each is the number of connections of a kind in each family.
const each = 8

// kinds holds idle, downloading and uploading connections.
type kinds struct {
	idle, download, upload []*conn
	names                  []string // names of uploads
}

func (w *testbed) openAll(f int) (k kinds) {
	w.t.Helper()
	for i := range each {
		for _, to := range []*[]*conn{&k.idle, &k.download, &k.upload} {
			c, err := w.dial("tcp", f, servedPort, 0)
			w.check(err)
			w.t.Cleanup(func() { _ = c.Close() })
			_, _, err = c.ask("hello")
			w.check(err)
			*to = append(*to, c)
		}
		k.names = append(k.names, fmt.Sprint(f, "-", i))
		_, err := fmt.Fprintln(k.download[i], "download")
		w.check(err)
		_, err = fmt.Fprintln(k.upload[i], "upload", k.names[i])
		w.check(err)
	}
	return k
}

// broken returns how many of the connections no longer work.
func (k kinds) broken(w *testbed) (idle, download, upload int) {
	for i := range each {
		if _, _, err := k.idle[i].ask("still?"); err != nil {
			idle++
		}
		if k.download[i].downloads() != nil {
			download++
		}
		if k.upload[i].uploads(k.names[i]) != nil {
			upload++
		}
	}
	return idle, download, upload
}

// downloads reads until data arrives that was sent after the call.
func (c *conn) downloads() error {
	now := time.Now()
	if err := c.SetReadDeadline(now.Add(patience)); err != nil {
		return err
	}
	lines := bufio.NewReader(c)
	for {
		line, err := lines.ReadString('\n')
		if err != nil {
			return err
		}
		if sent, err := strconv.ParseInt(strings.TrimSpace(line), 10, 64); err == nil && sent > now.UnixNano() {
			return nil
		}
	}
}

// uploads sends a line and waits until it has arrived.
func (c *conn) uploads(name string) error {
	had := c.w.hasUploaded(name)
	if err := c.SetWriteDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	if _, err := fmt.Fprintln(c, "upload", name); err != nil {
		return err
	}
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(patience); c.w.hasUploaded(name) == had; <-tick.C {
		if time.Now().After(deadline) {
			return context.DeadlineExceeded
		}
	}
	return nil
}

// exported collects the flows that a gateway exports until stop is called, each once. Their order is that of the export: a flow
// may take the place of an earlier one.
type exported struct {
	mu    sync.Mutex
	flows []flows.Flow // guarded by mu
	stop  func()
}

func (w *testbed) export(g int) *exported {
	sent := &exported{}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- w.balancers[g].Export(ctx, func(f flows.Flow) error {
			sent.mu.Lock()
			defer sent.mu.Unlock()
			if !slices.Contains(sent.flows, f) {
				sent.flows = append(sent.flows, f)
			}
			return nil
		})
	}()
	sent.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			w.t.Errorf("Export: %v, want it canceled", err)
		}
	})
	w.t.Cleanup(sent.stop)
	w.untilAnnouncing(g)
	return sent
}

// untilAnnouncing waits until a gateway's program announces flows, including those that end at once.
func (w *testbed) untilAnnouncing(g int) {
	w.t.Helper()
	w.until(func() bool {
		var s bpf.GatewaySettings
		w.check(w.balancers[g].k.maps[bpf.MapGatewaySettings].Lookup(uint32(0), &s))
		return s.Announce == 1
	}, "flows are announced")
}

func (o *exported) all() []flows.Flow {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.flows)
}

// importFlows imports flows at a gateway, which has their backends.
func (w *testbed) importFlows(g int, all []flows.Flow) {
	w.t.Helper()
	early, err := w.balancers[g].Import(all)
	w.check(err)
	if len(early) > 0 {
		w.t.Fatalf("Import returned %d of %d flows: %s", len(early), len(all), early[0])
	}
}

// Backends are added, so that the hash sends some clients elsewhere, and then a gateway dies. The flows that it
// exported continue on the other gateway, whichever side sends first.
func TestFailoverAfterChange(t *testing.T) {
	for _, way := range []desired.Return{desired.Routed, desired.SNAT} {
		t.Run(string(way), func(t *testing.T) {
			w := newTestbed(t)
			w.serve()
			w.apply(state(way, 1, 2))
			sent := w.export(0)
			var all [2]kinds
			for f := range vips {
				all[f] = w.openAll(f)
			}
			w.until(func() bool { return len(sent.all()) == 2*3*each }, "all flows are exported")
			w.apply(state(way, 1, 2, 3, 4))
			w.importFlows(1, sent.all())
			w.check(w.Cut(0))
			w.lead(1)
			for f := range vips {
				if idle, download, upload := all[f].broken(w); idle+download+upload > 0 {
					t.Errorf("%s: %d idle, %d download and %d upload connections of %d each are broken: %v", families[f], idle, download, upload, each, w.refusals(1))
				}
			}
		})
	}
}

// A reply that is in flight when another gateway takes over arrives there before any query. A UDP flow is exported
// once it is a second old, or when all flows are exported.
func TestRepliesInFlight(t *testing.T) {
	for _, way := range []desired.Return{desired.Routed, desired.SNAT} {
		t.Run(string(way), func(t *testing.T) {
			w := newTestbed(t)
			w.serve()
			w.apply(state(way, 1, 2, 3, 4))
			sent := w.export(0)
			asks := func() (all [2]*conn) {
				for f := range vips {
					c, err := w.dial("udp", f, servedPort, 0)
					w.check(err)
					t.Cleanup(func() { _ = c.Close() })
					_, _, err = c.ask("hello")
					w.check(err)
					all[f] = c
				}
				return all
			}
			old := asks()
			w.until(func() bool {
				for _, c := range old {
					_, _, err := c.ask("still?")
					w.check(err)
				}
				return len(sent.all()) == len(old)
			}, "flows that are a second old are exported")
			w.importFlows(1, sent.all())
			young := asks()
			var all []flows.Flow
			w.check(w.balancers[0].All(func(f flows.Flow) error {
				all = append(all, f)
				return nil
			}))
			if len(all) != len(old)+len(young) || len(sent.all()) != len(old) {
				t.Errorf("of %d flows %d were exported at once, and %d by All", len(old)+len(young), len(sent.all()), len(all))
			}
			w.importFlows(1, all)
			w.leadBack(1)
			for f := range vips {
				for age, c := range map[string]*conn{"old": old[f], "young": young[f]} {
					if _, _, err := c.ask("now?"); err != nil {
						t.Errorf("%s, %s: %v: %v", families[f], age, err, w.refusals(1))
					}
				}
			}
		})
	}
}

// A connection arrives from another gateway before that has exported it. It waits for the export, because its NAT
// port may be in use here by a flow that has already ended there.
func TestConnectionsThatAreNotExportedYet(t *testing.T) {
	const port = 7001
	w := newTestbed(t)
	w.serve()
	s := state(desired.Routed, 1, 2, 3, 4)
	second := s.VIPs[0]
	second.Addr, second.Return = netip.MustParseAddr("198.51.100.77"), desired.SNAT
	s.VIPs = append(s.VIPs, second)
	w.apply(s)
	for _, to := range []func() error{
		func() error {
			return w.machine.Do(func() error { return route(netip.PrefixFrom(second.Addr, 32), arms[0][0][0].Addr()) })
		},
		func() error {
			return w.Router.Do(func() error { return route(netip.PrefixFrom(second.Addr, 32), edge.Gateways[0][0]) })
		},
	} {
		w.check(to())
	}
	sent := w.export(0)
	w.export(1)

	old := &conn{w: w}
	w.check(w.Client.Do(func() (err error) {
		d := net.Dialer{Timeout: patience, LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(clients[0], port))}
		old.Conn, err = d.Dial("tcp", netip.AddrPortFrom(second.Addr, servedPort).String())
		return err
	}))
	met, _, err := old.ask("hello")
	w.check(err)
	w.check(old.Conn.(*net.TCPConn).SetLinger(0)) // so that its port is free
	w.check(old.Close())
	w.until(func() bool { return len(sent.all()) == 1 }, "the connection is exported")
	w.importFlows(1, sent.all())

	young, err := w.dial("tcp", 0, servedPort, port)
	w.check(err)
	t.Cleanup(func() { _ = young.Close() })
	now, _, err := young.ask("hello")
	w.check(err)
	if now != met {
		t.Fatalf("the client reaches %s and %s, want one backend", met, now)
	}
	w.until(func() bool { return len(sent.all()) == 2 }, "the connection is exported")
	w.lead(1)
	answer := make(chan error, 1)
	go func() {
		_, _, err := young.ask("still?")
		answer <- err
	}()
	w.until(func() bool { return w.refusals(1)["no_flow"] > 0 }, "its packet reaches the other gateway before the export")
	w.importFlows(1, sent.all())
	if err := <-answer; err != nil {
		t.Errorf("%v: refused %v and, by the first gateway, %v; exported %v", err, w.refusals(1), w.refusals(0), sent.all())
	}
}

// Connections continue even if the other gateway exported nothing: by the hash if the set of backends did not change,
// and by the packets of their backends.
func TestFailoverByHash(t *testing.T) {
	w := newTestbed(t)
	w.serve()
	w.apply(state(desired.Routed, 1, 2, 3, 4))
	var all [2]kinds
	for f := range vips {
		all[f] = w.openAll(f)
	}
	w.check(w.Cut(0))
	w.lead(1)
	for f := range vips {
		if idle, download, upload := all[f].broken(w); idle+download+upload > 0 {
			t.Errorf("%s: %d idle, %d download and %d upload connections of %d each are broken: %v", families[f], idle, download, upload, each, w.refusals(1))
		}
	}
}

// Routers may lead answers to another gateway than their questions (ECMP), from the SYN+ACK on. It needs no flow to translate them
// if their backend and port serve one frontend. Nothing is exported here, as if the answers were faster.
func TestAnswersByAnotherGateway(t *testing.T) {
	w := newTestbed(t)
	w.serve()
	w.apply(withClosedPort(*state(desired.Routed, 1, 2, 3, 4)))
	w.leadBack(1)
	connects(t, w)
	if n := w.refusals(1)["no_flow"]; n > 0 {
		t.Errorf("%d answers found no flow", n)
	}
}

// No gateway sees both sides of a connection whose answers pass another one than its questions. The gateways tell each other what
// they see, and then either continues it alone, even if the backends have changed since.
func TestHalvesOfConnections(t *testing.T) {
	w := newTestbed(t)
	w.serve()
	w.apply(state(desired.Routed, 1, 2))
	w.leadBack(1)
	questions, answers := w.export(0), w.export(1)
	var all [2]kinds
	for f := range vips {
		all[f] = w.openAll(f)
	}
	const connections = 2 * 3 * each
	w.until(func() bool { return len(answers.all()) == connections }, "the gateway of the answers announces all connections")
	if n := len(questions.all()); n > 0 {
		t.Errorf("the gateway of the questions announces %d connections before it knows of answers", n)
	}
	strangers := slices.Clone(answers.all())
	for i := range strangers {
		strangers[i].Client = netip.AddrPortFrom(strangers[i].Client.Addr().Next(), strangers[i].Client.Port())
	}
	known := w.handshakes(0)
	w.importFlows(0, strangers)
	if n := w.handshakes(0); n != known {
		t.Errorf("%d entries are kept of clients that no gateway has seen", n-known)
	}
	w.importFlows(0, answers.all())
	w.until(func() bool {
		for f := range vips {
			if idle, download, upload := all[f].broken(w); idle+download+upload > 0 {
				t.Fatalf("%s: %d idle, %d download and %d upload connections are broken", families[f], idle, download, upload)
			}
		}
		return len(questions.all()) == connections
	}, "the gateway of the questions announces all connections")
	w.importFlows(1, questions.all())
	w.apply(state(desired.Routed, 1, 2, 3, 4))
	w.check(w.Cut(0))
	w.lead(1)
	for f := range vips {
		if idle, download, upload := all[f].broken(w); idle+download+upload > 0 {
			t.Errorf("%s: %d idle, %d download and %d upload connections of %d each are broken: %v", families[f], idle, download, upload, each, w.refusals(1))
		}
	}
}

// handshakes returns how many entries of half-open flows a gateway has.
func (w *testbed) handshakes(g int) int {
	w.t.Helper()
	all := map[bpf.GatewayConnKey]bpf.GatewayConn{}
	w.check(dump(w.balancers[g].k.maps[bpf.MapHandshakes], all))
	return len(all)
}

// connects opens connections of all kinds, and uses them. Port 81 of the VIPs leads to a closed port.
func connects(t *testing.T, w *testbed) {
	t.Helper()
	for f := range vips {
		all := w.openAll(f)
		if idle, download, upload := all.broken(w); idle+download+upload > 0 {
			t.Errorf("%s: %d idle, %d download and %d upload connections of %d each are broken", families[f], idle, download, upload, each)
		}
		if _, err := w.dial("tcp", f, 81, 0); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("%s: connecting to a closed port: %v, want the backend's reset", families[f], err)
		}
		c, err := w.dial("udp", f, servedPort, 0)
		w.check(err)
		t.Cleanup(func() { _ = c.Close() })
		for _, text := range []string{"short", strings.Repeat("fragmented", 190)} {
			if _, _, err := c.ask(text); err != nil {
				t.Errorf("%s: datagrams with %d bytes: %v", families[f], len(text), err)
			}
		}
	}
}

// With SNAT, the slot of an answer's port names the gateway that has the connection, and any other hands the answer over to it. Routed
// answers name none if their backend and port serve several frontends, and every other gateway gets a copy.
func TestAnswersAreHandedOver(t *testing.T) {
	several := state(desired.Routed, 1, 2, 3, 4)
	for f := range several.VIPs {
		twice := several.VIPs[f].Frontends[0]
		twice.Port = 82
		udp := several.VIPs[f].Frontends[1]
		udp.Port = 82
		several.VIPs[f].Frontends = append(several.VIPs[f].Frontends, twice, udp)
	}
	snat := state(desired.SNAT, 1, 2, 3, 4)
	for name, tc := range map[string]struct {
		state *desired.State
		owner func(g, slot int) int
	}{
		"to the owner":          {snat, alternate},
		"to the previous owner": {snat, func(int, int) int { return 1 }}, // gateway 0 owns none, and so uses all, as before gateway 1 joined
		"to all":                {several, alternate},
	} {
		t.Run(name, func(t *testing.T) {
			w := newTestbed(t)
			w.serve()
			w.applySlots(withClosedPort(*tc.state), tc.owner)
			w.leadBack(1)
			connects(t, w)
			if n := w.refusals(1)["no_flow"] + w.refusals(0)["no_flow"]; n > 0 {
				t.Errorf("%d answers found no flow", n)
			}
			if w.balancers[1].HandedOver() == 0 || w.balancers[0].HandedOver() > 0 {
				t.Errorf("gateway 1 has handed over %d packets, gateway 0 %d", w.balancers[1].HandedOver(), w.balancers[0].HandedOver())
			}
		})
	}
}

// A router leads a connection elsewhere after its SYN, when a gateway comes or goes. The next one does not know it yet, and hands its
// packets over until it does: by its own choice of a port the backend would not know the client.
func TestHandshakesThatMove(t *testing.T) {
	w := newExchanging(t, state(desired.SNAT, 1, 2, 3, 4))
	w.splitAfterSYN()
	w.leadBack(1)
	for f := range vips {
		all := w.openAll(f)
		if idle, download, upload := all.broken(w); idle+download+upload > 0 {
			t.Errorf("%s: %d idle, %d download and %d upload connections of %d each are broken", families[f], idle, download, upload, each)
		}
	}
	if n := w.refusals(1)["no_flow"] + w.refusals(0)["no_flow"]; n > 0 {
		t.Errorf("%d packets found no flow", n)
	}
}

// The gateways take over from each other twenty times, the packets from backends first, while clients connect. No connection
// fails: those whose handshake is under way are handed over.
func TestTakeovers(t *testing.T) {
	w := newExchanging(t, state(desired.SNAT, 1, 2, 3, 4))
	w.lead(0)
	connecting, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	var all atomic.Int64
	for f := range vips {
		for range 4 {
			running.Go(func() {
				for connecting.Err() == nil {
					all.Add(1)
					c, err := w.dial("tcp", f, servedPort, 0)
					if err == nil {
						_, _, err = c.ask("hello")
						_ = c.Close()
					}
					if err != nil {
						t.Errorf("%s: %v", families[f], err)
					}
				}
			})
		}
	}
	for i := range 20 {
		before := all.Load()
		w.until(func() bool { return all.Load() > before+200 }, "clients connect")
		w.lead(1 - i%2)
	}
	stop()
	running.Wait()
}

// Connections of a gateway that masquerades stay with it when the router leads their clients to another one, which hands them over:
// the router's choice changes when a third gateway comes or goes, and when one is drained. The other one does so whether it knows
// their owner yet or not.
func TestMasqueradedConnectionsThatMove(t *testing.T) {
	w := newExchanging(t, state(desired.Masquerade, 1, 2, 3, 4))
	w.lead(0)
	for f := range vips {
		for _, announced := range []bool{false, true} {
			had := w.peerFlows(1)
			all := w.openAll(f)
			if announced {
				w.until(func() bool { return w.peerFlows(1) >= had+3*each }, "the other gateway knows the owner of every connection")
			}
			w.lead(1)
			if idle, download, upload := all.broken(w); idle+download+upload > 0 {
				t.Errorf("%s, announced %t: %d idle, %d download and %d upload connections of %d each are broken", families[f], announced, idle, download, upload, each)
			}
			w.lead(0)
		}
	}
}

// A gateway that has lost its connections in a restart gets them back as their clients speak, also those that stood by at the other
// gateway and were idle all the time.
func TestIdleConnectionsComeBack(t *testing.T) {
	w := newExchanging(t, state(desired.SNAT, 1, 2, 3, 4))
	w.lead(0)
	var all [2]kinds
	for f := range vips {
		all[f] = w.openAll(f)
	}
	w.until(func() bool { return w.standbys(1) == len(vips)*3*each }, "the other gateway knows every connection")
	w.forget(0)
	for begin := time.Now(); time.Since(begin) < time.Second && !t.Failed(); { // longer than a packet waits for an announcement
		for f := range vips {
			if idle, download, upload := all[f].broken(w); idle+download+upload > 0 {
				t.Errorf("%s: %d idle, %d download and %d upload connections of %d each are broken", families[f], idle, download, upload, each)
			}
		}
	}
}

// standbys returns how many TCP connections a gateway keeps for another one.
func (w *testbed) standbys(g int) (n int) {
	w.t.Helper()
	all := map[bpf.GatewayConnKey]bpf.GatewayConn{}
	w.check(dump(w.balancers[g].k.maps[bpf.MapFlows], all))
	for key, c := range all {
		if key.Reply == 0 && c.Window&bpf.GatewaySecond == 0 && c.Flags&bpf.GatewayStandby != 0 {
			n++
		}
	}
	return n
}

// forget removes all connections of a gateway, as a reboot does.
func (w *testbed) forget(g int) {
	w.t.Helper()
	for _, name := range []string{bpf.MapFlows, bpf.MapHandshakes} {
		m := w.balancers[g].k.maps[name]
		all := map[bpf.GatewayConnKey]bpf.GatewayConn{}
		w.check(dump(m, all))
		for key := range all {
			if err := m.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				w.t.Fatal(err)
			}
		}
	}
}

// peerFlows returns how many flows of other gateways a gateway knows.
func (w *testbed) peerFlows(g int) int {
	w.t.Helper()
	all := map[bpf.GatewayConnKey]bpf.GatewayPeerFlow{}
	w.check(dump(w.balancers[g].k.maps[bpf.MapGatewayPeerFlows], all))
	return len(all)
}

// newExchanging returns a testbed with servers, whose gateways own every second slot and send their flows to each other.
func newExchanging(t *testing.T, s *desired.State) *testbed {
	t.Helper()
	w := newTestbed(t)
	w.serve()
	w.applySlots(s, alternate)
	w.exchange(0, 1)
	w.exchange(1, 0)
	return w
}

// exchange sends a gateway's flows to the other one until the test ends.
func (w *testbed) exchange(from, to int) {
	ctx, cancel := context.WithCancel(context.Background())
	var sending sync.WaitGroup
	sending.Go(func() {
		err := w.balancers[from].Export(ctx, func(f flows.Flow) error {
			f.Gateway = "other"
			early, err := w.balancers[to].Import([]flows.Flow{f})
			if err == nil && len(early) > 0 {
				err = fmt.Errorf("gateway %d does not have the VIP or backend of %s", to, f)
			}
			return err
		})
		if !errors.Is(err, context.Canceled) {
			w.t.Errorf("Export: %v, want it canceled", err)
		}
	})
	w.t.Cleanup(func() {
		cancel()
		sending.Wait()
	})
	w.untilAnnouncing(from)
}

// splitAfterSYN makes the router lead clients' SYNs through gateway 0, and all that follows through gateway 1.
func (w *testbed) splitAfterSYN() {
	w.t.Helper()
	const table = 100
	w.check(w.Router.Do(func() error {
		nft := exec.Command("nft", "-f", "-")
		nft.Stdin = strings.NewReader(`table inet split { chain after { type filter hook prerouting priority mangle;
			tcp flags & (syn | ack) == ack meta mark set 1; }; }`)
		if said, err := nft.CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, said)
		}
		for f, vip := range vips {
			rule := netlink.NewRule()
			rule.Family, rule.Mark, rule.Table = []int{unix.AF_INET, unix.AF_INET6}[f], 1, table
			to := &net.IPNet{IP: vip.AsSlice(), Mask: net.CIDRMask(vip.BitLen(), vip.BitLen())}
			if err := errors.Join(netlink.RuleAdd(rule), netlink.RouteAdd(&netlink.Route{Dst: to, Gw: edge.Gateways[1][f].AsSlice(), Table: table})); err != nil {
				return err
			}
		}
		return nil
	}))
}

// Between gateways that have different slots no packet circles: the second one drops what it does not know either.
func TestNoPacketCircles(t *testing.T) {
	for name, owner := range map[string]func(g, slot int) int{
		"each considers the other the owner": func(g, _ int) int { return 1 - g },
		"each considers itself the owner":    func(g, _ int) int { return g },
	} {
		t.Run(name, func(t *testing.T) {
			w := newTestbed(t)
			w.applySlots(state(desired.SNAT, 1), owner)
			w.leadBack(1)
			for f, vip := range vips {
				w.check(w.machine.Do(func() error {
					c, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(backend(f, 1), backendPort)), net.UDPAddrFromAddrPort(netip.AddrPortFrom(vip, 20000)))
					if err != nil {
						return err
					}
					_, err = c.Write([]byte("of no flow"))
					return errors.Join(err, c.Close())
				}))
				w.until(func() bool { return w.refusals(0)["no_flow"]+w.refusals(1)["no_flow"] == uint64(f)+1 }, "the packet is dropped")
				if a, b := w.balancers[1].HandedOver(), w.balancers[0].HandedOver(); a != uint64(f)+1 || b > 0 {
					t.Errorf("%s: gateway 1 has handed over %d packets, and gateway 0 %d", families[f], a, b)
				}
			}
		})
	}
}

// withClosedPort returns s with port 81 of both VIPs, whose backend refuses connections.
func withClosedPort(s desired.State) *desired.State {
	s.VIPs = slices.Clone(s.VIPs)
	for f := range s.VIPs {
		refusing := s.VIPs[f].Frontends[0]
		refusing.Port, refusing.Backends = 81, []desired.Backend{{Addr: backend(f, 1), Port: backendPort + 1, Weight: 1}}
		s.VIPs[f].Frontends = append(slices.Clip(s.VIPs[f].Frontends), refusing)
	}
	return &s
}

// The source ports of the VIP say which gateway has a connection: each takes them from its own slots.
func TestPortsOfSlots(t *testing.T) {
	w := newTestbed(t)
	w.serve()
	w.applySlots(state(desired.SNAT, 1, 2), alternate)
	for g := range w.balancers {
		w.lead(g)
		for f := range vips {
			for i := range uint16(desired.SlotCount) {
				client := i*desired.SlotPorts + i + 1 // so that no two of them have one place in their slots
				for _, network := range []string{"tcp", "udp"} {
					c, err := w.dial(network, f, servedPort, client)
					w.check(err)
					_, _, err = c.ask("hello")
					w.check(err)
					if network == "tcp" {
						w.check(c.Conn.(*net.TCPConn).SetLinger(0)) // the other gateway gets the same port
					}
					w.check(c.Close())
				}
			}
		}
		taken := 0
		w.check(w.balancers[g].All(func(fl flows.Flow) error {
			port := fl.Source.Port()
			if int(port/desired.SlotPorts)%2 != g {
				t.Errorf("gateway %d has taken port %d: %s", g, port, fl)
			}
			if int(fl.Client.Port()/desired.SlotPorts)%2 == g && port != fl.Client.Port() {
				t.Errorf("gateway %d has replaced a port of its own: %s", g, fl)
			}
			taken++
			return nil
		}))
		if taken < desired.SlotCount {
			t.Errorf("gateway %d has %d flows, want those of UDP at least", g, taken)
		}
	}
}

// A connection may end while all of its answers come to another gateway than the client's packets. The one that has the port sees the
// end all the same: otherwise its ports would run out.
func TestEndsAreSeen(t *testing.T) {
	w := newExchanging(t, state(desired.SNAT, 1))
	w.lead(0)
	w.leadBack(1)
	const lines = 100_000
	from := uint16(2*desired.SlotPorts + 77) // in a slot of gateway 0
	for f := range vips {
		for name, end := range map[string]func(*conn) error{
			"by the client": (*conn).Close,
			"by the backend": func(c *conn) error {
				if _, err := fmt.Fprintln(c, "end"); err != nil {
					return err
				}
				_, err := c.Read(make([]byte, 1))
				if !errors.Is(err, io.EOF) {
					return fmt.Errorf("read %w, want the end", err)
				}
				return c.Close()
			},
		} {
			from++
			upload := fmt.Sprint(families[f], name)
			c := w.openKnown(f, from)
			_, err := io.WriteString(c, strings.Repeat("upload "+upload+"\n", lines))
			w.check(err)
			w.until(func() bool { return w.hasUploaded(upload) == lines }, "the backend gets all")
			w.check(end(c))
			for g := range w.balancers {
				w.until(func() bool {
					return !slices.ContainsFunc(w.states(g, f, from), func(s bpf.ConnState) bool { return s < bpf.ConnClosing })
				}, fmt.Sprintf("%s: gateway %d sees the end %s", families[f], g, name))
			}
		}
	}
}

// openKnown opens a connection from a port through gateway 0, and returns when the other gateway knows it.
func (w *testbed) openKnown(f int, from uint16) *conn {
	w.t.Helper()
	c, err := w.dial("tcp", f, servedPort, from)
	w.check(err)
	_, _, err = c.ask("hello")
	w.check(err)
	w.until(func() bool { return len(w.states(1, f, from)) == 4 }, "the other gateway knows the connection")
	return c
}

// reset resets a connection from a port through gateway 0, and returns when that has seen it.
func (w *testbed) reset(c *conn, f int, from uint16) {
	w.t.Helper()
	w.check(errors.Join(c.Conn.(*net.TCPConn).SetLinger(0), c.Close()))
	w.until(func() bool { return slices.Contains(w.states(0, f, from), bpf.ConnClosed) }, "the reset passes")
}

// states returns the states of the entries of TCP flows that a gateway has for a client's port, if the backend sees the same port.
func (w *testbed) states(g, f int, port uint16) (all []bpf.ConnState) {
	w.t.Helper()
	entries := map[bpf.GatewayConnKey]bpf.GatewayConn{}
	w.check(dump(w.balancers[g].k.maps[bpf.MapFlows], entries))
	for key, c := range entries {
		if bpf.AddrOf(key.Client).Is4() == vips[f].Is4() && (key.ClientPort == port || key.ServerPort == port) {
			all = append(all, bpf.ConnState(c.State))
		}
	}
	return all
}

// A gateway takes a port again as soon as its connection has ended. Another one may still have the earlier connection: it hands the
// backend's answer over, and forgets the earlier one when it hears of the next.
func TestPortsAreTakenAgain(t *testing.T) {
	w := newExchanging(t, state(desired.SNAT, 1))
	own, others := uint16(2*desired.SlotPorts+77), uint16(31*desired.SlotPorts+77) // gateway 0 moves the second one to the first
	for f := range vips {
		for _, answers := range []int{0, 1} {
			own++
			others++
			w.lead(0)
			first := w.openKnown(f, own)
			w.lead(1)
			_, _, err := first.ask("again") // the other gateway's copy is in use then
			w.check(err)
			w.lead(0)
			w.reset(first, f, own)

			w.leadBack(answers)
			second, err := w.dial("tcp", f, servedPort, others)
			if err != nil {
				t.Errorf("%s: %v", families[f], err)
				continue
			}
			_, _, err = second.ask("hello")
			w.check(err)
			w.until(func() bool { return len(w.states(1, f, others)) > 0 }, "the other gateway knows the next connection")
			if !slices.Contains(w.states(0, f, own), bpf.ConnOpen) {
				t.Errorf("%s: the next connection has another port", families[f])
			}
			w.lead(1)
			for range 3 { // the first answer is handed over, because its number is new
				if _, _, err := second.ask("hello"); err != nil {
					t.Errorf("%s, answers through gateway %d: %v", families[f], answers, err)
					break
				}
			}
			_ = second.Close()
		}
	}
}

// A client connects again by the same port through another gateway, which still has the connection before, and the port of the first
// one. The backend's answer stays there: the first one has forgotten the connection.
func TestClientConnectsAgainElsewhere(t *testing.T) {
	w := newExchanging(t, state(desired.SNAT, 1))
	const from = 2*desired.SlotPorts + 77 // in a slot of gateway 0
	for f := range vips {
		w.lead(0)
		w.reset(w.openKnown(f, from), f, from)
		all := map[bpf.GatewayConnKey]bpf.GatewayConn{}
		w.check(dump(w.balancers[0].k.maps[bpf.MapFlows], all))
		for key := range all {
			w.check(w.balancers[0].k.maps[bpf.MapFlows].Delete(key))
		}
		before := w.refusals(0)["no_flow"]
		w.lead(1)
		c, err := w.dial("tcp", f, servedPort, from)
		w.check(err)
		_, _, err = c.ask("hello")
		w.check(err)
		if n := w.refusals(0)["no_flow"] - before; n > 0 {
			t.Errorf("%s: %d packets found no flow at the first gateway", families[f], n)
		}
		w.check(c.Close())
	}
}

// A gateway that was away while a port was taken again hears of the next connection with all others, when it is back.
func TestPortsAreTakenMeanwhile(t *testing.T) {
	w := newTestbed(t)
	w.serve()
	w.applySlots(state(desired.SNAT, 1), alternate)
	pull := func() {
		t.Helper()
		w.check(w.balancers[0].All(func(f flows.Flow) error {
			f.Gateway = "other"
			_, err := w.balancers[1].Import([]flows.Flow{f})
			return err
		}))
	}
	const own, others = 2*desired.SlotPorts + 77, 31*desired.SlotPorts + 77 // gateway 0 moves the second one to the first
	for f := range vips {
		w.lead(0)
		first, err := w.dial("tcp", f, servedPort, own)
		w.check(err)
		ask := func(c *conn) {
			t.Helper()
			for range 3 {
				if _, _, err := c.ask("hello"); err != nil {
					t.Fatalf("%s: %v", families[f], err)
				}
			}
		}
		ask(first)
		pull()
		w.lead(1)
		ask(first)
		w.lead(0)
		w.reset(first, f, own)
		second, err := w.dial("tcp", f, servedPort, others)
		w.check(err)
		ask(second)
		pull()
		w.lead(1)
		ask(second)
		third, err := w.dial("tcp", f, servedPort, own) // whose port at the backend is now that of the second one
		w.check(err)
		ask(third)
		w.check(errors.Join(second.Close(), third.Close()))
	}
}

// A backend's packet whose frontend cannot be derived is dropped; it never leaves with the backend's address. The
// connection continues once the client sends.
func TestReplyWithoutFlow(t *testing.T) {
	w := newTestbed(t)
	w.serve()
	s := state(desired.Routed, 1, 2, 3, 4)
	for f := range s.VIPs {
		twice := s.VIPs[f].Frontends[0]
		twice.Port = 81
		s.VIPs[f].Frontends = append(s.VIPs[f].Frontends, twice)
	}
	w.apply(s)
	var all [2]kinds
	for f := range vips {
		all[f] = w.openAll(f)
	}
	seen := w.listen()
	w.lead(1)
	w.until(func() bool { return w.refusals(1)["no_flow"] > 0 }, "a reply without a flow is dropped")
	for f := range vips {
		for i := range each {
			if _, err := fmt.Fprintln(all[f].download[i], "and on"); err != nil {
				t.Error(err)
			}
		}
		if idle, download, upload := all[f].broken(w); idle+download+upload > 0 {
			t.Errorf("%s: %d idle, %d download and %d upload connections of %d each are broken: %v", families[f], idle, download, upload, each, w.refusals(1))
		}
	}
	for source, n := range seen() {
		for f := range vips {
			if backendNets[f].Contains(source) {
				t.Errorf("the client got %d packets from %s", n, source)
			}
		}
	}
}

func TestRemovedBackends(t *testing.T) {
	w := newTestbed(t)
	w.serve()
	backendsGo(t, w)
}

// Flows of a removed backend end at once. Flows of a draining backend continue.
func backendsGo(t *testing.T, w *testbed) {
	t.Helper()
	w.apply(state(desired.Routed, 1, 2))
	var open []*conn
	met := map[netip.Addr]int{}
	for range 2 * each {
		c, err := w.dial("tcp", 0, servedPort, 0)
		w.check(err)
		t.Cleanup(func() { _ = c.Close() })
		b, _, err := c.ask("hello")
		w.check(err)
		met[b]++
		open = append(open, c)
	}
	draining := state(desired.Routed, 1, 2)
	for i := range draining.VIPs {
		draining.VIPs[i].Frontends[0].Backends[0].Draining = true
	}
	w.apply(draining)
	for range each {
		c, err := w.dial("tcp", 0, servedPort, 0)
		w.check(err)
		b, _, err := c.ask("hello")
		w.check(err)
		w.check(c.Close())
		if b != backend(0, 2) {
			t.Fatalf("a new client reaches %s, which is draining", b)
		}
	}
	for _, c := range open {
		_, _, err := c.ask("still?")
		w.check(err)
	}
	w.apply(state(desired.Routed, 2))
	ended := 0
	w.until(func() bool {
		ended = 0
		for _, c := range open {
			if _, _, err := c.ask("and-now?"); err != nil {
				t.Log(err)
				ended++
			}
		}
		return ended == met[backend(0, 1)]
	}, fmt.Sprint("flows of the backend that is gone end, and no others", ended, met, w.refusals(0)))
}
