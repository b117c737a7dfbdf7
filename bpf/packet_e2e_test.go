package bpf_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// lab is a pod, its node, a router with a narrow link behind it, and a backend:
//
//	pod --- node --- router --- backend
//
// The programs are at both devices of the node. The pod is in no cgroup that the socket path serves: it is only
// served by packets.
type lab struct {
	t                          testing.TB
	path                       *path
	pod, node, router, backend *netlab.Namespace
}

// wire is one link of the lab in one family: the addresses of its left and its right end.
type wire struct{ left, right string }

var wires = map[string][3]wire{
	"IPv4": {{"10.71.1.2/24", "10.71.1.1/24"}, {"10.71.2.1/24", "10.71.2.2/24"}, {"10.71.3.1/24", "10.71.3.2/24"}},
	"IPv6": {{"fd71:1::2/64", "fd71:1::1/64"}, {"fd71:2::1/64", "fd71:2::2/64"}, {"fd71:3::1/64", "fd71:3::2/64"}},
}

// The devices of the lab, by namespace and name.
const (
	podDevice, hostDevice       = "eth0", "pod0"
	uplinkDevice, routerDevice  = "up0", "down0"
	narrowDevice, backendDevice = "narrow0", "eth0"
)

func newLab(t testing.TB) *lab {
	t.Helper()
	l := &lab{t: t, path: newPath(t)}
	for _, ns := range []**netlab.Namespace{&l.pod, &l.node, &l.router, &l.backend} {
		n, err := netlab.NewNamespace()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = n.Close() })
		*ns = n
		l.in(n, func() error {
			// The addresses are unique, and detecting duplicates takes a second for each.
			return errors.Join(
				os.WriteFile("/proc/sys/net/ipv6/conf/default/accept_dad", []byte("0"), 0),
				os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0),
			)
		})
	}
	l.join(l.pod, l.node, podDevice, hostDevice, 0)
	l.join(l.node, l.router, uplinkDevice, routerDevice, 1)
	l.join(l.router, l.backend, narrowDevice, backendDevice, 2)
	for _, w := range wires {
		l.route(l.pod, "", w[0].right)
		l.route(l.node, w[2].left, w[1].right)
		l.route(l.router, w[0].left, w[1].left)
		l.route(l.backend, "", w[2].left)
	}
	return l
}

func (l *lab) in(n *netlab.Namespace, f func() error) {
	l.t.Helper()
	if err := n.Do(f); err != nil {
		l.t.Fatal(err)
	}
}

// join creates wire number i between two namespaces.
func (l *lab) join(left, right *netlab.Namespace, leftName, rightName string, i int) {
	l.t.Helper()
	pair := [2]wire{wires["IPv4"][i], wires["IPv6"][i]}
	err := left.Connect(right, netip.MustParsePrefix(pair[0].left), netip.MustParsePrefix(pair[0].right))
	if err != nil {
		l.t.Fatal(err)
	}
	finish := func(name string, own, other string) error {
		links, err := netlink.LinkList()
		if err != nil {
			return fmt.Errorf("list devices: %w", err)
		}
		dev := links[len(links)-1] // the newest
		addr, err := netlink.ParseAddr(other)
		if err != nil {
			return fmt.Errorf("address %s: %w", other, err)
		}
		addr.Flags = unix.IFA_F_NODAD // otherwise the address is not usable at once
		return errors.Join(netlink.LinkSetDown(dev), netlink.LinkSetName(dev, name), netlink.LinkSetUp(dev), netlink.AddrAdd(dev, addr))
	}
	l.in(left, func() error { return finish(leftName, pair[0].left, pair[1].left) })
	l.in(right, func() error { return finish(rightName, pair[0].right, pair[1].right) })
}

// route adds a route by via to the subnet of dst, or a default route. The prefix of via is ignored.
func (l *lab) route(n *netlab.Namespace, dst, via string) {
	l.t.Helper()
	r := &netlink.Route{Gw: net.IP(netip.MustParsePrefix(via).Addr().AsSlice())}
	if dst != "" {
		p := netip.MustParsePrefix(dst).Masked()
		r.Dst = &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
	} else if r.Gw.To4() == nil {
		r.Dst = &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}
	}
	l.in(n, func() error { return netlink.RouteAdd(r) })
}

// device returns the index of a device.
func (l *lab) device(n *netlab.Namespace, name string) (index int) {
	l.t.Helper()
	l.in(n, func() error {
		dev, err := netlink.LinkByName(name)
		if err != nil {
			return fmt.Errorf("find %s: %w", name, err)
		}
		index = dev.Attrs().Index
		return nil
	})
	return index
}

// hooks holds the programs' places on the node.
var hooks = []struct{ device, ingress, egress string }{
	{hostDevice, bpf.ProgFromClient, bpf.ProgToClient},
	{uplinkDevice, bpf.ProgFromNetwork, bpf.ProgToNetwork},
}

// attachTCX attaches by TCX.
func (l *lab) attachTCX() {
	l.t.Helper()
	for _, h := range hooks {
		index := l.device(l.node, h.device)
		for prog, kind := range map[string]ebpf.AttachType{h.ingress: ebpf.AttachTCXIngress, h.egress: ebpf.AttachTCXEgress} {
			l.in(l.node, func() error {
				a, err := link.AttachTCX(link.TCXOptions{Interface: index, Program: l.path.coll.Programs[prog], Attach: kind})
				if err != nil {
					return fmt.Errorf("attach %s to %s: %w", prog, h.device, err)
				}
				l.t.Cleanup(func() { _ = a.Close() })
				return nil
			})
		}
	}
}

// attachClsact attaches as older kernels require.
func (l *lab) attachClsact() {
	l.t.Helper()
	for _, h := range hooks {
		index := l.device(l.node, h.device)
		l.in(l.node, func() error {
			err := netlink.QdiscAdd(&netlink.GenericQdisc{
				QdiscAttrs: netlink.QdiscAttrs{LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT},
				QdiscType:  "clsact",
			})
			if err != nil {
				return fmt.Errorf("add clsact to %s: %w", h.device, err)
			}
			for prog, parent := range map[string]uint32{h.ingress: netlink.HANDLE_MIN_INGRESS, h.egress: netlink.HANDLE_MIN_EGRESS} {
				err := netlink.FilterAdd(&netlink.BpfFilter{
					FilterAttrs:  netlink.FilterAttrs{LinkIndex: index, Parent: parent, Handle: 1, Priority: 1, Protocol: unix.ETH_P_ALL},
					Fd:           l.path.coll.Programs[prog].FD(),
					Name:         prog,
					DirectAction: true,
				})
				if err != nil {
					return fmt.Errorf("add %s to %s: %w", prog, h.device, err)
				}
			}
			return nil
		})
	}
}

// speedUp stores the devices' roles, so that flows take the fast path.
func (l *lab) speedUp() {
	l.t.Helper()
	l.path.set(bpf.PacketFast)
	l.path.put(bpf.MapDevices, uint32(l.device(l.node, hostDevice)), bpf.Device{Flags: bpf.DevicePeer})
	l.path.put(bpf.MapDevices, uint32(l.device(l.node, uplinkDevice)), bpf.Device{Flags: bpf.DeviceUplink})
}

// backendAddr is the address of the backend's listener, on another port than the VIP's.
func backendAddr(family string) netip.AddrPort {
	return netip.AddrPortFrom(netip.MustParsePrefix(wires[family][2].right).Addr(), 8080)
}

// echo serves TCP and UDP at the backend and returns what it receives, on TCP until the client closes its direction.
func (l *lab) echo(family string) {
	l.t.Helper()
	l.echoAt(l.backend, backendAddr(family))
}

// echoAt serves in any namespace.
func (l *lab) echoAt(n *netlab.Namespace, addr netip.AddrPort) {
	l.t.Helper()
	var listener net.Listener
	var packets net.PacketConn
	l.in(n, func() (err error) {
		config := &net.ListenConfig{}
		config.SetMultipathTCP(false)
		if listener, err = config.Listen(context.Background(), "tcp", addr.String()); err != nil {
			return err
		}
		packets, err = config.ListenPacket(context.Background(), "udp", addr.String())
		return err
	})
	l.t.Cleanup(func() { _ = errors.Join(listener.Close(), packets.Close()) })
	go func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				_, _ = io.Copy(c, c)
				_ = c.Close()
			}()
		}
	}()
	go func() {
		buf := make([]byte, 65536)
		for {
			n, from, err := packets.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = packets.WriteTo(buf[:n], from)
		}
	}()
}

// dial connects from the pod.
func (l *lab) dial(network string, to netip.AddrPort) (net.Conn, error) {
	var c net.Conn
	err := l.pod.Do(func() (err error) {
		d := net.Dialer{Timeout: 5 * time.Second}
		d.SetMultipathTCP(false)
		c, err = d.Dial(network, to.String())
		return err
	})
	if err != nil {
		return nil, err
	}
	return c, c.SetDeadline(time.Now().Add(10 * time.Second))
}

// talk sends payload to a VIP over TCP and expects it back.
func (l *lab) talk(to netip.AddrPort, payload []byte) {
	l.t.Helper()
	c, err := l.dial("tcp", to)
	if err != nil {
		l.t.Fatal(err)
	}
	defer c.Close()
	sent := make(chan error, 1)
	go func() {
		_, err := c.Write(payload)
		sent <- errors.Join(err, c.(*net.TCPConn).CloseWrite())
	}()
	got, err := io.ReadAll(c)
	if err := errors.Join(err, <-sent); err != nil {
		l.t.Fatalf("talk to %s: %v", to, err)
	}
	if !bytes.Equal(got, payload) {
		l.t.Fatalf("%s: %d bytes differ, of %d", to, len(got), len(payload))
	}
}

// ask sends a datagram to a VIP and expects it back.
func (l *lab) ask(to netip.AddrPort, payload []byte) {
	l.t.Helper()
	c, err := l.dial("udp", to)
	if err != nil {
		l.t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write(payload); err != nil {
		l.t.Fatal(err)
	}
	got := make([]byte, len(payload)+1)
	n, err := c.Read(got)
	if err != nil || !bytes.Equal(got[:n], payload) {
		l.t.Fatalf("%s: %d bytes came back of %d, %v", to, n, len(payload), err)
	}
}

// flow returns the client's direction of some flow to the VIP.
func (l *lab) flow(vip netip.AddrPort, proto uint8) bpf.Conn {
	l.t.Helper()
	for key, c := range l.path.flows() {
		if key.Reply == 0 && key.Server == bpf.Addr16(vip.Addr()) && key.Proto == proto {
			return c
		}
	}
	l.t.Fatalf("no flow to %s", vip)
	return bpf.Conn{}
}

// onBothPaths runs a test on the slow path and on the fast path, each in a lab that prepare has attached programs in, and there in
// each family. Its t is that of the lab.
func onBothPaths(t *testing.T, prepare func(*lab), each func(l *lab, family string, s side, fast bool)) {
	t.Helper()
	for speed, fast := range map[string]bool{"slow": false, "fast": true} {
		t.Run(speed, func(t *testing.T) {
			l := newLab(t)
			prepare(l)
			if fast {
				l.speedUp()
			}
			for family, s := range sides {
				t.Run(family, func(t *testing.T) {
					l.t, l.path.t = t, t
					l.path.addRange(s.ranges)
					each(l, family, s, fast)
				})
			}
		})
	}
}

func TestPacketEndToEnd(t *testing.T) {
	for attachment, attach := range map[string]func(*lab){"TCX": (*lab).attachTCX, "clsact": (*lab).attachClsact} {
		t.Run(attachment, func(t *testing.T) {
			onBothPaths(t, attach, func(l *lab, family string, s side, fast bool) {
				l.path.serve(1, tcp, s.vip, backendAddr(family))
				l.path.serve(2, udp, s.vip, backendAddr(family))
				l.echo(family)
				l.talkAndAsk(family, s.vip, fast)
			})
		})
	}
}

// The node's netfilter sees no packet of a flow on the fast path, not even of large packets that the pod's device
// segments: half a flow would be an invalid connection there.
func TestPacketEndNetfilterSeesNoFastFlow(t *testing.T) {
	l := newLab(t)
	l.attachTCX()
	l.speedUp()
	nft := func(args ...string) (out []byte) {
		t.Helper()
		l.in(l.node, func() (err error) {
			out, err = exec.CommandContext(t.Context(), "nft", args...).Output()
			return err
		})
		return out
	}
	nft("add table inet seen; add counter inet seen forwarded; add chain inet seen forward { type filter hook forward priority 0; }; " +
		"add rule inet seen forward meta l4proto tcp counter name forwarded")
	for family, s := range sides {
		l.path.addRange(s.ranges)
		l.path.serve(1, tcp, s.vip, backendAddr(family))
		l.echo(family)
		l.talk(s.vip, []byte("lets the neighbours find each other"))
		nft("reset", "counter", "inet", "seen", "forwarded")
		l.talk(s.vip, make([]byte, 4<<20))
		if out := nft("list", "counter", "inet", "seen", "forwarded"); !bytes.Contains(out, []byte("packets 0 ")) {
			t.Errorf("%s: the node forwards some of it:\n%s", family, out)
		}
	}
}

// A pod that also connects to the backend directly reuses ports that it just used through a VIP. The test leaves it
// few ports, so that this happens nearly every time.
func TestPacketEndDirectConnection(t *testing.T) {
	const ports, connections = 64, 48
	fewPorts := func(l *lab) {
		l.attachTCX()
		l.in(l.pod, func() error {
			return os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", fmt.Appendf(nil, "40000 %d", 40000+ports-1), 0)
		})
	}
	onBothPaths(t, fewPorts, func(l *lab, family string, s side, _ bool) {
		l.path.serve(1, tcp, s.vip, backendAddr(family))
		l.echo(family)
		for range connections {
			l.talk(s.vip, []byte("by the VIP"))
			l.talk(backendAddr(family), []byte("by itself"))
		}
	})
}

// A packet from a pod has a checksum that the device has yet to compute, and so has a reply made of it. If the way
// back is a wire that computes none, the kernel does.
func TestPacketEndRefusalOnWire(t *testing.T) {
	l := newLab(t)
	l.attachTCX()
	l.in(l.node, func() error { return leaveChecksums(hostDevice) })
	for family, s := range sides {
		t.Run(family, func(t *testing.T) {
			l.t, l.path.t = t, t
			l.path.addRange(s.ranges)
			if _, err := l.dial("tcp", s.vip); !errors.Is(err, unix.ECONNREFUSED) {
				t.Errorf("TCP: %v", err)
			}
			c, err := l.dial("udp", s.vip)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			_, _ = c.Write([]byte("odd"))
			if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNREFUSED) {
				t.Errorf("UDP: %v", err)
			}
		})
	}
}

// New flows of a client take the route that an earlier flow found, and soon the new route after a change.
func TestPacketEndOtherRouter(t *testing.T) {
	others := map[string]string{"IPv4": "10.71.2.3/24", "IPv6": "fd71:2::3/64"}
	l := newLab(t)
	l.attachTCX()
	l.speedUp()
	for family, s := range sides {
		t.Run(family, func(t *testing.T) {
			l.t, l.path.t = t, t
			pin(t) // each CPU has its own route cache
			l.path.addRange(s.ranges)
			l.path.serve(1, udp, s.vip, backendAddr(family))
			l.echo(family)
			l.ask(s.vip, []byte("by the first router"))
			l.in(l.router, func() error {
				dev, err := netlink.LinkByName(routerDevice)
				if err != nil {
					return fmt.Errorf("find %s: %w", routerDevice, err)
				}
				addr, err := netlink.ParseAddr(others[family])
				if err != nil {
					return err
				}
				addr.Flags = unix.IFA_F_NODAD // otherwise the address is not usable at once
				return netlink.AddrAdd(dev, addr)
			})
			other := netip.MustParsePrefix(others[family]).Addr()
			behind := netip.MustParsePrefix(wires[family][2].left).Masked()
			l.in(l.node, func() error {
				return netlink.RouteReplace(&netlink.Route{
					Dst: &net.IPNet{IP: behind.Addr().AsSlice(), Mask: net.CIDRMask(behind.Bits(), behind.Addr().BitLen())}, Gw: other.AsSlice(),
				})
			})
			for deadline := time.Now().Add(time.Minute); !l.goes(s.vip, other); {
				if time.Now().After(deadline) {
					t.Fatalf("no new flow is routed by %s", other)
				}
				l.path.clearFlows() // known flows look up their own route
				l.ask(s.vip, []byte("by the other"))
			}
		})
	}
}

// pin keeps the test and its packets on one CPU.
func pin(t *testing.T) {
	t.Helper()
	runtime.LockOSThread()
	t.Cleanup(runtime.UnlockOSThread)
	var before, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		t.Fatal(err)
	}
	for cpu := 0; one.Count() == 0; cpu++ {
		if before.IsSet(cpu) {
			one.Set(cpu)
		}
	}
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.SchedSetaffinity(0, &before) })
}

// goes reports whether a flow to the VIP is routed through a router.
func (l *lab) goes(vip netip.AddrPort, router netip.Addr) bool {
	l.t.Helper()
	for key, c := range l.path.flows() {
		if key.Reply == 0 && key.Server == bpf.Addr16(vip.Addr()) && bytes.HasPrefix(c.Via[:], router.AsSlice()) {
			return true
		}
	}
	return false
}

// A checksum that is incomplete during translation is correct once computed: here by the kernel, for the wire to the
// backend and for the one back to the pod.
func TestPacketEndChecksumOnWire(t *testing.T) {
	wires := func(l *lab) {
		l.attachTCX()
		l.in(l.node, func() error { return errors.Join(leaveChecksums(hostDevice), leaveChecksums(uplinkDevice)) })
	}
	onBothPaths(t, wires, func(l *lab, family string, s side, _ bool) {
		l.path.serve(1, tcp, s.vip, backendAddr(family))
		l.path.serve(2, udp, s.vip, backendAddr(family))
		l.echo(family)
		l.talk(s.vip, []byte("odd"))
		l.ask(s.vip, []byte("odd"))
	})
}

// leaveChecksums turns off checksum offload of a device, so that the kernel computes them: `ethtool -K NAME tx off`.
func leaveChecksums(name string) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return fmt.Errorf("make socket: %w", err)
	}
	defer unix.Close(fd)
	value := struct{ command, data uint32 }{unix.ETHTOOL_STXCSUM, 0}
	request := struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte
	}{data: unsafe.Pointer(&value)}
	copy(request.name[:], name)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request))); errno != 0 {
		return fmt.Errorf("turn checksums of %s off: %w", name, errno)
	}
	return nil
}

// A pod may be its own backend.
func TestPacketEndToItself(t *testing.T) {
	for attachment, attach := range map[string]func(*lab){"TCX": (*lab).attachTCX, "clsact": (*lab).attachClsact} {
		t.Run(attachment, func(t *testing.T) {
			l := newLab(t)
			attach(l)
			l.speedUp()
			for family, s := range sides {
				t.Run(family, func(t *testing.T) {
					l.t, l.path.t = t, t
					pod := netip.AddrPortFrom(netip.MustParsePrefix(wires[family][0].left).Addr(), 8080)
					l.path.addRange(s.ranges)
					l.path.serve(1, tcp, s.vip, pod)
					l.path.serve(2, udp, s.vip, pod)
					l.echoAt(l.pod, pod)
					l.talk(s.vip, []byte("hello"))
					l.talk(s.vip, make([]byte, 4<<20))
					l.ask(s.vip, []byte("again"))
					l.ask(s.vip, make([]byte, 4000)) // in fragments
					closed := netip.AddrPortFrom(s.vip.Addr(), 7)
					l.path.serve(3, udp, closed, netip.AddrPortFrom(pod.Addr(), 9))
					c, err := l.dial("udp", closed)
					if err != nil {
						t.Fatal(err)
					}
					defer c.Close()
					_, _ = c.Write([]byte("?"))
					if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNREFUSED) {
						t.Errorf("UDP to a port closed at the pod itself: %v", err)
					}
					l.path.wantRefusals(map[string]uint64{})
				})
			}
		})
	}
}

// talkAndAsk checks what works through a VIP, and what is refused.
func (l *lab) talkAndAsk(family string, vip netip.AddrPort, fast bool) {
	l.t.Helper()
	l.ask(vip, []byte("first")) // also resolves the neighbours
	l.talk(vip, []byte("hello"))
	l.talk(vip, make([]byte, 4<<20))
	l.ask(vip, []byte("again"))
	l.ask(vip, nil)
	for _, proto := range []uint8{tcp, udp} {
		if got := l.flow(vip, proto).Flags&bpf.ConnFast != 0; got != fast {
			l.t.Errorf("protocol %d: fast %v, want %v", proto, got, fast)
		}
	}
	if got := l.flow(vip, tcp).State; got < bpf.ConnHalf {
		l.t.Errorf("a closed connection is in state %d", got)
	}
	l.ask(vip, make([]byte, 4000)) // in fragments
	nowhere := netip.AddrPortFrom(vip.Addr(), 1)
	if _, err := l.dial("tcp", nowhere); !errors.Is(err, unix.ECONNREFUSED) {
		l.t.Errorf("TCP to a port without a frontend: %v", err)
	}
	c, err := l.dial("udp", nowhere)
	if err != nil {
		l.t.Fatal(err)
	}
	defer c.Close()
	_, _ = c.Write([]byte("?"))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNREFUSED) {
		l.t.Errorf("UDP to a port without a frontend: %v", err)
	}
	// For a closed port of the backend the error comes from the backend, as if from the VIP.
	closed := netip.AddrPortFrom(vip.Addr(), 7)
	l.path.serve(3, udp, closed, netip.AddrPortFrom(backendAddr(family).Addr(), 9))
	if c, err = l.dial("udp", closed); err != nil {
		l.t.Fatal(err)
	}
	defer c.Close()
	_, _ = c.Write([]byte("?"))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNREFUSED) {
		l.t.Errorf("UDP to a port closed at the backend: %v", err)
	}
	l.narrow(vip)
}

// narrow lowers the MTU between router and backend below what the pod can know. The router reports it in ICMP errors
// about packets to the backend, and the pod's sockets to the VIP must understand them. The route is narrow and not
// the device, which would also drop larger packets from the backend.
func (l *lab) narrow(vip netip.AddrPort) {
	l.t.Helper()
	family := "IPv4"
	if vip.Addr().Is6() {
		family = "IPv6"
	}
	way := &netlink.Route{
		LinkIndex: l.device(l.router, narrowDevice), Dst: netlink.NewIPNet(backendAddr(family).Addr().AsSlice()), MTU: 1300,
	}
	l.in(l.router, func() error { return netlink.RouteAdd(way) })
	l.talk(vip, make([]byte, 1<<20))
	if got := l.routeMTU(vip.Addr()); got != 1300 {
		l.t.Errorf("the pod has a path MTU of %d to the VIP, want 1300", got)
	}
}

// routeMTU returns the path MTU that the pod has learnt for an address.
func (l *lab) routeMTU(to netip.Addr) (mtu int) {
	l.t.Helper()
	l.in(l.pod, func() error {
		family, level, option := unix.AF_INET, unix.IPPROTO_IP, unix.IP_MTU
		var name unix.Sockaddr = &unix.SockaddrInet4{Addr: [4]byte(to.AsSlice()[:4]), Port: 1}
		if to.Is6() {
			family, level, option = unix.AF_INET6, unix.IPPROTO_IPV6, unix.IPV6_MTU
			name = &unix.SockaddrInet6{Addr: to.As16(), Port: 1}
		}
		fd, err := unix.Socket(family, unix.SOCK_DGRAM, 0)
		if err != nil {
			return fmt.Errorf("make socket: %w", err)
		}
		defer unix.Close(fd)
		if err := unix.Connect(fd, name); err != nil {
			return fmt.Errorf("connect to %s: %w", to, err)
		}
		mtu, err = unix.GetsockoptInt(fd, level, option)
		return err
	})
	return mtu
}
