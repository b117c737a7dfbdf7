package cluster

import (
	"context"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/tools/lab/internal/supervisor"
	"github.com/isthmus-net/isthmus/tools/lab/topology"
)

// statusTimeout bounds the question to each API server.
const statusTimeout = 3 * time.Second

// Status is what a lab is like now.
type Status struct {
	Name     string             `json:"name"`
	Dir      string             `json:"dir"`
	Fabric   string             `json:"fabric"` // network namespace of drivers
	Up       bool               `json:"up"`     // everything below runs and is ready
	Clusters []KubernetesStatus `json:"clusters"`
}

// KubernetesStatus is one cluster of a Status.
type KubernetesStatus struct {
	Name         string        `json:"name"`
	Kubeconfig   string        `json:"kubeconfig"`
	Server       string        `json:"server"`
	APIReady     bool          `json:"apiReady"`
	ControlPlane MachineStatus `json:"controlPlane"`
	Nodes        []NodeStatus  `json:"nodes"`
}

// NodeStatus is a machine with a kubelet.
type NodeStatus struct {
	MachineStatus
	Ready bool `json:"ready"` // says the API server
}

// MachineStatus is one machine: its namespaces, its link and its components.
type MachineStatus struct {
	Name       string             `json:"name"`
	IPv4       string             `json:"ipv4"`
	IPv6       string             `json:"ipv6"`
	PID        int                `json:"pid,omitempty"` // of its first process, on the host
	Running    bool               `json:"running"`
	Connected  bool               `json:"connected"` // false after Cut
	Components []supervisor.State `json:"components"`
}

// Status looks at every machine and asks every API server. A dead lab is no error, one that
// was never made is ErrNoLab.
func (l *Lab) Status(ctx context.Context) (Status, error) {
	if err := l.known(); err != nil {
		return Status{}, err
	}
	s := Status{Name: l.name, Dir: l.dir, Fabric: l.fabric.Name(), Up: true, Clusters: []KubernetesStatus{}}
	for _, c := range l.topology {
		cs := l.kubernetesStatus(ctx, c)
		s.Up = s.Up && cs.up()
		s.Clusters = append(s.Clusters, cs)
	}
	return s, ctx.Err()
}

func (c KubernetesStatus) up() bool {
	up := c.APIReady && c.ControlPlane.up()
	for _, n := range c.Nodes {
		up = up && n.Ready && n.up()
	}
	return up
}

func (m MachineStatus) up() bool {
	up := m.Running && m.Connected && len(m.Components) > 0
	for _, c := range m.Components {
		up = up && c.Alive
	}
	return up
}

func (l *Lab) kubernetesStatus(ctx context.Context, c topology.Cluster) KubernetesStatus {
	cs := KubernetesStatus{
		Name:         c.Name,
		Kubeconfig:   l.Kubeconfig(c.Name),
		Server:       c.Server(),
		ControlPlane: l.machineStatus(c.Machine()),
		Nodes:        []NodeStatus{},
	}
	ready := map[string]bool{}
	if cs.ControlPlane.Running {
		cs.APIReady, ready = l.askAPI(ctx, c.Name)
	}
	for _, n := range c.Nodes {
		m := l.machineStatus(topology.Machine{Name: n.Name, IPv4: n.IPv4, IPv6: n.IPv6})
		cs.Nodes = append(cs.Nodes, NodeStatus{MachineStatus: m, Ready: ready[n.Name]})
	}
	return cs
}

func (l *Lab) machineStatus(m topology.Machine) MachineStatus {
	s := MachineStatus{Name: m.Name, IPv4: m.IPv4.String(), IPv6: m.IPv6.String(), Components: []supervisor.State{}}
	components := l.machine(m.Name).Components()
	if states, err := components.List(); err == nil {
		s.Running, s.Components = true, states
		s.PID, _ = components.PID()
		s.Connected, _ = l.fabric.LinkUp(m.Name)
	}
	return s
}

// askAPI says whether the API server is ready, and which nodes it holds for ready.
func (l *Lab) askAPI(ctx context.Context, cluster string) (bool, map[string]bool) {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	ready := map[string]bool{}
	client, err := l.client(cluster)
	if err != nil {
		return false, ready
	}
	nodes, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return false, ready
	}
	for _, n := range nodes.Items {
		ready[n.Name] = nodeReady(&n)
	}
	return true, ready
}
