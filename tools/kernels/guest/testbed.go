package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"github.com/isthmus-net/isthmus/agent"
	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// The addresses of client, node and backend, in both families.
var (
	links = []struct{ client, nodeIn, nodeOut, backend netip.Prefix }{
		{prefix("10.97.1.2/24"), prefix("10.97.1.1/24"), prefix("10.97.2.1/24"), prefix("10.97.2.2/24")},
		{prefix("fd97::1:2/112"), prefix("fd97::1:1/112"), prefix("fd97::2:1/112"), prefix("fd97::2:2/112")},
	}
	echoVIPs   = []netip.Addr{netip.MustParseAddr("243.0.0.5"), netip.MustParseAddr("fd24::5")}
	emptyVIPs  = []netip.Addr{netip.MustParseAddr("243.0.0.6"), netip.MustParseAddr("fd24::6")}
	prefix     = netip.MustParsePrefix
	protocols  = []clusterset.Protocol{clusterset.TCP, clusterset.UDP, clusterset.SCTP}
	servedPort = uint16(80)
)

// backendPort is the port of the backend, for every protocol.
const backendPort = 8080

// testbed is the network, the backend's servers and the agent.
type testbed struct {
	client, node, backend *netlab.Namespace
	cgroup                *netlab.Cgroup // of the client's sockets
	cfg                   agent.Config
	agent                 *agent.Agent
	packets               *datapath.Datapath // in the node; nil if it does not serve packets
	packetCfg             datapath.Config
	gatewayBPFFS          string   // of the gateway in the node; "" without a gateway
	folders               []string // created for BPF filesystems
	undo                  []func() error
}

// newTestbed returns a running testbed. The caller closes it, even after an error.
func newTestbed(ctx context.Context) (*testbed, error) {
	tb := &testbed{}
	for _, step := range []func(context.Context) error{tb.makeNetwork, tb.startServers, tb.startAgent} {
		if err := step(ctx); err != nil {
			return tb, err
		}
	}
	return tb, nil
}

func (tb *testbed) close() error {
	var errs []error
	for _, undo := range slices.Backward(tb.undo) {
		errs = append(errs, undo())
	}
	return errors.Join(errs...)
}

// nothingLeft reports folders that a closed testbed could not remove.
func (tb *testbed) nothingLeft() error {
	var errs []error
	for _, dir := range tb.folders {
		errs = append(errs, os.Remove(dir))
	}
	return errors.Join(errs...)
}

// mountBPFFS mounts a new BPF filesystem. It must be empty at the end.
func (tb *testbed) mountBPFFS() (dir string, err error) {
	if dir, err = os.MkdirTemp("", "isthmus-kernels-"); err != nil {
		return "", err
	}
	tb.folders = append(tb.folders, dir)
	unmount, err := netlab.MountBPFFS(dir)
	if err != nil {
		return "", err
	}
	tb.undo = append(tb.undo, unmount, func() error {
		left, err := filepath.Glob(filepath.Join(dir, "isthmus*")) // the kernel has files there as well
		if len(left) > 0 {
			return fmt.Errorf("pins are left: %v", left)
		}
		return err
	})
	return dir, nil
}

func (tb *testbed) makeNetwork(context.Context) error {
	for _, n := range []**netlab.Namespace{&tb.client, &tb.node, &tb.backend} {
		ns, err := netlab.NewNamespace()
		if err != nil {
			return err
		}
		*n = ns
		tb.undo = append(tb.undo, ns.Close)
		if err := ns.Do(setUpIPv6); err != nil {
			return err
		}
	}
	for _, l := range links {
		if err := errors.Join(
			tb.client.Connect(tb.node, l.client, l.nodeIn),
			tb.node.Connect(tb.backend, l.nodeOut, l.backend),
			tb.client.Route(l.nodeIn.Addr()),
			tb.backend.Route(l.nodeOut.Addr()),
			tb.node.Route(l.backend.Addr()), // makes that device the node's uplink
		); err != nil {
			return err
		}
	}
	return nil
}

// setUpIPv6 enables IPv6 forwarding in the calling thread's namespace, and disables duplicate address detection, so that
// addresses are usable immediately.
func setUpIPv6() error {
	for path, value := range map[string]string{"all/forwarding": "1", "default/accept_dad": "0"} {
		if err := os.WriteFile(filepath.Join("/proc/sys/net/ipv6/conf", path), []byte(value), 0); err != nil {
			return fmt.Errorf("set up IPv6: %w", err)
		}
	}
	return nil
}

// startServers starts the backend's echo servers.
func (tb *testbed) startServers(ctx context.Context) error {
	return tb.backend.Do(func() error {
		at := fmt.Sprintf(":%d", backendPort)
		l, err := new(net.ListenConfig).Listen(ctx, "tcp", at)
		if err != nil {
			return err
		}
		tb.undo = append(tb.undo, l.Close)
		go echoTCP(l)
		// Each family has its own socket: the answer of a dual-stack socket could have another source address.
		for _, network := range []string{"udp4", "udp6"} {
			c, err := new(net.ListenConfig).ListenPacket(ctx, network, at)
			if err != nil {
				return err
			}
			tb.undo = append(tb.undo, c.Close)
			go echoUDP(c)
		}
		if emulated() {
			return tb.startSCTP()
		}
		return nil
	})
}

func echoTCP(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			var b [64]byte
			for {
				n, err := c.Read(b[:])
				if err != nil {
					return
				}
				if _, err := c.Write(b[:n]); err != nil {
					return
				}
			}
		}()
	}
}

func echoUDP(c net.PacketConn) {
	var b [64]byte
	for {
		n, from, err := c.ReadFrom(b[:])
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil {
			_, _ = c.WriteTo(b[:n], from) // a missing answer fails the check at the client
		}
	}
}

// startAgent starts an agent for the sockets of a new cgroup, and moves this process into that cgroup.
func (tb *testbed) startAgent(ctx context.Context) error {
	cgroup, err := netlab.NewCgroup()
	if err != nil {
		return err
	}
	tb.cgroup = cgroup
	tb.undo = append(tb.undo, cgroup.Close)
	dir, err := tb.mountBPFFS()
	if err != nil {
		return err
	}
	tb.cfg = agent.Config{CgroupRoot: cgroup.Path, BPFFS: dir, Topology: agent.Topology{Ranges: ranges}}
	tb.undo = append(tb.undo, func() error { return agent.Cleanup(tb.cfg) })
	if err := tb.restartAgent(ctx); err != nil {
		return err
	}
	tb.undo = append(tb.undo, func() error { return tb.agent.Close() })
	return cgroup.Enter()
}

// restartAgent stops the agent, if one runs, and starts another.
func (tb *testbed) restartAgent(ctx context.Context) error {
	if tb.agent != nil {
		if err := tb.agent.Close(); err != nil {
			return err
		}
	}
	a, err := agent.New(ctx, tb.cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	tb.agent = a
	return a.Sync(ctx, snapshot())
}

// snapshot returns two Services, one with the backend and one without backends.
func snapshot() *clusterset.Snapshot {
	backends := make([]netip.Addr, len(links))
	for i, l := range links {
		backends[i] = l.backend.Addr()
	}
	return &clusterset.Snapshot{Services: []clusterset.Service{service("echo", echoVIPs, backends), service("empty", emptyVIPs, nil)}}
}

// service returns a Service with the backends, each in a slice of its own.
func service(name string, vips, backends []netip.Addr) clusterset.Service {
	svc := clusterset.Service{Import: clusterset.Import{
		Service: clusterset.ServiceName{Namespace: "kernels", Name: name}, Type: clusterset.ClusterSetIP, IPs: vips,
	}}
	var ports []clusterset.EndpointPort
	for _, p := range protocols {
		svc.Ports = append(svc.Ports, clusterset.Port{Name: p.String(), Protocol: p, Port: servedPort})
		ports = append(ports, clusterset.EndpointPort{Name: p.String(), Protocol: p, Port: backendPort})
	}
	for i, b := range backends {
		svc.Slices = append(svc.Slices, clusterset.Slice{
			Name: fmt.Sprint(name, i), Cluster: "other", Family: clusterset.FamilyOf(b), Ports: ports,
			Endpoints: []clusterset.Endpoint{{Addrs: []netip.Addr{b}, Ready: true, Serving: true}},
		})
	}
	return svc
}
