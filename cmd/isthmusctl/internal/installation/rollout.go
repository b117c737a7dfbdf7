package installation

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
)

const (
	// nowhere is a label that no node has: a DaemonSet that selects it has no pods.
	nowhere = "isthmus.dev/uninstalled"
	// poll is the interval of questions to the API server.
	poll = time.Second
)

// rollout is the state of a workload's pods.
type rollout struct {
	workload string
	done     int32 // pods of the present template that are available
	want     int32
	seen     bool // its controller knows the present template
}

// finished reports whether all pods are there but those on some nodes that are not ready.
func (r rollout) finished(notReady int32) bool { return r.seen && r.want-r.done <= notReady }

func (r rollout) String() string {
	return fmt.Sprintf("%s has %d of %d pods of this version available", r.workload, r.done, r.want)
}

// rollouts returns the state of a step's workloads in the cluster, but of those whose pods are replaced by hand. Workloads that do not
// exist are left out.
func (i *Installation) rollouts(ctx context.Context, workloads []object) ([]rollout, error) {
	var all []rollout
	for _, o := range workloads {
		switch o.GetKind() {
		case "Deployment":
			d, err := i.cluster.AppsV1().Deployments(i.Namespace).Get(ctx, o.GetName(), metav1.GetOptions{})
			if err != nil {
				return nil, fmt.Errorf("read %s: %w", o, err)
			}
			want := int32(1)
			if d.Spec.Replicas != nil {
				want = *d.Spec.Replicas
			}
			all = append(all, rollout{o.String(), min(d.Status.UpdatedReplicas, d.Status.AvailableReplicas), want, d.Status.ObservedGeneration >= d.Generation})
		case "DaemonSet":
			d, err := i.cluster.AppsV1().DaemonSets(i.Namespace).Get(ctx, o.GetName(), metav1.GetOptions{})
			if err != nil {
				return nil, fmt.Errorf("read %s: %w", o, err)
			}
			if d.Spec.UpdateStrategy.Type != appsv1.OnDeleteDaemonSetStrategyType {
				all = append(all, rollout{o.String(), min(d.Status.UpdatedNumberScheduled, d.Status.NumberAvailable), d.Status.DesiredNumberScheduled, d.Status.ObservedGeneration >= d.Generation})
			}
		}
	}
	return all, nil
}

// await waits until a step's workloads are rolled out. timeout starts again with every pod that becomes available. Pods of nodes that are
// not ready are not waited for.
func (i *Installation) await(ctx context.Context, workloads []object, timeout time.Duration) error {
	var last []rollout
	var best int32 = -1
	deadline := time.Now().Add(timeout)
	return wait.PollUntilContextCancel(ctx, poll, true, func(ctx context.Context) (bool, error) {
		notReady, err := countNotReady(ctx, i.cluster)
		if err == nil {
			last, err = i.rollouts(ctx, workloads)
		}
		if err != nil && time.Now().Before(deadline) {
			return false, nil // an API server that starts again
		}
		if err != nil {
			return false, err
		}
		var done int32
		var late []string
		for _, r := range last {
			done += r.done
			if !r.finished(notReady) {
				late = append(late, r.String())
			}
		}
		if done > best {
			best, deadline = done, time.Now().Add(timeout)
		}
		if len(late) > 0 && time.Now().After(deadline) {
			return false, fmt.Errorf("no progress for %s: %s", timeout, strings.Join(late, ", "))
		}
		return len(late) == 0, nil
	})
}

// countNotReady counts the nodes whose pods cannot become ready.
func countNotReady(ctx context.Context, cluster kubernetes.Interface) (int32, error) {
	nodes, err := cluster.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return 0, fmt.Errorf("list nodes: %w", err)
	}
	n := int32(0)
	for _, node := range nodes.Items {
		if !isReady(&node) {
			n++
		}
	}
	return n, nil
}

func isReady(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

// selectNowhere lets no node match a DaemonSet, or undoes that.
func selectNowhere(ctx context.Context, cluster kubernetes.Interface, namespace, name string, stop bool) (*appsv1.DaemonSet, error) {
	value := "null"
	if stop {
		value = `"true"`
	}
	patch := fmt.Sprintf(`{"spec":{"template":{"spec":{"nodeSelector":{%q:%s}}}}}`, nowhere, value)
	set, err := cluster.AppsV1().DaemonSets(namespace).Patch(ctx, name, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{})
	if err != nil {
		return nil, fmt.Errorf("change the nodeSelector of DaemonSet %s: %w", name, err)
	}
	return set, nil
}
