package nft

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// behindClient returns a testbed whose client is a machine behind w's client, which is a router to it, and a function that narrows the
// link between them.
func (w *testbed) behindClient() (behind *testbed, addrs []netip.Addr, narrow func(mtu int)) {
	w.t.Helper()
	far := namespace(w.t)
	in(w.t, w.client, func() error { return setSysctl("net/ipv4/ip_forward", "1") })
	in(w.t, w.client, func() error { return setSysctl("net/ipv6/conf/all/forwarding", "1") })
	near, end := link(0, 80, 0)
	if err := w.client.Connect(far, near, end); err != nil {
		w.t.Fatal(err)
	}
	device, farDevice := netlab.DeviceName(near), netlab.DeviceName(end)
	for family, addr := range []netip.Addr{netip.MustParseAddr("192.0.2.77"), netip.MustParseAddr("2001:db8::77")} {
		near, end := link(family, 80, 0)
		if family == 1 {
			give(w.t, w.client, device, near)
			give(w.t, far, farDevice, end)
		}
		give(w.t, far, "lo", netip.PrefixFrom(addr, addr.BitLen()))
		route(w.t, w.client, netip.PrefixFrom(addr, addr.BitLen()), end.Addr())
		route(w.t, far, vipNets[family], near.Addr())
		addrs = append(addrs, addr)
	}
	is := *w
	is.client = far
	return &is, addrs, func(mtu int) {
		w.t.Helper()
		in(w.t, w.client, func() error {
			l, err := netlink.LinkByName(device)
			if err != nil {
				return err
			}
			return netlink.LinkSetMTU(l, mtu)
		})
	}
}

// awaitKnown waits until a gateway knows a client's connection, and meanwhile does something again and again.
func (w *testbed) awaitKnown(gateway int, client net.Addr, meanwhile ...func()) {
	w.t.Helper()
	from := netip.MustParseAddrPort(client.String())
	w.poll(func() (is bool) {
		for _, do := range meanwhile {
			do()
		}
		in(w.t, w.gateways[gateway].ns, func() error {
			return w.gateways[gateway].list(func(e entry) { is = is || e.original.from == from })
		})
		return is
	}, "the gateway does not know the connection of "+client.String())
}

// echoesMuch sends a line that is larger than a packet and reads it back.
func (f *flow) echoesMuch() error {
	if err := f.wait(); err != nil {
		return err
	}
	text := strings.Repeat("x", 5000) + "\n"
	if _, err := fmt.Fprint(f, text); err != nil {
		return err
	}
	line, err := f.ReadString('\n')
	if err == nil && line != text {
		err = fmt.Errorf("%d bytes are echoed, want %d", len(line), len(text))
	}
	return err
}

// The path to the client narrows during a connection, and a router says so. It sends its ICMP error to another gateway than the
// connection's, and would do so each time that the backend tries again. The backend hears of it all the same.
func TestPathMTU(t *testing.T) {
	t.Parallel()
	for _, way := range []desired.Return{desired.Routed, desired.SNAT, desired.Masquerade} {
		t.Run(string(way), func(t *testing.T) {
			t.Parallel()
			w := newTestbed(t)
			w.serve()
			w.applySlots(w.state(func(v *desired.VIP) { v.Return = way }))
			w.tellEachOther()
			behind, from, narrow := w.behindClient()
			var all []*flow
			for family := range familyNames {
				all = append(all, behind.openFrom(netip.AddrPortFrom(from[family], 0), family, "echo"))
			}
			w.awaitKnown(1, all[0].LocalAddr())
			w.awaitKnown(1, all[1].LocalAddr())
			w.steerClient(1)
			narrow(1300)
			for family, f := range all {
				if err := f.echoesMuch(); err != nil {
					t.Errorf("%s: %v", familyNames[family], err)
				}
			}
		})
	}
}

// A client sends datagrams in fragments. The router leads them to another gateway than the datagrams before, as many routers do, which
// ignore the ports of fragments.
func TestFragmentsAtAnotherGateway(t *testing.T) {
	t.Parallel()
	for _, way := range []desired.Return{desired.Routed, desired.SNAT, desired.Masquerade} {
		t.Run(string(way), func(t *testing.T) {
			t.Parallel()
			w := newTestbed(t)
			w.serve()
			w.applySlots(w.state(func(v *desired.VIP) { v.Return = way }))
			w.tellEachOther()
			for family, name := range familyNames {
				c, err := w.dial("udp", netip.AddrPortFrom(clientAddrs[family], 0), netip.AddrPortFrom(vips[family], vipPort))
				if err != nil {
					t.Fatal(err)
				}
				asks := func(text string) (answer string) {
					t.Helper()
					b := make([]byte, 100)
					_, writeErr := fmt.Fprint(c, text)
					n, err := c.Read(b)
					if err := errors.Join(writeErr, err); err != nil {
						t.Fatal(name, err)
					}
					return string(b[:n])
				}
				met := asks("hello")
				if way != desired.Routed { // a flow that goes on is told
					w.awaitKnown(1, c.LocalAddr(), func() { asks("still?") })
				}
				w.steerClient(1)
				if now := asks(strings.Repeat("x", 4000)); now != met {
					t.Errorf("%s: %q answers, and before %q (the backend and the client that it sees)", name, now, met)
				}
				w.steerClient(0)
			}
		})
	}
}
