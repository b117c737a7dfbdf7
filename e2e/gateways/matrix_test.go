package gateways_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/tools/gateways"
	"github.com/isthmus-net/isthmus/tools/netlab"
	"github.com/isthmus-net/isthmus/tools/netlab/edge"
	"github.com/isthmus-net/isthmus/tools/netlab/traffic"
)

// announcement is how the router gets to know which gateways serve.
type announcement struct {
	name     string
	by       desired.Announce
	gateways int
	equal    bool // all serve at once; else the first one that can
}

// serving returns those that serve of the gateways that can.
func (a announcement) serving(able []int) []int {
	if a.equal {
		return able
	}
	return able[:1]
}

// cell is a combination of the matrix.
type cell struct {
	balancer desired.Balancer
	way      desired.Return
	announce announcement
	family   int
}

func (c cell) String() string {
	return fmt.Sprintf("%s, %s, %s, %s", c.balancer, c.way, c.announce.name, families[c.family])
}

// daily are the cells of make test, each with every fourth connection.
var daily = []string{
	"ebpf, routed, VRRP, IPv6", "ebpf, snat, BGP, 3 equal, IPv4", "nftables, routed, BGP, 3 equal, IPv6", "nftables, routed, BGP, preferred, IPv4",
}

// whole reports whether all cells run with all connections.
var whole = os.Getenv("ISTHMUS_FULL_LENGTH") != ""

// matrix returns all cells.
func matrix() (all []cell) {
	for _, balancer := range []desired.Balancer{desired.EBPF, desired.NFTables} {
		for _, way := range []desired.Return{desired.Routed, desired.SNAT, desired.Masquerade} {
			for _, announce := range []announcement{
				{"BGP, 3 equal", desired.ByBGP, 3, true}, {"BGP, preferred", desired.ByBGP, 2, false}, {"VRRP", desired.ByVRRP, 2, false},
			} {
				for family := range families {
					all = append(all, cell{balancer: balancer, way: way, announce: announce, family: family})
				}
			}
		}
	}
	return all
}

// counts returns the number of connections that are open when gateways go, and that of short ones in each phase: 10,000 of both, or a
// quarter.
func counts() (lasting int, each int64) {
	if whole {
		return 600, 1900
	}
	return 150, 475
}

const (
	// longest bounds a short connection, with time for retransmissions. One that takes longer than slow has waited for one.
	longest = 15 * time.Second
	slow    = 900 * time.Millisecond
	// announcing is how long a gateway may take to announce a connection to the others.
	announcing = 50 * time.Millisecond
	// boot is how long a machine that died takes to start at least. Its peers have found out by then.
	boot = 3 * time.Second
)

var programs string // folder of the compiled gateway

func TestMain(m *testing.M) {
	os.Exit(func() int {
		if !netlab.IsRoot() {
			return m.Run() // tests skip, or fail where they must not
		}
		var err error
		if programs, err = os.MkdirTemp("", "isthmus-gateways-*"); err == nil {
			defer os.RemoveAll(programs)
			err = gateways.Build(context.Background(), programs, "isthmus-gateway")
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return m.Run()
	}())
}

// A gateway with connections dies, reboots, is drained, and starts again. No connection breaks, but for those that a gateway which
// masquerades had when it died, and none fails, but for those that begin while it dies.
func TestGatewaysComeAndGo(t *testing.T) {
	netlab.Privileged(t)
	for _, c := range matrix() {
		if !whole && !slices.Contains(daily, c.String()) {
			continue
		}
		t.Run(c.String(), func(t *testing.T) { c.run(t) })
	}
}

func (c cell) run(t *testing.T) {
	t.Helper()
	lasting, each := counts()
	g := newGroup(t, c)
	open, err := traffic.NewConnections(t.Context(), g.Client, g.servers, held)
	g.check(err)
	t.Cleanup(func() { g.check(open.Close()) })
	g.check(open.Open(t.Context(), c.String(), netip.AddrPortFrom(g.vip(), held), lasting))
	short := g.connect()
	others := g.all()[1:]

	short.await(each)
	died := time.Now()
	phase := func(name string) { t.Logf("%s after the death: %s", time.Since(died), name) }
	g.check(errors.Join(g.Cut(0), g.agents[0].Kill()))
	g.awaitServing(c.announce.serving(others)...)
	out := time.Now()
	phase("the others serve")
	short.await(each)
	<-time.After(time.Until(died.Add(boot)))
	phase("it reboots")
	g.reboot(0)
	g.awaitServing(c.announce.serving(g.all())...)
	phase("it serves again")
	short.await(each)
	phase("it is drained")
	g.check(g.agents[0].Stop())
	g.awaitServing(c.announce.serving(others)...)
	phase("it serves no more")
	short.await(each)
	phase("it starts")
	g.start(0)
	g.awaitServing(c.announce.serving(g.all())...)
	short.await(each)

	all, failed := short.end()
	for _, f := range short.slow {
		t.Logf("a connection, %s after the death, took %s", f.begun.Sub(died), f.ended.Sub(f.begun))
	}
	lost := 0
	for _, f := range failed {
		if f.begun.Before(out) && f.ended.After(died) && (c.way == desired.Masquerade || f.begun.After(died.Add(-announcing))) {
			lost++ // perhaps one of the gateway that died
			continue
		}
		t.Errorf("a connection, %s after the death, failed after %s: %v", f.begun.Sub(died), f.ended.Sub(f.begun), f.err)
	}
	broken := 0
	for _, b := range open.Broken(time.Now()) {
		if c.way == desired.Masquerade && b.Source.Addr() == edge.Gateways[0][c.family] {
			lost++
			continue
		}
		if broken++; broken <= 3 {
			t.Errorf("an open connection is broken: %v", b)
		}
	}
	if t.Failed() {
		g.logICMP()
	}
	t.Logf("%d short connections, %d failed; %d open ones, %d broken; %d lost with the gateway that died", all, len(failed), open.Count(), broken, lost)
}

// logICMP logs which machines have sent ICMP errors that say that a destination is unreachable, over IPv6.
func (g *group) logICMP() {
	machines := map[string]*netlab.Namespace{"router": g.Router, "servers": g.servers}
	for i, ns := range g.Gateways {
		machines[name(i)] = ns
	}
	for machine, ns := range machines {
		_ = ns.Do(func() error {
			text, err := os.ReadFile("/proc/thread-self/net/snmp6")
			for line := range strings.Lines(string(text)) {
				if strings.HasPrefix(line, "Icmp6OutDestUnreachs") || strings.HasPrefix(line, "Ip6InNoRoutes") || strings.HasPrefix(line, "Ip6OutNoRoutes") {
					g.t.Logf("%s: %s", machine, strings.Join(strings.Fields(line), " "))
				}
			}
			return err
		})
	}
}

// attempt is a short connection that failed, or was slow.
type attempt struct {
	begun, ended time.Time
	err          error
}

// connecting are clients of the VIP.
type connecting struct {
	stop    context.CancelFunc
	running sync.WaitGroup
	close   func() error
	all     atomic.Int64

	mu           sync.Mutex
	failed, slow []attempt
}

// connect starts clients that connect all the time, and servers that echo.
func (g *group) connect() *connecting {
	g.t.Helper()
	var l net.Listener
	g.check(g.servers.Do(func() (err error) {
		l, err = net.Listen("tcp", fmt.Sprintf(":%d", asked))
		return err
	}))
	ctx, stop := context.WithCancel(g.t.Context())
	c := &connecting{stop: stop, close: l.Close}
	g.t.Cleanup(func() { c.end() })
	go echo(l)
	for range 4 {
		c.running.Go(func() {
			for ctx.Err() == nil {
				begun := time.Now()
				err := g.once()
				c.note(attempt{begun, time.Now(), err})
				c.all.Add(1)
			}
		})
	}
	return c
}

func echo(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			_ = c.SetDeadline(time.Now().Add(2 * longest))
			_, _ = io.Copy(c, c)
			_ = c.Close()
		}()
	}
}

// once asks once. While the router replaces a route, it has none for less than a millisecond now and then, and says so: that is no fault
// of a gateway's.
func (g *group) once() error {
	const replacing = time.Second
	for unreachable := (time.Time{}); ; <-time.After(time.Millisecond) { // the router needs the CPU
		err := g.ask()
		if !errors.Is(err, unix.ENETUNREACH) {
			return err
		}
		if unreachable.IsZero() {
			unreachable = time.Now() // an earlier SYN may have got no answer
		}
		if time.Since(unreachable) > replacing {
			return err
		}
	}
}

// ask connects, sends a request and reads the answer.
func (g *group) ask() error {
	var c net.Conn
	if err := g.Client.Do(func() (err error) {
		c, err = (&net.Dialer{Timeout: longest}).Dial("tcp", netip.AddrPortFrom(g.vip(), asked).String())
		return err
	}); err != nil {
		return err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(longest))
	var word int64
	return errors.Join(binary.Write(c, binary.BigEndian, time.Now().UnixNano()), binary.Read(c, binary.BigEndian, &word))
}

// note keeps an attempt that failed or was slow.
func (c *connecting) note(a attempt) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case a.err != nil:
		c.failed = append(c.failed, a)
	case a.ended.Sub(a.begun) > slow:
		c.slow = append(c.slow, a)
	}
}

// await waits for so many more connections, but not for failures of all.
func (c *connecting) await(n int64) {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for end, failures := c.all.Load()+n, c.failures()+20; c.all.Load() < end && c.failures() < failures; {
		<-tick.C
	}
}

func (c *connecting) failures() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.failed)
}

// end ends the clients, and returns how many connections there were and those that failed.
func (c *connecting) end() (all int64, failed []attempt) {
	c.stop()
	c.running.Wait()
	_ = c.close()
	return c.all.Load(), c.failed
}
