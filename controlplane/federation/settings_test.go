package federation_test

import (
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/tools/await"
)

// condition returns a condition of a supervisor's Federation, the zero value without it.
func (w *testbed) condition(supervisor clusterset.ClusterID, kind string) metav1.Condition {
	w.t.Helper()
	f := &federationv1alpha1.Federation{}
	if err := w.admin[supervisor].Get(w.t.Context(), client.ObjectKey{Name: federationv1alpha1.FederationName}, f); err != nil {
		w.t.Fatal(err)
	}
	if c := meta.FindStatusCondition(f.Status.Conditions, kind); c != nil {
		return *c
	}
	return metav1.Condition{}
}

// Both supervisors tell what differs between their Federations, until it does not, and whether anybody may take part.
func TestSettingsDiffer(t *testing.T) {
	w := newTestbed(t)
	w.supervise("a", "one")
	w.supervise("b", "two")
	differ := func(id clusterset.ClusterID) string {
		return w.condition(id, federationv1alpha1.ConditionSettingsDiffer).Message
	}
	open := func(id clusterset.ClusterID) metav1.ConditionStatus {
		return w.condition(id, federationv1alpha1.ConditionGrantsOpen).Status
	}
	await.True(t, "the federation is open", func() bool { return open("a") == metav1.ConditionTrue && open("b") == metav1.ConditionTrue })

	w.edit("b", func(spec *federationv1alpha1.FederationSpec) {
		spec.HostnameTemplate, spec.Grants = "{{.Name}}.example.org", []federationv1alpha1.Grant{}
	})
	await.True(t, "both name the fields", func() bool {
		return open("b") == metav1.ConditionFalse && open("a") == metav1.ConditionTrue &&
			strings.HasPrefix(differ("a"), "supervisor b has another value of spec.grants, spec.hostnameTemplate; ") &&
			strings.HasPrefix(differ("b"), "supervisor a has another value of spec.grants, spec.hostnameTemplate; ")
	})
	w.edit("a", func(spec *federationv1alpha1.FederationSpec) {
		spec.HostnameTemplate, spec.Grants = "{{.Name}}.example.org", []federationv1alpha1.Grant{}
	})
	await.True(t, "nothing differs", func() bool { return differ("a") == "" && differ("b") == "" })

	// An earlier version gave no right to read the Federation of another supervisor.
	role := &rbacv1.ClusterRole{}
	if err := w.admin["a"].Get(t.Context(), client.ObjectKey{Name: "isthmus-federation"}, role); err != nil {
		t.Fatal(err)
	}
	for i, rule := range role.Rules {
		if rule.APIGroups[0] == federationv1alpha1.GroupVersion.Group {
			role.Rules[i].Resources = []string{"clusterclaims"}
		}
	}
	if err := w.admin["a"].Update(t.Context(), role); err != nil {
		t.Fatal(err)
	}
	await.True(t, "b names the missing right", func() bool {
		return strings.HasPrefix(differ("b"), "supervisor a does not let others read its Federation")
	})
	if m := w.status("b", "a"); !m.Reachable {
		t.Errorf("a counts as unreachable: %s", m.Message)
	}
}
