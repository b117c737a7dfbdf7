package bpf_test

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf/ringbuf"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/bpf/lb"
	cs "github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// clusterSetRanges holds the ranges of the VIPs of families.
var clusterSetRanges = []netip.Prefix{netip.MustParsePrefix("243.0.0.0/8"), netip.MustParsePrefix("fd00:243::/32")}

// cover adds clusterSetRanges, so that the node refuses their addresses without a frontend.
func (n *node) cover() {
	n.t.Helper()
	n.change(func(s *lb.State) {
		for _, r := range clusterSetRanges {
			s.Ranges[r] = true
		}
	})
}

// allRefusals returns the node's refusal counters.
func (n *node) allRefusals() map[datapath.Refusal]uint64 {
	n.t.Helper()
	counts, err := n.dp.Refusals()
	if err != nil {
		n.t.Fatal(err)
	}
	return counts
}

// An address of the ClusterSet without a frontend is refused at once instead of being routed out, for every port and
// protocol. Every other address passes.
func TestNoFrontendIsRefused(t *testing.T) {
	connect := func(s socket, a netip.AddrPort) error { return s.connect(a) }
	send := func(s socket, a netip.AddrPort) error { return s.send(a) }
	tests := map[string]struct {
		family, kind, proto int
		to                  string
		try                 func(socket, netip.AddrPort) error
		refused             bool
	}{
		"TCP IPv4, no such VIP":    {unix.AF_INET, unix.SOCK_STREAM, 0, "243.0.0.9:80", connect, true},
		"TCP IPv4, no such port":   {unix.AF_INET, unix.SOCK_STREAM, 0, "243.0.0.5:81", connect, true},
		"TCP IPv4, port of UDP":    {unix.AF_INET, unix.SOCK_STREAM, 0, "243.0.0.5:53", connect, true},
		"TCP IPv4, port 0":         {unix.AF_INET, unix.SOCK_STREAM, 0, "243.0.0.5:0", connect, true},
		"TCP IPv4-mapped":          {unix.AF_INET6, unix.SOCK_STREAM, 0, "243.0.0.9:80", connect, true},
		"TCP IPv6":                 {unix.AF_INET6, unix.SOCK_STREAM, 0, "[fd00:243::9]:80", connect, true},
		"MPTCP IPv4":               {unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_MPTCP, "243.0.0.9:80", connect, true},
		"UDP IPv4":                 {unix.AF_INET, unix.SOCK_DGRAM, 0, "243.0.0.9:53", connect, true},
		"UDP IPv6":                 {unix.AF_INET6, unix.SOCK_DGRAM, 0, "[fd00:243::9]:53", connect, true},
		"UDP IPv4, a send":         {unix.AF_INET, unix.SOCK_DGRAM, 0, "243.0.0.9:53", send, true},
		"UDP IPv4-mapped, a send":  {unix.AF_INET6, unix.SOCK_DGRAM, 0, "243.0.0.9:53", send, true},
		"UDP IPv6, a send":         {unix.AF_INET6, unix.SOCK_DGRAM, 0, "[fd00:243::9]:53", send, true},
		"TCP IPv4, beyond a range": {unix.AF_INET, unix.SOCK_STREAM, 0, "242.255.255.255:80", connect, false},
		"UDP IPv6, beyond a range": {unix.AF_INET6, unix.SOCK_DGRAM, 0, "[fd00:244::9]:53", send, false},
		"UDP IPv4, beyond a range": {unix.AF_INET, unix.SOCK_DGRAM, 0, "244.0.0.1:53", send, false},
	}
	n := newNode(t)
	n.serve(vip{"243.0.0.5:80", cs.TCP, nil}, vip{"243.0.0.5:53", cs.UDP, nil})
	n.cover()
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			before := n.allRefusals()[datapath.Refusal{Reason: bpf.DropNoFrontend}]
			s := newSocket(t, test.family, test.kind, test.proto)
			want, counted := unix.ENETUNREACH, uint64(0) // the test's namespace has no network
			if test.refused {
				want, counted = unix.ECONNREFUSED, 1
			}
			if err := test.try(s, netip.MustParseAddrPort(test.to)); !errors.Is(err, want) {
				t.Errorf("%v, want %v", err, want)
			}
			if got := n.allRefusals()[datapath.Refusal{Reason: bpf.DropNoFrontend}] - before; got != counted {
				t.Errorf("%d refusals counted, want %d", got, counted)
			}
		})
	}
}

// Resolvers connect a UDP socket to port 0 to learn the source address for a destination, and send nothing.
func TestUDPConnectToPort0(t *testing.T) {
	for _, r := range clusterSetRanges {
		route := &netlink.Route{
			Dst: &net.IPNet{IP: r.Addr().AsSlice(), Mask: net.CIDRMask(r.Bits(), r.Addr().BitLen())}, Type: unix.RTN_LOCAL,
			Table: unix.RT_TABLE_LOCAL, Scope: netlink.SCOPE_HOST, LinkIndex: loopback(t),
		}
		if err := netlink.RouteAdd(route); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = netlink.RouteDel(route) })
	}
	for name, way := range families {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.serve(vip{on(way.vip, 53), cs.UDP, []netip.AddrPort{udpServer(t, way.backend)}})
			n.cover()
			s := newSocket(t, way.family, unix.SOCK_DGRAM, 0)
			s.mustConnect(on(way.vip, 0))
			if sa, err := unix.Getsockname(s.fd); err != nil || addrPort(t, sa).Addr().IsUnspecified() {
				t.Errorf("no source address: %v, %v", sa, err)
			}
			if got := n.chosen(0); got != 0 {
				t.Errorf("a backend was chosen %d times", got)
			}
			if counts := n.allRefusals(); len(counts) > 0 {
				t.Errorf("refused: %v", counts)
			}
		})
	}
}

func loopback(t *testing.T) int {
	t.Helper()
	lo, err := net.InterfaceByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	return lo.Index
}

// Refusals and choices are counted for their Service.
func TestCountsByService(t *testing.T) {
	n := newNode(t)
	n.serve(vip{"243.0.0.5:80", cs.TCP, []netip.AddrPort{tcpServer(t, "127.0.0.1")}},
		vip{"243.0.0.5:53", cs.UDP, []netip.AddrPort{udpServer(t, "127.0.0.1")}}, vip{"243.0.0.6:80", cs.TCP, nil})
	for range 3 {
		newSocket(t, unix.AF_INET, unix.SOCK_STREAM, 0).mustConnect("243.0.0.5:80")
	}
	newSocket(t, unix.AF_INET, unix.SOCK_DGRAM, 0).mustConnect("243.0.0.5:53")
	if err := newSocket(t, unix.AF_INET, unix.SOCK_DGRAM, 0).send(netip.MustParseAddrPort("243.0.0.5:53")); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		err := newSocket(t, unix.AF_INET, unix.SOCK_STREAM, 0).connect(netip.MustParseAddrPort("243.0.0.6:80"))
		if !errors.Is(err, unix.ECONNREFUSED) {
			t.Fatal(err)
		}
	}
	want := map[datapath.Refusal]uint64{{Service: firstService + 2, Reason: bpf.DropNoBackend}: 2}
	if diff := cmp.Diff(want, n.allRefusals()); diff != "" {
		t.Errorf("refusals (-want +got):\n%s", diff)
	}
	for i, want := range []uint64{3, 2, 0} {
		if got := n.chosen(i); got != want {
			t.Errorf("a backend of service %d was chosen %d times, want %d", i, got, want)
		}
	}
}

// chosen returns how often a backend of the i-th Service was chosen.
func (n *node) chosen(i int) uint64 {
	n.t.Helper()
	var s bpf.Service
	if err := n.pinned(bpf.MapServices).Lookup(uint32(firstService)+uint32(i), &s); err != nil {
		n.t.Fatal(err)
	}
	return s.Chosen
}

// Without memory for the VIP a UDP client would drop its replies, so its call fails. TCP merely shows the backend.
func TestNoMemory(t *testing.T) {
	const limit = "/proc/sys/net/core/optmem_max" // memory for a socket's options
	before, err := os.ReadFile(limit)
	if err != nil {
		t.Fatal(err)
	}
	n := newNode(t)
	backend := tcpServer(t, "127.0.0.1")
	n.serve(vip{"243.0.0.5:80", cs.TCP, []netip.AddrPort{backend}}, vip{"243.0.0.5:53", cs.UDP, []netip.AddrPort{udpServer(t, "127.0.0.1")}})
	if err := os.WriteFile(limit, []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.WriteFile(limit, before, 0); err != nil {
			t.Error(err)
		}
	})
	udp := netip.MustParseAddrPort("243.0.0.5:53")
	if err := newSocket(t, unix.AF_INET, unix.SOCK_DGRAM, 0).connect(udp); !errors.Is(err, unix.ENOBUFS) {
		t.Errorf("connect: %v, want %v", err, unix.ENOBUFS)
	}
	if err := newSocket(t, unix.AF_INET, unix.SOCK_DGRAM, 0).send(udp); !errors.Is(err, unix.ENOBUFS) {
		t.Errorf("send: %v, want %v", err, unix.ENOBUFS)
	}
	want := map[datapath.Refusal]uint64{{Service: firstService + 1, Reason: bpf.DropNoMemory}: 2}
	if diff := cmp.Diff(want, n.allRefusals()); diff != "" {
		t.Errorf("refusals (-want +got):\n%s", diff)
	}
	n.takeAllTCPVIPs()
	s := newSocket(t, unix.AF_INET, unix.SOCK_STREAM, 0)
	s.mustConnect("243.0.0.5:80")
	if got := s.peer(); got != backend {
		t.Errorf("getpeername returns %s, want the backend %s", got, backend)
	}
}

// affinities returns the backend of each client.
func (n *node) affinities() map[bpf.AffinityKey]bpf.Affinity {
	n.t.Helper()
	got := map[bpf.AffinityKey]bpf.Affinity{}
	var k bpf.AffinityKey
	var v bpf.Affinity
	entries := n.pinned(bpf.MapAffinities).Iterate()
	for entries.Next(&k, &v) {
		got[k] = v
	}
	if err := entries.Err(); err != nil {
		n.t.Fatal(err)
	}
	return got
}

// changeAffinities rewrites the entries of clients.
func (n *node) changeAffinities(f func(*bpf.Affinity)) {
	n.t.Helper()
	m := n.pinned(bpf.MapAffinities)
	for k, v := range n.affinities() {
		f(&v)
		if err := m.Put(k, v); err != nil {
			n.t.Fatal(err)
		}
	}
}

// affinityServers is a number of backends with which repeated random choices of the same one are unlikely.
const affinityServers = 8

// asked returns the backend that a client of a frontend with session affinity reaches in twenty tries.
func (n *node) asked(way string, kind int) map[string]int {
	n.t.Helper()
	r := families[way]
	hits := map[string]int{}
	for range 20 {
		s := newSocket(n.t, r.family, kind, 0)
		if kind == unix.SOCK_DGRAM {
			if err := s.send(netip.MustParseAddrPort(on(r.vip, 53))); err != nil {
				n.t.Fatal(err)
			}
		} else {
			s.mustConnect(on(r.vip, 80))
		}
		answer, _ := s.read()
		hits[answer]++
		_ = unix.Shutdown(s.fd, unix.SHUT_RDWR)
	}
	return hits
}

func only(t *testing.T, hits map[string]int) string {
	t.Helper()
	if len(hits) != 1 {
		t.Fatalf("a client with session affinity reached %v", hits)
	}
	for b := range hits {
		return b
	}
	return ""
}

// A client keeps its backend; on the socket path a client is a network namespace. Without affinity it reaches
// several.
func TestAffinity(t *testing.T) {
	for name, way := range families {
		for what, kind := range map[string]int{"TCP": unix.SOCK_STREAM, "UDP": unix.SOCK_DGRAM} {
			t.Run(name+"/"+what, func(t *testing.T) {
				n := newNode(t)
				v := vip{addr: on(way.vip, 80), proto: cs.TCP}
				start := tcpServer
				if kind == unix.SOCK_DGRAM {
					v, start = vip{addr: on(way.vip, 53), proto: cs.UDP}, udpServer
				}
				for range affinityServers {
					v.backends = append(v.backends, start(t, way.backend))
				}
				n.serve(v)
				if hits := n.asked(name, kind); len(hits) < 2 {
					t.Errorf("without affinity a client reached %v", hits) // by chance once in 10^17 runs
				}
				n.changeFrontends(func(f *lb.Frontend) { f.Affinity = 10 })
				only(t, n.asked(name, kind))
				for k := range n.affinities() {
					if cookie := binary.BigEndian.Uint64(k.Client[8:]); cookie != netnsCookie(t) || binary.BigEndian.Uint64(k.Client[:8]) != 0 {
						t.Errorf("the client is %x, want the cookie %x of its network namespace", k.Client, netnsCookie(t))
					}
				}
			})
		}
	}
}

func netnsCookie(t *testing.T) uint64 {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(fd) }()
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		t.Fatal(err)
	}
	return cookie
}

// Each of these events ends a session affinity: the client then gets a new backend.
func TestAffinityEnds(t *testing.T) {
	tests := map[string]struct {
		end  func(n *node, had lb.BackendID)
		ends bool
	}{
		"nothing": {func(*node, lb.BackendID) {}, false},
		"shortly before the timeout": {func(n *node, _ lb.BackendID) {
			n.changeAffinities(func(a *bpf.Affinity) { a.Last -= uint64(9 * time.Second) })
		}, false},
		"timeout, but used in between": {func(n *node, _ lb.BackendID) {
			n.changeAffinities(func(a *bpf.Affinity) { a.Last -= uint64(9 * time.Second) })
			only(n.t, n.asked("IPv4", unix.SOCK_STREAM))
			n.changeAffinities(func(a *bpf.Affinity) { a.Last -= uint64(9 * time.Second) })
		}, false},
		"timeout": {func(n *node, _ lb.BackendID) {
			n.changeAffinities(func(a *bpf.Affinity) { a.Last -= uint64(10 * time.Second) })
		}, true},
		"draining backend": {func(n *node, had lb.BackendID) {
			n.change(func(s *lb.State) {
				b := s.Backends[had]
				b.Draining = true
				s.Backends[had] = b
				n.leave(s, had)
			})
		}, true},
		"removed backend": {func(n *node, had lb.BackendID) {
			n.change(func(s *lb.State) {
				delete(s.Backends, had)
				n.leave(s, had)
			})
		}, true},
		// The map may reuse the entry of a client for another frontend while the program reads it.
		"the entry has become another frontend's": {func(n *node, _ lb.BackendID) {
			n.changeAffinities(func(a *bpf.Affinity) { a.FrontendId++ })
		}, true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			v := vip{addr: "243.0.0.5:80", proto: cs.TCP}
			for range affinityServers {
				v.backends = append(v.backends, tcpServer(t, "127.0.0.1"))
			}
			n.serve(v)
			n.changeFrontends(func(f *lb.Frontend) { f.Affinity = 10 })
			had := only(t, n.asked("IPv4", unix.SOCK_STREAM))
			test.end(n, n.backend(netip.MustParseAddrPort(had), cs.TCP))
			if !test.ends {
				if has := only(t, n.asked("IPv4", unix.SOCK_STREAM)); has != had {
					t.Errorf("the client had %s and has %s", had, has)
				}
				return
			}
			// The new backend may be the old one by chance, if that still exists.
			for range 20 {
				if has := only(t, n.asked("IPv4", unix.SOCK_STREAM)); has != had {
					return
				}
				test.end(n, n.backend(netip.MustParseAddrPort(had), cs.TCP))
			}
			t.Errorf("the client keeps %s", had)
		})
	}
}

// leave gives the slots of a backend to another one.
func (n *node) leave(s *lb.State, gone lb.BackendID) {
	for slot, id := range s.Slots {
		if id != gone {
			continue
		}
		for other, b := range s.Backends {
			if other != gone && !b.Draining {
				s.Slots[slot] = other
				break
			}
		}
	}
}

// A client of a Maglev frontend whose affinity entry was evicted gets the same backend again.
func TestMaglevAffinityAfterEviction(t *testing.T) {
	n := newNode(t)
	v := vip{addr: "243.0.0.5:80", proto: cs.TCP}
	for range affinityServers {
		v.backends = append(v.backends, tcpServer(t, "127.0.0.1"))
	}
	n.serve(v)
	n.changeFrontends(func(f *lb.Frontend) { f.Affinity, f.Maglev = 10, true })
	had := only(t, n.asked("IPv4", unix.SOCK_STREAM))
	for range 5 {
		n.changeAffinities(func(a *bpf.Affinity) { a.Last = 0 })
		if has := only(t, n.asked("IPv4", unix.SOCK_STREAM)); has != had {
			t.Fatalf("the client had %s and has %s", had, has)
		}
	}
}

// Each network namespace is a client of its own.
func TestAffinityByNamespace(t *testing.T) {
	n := newNode(t)
	n.serve(vip{"243.0.0.5:53", cs.UDP, []netip.AddrPort{udpServer(t, "127.0.0.1")}})
	n.changeFrontends(func(f *lb.Frontend) { f.Affinity = 10 })
	connect := func() error {
		c, err := net.Dial("udp", "243.0.0.5:53")
		if err != nil {
			return err
		}
		return c.Close()
	}
	other, err := netlab.NewNamespace()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = other.Close() })
	for _, err := range []error{connect(), other.Do(connect), connect(), other.Do(connect)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if got := n.affinities(); len(got) != 2 {
		t.Errorf("two namespaces are %d clients: %v", len(got), got)
	}
}

// observe samples one of so many choices and returns a function that reads the next event, or reports that there is
// none.
func (n *node) observe(oneIn uint32) func() (bpf.Event, bool) {
	n.t.Helper()
	if err := n.pinned(bpf.MapSettings).Put(uint32(0), bpf.Settings{Observe: oneIn}); err != nil {
		n.t.Fatal(err)
	}
	r, err := ringbuf.NewReader(n.pinned(bpf.MapEvents))
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { _ = r.Close() })
	return func() (bpf.Event, bool) {
		r.SetDeadline(time.Now()) // the programs have already written all events
		var e bpf.Event
		record, err := r.Read()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return e, false
		}
		if err != nil {
			n.t.Fatal(err)
		}
		if _, err := binary.Decode(record.RawSample, binary.NativeEndian, &e); err != nil {
			n.t.Fatal(err)
		}
		return e, true
	}
}

// An event holds the client, what it asked for, and the result.
func TestEvents(t *testing.T) {
	for name, way := range families {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			tcp, udp := tcpServer(t, way.backend), udpServer(t, way.backend)
			n.serve(vip{on(way.vip, 80), cs.TCP, []netip.AddrPort{tcp}}, vip{on(way.vip, 53), cs.UDP, []netip.AddrPort{udp}},
				vip{on(way.vip, 81), cs.TCP, nil})
			next := n.observe(1)
			start := boot(t)
			newSocket(t, way.family, unix.SOCK_STREAM, 0).mustConnect(on(way.vip, 80))
			if err := newSocket(t, way.family, unix.SOCK_DGRAM, 0).send(netip.MustParseAddrPort(on(way.vip, 53))); err != nil {
				t.Fatal(err)
			}
			_ = newSocket(t, way.family, unix.SOCK_STREAM, 0).connect(netip.MustParseAddrPort(on(way.vip, 81)))

			addr := bpf.Addr16(netip.MustParseAddr(way.vip))
			want := []bpf.Event{
				{
					Kind: bpf.EventChosen, Vip: addr, VipPort: 80, Proto: uint8(cs.TCP), Backend: bpf.Addr16(tcp.Addr()),
					BackendPort: tcp.Port(), Cluster: uint16(testCluster), Service: uint32(firstService),
				},
				{
					Kind: bpf.EventChosen, Vip: addr, VipPort: 53, Proto: uint8(cs.UDP), Backend: bpf.Addr16(udp.Addr()),
					BackendPort: udp.Port(), Cluster: uint16(testCluster), Service: uint32(firstService) + 1,
				},
				{
					Kind: bpf.EventRefused, Reason: bpf.DropNoBackend, Vip: addr, VipPort: 81, Proto: uint8(cs.TCP),
					Service: uint32(firstService) + 2,
				},
			}
			for i, w := range want {
				e, ok := next()
				if !ok {
					t.Fatalf("%d events, want %d", i, len(want))
				}
				if now := boot(t); e.Time < start || e.Time > now {
					t.Errorf("event of %d, between %d and %d", e.Time, start, now)
				}
				w.Path, w.Pid, w.Netns = bpf.PathSocket, uint32(os.Getpid()), netnsCookie(t)
				if comm, err := os.ReadFile("/proc/thread-self/comm"); err != nil || !strings.HasPrefix(text(e.Comm[:]), strings.TrimSpace(string(comm))[:3]) {
					t.Errorf("event of a process called %q, not %q (%v)", text(e.Comm[:]), comm, err)
				}
				e.Time, e.Comm = 0, w.Comm
				if diff := cmp.Diff(w, e); diff != "" {
					t.Errorf("event %d (-want +got):\n%s", i, diff)
				}
			}
			if e, ok := next(); ok {
				t.Errorf("extra event: %+v", e)
			}
		})
	}
}

func text(c []int8) string {
	var b strings.Builder
	for _, x := range c {
		if x == 0 {
			break
		}
		b.WriteByte(byte(x))
	}
	return b.String()
}

// Events report a sample of the choices and every refusal; without an observer there are none.
func TestEventsAreSampled(t *testing.T) {
	const tries = 400
	tests := map[string]struct {
		oneIn           uint32
		atLeast, atMost int // reported choices, of tries
		refusals        int
	}{
		"no observer": {0, 0, 0, 0},
		"all":         {1, tries, tries, 10},
		"one in ten":  {10, 5, 120, 10}, // 40 are expected: fewer or more happens once in 10^13 runs
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.serve(vip{"243.0.0.5:53", cs.UDP, []netip.AddrPort{udpServer(t, "127.0.0.1")}}, vip{"243.0.0.6:53", cs.UDP, nil})
			next := n.observe(test.oneIn)
			s := newSocket(t, unix.AF_INET, unix.SOCK_DGRAM, 0)
			for range tries {
				s.mustConnect("243.0.0.5:53")
			}
			for range 10 {
				_ = s.connect(netip.MustParseAddrPort("243.0.0.6:53"))
			}
			chosen, refused := 0, 0
			for e, ok := next(); ok; e, ok = next() {
				if e.Kind == bpf.EventRefused {
					refused++
				} else {
					chosen++
				}
			}
			if chosen < test.atLeast || chosen > test.atMost || refused != test.refusals {
				t.Errorf("%d choices and %d refusals are events, want %d to %d, and %d", chosen, refused, test.atLeast, test.atMost, test.refusals)
			}
		})
	}
}
