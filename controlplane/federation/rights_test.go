package federation_test

import (
	"context"
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/policies"
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
		everything("coordination.k8s.io", "*"), everything(federationv1alpha1.GroupVersion.Group, "*"),
	}
	w.rights("a", "c", some...)
	w.supervise("a", "one")
	w.awaitLeader("a/one")
	w.offer("a", "web", "10.1.0.1")
	w.leadsTo("c", "web", "10.1.0.1")
	eventually(t, "a reports the missing right", func() bool {
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
	eventually(t, "nothing is missing", func() bool { return w.status("a", "c").Message == "" })
	w.policyStates("a", allow, policies.Applied, nil)
}
