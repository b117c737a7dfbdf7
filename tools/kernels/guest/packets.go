package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/tools/netlab"
	"github.com/isthmus-net/isthmus/tools/netlab/packetpath"
)

// packetChecks are those of the packet path: the client's sockets are outside of every cgroup that is served,
// and the node between translates.
func packetChecks() []check {
	all := []check{
		{"packets: a node serves its devices", func(ctx context.Context, w *testbed) error { return w.servePackets(ctx, false) }},
		{"what the kernel lacks is told", lacksAreTold},
	}
	for _, path := range []string{"slow", "fast"} {
		if path == "fast" {
			all = append(all, check{"packets: a restart takes the fast path", func(ctx context.Context, w *testbed) error { return w.servePackets(ctx, true) }})
		}
		all = append(all,
			check{"packets, " + path + " path: TCP over IPv4", outside(connects("tcp4", echoVIPs[0]))},
			check{"packets, " + path + " path: TCP over IPv6", outside(connects("tcp6", echoVIPs[1]))},
			check{"packets, " + path + " path: UDP over IPv4", outside(connects("udp4", echoVIPs[0]))},
			check{"packets, " + path + " path: UDP over IPv6", outside(connects("udp6", echoVIPs[1]))},
			check{"packets, " + path + " path: TCP over IPv4 is refused", outside(refusesTCP("tcp4", emptyVIPs[0]))},
			check{"packets, " + path + " path: TCP over IPv6 is refused", outside(refusesTCP("tcp6", emptyVIPs[1]))},
			check{"packets, " + path + " path: UDP over IPv4 is refused", outside(refusesUDP("udp4", emptyVIPs[0]))},
			check{"packets, " + path + " path: UDP over IPv6 is refused", outside(refusesUDP("udp6", emptyVIPs[1]))},
			check{"packets, " + path + " path: an address nobody serves is refused", outside(refusesTCP("tcp4", netip.MustParseAddr("243.0.0.77")))},
		)
		if emulated() {
			all = append(all, check{"packets, " + path + " path: SCTP over IPv4", outside(connectsSCTP)})
		}
	}
	return all
}

// ranges are where the VIPs are from.
var ranges = []netip.Prefix{prefix("243.0.0.0/8"), prefix("fd24::/64")}

// servePackets makes the node translate packets, in a cgroup and a BPF filesystem of their own.
func (w *testbed) servePackets(ctx context.Context, fast bool) error {
	if w.packetCfg.BPFFS == "" {
		if err := w.placePackets(); err != nil {
			return err
		}
	}
	if w.packets != nil {
		if err := w.packets.Close(); err != nil {
			return err
		}
		w.packets = nil
	}
	w.packetCfg.FastPath = fast
	d, err := packetpath.Serve(ctx, w.node, w.packetCfg, lb.Input{Snapshot: snapshot(), Ranges: ranges})
	if err != nil {
		return err
	}
	w.packets = d
	return nil
}

func (w *testbed) placePackets() error {
	cgroup, err := netlab.NewCgroup() // nobody is ever in it
	if err != nil {
		return err
	}
	w.undo = append(w.undo, cgroup.Close)
	dir, err := w.mountBPFFS()
	if err != nil {
		return err
	}
	cfg := datapath.Config{CgroupRoot: cgroup.Path, BPFFS: dir}
	for _, l := range links {
		cfg.Devices = append(cfg.Devices, netlab.DeviceName(l.nodeIn), netlab.DeviceName(l.nodeOut))
	}
	w.packetCfg = cfg
	w.undo = append(w.undo,
		func() error { return w.node.Do(func() error { return datapath.Remove(cfg) }) },
		func() error {
			if w.packets == nil {
				return nil
			}
			return w.packets.Close()
		})
	return nil
}

// outside runs a check with sockets that no program translates.
func outside(run func(context.Context, *testbed) error) func(context.Context, *testbed) error {
	return func(ctx context.Context, w *testbed) error {
		if w.packets == nil {
			return errors.New("the node does not serve packets")
		}
		if err := w.cgroup.Leave(); err != nil {
			return err
		}
		return errors.Join(run(ctx, w), w.cgroup.Enter())
	}
}

// soon is how long a refusal may take: it needs one round trip, and a lost packet would be sent again after a second.
const soon = 900 * time.Millisecond

// refusesTCP returns a check that a connection is refused by an answer.
func refusesTCP(network string, vip netip.Addr) func(context.Context, *testbed) error {
	return func(ctx context.Context, w *testbed) error {
		begin := time.Now()
		c, err := w.dial(ctx, &net.Dialer{}, network, at(vip))
		if err == nil {
			return errors.Join(fmt.Errorf("connected to %s", c.RemoteAddr()), c.Close())
		}
		return isRefused(begin, err)
	}
}

// refusesUDP returns a check that a datagram is refused by an answer.
func refusesUDP(network string, vip netip.Addr) func(context.Context, *testbed) error {
	return func(ctx context.Context, w *testbed) error {
		c, err := w.dial(ctx, &net.Dialer{}, network, at(vip))
		if err != nil {
			return err
		}
		defer c.Close()
		begin := time.Now()
		err = isAnswered(ctx, c)
		if err == nil {
			return errors.New("there was an answer")
		}
		return isRefused(begin, err)
	}
}

func isRefused(begin time.Time, err error) error {
	if !errors.Is(err, unix.ECONNREFUSED) {
		return err
	}
	if took := time.Since(begin); took > soon {
		return fmt.Errorf("it took %s", took)
	}
	return nil
}

// lacksAreTold checks that what this kernel does not have is said, and nothing else.
func lacksAreTold(ctx context.Context, w *testbed) error {
	if w.packets == nil {
		return errors.New("the node does not serve packets")
	}
	told := w.packets.Missing()
	tells := func(what string) bool {
		return slices.ContainsFunc(told, func(s string) bool { return strings.Contains(s, what) })
	}
	release, err := kernel()
	if err != nil {
		return err
	}
	older := func(major, minor int) bool { return slices.Compare(release, []int{major, minor}) < 0 }
	for what, want := range map[string]bool{"TCX": older(6, 6), "bpf_sock_destroy": older(6, 5), "MPTCP": false} {
		if tells(what) != want {
			return fmt.Errorf("it is said that the kernel lacks %s: %t, want %t; said is %q", what, !want, want, told)
		}
	}
	return nil
}

// kernel returns the first two numbers of the kernel's release.
func kernel() ([]int, error) {
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return nil, err
	}
	var major, minor int
	if _, err := fmt.Sscanf(string(release), "%d.%d", &major, &minor); err != nil {
		return nil, fmt.Errorf("read the kernel's release %q: %w", release, err)
	}
	return []int{major, minor}, nil
}
