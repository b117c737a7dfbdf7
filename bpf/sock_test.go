package bpf_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/bpf/lb/lbtest"
	cs "github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// The kernel cannot test-run these programs, because PROG_TEST_RUN has no socket addresses. The tests below therefore
// use real sockets in a cgroup and a loopback device of their own.

func TestMain(m *testing.M) {
	if vip := os.Getenv(childDials); vip != "" {
		os.Exit(dialAsChild(vip))
	}
	os.Exit(netlab.Main(m))
}

// node is a node with the programs attached.
type node struct {
	t    *testing.T
	dp   *datapath.Datapath
	fs   string
	want lb.State
	ids  map[lb.Address]uint32 // of frontends and backends
}

func newNode(t *testing.T) *node {
	t.Helper()
	n := &node{t: t, fs: netlab.BPFFS(t), want: lb.NewState(), ids: map[lb.Address]uint32{}}
	dp, err := datapath.Open(t.Context(), datapath.Config{CgroupRoot: netlab.NewTestCgroup(t).Path, BPFFS: n.fs}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = dp.Close() })
	n.dp = dp
	n.change(func(*lb.State) {}) // adopts what the kernel's maps hold
	return n
}

// vip is a Service with one VIP and port, and its backends.
type vip struct {
	addr     string // "243.0.0.5:80"
	proto    cs.Protocol
	backends []netip.AddrPort
}

// The Services of vips are numbered from firstService on, in order, and all backends belong to testCluster.
const (
	firstService = lb.ServiceID(1)
	testCluster  = lb.ClusterIndex(3)
)

// serve makes the node serve vips and nothing else.
func (n *node) serve(vips ...vip) {
	n.t.Helper()
	n.change(func(s *lb.State) {
		*s = lb.NewState()
		s.Clusters[testCluster] = "a"
		for i, v := range vips {
			service := firstService + lb.ServiceID(i)
			s.Services[service] = cs.ServiceName{Namespace: "demo", Name: fmt.Sprint("s", i)}
			at := lb.Address{AddrPort: netip.MustParseAddrPort(v.addr), Protocol: v.proto}
			fe := lb.Frontend{ID: lb.FrontendID(n.id(at)), Count: uint32(len(v.backends)), Service: service}
			s.Frontends[at] = fe
			for slot, b := range v.backends {
				id := n.backend(b, v.proto)
				s.Backends[id] = lb.Backend{Address: lb.Address{AddrPort: b, Protocol: v.proto}, Cluster: testCluster}
				s.Slots[lb.Slot{Frontend: fe.ID, Index: uint32(slot)}] = id
			}
		}
	})
}

// change makes the maps hold what f makes of their current state.
func (n *node) change(f func(*lb.State)) {
	n.t.Helper()
	f(&n.want)
	have, err := n.dp.Load(n.t.Context())
	if err != nil {
		n.t.Fatal(err)
	}
	if err := n.dp.Apply(n.t.Context(), lbtest.Diff(have, n.want.Clone())); err != nil {
		n.t.Fatal(err)
	}
}

// changeFrontends calls change for every frontend.
func (n *node) changeFrontends(f func(*lb.Frontend)) {
	n.t.Helper()
	n.change(func(s *lb.State) {
		for at, fe := range s.Frontends {
			f(&fe)
			s.Frontends[at] = fe
		}
	})
}

func (n *node) id(a lb.Address) uint32 {
	if _, ok := n.ids[a]; !ok {
		n.ids[a] = uint32(len(n.ids) + 1)
	}
	return n.ids[a]
}

func (n *node) backend(b netip.AddrPort, proto cs.Protocol) lb.BackendID {
	return lb.BackendID(n.id(lb.Address{AddrPort: b, Protocol: proto}))
}

// pinned opens a map of the node directly.
func (n *node) pinned(name string) *ebpf.Map {
	n.t.Helper()
	m, err := ebpf.LoadPinnedMap(mapPath(n.fs, name), nil)
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { _ = m.Close() })
	return m
}

func mapPath(fs, name string) string {
	return filepath.Join(fs, "isthmus", fmt.Sprintf("maps-v%d", bpf.ABIVersion), name)
}

func (n *node) refusals(r bpf.DropReason) uint64 {
	n.t.Helper()
	counts, err := n.dp.Refusals()
	if err != nil {
		n.t.Fatal(err)
	}
	total := uint64(0)
	for of, n := range counts {
		if of.Reason == r {
			total += n
		}
	}
	return total
}

// tcpServer answers every connection with its own address and closes it.
func tcpServer(t *testing.T, host string) netip.AddrPort {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	self := l.Addr().(*net.TCPAddr).AddrPort()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, self.String())
			_ = c.Close()
		}
	}()
	return self
}

// udpServer answers every datagram with its own address.
func udpServer(t *testing.T, host string) netip.AddrPort {
	t.Helper()
	c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(host), 0)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	self := c.LocalAddr().(*net.UDPAddr).AddrPort()
	go func() {
		buf := make([]byte, 64)
		for {
			_, from, err := c.ReadFromUDPAddrPort(buf)
			if err != nil {
				return
			}
			_, _ = c.WriteToUDPAddrPort([]byte(self.String()), from)
		}
	}()
	return self
}

// socket is a plain file descriptor: net.Conn would hide the results of getpeername and recvfrom.
type socket struct {
	t      *testing.T
	fd     int
	family int
	close  func() // safe to call twice
}

// newSocket returns a socket with a timeout, so that no test hangs.
func newSocket(t *testing.T, family, kind, proto int) socket {
	t.Helper()
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, proto)
	if err != nil {
		t.Fatal(err)
	}
	s := socket{t, fd, family, sync.OnceFunc(func() { _ = unix.Close(fd) })}
	t.Cleanup(s.close)
	for _, opt := range []int{unix.SO_RCVTIMEO, unix.SO_SNDTIMEO} {
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, opt, &unix.Timeval{Sec: 5}); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// name returns addr in the form that the socket's family requires: IPv4 becomes IPv4-mapped on an IPv6 socket.
func (s socket) name(addr netip.AddrPort) unix.Sockaddr {
	if s.family == unix.AF_INET {
		return &unix.SockaddrInet4{Addr: addr.Addr().As4(), Port: int(addr.Port())}
	}
	return &unix.SockaddrInet6{Addr: addr.Addr().As16(), Port: int(addr.Port())}
}

// connect waits for the result even if a signal interrupts the call, which Go's runtime does often.
func (s socket) connect(addr netip.AddrPort) error {
	err := unix.Connect(s.fd, s.name(addr))
	if !errors.Is(err, unix.EINTR) {
		return err
	}
	err = again(s.t, func() error {
		_, err := unix.Poll([]unix.PollFd{{Fd: int32(s.fd), Events: unix.POLLOUT}}, 5000)
		return err
	})
	if err != nil {
		s.t.Fatal(err)
	}
	errno, err := unix.GetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err != nil {
		s.t.Fatal(err)
	}
	if errno != 0 {
		return unix.Errno(errno)
	}
	return nil
}

func (s socket) send(to netip.AddrPort) error {
	return again(s.t, func() error { return unix.Sendto(s.fd, []byte("?"), 0, s.name(to)) })
}

// again calls f until no signal interrupts it, a bounded number of times.
func again(t *testing.T, f func() error) error {
	t.Helper()
	for range 1000 {
		if err := f(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
	t.Fatal("interrupted a thousand times")
	return nil
}

func (s socket) mustConnect(addr string) {
	s.t.Helper()
	if err := s.connect(netip.MustParseAddrPort(addr)); err != nil {
		s.t.Fatalf("connect to %s: %v", addr, err)
	}
}

func (s socket) peer() netip.AddrPort {
	s.t.Helper()
	sa, err := unix.Getpeername(s.fd)
	if err != nil {
		s.t.Fatal(err)
	}
	return addrPort(s.t, sa)
}

// read returns the next bytes and, for datagrams, their sender.
func (s socket) read() (string, netip.AddrPort) {
	s.t.Helper()
	buf := make([]byte, 64)
	var n int
	var from unix.Sockaddr
	err := again(s.t, func() (err error) {
		n, from, err = unix.Recvfrom(s.fd, buf, 0)
		return err
	})
	if err != nil {
		s.t.Fatalf("receive: %v", err)
	}
	if from == nil {
		return string(buf[:n]), netip.AddrPort{}
	}
	return string(buf[:n]), addrPort(s.t, from)
}

func addrPort(t *testing.T, sa unix.Sockaddr) netip.AddrPort {
	t.Helper()
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr).Unmap(), uint16(sa.Port))
	default:
		t.Fatalf("socket address of type %T", sa)
		return netip.AddrPort{}
	}
}

// families holds the ways in which an application can address a VIP.
var families = map[string]struct {
	family  int
	vip     string // without port
	backend string
}{
	"IPv4":        {unix.AF_INET, "243.0.0.5", "127.0.0.1"},
	"IPv6":        {unix.AF_INET6, "fd00:243:1:2:3:4:5:6", "::1"},
	"IPv4-mapped": {unix.AF_INET6, "243.0.0.5", "127.0.0.1"}, // a dual-stack socket
}

func on(host string, port int) string { return net.JoinHostPort(host, fmt.Sprint(port)) }

func TestTCPConnect(t *testing.T) {
	for name, way := range families {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			var backends []netip.AddrPort
			for range 3 {
				backends = append(backends, tcpServer(t, way.backend))
			}
			n.serve(vip{on(way.vip, 80), cs.TCP, backends})

			hits := map[string]int{}
			for range 120 {
				s := newSocket(t, way.family, unix.SOCK_STREAM, 0)
				s.mustConnect(on(way.vip, 80))
				if got := s.peer().String(); got != on(way.vip, 80) {
					t.Fatalf("getpeername returns %s, want the VIP", got)
				}
				answer, _ := s.read()
				hits[answer]++
			}
			for _, b := range backends {
				// 120 tries with a probability of 1/3: fewer than 10 hits happen once in a hundred million runs.
				if hits[b.String()] < 10 {
					t.Errorf("backend %s hit %d of 120 times: %v", b, hits[b.String()], hits)
				}
			}
		})
	}
}

func TestUDPConnected(t *testing.T) {
	for name, way := range families {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			backend := udpServer(t, way.backend)
			n.serve(vip{on(way.vip, 53), cs.UDP, []netip.AddrPort{backend}})
			s := newSocket(t, way.family, unix.SOCK_DGRAM, 0)
			s.mustConnect(on(way.vip, 53))
			if got := s.peer().String(); got != on(way.vip, 53) {
				t.Errorf("getpeername returns %s, want the VIP", got)
			}
			for range 3 {
				if err := again(t, func() error { return unix.Send(s.fd, []byte("?"), 0) }); err != nil {
					t.Fatal(err)
				}
				answer, from := s.read()
				if answer != backend.String() || from.String() != on(way.vip, 53) {
					t.Errorf("%s answered as %s, want %s as the VIP", answer, from, backend)
				}
			}
		})
	}
}

// One socket queries two VIPs in turn, as a resolver does. Each reply must name its VIP, and each VIP keeps its
// backend while the sets of backends do not change.
func TestUDPUnconnected(t *testing.T) {
	for name, way := range families {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			servers := map[int][]netip.AddrPort{53: nil, 54: nil}
			for range 4 {
				servers[53] = append(servers[53], udpServer(t, way.backend))
				servers[54] = append(servers[54], udpServer(t, way.backend))
			}
			n.serve(vip{on(way.vip, 53), cs.UDP, servers[53]}, vip{on(way.vip, 54), cs.UDP, servers[54]})

			used := map[int]map[string]bool{53: {}, 54: {}}
			for range 8 {
				s := newSocket(t, way.family, unix.SOCK_DGRAM, 0)
				sticky := map[int]string{}
				for i := range 20 {
					port := 53 + i%2
					if err := s.send(netip.MustParseAddrPort(on(way.vip, port))); err != nil {
						t.Fatal(err)
					}
					answer, from := s.read()
					if from.String() != on(way.vip, port) {
						t.Fatalf("the answer comes from %s, want %s", from, on(way.vip, port))
					}
					if before, ok := sticky[port]; ok && before != answer {
						t.Fatalf("%s was served by %s and then by %s", from, before, answer)
					}
					sticky[port] = answer
					used[port][answer] = true
				}
			}
			for port, servers := range used {
				if len(servers) < 2 {
					t.Errorf("8 sockets all went to the same one of 4 backends of port %d", port)
				}
			}
		})
	}
}

// pairs returns the number of entries in udp_vips, and how many were ever added.
func (n *node) pairs() (held int, added uint64) {
	n.t.Helper()
	if err := n.pinned(bpf.MapUDPVIPsAdded).Lookup(uint32(0), &added); err != nil {
		n.t.Fatal(err)
	}
	var k [32]byte
	var v [20]byte
	entries := n.pinned(bpf.MapUDPVIPs).Iterate()
	for entries.Next(&k, &v) {
		held++
	}
	if err := entries.Err(); err != nil {
		n.t.Fatal(err)
	}
	return held, added
}

// Only sockets with more than one VIP use the LRU map udp_vips. Added entries are counted, so the difference to the
// present ones is the number of evictions. A socket whose entry was evicted adds it again.
func TestUDPPairs(t *testing.T) {
	for name, way := range families {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			var vips []vip
			for port := 53; port < 57; port++ {
				vips = append(vips, vip{on(way.vip, port), cs.UDP, []netip.AddrPort{udpServer(t, way.backend)}})
			}
			n.serve(vips...)
			s := newSocket(t, way.family, unix.SOCK_DGRAM, 0)
			ask := func(to string) {
				t.Helper()
				if err := s.send(netip.MustParseAddrPort(to)); err != nil {
					t.Fatal(err)
				}
				if _, from := s.read(); from.String() != to {
					t.Errorf("the answer comes from %s, want %s", from, to)
				}
			}
			want := func(held int, added uint64) {
				t.Helper()
				if h, a := n.pairs(); h != held || a != added {
					t.Errorf("%d pairs held, %d ever added, want %d and %d", h, a, held, added)
				}
			}
			for range 3 {
				ask(vips[0].addr)
			}
			want(0, 0)
			for range 3 {
				for _, v := range vips {
					ask(v.addr)
				}
			}
			want(3, 3)
			var k [32]byte
			if err := n.pinned(bpf.MapUDPVIPs).NextKey(nil, &k); err != nil {
				t.Fatal(err)
			}
			if err := n.pinned(bpf.MapUDPVIPs).Delete(k); err != nil { // as if it had been evicted
				t.Fatal(err)
			}
			want(2, 3)
			for _, v := range vips {
				ask(v.addr)
			}
			want(3, 4)
		})
	}
}

// Two VIPs may have one backend. A connected socket always returns its own VIP. An unconnected one returns the later
// one, since the datagram does not say.
func TestTwoVIPsOfOneBackend(t *testing.T) {
	for name, way := range families {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			backend := udpServer(t, way.backend)
			a, b := on(way.vip, 53), on(way.vip, 54)
			n.serve(vip{a, cs.UDP, []netip.AddrPort{backend}}, vip{b, cs.UDP, []netip.AddrPort{backend}})
			s := newSocket(t, way.family, unix.SOCK_DGRAM, 0)
			for _, to := range []string{a, b, b, a, b} {
				if err := s.send(netip.MustParseAddrPort(to)); err != nil {
					t.Fatal(err)
				}
				if _, from := s.read(); from.String() != to {
					t.Errorf("unconnected: %s answers as %s", to, from)
				}
			}
			for _, to := range []string{a, b, a} {
				s.mustConnect(to)
				if err := again(t, func() error { return unix.Send(s.fd, []byte("?"), 0) }); err != nil {
					t.Fatal(err)
				}
				if _, from := s.read(); from.String() != to || s.peer().String() != to {
					t.Errorf("connected: %s answers as %s, getpeername returns %s", to, from, s.peer())
				}
			}
			if err := disconnect(s.fd); err != nil {
				t.Fatal(err)
			}
			if err := s.send(netip.MustParseAddrPort(b)); err != nil {
				t.Fatal(err)
			}
			if _, from := s.read(); from.String() != b {
				t.Errorf("after it was connected to %s: %s answers as %s", a, b, from)
			}
		})
	}
}

// Until the first send to a VIP, a plain address keeps its own name, and the same socket may use both.
func TestUDPToVIPAndToPlainAddress(t *testing.T) {
	n := newNode(t)
	behind, plain := udpServer(t, "127.0.0.1"), udpServer(t, "127.0.0.1")
	n.serve(vip{"243.0.0.5:53", cs.UDP, []netip.AddrPort{behind}})
	s := newSocket(t, unix.AF_INET, unix.SOCK_DGRAM, 0)
	for _, to := range []string{plain.String(), "243.0.0.5:53", plain.String(), "243.0.0.5:53"} {
		if err := s.send(netip.MustParseAddrPort(to)); err != nil {
			t.Fatal(err)
		}
		if _, from := s.read(); from.String() != to {
			t.Errorf("%s answered as %s", to, from)
		}
	}
}

// A socket that is connected to a VIP may name it again in every send. Its datagrams must go to the connected
// backend, since the kernel drops packets from any other.
func TestUDPConnectedSendToVIP(t *testing.T) {
	for name, way := range families {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			var backends []netip.AddrPort
			for range 4 {
				backends = append(backends, udpServer(t, way.backend))
			}
			n.serve(vip{on(way.vip, 53), cs.UDP, backends})
			for range 8 {
				s := newSocket(t, way.family, unix.SOCK_DGRAM, 0)
				s.mustConnect(on(way.vip, 53))
				if err := s.send(netip.MustParseAddrPort(on(way.vip, 53))); err != nil {
					t.Fatal(err)
				}
				if _, from := s.read(); from.String() != on(way.vip, 53) {
					t.Errorf("the answer comes from %s, want the VIP", from)
				}
			}
		})
	}
}

// Connecting to another address in between does not make a socket forget the VIPs of its unconnected sends.
func TestUDPUnconnectedAfterConnect(t *testing.T) {
	n := newNode(t)
	behind, plain := udpServer(t, "127.0.0.1"), udpServer(t, "127.0.0.1")
	n.serve(vip{"243.0.0.5:53", cs.UDP, []netip.AddrPort{behind}})
	s := newSocket(t, unix.AF_INET, unix.SOCK_DGRAM, 0)
	askVIP := func() {
		t.Helper()
		if err := s.send(netip.MustParseAddrPort("243.0.0.5:53")); err != nil {
			t.Fatal(err)
		}
		if _, from := s.read(); from.String() != "243.0.0.5:53" {
			t.Errorf("the answer comes from %s, want the VIP", from)
		}
	}
	askVIP()
	s.mustConnect(plain.String())
	if err := disconnect(s.fd); err != nil {
		t.Fatal(err)
	}
	askVIP()
}

// A reply that waits in the socket during a connect to another address still names its VIP.
func TestUDPReplyFromBeforeConnect(t *testing.T) {
	for name, way := range families {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			asked, connected := on(way.vip, 53), on(way.vip, 54)
			n.serve(vip{asked, cs.UDP, []netip.AddrPort{udpServer(t, way.backend)}},
				vip{connected, cs.UDP, []netip.AddrPort{udpServer(t, way.backend)}})
			s := newSocket(t, way.family, unix.SOCK_DGRAM, 0)
			if err := s.send(netip.MustParseAddrPort(asked)); err != nil {
				t.Fatal(err)
			}
			err := again(t, func() error {
				_, _, err := unix.Recvfrom(s.fd, make([]byte, 64), unix.MSG_PEEK)
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			s.mustConnect(connected)
			if _, from := s.read(); from.String() != asked {
				t.Errorf("the answer of %s comes from %s", asked, from)
			}
		})
	}
}

// A socket that was disconnected from a VIP gets a current backend.
func TestUDPDisconnectedGetsNewBackend(t *testing.T) {
	n := newNode(t)
	old, current := udpServer(t, "127.0.0.1"), udpServer(t, "127.0.0.1")
	n.serve(vip{"243.0.0.5:53", cs.UDP, []netip.AddrPort{old}})
	s := newSocket(t, unix.AF_INET, unix.SOCK_DGRAM, 0)
	s.mustConnect("243.0.0.5:53")
	n.serve(vip{"243.0.0.5:53", cs.UDP, []netip.AddrPort{current}})
	if err := disconnect(s.fd); err != nil {
		t.Fatal(err)
	}
	if err := s.send(netip.MustParseAddrPort("243.0.0.5:53")); err != nil {
		t.Fatal(err)
	}
	if answer, from := s.read(); answer != current.String() || from.String() != "243.0.0.5:53" {
		t.Errorf("%s answered as %s, want %s as the VIP", answer, from, current)
	}
	plain := udpServer(t, "127.0.0.1")
	if err := s.send(plain); err != nil {
		t.Fatal(err)
	}
	if _, from := s.read(); from != plain {
		t.Errorf("%s answered as %s", plain, from)
	}
}

// disconnect undoes the connect of a datagram socket, with an address of no family.
func disconnect(fd int) error {
	var none unix.RawSockaddr // of AF_UNSPEC
	if _, _, errno := unix.Syscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&none)), unsafe.Sizeof(none)); errno != 0 {
		return errno
	}
	return nil
}

func TestRefused(t *testing.T) {
	n := newNode(t)
	n.serve(vip{"243.0.0.5:80", cs.TCP, nil}, vip{"[fd00:243::5]:80", cs.TCP, nil},
		vip{"243.0.0.5:53", cs.UDP, nil}, vip{"[fd00:243::5]:53", cs.UDP, nil})
	connect := func(s socket, a netip.AddrPort) error { return s.connect(a) }
	send := func(s socket, a netip.AddrPort) error { return s.send(a) }
	tests := map[string]struct {
		family, kind int
		to           string
		try          func(socket, netip.AddrPort) error
	}{
		"TCP IPv4":             {unix.AF_INET, unix.SOCK_STREAM, "243.0.0.5:80", connect},
		"TCP IPv6":             {unix.AF_INET6, unix.SOCK_STREAM, "[fd00:243::5]:80", connect},
		"TCP IPv4-mapped":      {unix.AF_INET6, unix.SOCK_STREAM, "243.0.0.5:80", connect},
		"UDP connect IPv4":     {unix.AF_INET, unix.SOCK_DGRAM, "243.0.0.5:53", connect},
		"UDP connect IPv6":     {unix.AF_INET6, unix.SOCK_DGRAM, "[fd00:243::5]:53", connect},
		"UDP send IPv4":        {unix.AF_INET, unix.SOCK_DGRAM, "243.0.0.5:53", send},
		"UDP send IPv6":        {unix.AF_INET6, unix.SOCK_DGRAM, "[fd00:243::5]:53", send},
		"UDP send IPv4-mapped": {unix.AF_INET6, unix.SOCK_DGRAM, "243.0.0.5:53", send},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			before := n.refusals(bpf.DropNoBackend)
			s := newSocket(t, test.family, test.kind, 0)
			if err := test.try(s, netip.MustParseAddrPort(test.to)); !errors.Is(err, unix.ECONNREFUSED) {
				t.Errorf("%v, want %v", err, unix.ECONNREFUSED)
			}
			if got := n.refusals(bpf.DropNoBackend) - before; got != 1 {
				t.Errorf("%d refusals counted, want 1", got)
			}
		})
	}
}

// A Plan never leaves a slot without a backend. If a client meets one all the same, it is refused and not sent to the
// VIP itself.
func TestMissingBackendIsRefused(t *testing.T) {
	n := newNode(t)
	fe := lb.Address{AddrPort: netip.MustParseAddrPort("243.0.0.5:80"), Protocol: cs.TCP}
	broken := map[string]lb.Plan{
		"no backend": {
			Slots:     lb.Changes[lb.Slot, lb.BackendID]{Put: []lb.Entry[lb.Slot, lb.BackendID]{{Key: lb.Slot{Frontend: 1}, Value: 7}}},
			Frontends: lb.Changes[lb.Address, lb.Frontend]{Put: []lb.Entry[lb.Address, lb.Frontend]{{Key: fe, Value: lb.Frontend{ID: 1, Count: 1}}}},
		},
		"no slot": {Frontends: lb.Changes[lb.Address, lb.Frontend]{Put: []lb.Entry[lb.Address, lb.Frontend]{{Key: fe, Value: lb.Frontend{ID: 2, Count: 3}}}}},
	}
	for name, plan := range broken {
		t.Run(name, func(t *testing.T) {
			if err := n.dp.Apply(t.Context(), plan); err != nil {
				t.Fatal(err)
			}
			before := n.refusals(bpf.DropBackendGone)
			s := newSocket(t, unix.AF_INET, unix.SOCK_STREAM, 0)
			if err := s.connect(fe.AddrPort); !errors.Is(err, unix.ECONNREFUSED) {
				t.Errorf("%v, want %v", err, unix.ECONNREFUSED)
			}
			if got := n.refusals(bpf.DropBackendGone) - before; got != 1 {
				t.Errorf("%d refusals counted, want 1", got)
			}
		})
	}
}

// A socket that connects to another address forgets the VIP, even if that address is its former backend.
func TestConnectElsewhereForgetsTheVIP(t *testing.T) {
	for name, way := range families {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			backend, plain := udpServer(t, way.backend), udpServer(t, way.backend)
			n.serve(vip{on(way.vip, 53), cs.UDP, []netip.AddrPort{backend}})
			s := newSocket(t, way.family, unix.SOCK_DGRAM, 0)
			for _, to := range []string{on(way.vip, 53), plain.String(), on(way.vip, 53), backend.String(), on(way.vip, 53)} {
				s.mustConnect(to)
				if got := s.peer().String(); got != to {
					t.Errorf("connected to %s, getpeername returns %s", to, got)
				}
				if err := again(t, func() error { return unix.Send(s.fd, []byte("?"), 0) }); err != nil {
					t.Fatal(err)
				}
				if _, from := s.read(); from.String() != to {
					t.Errorf("connected to %s, the answer comes from %s", to, from)
				}
			}
		})
	}
}

// A failed connect leaves no VIP behind either: here the backend's port is closed.
func TestTCPReconnectAfterFailure(t *testing.T) {
	n := newNode(t)
	plain := tcpServer(t, "127.0.0.1")
	n.serve(vip{"243.0.0.5:80", cs.TCP, []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:1")}})
	s := newSocket(t, unix.AF_INET, unix.SOCK_STREAM, 0)
	if err := s.connect(netip.MustParseAddrPort("243.0.0.5:80")); !errors.Is(err, unix.ECONNREFUSED) {
		t.Fatalf("%v, want %v from a closed port", err, unix.ECONNREFUSED)
	}
	s.mustConnect(plain.String())
	if got := s.peer(); got != plain {
		t.Errorf("getpeername returns %s, want %s", got, plain)
	}
}

// tcpVIPs returns how many sockets have an entry in tcp_vips.
func (n *node) tcpVIPs() int {
	n.t.Helper()
	taken := 0
	var k uint32
	var v bpf.TCPVIP
	places := n.pinned(bpf.MapTCPVIPs).Iterate()
	for places.Next(&k, &v) {
		if v.Cookie != 0 {
			taken++
		}
	}
	if err := places.Err(); err != nil {
		n.t.Fatal(err)
	}
	return taken
}

// awaitTCPVIPs polls until so many sockets have an entry in tcp_vips.
func (n *node) awaitTCPVIPs(want int) {
	n.t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(time.Minute)
	for {
		got := n.tcpVIPs()
		if got == want {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			n.t.Fatalf("%d sockets have an entry in tcp_vips, want %d", got, want)
		}
	}
}

// takeAllTCPVIPs gives all entries of tcp_vips to sockets that do not exist.
func (n *node) takeAllTCPVIPs() {
	n.t.Helper()
	m := n.pinned(bpf.MapTCPVIPs)
	keys, values := make([]uint32, m.MaxEntries()), make([]bpf.TCPVIP, m.MaxEntries())
	for i := range keys {
		keys[i], values[i].Cookie = uint32(i), 1<<63
	}
	if _, err := m.BatchUpdate(keys, values, nil); err != nil {
		n.t.Fatal(err)
	}
}

// However a connection ends, its socket's entry is free afterwards.
func TestTCPVIPsAreFreed(t *testing.T) {
	const open, refused, unreachable = "243.0.0.5:80", "243.0.0.5:81", "243.0.0.5:82"
	for name, end := range map[string]func(t *testing.T, n *node, s socket){
		"closed": func(t *testing.T, n *node, s socket) {
			t.Helper()
			s.mustConnect(open)
			n.awaitTCPVIPs(1)
			s.close()
		},
		"disconnected": func(t *testing.T, n *node, s socket) {
			t.Helper()
			s.mustConnect(open)
			n.awaitTCPVIPs(1)
			if err := disconnect(s.fd); err != nil {
				t.Fatal(err)
			}
		},
		"refused": func(t *testing.T, _ *node, s socket) {
			t.Helper()
			if err := s.connect(netip.MustParseAddrPort(refused)); !errors.Is(err, unix.ECONNREFUSED) {
				t.Fatal(err)
			}
		},
		"reconnected after a failure": func(t *testing.T, n *node, s socket) {
			t.Helper()
			if err := s.connect(netip.MustParseAddrPort(refused)); !errors.Is(err, unix.ECONNREFUSED) {
				t.Fatal(err)
			}
			s.mustConnect(open)
			n.awaitTCPVIPs(1)
			if got := s.peer().String(); got != open {
				t.Errorf("getpeername returns %s, want %s", got, open)
			}
			s.close()
		},
		"without a route": func(t *testing.T, n *node, s socket) {
			t.Helper()
			if err := s.connect(netip.MustParseAddrPort(unreachable)); !errors.Is(err, unix.ENETUNREACH) {
				t.Fatal(err)
			}
			n.awaitTCPVIPs(1) // no hook runs before the socket is closed
			s.close()
		},
		"given up": func(t *testing.T, n *node, s socket) {
			t.Helper()
			blackhole(t)
			s.begin(open)
			n.awaitTCPVIPs(1)
			s.close()
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.serve(vip{open, cs.TCP, []netip.AddrPort{tcpServer(t, "127.0.0.1")}},
				vip{refused, cs.TCP, []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:1")}},
				vip{unreachable, cs.TCP, []netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:80")}})
			end(t, n, newSocket(t, unix.AF_INET, unix.SOCK_STREAM, 0))
			n.awaitTCPVIPs(0)
		})
	}
}

// A socket without an entry in tcp_vips uses its own storage, and behaves the same.
func TestTCPVIPsFull(t *testing.T) {
	for name, way := range families {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			plain := tcpServer(t, way.backend)
			n.serve(vip{on(way.vip, 80), cs.TCP, []netip.AddrPort{tcpServer(t, way.backend)}},
				vip{on(way.vip, 81), cs.TCP, []netip.AddrPort{netip.MustParseAddrPort(on(way.backend, 1))}})
			n.takeAllTCPVIPs()
			s := newSocket(t, way.family, unix.SOCK_STREAM, 0)
			s.mustConnect(on(way.vip, 80))
			if got := s.peer().String(); got != on(way.vip, 80) {
				t.Errorf("getpeername returns %s, want the VIP", got)
			}
			if diff := cmp.Diff(counts{Established: 1}, countsOf(n.evidence())); diff != "" {
				t.Errorf("evidence (-want +got):\n%s", diff)
			}
			s = newSocket(t, way.family, unix.SOCK_STREAM, 0)
			if err := s.connect(netip.MustParseAddrPort(on(way.vip, 81))); !errors.Is(err, unix.ECONNREFUSED) {
				t.Fatal(err)
			}
			s.mustConnect(plain.String())
			if got := s.peer(); got != plain {
				t.Errorf("getpeername returns %s, want %s", got, plain)
			}
		})
	}
}

// Only the frontend's own port and protocol are translated.
func TestOtherDestinationsPass(t *testing.T) {
	n := newNode(t)
	tcp, udp := tcpServer(t, "127.0.0.1"), udpServer(t, "127.0.0.1")
	// The VIP is an existing address, so that an untranslated connect shows its destination.
	n.serve(vip{on("127.0.0.1", int(tcp.Port())+1), cs.TCP, nil}, vip{on("127.0.0.1", int(udp.Port())), cs.TCP, nil})
	s := newSocket(t, unix.AF_INET, unix.SOCK_STREAM, 0)
	s.mustConnect(tcp.String())
	if answer, _ := s.read(); answer != tcp.String() {
		t.Errorf("answered by %s, want %s", answer, tcp)
	}
	u := newSocket(t, unix.AF_INET, unix.SOCK_DGRAM, 0)
	u.mustConnect(udp.String())
	if got := u.peer(); got != udp {
		t.Errorf("getpeername returns %s, want %s", got, udp)
	}
}

// An MPTCP socket reaches the TCP Service behind the VIP.
func TestMPTCP(t *testing.T) {
	for name, way := range families {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			fd, err := unix.Socket(way.family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_MPTCP)
			if errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.ENOPROTOOPT) {
				netlab.Skip(t, "this kernel has no MPTCP")
			}
			if err != nil {
				t.Fatal(err)
			}
			_ = unix.Close(fd)
			backend := tcpServer(t, way.backend)
			n.serve(vip{on(way.vip, 80), cs.TCP, []netip.AddrPort{backend}})
			s := newSocket(t, way.family, unix.SOCK_STREAM, unix.IPPROTO_MPTCP)
			s.mustConnect(on(way.vip, 80))
			if answer, _ := s.read(); answer != backend.String() {
				t.Errorf("answered by %s, want %s", answer, backend)
			}
			if got := s.peer().String(); got != on(way.vip, 80) {
				t.Errorf("getpeername returns %s, want the VIP", got)
			}
		})
	}
}

const childDials = "ISTHMUS_TEST_CHILD_DIALS"

// dialAsChild runs as another process of the same cgroup. It prints the backend that answered, and its peer's name.
func dialAsChild(vip string) int {
	c, err := net.Dial("tcp", vip)
	if err != nil {
		fmt.Fprintln(os.Stdout, err)
		return 1
	}
	answer, err := io.ReadAll(c)
	fmt.Fprintf(os.Stdout, "%s as %s %v", answer, c.RemoteAddr(), err)
	return 0
}

func TestOtherProcesses(t *testing.T) {
	n := newNode(t)
	backend := tcpServer(t, "127.0.0.1")
	n.serve(vip{"243.0.0.5:80", cs.TCP, []netip.AddrPort{backend}})
	for range 2 {
		cmd := exec.CommandContext(t.Context(), os.Args[0])
		cmd.Env = append(os.Environ(), childDials+"=243.0.0.5:80")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if want := backend.String() + " as 243.0.0.5:80 <nil>"; string(out) != want {
			t.Errorf("the other process saw %q, want %q", out, want)
		}
	}
}

// bpftool's output must be readable without this repository.
func TestMapDumpIsReadable(t *testing.T) {
	bpftool, err := exec.LookPath("bpftool")
	if err != nil {
		netlab.Skip(t, "needs bpftool")
	}
	n := newNode(t)
	n.serve(vip{"243.0.0.5:80", cs.TCP, []netip.AddrPort{netip.MustParseAddrPort("10.1.0.7:8080")}}, vip{"[fd00:243::5]:53", cs.UDP, nil})
	echo := udpServer(t, "127.0.0.1")
	tests := map[string][]string{
		"frontends": {
			`"key":{"addr":[0,0,0,0,0,0,0,0,0,0,255,255,243,0,0,5],"port":80,"proto":6,"pad":0},"value":{"id":1,"count":1,"service":1,"affinity":0,"flags":0}`,
			`"key":{"addr":[253,0,2,67,0,0,0,0,0,0,0,0,0,0,0,5],"port":53,"proto":17,"pad":0},"value":{"id":3,"count":0,"service":2,"affinity":0,"flags":0}`,
		},
		"slots":    {`"key":{"frontend_id":1,"slot":0},"value":2`},
		"backends": {`"key":2,"value":{"addr":[0,0,0,0,0,0,0,0,0,0,255,255,10,1,0,7],"port":8080,"proto":6,"pad":0,"cluster":3,"pad2":[0,0],"flags":0}`},
	}
	for name, want := range tests {
		dump := dumpMap(t, bpftool, n.fs, name)
		for _, w := range want {
			if !strings.Contains(dump, w) {
				t.Errorf("map %s lacks %s:\n%s", name, w, dump)
			}
		}
	}
	n.serve(vip{"243.0.0.4:53", cs.UDP, []netip.AddrPort{udpServer(t, "127.0.0.1")}}, vip{"243.0.0.5:53", cs.UDP, []netip.AddrPort{echo}})
	s := newSocket(t, unix.AF_INET, unix.SOCK_DGRAM, 0)
	for _, to := range []string{"243.0.0.4:53", "243.0.0.5:53"} { // the first is in the socket's own storage
		if err := s.send(netip.MustParseAddrPort(to)); err != nil {
			t.Fatal(err)
		}
		s.read()
	}
	dump := dumpMap(t, bpftool, n.fs, "udp_vips")
	want := fmt.Sprintf(`"addr":[0,0,0,0,0,0,0,0,0,0,255,255,127,0,0,1],"port":%d,"pad":[0,0,0,0,0,0]},"value":{"addr":[0,0,0,0,0,0,0,0,0,0,255,255,243,0,0,5],"port":53`, echo.Port())
	if !strings.Contains(dump, want) {
		t.Errorf("map udp_vips lacks %s:\n%s", want, dump)
	}
}

// dumpMap returns the entries of a map as bpftool formats them from BTF, without white space.
func dumpMap(t *testing.T, bpftool, fs, name string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), bpftool, "-j", "map", "dump", "pinned", mapPath(fs, name)).Output()
	if err != nil {
		t.Fatalf("bpftool map dump %s: %v", name, err)
	}
	var entries []struct{ Formatted json.RawMessage }
	if err := json.Unmarshal(out, &entries); err != nil {
		t.Fatalf("bpftool map dump %s: %v: %s", name, err, out)
	}
	var dump bytes.Buffer
	for _, e := range entries {
		if err := json.Compact(&dump, e.Formatted); err != nil {
			t.Fatal(err)
		}
		dump.WriteByte('\n')
	}
	return dump.String()
}

// Every reason has a name of its own, which metrics and documents use.
func TestDropReasonNames(t *testing.T) {
	seen := map[string]bool{}
	for r := range bpf.DropMax {
		if name := r.String(); seen[name] || strings.HasPrefix(name, "reason(") {
			t.Errorf("reason %d is called %q", r, name)
		} else {
			seen[name] = true
		}
	}
}

func TestAddr16(t *testing.T) {
	for _, a := range []string{"243.0.0.5", "fd00:243::5"} {
		if got := bpf.AddrOf(bpf.Addr16(netip.MustParseAddr(a))).String(); got != a {
			t.Errorf("%s came back as %s", a, got)
		}
	}
	want := [16]byte{10: 0xff, 11: 0xff, 12: 243, 15: 5}
	if diff := cmp.Diff(want, bpf.Addr16(netip.MustParseAddr("243.0.0.5"))); diff != "" {
		t.Error(diff)
	}
}
