package bpf_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// Return values of an XDP program.
const (
	xdpPass     = 2
	xdpTx       = 3
	xdpRedirect = 4
)

// own is the index of the loopback device in every namespace.
const own = 1

// driven is a gateway in a namespace of its own, with routes to clients and backends. Test runs come in by its
// loopback device, whose MAC address is zero. Routed packets leave by its other device.
type driven struct {
	*path
	node *netlab.Namespace
	out  int // index of the other device
	mac  []byte
}

var (
	driverMTU = 1280
	// nextHop is the MAC address of every neighbour.
	nextHop = net.HardwareAddr{2, 0, 0, 0, 0, 9}
)

func newDriven(t *testing.T) *driven {
	t.Helper()
	d := &driven{path: newGateway(t)}
	var err error
	if d.node, err = netlab.NewNamespace(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.node.Close() })
	if err := d.node.Do(d.connect); err != nil {
		t.Fatal(err)
	}
	for _, s := range sides {
		for _, to := range []netip.Addr{s.client.Addr(), s.backend.Addr()} {
			d.lead(to, d.out)
		}
	}
	d.put(bpf.MapXDPDevices, uint32(own), bpf.GatewayXDPDevice{Sends: 1})
	d.put(bpf.MapXDPDevices, uint32(d.out), bpf.GatewayXDPDevice{Mac: [6]byte(d.mac), Sends: 1})
	return d
}

func (d *driven) connect() error {
	if err := os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0); err != nil {
		return err
	}
	pair := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "out", MTU: driverMTU}, PeerName: "end", PeerMTU: uint32(driverMTU)}
	if err := netlink.LinkAdd(pair); err != nil {
		return err
	}
	for _, name := range []string{"end", "out"} {
		l, err := netlink.LinkByName(name)
		if err == nil {
			err = netlink.LinkSetUp(l)
		}
		if err != nil {
			return err
		}
		d.out, d.mac = l.Attrs().Index, l.Attrs().HardwareAddr
	}
	return nil
}

// lead routes an address to a device and adds its neighbour entry.
func (d *driven) lead(to netip.Addr, device int) {
	d.t.Helper()
	if err := d.node.Do(func() error {
		dst, err := netlink.ParseIPNet(netip.PrefixFrom(to, to.BitLen()).String())
		return errors.Join(err,
			netlink.RouteReplace(&netlink.Route{Dst: dst, LinkIndex: device, Scope: netlink.SCOPE_LINK}),
			netlink.NeighSet(&netlink.Neigh{LinkIndex: device, IP: to.AsSlice(), HardwareAddr: nextHop, State: netlink.NUD_PERMANENT}))
	}); err != nil {
		d.t.Fatal(err)
	}
}

// drive runs a program in the namespace.
func (d *driven) drive(prog string, in []byte) (verdict uint32, out []byte) {
	d.t.Helper()
	opts := ebpf.RunOptions{Data: in, DataOut: make([]byte, len(in)+256)}
	if err := d.node.Do(func() (err error) {
		verdict, err = d.coll.Programs[prog].Run(&opts)
		return err
	}); err != nil {
		d.t.Fatalf("run %s on %d bytes: %v", prog, len(in), err)
	}
	return verdict, opts.DataOut
}

// sent expects a frame to be forwarded as another one to the next hop. If its flow is due, the ingress program
// refreshes it first.
func (d *driven) sent(verdict uint32, in, want frame, mac []byte) {
	d.t.Helper()
	want.hops = 63
	for range 100 {
		got, out := d.drive(bpf.ProgGatewayXDP, in.bytes())
		if got == xdpPass {
			d.drive(bpf.ProgGateway, in.bytes())
			continue
		}
		frame := append(append(bytes.Clone(nextHop), mac...), want.bytes()[12:]...)
		if diff := cmp.Diff(frame, out); diff != "" || got != verdict {
			d.t.Errorf("verdict %d, want %d; frame (-want +got):\n%s", got, verdict, diff)
		}
		return
	}
	d.t.Errorf("%v from %s to %s is never forwarded", in.proto, in.src, in.dst)
}

// left expects a frame to be passed unchanged.
func (d *driven) left(what string, in []byte) {
	d.t.Helper()
	if verdict, out := d.drive(bpf.ProgGatewayXDP, in); verdict != xdpPass || !bytes.Equal(in, out) {
		d.t.Errorf("%s: verdict %d, changed %t; want it passed unchanged", what, verdict, !bytes.Equal(in, out))
	}
}

// begin creates a flow that was answered, with source or the client's own address. It returns frames of the flow and
// their translations.
func (d *driven) begin(s side, proto uint8, source netip.Addr) (there, thereWant, back, backWant frame) {
	d.t.Helper()
	d.balance(1, proto, s.vip, s.backend, source)
	known := s.client
	if source.IsValid() {
		known = netip.AddrPortFrom(source, s.client.Port())
	}
	there, back = s.opening(proto), s.answer(proto).to(known)
	d.drive(bpf.ProgGateway, there.bytes())
	d.drive(bpf.ProgGateway, back.bytes())
	if proto == tcp {
		past := uint32(len(there.payload) + 1) // the handshake's numbers begin with 0, and both packets carry data
		there.flags, there.seq, there.ack = ack, past, past
		back.flags, back.seq, back.ack = ack, past, past
	}
	d.drive(bpf.ProgGateway, there.bytes())
	return there, there.to(s.backend).from(known), back, back.from(s.vip).to(s.client)
}

// A frame of an established flow leaves by the driver with the right addresses, ports and checksums, in both
// directions, whether its source is kept or becomes the VIP. A wrong checksum stays wrong.
func TestXDPForwards(t *testing.T) {
	d := newDriven(t)
	for family, s := range sides {
		for transport, proto := range map[string]uint8{"TCP": tcp, "UDP": udp} {
			for way, source := range map[string]netip.Addr{"routed": {}, "by the VIP": s.vip.Addr()} {
				t.Run(family+" "+transport+" "+way, func(t *testing.T) {
					d.t = t
					d.clearFlows()
					there, thereWant, back, backWant := d.begin(s, proto, source)
					for _, wrong := range []uint16{0, 0x1234} {
						there.wrong, thereWant.wrong, back.wrong, backWant.wrong = wrong, wrong, wrong, wrong
						d.sent(xdpRedirect, there, thereWant, d.mac)
						d.sent(xdpRedirect, back, backWant, d.mac)
					}
					if proto == udp {
						there.noCheck, thereWant.noCheck = true, true
						d.sent(xdpRedirect, there, thereWant, d.mac)
					}
					before := d.counted()
					d.left("a frame that is cut", there.bytes()[:40])
					if n := d.counted() - before; n != 0 {
						t.Errorf("%d frames are counted that were not forwarded", n)
					}
					d.sent(xdpRedirect, back, backWant, d.mac)
					if n := d.counted() - before; n != 1 {
						t.Errorf("%d frames are counted, want one", n)
					}
				})
			}
		}
	}
}

// counted returns how many frames were forwarded.
func (d *driven) counted() (n uint64) {
	d.t.Helper()
	var each []uint64
	if err := d.coll.Maps[bpf.MapXDPSent].Lookup(uint32(0), &each); err != nil {
		d.t.Fatal(err)
	}
	for _, sent := range each {
		n += sent
	}
	return n
}

// A frame whose route leads back to its own device is sent there.
func TestXDPForwardsBack(t *testing.T) {
	d := newDriven(t)
	for _, s := range sides {
		d.lead(s.backend.Addr(), own)
		there, want, _, _ := d.begin(s, udp, netip.Addr{})
		d.sent(xdpTx, there, want, make([]byte, 6))
	}
}

// Frames that the program cannot handle, or might handle wrongly, are passed unchanged.
func TestXDPPasses(t *testing.T) {
	d := newDriven(t)
	for family, s := range sides {
		for transport, proto := range map[string]uint8{"TCP": tcp, "UDP": udp} {
			there, want, back, _ := d.begin(s, proto, netip.Addr{})
			spoiled := map[string]func(*frame){
				"no hop left": func(f *frame) { f.hops = 1 }, "a VLAN tag": func(f *frame) { f.vlan = []int{7} },
				"a first fragment": func(f *frame) { f.more, f.id = true, 9 }, "a later fragment": func(f *frame) { f.offset, f.id = 8, 9 },
				"extensions":         func(f *frame) { f.options, f.exts = []byte{1, 1, 1, 0}, []ext{{unix.IPPROTO_HOPOPTS, make([]byte, 6)}} },
				"larger":             func(f *frame) { f.payload = make([]byte, driverMTU) },
				"of no flow":         func(f *frame) { f.src = netip.AddrPortFrom(f.src.Addr(), 1) },
				"to another address": func(f *frame) { f.dst = s.elsewhere },
				"another one":        func(f *frame) { f.proto = sctp },
			}
			if proto == tcp {
				for name, flag := range map[string]uint8{"SYN": syn, "FIN": fin | ack, "RST": rst} {
					spoiled[name] = func(f *frame) { f.flags = flag }
				}
			}
			for name, spoil := range spoiled {
				d.sent(xdpRedirect, there, want, d.mac)
				f := there
				spoil(&f)
				d.left(family+" "+transport+" "+name, f.bytes())
			}
			d.sent(xdpRedirect, there, want, d.mac)
			d.left(family+" "+transport+" to another machine", append([]byte{2}, there.bytes()[1:]...))
			d.left(family+" "+transport+" without a checksum yet", unsummed(there))
			d.left(family+" "+transport+" without a checksum yet", unsummed(back))
		}
	}
}

// Options are not mistaken for the fields that would follow without them: here the ports of a flow, before a port
// that could be the length of a datagram.
func TestXDPPassesOptions(t *testing.T) {
	d := newDriven(t)
	s := sides["IPv4"]
	s.client = netip.AddrPortFrom(s.client.Addr(), 20)
	there, want, _, _ := d.begin(s, udp, netip.Addr{})
	d.sent(xdpRedirect, there, want, d.mac)
	there.options = []byte{0, 20, 0, 80}
	d.left("options", there.bytes())
}

// unsummed returns a frame whose checksum the device has yet to compute.
func unsummed(f frame) []byte {
	b := f.bytes()
	l4 := f.transport()
	at := len(b) - len(l4) + 16
	if f.proto == udp {
		at = len(b) - len(l4) + 6
	}
	binary.BigEndian.PutUint16(b[at:], uint16(f.pseudo(len(l4))))
	return b
}

// A frame is passed to the ingress program if its flow or its route is not suitable.
func TestXDPPassesFlows(t *testing.T) {
	d := newDriven(t)
	for family, s := range sides {
		for what, spoil := range map[string]func(){
			"not answered":            func() { d.change(func(c *bpf.Conn) { c.State = bpf.ConnOpening }) },
			"due for a check":         func() { d.change(func(c *bpf.Conn) { c.CheckedAt -= 2 }) },
			"on the slow path":        func() { d.change(func(c *bpf.Conn) { c.Flags &^= bpf.ConnFast }) },
			"device unknown":          func() { d.delete(bpf.MapXDPDevices, uint32(own)) },
			"route not by XDP":        func() { d.delete(bpf.MapXDPDevices, uint32(d.out)) },
			"driver does not forward": func() { d.put(bpf.MapXDPDevices, uint32(d.out), bpf.GatewayXDPDevice{}) },
			"no neighbour": func() {
				if err := d.node.Do(func() error {
					return netlink.NeighDel(&netlink.Neigh{LinkIndex: d.out, IP: s.backend.Addr().AsSlice()})
				}); err != nil {
					t.Fatal(err)
				}
			},
		} {
			there, want, _, _ := d.begin(s, tcp, netip.Addr{})
			d.sent(xdpRedirect, there, want, d.mac)
			spoil()
			d.left(family+" "+what, there.bytes())
			d.put(bpf.MapXDPDevices, uint32(own), bpf.GatewayXDPDevice{Sends: 1})
			d.put(bpf.MapXDPDevices, uint32(d.out), bpf.GatewayXDPDevice{Sends: 1})
			d.lead(s.backend.Addr(), d.out)
			d.clearFlows()
		}
	}
}

// change changes all entries of flows.
func (d *driven) change(how func(*bpf.Conn)) {
	d.t.Helper()
	for key, c := range d.flows() {
		how(&c)
		d.put(d.home(key), key, c)
	}
}

// A truncated frame does no harm, and a frame is never sent if its headers claim more than its length.
func TestXDPTruncated(t *testing.T) {
	d := newDriven(t)
	for family, s := range sides {
		for _, proto := range []uint8{tcp, udp} {
			there, want, _, _ := d.begin(s, proto, netip.Addr{})
			d.sent(xdpRedirect, there, want, d.mac)
			whole := there.bytes()
			for n := 14; n < len(whole); n++ {
				d.left(family+" cut", whole[:n])
			}
			padded := append(bytes.Clone(whole), make([]byte, 20)...)
			if verdict, out := d.drive(bpf.ProgGatewayXDP, padded); verdict == xdpRedirect && !bytes.Equal(out[len(whole):], make([]byte, 20)) {
				t.Errorf("%s: padding is changed", family)
			}
		}
	}
}
