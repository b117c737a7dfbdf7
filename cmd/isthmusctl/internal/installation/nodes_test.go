package installation

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// addNode adds a node to the API server, and removes it at the end of the test.
func addNode(t *testing.T, cluster kubernetes.Interface, name string, ready corev1.ConditionStatus) {
	t.Helper()
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelOSStable: "linux"}}}
	n, err := cluster.CoreV1().Nodes().Create(t.Context(), n, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cluster.CoreV1().Nodes().Delete(context.Background(), name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: ready}}
	if _, err := cluster.CoreV1().Nodes().UpdateStatus(t.Context(), n, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// kubelet ends the pods that clean nodes as the programs would, and returns what they ran, by node.
func kubelet(t *testing.T, cluster kubernetes.Interface, namespace string, phases map[string]corev1.PodPhase) map[string]corev1.PodSpec {
	t.Helper()
	ran, done := map[string]corev1.PodSpec{}, make(chan struct{})
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(func() { cancel(); <-done })
	go func() {
		defer close(done)
		for tick := time.NewTicker(50 * time.Millisecond); ctx.Err() == nil; <-tick.C {
			pods, err := cluster.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: cleaning})
			if err != nil {
				continue
			}
			for _, p := range pods.Items {
				if p.Status.Phase == corev1.PodPending {
					ran[p.Spec.NodeName] = p.Spec
					p.Status.Phase, p.Status.Message = phases[p.Spec.NodeName], "said so"
					_, _ = cluster.CoreV1().Pods(namespace).UpdateStatus(ctx, &p, metav1.UpdateOptions{}) // again at the next tick
				}
			}
		}
	}()
	return ran
}

// Every Linux node gets one pod with the agent's own flags and rights, and the error names each node that was not cleaned.
func TestClean(t *testing.T) {
	cluster, _ := installed(t, "cleaned", map[string]any{"image": map[string]any{"pullSecrets": []any{"pull"}}, "agent": map[string]any{"extraArgs": []any{"--check-interval=9s"}}})
	c := Cleaner{Cluster: cluster, Namespace: "cleaned", Component: "agent", Timeout: 30 * time.Second}
	addNode(t, cluster, "good", corev1.ConditionTrue)
	addNode(t, cluster, "bad", corev1.ConditionTrue)
	addNode(t, cluster, "away", corev1.ConditionUnknown)
	ran := kubelet(t, cluster, "cleaned", map[string]corev1.PodPhase{"good": corev1.PodSucceeded, "bad": corev1.PodFailed})
	n, err := c.Clean(t.Context())
	if n != 1 || err == nil || !strings.Contains(err.Error(), "node bad was not cleaned: ") || !strings.Contains(err.Error(), "node away is not ready") || strings.Contains(err.Error(), "good") {
		t.Errorf("%d nodes, %v", n, err)
	}
	spec, args := ran["good"], []string(nil)
	if len(spec.Containers) == 1 {
		args = spec.Containers[0].Args
	}
	if len(args) == 0 || args[0] != "cleanup" || slices.Contains(args, "run") || !slices.Contains(args, "--check-interval=9s") {
		t.Errorf("it ran %v", args)
	}
	if len(spec.Containers) == 1 && (spec.Containers[0].SecurityContext == nil || !slices.Contains(spec.Containers[0].SecurityContext.Capabilities.Add, "BPF")) {
		t.Errorf("without the agent's rights: %v", spec.Containers[0].SecurityContext)
	}
	if len(spec.ImagePullSecrets) != 1 || spec.ImagePullSecrets[0].Name != "pull" {
		t.Errorf("its image is pulled with %v", spec.ImagePullSecrets)
	}
	var set *appsv1.DaemonSet
	if set, err = c.DaemonSet(t.Context()); err != nil || set == nil || set.Spec.Template.Spec.NodeSelector[nowhere] != "true" {
		t.Errorf("the DaemonSet is not stopped, or gone: %v, %v", set, err)
	}
	other := set.DeepCopy()
	other.ObjectMeta = metav1.ObjectMeta{Name: "another", Namespace: "cleaned", Labels: set.Labels}
	if _, err := cluster.AppsV1().DaemonSets("cleaned").Create(t.Context(), other, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Clean(t.Context()); err == nil || !strings.Contains(err.Error(), "has 2 DaemonSets with the label app.kubernetes.io/name=isthmus-agent, another and isthmus-agent;") {
		t.Errorf("of two DaemonSets it cleans one: %v", err)
	}
	pods, err := cluster.CoreV1().Pods("cleaned").List(t.Context(), metav1.ListOptions{})
	if err != nil || len(pods.Items) > 0 {
		t.Errorf("%d pods are left, %v", len(pods.Items), err)
	}
	if n, err := (Cleaner{Cluster: cluster, Namespace: "cleaned", Component: "gateway", Timeout: time.Second}).Clean(t.Context()); n != 0 || err != nil {
		t.Errorf("without gateways: %d nodes, %v", n, err)
	}
}
