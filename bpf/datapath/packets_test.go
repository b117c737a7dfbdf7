package datapath

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/datapath/internal/device"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// The small programs of these tests count their runs in a map, and note the length of the packet.
const (
	mapRuns  = "runs"
	hookIn   = "from_client"
	hookOut  = "to_client"
	goOn     = -1 // TCX_NEXT, and to clsact "as if I were not here"
	countIn  = 0
	countOut = 1
)

// counting returns a program that counts its runs at an index of a map and returns verdict. padding adds instructions,
// so that programs differ.
func counting(m string, index, verdict int32, padding int) *ebpf.ProgramSpec {
	code := asm.Instructions{}
	for range padding {
		code = append(code, asm.Mov.Imm(asm.R0, 7))
	}
	code = append(code,
		asm.StoreImm(asm.RFP, -4, int64(index), asm.Word),
		asm.LoadMapPtr(asm.R1, 0).WithReference(m),
		asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, -4),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "out"),
		asm.Mov.Imm(asm.R1, 1),
		asm.StoreXAdd(asm.R0, asm.R1, asm.DWord),
		asm.Mov.Imm(asm.R0, verdict).WithSymbol("out"),
		asm.Return(),
	)
	return &ebpf.ProgramSpec{Name: "counting", Type: ebpf.SchedCLS, License: "GPL", Instructions: code}
}

// withPackets adds a packet path of counting programs to a build.
func withPackets(b build, noTCX bool, padding int) build {
	b.specs = append(b.specs, &ebpf.CollectionSpec{
		Maps: map[string]*ebpf.MapSpec{mapRuns: {Name: mapRuns, Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 2}},
		Programs: map[string]*ebpf.ProgramSpec{
			hookIn: counting(mapRuns, countIn, goOn, padding), hookOut: counting(mapRuns, countOut, goOn, padding),
		},
	})
	b.packets = []packetHook{{hookIn, true, nil}, {hookOut, false, nil}}
	b.noTCX = noTCX
	return b
}

// pod is a network namespace with a device of the node in front of it.
type pod struct {
	ns   *netlab.Namespace
	host netlink.Link
	addr netip.Addr
}

// newPod creates a pod in the subnet of that number.
func newPod(t *testing.T, number int) pod {
	t.Helper()
	ns, err := netlab.NewNamespace()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ns.Close() })
	name := fmt.Sprintf("pod.%d", number) // a name with a dot, as VLANs have
	var fd int
	err = ns.Do(func() (err error) {
		fd, err = unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "eth0", PeerNamespace: netlink.NsFd(fd)}); err != nil {
		t.Fatal(err)
	}
	host, err := netlink.LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = netlink.LinkDel(host) })
	p := pod{ns, host, netip.AddrFrom4([4]byte{10, 77, byte(number), 2})}
	err = errors.Join(
		address(name, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 77, byte(number), 1}), 24)),
		ns.Do(func() error { return address("eth0", netip.PrefixFrom(p.addr, 24)) }),
	)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func address(name string, p netip.Prefix) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	ip := &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
	return errors.Join(netlink.AddrAdd(l, &netlink.Addr{IPNet: ip}), netlink.LinkSetUp(l))
}

// ask sends a datagram from the pod to the node and one back, and fails the test if they do not arrive.
func (p pod) ask(t *testing.T) {
	t.Helper()
	gateway := p.addr.Prev()
	in, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(gateway, 0)))
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	var out net.Conn
	if err := p.ns.Do(func() (err error) {
		out, err = net.Dial("udp4", in.LocalAddr().String())
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	deadline := time.Now().Add(time.Minute)
	err = errors.Join(in.SetDeadline(deadline), out.SetDeadline(deadline))
	if _, e := out.Write([]byte("?")); e != nil {
		err = errors.Join(err, e)
	}
	_, from, e := in.ReadFromUDPAddrPort(make([]byte, 8))
	err = errors.Join(err, e)
	if _, e := in.WriteToUDPAddrPort([]byte("!"), from); e != nil {
		err = errors.Join(err, e)
	}
	if _, e := out.Read(make([]byte, 8)); e != nil {
		err = errors.Join(err, e)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// runs returns how often the two programs ran.
func runs(t *testing.T, d *Datapath) [2]uint64 {
	t.Helper()
	var n [2]uint64
	for i := range n {
		if err := d.maps[mapRuns].Lookup(uint32(i), &n[i]); err != nil {
			t.Fatal(err)
		}
	}
	return n
}

// seen reports whether our programs see both directions of the pod's datagrams.
func seen(t *testing.T, d *Datapath, p pod) bool {
	t.Helper()
	before := runs(t, d)
	p.ask(t)
	after := runs(t, d)
	return after[countIn] > before[countIn] && after[countOut] > before[countOut]
}

// openPackets opens a build with a packet path and follows the devices.
func openPackets(t *testing.T, cfg Config, b build) *Datapath {
	t.Helper()
	cfg.Packets = true
	d, err := open(t.Context(), cfg, b, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- d.Follow(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := errors.Join(<-ended, d.Close()); err != nil {
			t.Error(err)
		}
	})
	return d
}

// await waits until ok.
func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(time.Minute); !ok(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain: %s", what)
		}
	}
}

// on returns the devices whose programs are all attached.
func on(d *Datapath) []string {
	var names []string
	broken := map[string]bool{}
	for _, h := range d.Hooks() {
		if h.Device != "" {
			names = append(names, h.Device)
			broken[h.Device] = broken[h.Device] || !h.Attached
		}
	}
	slices.Sort(names)
	return slices.DeleteFunc(slices.Compact(names), func(n string) bool { return broken[n] })
}

// bothWays runs a test with TCX and with clsact filters.
func bothWays(t *testing.T, test func(t *testing.T, noTCX bool)) {
	t.Helper()
	netlab.Privileged(t)
	t.Run("tcx", func(t *testing.T) {
		if err := haveTCX(); err != nil {
			netlab.Skip(t, fmt.Sprint("no TCX: ", err))
		}
		test(t, false)
	})
	t.Run("clsact", func(t *testing.T) { test(t, true) })
}

// The programs are attached to new pods, and see both directions.
func TestFollowsDevices(t *testing.T) {
	bothWays(t, func(t *testing.T, noTCX bool) {
		t.Helper()
		cfg, first := testConfig(t), newPod(t, 1)
		d := openPackets(t, cfg, withPackets(currentVersion(t), noTCX, 0))
		await(t, "the pod that is there", func() bool { return cmp.Equal(on(d), []string{"pod.1"}) })
		if !seen(t, d, first) {
			t.Error("the first pod's packets are not seen")
		}
		second := newPod(t, 2)
		await(t, "the pod that comes", func() bool { return cmp.Equal(on(d), []string{"pod.1", "pod.2"}) })
		if !seen(t, d, second) {
			t.Error("the second pod's packets are not seen")
		}
		if err := netlink.LinkDel(first.host); err != nil {
			t.Fatal(err)
		}
		await(t, "the pod that goes", func() bool { return cmp.Equal(on(d), []string{"pod.2"}) })
		await(t, "what it had", func() bool { return len(deviceFiles(t, cfg, first)) == 0 })
	})
}

// deviceFiles lists the pins that belong to a pod's device.
func deviceFiles(t *testing.T, cfg Config, p pod) []string {
	t.Helper()
	return slices.DeleteFunc(pinned(t, cfg), func(f string) bool {
		n := fmt.Sprint(p.host.Attrs().Index)
		return !strings.HasSuffix(f, "_"+n) && !strings.HasSuffix(f, "/"+n)
	})
}

// A restart with the same programs replaces nothing; another version replaces them on every device, and no packet
// passes untranslated meanwhile.
func TestPacketProgramsAreReplacedInPlace(t *testing.T) {
	bothWays(t, func(t *testing.T, noTCX bool) {
		t.Helper()
		cfg, p := testConfig(t), newPod(t, 1)
		ids := map[int]ebpf.ProgramID{}
		for round, padding := range []int{0, 0, 5} {
			t.Run(fmt.Sprint("round ", round), func(t *testing.T) {
				d := openPackets(t, cfg, withPackets(currentVersion(t), noTCX, padding))
				before := runs(t, d)
				asked := uint64(0)
				await(t, "attached", func() bool {
					if round > 0 { // while the programs are exchanged
						p.ask(t)
						asked++
					}
					return cmp.Equal(on(d), []string{"pod.1"}) && runsProgram(t, cfg, d, p)
				})
				if after := runs(t, d); round > 0 && (after[countIn] < before[countIn]+asked || after[countOut] < before[countOut]+asked) {
					t.Errorf("%v runs before and %v after %d questions: some were not seen", before, after, asked)
				}
				var err error
				d.packets.mu.Lock()
				ids[round], err = bpf.ProgramID(d.packets.progs[hookIn])
				d.packets.mu.Unlock()
				if err != nil {
					t.Fatal(err)
				}
			})
		}
		if ids[0] != ids[1] || ids[1] == ids[2] {
			t.Errorf("programs %v, want the same twice and then another one", ids)
		}
	})
}

// runsProgram reports whether the pod's device runs the programs of d.
func runsProgram(t *testing.T, cfg Config, d *Datapath, p pod) bool {
	t.Helper()
	d.packets.mu.Lock()
	defer d.packets.mu.Unlock()
	for _, h := range d.packets.hooks {
		if h.name == bpf.ProgFromNetwork || h.name == bpf.ProgToNetwork {
			continue // it is for uplinks
		}
		want, err := bpf.ProgramID(d.packets.progs[h.name])
		if err != nil {
			t.Fatal(err)
		}
		if !d.packets.tcx {
			f, err := findFilter(device.Device{Index: p.host.Attrs().Index}, h)
			if err != nil {
				t.Fatal(err)
			}
			if f == nil || f.Id != int(want) {
				return false
			}
			continue
		}
		l, err := link.LoadPinnedLink(ours(cfg).linkPath(linkName(h.name, p.host.Attrs().Index)), nil)
		if err != nil {
			t.Fatal(err)
		}
		info, err := l.Info()
		if err := errors.Join(err, l.Close()); err != nil {
			t.Fatal(err)
		}
		if info.Program != want {
			return false
		}
	}
	return true
}

// If devices are named, only these are served. Disabling the packet path removes it from the devices.
func TestDevicesByName(t *testing.T) {
	cfg := testConfig(t)
	newPod(t, 1)
	newPod(t, 2)
	cfg.Devices = []string{"*.2"}
	t.Run("on", func(t *testing.T) {
		d := openPackets(t, cfg, withPackets(currentVersion(t), false, 0))
		await(t, "the named one", func() bool { return cmp.Equal(on(d), []string{"pod.2"}) })
	})
	mustOpen(t, cfg)
	for _, f := range pinned(t, cfg) {
		if strings.Contains(f, "client") {
			t.Errorf("%s is left of the packet path", f)
		}
	}
}

// Programs of others on the same devices keep running, before and after ours.
func TestNeighboursOnDevices(t *testing.T) {
	foreign, err := ebpf.NewMap(&ebpf.MapSpec{Name: "neighbour", Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 4})
	if err != nil {
		netlab.Privileged(t)
		t.Fatal(err)
	}
	defer foreign.Close()
	program := func(t *testing.T, index int32) *ebpf.Program {
		t.Helper()
		coll, err := ebpf.NewCollectionWithOptions(&ebpf.CollectionSpec{
			Maps:     map[string]*ebpf.MapSpec{"neighbour": {Name: "neighbour", Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 4}},
			Programs: map[string]*ebpf.ProgramSpec{"p": counting("neighbour", index, goOn, 0)},
		}, ebpf.CollectionOptions{MapReplacements: map[string]*ebpf.Map{"neighbour": foreign}})
		if err != nil {
			t.Fatal(err)
		}
		prog := coll.DetachProgram("p")
		coll.Close()
		t.Cleanup(func() { _ = prog.Close() })
		return prog
	}
	bothWays(t, func(t *testing.T, noTCX bool) {
		t.Helper()
		cfg, p := testConfig(t), newPod(t, 1)
		put := func(index int32, anchor link.Anchor, priority uint16) {
			prog := program(t, index)
			if !noTCX {
				l, err := link.AttachTCX(link.TCXOptions{Interface: p.host.Attrs().Index, Program: prog, Attach: ebpf.AttachTCXIngress, Anchor: anchor})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = l.Close() })
				return
			}
			_ = netlink.QdiscAdd(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
				LinkIndex: p.host.Attrs().Index, Parent: netlink.HANDLE_CLSACT, Handle: netlink.MakeHandle(0xffff, 0),
			}}) // the second time it is there
			if err := netlink.FilterAdd(&netlink.BpfFilter{
				FilterAttrs: netlink.FilterAttrs{
					LinkIndex: p.host.Attrs().Index, Parent: netlink.HANDLE_MIN_INGRESS, Handle: 1, Priority: priority, Protocol: unix.ETH_P_ALL,
				},
				Fd: prog.FD(), Name: "neighbour", DirectAction: true,
			}); err != nil {
				t.Fatal(err)
			}
		}
		put(0, link.Head(), 1)
		d := openPackets(t, cfg, withPackets(currentVersion(t), noTCX, 0))
		await(t, "attached", func() bool { return cmp.Equal(on(d), []string{"pod.1"}) })
		put(1, link.Tail(), 60000)
		put(2, link.Head(), 2)
		if !seen(t, d, p) {
			t.Error("our programs do not see the packets")
		}
		counts := make([]uint64, 3)
		for i := range counts {
			if err := foreign.Lookup(uint32(i), &counts[i]); err != nil {
				t.Fatal(err)
			}
			if counts[i] == 0 {
				t.Errorf("neighbour %d does not run any more", i)
			}
			if err := foreign.Put(uint32(i), uint64(0)); err != nil {
				t.Fatal(err)
			}
		}
		if err := Remove(cfg); err != nil {
			t.Fatal(err)
		}
		p.ask(t)
		for i := range counts {
			if err := foreign.Lookup(uint32(i), &counts[i]); err != nil || counts[i] == 0 {
				t.Errorf("neighbour %d went with us: %v", i, err)
			}
		}
	})
}

// Remove removes the packet path from every device, and clsact from those where we added it.
func TestRemoveOfPacketPath(t *testing.T) {
	bothWays(t, func(t *testing.T, noTCX bool) {
		t.Helper()
		cfg, own, theirs, shared := testConfig(t), newPod(t, 1), newPod(t, 2), newPod(t, 3)
		if err := netlink.QdiscAdd(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
			LinkIndex: theirs.host.Attrs().Index, Parent: netlink.HANDLE_CLSACT, Handle: netlink.MakeHandle(0xffff, 0),
		}}); err != nil {
			t.Fatal(err)
		}
		var d *Datapath
		t.Run("on", func(t *testing.T) {
			d = openPackets(t, cfg, withPackets(currentVersion(t), noTCX, 0))
			await(t, "attached", func() bool { return cmp.Equal(on(d), []string{"pod.1", "pod.2", "pod.3"}) })
		})
		if noTCX { // another program uses our clsact
			neighbour := passing(t)
			if err := netlink.FilterAdd(&netlink.BpfFilter{
				FilterAttrs: netlink.FilterAttrs{
					LinkIndex: shared.host.Attrs().Index, Parent: netlink.HANDLE_MIN_EGRESS, Handle: 1, Priority: 9, Protocol: unix.ETH_P_ALL,
				},
				Fd: neighbour.FD(), Name: "neighbour", DirectAction: true,
			}); err != nil {
				t.Fatal(err)
			}
		}
		for range 2 {
			if err := Remove(cfg); err != nil {
				t.Fatal(err)
			}
			if files := pinned(t, cfg); len(files) > 0 {
				t.Errorf("left behind: %v", files)
			}
		}
		for _, c := range []struct {
			p      pod
			clsact bool
			others int
		}{{own, false, 0}, {theirs, true, 0}, {shared, noTCX, map[bool]int{true: 1}[noTCX]}} {
			index := c.p.host.Attrs().Index
			if _, has, err := clsact(index); err != nil || has != c.clsact {
				t.Errorf("device %d has clsact: %v, %v, want %v", index, has, err, c.clsact)
			}
			n := 0
			for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
				f, err := filters(index, parent)
				if err != nil {
					t.Fatal(err)
				}
				n += len(f)
			}
			if n != c.others {
				t.Errorf("device %d has %d filters, want %d", index, n, c.others)
			}
			for _, at := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
				if q, err := link.QueryPrograms(link.QueryOptions{Target: index, Attach: at}); !noTCX && (err != nil || len(q.Programs) > 0) {
					t.Errorf("device %d has programs: %v, %v", index, q, err)
				}
			}
		}
	})
}

// Programs of others on the cgroup's hooks keep running beside ours.
func TestNeighboursOnCgroup(t *testing.T) {
	cfg := testConfig(t)
	allow := func(t *testing.T, port int32) *ebpf.Program { // allows everything but one port
		t.Helper()
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
			Type: ebpf.CGroupSockAddr, AttachType: ebpf.AttachCGroupInet4Connect, License: "GPL",
			Instructions: asm.Instructions{
				asm.LoadMem(asm.R1, asm.R1, 24, asm.Word), // user_port, network order in the low half
				asm.HostTo(asm.BE, asm.R1, asm.Half),
				asm.Mov.Imm(asm.R0, 1),
				asm.JNE.Imm(asm.R1, port, "out"),
				asm.Mov.Imm(asm.R0, 0),
				asm.Return().WithSymbol("out"),
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = p.Close() })
		return p
	}
	attach := func(port int32) {
		l, err := link.AttachCgroup(link.CgroupOptions{Path: cfg.CgroupRoot, Attach: ebpf.AttachCGroupInet4Connect, Program: allow(t, port)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
	}
	attach(7001)
	upgrade(t, cfg, currentVersion(t), refusing())
	attach(7002)
	try := func(addr [4]byte, port int) error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		return unix.Connect(fd, &unix.SockaddrInet4{Addr: addr, Port: port})
	}
	check := func(when string, vip error) {
		for port, want := range map[int]error{7001: unix.EPERM, 7002: unix.EPERM, 7003: unix.ECONNREFUSED} {
			if err := try([4]byte{127, 0, 0, 1}, port); !errors.Is(err, want) {
				t.Errorf("%s: connect to port %d: %v, want %v", when, port, err, want)
			}
		}
		if err := connect(t); !errors.Is(err, vip) {
			t.Errorf("%s: connect to the VIP: %v, want %v", when, err, vip)
		}
	}
	check("beside ours", unix.ECONNREFUSED)
	if err := Remove(cfg); err != nil {
		t.Fatal(err)
	}
	check("without ours", unix.ENETUNREACH)
}

// The error names a hook that another program holds exclusively, and the node stays as it was.
func TestOccupiedHookIsNamed(t *testing.T) {
	cfg := testConfig(t)
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "lonely", Type: ebpf.CGroupSockAddr, AttachType: ebpf.AttachCGroupInet4Connect, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	dir, err := os.Open(cfg.CgroupRoot)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	alone := link.RawAttachProgramOptions{Target: int(dir.Fd()), Program: p, Attach: ebpf.AttachCGroupInet4Connect}
	if err := link.RawAttachProgram(alone); err != nil {
		t.Fatal(err)
	}
	_, err = Open(t.Context(), cfg, slog.New(slog.DiscardHandler))
	if !errors.Is(err, ErrOccupied) || !strings.Contains(err.Error(), "connect4") || !strings.Contains(err.Error(), "lonely") || !strings.Contains(err.Error(), cfg.CgroupRoot) {
		t.Errorf("Open: %v; it must name the hook, the program and the cgroup", err)
	}
	if files := pinned(t, cfg); len(files) > 0 {
		t.Errorf("left behind: %v", files)
	}
	err = link.RawDetachProgram(link.RawDetachProgramOptions{Target: int(dir.Fd()), Program: p, Attach: ebpf.AttachCGroupInet4Connect})
	if err != nil {
		t.Fatal(err)
	}
	mustOpen(t, cfg)
}

// Our programs are next to the client by default: first on ingress, last on egress.
func TestOrderAmongNeighbours(t *testing.T) {
	netlab.Privileged(t)
	if err := haveTCX(); err != nil {
		netlab.Skip(t, fmt.Sprint("no TCX: ", err))
	}
	for order, firstIn := range map[Order]bool{"": true, OrderNear: true, OrderFar: false} {
		t.Run("order "+string(order), func(t *testing.T) {
			cfg, p := testConfig(t), newPod(t, 1)
			cfg.Order = order
			neighbour := passing(t)
			for _, at := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
				l, err := link.AttachTCX(link.TCXOptions{Interface: p.host.Attrs().Index, Program: neighbour, Attach: at})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = l.Close() })
			}
			d := openPackets(t, cfg, withPackets(currentVersion(t), false, 0))
			await(t, "attached", func() bool { return cmp.Equal(on(d), []string{"pod.1"}) })
			theirs, err := bpf.ProgramID(neighbour)
			if err != nil {
				t.Fatal(err)
			}
			for at, first := range map[ebpf.AttachType]bool{ebpf.AttachTCXIngress: firstIn, ebpf.AttachTCXEgress: !firstIn} {
				q, err := link.QueryPrograms(link.QueryOptions{Target: p.host.Attrs().Index, Attach: at})
				if err != nil || len(q.Programs) != 2 {
					t.Fatalf("%v: %v, %v, want two programs", at, q, err)
				}
				if oursFirst := q.Programs[0].ID != theirs; oursFirst != first {
					t.Errorf("%v: ours is first: %v, want %v", at, oursFirst, first)
				}
			}
		})
	}
}

// passing returns a program of another vendor that lets every packet pass.
func passing(t *testing.T) *ebpf.Program {
	t.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, goOn), asm.Return()},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p
}
