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

// packetChecks returns the checks of the packet path: the client's sockets are outside of every served cgroup, and the node
// translates their packets.
func packetChecks() []check {
	all := []check{
		{"packets: a node serves its devices", func(ctx context.Context, tb *testbed) error { return tb.servePackets(ctx, false) }},
		{"missing kernel features are reported", missingIsReported},
	}
	for _, path := range []string{"slow", "fast"} {
		if path == "fast" {
			all = append(all, check{"packets: a restart switches to the fast path", func(ctx context.Context, tb *testbed) error { return tb.servePackets(ctx, true) }})
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
			check{"packets, " + path + " path: an address without a Service is refused", outside(refusesTCP("tcp4", netip.MustParseAddr("243.0.0.77")))},
		)
		if emulated() {
			all = append(all, check{"packets, " + path + " path: SCTP over IPv4", outside(connectsSCTP)})
		}
	}
	return all
}

// ranges contain the VIPs.
var ranges = []netip.Prefix{prefix("243.0.0.0/8"), prefix("fd24::/64")}

// servePackets makes the node translate packets, with a separate cgroup and BPF filesystem.
func (tb *testbed) servePackets(ctx context.Context, fast bool) error {
	if tb.packetCfg.BPFFS == "" {
		if err := tb.placePackets(); err != nil {
			return err
		}
	}
	if tb.packets != nil {
		if err := tb.packets.Close(); err != nil {
			return err
		}
		tb.packets = nil
	}
	tb.packetCfg.FastPath = fast
	d, err := packetpath.Serve(ctx, tb.node, tb.packetCfg, lb.Input{Snapshot: snapshot(), Ranges: ranges})
	if err != nil {
		return err
	}
	tb.packets = d
	return nil
}

func (tb *testbed) placePackets() error {
	cgroup, err := netlab.NewCgroup() // it stays empty
	if err != nil {
		return err
	}
	tb.undo = append(tb.undo, cgroup.Close)
	dir, err := tb.mountBPFFS()
	if err != nil {
		return err
	}
	cfg := datapath.Config{CgroupRoot: cgroup.Path, BPFFS: dir}
	for _, l := range links {
		cfg.Devices = append(cfg.Devices, netlab.DeviceName(l.nodeIn), netlab.DeviceName(l.nodeOut))
	}
	tb.packetCfg = cfg
	tb.undo = append(tb.undo,
		func() error { return tb.node.Do(func() error { return datapath.Remove(cfg) }) },
		func() error {
			if tb.packets == nil {
				return nil
			}
			return tb.packets.Close()
		})
	return nil
}

// outside runs a check with sockets outside of the served cgroup.
func outside(run func(context.Context, *testbed) error) func(context.Context, *testbed) error {
	return func(ctx context.Context, tb *testbed) error {
		if tb.packets == nil {
			return errors.New("the node does not serve packets")
		}
		if err := tb.cgroup.Leave(); err != nil {
			return err
		}
		return errors.Join(run(ctx, tb), tb.cgroup.Enter())
	}
}

// soon is the time limit of a refusal. One round trip suffices; a lost packet would be sent again after a second.
const soon = 900 * time.Millisecond

// refusesTCP returns a check that a TCP connection is refused with a reset.
func refusesTCP(network string, vip netip.Addr) func(context.Context, *testbed) error {
	return func(ctx context.Context, tb *testbed) error {
		begin := time.Now()
		c, err := tb.dial(ctx, &net.Dialer{}, network, at(vip))
		if err == nil {
			return errors.Join(fmt.Errorf("connected to %s", c.RemoteAddr()), c.Close())
		}
		return isRefused(begin, err)
	}
}

// refusesUDP returns a check that a datagram is refused with an ICMP error.
func refusesUDP(network string, vip netip.Addr) func(context.Context, *testbed) error {
	return func(ctx context.Context, tb *testbed) error {
		c, err := tb.dial(ctx, &net.Dialer{}, network, at(vip))
		if err != nil {
			return err
		}
		defer c.Close()
		begin := time.Now()
		err = isAnswered(ctx, c)
		if err == nil {
			return errors.New("it was answered")
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

// missingIsReported checks that the features that this kernel lacks are reported, and no others.
func missingIsReported(ctx context.Context, tb *testbed) error {
	if tb.packets == nil {
		return errors.New("the node does not serve packets")
	}
	reported := tb.packets.Missing()
	isReported := func(feature string) bool {
		return slices.ContainsFunc(reported, func(s string) bool { return strings.Contains(s, feature) })
	}
	release, err := kernel()
	if err != nil {
		return err
	}
	older := func(major, minor int) bool { return slices.Compare(release, []int{major, minor}) < 0 }
	for feature, want := range map[string]bool{"TCX": older(6, 6), "bpf_sock_destroy": older(6, 5), "MPTCP": false} {
		if isReported(feature) != want {
			return fmt.Errorf("%s reported as missing: %t, want %t; reported: %q", feature, !want, want, reported)
		}
	}
	return nil
}

// kernel returns the major and minor version of the running kernel.
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
