package installation

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"

	"github.com/isthmus-net/isthmus/controlplane/broker/membership"
)

const (
	// cleaning is the label of the pods that clean nodes.
	cleaning = "isthmus.dev/cleanup"
	// atOnce bounds the pods that clean nodes at the same time.
	atOnce = 50
	// bpffs is the init container that mounts the file system of the pins, without which nothing can be unpinned.
	bpffs = "mount-bpffs"
)

// NodesError names the nodes that were not cleaned, one error each.
type NodesError struct{ Nodes []error }

// Error lists the nodes.
func (e *NodesError) Error() string { return errors.Join(e.Nodes...).Error() }

// Cleaner removes what a DaemonSet of the chart keeps in the kernels of nodes: programs, maps, devices, rules. They outlive the pods on
// purpose, so uninstalling the chart alone leaves them.
type Cleaner struct {
	Cluster   kubernetes.Interface
	Namespace string
	Component string        // "agent" or "gateway", which is also the name of the container with the subcommand cleanup
	Timeout   time.Duration // of each wait
}

// Clean stops the pods of the DaemonSet, runs the subcommand cleanup on every node that it selects, and returns the number of cleaned
// nodes. The DaemonSet stays, without pods, so that an interrupted call can be repeated. Without a DaemonSet it does nothing. It returns a
// *NodesError if some nodes were not cleaned, after all others.
func (c Cleaner) Clean(ctx context.Context) (nodes int, err error) {
	set, err := c.DaemonSet(ctx)
	if set == nil || err != nil {
		return 0, err
	}
	selected := map[string]string{}
	for k, v := range set.Spec.Template.Spec.NodeSelector {
		if k != nowhere {
			selected[k] = v
		}
	}
	all, err := c.Cluster.CoreV1().Nodes().List(ctx, metav1.ListOptions{LabelSelector: labels.FormatLabels(selected)})
	if err != nil {
		return 0, fmt.Errorf("list nodes: %w", err)
	}
	var ready []string
	left := &NodesError{}
	for _, n := range all.Items {
		if isReady(&n) {
			ready = append(ready, n.Name)
			continue
		}
		left.Nodes = append(left.Nodes, fmt.Errorf("node %s is not ready, so its kernel was not cleaned; restart the node, or run %s cleanup on it", n.Name, c.program()))
	}
	if set, err = c.stop(ctx, set.Name, ready); err != nil {
		return 0, err
	}
	for some := range slices.Chunk(ready, atOnce) {
		n, failed, err := c.cleanSome(ctx, set, some)
		nodes, left.Nodes = nodes+n, append(left.Nodes, failed...)
		if err != nil {
			return nodes, errors.Join(append(left.Nodes, err)...)
		}
	}
	if len(left.Nodes) > 0 {
		return nodes, left
	}
	return nodes, nil
}

// program is the name of the component's program, and the chart's label of its objects.
func (c Cleaner) program() string { return "isthmus-" + c.Component }

// DaemonSet returns the component's DaemonSet, or nil. Two are an error.
func (c Cleaner) DaemonSet(ctx context.Context) (*appsv1.DaemonSet, error) {
	label := labelName + "=" + c.program()
	sets, err := c.Cluster.AppsV1().DaemonSets(c.Namespace).List(ctx, metav1.ListOptions{LabelSelector: label})
	if err != nil {
		return nil, fmt.Errorf("list DaemonSets: %w", err)
	}
	return membership.OnlyOne(sets.Items, "DaemonSet", c.Namespace, label)
}

// stop lets no node match the DaemonSet, and waits until its pods are gone from nodes that are ready.
func (c Cleaner) stop(ctx context.Context, name string, ready []string) (*appsv1.DaemonSet, error) {
	set, err := selectNowhere(ctx, c.Cluster, c.Namespace, name, true)
	if err != nil {
		return nil, err
	}
	selector, err := metav1.LabelSelectorAsSelector(set.Spec.Selector)
	if err != nil {
		return nil, fmt.Errorf("DaemonSet %s: %w", name, err)
	}
	var running []string
	err = c.await(ctx, selector, func(pods []corev1.Pod) bool {
		running = nil
		for _, p := range pods {
			if slices.Contains(ready, p.Spec.NodeName) {
				running = append(running, p.Name+" on node "+p.Spec.NodeName)
			}
		}
		return len(running) == 0
	})
	if err != nil {
		return nil, fmt.Errorf("pods of DaemonSet %s still run: %s: %w", name, strings.Join(running, ", "), err)
	}
	return set, nil
}

// cleanSome cleans nodes at the same time. failed has an error for each node that was not cleaned.
func (c Cleaner) cleanSome(ctx context.Context, set *appsv1.DaemonSet, nodes []string) (cleaned int, failed []error, err error) {
	selector := labels.SelectorFromSet(labels.Set{cleaning: set.Name})
	if err := c.remove(ctx, selector); err != nil { // those of an interrupted call
		return 0, nil, err
	}
	defer func() { err = errors.Join(err, c.remove(context.WithoutCancel(ctx), selector)) }()
	faults, pods := map[string]error{}, map[string]corev1.Pod{} // by node
	for _, node := range nodes {
		pod, err := c.pod(set, node)
		if err != nil {
			return 0, nil, err
		}
		if _, err := c.Cluster.CoreV1().Pods(c.Namespace).Create(ctx, pod, metav1.CreateOptions{}); err != nil {
			faults[node] = err
		}
	}
	waited := c.await(ctx, selector, func(list []corev1.Pod) bool {
		for _, p := range list {
			pods[p.Spec.NodeName] = p
		}
		return !slices.ContainsFunc(list, func(p corev1.Pod) bool {
			return p.Status.Phase != corev1.PodSucceeded && p.Status.Phase != corev1.PodFailed
		})
	})
	for _, node := range nodes {
		switch p, there := pods[node]; {
		case faults[node] != nil:
			failed = append(failed, fmt.Errorf("node %s was not cleaned: %w", node, faults[node]))
		case !there:
			failed = append(failed, errors.Join(fmt.Errorf("node %s was not cleaned: somebody deleted its pod", node), waited))
		case p.Status.Phase == corev1.PodSucceeded:
			cleaned++
		default:
			failed = append(failed, fmt.Errorf("node %s was not cleaned: %s", node, c.why(ctx, &p)))
		}
	}
	return cleaned, failed, ctx.Err()
}

// remove deletes the pods that clean nodes, and waits until they are gone.
func (c Cleaner) remove(ctx context.Context, selector labels.Selector) error {
	err := c.Cluster.CoreV1().Pods(c.Namespace).DeleteCollection(ctx, metav1.DeleteOptions{GracePeriodSeconds: new(int64)}, metav1.ListOptions{LabelSelector: selector.String()})
	if err != nil {
		return fmt.Errorf("delete the pods that clean nodes: %w", err)
	}
	return c.await(ctx, selector, func(pods []corev1.Pod) bool { return len(pods) == 0 })
}

// why returns what a pod said, or its state.
func (c Cleaner) why(ctx context.Context, p *corev1.Pod) string {
	text, err := c.Cluster.CoreV1().Pods(p.Namespace).GetLogs(p.Name, &corev1.PodLogOptions{TailLines: new(int64(3))}).DoRaw(ctx)
	if said := strings.TrimSpace(string(text)); err == nil && said != "" {
		return said
	}
	for _, s := range p.Status.ContainerStatuses {
		if s.State.Waiting != nil {
			return fmt.Sprintf("its pod is waiting: %s %s", s.State.Waiting.Reason, s.State.Waiting.Message)
		}
	}
	return fmt.Sprintf("its pod is %s %s", p.Status.Phase, p.Status.Message)
}

// pod returns the pod that cleans a node: one of the DaemonSet, with the subcommand cleanup instead of run.
func (c Cleaner) pod(set *appsv1.DaemonSet, node string) (*corev1.Pod, error) {
	spec := set.Spec.Template.Spec.DeepCopy()
	at := slices.IndexFunc(spec.Containers, func(o corev1.Container) bool { return o.Name == c.Component })
	if at < 0 {
		return nil, fmt.Errorf("DaemonSet %s has no container %s", set.Name, c.Component)
	}
	one := spec.Containers[at]
	flags := one.Args
	if len(flags) > 0 && flags[0] == "run" {
		flags = flags[1:]
	}
	one.Args = append([]string{"cleanup"}, flags...)
	one.Ports, one.StartupProbe, one.LivenessProbe, one.ReadinessProbe, one.Lifecycle = nil, nil, nil, nil, nil
	spec.Containers = []corev1.Container{one}
	spec.InitContainers = slices.DeleteFunc(spec.InitContainers, func(o corev1.Container) bool { return o.Name != bpffs })
	spec.NodeSelector, spec.Affinity, spec.TopologySpreadConstraints, spec.NodeName = nil, nil, nil, node
	spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	spec.RestartPolicy = corev1.RestartPolicyNever
	spec.ActiveDeadlineSeconds = new(int64(max(c.Timeout, time.Second).Seconds()))
	spec.AutomountServiceAccountToken = new(bool)
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			GenerateName: set.Name + "-cleanup-", Namespace: set.Namespace,
			Labels: map[string]string{cleaning: set.Name, labelPartOf: "isthmus"},
		},
		Spec: *spec,
	}, nil
}

// await lists pods until they are as wanted. A list that fails is tried again.
func (c Cleaner) await(ctx context.Context, selector labels.Selector, wanted func([]corev1.Pod) bool) error {
	var last error
	err := wait.PollUntilContextTimeout(ctx, poll, c.Timeout, true, func(ctx context.Context) (bool, error) {
		pods, err := c.Cluster.CoreV1().Pods(c.Namespace).List(ctx, metav1.ListOptions{LabelSelector: selector.String()})
		last = err
		return err == nil && wanted(pods.Items), nil
	})
	if err != nil {
		return errors.Join(fmt.Errorf("not so within %s", c.Timeout), last, ctx.Err())
	}
	return nil
}
