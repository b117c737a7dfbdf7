package cluster

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"slices"

	"golang.org/x/sys/unix"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/isthmus-net/isthmus/tools/lab/internal/kube"
	"github.com/isthmus-net/isthmus/tools/lab/internal/supervisor"
	"github.com/isthmus-net/isthmus/tools/lab/topology"
)

// NodeCommand returns a command that will run on a machine: in its cgroups, so that hooks
// attached there see it, and in all its namespaces. It is killed with the caller, and by
// ctx. A machine that does not exist makes the command fail when it is run.
func (l *Lab) NodeCommand(ctx context.Context, node string, argv ...string) *exec.Cmd {
	m, err := l.find(node)
	return l.unless(err, m.Command(ctx, argv...))
}

// VisitorCommand is NodeCommand in all of the machine's namespaces but in none of its cgroups: hooks attached
// there do not see it, as they do not see what runs in a virtual machine.
func (l *Lab) VisitorCommand(ctx context.Context, node string, argv ...string) *exec.Cmd {
	m, err := l.find(node)
	return l.unless(err, m.Visit(ctx, argv...))
}

// unless makes cmd fail when it is run if err says so, or the lab cannot be used.
func (l *Lab) unless(err error, cmd *exec.Cmd) *exec.Cmd {
	if err == nil {
		err = l.usable()
	}
	if err != nil {
		cmd.Err = err
	}
	return cmd
}

// FabricCommand returns a command that will run on the host, in the network that reaches
// every API server, node and pod.
func (l *Lab) FabricCommand(ctx context.Context, argv ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "nsenter", slices.Concat([]string{"--net=" + l.fabric.Path(), "--"}, argv)...)
}

// FabricPath is the file of the network namespace that reaches every API server, node and pod.
func (l *Lab) FabricPath() string { return l.fabric.Path() }

// Kubectl returns a kubectl command against a cluster, as its administrator.
func (l *Lab) Kubectl(ctx context.Context, cluster string, argv ...string) *exec.Cmd {
	cmd := l.FabricCommand(ctx, slices.Concat([]string{l.settings.Programs["kubectl"], "--kubeconfig", l.Kubeconfig(cluster)}, argv)...)
	if _, ok := l.topology.Cluster(cluster); !ok {
		cmd.Err = fmt.Errorf("no cluster %q in lab %q, there are %s", cluster, l.name, l.topology)
	} else if err := l.usable(); err != nil {
		cmd.Err = err
	}
	return cmd
}

// KubectlPath is the kubectl executable of the running lab's Kubernetes version.
func (l *Lab) KubectlPath() string { return l.settings.Programs["kubectl"] }

// DialContext connects to an address, not a name, from the fabric. The connection can be
// used from any goroutine.
func (l *Lab) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	return l.fabric.DialContext(ctx, network, address)
}

// RESTConfig is the administrator's access to a cluster for client-go, usable from this
// process although the host's own network does not reach the API server.
func (l *Lab) RESTConfig(cluster string) (*rest.Config, error) {
	config, err := clientcmd.BuildConfigFromFlags("", l.Kubeconfig(cluster))
	if err != nil {
		return nil, fmt.Errorf("cluster %s: %w", cluster, err)
	}
	config.Dial = l.DialContext
	// The default, 5 requests a second, is for shared API servers.
	config.QPS, config.Burst = -1, 0
	return config, nil
}

// Cut takes a machine off the network; Heal brings it back.
func (l *Lab) Cut(_ context.Context, node string) error { return l.setLink(node, false) }

// Heal undoes Cut. It waits until the machine is reached from the fabric: a host
// that resolved its address during the cut has to time out first, and cannot connect until then.
func (l *Lab) Heal(ctx context.Context, node string) error {
	if err := l.setLink(node, true); err != nil {
		return err
	}
	machines := l.topology.Machines()
	m := machines[slices.IndexFunc(machines, func(m topology.Machine) bool { return m.Name == node })]
	return waitFor(ctx, node, func(ctx context.Context) error {
		for _, addr := range []netip.Addr{m.IPv4, m.IPv6} {
			conn, err := l.DialContext(ctx, "tcp", netip.AddrPortFrom(addr, tcpmux).String())
			switch {
			case errors.Is(err, unix.ECONNREFUSED):
			case err != nil:
				return err
			default:
				_ = conn.Close()
			}
		}
		return nil
	})
}

// tcpmux is a port without a listener: a refusal proves that the machine is reached.
const tcpmux = 1

func (l *Lab) setLink(node string, up bool) error {
	if _, err := l.find(node); err != nil {
		return err
	}
	if err := l.usable(); err != nil {
		return err
	}
	return l.fabric.SetLink(node, up)
}

// Stop ends one component of a machine and returns when it is gone. Up, or Start, starts it again.
func (l *Lab) Stop(_ context.Context, node, component string) error {
	m, _, err := l.component(node, component)
	if err != nil {
		return err
	}
	return m.Stop(component)
}

// Start starts one component of a machine unless it is alive. It waits until a kube-apiserver
// is ready, unless its machine is cut off; the other components run when it returns, no more.
func (l *Lab) Start(ctx context.Context, node, component string) error {
	m, spec, err := l.component(node, component)
	if err != nil {
		return err
	}
	if err := m.Start(spec); err != nil || component != kube.APIServer {
		return err
	}
	if connected, err := l.fabric.LinkUp(node); err != nil || !connected {
		return err
	}
	client, err := l.client(node) // a control plane has its cluster's name
	if err != nil {
		return err
	}
	return waitForAPI(ctx, client, func() error { return l.stayAlive(node, spec) })
}

// component finds a component of a machine and how it is run.
func (l *Lab) component(node, component string) (supervisor.Client, supervisor.Component, error) {
	var none supervisor.Component
	m, err := l.find(node)
	if err != nil {
		return supervisor.Client{}, none, err
	}
	if err := l.usable(); err != nil {
		return supervisor.Client{}, none, err
	}
	var names []string
	for _, c := range l.componentsOf(node) {
		if c.Name == component {
			c.Log = m.LogFile(component)
			return m.Components(), c, nil
		}
		names = append(names, c.Name)
	}
	return supervisor.Client{}, none, fmt.Errorf("%s runs no %q, it runs %s", node, component, names)
}

func (l *Lab) componentsOf(machineName string) []supervisor.Component {
	for _, c := range l.topology {
		plan := l.plan(c)
		if c.Name == machineName {
			return slices.Concat(plan.Store(), plan.Controllers())
		}
		for _, n := range c.Nodes {
			if n.Name == machineName {
				return slices.Concat(plan.Runtime(n), plan.Agents(n))
			}
		}
	}
	return nil
}
