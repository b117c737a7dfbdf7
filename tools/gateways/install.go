package gateways

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"text/template"

	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/gateway/api/crds"
	"github.com/isthmus-net/isthmus/gateway/certs"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/vrrp"
	"github.com/isthmus-net/isthmus/tools/lab/cluster"
	"github.com/isthmus-net/isthmus/tools/netlab"
	"github.com/isthmus-net/isthmus/tools/netlab/edge"
	"github.com/isthmus-net/isthmus/tools/neutron"
)

// Connections is the number of connections for which an eBPF gateway of the lab has room. Several share one machine.
const Connections = 131072

// ClusterID is the owner of the lab's ports and floating IPs.
const ClusterID = "lab"

// agentPort is the port of the gateways' agents.
const agentPort = 9479

//go:embed node.yaml
var nodeTemplate string

//go:embed settings.yaml
var settingsTemplate string

// Installation is an installation of the gateways on an edge, each as on a machine of its own, with their controller
// beside the cluster.
type Installation struct {
	*Edge

	Controller *Process
	Agents     [2]*Process

	lab      *cluster.Lab
	cluster  string
	dir      string
	balancer desired.Balancer
	fabric   *netlab.Namespace
	unmount  []func() error
}

// Install compiles the programs, creates certificates, starts everything and registers the gateways in the cluster. An
// edge has one installation at a time.
func Install(ctx context.Context, e *Edge, lab *cluster.Lab, clusterName, dir string, balancer desired.Balancer) (i *Installation, err error) {
	i = &Installation{Edge: e, lab: lab, cluster: clusterName, dir: dir, balancer: balancer}
	defer func() {
		if err != nil {
			err = errors.Join(err, i.Close())
		}
	}()
	if i.fabric, err = netlab.OpenNamespace(lab.FabricPath()); err != nil {
		return i, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return i, err
	}
	if err := Build(ctx, dir, programs...); err != nil {
		return i, err
	}
	if err := i.certificates(ctx); err != nil {
		return i, err
	}
	for g := range i.Agents {
		if err := i.StartAgent(ctx, g); err != nil {
			return i, err
		}
	}
	if err := i.register(ctx); err != nil {
		return i, err
	}
	return i, i.StartController(ctx)
}

// Name returns the name of a gateway, from 0.
func Name(gateway int) string { return "gateway-" + strconv.Itoa(gateway+1) }

// certificates creates the certificates of the controller and both gateways.
func (i *Installation) certificates(ctx context.Context) error {
	return i.run(ctx, i.fabric, "isthmusctl", "gateway", "certs", "--dir", i.path("certs"), "--gateway", Name(0), "--gateway", Name(1))
}

// certs returns the flags for the certificates of a program.
func (i *Installation) certs(name string) []string {
	dir := i.path(filepath.Join("certs", name))
	return []string{"--ca", filepath.Join(dir, "ca.crt"), "--cert", filepath.Join(dir, "tls.crt"), "--key", filepath.Join(dir, "tls.key")}
}

// StartAgent starts the agent of a gateway that has none.
func (i *Installation) StartAgent(ctx context.Context, gateway int) (err error) {
	name := Name(gateway)
	state := i.state(gateway)
	if err := os.MkdirAll(state, 0o700); err != nil {
		return err
	}
	if err := i.mount(gateway); err != nil {
		return err
	}
	args := append(i.certs(name), "run", "--cluster", ClusterID, "--balancer", string(i.balancer), "--bpffs", i.bpffs(gateway),
		"--listen", netip.AddrPortFrom(edge.Gateways[gateway][0], agentPort).String(), "--state-dir", state, "--run-dir", state)
	if i.balancer == desired.EBPF {
		args = append(args, "--flows", strconv.Itoa(Connections))
	}
	i.Agents[gateway], err = Start(ctx, i.Gateways[gateway], i.path(name+".log"), i.path("isthmus-gateway"), args...)
	return err
}

// state returns the folder of a gateway's state.
func (i *Installation) state(gateway int) string {
	return i.path(Name(gateway) + "-" + string(i.balancer))
}

func (i *Installation) bpffs(gateway int) string { return filepath.Join(i.state(gateway), "bpf") }

// mount mounts a separate BPF file system for a gateway, unless it has one or needs none.
func (i *Installation) mount(gateway int) error {
	if i.balancer != desired.EBPF {
		return nil
	}
	if err := os.Mkdir(i.bpffs(gateway), 0o700); errors.Is(err, fs.ErrExist) {
		return nil
	} else if err != nil {
		return err
	}
	unmount, err := netlab.MountBPFFS(i.bpffs(gateway))
	if err == nil {
		i.unmount = append(i.unmount, unmount)
	}
	return err
}

// StartController starts the controller if it does not run.
func (i *Installation) StartController(ctx context.Context) (err error) {
	settings, err := i.render(settingsTemplate, map[string]any{"Cluster": ClusterID, "IDs": i.IDs})
	if err != nil {
		return err
	}
	if err := os.WriteFile(i.path("settings.yaml"), []byte(settings), 0o600); err != nil {
		return err
	}
	args := append(i.certs(certs.Controller), "--config", i.path("settings.yaml"), "--kubeconfig", i.lab.Kubeconfig(i.cluster),
		"--cloud", neutron.GatewaysCredential, "--clouds", i.Cloud.CloudsYAML())
	i.Controller, err = Start(ctx, i.fabric, i.path("controller.log"), i.path("isthmus-gateway-controller"), args...)
	return err
}

// register adds the definitions and a GatewayNode for each gateway to the cluster. The second gateway is less preferred.
func (i *Installation) register(ctx context.Context) error {
	definition, err := crds.GatewayNodes()
	if err != nil {
		return err
	}
	manifest, err := yaml.Marshal(definition)
	if err != nil {
		return err
	}
	const home = "---\napiVersion: v1\nkind: Namespace\nmetadata: {name: isthmus-system}\n" // namespace of the controller's Lease
	if err := i.Apply(ctx, string(manifest)+home); err != nil {
		return err
	}
	if _, err := i.Kubectl(ctx, "wait", "crd/gatewaynodes.gateway.isthmus.dev", "--for", "condition=Established", "--timeout", "60s"); err != nil {
		return err
	}
	for g, ids := range i.IDs.Gateways {
		node, err := i.render(nodeTemplate, map[string]any{
			"Name": Name(g), "Addr": edge.Gateways[g][0], "Port": agentPort, "NeutronPort": ids.Port, "ASN": GatewayASN, "Balancer": i.balancer,
			"Router": edge.Router[0], "RouterASN": RouterASN, "MED": 50 * g,
			"Device": edge.Device, "Peer": edge.Gateways[1-g][0], "Priority": 200 - 50*g,
		})
		if err != nil {
			return err
		}
		if err := i.Apply(ctx, node); err != nil {
			return err
		}
	}
	return nil
}

// Apply applies manifests to the cluster.
func (i *Installation) Apply(ctx context.Context, manifests string) error {
	cmd := i.lab.Kubectl(ctx, i.cluster, "apply", "--server-side", "--force-conflicts", "--filename", "-")
	cmd.Stdin = strings.NewReader(manifests)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("kubectl apply: %w\n%s", err, out)
	}
	return nil
}

// Kubectl runs kubectl and returns its output.
func (i *Installation) Kubectl(ctx context.Context, args ...string) (string, error) {
	out, err := i.lab.Kubectl(ctx, i.cluster, args...).Output()
	if err != nil {
		return "", fmt.Errorf("kubectl %s: %w", strings.Join(args, " "), err)
	}
	return string(out), nil
}

// Close ends the programs and removes the gateways' balancers. Objects in the cluster and in the cloud stay.
func (i *Installation) Close() error {
	var errs []error
	for _, p := range []*Process{i.Controller, i.Agents[0], i.Agents[1]} {
		if p != nil && p.Runs() {
			errs = append(errs, p.Stop())
		}
	}
	for g, ns := range i.Gateways {
		if i.Agents[g] != nil {
			errs = append(errs, i.run(context.Background(), ns, "isthmus-gateway", "cleanup", "--bpffs", i.bpffs(g)), i.sweep(g))
		}
	}
	for _, unmount := range i.unmount {
		errs = append(errs, unmount())
	}
	if i.fabric != nil {
		errs = append(errs, i.fabric.Close())
	}
	return errors.Join(errs...)
}

// sweep stops the keepalived of a gateway, which outlives a killed agent.
func (i *Installation) sweep(gateway int) error {
	dir := filepath.Join(i.state(gateway), "vrrp")
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil // its agent never started keepalived
	}
	return i.Gateways[gateway].Do(func() error { return vrrp.Cleanup(context.Background(), dir) })
}

func (i *Installation) path(name string) string { return filepath.Join(i.dir, name) }

// run runs a program to its end.
func (i *Installation) run(ctx context.Context, ns *netlab.Namespace, program string, args ...string) error {
	p, err := Start(ctx, ns, i.path(program+".log"), i.path(program), args...)
	if err != nil {
		return err
	}
	select {
	case <-p.ended:
	case <-ctx.Done():
		return errors.Join(ctx.Err(), p.Kill())
	}
	return p.Stop() // it has ended: this returns its error
}

func (*Installation) render(text string, values any) (string, error) {
	t, err := template.New("").Option("missingkey=error").Parse(text)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	err = t.Execute(&b, values)
	return b.String(), err
}
