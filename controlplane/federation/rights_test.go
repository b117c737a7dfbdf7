package federation_test

import (
	"context"
	"os"
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/controlplane/api/about"
	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation"
	"github.com/isthmus-net/isthmus/controlplane/federation/policies"
	"github.com/isthmus-net/isthmus/tools/await"
)

// rights replaces the rights of a supervisor in a member.
func (w *testbed) rights(supervisor, member string, rules ...rbacv1.PolicyRule) {
	w.t.Helper()
	c, account := w.admin[ids[strings.Index("abc", member)]], "federation-"+supervisor
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: account}, Rules: rules}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: account},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role.Name},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: account}},
	}
	_ = c.Delete(w.t.Context(), role.DeepCopy()) // if there is one
	for _, err := range []error{c.Delete(w.t.Context(), binding.DeepCopy()), c.Create(w.t.Context(), role), c.Create(w.t.Context(), binding)} {
		if err != nil {
			w.t.Fatal(err)
		}
	}
	w.t.Cleanup(func() {
		if err := client.IgnoreNotFound(c.Delete(context.Background(), binding)); err != nil {
			w.t.Error(err)
		}
	})
}

// A leader may not read some kinds of policies. Everything else goes on, including policies of other kinds. The Federation
// names the missing right, and the policies follow when it is there.
func TestMissingRight(t *testing.T) {
	w := newTestbed(t)
	everything := func(group string, resources ...string) rbacv1.PolicyRule {
		return rbacv1.PolicyRule{APIGroups: []string{group}, Resources: resources, Verbs: []string{"*"}}
	}
	some := []rbacv1.PolicyRule{
		everything("", "*"), everything("discovery.k8s.io", "*"), everything("multicluster.x-k8s.io", "*"), everything("events.k8s.io", "*"),
		everything("coordination.k8s.io", "*"), everything(federationv1alpha1.GroupVersion.Group, "*"), everything(v1alpha1.GroupVersion.Group, "*"),
	}
	w.rights("a", "c", some...)
	w.supervise("a", "one")
	w.awaitLeader("a/one")
	w.offer("a", "web", "10.1.0.1")
	w.leadsTo("c", "web", "10.1.0.1")
	await.True(t, "a reports the missing right", func() bool {
		m := w.status("a", "c")
		return m.Reachable && m.Leader != "" && strings.Contains(m.Message, "NetworkPolicy of networking.k8s.io/v1") && strings.Contains(m.Message, "federation create")
	})
	if have := w.status("a", "b").Message; have != "" {
		t.Errorf("of b is said %q", have)
	}
	allow, edge := networkPolicy("allow"), clusterPolicy("edge")
	some = append(some, everything("crd.antrea.io", "*"))
	w.rights("a", "c", some...)
	w.create("a", edge)
	w.policyStates("a", edge, policies.Applied, nil)
	w.create("a", allow)
	w.policyStates("a", allow, policies.Applied, map[clusterset.ClusterID]policies.State{"c": policies.Pending})
	w.rights("a", "c", append(some, everything("networking.k8s.io", "*"))...)
	await.True(t, "nothing is missing", func() bool { return w.status("a", "c").Message == "" })
	w.policyStates("a", allow, policies.Applied, nil)
}

// controller returns the configuration of a cluster's controller, with the generated rights and inside its fence.
func (w *testbed) controller(id clusterset.ClusterID) *rest.Config {
	w.t.Helper()
	text, err := os.ReadFile("../rbac/role.yaml")
	if err != nil {
		w.t.Fatal(err)
	}
	const account = "system:serviceaccount:" + namespace + ":isthmus-controller"
	subjects := []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: account}}
	for document := range strings.SplitSeq(string(text), "\n---\n") {
		var role rbacv1.Role // a ClusterRole has the same fields
		if err := yaml.Unmarshal([]byte(document), &role); err != nil {
			w.t.Fatal(err)
		}
		if role.Kind == "Role" {
			w.create(id, &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "controller"}, Rules: role.Rules})
			w.create(id, &rbacv1.RoleBinding{
				ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "controller"}, Subjects: subjects,
				RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "controller"},
			})
			continue
		}
		w.create(id, &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "controller"}, Rules: role.Rules})
		w.create(id, &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: "controller"}, Subjects: subjects,
			RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "controller"},
		})
	}
	config := servers[id].Config(w.t)
	config.Impersonate = rest.ImpersonationConfig{UserName: account, Groups: []string{"system:serviceaccounts", "system:authenticated"}}
	return config
}

// A supervisor leads, and a child maintains its claims, with the generated rights alone. A supervisor that may not read its
// credentials says so, and leads when it may again.
func TestGeneratedRights(t *testing.T) {
	w := newTestbed(t)
	right := &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Namespace: federationv1alpha1.SecretNamespace, Name: "isthmus-federation"}}
	if err := w.admin["a"].Get(t.Context(), client.ObjectKeyFromObject(right), right); err != nil {
		t.Fatal(err)
	}
	right.Subjects[0].Namespace = "elsewhere"
	if err := w.admin["a"].Update(t.Context(), right); err != nil {
		t.Fatal(err)
	}
	var supervisor, child *federation.Federation
	for id, f := range map[clusterset.ClusterID]**federation.Federation{"a": &supervisor, "c": &child} {
		var err error
		if *f, err = newFederation(w.controller(id), "one", w.log(id)); err != nil {
			t.Fatal(err)
		}
		w.run(*f)
	}
	await.True(t, "the supervisor names the missing right", func() bool {
		return strings.Contains(supervisor.State().Problem, "run isthmusctl federation create again")
	})
	await.True(t, "the child maintains its claims", func() bool {
		return w.admin["c"].Get(t.Context(), client.ObjectKey{Name: about.ClusterID}, &about.ClusterProperty{}) == nil
	})
	if problem := child.State().Problem; problem != "" {
		t.Errorf("the child has the problem %q", problem)
	}
	right.Subjects[0].Namespace = namespace
	if err := w.admin["a"].Update(t.Context(), right); err != nil {
		t.Fatal(err)
	}
	w.awaitLeader("a/one")
	w.offer("a", "web", "10.1.0.1")
	w.awaitEverywhere("web", "10.1.0.1")
}
