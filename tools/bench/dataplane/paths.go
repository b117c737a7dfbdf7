package dataplane

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/agent"
	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/tools/bench/dataplane/internal/services"
	"github.com/isthmus-net/isthmus/tools/deps/debian"
	"github.com/isthmus-net/isthmus/tools/netlab"
	"github.com/isthmus-net/isthmus/tools/netlab/packetpath"
	"github.com/isthmus-net/isthmus/tools/scale/kubeproxy"
	"github.com/isthmus-net/isthmus/tools/scale/simulation"
)

// The names of the paths.
const (
	direct     = "direct"
	socketOne  = "socket path"
	socketMany = "socket path, many"
	packetSlow = "packet slow path"
	packetFast = "packet fast path"
	nftByHand  = "hand-written nftables"
	kubeProxy  = "kube-proxy"
)

// path is a way to the backend.
type path struct {
	name   string
	lane   *lane
	cgroup *netlab.Cgroup // of the client's sockets; nil: one without programs
	to     netip.AddrPort
	// connected restricts the path to connected sockets: it has no program for sendmsg.
	connected bool
}

// plane is a dataplane of Isthmus: the name of its path, and the BPF filesystem that holds its maps and programs.
type plane struct{ name, bpffs string }

// buildPaths builds all paths, in the order of their turns.
func (b *testbed) buildPaths(ctx context.Context) error {
	plain, err := b.newLane()
	if err != nil {
		return err
	}
	b.paths = append(b.paths, path{name: direct, lane: plain, to: backend})
	for _, build := range []func(context.Context, *lane) error{b.buildSocketOne, b.buildSocketMany} {
		if err := build(ctx, plain); err != nil {
			return err
		}
	}
	for _, build := range []func(context.Context, *lane) error{b.buildPacketSlow, b.buildPacketFast, b.buildNFT, b.buildKubeProxy} {
		own, err := b.newLane()
		if err != nil {
			return err
		}
		if err := build(ctx, own); err != nil {
			return err
		}
	}
	return b.buildReferences()
}

// vip is the VIP with a live backend, on every path of Isthmus and in the hand-written rules.
var vip = netip.AddrPortFrom(services.VIP(0), services.Port)

// newPlane returns the configuration of a new dataplane and the cgroup whose sockets it serves.
func (b *testbed) newPlane(name string) (datapath.Config, *netlab.Cgroup, error) {
	cgroup, err := b.newCgroup()
	if err != nil {
		return datapath.Config{}, nil, err
	}
	dir := filepath.Join(b.dir, fmt.Sprint("bpffs", len(b.planes)))
	if err := os.Mkdir(dir, 0o700); err != nil {
		return datapath.Config{}, nil, err
	}
	unmount, err := netlab.MountBPFFS(dir)
	if err != nil {
		return datapath.Config{}, nil, err
	}
	b.undo = append(b.undo, unmount)
	b.planes = append(b.planes, plane{name, dir})
	return datapath.Config{CgroupRoot: cgroup.Path, BPFFS: dir}, cgroup, nil
}

// newSocketPlane returns the configuration of an agent and the cgroup whose sockets it serves.
func (b *testbed) newSocketPlane(name string) (agent.Config, *netlab.Cgroup, error) {
	base, cgroup, err := b.newPlane(name)
	if err != nil {
		return agent.Config{}, nil, err
	}
	cfg := agent.Config{CgroupRoot: base.CgroupRoot, BPFFS: base.BPFFS, Topology: agent.Topology{Ranges: []netip.Prefix{services.Range}}}
	b.undo = append(b.undo, func() error { return agent.Cleanup(cfg) })
	return cfg, cgroup, nil
}

// buildSocketOne builds the socket path with one Service.
func (b *testbed) buildSocketOne(ctx context.Context, l *lane) error {
	cfg, cgroup, err := b.newSocketPlane(socketOne)
	if err != nil {
		return err
	}
	a, err := agent.New(ctx, cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	// Close leaves programs and maps in place.
	if err := errors.Join(a.Sync(ctx, b.one.Snapshot()), a.Close()); err != nil {
		return err
	}
	b.paths = append(b.paths, path{name: socketOne, lane: l, cgroup: cgroup, to: vip})
	return nil
}

// buildSocketMany builds the socket path with many Services. A separate process programs them, and is measured.
func (b *testbed) buildSocketMany(ctx context.Context, l *lane) error {
	cfg, cgroup, err := b.newSocketPlane(socketMany)
	if err != nil {
		return err
	}
	if err := b.measureSize(ctx, cfg); err != nil {
		return err
	}
	b.paths = append(b.paths, path{name: socketMany, lane: l, cgroup: cgroup, to: vip})
	return nil
}

func (b *testbed) buildPacketSlow(ctx context.Context, l *lane) error {
	return b.buildPacket(ctx, l, packetSlow, false)
}

func (b *testbed) buildPacketFast(ctx context.Context, l *lane) error {
	return b.buildPacket(ctx, l, packetFast, true)
}

// buildPacket builds a packet path with many Services in the node of a lane.
func (b *testbed) buildPacket(ctx context.Context, l *lane, name string, fast bool) error {
	cfg, _, err := b.newPlane(name)
	if err != nil {
		return err
	}
	cfg.Devices, cfg.FastPath = l.devices, fast
	b.undo = append(b.undo, func() error { return l.node.Do(func() error { return datapath.Remove(cfg) }) })
	d, err := packetpath.Serve(ctx, l.node, cfg, lb.Input{Snapshot: b.many.Snapshot(), Ranges: []netip.Prefix{services.Range}})
	if err != nil {
		return err
	}
	// Close leaves programs and maps in place.
	if err := d.Close(); err != nil {
		return err
	}
	b.paths = append(b.paths, path{name: name, lane: l, to: vip})
	return nil
}

// buildNFT builds a path whose node translates one VIP with hand-written nftables rules.
func (b *testbed) buildNFT(ctx context.Context, l *lane) error {
	if err := debian.Ensure(ctx, b.progress, "nftables"); err != nil {
		return err
	}
	rules := fmt.Sprintf(`table ip bench {
	map vips {
		type ipv4_addr . inet_proto . inet_service : verdict
		elements = { %[1]s . tcp . %[2]d : goto echo, %[1]s . udp . %[2]d : goto echo }
	}
	chain prerouting {
		type nat hook prerouting priority dstnat
		ip daddr . meta l4proto . th dport vmap @vips
	}
	chain echo {
		meta l4proto { tcp, udp } dnat ip to numgen random mod 1 map { 0 : %[3]s . %[4]d }
	}
}
`, vip.Addr(), vip.Port(), backend.Addr(), backend.Port())
	cmd := exec.CommandContext(ctx, "nsenter", "--net="+l.node.Path(), "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(rules)
	if output, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("nft: %w\n%s", err, output)
	}
	b.paths = append(b.paths, path{name: nftByHand, lane: l, to: vip})
	return nil
}

// buildKubeProxy builds a path whose node translates many VIPs with the rules of a real kube-proxy.
func (b *testbed) buildKubeProxy(ctx context.Context, l *lane) error {
	assets, err := simulation.Assets(ctx, b.progress)
	if err != nil {
		return err
	}
	dir := filepath.Join(b.dir, kubeProxy)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	peers := make([]kubeproxy.Service, b.many.Services)
	for i, svc := range b.many.Snapshot().Services {
		p := kubeproxy.Service{Name: svc.Service.Name, Port: services.Port, EndpointPort: services.EndpointPort}
		for _, port := range svc.Ports {
			p.Protocols = append(p.Protocols, corev1.Protocol(port.Protocol.String()))
		}
		for _, e := range svc.Slices[0].Endpoints {
			p.Endpoints = append(p.Endpoints, e.Addrs[0])
		}
		peers[i] = p
	}
	took, err := kubeproxy.Program(ctx, kubeproxy.Config{
		Assets: assets, Dir: dir, Address: l.address, Progress: b.progress,
	}, l.node, peers)
	if err != nil {
		return err
	}
	b.peerProgram = took.Seconds()
	fmt.Fprintf(b.progress, "kube-proxy programmed %d Services with %d endpoints each in %.1fs\n", b.many.Services, b.many.Endpoints, b.peerProgram)
	b.paths = append(b.paths, path{name: kubeProxy, lane: l, to: netip.AddrPortFrom(kubeproxy.ClusterIP(0), services.Port)})
	return nil
}
