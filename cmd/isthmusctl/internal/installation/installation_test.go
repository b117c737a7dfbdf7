package installation

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"helm.sh/helm/v4/pkg/action"
	chart "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/kube"
	"helm.sh/helm/v4/pkg/release/common"
	"helm.sh/helm/v4/pkg/storage/driver"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/tools/apitest"
)

var server apitest.Server

func TestMain(m *testing.M) { os.Exit(apitest.Run(m, &server)) }

// version returns the chart of the repository as that of a version.
func version(t *testing.T, v string) *chart.Chart {
	t.Helper()
	c, err := loader.Load("../../../../deploy/helm/isthmus")
	if err != nil {
		t.Fatal(err)
	}
	c.Metadata.Version, c.Metadata.AppVersion = strings.TrimPrefix(v, "v"), v
	return c
}

// installed installs v0.1.0 in a namespace of its own, and removes it at the end of the test.
func installed(t *testing.T, namespace string, values map[string]any) (kubernetes.Interface, func() *Installation) {
	t.Helper()
	cfg := server.Config(t)
	cluster, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cluster.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(cfg, namespace, "isthmus"); !errors.Is(err, ErrNotFound) {
		t.Fatalf("before it is installed: %v", err)
	}
	open := func() *Installation {
		t.Helper()
		i, err := Open(cfg, namespace, "isthmus")
		if err != nil {
			t.Fatal(err)
		}
		return i
	}
	i := action.NewInstall(helm(t, namespace))
	i.ReleaseName, i.Namespace, i.WaitStrategy = "isthmus", namespace, kube.HookOnlyStrategy
	if _, err := i.RunWithContext(t.Context(), version(t, "v0.1.0"), values); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		u := action.NewUninstall(helm(t, namespace))
		u.WaitStrategy, u.DeletionPropagation = kube.HookOnlyStrategy, "background" // there is no garbage collector
		if _, err := u.Run("isthmus"); err != nil && !errors.Is(err, driver.ErrReleaseNotFound) {
			t.Error(err)
		}
	})
	rollOut(t, cluster, namespace)
	return cluster, open
}

// helm returns a configuration of Helm for a namespace.
func helm(t *testing.T, namespace string) *action.Configuration {
	t.Helper()
	c, err := configuration(server.Config(t), namespace, &bytes.Buffer{})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// rollOut marks workloads as rolled out, as their controllers would, until the test ends.
func rollOut(t *testing.T, cluster kubernetes.Interface, namespace string) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	t.Cleanup(func() { cancel(); <-done })
	go func() {
		defer close(done)
		for tick := time.NewTicker(50 * time.Millisecond); ctx.Err() == nil; <-tick.C {
			markReady(ctx, cluster, namespace)
		}
	}()
}

func markReady(ctx context.Context, cluster kubernetes.Interface, namespace string) {
	// A conflict with a write of Helm is met again at the next tick.
	if all, err := cluster.AppsV1().Deployments(namespace).List(ctx, metav1.ListOptions{}); err == nil {
		for _, d := range all.Items {
			n := *d.Spec.Replicas
			d.Status = appsv1.DeploymentStatus{
				ObservedGeneration: d.Generation, Replicas: n, UpdatedReplicas: n, ReadyReplicas: n, AvailableReplicas: n,
				Conditions: []appsv1.DeploymentCondition{{Type: appsv1.DeploymentAvailable, Status: corev1.ConditionTrue}, {Type: appsv1.DeploymentProgressing, Status: corev1.ConditionTrue, Reason: "NewReplicaSetAvailable"}},
			}
			_, _ = cluster.AppsV1().Deployments(namespace).UpdateStatus(ctx, &d, metav1.UpdateOptions{})
		}
	}
	if all, err := cluster.AppsV1().DaemonSets(namespace).List(ctx, metav1.ListOptions{}); err == nil {
		for _, d := range all.Items {
			d.Status = appsv1.DaemonSetStatus{
				ObservedGeneration: d.Generation, DesiredNumberScheduled: 1, CurrentNumberScheduled: 1, UpdatedNumberScheduled: 1, NumberAvailable: 1, NumberReady: 1,
			}
			_, _ = cluster.AppsV1().DaemonSets(namespace).UpdateStatus(ctx, &d, metav1.UpdateOptions{})
		}
	}
}

// images returns the tags of the images of all workloads, by name.
func images(t *testing.T, cluster kubernetes.Interface, namespace string) map[string]string {
	t.Helper()
	tags := map[string]string{}
	add := func(name string, spec corev1.PodSpec) {
		_, tags[name], _ = strings.Cut(spec.Containers[0].Image, ":")
	}
	deployments, err := cluster.AppsV1().Deployments(namespace).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range deployments.Items {
		add(d.Name, d.Spec.Template.Spec)
	}
	sets, err := cluster.AppsV1().DaemonSets(namespace).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range sets.Items {
		add(d.Name, d.Spec.Template.Spec)
	}
	return tags
}

// An upgrade does one step after the other, and each leaves the objects of later steps as they are.
func TestUpgrade(t *testing.T) {
	values := map[string]any{"gateway": map[string]any{"enabled": true, "cluster": "east"}, "agent": map[string]any{"maxUnavailable": 7}}
	cluster, open := installed(t, "stepwise", values)
	agents := func() *appsv1.DaemonSet {
		t.Helper()
		d, err := cluster.AppsV1().DaemonSets("stepwise").Get(t.Context(), "isthmus-agent", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	way := func(to string, back bool, order ...string) {
		t.Helper()
		i := open()
		from := i.Versions()[0]
		p, err := i.Plan(t.Context(), version(t, to), Options{Back: back})
		if err != nil {
			t.Fatal(err)
		}
		workload := map[string]string{Controllers: "isthmus-controller", Agents: "isthmus-agent", Gateways: "isthmus-gateway"}
		want := images(t, cluster, "stepwise")
		generation := agents().Generation
		for n, s := range p.Steps {
			if s.Name != order[n] {
				t.Fatalf("step %d is %s, want %s", n, s.Name, order[n])
			}
			at := slices.IndexFunc(s.Changes, func(c ObjectChange) bool { return strings.HasSuffix(c.Object, " "+workload[s.Name]) })
			if at < 0 || s.Changes[at].Change != Changed || len(s.Changes[at].Images) != 2 {
				t.Errorf("%s: changes %v", s.Name, s.Changes)
			}
			if err := p.Apply(t.Context(), s.Name, time.Minute); err != nil {
				t.Fatal(err)
			}
			want[workload[s.Name]] = to
			if have := images(t, cluster, "stepwise"); !maps.Equal(have, want) {
				t.Errorf("after %s from %s to %s the images are %v, want %v", s.Name, from, to, have, want)
			}
			if before := slices.Index(order, Agents) > n; before && agents().Generation != generation {
				t.Errorf("the step %s touched the agents", s.Name)
			}
		}
		if p, err = open().Plan(t.Context(), version(t, to), Options{Back: back}); err != nil {
			t.Fatal(err)
		}
		for _, s := range p.Steps {
			if !s.Empty() {
				t.Errorf("after the upgrade, %s has %v", s.Name, s)
			}
		}
	}
	way("v0.2.0", false, Controllers, Agents, Gateways)
	if n := agents().Spec.UpdateStrategy.RollingUpdate.MaxUnavailable.IntValue(); n != 7 {
		t.Errorf("the upgrade changed agent.maxUnavailable to %d", n)
	}
	way("v0.1.0", true, Gateways, Agents, Controllers)
	for _, f := range agents().ManagedFields {
		if f.Operation == metav1.ManagedFieldsOperationApply && f.Manager != "helm" {
			t.Errorf("the field manager is %s, and the program helm would be in conflict with it", f.Manager)
		}
	}
	if r := open().Revision; r != 7 {
		t.Errorf("revision %d after an installation and six steps", r)
	}
}

// A step that fails leaves what was there, and the same plan made anew continues.
func TestInterruptedUpgrade(t *testing.T) {
	cluster, open := installed(t, "interrupted", nil)
	p, err := open().Plan(t.Context(), version(t, "v0.2.0"), Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Apply(t.Context(), Controllers, time.Minute); err != nil {
		t.Fatal(err)
	}
	i := open()
	if have := i.Versions(); !slices.Equal(have, []string{"v0.1.0", "v0.2.0"}) {
		t.Errorf("versions %v", have)
	}
	if p, err = i.Plan(t.Context(), version(t, "v0.2.0"), Options{Values: map[string]any{"agent": map[string]any{"updateStrategy": map[string]any{"type": "OnDelete"}}}}); err != nil {
		t.Fatal(err)
	}
	if s := p.Steps[0]; !s.Empty() {
		t.Errorf("the step %s is done, but has %v", s.Name, s.Changes)
	}
	if s := p.Steps[1]; s.Empty() || !slices.Equal(s.ByHand, []string{"DaemonSet isthmus-agent"}) {
		t.Errorf("the step %s: %v, by hand %v", s.Name, s.Changes, s.ByHand)
	}
	if s := p.Steps[2]; !s.Empty() || p.Installs(Gateways) {
		t.Errorf("there are no gateways, but %s has %v", s.Name, s.Changes)
	}
	if err := p.Apply(t.Context(), Agents, time.Minute); err != nil {
		t.Fatal(err)
	}
	if have := images(t, cluster, "interrupted")["isthmus-agent"]; have != "v0.2.0" {
		t.Errorf("the agents are of %s", have)
	}
	// Helm was killed in the middle of a revision.
	setStatus(t, "interrupted", common.StatusPendingUpgrade)
	if _, err := open().Plan(t.Context(), version(t, "v0.2.0"), Options{}); err == nil || !strings.Contains(err.Error(), "helm rollback isthmus") {
		t.Errorf("with a pending revision: %v", err)
	}
	// A step that failed is not done: what is installed is the revision before.
	setStatus(t, "interrupted", common.StatusFailed)
	i = open()
	if p, err = i.Plan(t.Context(), version(t, "v0.2.0"), Options{}); err != nil {
		t.Fatal(err)
	}
	if s := p.Steps[1]; !s.writes() {
		t.Errorf("the step %s failed, and the plan has nothing to do", s.Name)
	}
	if r := i.Before("v0.2.0"); r != 1 {
		t.Errorf("back to revision %d, want that of v0.1.0", r)
	}
	setStatus(t, "interrupted", common.StatusDeployed)
}

// setStatus changes the state of the newest revision.
func setStatus(t *testing.T, namespace string, status common.Status) {
	t.Helper()
	c := helm(t, namespace)
	last, err := c.Releases.Last("isthmus")
	if err != nil {
		t.Fatal(err)
	}
	r, err := v1(last)
	if err != nil {
		t.Fatal(err)
	}
	r.Info.Status = status
	if err := c.Releases.Update(r); err != nil {
		t.Fatal(err)
	}
}

// Values of the release that pin the images of another version are refused, unless they are given anew; null removes one for good.
func TestPinnedImages(t *testing.T) {
	cluster, open := installed(t, "pinned", map[string]any{"image": map[string]any{"tag": "v0.1.0"}, "agent": map[string]any{"maxUnavailable": int64(3)}})
	plan := func(values map[string]any) (*Plan, error) {
		return open().Plan(t.Context(), version(t, "v0.2.0"), Options{Values: values})
	}
	if _, err := plan(nil); err == nil || !strings.Contains(err.Error(), "image.tag is v0.1.0") || !strings.Contains(err.Error(), "--set image.tag=null") {
		t.Errorf("with a pin: %v", err)
	}
	if _, err := plan(map[string]any{"image": map[string]any{"tag": "mine"}}); err != nil {
		t.Error(err)
	}
	p, err := plan(map[string]any{"image": map[string]any{"tag": nil}})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range p.Steps {
		if err := p.Apply(t.Context(), s.Name, time.Minute); err != nil {
			t.Fatal(err)
		}
	}
	if have := images(t, cluster, "pinned"); have["isthmus-agent"] != "v0.2.0" || have["isthmus-controller"] != "v0.2.0" {
		t.Errorf("images %v", have)
	}
	if _, err := plan(nil); err != nil {
		t.Errorf("the pin is back: %v", err)
	}
}

// Pods that are not there yet are waited for, also by a later run, and a stopped DaemonSet starts again.
func TestUnfinished(t *testing.T) {
	cluster, open := installed(t, "unfinished", nil)
	if _, err := selectNowhere(t.Context(), cluster, "unfinished", "isthmus-agent", true); err != nil {
		t.Fatal(err)
	}
	i := open()
	p, err := i.Plan(t.Context(), version(t, "v0.1.0"), Options{})
	if err != nil {
		t.Fatal(err)
	}
	if s := p.Steps[1]; s.writes() || !slices.Equal(s.Stopped, []string{"DaemonSet isthmus-agent"}) {
		t.Errorf("a stopped DaemonSet: %+v", s)
	}
	if err := p.Apply(t.Context(), Agents, time.Minute); err != nil {
		t.Fatal(err)
	}
	d, err := cluster.AppsV1().DaemonSets("unfinished").Get(t.Context(), "isthmus-agent", metav1.GetOptions{})
	if err != nil || d.Spec.Template.Spec.NodeSelector[nowhere] != "" {
		t.Errorf("it does not start again: %v, %v", d.Spec.Template.Spec.NodeSelector, err)
	}
	for _, tc := range []struct {
		r        rollout
		notReady int32
		want     bool
	}{
		{rollout{done: 3, want: 3, seen: true}, 0, true},
		{rollout{done: 2, want: 3, seen: true}, 0, false},
		{rollout{done: 2, want: 3, seen: true}, 1, true},
		{rollout{done: 3, want: 3}, 0, false},
	} {
		if have := tc.r.finished(tc.notReady); have != tc.want {
			t.Errorf("%+v with %d nodes that are not ready: %t", tc.r, tc.notReady, have)
		}
	}
}

// Pods that are ready count with the version that they run; an updateStrategy OnDelete keeps some of another one than the release.
func TestRunning(t *testing.T) {
	cluster, open := installed(t, "running", nil)
	for name, tt := range map[string]struct {
		version string
		ready   corev1.ConditionStatus
		partOf  string
	}{
		"kept":  {"v0.0.9", corev1.ConditionTrue, "isthmus"},
		"new":   {"v0.1.0", corev1.ConditionTrue, "isthmus"},
		"lost":  {"v0.0.7", corev1.ConditionFalse, "isthmus"}, // its node is gone
		"other": {"v0.0.8", corev1.ConditionTrue, "another"},
	} {
		p := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{labelPartOf: tt.partOf, labelVersion: tt.version}},
			Spec:       corev1.PodSpec{NodeName: "one", Containers: []corev1.Container{{Name: "agent", Image: "isthmus/agent"}}},
		}
		p, err := cluster.CoreV1().Pods("running").Create(t.Context(), p, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: tt.ready}}
		if _, err := cluster.CoreV1().Pods("running").UpdateStatus(t.Context(), p, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	have, err := open().Running(t.Context())
	if want := map[string]string{"v0.0.9": "kept", "v0.1.0": "new"}; err != nil || !maps.Equal(have, want) {
		t.Errorf("%v, %v, want %v", have, err, want)
	}
}

// counting counts lists of nodes.
type counting struct {
	http.RoundTripper
	lists *atomic.Int32
}

func (c counting) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Method == http.MethodGet && r.URL.Path == "/api/v1/nodes" {
		c.lists.Add(1)
	}
	return c.RoundTripper.RoundTrip(r)
}

// A plan lists the nodes of a large cluster once, and not for each step.
func TestPlanListsNodesOnce(t *testing.T) {
	_, _ = installed(t, "once", map[string]any{"gateway": map[string]any{"enabled": true, "cluster": "east"}})
	var lists atomic.Int32
	cfg := rest.CopyConfig(server.Config(t))
	cfg.Wrap(func(to http.RoundTripper) http.RoundTripper { return counting{to, &lists} })
	i, err := Open(cfg, "once", "isthmus")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := i.Plan(t.Context(), version(t, "v0.1.0"), Options{}); err != nil || lists.Load() != 1 {
		t.Errorf("%d lists, %v", lists.Load(), err)
	}
}

// Uninstall waits for the garbage collector, and names the objects that it has left when the time is over.
func TestUninstallWaitsForObjects(t *testing.T) {
	for _, tc := range []struct {
		namespace string
		collected bool
		want      string
	}{
		{"collected", true, ""},
		{"uncollected", false, "Deployment isthmus-controller is being deleted"},
	} {
		t.Run(tc.namespace, func(t *testing.T) {
			cluster, open := installed(t, tc.namespace, nil)
			i := open()
			objects, err := i.config.KubeClient.Build(strings.NewReader(i.history[0].Manifest), false)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { collect(objects) })
			timeout := 2 * time.Second
			if tc.collected {
				timeout = time.Minute
				// Each object is marked when its turn comes, so the collector looks again and again.
				collector := time.NewTicker(2 * time.Second)
				defer collector.Stop()
				go func() {
					for {
						select {
						case <-collector.C:
							collect(objects)
						case <-t.Context().Done():
							return
						}
					}
				}()
			}
			_, err = i.Uninstall(t.Context(), timeout)
			if said := fmt.Sprint(err); tc.collected != (err == nil) || !strings.Contains(said, tc.want) {
				t.Errorf("%v, want %q", err, tc.want)
			}
			left, err := cluster.AppsV1().Deployments(tc.namespace).List(t.Context(), metav1.ListOptions{})
			if err != nil || len(left.Items) == 0 != tc.collected {
				t.Errorf("%d Deployments left, %v", len(left.Items), err)
			}
		})
	}
}

// collect removes the finalizers of objects, as the garbage collector does when it has deleted their dependents.
func collect(objects kube.ResourceList) {
	for _, o := range objects { // some are gone
		o.Client.Patch(types.MergePatchType).NamespaceIfScoped(o.Namespace, o.Namespaced()).Resource(o.Mapping.Resource.Resource).Name(o.Name).
			Body([]byte(`{"metadata":{"finalizers":null}}`)).Do(context.Background())
	}
}

// A release of another chart is not touched.
func TestOtherChart(t *testing.T) {
	_, _ = installed(t, "other", nil)
	c := helm(t, "other")
	last, err := c.Releases.Last("isthmus")
	if err != nil {
		t.Fatal(err)
	}
	r, err := v1(last)
	if err != nil {
		t.Fatal(err)
	}
	r.Chart.Metadata.Name = "grafana"
	if err := c.Releases.Update(r); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(server.Config(t), "other", "isthmus"); !errors.Is(err, ErrOther) || !strings.Contains(err.Error(), "grafana") {
		t.Errorf("a release of grafana: %v", err)
	}
}

// A value that the chart does not know any more is named, and nothing is written.
func TestUnknownValue(t *testing.T) {
	_, open := installed(t, "values", nil)
	if _, err := open().Plan(t.Context(), version(t, "v0.2.0"), Options{Values: map[string]any{"agent": map[string]any{"gone": true}}}); err == nil || !strings.Contains(err.Error(), "gone") {
		t.Errorf("an unknown value: %v", err)
	}
	if r := open().Revision; r != 1 {
		t.Errorf("revision %d", r)
	}
}
