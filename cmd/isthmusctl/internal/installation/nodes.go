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
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
)

const (
	// nowhere is a label that no node has.
	nowhere = "isthmus.dev/uninstalled"
	// cleaning is the label of the pods that clean nodes.
	cleaning = "isthmus.dev/cleanup"
	// atOnce bounds the pods that clean nodes at the same time.
	atOnce = 50
	// poll is the interval of questions to the API server.
	poll = time.Second
)

// Cleaner removes what a DaemonSet of the chart keeps in the kernels of nodes: programs, maps, devices, rules. They outlive the pods on
// purpose, so uninstalling the chart alone leaves them.
type Cleaner struct {
	Cluster   kubernetes.Interface
	Namespace string
	Component string        // "agent" or "gateway", which is also the name of the container with the subcommand cleanup
	Timeout   time.Duration // of each wait
}

// Clean stops the pods of the DaemonSet, runs the subcommand cleanup on every Linux node, and returns the number of cleaned nodes. The
// DaemonSet stays, without pods, so that an interrupted call can be repeated. Without a DaemonSet it does nothing. The error names each node
// that was not cleaned.
func (c Cleaner) Clean(ctx context.Context) (nodes int, err error) {
	set, err := c.stop(ctx)
	if set == nil || err != nil {
		return 0, err
	}
	all, err := c.Cluster.CoreV1().Nodes().List(ctx, metav1.ListOptions{LabelSelector: corev1.LabelOSStable + "=linux"})
	if err != nil {
		return 0, fmt.Errorf("list nodes: %w", err)
	}
	var ready []string
	for _, n := range all.Items {
		if !isReady(&n) {
			err = errors.Join(err, fmt.Errorf("node %s is not ready, so its kernel was not cleaned; restart the node, or run %s cleanup on it", n.Name, c.program()))
			continue
		}
		ready = append(ready, n.Name)
	}
	for some := range slices.Chunk(ready, atOnce) {
		n, failed := c.cleanSome(ctx, set, some)
		nodes += n
		err = errors.Join(err, failed)
	}
	return nodes, err
}

// program is the name of the component's program, and the chart's label of its objects.
func (c Cleaner) program() string { return "isthmus-" + c.Component }

// DaemonSet returns the component's DaemonSet, or nil.
func (c Cleaner) DaemonSet(ctx context.Context) (*appsv1.DaemonSet, error) {
	sets, err := c.Cluster.AppsV1().DaemonSets(c.Namespace).List(ctx, metav1.ListOptions{LabelSelector: labelName + "=" + c.program()})
	if err != nil {
		return nil, fmt.Errorf("list DaemonSets: %w", err)
	}
	if len(sets.Items) == 0 {
		return nil, nil //nolint:nilnil // documented
	}
	return &sets.Items[0], nil
}

// stop lets no node match the DaemonSet, and waits until its pods are gone. It returns nil without a DaemonSet.
func (c Cleaner) stop(ctx context.Context) (*appsv1.DaemonSet, error) {
	set, err := c.DaemonSet(ctx)
	if set == nil || err != nil {
		return nil, err
	}
	patch := fmt.Sprintf(`{"spec":{"template":{"spec":{"nodeSelector":{%q:"true"}}}}}`, nowhere)
	set, err = c.Cluster.AppsV1().DaemonSets(c.Namespace).Patch(ctx, set.Name, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{})
	if err != nil {
		return nil, fmt.Errorf("stop the DaemonSet of %s: %w", c.program(), err)
	}
	selector, err := metav1.LabelSelectorAsSelector(set.Spec.Selector)
	if err != nil {
		return nil, fmt.Errorf("DaemonSet %s: %w", set.Name, err)
	}
	err = c.await(ctx, selector, func(pods []corev1.Pod) bool { return len(pods) == 0 })
	if err != nil {
		return nil, fmt.Errorf("pods of DaemonSet %s still run: %w", set.Name, err)
	}
	return set, nil
}

// cleanSome cleans nodes at the same time.
func (c Cleaner) cleanSome(ctx context.Context, set *appsv1.DaemonSet, nodes []string) (cleaned int, err error) {
	pods := c.Cluster.CoreV1().Pods(c.Namespace)
	selector := labels.SelectorFromSet(labels.Set{cleaning: set.Name})
	remove := func(ctx context.Context) error {
		err := pods.DeleteCollection(ctx, metav1.DeleteOptions{GracePeriodSeconds: new(int64)}, metav1.ListOptions{LabelSelector: selector.String()})
		if err != nil {
			return fmt.Errorf("delete the pods that clean nodes: %w", err)
		}
		return c.await(ctx, selector, func(pods []corev1.Pod) bool { return len(pods) == 0 })
	}
	if err := remove(ctx); err != nil { // those of an interrupted call
		return 0, err
	}
	defer func() { err = errors.Join(err, remove(context.WithoutCancel(ctx))) }()
	for _, node := range nodes {
		pod, err := c.pod(set, node)
		if err != nil {
			return 0, err
		}
		if _, err := pods.Create(ctx, pod, metav1.CreateOptions{}); err != nil {
			return 0, fmt.Errorf("clean node %s: %w", node, err)
		}
	}
	var last []corev1.Pod
	waited := c.await(ctx, selector, func(pods []corev1.Pod) bool {
		last = pods
		return !slices.ContainsFunc(pods, func(p corev1.Pod) bool {
			return p.Status.Phase != corev1.PodSucceeded && p.Status.Phase != corev1.PodFailed
		})
	})
	for _, p := range last {
		if p.Status.Phase == corev1.PodSucceeded {
			cleaned++
			continue
		}
		err = errors.Join(err, fmt.Errorf("node %s was not cleaned: %s", p.Spec.NodeName, c.why(ctx, &p)))
	}
	if err == nil {
		err = waited
	}
	return cleaned, err
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
	spec.InitContainers, spec.Containers = nil, []corev1.Container{one}
	spec.NodeSelector, spec.Affinity, spec.NodeName = nil, nil, node
	spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	spec.RestartPolicy = corev1.RestartPolicyNever
	spec.ActiveDeadlineSeconds = new(int64(c.Timeout.Seconds()))
	marks := map[string]string{cleaning: set.Name, "app.kubernetes.io/part-of": "isthmus"}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{GenerateName: set.Name + "-cleanup-", Namespace: set.Namespace, Labels: marks}, Spec: *spec,
	}, nil
}

// await lists pods until they are as wanted.
func (c Cleaner) await(ctx context.Context, selector labels.Selector, wanted func([]corev1.Pod) bool) error {
	return wait.PollUntilContextTimeout(ctx, poll, c.Timeout, true, func(ctx context.Context) (bool, error) {
		pods, err := c.Cluster.CoreV1().Pods(c.Namespace).List(ctx, metav1.ListOptions{LabelSelector: selector.String()})
		if err != nil {
			return false, fmt.Errorf("list pods: %w", err)
		}
		return wanted(pods.Items), nil
	})
}

func isReady(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}
