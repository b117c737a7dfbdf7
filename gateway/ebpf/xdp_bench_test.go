package ebpf

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/tools/netlab"
	"github.com/isthmus-net/isthmus/tools/netlab/edge"
)

// Return values of XDP and TCX programs.
const (
	xdpDrop = 1
	xdpPass = 2
	tcxDrop = 2
)

// BenchmarkDriver measures the CPU time that a gateway spends on a 64-byte TCP segment. The kernel itself acts as the
// driver (BPF_F_TEST_XDP_LIVE_FRAMES). Without XDP the packet is dropped at the egress of the outgoing device. With
// XDP it is handed to that device's driver and dropped at the other end of the cable.
func BenchmarkDriver(b *testing.B) {
	for _, xdp := range []XDP{XDPOff, XDPAuto} {
		b.Run("XDP "+string(xdp), func(b *testing.B) {
			w := newTestbed(b)
			w.accelerate()
			w.sumUp(true)
			w.apply(state(desired.Routed, 1))
			here, there := arms[0][0][0], arms[0][0][1]
			gateway, machine := netlab.DeviceName(here), netlab.DeviceName(there)
			w.check(w.Gateways[0].Do(func() error { return neighbour(gateway, there.Addr()) }))
			frame := w.segment()
			driver := rewriting(b, frame, nil)
			if xdp == XDPOff {
				w.check(w.Gateways[0].Do(func() error { return throwAway(b, gateway, ebpf.SchedCLS, tcxDrop) }))
			} else {
				w.check(w.machine.Do(func() error { return throwAway(b, machine, ebpf.XDP, xdpDrop) }))
			}
			w.receive(rewriting(b, frame, nil), frame, 1) // opens the flow
			if xdp == XDPAuto {
				driver = rewriting(b, frame, w.balancers[0].k.xdp)
			}
			sent := w.balancers[0].Sent()
			b.ResetTimer()
			used := w.receive(driver, frame, b.N)
			b.StopTimer()
			b.ReportMetric(float64(used)/float64(b.N), "cpu-ns/op")
			if sent = w.balancers[0].Sent() - sent; b.N > 10000 && (xdp == XDPAuto) != (sent > uint64(b.N)*9/10) {
				b.Errorf("of %d frames the driver has sent %d", b.N, sent)
			}
		})
	}
}

// BenchmarkBulk measures the cost of a stream whose sender passes up to 64 KiB at a time to its device. With XDP the
// device at the other end of the cable segments them first.
func BenchmarkBulk(b *testing.B) {
	for _, xdp := range []XDP{XDPOff, XDPAuto} {
		b.Run("XDP "+string(xdp), func(b *testing.B) {
			w := newTestbed(b)
			if xdp == XDPAuto {
				w.accelerate()
				w.sumUp(true)
			}
			w.swallow()
			w.apply(state(desired.Routed, 1))
			c, err := w.dial("tcp", 0, servedPort, 0)
			w.check(err)
			defer c.Close()
			stream := make([]byte, 1<<20)
			b.SetBytes(int64(len(stream)))
			start := processTime()
			for b.Loop() {
				_, err := c.Write(stream)
				w.check(err)
			}
			b.ReportMetric(float64(processTime()-start)/float64(b.N), "cpu-ns/op")
		})
	}
}

// swallow reads everything that one connection receives from the backends.
func (w *testbed) swallow() {
	w.t.Helper()
	var l net.Listener
	w.check(w.machine.Do(func() (err error) {
		l, err = (&net.ListenConfig{}).Listen(w.t.Context(), "tcp", fmt.Sprintf(":%d", backendPort))
		return err
	}))
	w.t.Cleanup(func() { _ = l.Close() })
	go func() {
		if c, err := l.Accept(); err == nil {
			_, _ = io.Copy(io.Discard, c)
			_ = c.Close()
		}
	}()
}

// neighbour adds a permanent neighbour entry for an address that no machine has, on a device of this namespace.
func neighbour(device string, addr netip.Addr) error {
	l, err := netlink.LinkByName(device)
	if err != nil {
		return err
	}
	return netlink.NeighSet(&netlink.Neigh{
		LinkIndex: l.Attrs().Index, IP: addr.AsSlice(), HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 1}, State: netlink.NUD_PERMANENT,
	})
}

// segment returns a frame from the client to the VIP, as gateway 0 receives it.
func (w *testbed) segment() []byte {
	w.t.Helper()
	frame := make([]byte, 12, 64)
	w.check(w.Gateways[0].Do(func() error {
		l, err := netlink.LinkByName(edge.Device)
		if err == nil {
			copy(frame, l.Attrs().HardwareAddr)
		}
		return err
	}))
	frame = append(frame, 0x08, 0x00, 0x45, 0, 0, 50, 0, 0, 0, 0, 64, unix.IPPROTO_TCP, 0, 0)
	frame = append(append(frame, clients[0].AsSlice()...), vips[0].AsSlice()...)
	frame = append(binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(frame, 40000), servedPort), make([]byte, 8)...)
	frame = append(frame, 5<<4, 0x10, 0, 0, 0, 1, 0, 0) // an ACK, whose checksum is never verified
	return frame[:64]
}

// rewriting returns a program that acts as a driver which receives the same frame again and again: the kernel would
// hand out the modified frame. It then runs a program, or passes the frame to the kernel.
func rewriting(b *testing.B, frame []byte, next *ebpf.Program) *ebpf.Program {
	b.Helper()
	code := asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1), asm.LoadMem(asm.R2, asm.R1, 0, asm.Word), asm.LoadMem(asm.R3, asm.R1, 4, asm.Word),
		asm.Mov.Reg(asm.R4, asm.R2), asm.Add.Imm(asm.R4, int32(len(frame))), asm.JGT.Reg(asm.R4, asm.R3, "pass"),
	}
	for i := 0; i < len(frame); i += 8 {
		word := int64(binary.NativeEndian.Uint64(frame[i:]))
		code = append(code, asm.LoadImm(asm.R5, word, asm.DWord), asm.StoreMem(asm.R2, int16(i), asm.R5, asm.DWord))
	}
	if next != nil {
		calls, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.ProgramArray, KeySize: 4, ValueSize: 4, MaxEntries: 1})
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = calls.Close() })
		if err := calls.Put(uint32(0), next); err != nil {
			b.Fatal(err)
		}
		code = append(code, asm.Mov.Reg(asm.R1, asm.R6), asm.LoadMapPtr(asm.R2, calls.FD()), asm.Mov.Imm(asm.R3, 0), asm.FnTailCall.Call())
	}
	return assemble(b, ebpf.XDP, append(code, asm.Mov.Imm(asm.R0, xdpPass).WithSymbol("pass"), asm.Return()))
}

func assemble(t testing.TB, kind ebpf.ProgramType, code asm.Instructions) *ebpf.Program {
	t.Helper()
	spec := &ebpf.ProgramSpec{Name: "always", Type: kind, License: "GPL", Instructions: code}
	if kind == ebpf.XDP {
		spec.AttachType = ebpf.AttachXDP // the same type as the balancer's program, which it calls
	}
	p, err := ebpf.NewProgram(spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p
}

// always returns a program that returns a verdict.
func always(t testing.TB, kind ebpf.ProgramType, verdict int32) *ebpf.Program {
	t.Helper()
	return assemble(t, kind, asm.Instructions{asm.Mov.Imm(asm.R0, verdict), asm.Return()})
}

// throwAway makes a device of this namespace drop everything: XDP at its ingress, a classifier at its egress.
func throwAway(t testing.TB, device string, kind ebpf.ProgramType, verdict int32) error {
	t.Helper()
	l, err := netlink.LinkByName(device)
	if err != nil {
		return err
	}
	var held link.Link
	if kind == ebpf.XDP {
		held, err = link.AttachXDP(link.XDPOptions{Interface: l.Attrs().Index, Program: always(t, kind, verdict)})
	} else {
		held, err = link.AttachTCX(link.TCXOptions{Interface: l.Attrs().Index, Program: always(t, kind, verdict), Attach: ebpf.AttachTCXEgress})
	}
	if err == nil {
		t.Cleanup(func() { _ = held.Close() })
	}
	return err
}

// receive gives a program n frames as the driver of gateway 0 would, and returns the CPU time.
func (w *testbed) receive(driver *ebpf.Program, frame []byte, n int) (used time.Duration) {
	w.t.Helper()
	w.check(w.Gateways[0].Do(func() error {
		l, err := netlink.LinkByName(edge.Device)
		if err != nil {
			return err
		}
		md := make([]byte, 24) // struct xdp_md
		binary.NativeEndian.PutUint32(md[4:], uint32(len(frame)))
		binary.NativeEndian.PutUint32(md[12:], uint32(l.Attrs().Index))
		start := threadTime()
		for left := n; left > 0 && err == nil; left -= 100_000 {
			_, err = driver.Run(&ebpf.RunOptions{Data: frame, Context: md, Repeat: uint32(min(left, 100_000)), Flags: unix.BPF_F_TEST_XDP_LIVE_FRAMES})
		}
		used = threadTime() - start
		return err
	}))
	return used
}

func threadTime() time.Duration { return time.Duration(clock(unix.CLOCK_THREAD_CPUTIME_ID)) }

func processTime() time.Duration { return time.Duration(clock(unix.CLOCK_PROCESS_CPUTIME_ID)) }
