package bpf_test

import (
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
	cs "github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// evidence returns the evidence about the cluster of all test backends.
func (n *node) evidence() bpf.Cluster {
	n.t.Helper()
	var c bpf.Cluster
	if err := n.pinned(bpf.MapClusters).Lookup(uint32(testCluster), &c); err != nil {
		n.t.Fatal(err)
	}
	return c
}

// counts holds the counters of the evidence, without the times.
type counts struct{ Established, TimedOut, Reset, Silent uint64 }

func countsOf(c bpf.Cluster) counts {
	return counts{c.Established, c.TimedOut, c.Reset, c.Silent}
}

// await polls until the evidence is as wanted.
func (n *node) await(what string, is func(bpf.Cluster) bool) bpf.Cluster {
	n.t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(time.Minute)
	for {
		c := n.evidence()
		if is(c) {
			return c
		}
		select {
		case <-tick.C:
		case <-deadline:
			n.t.Fatalf("no evidence that %s: %+v", what, countsOf(c))
		}
	}
}

// boot returns the time of the programs' clock, in ns.
func boot(t *testing.T) uint64 {
	t.Helper()
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		t.Fatal(err)
	}
	return uint64(ts.Nano())
}

// blackhole drops packets on the loopback device until the returned function is called.
func blackhole(t *testing.T) (end func()) {
	t.Helper()
	const drop = 2 // TC_ACT_SHOT
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, drop), asm.Return()},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = p.Close() }()
	lo, err := net.InterfaceByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	l, err := link.AttachTCX(link.TCXOptions{Interface: lo.Index, Program: p, Attach: ebpf.AttachTCXIngress})
	if err != nil {
		t.Fatal(err)
	}
	end = func() { _ = l.Close() }
	t.Cleanup(end)
	return end
}

// begin starts to connect and does not wait.
func (s socket) begin(addr string) {
	s.t.Helper()
	if err := unix.SetNonblock(s.fd, true); err != nil {
		s.t.Fatal(err)
	}
	err := unix.Connect(s.fd, s.name(netip.MustParseAddrPort(addr)))
	if !errors.Is(err, unix.EINPROGRESS) {
		s.t.Fatalf("connect to %s: %v, want it under way", addr, err)
	}
}

func TestEvidenceOfHandshakes(t *testing.T) {
	for name, way := range families {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			closed := netip.MustParseAddrPort(on(way.backend, 1))
			n.serve(vip{on(way.vip, 80), cs.TCP, []netip.AddrPort{tcpServer(t, way.backend)}},
				vip{on(way.vip, 81), cs.TCP, []netip.AddrPort{closed}})

			start := boot(t)
			newSocket(t, way.family, unix.SOCK_STREAM, 0).mustConnect(on(way.vip, 80))
			c := n.evidence()
			if diff := cmp.Diff(counts{Established: 1}, countsOf(c)); diff != "" {
				t.Errorf("after a connect (-want +got):\n%s", diff)
			}
			if now := boot(t); c.AnsweredAt < start || c.AnsweredAt > now || c.SilentAt != 0 {
				t.Errorf("answered at %d, silent at %d, now %d", c.AnsweredAt, c.SilentAt, now)
			}

			start = boot(t)
			err := newSocket(t, way.family, unix.SOCK_STREAM, 0).connect(netip.MustParseAddrPort(on(way.vip, 81)))
			if !errors.Is(err, unix.ECONNREFUSED) {
				t.Fatalf("%v, want %v from a closed port", err, unix.ECONNREFUSED)
			}
			c = n.evidence()
			if diff := cmp.Diff(counts{Established: 1, Reset: 1}, countsOf(c)); diff != "" {
				t.Errorf("after a refusal (-want +got):\n%s", diff)
			}
			if c.AnsweredAt < start || c.SilentAt != 0 {
				t.Errorf("a refusal is an answer: at %d, silent at %d, start %d", c.AnsweredAt, c.SilentAt, start)
			}
		})
	}
}

// A handshake without an answer is visible after its first second, and counted when the kernel or the application
// gives up.
func TestEvidenceOfSilence(t *testing.T) {
	n := newNode(t)
	n.serve(vip{"243.0.0.5:80", cs.TCP, []netip.AddrPort{tcpServer(t, "127.0.0.1")}})
	blackhole(t)
	patient, hasty := newSocket(t, unix.AF_INET, unix.SOCK_STREAM, 0), newSocket(t, unix.AF_INET, unix.SOCK_STREAM, 0)
	if err := unix.SetsockoptInt(patient.fd, unix.IPPROTO_TCP, unix.TCP_SYNCNT, 1); err != nil {
		t.Fatal(err)
	}
	start := boot(t)
	patient.begin("243.0.0.5:80")
	hasty.begin("243.0.0.5:80")

	c := n.await("the two are silent", func(c bpf.Cluster) bool { return c.Silent >= 2 })
	if after := time.Duration(c.SilentAt - start); after > 2*time.Second {
		t.Errorf("silence is visible after %v", after)
	}
	if c.TimedOut != 0 || c.AnsweredAt != 0 {
		t.Errorf("evidence of more than silence: %+v", countsOf(c))
	}
	_ = unix.Shutdown(hasty.fd, unix.SHUT_RDWR)
	n.await("the application gave one up", func(c bpf.Cluster) bool { return c.TimedOut == 1 })
	c = n.await("the kernel gave one up", func(c bpf.Cluster) bool { return c.TimedOut == 2 })
	if c.Established+c.Reset != 0 || c.AnsweredAt != 0 {
		t.Errorf("an answer without a packet: %+v, at %d", countsOf(c), c.AnsweredAt)
	}
}

// Abandoning a handshake in its first second says nothing about the other side.
func TestNoEvidenceOfAbandonedHandshakes(t *testing.T) {
	n := newNode(t)
	n.serve(vip{"243.0.0.5:80", cs.TCP, []netip.AddrPort{tcpServer(t, "127.0.0.1")}})
	blackhole(t)
	s := newSocket(t, unix.AF_INET, unix.SOCK_STREAM, 0)
	s.begin("243.0.0.5:80")
	_ = unix.Shutdown(s.fd, unix.SHUT_RDWR)
	if diff := cmp.Diff(counts{}, countsOf(n.evidence())); diff != "" {
		t.Errorf("evidence (-want +got):\n%s", diff)
	}
}

// An open connection reports silence, and its end.
func TestEvidenceOfConnections(t *testing.T) {
	n := newNode(t)
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	n.serve(vip{"243.0.0.5:80", cs.TCP, []netip.AddrPort{l.Addr().(*net.TCPAddr).AddrPort()}})
	s := newSocket(t, unix.AF_INET, unix.SOCK_STREAM, 0)
	s.mustConnect("243.0.0.5:80")

	end := blackhole(t)
	if _, err := unix.Write(s.fd, []byte("?")); err != nil {
		t.Fatal(err)
	}
	silent := n.await("it is silent", func(c bpf.Cluster) bool { return c.Silent > 0 })
	if silent.SilentAt < silent.AnsweredAt {
		t.Errorf("silent at %d, before the answer at %d", silent.SilentAt, silent.AnsweredAt)
	}
	end()
	n.await("it answers again", func(c bpf.Cluster) bool { return c.AnsweredAt > silent.SilentAt })
}

// Sockets that use no VIP are no evidence, whatever happens to them.
func TestNoEvidenceWithoutVIP(t *testing.T) {
	n := newNode(t)
	server := tcpServer(t, "127.0.0.1")
	n.serve(vip{"243.0.0.5:80", cs.TCP, []netip.AddrPort{server}})
	newSocket(t, unix.AF_INET, unix.SOCK_STREAM, 0).mustConnect(server.String())
	err := newSocket(t, unix.AF_INET, unix.SOCK_STREAM, 0).connect(netip.MustParseAddrPort("127.0.0.1:1"))
	if !errors.Is(err, unix.ECONNREFUSED) {
		t.Fatal(err)
	}
	var all [256]bpf.Cluster
	var zero bpf.Cluster
	m := n.pinned(bpf.MapClusters)
	for i := range uint32(len(all)) {
		if err := m.Lookup(i, &all[i]); err != nil {
			t.Fatal(err)
		}
		if countsOf(all[i]) != countsOf(zero) {
			t.Errorf("cluster %d has evidence: %+v", i, countsOf(all[i]))
		}
	}
}

// An MPTCP connection is evidence as well.
func TestEvidenceOfMPTCP(t *testing.T) {
	n := newNode(t)
	n.serve(vip{"243.0.0.5:80", cs.TCP, []netip.AddrPort{tcpServer(t, "127.0.0.1")}})
	s := newSocket(t, unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_MPTCP)
	s.mustConnect("243.0.0.5:80")
	if diff := cmp.Diff(counts{Established: 1}, countsOf(n.evidence())); diff != "" {
		t.Errorf("evidence (-want +got):\n%s", diff)
	}
}

// Another vendor's program on the same hook keeps its callbacks. Programs of a cgroup run before those of its parent,
// so the other one runs first.
func TestEvidenceWithOtherProgram(t *testing.T) {
	n := newNode(t)
	n.serve(vip{"243.0.0.5:80", cs.TCP, []netip.AddrPort{tcpServer(t, "127.0.0.1")}})
	below := netlab.NewTestCgroup(t)
	calls, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = calls.Close() })
	other, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SockOps, AttachType: ebpf.AttachCGroupSockOps, License: "GPL", Instructions: countRTTs(calls),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = other.Close() })
	l, err := link.AttachCgroup(link.CgroupOptions{Path: below.Path, Attach: ebpf.AttachCGroupSockOps, Program: other})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })

	s := newSocket(t, unix.AF_INET, unix.SOCK_STREAM, 0)
	s.mustConnect("243.0.0.5:80")
	s.read()
	var count uint64
	if err := calls.Lookup(uint32(0), &count); err != nil {
		t.Fatal(err)
	}
	if count == 0 {
		t.Error("the other program is no longer called")
	}
	if diff := cmp.Diff(counts{Established: 1}, countsOf(n.evidence())); diff != "" {
		t.Errorf("evidence (-want +got):\n%s", diff)
	}
}

// countRTTs requests a callback at every round trip of a connection, and counts them.
func countRTTs(calls *ebpf.Map) asm.Instructions {
	const connectCB, rttCB, rttFlag = 3, 12, 1 << 3 // BPF_SOCK_OPS_TCP_CONNECT_CB, _RTT_CB, _RTT_CB_FLAG
	return asm.Instructions{
		asm.LoadMem(asm.R2, asm.R1, 0, asm.Word), // op
		asm.JEq.Imm(asm.R2, connectCB, "ask"),
		asm.JNE.Imm(asm.R2, rttCB, "out"),
		asm.StoreImm(asm.R10, -4, 0, asm.Word),
		asm.Mov.Reg(asm.R2, asm.R10),
		asm.Add.Imm(asm.R2, -4),
		asm.LoadMapPtr(asm.R1, calls.FD()),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "out"),
		asm.Mov.Imm(asm.R1, 1),
		asm.AddAtomic.Mem(asm.R0, asm.R1, asm.DWord, 0),
		asm.Ja.Label("out"),
		asm.Mov.Imm(asm.R2, rttFlag).WithSymbol("ask"),
		asm.FnSockOpsCbFlagsSet.Call(),
		asm.Mov.Imm(asm.R0, 1).WithSymbol("out"),
		asm.Return(),
	}
}
