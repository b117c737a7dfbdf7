package main

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	mcsv1beta1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/cmd/internal/writers"
	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/membership"
)

// controllerReport is the state of the member's controller.
type controllerReport struct {
	Ready   int32         `json:"ready"`
	Desired int32         `json:"desired"`
	Pods    []podReport   `json:"pods,omitempty"`
	Broker  *brokerReport `json:"broker,omitempty"` // according to the leader
	// Members are the other members, according to the leader.
	Members []status.Member `json:"members,omitempty"`
}

type brokerReport = status.Broker

type podReport struct {
	Pod    string             `json:"pod"`
	Status *status.Controller `json:"status,omitempty"`
	Error  string             `json:"error,omitempty"` // why it could not be asked
}

// agentsReport is the state of the agents of all nodes.
type agentsReport struct {
	Ready   int32        `json:"ready"`
	Desired int32        `json:"desired"`
	Nodes   []nodeReport `json:"nodes,omitempty"`
}

type nodeReport struct {
	Node   string        `json:"node"`
	Pod    string        `json:"pod"`
	Status *status.Agent `json:"status,omitempty"`
	Error  string        `json:"error,omitempty"` // why it could not be asked
}

// collector reads the state of Isthmus in a cluster.
type collector struct {
	client    client.Client
	pods      rest.Interface
	namespace string

	mu        sync.Mutex // guards what follows
	token     string     // of the observer, for all questions of one command
	tokenMade time.Time
}

// collector returns a collector of the target's cluster, for the installation in namespace.
func (t *target) collector(namespace string) (*collector, error) {
	cfg, _, err := t.config()
	if err != nil {
		return nil, err
	}
	return newCollector(cfg, namespace)
}

func newCollector(cfg *rest.Config, namespace string) (*collector, error) {
	c, err := connect(cfg)
	if err != nil {
		return nil, err
	}
	core, err := corev1client.NewForConfig(cfg)
	if err != nil {
		return nil, fmt.Errorf("make a client for %s: %w", cfg.Host, err)
	}
	return &collector{client: c, pods: core.RESTClient(), namespace: namespace}, nil
}

// collect returns a report, which includes missing objects and components that are not ready. An error means that the API
// server does not answer.
func (c *collector) collect(ctx context.Context) (*report, error) {
	r := &report{Namespace: c.namespace}
	for _, add := range []func(context.Context, *report) error{c.definitions, c.federation, c.member, c.controller, c.agents, c.services} {
		if err := add(ctx, r); err != nil {
			return nil, err
		}
	}
	r.Ready = len(r.Waiting) == 0
	return r, nil
}

func (r *report) wait(format string, args ...any) {
	r.Waiting = append(r.Waiting, fmt.Sprintf(format, args...))
}

// definitions reports definitions older than this isthmusctl. Other functions report missing ones.
func (c *collector) definitions(ctx context.Context, r *report) error {
	old, err := membership.OldDefinitions(ctx, c.client)
	if apierrors.IsForbidden(err) {
		return nil // a user who may not read them cannot update them
	}
	if err != nil {
		return err
	}
	for _, d := range old {
		if len(d.Lacks) > 0 {
			r.wait("definitions: %s; run isthmusctl upgrade --apply, which updates it", d)
		}
	}
	return nil
}

// federation reads the cluster's federation. Without the right to read it, the report has none.
func (c *collector) federation(ctx context.Context, r *report) error {
	f, id := &federationv1alpha1.Federation{}, &federationv1alpha1.ClusterClaim{}
	err := c.client.Get(ctx, client.ObjectKey{Name: federationv1alpha1.FederationName}, f)
	if err == nil {
		err = c.client.Get(ctx, client.ObjectKey{Name: federationv1alpha1.ClaimID}, id)
	}
	switch {
	case isAbsent(err), apierrors.IsForbidden(err):
		return nil
	case err != nil:
		return fmt.Errorf("read the cluster's Federation: %w", err)
	}
	r.Federation = &federationReport{ClusterID: id.Spec.Value, ClusterSet: f.Spec.ClusterSet, Members: len(f.Spec.Members)}
	return nil
}

func (c *collector) member(ctx context.Context, r *report) error {
	members := &v1alpha1.MemberList{}
	err := c.client.List(ctx, members, client.InNamespace(c.namespace))
	switch {
	case isAbsent(err):
	case err != nil:
		return fmt.Errorf("list members in namespace %s: %w", c.namespace, err)
	}
	if len(members.Items) == 0 && r.Federation != nil {
		return nil
	}
	if len(members.Items) != 1 {
		r.wait("membership: namespace %s has %d Members, want 1; run isthmusctl join", c.namespace, len(members.Items))
		return nil
	}
	m := members.Items[0]
	r.Member = &memberReport{ClusterID: m.Spec.ClusterID, ClusterSetID: m.Spec.ClusterSetID, ClusterSetIPs: m.Spec.ClusterSetIPCIDR, Joined: m.Spec.JoinTime.Time}
	if pods := meta.FindStatusCondition(m.Status.Conditions, v1alpha1.ConditionPodsRegistered); pods != nil && pods.Status == metav1.ConditionFalse {
		r.Services.Conditions = append(r.Services.Conditions, conditionReport{
			Kind: "Member", Name: m.Namespace + "/" + m.Name, Type: pods.Type, Status: string(pods.Status), Reason: pods.Reason, Message: pods.Message,
		})
	}
	return nil
}

func (c *collector) controller(ctx context.Context, r *report) error {
	d, err := membership.Controller(ctx, c.client, c.namespace)
	if err != nil {
		return err
	}
	if d == nil {
		r.wait("controller: namespace %s has no Deployment with the label %s; install Isthmus, see helm install", c.namespace, membership.ControllerSelector)
		return nil
	}
	key := client.ObjectKeyFromObject(d)
	r.Controller.Ready, r.Controller.Desired = d.Status.ReadyReplicas, d.Status.Replicas
	if d.Spec.Replicas != nil {
		r.Controller.Desired = *d.Spec.Replicas
	}
	switch {
	case membership.Stopped(d):
		r.wait("controller: Deployment %s was stopped when the cluster left; isthmusctl join starts it again", key)
		return nil
	case r.Controller.Desired == 0:
		r.wait("controller: Deployment %s is scaled to 0; scale it up", key)
		return nil
	case d.Status.ObservedGeneration < d.Generation || d.Status.UpdatedReplicas < r.Controller.Desired || r.Controller.Ready < r.Controller.Desired:
		r.wait("controller: %d of %d pods of Deployment %s are ready and current", min(r.Controller.Ready, d.Status.UpdatedReplicas), r.Controller.Desired, key)
	}
	pods, err := c.podsOf(ctx, d.Spec.Selector)
	if err != nil {
		return err
	}
	alone := r.Member == nil && r.Federation != nil // without a broker no replica leads
	for _, pod := range pods {
		p := podReport{Pod: pod.Name}
		p.Status, err = ask[status.Controller](ctx, c, pod, status.ControllerPort)
		if err != nil {
			p.Error = err.Error()
			r.wait("controller: %v", err)
		}
		if p.Status != nil && p.Status.Leader {
			r.Controller.Broker, r.Controller.Members = &p.Status.Broker, p.Status.Members
		}
		if p.Status != nil && (p.Status.Leader || alone) {
			for _, w := range p.Status.Waiting {
				r.wait("controller: %s", w)
			}
		}
		r.Controller.Pods = append(r.Controller.Pods, p)
	}
	switch b := r.Controller.Broker; {
	case alone:
	case b == nil:
		r.wait("controller: no pod is the leader yet")
	case !b.Reachable && !slices.ContainsFunc(r.Waiting, func(w string) bool { return strings.Contains(w, b.Server) }):
		r.wait("broker: the controller does not reach %s: %s", b.Server, b.Error)
	}
	return nil
}

func (c *collector) agents(ctx context.Context, r *report) error {
	d, err := c.agentDaemonSet(ctx)
	if err != nil {
		return err
	}
	if d == nil {
		r.wait("agents: namespace %s has no DaemonSet with the label %s; install Isthmus, see helm install", c.namespace, status.AgentSelector)
		return nil
	}
	key := client.ObjectKeyFromObject(d)
	r.Agents.Ready, r.Agents.Desired = d.Status.NumberReady, d.Status.DesiredNumberScheduled
	switch {
	case r.Agents.Desired == 0:
		if err := c.noAgents(ctx, r, d); err != nil {
			return err
		}
	case d.Status.ObservedGeneration < d.Generation || d.Status.UpdatedNumberScheduled < r.Agents.Desired || r.Agents.Ready < r.Agents.Desired:
		r.wait("agents: %d of %d pods of DaemonSet %s are ready and current", min(r.Agents.Ready, d.Status.UpdatedNumberScheduled), r.Agents.Desired, key)
	}
	pods, err := c.podsOf(ctx, d.Spec.Selector)
	if err != nil {
		return err
	}
	for _, pod := range pods {
		n := nodeReport{Node: pod.Spec.NodeName, Pod: pod.Name}
		n.Status, err = ask[status.Agent](ctx, c, pod, status.AgentPort)
		if err != nil {
			n.Error = err.Error()
			r.wait("node %s: %v", n.Node, err)
		} else {
			for _, w := range n.Status.Waiting {
				r.wait("node %s: %s", n.Node, w)
			}
		}
		r.Agents.Nodes = append(r.Agents.Nodes, n)
	}
	slices.SortFunc(r.Agents.Nodes, func(a, b nodeReport) int { return strings.Compare(a.Node, b.Node) })
	return nil
}

// noAgents reports why no agent is scheduled.
func (c *collector) noAgents(ctx context.Context, r *report, d *appsv1.DaemonSet) error {
	nodes := &corev1.NodeList{}
	err := c.client.List(ctx, nodes, client.Limit(1))
	key := client.ObjectKeyFromObject(d)
	switch {
	case err != nil && !apierrors.IsForbidden(err):
		return fmt.Errorf("list nodes: %w", err)
	case err == nil && len(nodes.Items) == 0:
		r.wait("agents: the cluster has no nodes; add some, DaemonSet %s runs an agent on each", key)
	case d.Status.ObservedGeneration < d.Generation:
		r.wait("agents: DaemonSet %s has not been processed yet; check that the cluster's controller manager runs", key)
	default:
		r.wait("agents: DaemonSet %s matches no node; check its nodeSelector, affinity and tolerations", key)
	}
	return nil
}

// podsOf lists the pods that match selector and are not being deleted.
func (c *collector) podsOf(ctx context.Context, selector *metav1.LabelSelector) ([]corev1.Pod, error) {
	s, err := metav1.LabelSelectorAsSelector(selector)
	if err != nil {
		return nil, fmt.Errorf("read a selector: %w", err)
	}
	pods := &corev1.PodList{}
	if err := c.client.List(ctx, pods, client.InNamespace(c.namespace), client.MatchingLabelsSelector{Selector: s}); err != nil {
		return nil, fmt.Errorf("list pods in namespace %s: %w", c.namespace, err)
	}
	return slices.DeleteFunc(pods.Items, func(p corev1.Pod) bool { return p.DeletionTimestamp != nil }), nil
}

// ask gets the status of a pod through the API server. The error names the state of the pod.
func ask[T status.Agent | status.Controller](ctx context.Context, c *collector, pod corev1.Pod, port int32) (*T, error) {
	token, err := c.observerToken(ctx)
	if err != nil {
		return nil, fmt.Errorf("pod %s was not asked: %w", pod.Name, err)
	}
	return fetch[T](ctx, c, pod, port, withToken(token, status.Path, nil))
}

// fetch sends a request to a pod through the API server and decodes the response.
func fetch[T any](ctx context.Context, c *collector, pod corev1.Pod, port int32, request func(*rest.Request) *rest.Request) (*T, error) {
	const timeout = 5 * time.Second
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, fmt.Errorf("no answer within %s", timeout))
	defer cancel()
	get, port, err := proxy(c.pods, pod, port)
	if err != nil {
		return nil, err
	}
	body, err := request(get).DoRaw(ctx)
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx) // the pod did not answer, not the API server
	}
	if err != nil {
		return nil, unanswered(pod, port, body, err)
	}
	s := new(T)
	if err := json.Unmarshal(body, s); err != nil {
		return nil, fmt.Errorf("pod %s on port %d sent an unexpected answer: %w", pod.Name, port, err)
	}
	return s, nil
}

// proxy returns a request to a running pod through the API server, at the pod's named port or else the given one.
func proxy(pods rest.Interface, pod corev1.Pod, port int32) (*rest.Request, int32, error) {
	if pod.Status.Phase != corev1.PodRunning {
		return nil, 0, fmt.Errorf("pod %s is %s%s", pod.Name, pod.Status.Phase, reasonOf(pod))
	}
	scheme := ""
	for _, container := range pod.Spec.Containers {
		for _, p := range container.Ports {
			switch p.Name {
			case status.PortName:
				scheme, port = "https:", p.ContainerPort
			case status.PlainPortName: // --insecure-http, or a release before HTTPS
				port = p.ContainerPort
			}
		}
	}
	return pods.Get().Namespace(pod.Namespace).Resource("pods").SubResource("proxy").Name(fmt.Sprintf("%s%s:%d", scheme, pod.Name, port)), port, nil
}

// unanswered returns the error of a request to a pod, with the pod's message if it sent one.
func unanswered(pod corev1.Pod, port int32, body []byte, err error) error {
	said := strings.TrimSpace(string(body))
	switch {
	case apierrors.IsNotFound(err):
		return fmt.Errorf("pod %s has a version without this function; upgrade it", pod.Name)
	case apierrors.IsForbidden(err) && strings.Contains(said, status.TokenHeader):
		return fmt.Errorf("pod %s refused the observer token: %s", pod.Name, said)
	}
	return fmt.Errorf("pod %s does not answer on port %d%s: %w", pod.Name, port, reasonOf(pod), err)
}

// reasonOf returns Kubernetes' reason for a container that does not run, as ": reason: message".
func reasonOf(pod corev1.Pod) string {
	for _, s := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		switch {
		case s.State.Waiting != nil && s.State.Waiting.Reason != "PodInitializing":
			return strings.TrimSuffix(": "+s.State.Waiting.Reason+": "+s.State.Waiting.Message, ": ")
		case s.State.Terminated != nil && s.State.Terminated.ExitCode != 0:
			return strings.TrimSuffix(": "+s.State.Terminated.Reason+": "+s.State.Terminated.Message, ": ")
		}
	}
	return ""
}

// brokers returns the broker namespaces of the cluster, whose objects belong to all members.
func (c *collector) brokers(ctx context.Context) (map[string]bool, error) {
	configs := &v1alpha1.ClusterSetConfigList{}
	err := c.client.List(ctx, configs)
	switch {
	case isAbsent(err), apierrors.IsForbidden(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("list ClusterSetConfigs: %w", err)
	}
	found := map[string]bool{}
	for _, config := range configs.Items {
		found[config.Namespace] = true
	}
	return found, nil
}

// addForeign notes a ServiceImport of another controller, and reports whether it is one. A copy in another namespace than that of its
// Service, such as Lighthouse's, concerns no user and is not noted.
func (s *servicesReport) addForeign(si mcsv1beta1.ServiceImport) bool {
	if slices.Contains(writers.Own(), si.Labels[v1alpha1.LabelManagedBy]) {
		return false
	}
	if !membership.IsCopy(&si) {
		s.Foreign = append(s.Foreign, si.Namespace+"/"+si.Name)
	}
	return true
}

// services counts exports and imports, and collects the conditions that need attention. They concern users: a Service in
// conflict does not make Isthmus unready.
func (c *collector) services(ctx context.Context, r *report) error {
	exports, imports := &mcsv1beta1.ServiceExportList{}, &mcsv1beta1.ServiceImportList{}
	brokers, err := c.brokers(ctx)
	if err != nil {
		return err
	}
	for _, l := range []client.ObjectList{exports, imports} {
		err := c.client.List(ctx, l)
		if isAbsent(err) {
			r.wait("definitions: the cluster does not serve the MCS API; run isthmusctl join")
			return nil
		}
		if err != nil {
			return fmt.Errorf("list Services of the ClusterSet: %w", err)
		}
	}
	imports.Items = slices.DeleteFunc(imports.Items, func(i mcsv1beta1.ServiceImport) bool { return brokers[i.Namespace] })
	if r.Member != nil || r.Federation != nil {
		imports.Items = slices.DeleteFunc(imports.Items, r.Services.addForeign)
	}
	r.Services.Exports, r.Services.Imports = len(exports.Items), len(imports.Items)
	note := func(kind string, o metav1.Object, conditions []metav1.Condition) {
		for _, cond := range conditions {
			want := metav1.ConditionTrue
			if cond.Type == string(mcsv1beta1.ServiceExportConditionConflict) {
				want = metav1.ConditionFalse
			}
			if cond.Status != want {
				r.Services.Conditions = append(r.Services.Conditions, conditionReport{
					Kind: kind, Name: o.GetNamespace() + "/" + o.GetName(),
					Type: cond.Type, Status: string(cond.Status), Reason: cond.Reason, Message: cond.Message,
				})
			}
		}
	}
	for i := range exports.Items {
		note("ServiceExport", &exports.Items[i], exports.Items[i].Status.Conditions)
	}
	for i := range imports.Items {
		note("ServiceImport", &imports.Items[i], imports.Items[i].Status.Conditions)
	}
	return nil
}
