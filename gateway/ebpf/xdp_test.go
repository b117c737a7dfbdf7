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

// accelerate opens the balancers of a world anew, with XDP. The other ends of their cables take frames from it.
func (w *world) accelerate() {
	w.t.Helper()
	w.xdp = XDPAuto
	w.check(w.machine.Do(func() error { return w.setCables(netlab.GRO, true) }))
	for g := range w.balancers {
		w.check(w.Router.Do(func() error { return netlab.GRO.Set(edge.Port(g), true) }))
		w.check(w.balancers[g].Close(context.Background(), false))
		w.open(g)
	}
}

// sumUp makes packets of clients and backends leave them with their checksums, as those that come over a wire have.
func (w *world) sumUp(whole bool) {
	w.t.Helper()
	w.check(w.Client.Do(func() error { return netlab.TxChecksum.Set(edge.Device, !whole) }))
	w.check(w.machine.Do(func() error { return w.setCables(netlab.TxChecksum, !whole) }))
}

// setCables sets an offload of all cables of this namespace.
func (w *world) setCables(o netlab.Offload, on bool) error {
	for g := range arms {
		for f := range vips {
			if err := o.Set(netlab.DeviceName(arms[g][f][1]), on); err != nil {
				return err
			}
		}
	}
	return nil
}

// What a gateway does for clients it does with XDP as well, and its drivers send most of what they ask and are told, on
// one edge.
func TestXDP(t *testing.T) {
	w := newWorld(t)
	w.accelerate()
	w.serve()
	for _, test := range []struct {
		name string
		run  func(*testing.T, *world)
	}{{"every way back", everyWayBackByXDP}, {"backends go", backendsGo}, {"checksums to be computed", lacksChecksums}, {"cable without XDP", withoutXDP}, {"device goes", deviceGoes}} {
		t.Run(test.name, func(t *testing.T) {
			w.t = t
			test.run(t, w)
		})
	}
	w.t = t
}

func everyWayBackByXDP(t *testing.T, w *world) {
	t.Helper()
	w.sumUp(true)
	// 3 ways, 2 families, 40 clients who ask 3 times: all questions but the first by UDP, all by TCP, and all answers but
	// the first. A packet whose flow is due for an update takes the kernel's path, and the slower the machine, the more are:
	// one round in which the drivers send most of them is enough.
	const want, rounds = 3 * 2 * 40 * (2 + 2 + 3 + 3), 10
	var sent []uint64
	for range rounds {
		before := w.balancers[0].Sent()
		everyWayBack(t, w)
		if sent = append(sent, w.balancers[0].Sent()-before); sent[len(sent)-1] >= want/2 {
			return
		}
	}
	t.Errorf("in %d rounds the drivers have sent %d packets, want most of %d in one", rounds, sent, want)
}

// What has no checksum yet no driver may send: nobody would compute it any more.
func lacksChecksums(t *testing.T, w *world) {
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
			defer c.Close() // whose last packets the kernel sums up itself
		}
	}
	if n := w.balancers[0].Sent() - before; n > 0 {
		t.Errorf("drivers have sent %d packets whose checksum was still to be computed", n)
	}
	w.sumUp(true)
}

// A driver that cannot send what another one hands it gets nothing from it: the kernel would drop that in silence.
func withoutXDP(t *testing.T, w *world) {
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
	// Of 40 packets, the drivers send all but those whose flow is due for an update. More than 20 are questions and answers.
	w.until(func() bool { return asks() > 20 }, "the drivers send questions and answers")
	w.check(w.machine.Do(func() error { return w.setCables(netlab.GRO, false) }))
	if d := w.drift(0); len(d) != 1 || !strings.Contains(d[0].Message, "XDP") {
		t.Errorf("drift %v, want what the XDP program knows of devices", d)
	}
	w.apply(state(desired.Routed, 1))
	w.until(func() bool {
		n := asks()
		if n > 20 {
			t.Fatalf("the drivers have sent %d packets, want at most the 20 answers", n)
		}
		return n > 0
	}, "the drivers send answers")
	if d := w.drift(0); len(d) > 0 {
		t.Errorf("drift %v after it was mended", d)
	}
	w.check(w.machine.Do(func() error { return w.setCables(netlab.GRO, true) }))
}

// A device that goes is drift like any other, and forgotten.
func deviceGoes(t *testing.T, w *world) {
	t.Helper()
	w.check(w.Gateways[0].Do(func() error {
		l, err := netlink.LinkByName(netlab.DeviceName(arms[0][1][0]))
		if err != nil {
			return err
		}
		return netlink.LinkDel(l)
	}))
	if d := w.drift(0); len(d) == 0 {
		t.Error("it is no drift that a device has gone")
	}
	w.apply(state(desired.Routed, 1))
	if d := w.drift(0); len(d) > 0 {
		t.Errorf("drift %v after it was mended", d)
	}
}

func (w *world) drift(g int) (d []desired.Fault) {
	w.t.Helper()
	w.check(w.Gateways[g].Do(func() (err error) {
		d, err = w.balancers[g].Drift(context.Background())
		return err
	}))
	return d
}

// A program of somebody else stays, and the log names it, once; a device without XDP of its own is balanced all the same.
// What a driver runs is seen when it goes, is taken away with XDP off, and when the balancer is removed.
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
			t.Errorf("the log says %d times %s:\n%s", n, once, log.String())
		}
	}
	says(`device=a why="it runs XDP(always)`)
	says(`device=lo why="its driver has no XDP"`)
	if info, err := other.Info(); err != nil || info.XDP().Ifindex != uint32(index) {
		t.Errorf("the program of somebody else: %v, %v", info, err)
	}
	if err := other.Close(); err != nil { // which takes it off
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

// runs wants a driver to run a program, or none.
func runs(t *testing.T, want bool) {
	t.Helper()
	l, err := netlink.LinkByName("a")
	if err != nil {
		t.Error(err)
	} else if l.Attrs().Xdp.Attached != want {
		t.Errorf("XDP on device a is %+v, want any: %t", l.Attrs().Xdp, want)
	}
}
