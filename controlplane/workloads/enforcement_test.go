package workloads_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/workloads"
	"github.com/isthmus-net/isthmus/controlplane/workloads/rules"
	"github.com/isthmus-net/isthmus/tools/await"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

// enforcer is an in-memory Enforcer.
type enforcer struct {
	mu      sync.Mutex
	applied int
	cluster string
	plan    rules.Plan
	refused map[string]string
	silent  bool
}

func (e *enforcer) Apply(_ context.Context, cluster string, plan rules.Plan) (map[string]string, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.applied++; e.silent {
		return nil, errors.New("the cloud does not respond")
	}
	e.cluster, e.plan = cluster, plan
	return e.refused, nil
}

// policies returns the policies whose rules a server has, and the number of rules.
func (e *enforcer) policies(server string) string {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, g := range e.plan.Groups {
		if g.Name == e.plan.Of[server] {
			return fmt.Sprintf("%s %d", strings.Join(g.Policies, ","), len(g.Rules))
		}
	}
	return ""
}

// await waits until a server has the rules of policies.
func (e *enforcer) await(t *testing.T, server, policies string) {
	t.Helper()
	await.True(t, fmt.Sprintf("server %s has the rules of %q", server, policies), func() bool { return e.policies(server) == policies })
}

// policy returns a NetworkPolicy.
func policy(t *testing.T, name, spec string) *networkingv1.NetworkPolicy {
	t.Helper()
	p := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if err := yaml.UnmarshalStrict([]byte(spec), &p.Spec); err != nil {
		t.Fatal(err)
	}
	return p
}

// Servers that a policy selects by their metadata get its rules, those of Services of other namespaces do not, and a deleted policy
// releases them.
func TestPoliciesOfServers(t *testing.T) {
	w := newTestbed(t)
	e := &enforcer{}
	w.enforcer, w.groups = e, workloads.SecurityGroupsPolicies
	w.cloud.servers = []workloads.Resource{vm("1", "10.9.0.1", "app=db"), vm("2", "10.9.0.2", "app=web"), {ID: "3", Labels: map[string]string{"app": "db"}}}
	p := policy(t, "db", `{podSelector: {matchLabels: {app: db}}, ingress: [{from: [{ipBlock: {cidr: 10.0.0.0/8}}], ports: [{port: tcp-80}, {port: 22}]}]}`)
	w.create(p)
	w.run()
	e.await(t, "1", w.namespace+"/db 4")
	if e.policies("2") != "" || e.policies("3") != "" || e.cluster == "" {
		t.Errorf("cluster %q, plan %+v", e.cluster, e.plan)
	}
	w.cloud.set(t, func(c *cloud) { c.servers[1].Labels["app"] = "db" })
	e.await(t, "2", w.namespace+"/db 4")
	p.Spec.Ingress = append(p.Spec.Ingress, networkingv1.NetworkPolicyIngressRule{From: []networkingv1.NetworkPolicyPeer{{IPBlock: &networkingv1.IPBlock{CIDR: "2001:db8::/32"}}}})
	if err := w.Update(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	e.await(t, "1", w.namespace+"/db 5")
	if err := w.Delete(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	e.await(t, "1", "")
	conformance.Holds(t, "F29")
}

// No plan is made before the cloud has answered; afterwards its last list stays in effect.
func TestSilentCloudReleasesNoServer(t *testing.T) {
	w := newTestbed(t)
	e := &enforcer{}
	w.enforcer, w.groups = e, workloads.SecurityGroupsPolicies
	w.cloud.servers = []workloads.Resource{vm("1", "10.9.0.1", "app=db")}
	w.create(policy(t, "db", `{podSelector: {}}`))
	_, stop := w.run()
	e.await(t, "1", w.namespace+"/db 2")
	stop()
	w.cloud.silent = true
	e.plan, e.applied = rules.Plan{}, 0
	w.run()
	w.cloud.set(t, func(*cloud) {})
	w.create(workload("db", "10.9.1.1"))
	w.await("db", "10.9.1.1:5432")
	if e.mu.Lock(); e.applied > 0 {
		t.Error("a plan was applied for a cloud that has not answered")
	}
	e.mu.Unlock()
	w.cloud.set(t, func(c *cloud) { c.silent = false })
	e.await(t, "1", w.namespace+"/db 2")
	w.cloud.set(t, func(c *cloud) { c.silent, c.servers = true, nil })
	e.await(t, "1", w.namespace+"/db 2")
}

// A server whose metadata became invalid keeps its rules, also at the next start, when nothing is known of what it had.
func TestInvalidServerIsNotReleased(t *testing.T) {
	w := newTestbed(t)
	e := &enforcer{}
	w.enforcer, w.groups = e, workloads.SecurityGroupsPolicies
	w.cloud.servers = []workloads.Resource{vm("1", "10.9.0.1", v1alpha1.MachinePorts+"=http:99999"), vm("2", "10.9.0.2"), {ID: "3"}}
	w.create(policy(t, "db", `{podSelector: {}}`))
	w.run()
	e.await(t, "2", w.namespace+"/db 2")
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.plan.Known["1"] || !e.plan.Known["2"] || !e.plan.Known["3"] || e.plan.Of["1"] != "" {
		t.Errorf("plan %+v", e.plan)
	}
}

// Refusals of the cloud and parts of policies that do not apply to machines are reported; the policy gets an event.
func TestPolicyFaultsAreTold(t *testing.T) {
	w := newTestbed(t)
	e := &enforcer{refused: map[string]string{"1": "the quota is exhausted"}}
	w.enforcer, w.groups = e, workloads.SecurityGroupsPolicies
	w.cloud.servers = []workloads.Resource{vm("1", "10.9.0.1")}
	w.create(policy(t, "pods", `{podSelector: {}, ingress: [{from: [{podSelector: {}}]}]}`))
	v, _ := w.run()
	await.True(t, "both problems", func() bool {
		all := w.problems(v)
		return len(all) == 2 && strings.Contains(all[0], "networkpolicy "+w.namespace+"/pods: spec.ingress[0].from[0] selects pods") && strings.Contains(all[1], "the quota is exhausted")
	})
	await.True(t, "the event", func() bool { return slices.Equal(w.told("pods"), []string{"NotForMachines"}) })
	e.mu.Lock()
	e.silent = true
	e.mu.Unlock()
	await.True(t, "the error", func() bool {
		s := v.State()
		return len(s.Clouds) == 1 && s.Clouds[0].Err != nil && strings.Contains(s.Clouds[0].Err.Error(), "apply policies to servers: the cloud does not respond")
	})
	if told := w.told("pods"); len(told) != 1 {
		t.Errorf("events %v", told)
	}
}

// The settings can release the servers of a cloud that does not answer, too.
func TestReleasedServers(t *testing.T) {
	w := newTestbed(t)
	e := &enforcer{plan: rules.Plan{Of: map[string]string{"1": "x"}}}
	w.enforcer, w.groups = e, workloads.SecurityGroupsRelease
	w.cloud.silent = true
	w.create(policy(t, "db", `{podSelector: {}}`))
	w.run()
	await.True(t, "an empty plan", func() bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		return e.applied > 0 && len(e.plan.Of) == 0
	})
}

// Labels of machines that Kubernetes would refuse, or that are our own, select nothing.
func TestLabelsOfMachines(t *testing.T) {
	w := newTestbed(t)
	e := &enforcer{}
	w.enforcer, w.groups = e, workloads.SecurityGroupsPolicies
	w.cloud.servers = []workloads.Resource{vm("1", "10.9.0.1", "not valid=x", "app=no value!", v1alpha1.MachinePorts+"=80", "role=a")}
	for key := range map[string]bool{"app": true, v1alpha1.MachinePorts: true} {
		w.create(policy(t, strings.ReplaceAll(key, "/", "."), fmt.Sprintf(`{podSelector: {matchExpressions: [{key: %q, operator: Exists}]}}`, key)))
	}
	w.create(policy(t, "role", `{podSelector: {matchLabels: {role: a}}}`))
	w.run()
	e.await(t, "1", w.namespace+"/role 2")
}
