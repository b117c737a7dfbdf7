package ebpf

import (
	"context"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/tools/netlab"
	"github.com/isthmus-net/isthmus/tools/netlab/edge"
)

// accelerate reopens the balancers of a testbed with XDP. The other ends of their cables accept frames from it.
func (w *testbed) accelerate() {
	w.t.Helper()
	w.xdp = XDPAuto
	w.check(w.machine.Do(func() error { return w.setCables(netlab.GRO, true) }))
	for g := range w.balancers {
		w.check(w.Router.Do(func() error { return netlab.GRO.Set(edge.Port(g), true) }))
		w.check(w.balancers[g].Close(context.Background(), false))
		w.open(g)
	}
}

// sumUp makes packets of clients and backends leave with complete checksums, as packets on a wire have.
func (w *testbed) sumUp(whole bool) {
	w.t.Helper()
	w.check(w.Client.Do(func() error { return netlab.TxChecksum.Set(edge.Device, !whole) }))
	w.check(w.machine.Do(func() error { return w.setCables(netlab.TxChecksum, !whole) }))
}

// setCables sets an offload of all cables of this namespace.
func (w *testbed) setCables(o netlab.Offload, on bool) error {
	for g := range arms {
		for f := range vips {
			if err := o.Set(netlab.DeviceName(arms[g][f][1]), on); err != nil {
				return err
			}
		}
	}
	return nil
}

// With XDP a gateway behaves the same for clients, and its drivers forward most packets. One edge serves all cases.
func TestXDP(t *testing.T) {
	w := newTestbed(t)
	w.accelerate()
	w.serve()
	for _, test := range []struct {
		name string
		run  func(*testing.T, *testbed)
	}{{"every way back", everyWayBackByXDP}, {"removed backends", backendsGo}, {"incomplete checksums", lacksChecksums}, {"cable without XDP", withoutXDP}, {"removed device", deviceGoes}} {
		t.Run(test.name, func(t *testing.T) {
			w.t = t
			test.run(t, w)
		})
	}
	w.t = t
}

func everyWayBackByXDP(t *testing.T, w *testbed) {
	t.Helper()
	w.sumUp(true)
	// 3 ways, 2 families, 40 clients with 3 queries each: all queries but the first by UDP, all by TCP, and all replies but
	// the first. A packet whose flow is due for a check takes the kernel's path; on a slow machine these are many. One round
	// in which the drivers forward most packets is enough.
	const want, rounds = 3 * 2 * 40 * (2 + 2 + 3 + 3), 10
	var sent []uint64
	for range rounds {
		before := w.balancers[0].Sent()
		everyWayBack(t, w)
		if sent = append(sent, w.balancers[0].Sent()-before); sent[len(sent)-1] >= want/2 {
			return
		}
	}
	t.Errorf("in %d rounds the drivers have forwarded %d packets, want most of %d in one", rounds, sent, want)
}

// A driver must not forward a packet whose checksum is incomplete: no device would complete it.
func lacksChecksums(t *testing.T, w *testbed) {
	t.Helper()
	w.sumUp(false)
	w.apply(state(desired.SNAT, 1, 2))
	before := w.balancers[0].Sent()
	for f := range vips {
		for _, network := range []string{"tcp", "udp"} {
			c, err := w.dial(network, f, servedPort, 0)
			w.check(err)
			for range 50 {
				if _, _, err := c.ask("hello"); err != nil {
					t.Fatalf("%s by %s: %v", families[f], network, err)
				}
			}
			defer c.Close() // the kernel completes the checksums of its last packets itself
		}
	}
	if n := w.balancers[0].Sent() - before; n > 0 {
		t.Errorf("drivers have forwarded %d packets with an incomplete checksum", n)
	}
	w.sumUp(true)
}

// A driver that cannot forward frames of another one gets none: the kernel would drop them silently.
func withoutXDP(t *testing.T, w *testbed) {
	t.Helper()
	w.apply(state(desired.Routed, 1))
	c, err := w.dial("udp", 0, servedPort, 0)
	w.check(err)
	defer c.Close()
	asks := func() (sent uint64) {
		before := w.balancers[0].Sent()
		for range 20 {
			_, _, err := c.ask("hello")
			w.check(err)
		}
		return w.balancers[0].Sent() - before
	}
	// Of 40 packets, the drivers forward all but those whose flow is due for a check. More than 20 are queries and replies.
	w.until(func() bool { return asks() > 20 }, "the drivers forward queries and replies")
	w.check(w.machine.Do(func() error { return w.setCables(netlab.GRO, false) }))
	if d := w.drift(0); len(d) != 1 || !strings.Contains(d[0].Message, "XDP") {
		t.Errorf("drift %v, want the devices of the XDP program", d)
	}
	w.apply(state(desired.Routed, 1))
	w.until(func() bool {
		n := asks()
		if n > 20 {
			t.Fatalf("the drivers have forwarded %d packets, want at most the 20 replies", n)
		}
		return n > 0
	}, "the drivers forward replies")
	if d := w.drift(0); len(d) > 0 {
		t.Errorf("drift %v after the repair", d)
	}
	w.check(w.machine.Do(func() error { return w.setCables(netlab.GRO, true) }))
}

// A removed device counts as drift, and Apply forgets it.
func deviceGoes(t *testing.T, w *testbed) {
	t.Helper()
	w.check(w.Gateways[0].Do(func() error {
		l, err := netlink.LinkByName(netlab.DeviceName(arms[0][1][0]))
		if err != nil {
			return err
		}
		return netlink.LinkDel(l)
	}))
	if d := w.drift(0); len(d) == 0 {
		t.Error("a removed device is no drift")
	}
	w.apply(state(desired.Routed, 1))
	if d := w.drift(0); len(d) > 0 {
		t.Errorf("drift %v after the repair", d)
	}
}

func (w *testbed) drift(g int) (d []desired.Fault) {
	w.t.Helper()
	w.check(w.Gateways[g].Do(func() (err error) {
		d, err = w.balancers[g].Drift(context.Background())
		return err
	}))
	return d
}

// A program of another process stays, and the log names it once. A device without native XDP is balanced all the
// same. Drift reports when a driver loses its program. XDP off detaches it, and so does Remove.
func TestXDPOnDevices(t *testing.T) {
	netlab.Privileged(t)
	ns, err := netlab.NewNamespace()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ns.Close() })
	bpffs := netlab.BPFFS(t)
	if err := ns.Do(func() error { return xdpOnDevices(t, bpffs) }); err != nil {
		t.Fatal(err)
	}
}

func xdpOnDevices(t *testing.T, bpffs string) error {
	t.Helper()
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "a"}, PeerName: "b"}); err != nil {
		return err
	}
	a, err := netlink.LinkByName("a")
	if err != nil {
		return err
	}
	index := a.Attrs().Index
	other, err := link.AttachXDP(link.XDPOptions{Interface: index, Program: always(t, ebpf.XDP, xdpPass)})
	if err != nil {
		return err
	}
	var log strings.Builder
	bal, err := Open(Config{BPFFS: bpffs, Devices: []string{"lo", "a"}, XDP: XDPAuto, Flows: 1024, Log: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		return err
	}
	apply := func() error { return bal.Apply(context.Background(), state(desired.SNAT)) }
	for range 2 {
		if err := apply(); err != nil {
			return err
		}
	}
	says := func(once string) {
		if n := strings.Count(log.String(), once); n != 1 {
			t.Errorf("the log has %d times %s:\n%s", n, once, log.String())
		}
	}
	says(`device=a reason="it runs XDP(always)`)
	says(`device=lo reason="its driver does not support XDP"`)
	if info, err := other.Info(); err != nil || info.XDP().Ifindex != uint32(index) {
		t.Errorf("the program of the other process: %v, %v", info, err)
	}
	if err := other.Close(); err != nil { // detaches it
		return err
	}
	if err := apply(); err != nil {
		return err
	}
	says(`balances with XDP" device=a`)
	drift := func(want int) {
		if d, err := bal.Drift(context.Background()); err != nil || len(d) != want {
			t.Errorf("drift %v, %v, want %d faults", d, err, want)
		}
	}
	drift(0)
	driver := bal.k.driver()
	for _, spoil := range []func() error{
		func() error { return bal.k.detach(filepath.Join(bal.k.links(), driver.pin(index))) },
		func() error { return netlink.LinkSetHardwareAddr(a, net.HardwareAddr{2, 0, 0, 0, 0, 7}) },
	} {
		if err := spoil(); err != nil {
			return err
		}
		drift(1)
		if err := apply(); err != nil {
			return err
		}
		drift(0)
	}
	for _, xdp := range []XDP{XDPOff, XDPAuto} {
		bal.cfg.XDP = xdp
		if err := apply(); err != nil {
			return err
		}
		drift(0)
		runs(t, xdp == XDPAuto)
	}
	if err := bal.Close(context.Background(), false); err != nil {
		return err
	}
	runs(t, true)
	if err := Remove(bpffs); err != nil {
		return err
	}
	runs(t, false)
	return nil
}

// runs expects a driver to run a program, or none.
func runs(t *testing.T, want bool) {
	t.Helper()
	l, err := netlink.LinkByName("a")
	if err != nil {
		t.Error(err)
	} else if l.Attrs().Xdp.Attached != want {
		t.Errorf("XDP on device a is %+v, want any: %t", l.Attrs().Xdp, want)
	}
}
