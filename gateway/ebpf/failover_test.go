package ebpf

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/flows"
	"github.com/isthmus-net/isthmus/tools/netlab/edge"
)

// each is how many connections of a kind a test has in each family.
const each = 8

// kinds are connections that are idle, that only download, and that only upload.
type kinds struct {
	idle, download, upload []*conn
	names                  []string // of uploads
}

func (w *world) openAll(f int) (k kinds) {
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

// broken is how many of all connections do not go on.
func (k kinds) broken(w *world) (idle, download, upload int) {
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

// downloads reads until something comes that was sent from now on.
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

// uploads sends a line, and waits until it has come.
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

// told are the flows that a gateway tells of, until stop is called.
type told struct {
	mu    sync.Mutex
	flows map[flows.Flow]bool // guarded by mu
	stop  func()
}

func (w *world) export(g int) *told {
	told := &told{flows: map[flows.Flow]bool{}}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- w.balancers[g].Export(ctx, func(f flows.Flow) error {
			told.mu.Lock()
			defer told.mu.Unlock()
			told.flows[f] = true
			return nil
		})
	}()
	told.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			w.t.Errorf("export ended by %v", err)
		}
	})
	w.t.Cleanup(told.stop)
	w.until(func() bool {
		var s bpf.GatewaySettings
		w.check(w.balancers[g].k.maps[bpf.MapGatewaySettings].Lookup(uint32(0), &s))
		return s.Announce == 1
	}, "flows are told, also those that end at once")
	return told
}

func (o *told) all() (all []flows.Flow) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for f := range o.flows {
		all = append(all, f)
	}
	return all
}

// knows makes flows known to a gateway, which has their backends.
func (w *world) knows(g int, all []flows.Flow) {
	w.t.Helper()
	early, err := w.balancers[g].Import(all)
	w.check(err)
	if len(early) > 0 {
		w.t.Fatalf("%d flows of %d are early: %s", len(early), len(all), early[0])
	}
}

// Backends come, which leads the hash of some clients elsewhere, and then a gateway dies. What it told the other one of goes
// on, whoever speaks first.
func TestFailoverAfterChange(t *testing.T) {
	for _, way := range []desired.Return{desired.Routed, desired.SNAT} {
		t.Run(string(way), func(t *testing.T) {
			w := newWorld(t)
			w.serve()
			w.apply(state(way, 1, 2))
			told := w.export(0)
			var all [2]kinds
			for f := range vips {
				all[f] = w.openAll(f)
			}
			w.until(func() bool { return len(told.all()) == 2*3*each }, "all flows are told")
			w.apply(state(way, 1, 2, 3, 4))
			w.knows(1, told.all())
			w.check(w.Cut(0))
			w.lead(1)
			for f := range vips {
				if idle, download, upload := all[f].broken(w); idle+download+upload > 0 {
					t.Errorf("%s: broken are %d idle, %d download and %d upload of %d each: %v", families[f], idle, download, upload, each, w.refusals(1))
				}
			}
		})
	}
}

// An answer that is under way when another gateway takes over comes there before any question does. Of UDP that is known when the
// client has asked for a second, or when all is told.
func TestAnswersUnderWay(t *testing.T) {
	for _, way := range []desired.Return{desired.Routed, desired.SNAT} {
		t.Run(string(way), func(t *testing.T) {
			w := newWorld(t)
			w.serve()
			w.apply(state(way, 1, 2, 3, 4))
			told := w.export(0)
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
				return len(told.all()) == len(old)
			}, "who asks for some time is told of")
			w.knows(1, told.all())
			young := asks()
			var all []flows.Flow
			w.check(w.balancers[0].All(func(f flows.Flow) error {
				all = append(all, f)
				return nil
			}))
			if len(all) != len(old)+len(young) || len(told.all()) != len(old) {
				t.Errorf("of %d flows %d were told at once, and %d when all were asked for", len(old)+len(young), len(told.all()), len(all))
			}
			w.knows(1, all)
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

// A connection that comes from another gateway before that has told of it waits for the word: its client's port at the backend may
// be taken here by another one that has ended long ago there.
func TestYoungConnections(t *testing.T) {
	const port = 7001
	w := newWorld(t)
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
	told := w.export(0)
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
	w.until(func() bool { return len(told.all()) == 1 }, "the connection is told of")
	w.knows(1, told.all())

	young, err := w.dial("tcp", 0, servedPort, port)
	w.check(err)
	t.Cleanup(func() { _ = young.Close() })
	now, _, err := young.ask("hello")
	w.check(err)
	if now != met {
		t.Fatalf("the client meets %s and %s, want one", met, now)
	}
	w.until(func() bool { return len(told.all()) == 2 }, "the connection is told of")
	w.lead(1)
	answer := make(chan error, 1)
	go func() {
		_, _, err := young.ask("still?")
		answer <- err
	}()
	w.until(func() bool { return w.refusals(1)["no_flow"] > 0 }, "its packet comes to the other gateway before the word")
	w.knows(1, told.all())
	if err := <-answer; err != nil {
		t.Errorf("%v: %v", err, w.refusals(1))
	}
}

// Without a word from the other gateway connections go on as well: by the hash, as long as no backend came or went, and by
// what their backends send.
func TestFailoverByHash(t *testing.T) {
	w := newWorld(t)
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
			t.Errorf("%s: broken are %d idle, %d download and %d upload of %d each: %v", families[f], idle, download, upload, each, w.refusals(1))
		}
	}
}

// Where it cannot be told of which frontend a backend's packet is, it goes nowhere; it never leaves with the backend's
// address. When the client speaks, all is as it was.
func TestAnswerWithoutFlow(t *testing.T) {
	w := newWorld(t)
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
	w.until(func() bool { return w.refusals(1)["no_flow"] > 0 }, "an answer without a flow is dropped")
	for f := range vips {
		for i := range each {
			if _, err := fmt.Fprintln(all[f].download[i], "and on"); err != nil {
				t.Error(err)
			}
		}
		if idle, download, upload := all[f].broken(w); idle+download+upload > 0 {
			t.Errorf("%s: broken are %d idle, %d download and %d upload of %d each: %v", families[f], idle, download, upload, each, w.refusals(1))
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

func TestBackendsGo(t *testing.T) {
	w := newWorld(t)
	w.serve()
	backendsGo(t, w)
}

// Flows of a backend that is gone end at once; those of one that drains go on.
func backendsGo(t *testing.T, w *world) {
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
			t.Fatalf("a new client meets %s, which drains", b)
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
