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

// The addresses: a client, a node between, a backend; of both families.
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

// backendPort is where the backend listens, with every protocol.
const backendPort = 8080

// testbed is the network, the backend's servers and the agent.
type testbed struct {
	client, node, backend *netlab.Namespace
	cgroup                *netlab.Cgroup // of the client's sockets
	cfg                   agent.Config
	agent                 *agent.Agent
	packets               *datapath.Datapath // in the node; nil without
	packetCfg             datapath.Config
	gatewayBPFFS          string   // of the gateway in the node; "" without
	folders               []string // that were made for BPF filesystems
	undo                  []func() error
}

// newTestbed returns a testbed in which everything is up. The caller closes it, also after an error.
func newTestbed(ctx context.Context) (*testbed, error) {
	w := &testbed{}
	for _, step := range []func(context.Context) error{w.makeNetwork, w.startServers, w.startAgent} {
		if err := step(ctx); err != nil {
			return w, err
		}
	}
	return w, nil
}

func (w *testbed) close() error {
	var errs []error
	for _, undo := range slices.Backward(w.undo) {
		errs = append(errs, undo())
	}
	return errors.Join(errs...)
}

// nothingLeft reports what a closed testbed has left behind.
func (w *testbed) nothingLeft() error {
	var errs []error
	for _, dir := range w.folders {
		errs = append(errs, os.Remove(dir))
	}
	return errors.Join(errs...)
}

// mountBPFFS mounts a BPF filesystem of its own. When it is unmounted there must be nothing in it.
func (w *testbed) mountBPFFS() (dir string, err error) {
	if dir, err = os.MkdirTemp("", "isthmus-kernels-"); err != nil {
		return "", err
	}
	w.folders = append(w.folders, dir)
	unmount, err := netlab.MountBPFFS(dir)
	if err != nil {
		return "", err
	}
	w.undo = append(w.undo, unmount, func() error {
		left, err := filepath.Glob(filepath.Join(dir, "isthmus*")) // the kernel has files there, too
		if len(left) > 0 {
			return fmt.Errorf("pins are left: %v", left)
		}
		return err
	})
	return dir, nil
}

func (w *testbed) makeNetwork(context.Context) error {
	for _, n := range []**netlab.Namespace{&w.client, &w.node, &w.backend} {
		ns, err := netlab.NewNamespace()
		if err != nil {
			return err
		}
		*n = ns
		w.undo = append(w.undo, ns.Close)
		if err := ns.Do(setUpIPv6); err != nil {
			return err
		}
	}
	for _, l := range links {
		if err := errors.Join(
			w.client.Connect(w.node, l.client, l.nodeIn),
			w.node.Connect(w.backend, l.nodeOut, l.backend),
			w.client.Route(l.nodeIn.Addr()),
			w.backend.Route(l.nodeOut.Addr()),
			w.node.Route(l.backend.Addr()), // which makes that device the node's uplink
		); err != nil {
			return err
		}
	}
	return nil
}

// setUpIPv6 makes the calling thread's namespace forward IPv6, and use an address at once: who else should
// have it?
func setUpIPv6() error {
	for path, value := range map[string]string{"all/forwarding": "1", "default/accept_dad": "0"} {
		if err := os.WriteFile(filepath.Join("/proc/sys/net/ipv6/conf", path), []byte(value), 0); err != nil {
			return fmt.Errorf("set up IPv6: %w", err)
		}
	}
	return nil
}

// startServers makes the backend send back what it gets.
func (w *testbed) startServers(ctx context.Context) error {
	return w.backend.Do(func() error {
		at := fmt.Sprintf(":%d", backendPort)
		l, err := new(net.ListenConfig).Listen(ctx, "tcp", at)
		if err != nil {
			return err
		}
		w.undo = append(w.undo, l.Close)
		go echoTCP(l)
		// One socket for each family: an answer of a socket for both has no address of its own to come from.
		for _, network := range []string{"udp4", "udp6"} {
			c, err := new(net.ListenConfig).ListenPacket(ctx, network, at)
			if err != nil {
				return err
			}
			w.undo = append(w.undo, c.Close)
			go echoUDP(c)
		}
		if emulated() {
			return w.startSCTP()
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
			_, _ = c.WriteTo(b[:n], from) // the client misses its answer and says so
		}
	}
}

// startAgent starts an agent for the sockets of a cgroup, in which this process is from then on.
func (w *testbed) startAgent(ctx context.Context) error {
	cgroup, err := netlab.NewCgroup()
	if err != nil {
		return err
	}
	w.cgroup = cgroup
	w.undo = append(w.undo, cgroup.Close)
	dir, err := w.mountBPFFS()
	if err != nil {
		return err
	}
	w.cfg = agent.Config{CgroupRoot: cgroup.Path, BPFFS: dir}
	w.undo = append(w.undo, func() error { return agent.Cleanup(w.cfg) })
	if err := w.restartAgent(ctx); err != nil {
		return err
	}
	w.undo = append(w.undo, func() error { return w.agent.Close() })
	return cgroup.Enter()
}

// restartAgent ends the agent, if there is one, and starts another.
func (w *testbed) restartAgent(ctx context.Context) error {
	if w.agent != nil {
		if err := w.agent.Close(); err != nil {
			return err
		}
	}
	a, err := agent.New(ctx, w.cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	w.agent = a
	return a.Sync(ctx, snapshot())
}

// snapshot is two Services, one with the backend and one without any.
func snapshot() *clusterset.Snapshot {
	backends := make([]netip.Addr, len(links))
	for i, l := range links {
		backends[i] = l.backend.Addr()
	}
	return &clusterset.Snapshot{Services: []clusterset.Service{service("echo", echoVIPs, backends), service("empty", emptyVIPs, nil)}}
}

// service is a Service with the backends, each of them a slice.
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
