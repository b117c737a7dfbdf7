package ebpf

import (
	"bufio"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/tools/netlab/edge"
)

// narrow sets the MTU of the router's device towards the client.
func (w *testbed) narrow(mtu int) {
	w.t.Helper()
	w.check(w.Router.Do(func() error {
		routes, err := netlink.RouteGet(clients[0].AsSlice())
		if err != nil {
			return err
		}
		link, err := netlink.LinkByIndex(routes[0].LinkIndex)
		if err != nil {
			return err
		}
		return netlink.LinkSetMTU(link, mtu)
	}))
}

// echoes sends a line that is larger than a packet, and waits until it comes back.
func (c *conn) echoes() error {
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	text := strings.Repeat("x", 5000)
	if _, err := fmt.Fprintln(c, text); err != nil {
		return err
	}
	line, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		return err
	}
	if !strings.HasSuffix(line, " "+text+"\n") {
		return fmt.Errorf("the answer is %d bytes: %.40q", len(line), line)
	}
	return nil
}

// The path to the client narrows during a connection, and the router says so. It sends its ICMP error to another gateway than the
// connection's, and would do so each time that the backend tries again. The backend hears of it all the same.
func TestPathMTU(t *testing.T) {
	for _, way := range []desired.Return{desired.Routed, desired.SNAT, desired.Masquerade} {
		t.Run(string(way), func(t *testing.T) {
			w := newExchanging(t, state(way, 1, 2, 3, 4))
			w.lead(0)
			var all []*conn
			for f := range vips {
				c, err := w.dial("tcp", f, servedPort, 0)
				w.check(err)
				t.Cleanup(func() { _ = c.Close() })
				_, _, err = c.ask("hello")
				w.check(err)
				all = append(all, c)
			}
			w.until(func() bool {
				if way == desired.Masquerade {
					return w.peerFlows(1) == len(all)
				}
				return w.standbys(1) == len(all)
			}, "the other gateway knows the connections")
			for f, vip := range vips {
				w.check(w.Router.Do(func() error { return route(netip.PrefixFrom(vip, vip.BitLen()), edge.Gateways[1][f]) }))
			}
			w.narrow(1300)
			for f, c := range all {
				if err := c.echoes(); err != nil {
					t.Errorf("%s: %v: refused %v and, by the other gateway, %v", families[f], err, w.refusals(0), w.refusals(1))
				}
			}
		})
	}
}

// A client sends datagrams in fragments. The router leads them to another gateway than the datagrams before, as many routers do, which
// ignore the ports of fragments. Only the first fragment has ports; all of them follow it.
func TestFragmentsAtAnotherGateway(t *testing.T) {
	for _, way := range []desired.Return{desired.Routed, desired.SNAT, desired.Masquerade} {
		t.Run(string(way), func(t *testing.T) {
			w := newExchanging(t, state(way, 1, 2, 3, 4))
			w.lead(0)
			for f, vip := range vips {
				c, err := w.dial("udp", f, servedPort, 0)
				w.check(err)
				t.Cleanup(func() { _ = c.Close() })
				met, seen, err := c.ask("hello")
				w.check(err)
				if way == desired.Masquerade { // an older flow is exported
					w.until(func() bool {
						_, _, err := c.ask("still?")
						w.check(err)
						return w.peerFlows(1) == 1+f
					}, "the other gateway knows the flow")
				}
				w.check(w.Router.Do(func() error { return route(netip.PrefixFrom(vip, vip.BitLen()), edge.Gateways[1][f]) }))
				now, by, err := c.ask(strings.Repeat("x", 4000))
				if err != nil {
					t.Fatalf("%s: %v: refused %v and, by the other gateway, %v", families[f], err, w.refusals(0), w.refusals(1))
				}
				if now != met || by != seen {
					t.Errorf("%s: %s answers, which sees %s; before it was %s, which saw %s", families[f], now, by, met, seen)
				}
			}
		})
	}
}
