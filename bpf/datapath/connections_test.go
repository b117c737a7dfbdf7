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
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/bpf/lb/lbtest"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// packetNode is a node with our packet programs, whose cgroup has no process. It has two pods; the second one serves
// 243.0.0.5:80/TCP at port 8080.
type packetNode struct {
	cfg            Config
	client, server pod
}

func newPacketNode(t *testing.T) packetNode {
	t.Helper()
	netlab.Privileged(t)
	empty, err := netlab.NewCgroup()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(empty.Path) })
	n := packetNode{Config{CgroupRoot: empty.Path, BPFFS: netlab.BPFFS(t), Packets: true}, newPod(t, 1), newPod(t, 2)}
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	for _, p := range []pod{n.client, n.server} {
		if err := p.ns.Route(p.addr.Prev()); err != nil {
			t.Fatal(err)
		}
	}
	var l net.Listener
	err = n.server.ns.Do(func() (err error) {
		l, err = net.Listen("tcp4", ":8080")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = fmt.Fprint(c, c.RemoteAddr())
			_ = c.Close()
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		<-ended
	})
	return n
}

func (n packetNode) state() lb.State {
	s := serving(8080)
	s.Clusters[1] = "b"
	s.Ranges[netip.MustParsePrefix("243.0.0.0/8")] = true
	s.Backends[1] = lb.Backend{Address: lb.Address{AddrPort: netip.AddrPortFrom(n.server.addr, 8080), Protocol: clusterset.TCP}, Cluster: 1}
	return s
}

// dial connects from the client's pod to the VIP. It returns the client's address as the server saw it, and its own.
func (n packetNode) dial() (seen, own string, err error) {
	var c net.Conn
	err = n.client.ns.Do(func() (err error) {
		c, err = (&net.Dialer{Timeout: 2 * time.Second}).Dial("tcp4", "243.0.0.5:80")
		return err
	})
	if err != nil {
		return "", "", err
	}
	defer c.Close()
	b := make([]byte, 64)
	if err := c.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
		return "", "", err
	}
	k, err := c.Read(b)
	return string(b[:k]), c.LocalAddr().String(), err
}

// counted is our build with programs that only count, which load faster than the real ones. Hooks, and the maps of
// devices and VIPs, are the real ones.
func counted(t *testing.T, noTCX bool) build {
	t.Helper()
	b, err := currentBuild(true)
	if err != nil {
		t.Fatal(err)
	}
	packets := b.specs[len(b.specs)-1]
	all := packets.Maps
	packets.Variables = nil
	packets.Maps = map[string]*ebpf.MapSpec{
		mapRuns:        {Name: mapRuns, Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 2},
		bpf.MapDevices: all[bpf.MapDevices], bpf.MapPacketSettings: all[bpf.MapPacketSettings],
	}
	for _, h := range b.packets {
		index := int32(countOut)
		if h.ingress {
			index = countIn
		}
		packets.Programs[h.name] = counting(mapRuns, index, goOn, 0)
	}
	b.noTCX = noTCX
	return b
}

// keepDialing connects in a loop until the returned function is called, which fails the test if a connection failed.
func (n packetNode) keepDialing(t *testing.T) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() {
		for done := 0; ; done++ {
			if _, _, err := n.dial(); err != nil {
				ended <- fmt.Errorf("after %d connections: %w", done, err)
				return
			}
			if ctx.Err() != nil {
				ended <- nil
				return
			}
		}
	}()
	return func() {
		t.Helper()
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

// The whole packet path on a node: a client whose socket is not translated reaches the VIP, and Connections lists the
// connection. So it is after a restart, which replaces no program, and after upgrades, which replace all. No connection
// fails meanwhile.
func TestPacketPath(t *testing.T) {
	bothWays(t, func(t *testing.T, noTCX bool) {
		t.Helper()
		n := newPacketNode(t)
		var last string
		rounds := []string{"start", "restart", "upgrade", "another ABI"}
		if noTCX {
			rounds = rounds[:1] // each loads the programs; how filters are replaced has a test with small ones
		}
		for _, round := range rounds {
			t.Run(round, func(t *testing.T) {
				b, err := currentBuild(true)
				if err != nil {
					t.Fatal(err)
				}
				b.noTCX = noTCX
				if round == "another ABI" {
					b = nextABI(b)
				}
				if round == "upgrade" { // to other instructions that do the same
					for _, h := range b.packets {
						p := b.specs[len(b.specs)-1].Programs[h.name]
						p.Instructions = slices.Insert(p.Instructions, 1, asm.Mov.Imm(asm.R0, 0))
					}
				}
				if round != "start" {
					defer n.keepDialing(t)()
				}
				d := openPackets(t, n.cfg, b)
				have, err := d.Load(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if err := d.Apply(t.Context(), lbtest.Diff(have, n.state())); err != nil {
					t.Fatal(err)
				}
				await(t, "attached", func() bool { return cmp.Equal(on(d), []string{"pod.1", "pod.2"}) })
				seen, own, err := n.dial()
				if err != nil || seen != own {
					t.Fatalf("the server sees %s, the client is %s: %v", seen, own, err)
				}
				conns, err := d.Connections(100_000)
				if err != nil {
					t.Fatal(err)
				}
				want := Connection{
					Protocol: clusterset.TCP, Client: netip.MustParseAddrPort(own), VIP: netip.MustParseAddrPort("243.0.0.5:80"),
					Backend: netip.AddrPortFrom(n.server.addr, 8080), Service: clusterset.ServiceName{Namespace: "demo", Name: "hello"}, Cluster: "b",
				}
				found := false
				for _, c := range conns {
					if c.Client.String() == own {
						found = true
						opts := cmp.Options{cmpopts.EquateComparable(netip.AddrPort{}), cmpopts.IgnoreFields(Connection{}, "State", "Silent")}
						if diff := cmp.Diff(want, c, opts); diff != "" || c.State == "" || c.Silent > 10*time.Second {
							t.Errorf("connection %v (-want +got):\n%s", c, diff)
						}
					}
				}
				if !found {
					t.Errorf("no connection from %s among %d", own, len(conns))
				}
				if few, err := d.Connections(0); err != nil || len(few) != 0 {
					t.Errorf("at most none: %v, %v", few, err)
				}
				id, err := bpf.ProgramID(d.packets.progs[bpf.ProgFromClient])
				if err != nil {
					t.Fatal(err)
				}
				if same := fmt.Sprint(id) == last; round != "start" && same != (round == "restart") {
					t.Errorf("%s: program %d after %s", round, id, last)
				}
				await(t, "the new programs", func() bool { return runsProgram(t, n.cfg, d, n.client) && runsProgram(t, n.cfg, d, n.server) })
				last = fmt.Sprint(id)
			})
		}
	})
}

// The role of a device decides which programs it runs and whether its flows may take the fast path.
func TestRolesOfDevices(t *testing.T) {
	n := newPacketNode(t)
	uplink := newPod(t, 3)
	if err := netlink.RouteAdd(&netlink.Route{Gw: uplink.addr.AsSlice()}); err != nil {
		t.Fatal(err)
	}
	for fast, want := range map[bool]map[int]bpf.Device{
		false: {n.client.host.Attrs().Index: {Flags: bpf.DeviceClient}, n.server.host.Attrs().Index: {Flags: bpf.DeviceClient}},
		true: {
			n.client.host.Attrs().Index: {Flags: bpf.DeviceClient | bpf.DevicePeer}, n.server.host.Attrs().Index: {Flags: bpf.DeviceClient | bpf.DevicePeer},
			uplink.host.Attrs().Index: {Flags: bpf.DeviceUplink},
		},
	} {
		t.Run(fmt.Sprint("fast path ", fast), func(t *testing.T) {
			n.cfg.FastPath = fast
			d := openPackets(t, n.cfg, counted(t, false))
			await(t, "attached", func() bool { return cmp.Equal(on(d), []string{"pod.1", "pod.2", "pod.3"}) })
			programs := map[string][]string{}
			for _, h := range d.Hooks() {
				if h.Device != "" {
					programs[h.Device] = append(programs[h.Device], h.Name)
				}
			}
			client := []string{bpf.ProgFromClient, bpf.ProgToClient}
			wantPrograms := map[string][]string{"pod.1": client, "pod.2": client, "pod.3": {bpf.ProgFromNetwork, bpf.ProgToNetwork}}
			if diff := cmp.Diff(wantPrograms, programs); diff != "" {
				t.Errorf("programs (-want +got):\n%s", diff)
			}
			have := map[int]bpf.Device{}
			if err := iterate(t.Context(), d.Reader, bpf.MapDevices, func(i uint32, v bpf.Device) { have[int(i)] = v }); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, have, cmpopts.IgnoreFields(bpf.Device{}, "_")); diff != "" {
				t.Errorf("devices (-want +got):\n%s", diff)
			}
		})
	}
	// A device whose role changes gets the programs of its new role and loses the others.
	d := openPackets(t, n.cfg, counted(t, false))
	role := func() string {
		for _, h := range d.Hooks() {
			if h.Device == "pod.3" && h.Attached && (h.Name == bpf.ProgFromClient || h.Name == bpf.ProgFromNetwork) {
				return h.Name
			}
		}
		return ""
	}
	await(t, "an uplink", func() bool { return role() == bpf.ProgFromNetwork })
	if err := netlink.RouteDel(&netlink.Route{Gw: uplink.addr.AsSlice(), LinkIndex: uplink.host.Attrs().Index}); err != nil {
		t.Fatal(err)
	}
	await(t, "no uplink any more", func() bool { return role() == bpf.ProgFromClient })
	path := ours(n.cfg).linkPath(linkName(bpf.ProgFromNetwork, uplink.host.Attrs().Index))
	await(t, "its old program to go", func() bool {
		_, err := os.Stat(path)
		return errors.Is(err, os.ErrNotExist)
	})
}

// The programs have the guarantee that every VIP is in the ranges exactly while it holds.
func TestGuaranteeOfRanges(t *testing.T) {
	n := newPacketNode(t)
	d, err := open(t.Context(), n.cfg, counted(t, false), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	guaranteed := func() bool {
		var s bpf.PacketSettings
		if err := d.maps[bpf.MapPacketSettings].Lookup(uint32(0), &s); err != nil {
			t.Fatal(err)
		}
		return s.Flags&bpf.PacketVIPsInRanges != 0
	}
	inside, outside := n.state(), n.state()
	outside.Frontends[lb.Address{AddrPort: netip.MustParseAddrPort("10.9.9.9:80"), Protocol: clusterset.TCP}] = lb.Frontend{ID: 9}
	have := lb.NewState()
	for i, step := range []struct {
		to   lb.State
		want bool
	}{{inside, true}, {outside, false}, {outside, false}, {inside, true}, {lb.NewState(), true}, {outside, false}} {
		if err := d.Apply(t.Context(), lbtest.Diff(have, step.to)); err != nil {
			t.Fatal(err)
		}
		have = step.to
		if guaranteed() != step.want {
			t.Errorf("step %d: guaranteed %v, want %v", i, guaranteed(), step.want)
		}
	}
	// An added range is in the nets at once.
	if err := d.Apply(t.Context(), lbtest.Diff(have, inside)); err != nil {
		t.Fatal(err)
	}
	wider := n.state()
	wider.Ranges[netip.MustParsePrefix("fd99::/48")] = true
	if err := d.Apply(t.Context(), lbtest.Diff(inside, wider)); err != nil || !guaranteed() {
		t.Fatalf("guaranteed %v, %v", guaranteed(), err)
	}
	var s bpf.PacketSettings
	if err := d.maps[bpf.MapPacketSettings].Lookup(uint32(0), &s); err != nil || !netHolds(s, netip.MustParseAddr("fd99::1")) {
		t.Errorf("an added range is in no net: %+v, %v", s, err)
	}
	have = wider
	// The guarantee is withdrawn before the write that breaks it, also if that write fails.
	if err := d.Apply(t.Context(), lbtest.Diff(have, inside)); err != nil || !guaranteed() {
		t.Fatalf("guaranteed %v, %v", guaranteed(), err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := d.Apply(ctx, lbtest.Diff(inside, outside)); !errors.Is(err, context.Canceled) || guaranteed() {
		t.Errorf("guaranteed %v, %v, want no guarantee while a write may break it", guaranteed(), err)
	}
}

// Attachments lists each program and its place, for TCX and for clsact, with run times if the kernel counts them.
func TestAttachments(t *testing.T) {
	bothWays(t, func(t *testing.T, noTCX bool) {
		t.Helper()
		n := newPacketNode(t)
		stats, err := ebpf.EnableStats(uint32(unix.BPF_STATS_RUN_TIME))
		if err != nil {
			t.Fatal(err)
		}
		defer stats.Close()
		d := openPackets(t, n.cfg, counted(t, noTCX))
		await(t, "attached", func() bool { return cmp.Equal(on(d), []string{"pod.1", "pod.2"}) })
		n.client.ask(t)
		kind := map[bool]string{true: "clsact", false: "tcx"}[noTCX]
		want := map[string]bool{}
		for _, h := range bpf.Hooks() {
			want["cgroup "+n.cfg.CgroupRoot+" "+h.Name] = true
		}
		for _, dev := range []string{"pod.1", "pod.2"} {
			for _, hook := range []string{bpf.ProgFromClient, bpf.ProgToClient} {
				want[kind+" "+dev+" "+hook] = true
			}
		}
		found, err := d.Attachments(n.cfg.CgroupRoot)
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range found {
			key := a.Kind + " " + a.Where + " " + a.Hook
			if !want[key] || a.Program == 0 {
				t.Errorf("%+v is not expected", a)
			}
			delete(want, key)
			if a.Kind == kind && a.Where == "pod.1" && (a.Runs == 0 || a.Time == 0) {
				t.Errorf("%s has run %d times in %v", key, a.Runs, a.Time)
			}
		}
		for key := range want {
			t.Errorf("%s is not listed", key)
		}
	})
}
