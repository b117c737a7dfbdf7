package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"

	"github.com/isthmus-net/isthmus/tools/apiserver/pki"
	"github.com/isthmus-net/isthmus/tools/images/oci"
	"github.com/isthmus-net/isthmus/tools/lab/internal/kube"
	"github.com/isthmus-net/isthmus/tools/lab/internal/machine"
	"github.com/isthmus-net/isthmus/tools/lab/internal/supervisor"
	"github.com/isthmus-net/isthmus/tools/lab/topology"
)

// readyTimeout bounds each wait for a part of a cluster. A busy machine is ten times
// slower than an idle one.
const (
	readyTimeout = 3 * time.Minute
	pollInterval = 100 * time.Millisecond
)

// Up brings the lab up, or what is missing of it: dead components are started again, a
// dead node comes back empty, and a cluster whose control plane died is made anew. When it
// returns, nodes and cluster DNS are ready and every cluster has its default ServiceAccount.
func (l *Lab) Up(ctx context.Context) error {
	if err := preflight(); err != nil {
		return err
	}
	if err := l.cache.InstallHostPackages(ctx); err != nil {
		return err
	}
	built, err := l.build(ctx)
	if err != nil {
		return err
	}
	unlock, err := l.lock()
	if err != nil {
		return err
	}
	defer unlock()
	// Under the lock: an Up before us may have been taking them.
	if err := requireInotify(l.inotifyNeed()); err != nil {
		return err
	}
	l.settings.Programs = built.programs
	if err := l.writeSettings(); err != nil {
		return err
	}
	if err := l.fabric.Up(ctx, l.topology); err != nil {
		return err
	}
	clusters, ctx := errgroup.WithContext(ctx)
	for _, c := range l.topology {
		clusters.Go(func() error {
			if err := l.upCluster(ctx, c, built); err != nil {
				return fmt.Errorf("cluster %s: %w (logs in %s)", c.Name, err, filepath.Join(l.dir, "machines"))
			}
			return nil
		})
	}
	if err := clusters.Wait(); err != nil {
		return err
	}
	l.step("lab %q is up: %s", l.name, l.topology)
	return nil
}

// AddNode adds a node to a cluster, as an autoscaler would, and returns when it is ready. Nothing else changes. No other method may
// run meanwhile.
func (l *Lab) AddNode(ctx context.Context, cluster string) (topology.Node, error) {
	grown, n, err := l.topology.Grow(cluster)
	if err != nil {
		return n, err
	}
	unlock, err := l.lock()
	if err != nil {
		return n, err
	}
	defer unlock()
	b, err := l.build(ctx)
	if err != nil {
		return n, err
	}
	l.topology, l.settings.Topology = grown, grown.String()
	if err := errors.Join(l.writeSettings(), l.fabric.Up(ctx, grown)); err != nil {
		return n, err
	}
	c, _ := grown.Cluster(cluster)
	client, err := l.client(cluster)
	if err != nil {
		return n, err
	}
	plan := l.plan(c)
	if err := l.prepareNode(ctx, plan, n, b); err != nil {
		return n, err
	}
	if err := register(ctx, client, n); err != nil {
		return n, fmt.Errorf("register node %s: %w", n.Name, err)
	}
	if err := start(l.machine(n.Name), plan.Agents(n)); err != nil {
		return n, err
	}
	return n, waitFor(ctx, "nodes", func(ctx context.Context) error { return nodesReady(ctx, client, len(c.Nodes)) })
}

// RemoveNode removes the last node of a cluster with its Node object. No other method may run meanwhile.
func (l *Lab) RemoveNode(ctx context.Context, cluster string) error {
	shrunk, n, err := l.topology.Shrink(cluster)
	if err != nil {
		return err
	}
	unlock, err := l.lock()
	if err != nil {
		return err
	}
	defer unlock()
	client, err := l.client(cluster)
	if err != nil {
		return err
	}
	if err := client.CoreV1().Nodes().Delete(ctx, n.Name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete node %s: %w", n.Name, err)
	}
	if err := l.removeMachine(ctx, n.Name); err != nil {
		return err
	}
	l.topology, l.settings.Topology = shrunk, shrunk.String()
	return l.writeSettings()
}

func preflight() error {
	if os.Geteuid() != 0 {
		return errors.New("the lab makes namespaces and mounts: run it as root (sudo -E)")
	}
	return nil
}

// built is what the cache holds for us.
type built struct {
	programs map[string]string
	images   []string // archives every node needs to run any pod
	tests    string   // archive of the test image
	pauseRef string   // full name of the pause image
}

func (l *Lab) build(ctx context.Context) (built, error) {
	unlock, err := l.cache.Lock()
	if err != nil {
		return built{}, err
	}
	defer unlock()
	var b built
	if b.programs, err = l.cache.Programs(ctx); err != nil {
		return b, err
	}
	for _, debian := range []string{kube.Containerd, "ctr"} {
		if b.programs[debian], err = exec.LookPath(debian); err != nil {
			return b, err
		}
	}
	if b.images, err = l.cache.SystemImages(b.programs); err != nil {
		return b, err
	}
	if b.tests, err = l.cache.TestImage(ctx, b.programs); err != nil {
		return b, err
	}
	b.pauseRef, err = oci.FullName(kube.PauseImage)
	return b, err
}

func (l *Lab) plan(c topology.Cluster) kube.Plan {
	return kube.Plan{Cluster: c, Options: l.settings.Options, Bin: l.settings.Programs, PKI: l.pkiDir(c.Name)}
}

// upCluster starts the control plane and, beside it, everything of the nodes that does not
// need the API server.
func (l *Lab) upCluster(ctx context.Context, c topology.Cluster, b built) error {
	plan, revival := l.plan(c), l.newRevival()
	if !l.machine(c.Name).Running() {
		// Its etcd is gone: what nodes and certificates remain belong to another cluster.
		if err := l.wipe(ctx, c); err != nil {
			return err
		}
	}
	if err := kube.WriteCredentials(plan.PKI, c); err != nil {
		return err
	}
	if err := l.startMachine(ctx, c.Machine(), nil); err != nil {
		return err
	}
	if err := start(l.machine(c.Name), plan.Store()); err != nil {
		return err
	}
	nodes, nodesCtx := errgroup.WithContext(ctx)
	for _, n := range c.Nodes {
		nodes.Go(func() error { return l.prepareNode(nodesCtx, plan, n, b) })
	}
	client, err := l.client(c.Name)
	if err != nil {
		return err
	}
	if err := waitForAPI(ctx, client, func() error {
		return l.revive(revival, c.Name, plan.Store())
	}); err != nil {
		return errors.Join(err, nodes.Wait())
	}
	l.step("%s: API server ready", c.Name)
	if err := start(l.machine(c.Name), plan.Controllers()); err != nil {
		return err
	}
	if err := nodes.Wait(); err != nil {
		return err
	}
	if len(c.Nodes) > 0 {
		if err := l.joinNodes(ctx, client, plan, revival); err != nil {
			return err
		}
	}
	// A bare Pod is refused until this exists.
	return waitFor(ctx, "default ServiceAccount", func(ctx context.Context) error {
		if err := l.revive(revival, c.Name, plan.Controllers()); err != nil {
			return err
		}
		_, err := client.CoreV1().ServiceAccounts(metav1.NamespaceDefault).Get(ctx, "default", metav1.GetOptions{})
		return err
	})
}

// wipe ends every machine of a cluster and forgets its state.
func (l *Lab) wipe(ctx context.Context, c topology.Cluster) error {
	names := []string{c.Name}
	for _, n := range c.Nodes {
		names = append(names, n.Name)
	}
	for _, name := range names {
		if err := l.removeMachine(ctx, name); err != nil {
			return err
		}
	}
	return os.RemoveAll(l.pkiDir(c.Name))
}

func (l *Lab) removeMachine(ctx context.Context, name string) error {
	if err := l.machine(name).Kill(ctx, l.group(name)); err != nil {
		return err
	}
	return os.RemoveAll(l.machineDir(name))
}

// startMachine starts a machine with an empty disk and the given files, unless it runs.
func (l *Lab) startMachine(ctx context.Context, m topology.Machine, files map[string]string) error {
	host := l.machine(m.Name)
	if host.Running() {
		return nil
	}
	if err := l.removeMachine(ctx, m.Name); err != nil {
		return err
	}
	for path, content := range files {
		file := filepath.Join(host.Etc(), path)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			return err
		}
	}
	return host.Start(ctx, machine.Spec{
		Name:  m.Name,
		Group: l.group(m.Name),
		Netns: l.fabric.PathOf(m.Name),
		DNS:   m.DNS,
	})
}

// prepareNode gets a node to where its kubelet can start.
func (l *Lab) prepareNode(ctx context.Context, plan kube.Plan, n topology.Node, b built) error {
	files, err := l.nodeFiles(plan, n, b.pauseRef)
	if err != nil {
		return err
	}
	m := topology.Machine{Name: n.Name, IPv4: n.IPv4, IPv6: n.IPv6, DNS: plan.Cluster.DNSServiceIP()}
	if err := l.startMachine(ctx, m, files); err != nil {
		return err
	}
	if err := start(l.machine(n.Name), plan.Runtime(n)); err != nil {
		return err
	}
	if err := l.importImages(ctx, n.Name, append(b.images, b.tests)); err != nil {
		return err
	}
	l.step("%s: containerd and images ready", n.Name)
	return nil
}

func (l *Lab) nodeFiles(plan kube.Plan, n topology.Node, pauseRef string) (map[string]string, error) {
	files, err := plan.NodeFiles(n, pauseRef)
	if err != nil {
		return nil, err
	}
	for name, source := range map[string]string{
		"kubernetes/ca.crt":                filepath.Join(plan.PKI, pki.CA),
		"kubernetes/kubelet.kubeconfig":    pki.Kubeconfig(plan.PKI, kube.KubeletUser(n.Name)),
		"kubernetes/kube-proxy.kubeconfig": pki.Kubeconfig(plan.PKI, kube.KubeProxy),
	} {
		raw, err := os.ReadFile(source)
		if err != nil {
			return nil, err
		}
		files[name] = string(raw)
	}
	l.trustRegistry(files)
	return files, nil
}

// joinNodes registers the nodes, starts their agents and cluster DNS, and waits for all.
func (l *Lab) joinNodes(ctx context.Context, client kubernetes.Interface, plan kube.Plan, revival *revival) error {
	for _, n := range plan.Cluster.Nodes {
		if err := register(ctx, client, n); err != nil {
			return fmt.Errorf("register node %s: %w", n.Name, err)
		}
		alive, err := l.alive(n.Name, kube.Kubelet)
		if err != nil {
			return err
		}
		if !alive {
			if err := forget(ctx, client, n); err != nil {
				return fmt.Errorf("reset node %s: %w", n.Name, err)
			}
		}
		if err := start(l.machine(n.Name), plan.Agents(n)); err != nil {
			return err
		}
	}
	if err := l.applyAddons(ctx, plan); err != nil {
		return err
	}
	revive := func() error {
		errs := []error{l.revive(revival, plan.Cluster.Name, plan.Controllers())}
		for _, n := range plan.Cluster.Nodes {
			errs = append(errs, l.revive(revival, n.Name, plan.Agents(n)))
		}
		return errors.Join(errs...)
	}
	if err := waitFor(ctx, "nodes", func(ctx context.Context) error {
		if err := revive(); err != nil {
			return err
		}
		return nodesReady(ctx, client, len(plan.Cluster.Nodes))
	}); err != nil {
		return err
	}
	l.step("%s: nodes ready", plan.Cluster.Name)
	if err := waitFor(ctx, "cluster DNS", func(ctx context.Context) error {
		if err := revive(); err != nil {
			return err
		}
		ds, err := client.AppsV1().DaemonSets(metav1.NamespaceSystem).Get(ctx, "coredns", metav1.GetOptions{})
		if err == nil && (ds.Status.ObservedGeneration != ds.Generation || int(ds.Status.NumberReady) < len(plan.Cluster.Nodes)) {
			err = fmt.Errorf("%d of %d CoreDNS pods ready", ds.Status.NumberReady, len(plan.Cluster.Nodes))
		}
		return err
	}); err != nil {
		return err
	}
	l.step("%s: cluster DNS ready", plan.Cluster.Name)
	return nil
}

// register makes the Node object before the kubelet would, because only its maker may say
// which pod addresses it has.
func register(ctx context.Context, client kubernetes.Interface, n topology.Node) error {
	var cidrs []string
	for _, p := range n.PodCIDRs() {
		cidrs = append(cidrs, p.String())
	}
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: n.Name, Labels: kube.Labels(n)},
		Spec: corev1.NodeSpec{
			PodCIDR:  cidrs[0],
			PodCIDRs: cidrs,
		},
	}
	_, err := client.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

// forget withdraws what an earlier incarnation of a node said about itself, so that the
// wait for readiness waits for the new one.
func forget(ctx context.Context, client kubernetes.Interface, n topology.Node) error {
	patch := fmt.Sprintf(`{"status":{"conditions":[{"type":%q,"status":%q}]}}`, corev1.NodeReady, corev1.ConditionUnknown)
	_, err := client.CoreV1().Nodes().Patch(ctx, n.Name, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{}, "status")
	return err
}

func nodesReady(ctx context.Context, client kubernetes.Interface, want int) error {
	list, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	var waiting []string
	for _, n := range list.Items {
		if !nodeReady(&n) {
			waiting = append(waiting, n.Name)
		}
	}
	if len(list.Items) < want || len(waiting) > 0 {
		return fmt.Errorf("%d of %d registered, not ready: %s", len(list.Items), want, strings.Join(waiting, " "))
	}
	return nil
}

func nodeReady(n *corev1.Node) bool {
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

func (l *Lab) applyAddons(ctx context.Context, plan kube.Plan) error {
	objects, err := plan.Addons()
	if err != nil {
		return err
	}
	cmd := l.Kubectl(ctx, plan.Cluster.Name, "apply", "--server-side", "--force-conflicts", "-f", "-")
	cmd.Stdin = strings.NewReader(objects)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("apply cluster DNS: %w: %s", err, out)
	}
	return nil
}

func (l *Lab) alive(machineName, component string) (bool, error) {
	states, err := l.machine(machineName).Components().List()
	for _, s := range states {
		if s.Name == component {
			return s.Alive, err
		}
	}
	return false, err
}

func (l *Lab) client(cluster string) (kubernetes.Interface, error) {
	config, err := l.RESTConfig(cluster)
	if err != nil {
		return nil, err
	}
	return kubernetes.NewForConfig(config)
}

func start(m machine.Machine, components []supervisor.Component) error {
	for _, c := range logged(m, components) {
		if err := m.Components().Start(c); err != nil {
			return err
		}
	}
	return nil
}

// waitForAPI asks an API server whether it is ready. In between it calls alive, whose error
// counts like ready's in waitFor.
func waitForAPI(ctx context.Context, client kubernetes.Interface, alive func() error) error {
	return waitFor(ctx, "API server", func(ctx context.Context) error {
		if err := alive(); err != nil {
			return err
		}
		return client.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
	})
}

// waitFor asks ready until it returns nil or a hopelessError. The error says what was
// missing last.
func waitFor(ctx context.Context, what string, ready func(context.Context) error) error {
	var last error
	var hopeless hopelessError
	err := wait.PollUntilContextTimeout(ctx, pollInterval, readyTimeout, true, func(ctx context.Context) (bool, error) {
		err := ready(ctx)
		if errors.As(err, &hopeless) {
			return false, hopeless
		}
		if last == nil || err == nil || ctx.Err() == nil {
			last = err // a question cut short by the timeout says nothing
		}
		return err == nil, nil
	})
	switch {
	case hopeless.error != nil:
		return fmt.Errorf("wait for %s: %w", what, hopeless)
	case err != nil:
		return fmt.Errorf("wait for %s: %w: %w", what, err, last)
	}
	return nil
}
