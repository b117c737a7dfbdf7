package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	restfake "k8s.io/client-go/rest/fake"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	mcsv1beta1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/cmd/internal/status"
	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/membership"
)

const ns = "isthmus-system"

// cluster is a fake cluster for a collector: objects, and the answers of pods to requests with a token.
type cluster struct {
	objects []client.Object
	answers map[string]any // by pod:port, or pod:port/path
}

func (c cluster) collector(t *testing.T) *collector {
	t.Helper()
	s, err := membership.NewScheme()
	if err != nil {
		t.Fatal(err)
	}
	pods := &restfake.RESTClient{
		NegotiatedSerializer: scheme.Codecs.WithoutConversion(),
		GroupVersion:         corev1.SchemeGroupVersion,
		Client: restfake.CreateHTTPClient(func(r *http.Request) (*http.Response, error) {
			name, path, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/namespaces/"+ns+"/pods/https:"), "/proxy")
			if r.Header.Get(status.TokenHeader) == "" {
				return &http.Response{StatusCode: http.StatusForbidden, Body: io.NopCloser(strings.NewReader(status.TokenHeader)), Header: http.Header{}}, nil
			}
			if path != status.Path {
				name += path
			}
			answer, ok := c.answers[name]
			if stream, is := answer.(io.Reader); is {
				return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(stream), Header: http.Header{}}, nil
			}
			if !ok {
				return &http.Response{StatusCode: http.StatusServiceUnavailable, Body: io.NopCloser(strings.NewReader("connection refused")), Header: http.Header{}}, nil
			}
			body, err := json.Marshal(answer)
			if err != nil {
				return nil, err
			}
			return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(bytes.NewReader(body)), Header: http.Header{"Content-Type": {"application/json"}}}, nil
		}),
	}
	return &collector{
		client: fake.NewClientBuilder().WithScheme(s).WithObjects(c.objects...).Build(),
		pods:   rest.Interface(pods), namespace: ns,
	}
}

func pod(name, node, app string, phase corev1.PodPhase, port int32) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name, Labels: map[string]string{"app": app}},
		Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: app, Ports: []corev1.ContainerPort{{Name: status.PortName, ContainerPort: port}}}}},
		Status:     corev1.PodStatus{Phase: phase},
	}
}

// workloadLabel returns the label by which commands find a workload.
func workloadLabel(workload string) map[string]string {
	return map[string]string{"app.kubernetes.io/name": workload}
}

// healthy is a member on two nodes without faults.
func healthy() cluster {
	one := int32(1)
	selector := func(app string) *metav1.LabelSelector {
		return &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}
	}
	agent := func(node string) status.Agent {
		return status.Agent{
			Version: "v1", Node: node, Ready: true,
			Dataplane: status.Dataplane{Hooks: []status.Hook{{Name: "connect4", Attached: true}, {Name: "connect6", Attached: true}}, Frontends: 2, Backends: 5},
			DNS:       status.DNS{Listening: []string{"169.254.20.53:53"}},
		}
	}
	return cluster{
		objects: []client.Object{
			&v1alpha1.Member{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "a"}, Spec: v1alpha1.MemberSpec{ClusterID: "a", ClusterSetID: "prod", ClusterSetIPCIDR: []string{"243.0.0.0/16"}}},
			&appsv1.Deployment{
				ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "isthmus-controller", Labels: workloadLabel("isthmus-controller")}, Spec: appsv1.DeploymentSpec{Replicas: &one, Selector: selector("c")},
				Status: appsv1.DeploymentStatus{ReadyReplicas: 1, UpdatedReplicas: 1, Replicas: 1},
			},
			&appsv1.DaemonSet{
				ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "isthmus-agent", Labels: workloadLabel("isthmus-agent")}, Spec: appsv1.DaemonSetSpec{Selector: selector("a")},
				Status: appsv1.DaemonSetStatus{NumberReady: 2, UpdatedNumberScheduled: 2, DesiredNumberScheduled: 2},
			},
			&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: status.ObserverAccount}},
			pod("c-1", "n1", "c", corev1.PodRunning, 9471),
			pod("a-2", "n2", "a", corev1.PodRunning, 19470), // a port that is not the default
			pod("a-1", "n1", "a", corev1.PodRunning, 9470),
			&mcsv1beta1.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: "demo", Name: "hello"}, Status: mcsv1beta1.ServiceExportStatus{Conditions: []metav1.Condition{
				{Type: "Valid", Status: "True", Reason: "Valid"}, {Type: "Conflict", Status: "False", Reason: "NoConflicts"},
			}}},
			&mcsv1beta1.ServiceImport{ObjectMeta: metav1.ObjectMeta{Namespace: "demo", Name: "hello", Labels: map[string]string{v1alpha1.LabelManagedBy: v1alpha1.ManagedBy}}},
		},
		answers: map[string]any{
			"c-1:9471":  status.Controller{Version: "v1", Leader: true, Ready: true, Broker: status.Broker{Server: "https://broker", Reachable: true}},
			"a-1:9470":  agent("n1"),
			"a-2:19470": agent("n2"),
		},
	}
}

// Parts of the text about a healthy cluster.
const (
	summaryOfA = `
cluster     a of ClusterSet prod, ClusterSetIPs 243.0.0.0/16
controller  1 of 1 ready
broker      https://broker, reachable
agents      2 of 2 ready
services    1 exported here, 1 imported
`
	nodesOfA = `
NODE  READY  HOOKS  FRONTENDS  BACKENDS  DNS               VERSION
n1    yes    2/2    2          5         169.254.20.53:53  v1
n2    yes    2/2    2          5         169.254.20.53:53  v1
`
)

// Without the observer's account, the status says why no pod was asked. It tries again, because the account may be created meanwhile.
func TestStatusWithoutObserver(t *testing.T) {
	w := healthy()
	remove[*corev1.ServiceAccount](&w)
	c := w.collector(t)
	r, err := c.collect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	const why = "node n1: pod a-1 was not asked: ServiceAccount isthmus-system/isthmus-observer does not exist; upgrade Isthmus"
	if !slices.ContainsFunc(r.Waiting, func(w string) bool { return strings.HasPrefix(w, why) }) || r.Ready {
		t.Errorf("waits for %q, want %s", r.Waiting, why)
	}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: status.ObserverAccount}}
	if err := c.client.Create(t.Context(), account); err != nil {
		t.Fatal(err)
	}
	if r, err = c.collect(t.Context()); err != nil || !r.Ready {
		t.Errorf("with the account: %q, %v", r.Waiting, err)
	}
}

// Commands find the workloads by their labels, because the chart's fullnameOverride names them. Two are an error that names both.
func TestStatusFindsWorkloadsByLabel(t *testing.T) {
	w := healthy()
	for _, o := range w.objects {
		switch o.(type) {
		case *appsv1.Deployment, *appsv1.DaemonSet:
			o.SetName("net-" + strings.TrimPrefix(o.GetName(), "isthmus-"))
		}
	}
	c := w.collector(t)
	if r, err := c.collect(t.Context()); err != nil || !r.Ready || r.Controller.Ready != 1 || r.Agents.Ready != 2 {
		t.Fatalf("status: %+v, %v", r, err)
	}
	if pods, err := c.agentPods(t.Context(), nil); err != nil || len(pods) != 2 {
		t.Errorf("agents: %d, %v", len(pods), err)
	}
	for other, want := range map[client.Object]string{
		&appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "old-controller", Labels: workloadLabel("isthmus-controller")}}: "2 Deployments with the label app.kubernetes.io/name=isthmus-controller, net-controller and old-controller",
		&appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "old-agent", Labels: workloadLabel("isthmus-agent")}}:            "2 DaemonSets with the label app.kubernetes.io/name=isthmus-agent, net-agent and old-agent",
	} {
		if err := c.client.Create(t.Context(), other); err != nil {
			t.Fatal(err)
		}
		if _, err := c.collect(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("with two: %v, want %q", err, want)
		}
		if err := c.client.Delete(t.Context(), other); err != nil {
			t.Fatal(err)
		}
	}
}

func TestStatusText(t *testing.T) {
	tests := map[string]struct {
		change func(*cluster)
		want   string
	}{
		"all is well": {change: func(*cluster) {}, want: summaryOfA + nodesOfA + `
ready
`},
		"much is wrong": {
			change: func(c *cluster) {
				s := c.answers["a-1:9470"].(status.Agent)
				s.Ready, s.Waiting = false, []string{"the dataplane has not applied the last snapshot: map is full"}
				s.MissingCapabilities = []string{"DNS over IPv6: IPv6 is switched off on this node"}
				c.answers["a-1:9470"] = s
				delete(c.answers, "a-2:19470")
				c.answers["c-1:9471"] = status.Controller{Leader: true, Waiting: []string{"caches are not filled"}, Broker: status.Broker{Server: "https://broker", Error: "refused"}}
				for _, o := range c.objects {
					switch o := o.(type) {
					case *mcsv1beta1.ServiceExport:
						o.Status.Conditions[1] = metav1.Condition{Type: "Conflict", Status: "True", Reason: "PortConflict", Message: "ports differ\nin b"}
					case *appsv1.DaemonSet:
						o.Status.NumberReady = 1
					}
				}
			}, want: `
cluster     a of ClusterSet prod, ClusterSetIPs 243.0.0.0/16
controller  1 of 1 ready
broker      https://broker, not reachable
agents      1 of 2 ready
services    1 exported here, 1 imported

NODE  READY  HOOKS  FRONTENDS  BACKENDS  DNS               VERSION
n1    no     2/2    2          5         169.254.20.53:53  v1
n2    no     -      -          -         -                 -

Missing optional capabilities:
  DNS over IPv6: IPv6 is switched off on this node (n1)

KIND           NAME        CONDITION      REASON        MESSAGE
ServiceExport  demo/hello  Conflict=True  PortConflict  ports differ in b

Not ready:
  controller: caches are not filled
  broker: the controller does not reach https://broker: refused
  agents: 1 of 2 pods of DaemonSet isthmus-system/isthmus-agent are ready and current
  node n1: the dataplane has not applied the last snapshot: map is full
  node n2: pod a-2 does not answer on port 19470: the server is currently unable to handle the request (get pods https:a-2:19470)
`,
		},
		"pods of a later node are outside of the registration": {
			change: func(c *cluster) {
				for _, o := range c.objects {
					if m, ok := o.(*v1alpha1.Member); ok {
						m.Status.Conditions = []metav1.Condition{{Type: "PodsRegistered", Status: "False", Reason: "PodsOutside", Message: "the other members ignore 10.9.0.0/24"}}
					}
				}
			}, want: summaryOfA + nodesOfA + `
KIND    NAME              CONDITION             REASON       MESSAGE
Member  isthmus-system/a  PodsRegistered=False  PodsOutside  the other members ignore 10.9.0.0/24

ready
`,
		},
		"the cluster's DNS was changed on one node": {
			change: func(c *cluster) {
				for pod, is := range map[string]status.ClusterDNS{"a-1:9470": {Answers: true}, "a-2:19470": {Reason: "it has no zone clusterset.local"}} {
					agent := c.answers[pod].(status.Agent)
					agent.DNS.Cluster = &is
					c.answers[pod] = agent
				}
			}, want: `
cluster      a of ClusterSet prod, ClusterSetIPs 243.0.0.0/16
controller   1 of 1 ready
broker       https://broker, reachable
agents       2 of 2 ready
cluster DNS  does not answer for clusterset.local on node n2: it has no zone clusterset.local
services     1 exported here, 1 imported
` + nodesOfA + `
ready
`,
		},
		"members in different states": {
			change: func(c *cluster) {
				s := c.answers["c-1:9471"].(status.Controller)
				since := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
				s.Members = []status.Member{
					{ID: "b", State: status.MemberLive},
					{ID: "c.eu", State: status.MemberStale, Since: since, Held: 12},
					{ID: "d", State: status.MemberDead, Since: since},
				}
				c.answers["c-1:9471"] = s
				for pod, drained := range map[string][]string{"a-1:9470": {"c.eu", "d"}, "a-2:19470": {"d"}} {
					agent := c.answers[pod].(status.Agent)
					agent.Dataplane.Drained = drained
					c.answers[pod] = agent
				}
			}, want: summaryOfA + `
MEMBER  STATE  SINCE                 HELD
b       live   -                     0
c.eu    stale  2026-01-02T03:04:05Z  12
d       dead   2026-01-02T03:04:05Z  0
` + nodesOfA + `
drained: member c.eu does not answer packets from node n1; new connections there go to other clusters

drained: member d does not answer packets from nodes n1, n2; new connections there go to other clusters

held: 12 exports of member c.eu vanished together and stay imported; if this is intended, run isthmusctl release-hold c.eu

ready
`,
		},
		"imports of another controller": {change: func(c *cluster) {
			of := func(name string, labels map[string]string) client.Object {
				return &mcsv1beta1.ServiceImport{ObjectMeta: metav1.ObjectMeta{Namespace: "demo", Name: name, Labels: labels}}
			}
			c.objects = append(c.objects, of("theirs", nil), of("other", map[string]string{v1alpha1.LabelManagedBy: "other"}), of("a-copy", map[string]string{mcsv1beta1.LabelServiceName: "theirs"}))
		}, want: summaryOfA + nodesOfA + `
not imported: 2 ServiceImports are written by another controller, so agents do not serve them: demo/other, demo/theirs; isthmusctl explain SERVICE says what to do

ready
`},
		"nothing is installed": {change: func(c *cluster) { c.objects = nil }, want: `
cluster     not a member
controller  0 of 0 ready
agents      0 of 0 ready
services    0 exported here, 0 imported

Not ready:
  membership: namespace isthmus-system has 0 Members, want 1; run isthmusctl join
  controller: namespace isthmus-system has no Deployment with the label app.kubernetes.io/name=isthmus-controller; install Isthmus, see helm install
  agents: namespace isthmus-system has no DaemonSet with the label app.kubernetes.io/name=isthmus-agent; install Isthmus, see helm install
`},
		"no nodes": {
			change: func(c *cluster) {
				c.objects = slices.DeleteFunc(c.objects, func(o client.Object) bool { return strings.HasPrefix(o.GetName(), "a-") })
				for _, o := range c.objects {
					if d, ok := o.(*appsv1.DaemonSet); ok {
						d.Status = appsv1.DaemonSetStatus{}
					}
				}
			}, want: `
cluster     a of ClusterSet prod, ClusterSetIPs 243.0.0.0/16
controller  1 of 1 ready
broker      https://broker, reachable
agents      0 of 0 ready
services    1 exported here, 1 imported

Not ready:
  agents: the cluster has no nodes; add some, DaemonSet isthmus-system/isthmus-agent runs an agent on each
`,
		},
		"no node for the agents, no controller wanted": {
			change: func(c *cluster) {
				none := int32(0)
				c.objects = slices.DeleteFunc(c.objects, func(o client.Object) bool { _, ok := o.(*corev1.Pod); return ok })
				c.objects = append(c.objects, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}})
				for _, o := range c.objects {
					switch o := o.(type) {
					case *appsv1.DaemonSet:
						o.Status = appsv1.DaemonSetStatus{}
					case *appsv1.Deployment:
						o.Spec.Replicas, o.Status = &none, appsv1.DeploymentStatus{}
					}
				}
			}, want: `
cluster     a of ClusterSet prod, ClusterSetIPs 243.0.0.0/16
controller  0 of 0 ready
agents      0 of 0 ready
services    1 exported here, 1 imported

Not ready:
  controller: Deployment isthmus-system/isthmus-controller is scaled to 0; scale it up
  agents: DaemonSet isthmus-system/isthmus-agent matches no node; check its nodeSelector, affinity and tolerations
`,
		},
		"the cluster has left": {
			change: func(c *cluster) {
				none := int32(0)
				c.objects = slices.DeleteFunc(c.objects, func(o client.Object) bool {
					_, member := o.(*v1alpha1.Member)
					return member || o.GetName() == "c-1"
				})
				for _, o := range c.objects {
					if d, ok := o.(*appsv1.Deployment); ok {
						d.Annotations = map[string]string{"isthmus.dev/replicas": "2"}
						d.Spec.Replicas, d.Status = &none, appsv1.DeploymentStatus{}
					}
				}
			}, want: `
cluster     not a member
controller  0 of 0 ready
agents      2 of 2 ready
services    1 exported here, 1 imported
` + nodesOfA + `
Not ready:
  membership: namespace isthmus-system has 0 Members, want 1; run isthmusctl join
  controller: Deployment isthmus-system/isthmus-controller was stopped when the cluster left; isthmusctl join starts it again
`,
		},
		"a child of a federation, without a broker": {
			change: func(c *cluster) {
				c.objects = append(slices.DeleteFunc(c.objects, func(o client.Object) bool { _, member := o.(*v1alpha1.Member); return member }),
					&federationv1alpha1.Federation{ObjectMeta: metav1.ObjectMeta{Name: "federation"}, Spec: federationv1alpha1.FederationSpec{ClusterSet: "prod"}},
					&federationv1alpha1.ClusterClaim{ObjectMeta: metav1.ObjectMeta{Name: "id.k8s.io"}, Spec: federationv1alpha1.ClusterClaimSpec{Name: "id.k8s.io", Value: "c"}})
				c.answers["c-1:9471"] = status.Controller{Version: "v1", Ready: true, Federation: &status.Federation{}}
			}, want: `
federation  prod, c is a child
controller  1 of 1 ready
agents      2 of 2 ready
services    1 exported here, 1 imported
` + nodesOfA + `
ready
`,
		},
		"it is the broker as well": {
			change: func(c *cluster) {
				c.objects = append(c.objects,
					&v1alpha1.ClusterSetConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "isthmus-broker", Name: v1alpha1.ClusterSetConfigName}},
					&mcsv1beta1.ServiceImport{ObjectMeta: metav1.ObjectMeta{Namespace: "isthmus-broker", Name: "hello.demo"}})
			}, want: summaryOfA + nodesOfA + `
ready
`,
		},
		"the DaemonSet is not processed yet": {
			change: func(c *cluster) {
				c.objects = slices.DeleteFunc(c.objects, func(o client.Object) bool { return strings.HasPrefix(o.GetName(), "a-") })
				c.objects = append(c.objects, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}})
				for _, o := range c.objects {
					if d, ok := o.(*appsv1.DaemonSet); ok {
						d.Generation, d.Status = 1, appsv1.DaemonSetStatus{}
					}
				}
			}, want: `
cluster     a of ClusterSet prod, ClusterSetIPs 243.0.0.0/16
controller  1 of 1 ready
broker      https://broker, reachable
agents      0 of 0 ready
services    1 exported here, 1 imported

Not ready:
  agents: DaemonSet isthmus-system/isthmus-agent has not been processed yet; check that the cluster's controller manager runs
`,
		},
		"an image that cannot be pulled": {
			change: func(c *cluster) {
				for _, o := range c.objects {
					if p, ok := o.(*corev1.Pod); ok && p.Name == "a-2" {
						p.Status.Phase = corev1.PodPending
						p.Status.ContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ErrImageNeverPull"}}}}
					}
				}
			}, want: summaryOfA + `
NODE  READY  HOOKS  FRONTENDS  BACKENDS  DNS               VERSION
n1    yes    2/2    2          5         169.254.20.53:53  v1
n2    no     -      -          -         -                 -

Not ready:
  node n2: pod a-2 is Pending: ErrImageNeverPull
`,
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			c := healthy()
			tc.change(&c)
			r, err := c.collector(t).collect(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			var text strings.Builder
			if err := r.writeText(&text); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(strings.TrimPrefix(tc.want, "\n"), text.String()); diff != "" {
				t.Errorf("status (-want +got):\n%s", diff)
			}
			if r.Ready == strings.Contains(tc.want, "Not ready:") {
				t.Errorf("ready is %t", r.Ready)
			}
			var js bytes.Buffer
			if err := writeJSON(&js, r); err != nil || !json.Valid(js.Bytes()) {
				t.Errorf("json: %v\n%s", err, js.Bytes())
			}
		})
	}
}

// The command prints what it waits for at each change, ends when everything is ready, and names what is not ready after
// the timeout.
func TestStatusWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		testbed := healthy()
		c := testbed.collector(t)
		answers := &lockedAnswers{c: c.pods.(*restfake.RESTClient).Client.Transport}
		c.pods.(*restfake.RESTClient).Client.Transport = answers
		answers.down(true)

		var progress bytes.Buffer
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		r, err := c.await(ctx, &progress, 10*time.Second)
		if err == nil || r == nil || !strings.Contains(err.Error(), "not ready after 10s:\n  controller: pod c-1 does not answer") {
			t.Errorf("time is up: %v, %v", r, err)
		}
		if n := strings.Count(progress.String(), "waiting for:"); n != 1 {
			t.Errorf("one lasting reason was told %d times:\n%s", n, &progress)
		}

		progress.Reset()
		ctx, cancel = context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		time.AfterFunc(5*time.Second, func() { answers.down(false) })
		began := time.Now()
		if r, err := c.await(ctx, &progress, time.Minute); err != nil || !r.Ready {
			t.Errorf("all is ready: %v, %v", r, err)
		}
		if d := time.Since(began); d < 5*time.Second || d > 7*time.Second {
			t.Errorf("it took %s to see what changed after 5s", d)
		}
	})
}

// lockedAnswers lets a test take the pods away and bring them back.
type lockedAnswers struct {
	c      http.RoundTripper
	mu     sync.Mutex
	isDown bool
}

func (l *lockedAnswers) down(is bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.isDown = is
}

func (l *lockedAnswers) RoundTrip(r *http.Request) (*http.Response, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.isDown {
		return nil, fmt.Errorf("connection refused")
	}
	return l.c.RoundTrip(r)
}
