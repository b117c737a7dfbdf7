package membership

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

// The plan for a broker of another version names what differs, and nothing else. Its files for joining stay valid, and so do all settings.
func TestUpgradeBroker(t *testing.T) {
	info, asAdmin := deploy(t, Broker{
		Namespace: "older", ClusterSetID: "prod", QuotaController: "registry.example.org/team/isthmus/controller:v0.1.0", PullSecrets: []string{"pull"}, AdmitAtMost: 7,
	})
	before, err := readConfig(t.Context(), asAdmin, "older")
	if err != nil {
		t.Fatal(err)
	}
	plan := func() Upgrade {
		t.Helper()
		u, err := PlanBroker(t.Context(), asAdmin, "older", "isthmus/controller:v0.2.0@sha256:1234")
		if err != nil {
			t.Fatal(err)
		}
		return u
	}
	scaled := &appsv1.Deployment{}
	if err := asAdmin.Get(t.Context(), client.ObjectKey{Namespace: "older", Name: v1alpha1.QuotaController}, scaled); err != nil {
		t.Fatal(err)
	}
	scaled.Spec.Replicas = new(int32(1))
	if err := asAdmin.Update(t.Context(), scaled); err != nil {
		t.Fatal(err)
	}
	left := metav1.NewTime(time.Now().Add(-2 * tombstoneLife))
	gone := &v1alpha1.Member{
		ObjectMeta: metav1.ObjectMeta{Namespace: "older", Name: "gone"},
		Spec:       v1alpha1.MemberSpec{ClusterID: "gone", ClusterSetID: "prod", JoinTime: left, LeftAt: &left},
	}
	if err := asAdmin.Create(t.Context(), gone); err != nil {
		t.Fatal(err)
	}
	role := &rbacv1.Role{}
	if err := asAdmin.Get(t.Context(), client.ObjectKey{Namespace: "older", Name: memberRole}, role); err != nil {
		t.Fatal(err)
	}
	now := role.Rules
	role.Rules = role.Rules[1:]
	if err := asAdmin.Update(t.Context(), role); err != nil {
		t.Fatal(err)
	}
	want := []PlannedObject{{"Role older/isthmus-member", "changed"}, {"Deployment older/isthmus-quota-controller", "changed"}}
	u := plan()
	if diff := cmp.Diff(want, u.Objects); diff != "" {
		t.Errorf("plan (-want +have):\n%s", diff)
	}
	if err := asAdmin.Get(t.Context(), client.ObjectKeyFromObject(role), role); err != nil || len(role.Rules) == len(now) {
		t.Errorf("a plan wrote the Role: %v, %v", role.Rules, err)
	}
	if err := u.Apply(t.Context()); err != nil {
		t.Fatal(err)
	}
	if u := plan(); len(u.Objects) > 0 {
		t.Errorf("after the upgrade the plan has %v", u.Objects)
	}
	if err := asAdmin.Get(t.Context(), client.ObjectKeyFromObject(gone), gone); err != nil {
		t.Errorf("the upgrade deleted a tombstone that its plan does not name: %v", err)
	}
	if u, err := PlanBroker(t.Context(), asAdmin, "older", "isthmus/controller:v0.1.9"); err != nil || len(u.Objects) > 0 {
		t.Errorf("a member of an older version: %v, %v", u.Objects, err)
	}
	d := &appsv1.Deployment{}
	if err := asAdmin.Get(t.Context(), client.ObjectKey{Namespace: "older", Name: v1alpha1.QuotaController}, d); err != nil {
		t.Fatal(err)
	}
	if image := d.Spec.Template.Spec.Containers[0].Image; image != "registry.example.org/team/isthmus/controller:v0.2.0@sha256:1234" {
		t.Errorf("the quota controller's image is %s", image)
	}
	if n := *d.Spec.Replicas; n != 1 {
		t.Errorf("it has %d replicas, and somebody chose 1", n)
	}
	if have := pullSecrets(t, asAdmin, client.ObjectKeyFromObject(d)); !slices.Equal(have, []string{"pull"}) {
		t.Errorf("it has the pull secrets %q", have)
	}
	after, err := readConfig(t.Context(), asAdmin, "older")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before.Spec, after.Spec); diff != "" {
		t.Errorf("settings (-before +after):\n%s", diff)
	}
	joining := newClient(t, info.RESTConfig())
	if _, err := readConfig(t.Context(), joining, "older"); err != nil {
		t.Errorf("the file for joining is not valid any more: %v", err)
	}
}

// A broker without a quota controller gets none, and a cluster without a broker is left as it is.
func TestUpgradeWithoutQuotaController(t *testing.T) {
	_, asAdmin := deploy(t, Broker{Namespace: "no-quotas"})
	u, err := PlanBroker(t.Context(), asAdmin, "no-quotas", "isthmus/controller:v0.2.0")
	if err != nil || len(u.Objects) > 0 {
		t.Errorf("plan %v, %v", u.Objects, err)
	}
	if _, err := PlanBroker(t.Context(), asAdmin, "nobody", ""); !errors.Is(err, ErrNoBroker) {
		t.Errorf("without a broker: %v", err)
	}
}

// Only members have policies for their ClusterProperties.
func TestUpgradeMember(t *testing.T) {
	member := cluster(t, &memberServer)
	info, asAdmin := deploy(t, Broker{Namespace: "upgraded"})
	r := request(invite(t, asAdmin, info, "east"), "east", 41)
	if _, err := Join(t.Context(), newClient(t, r.Broker.RESTConfig()), member, r); err != nil {
		t.Fatal(err)
	}
	u, err := PlanMember(t.Context(), member, r.Namespace)
	if err != nil || len(u.Objects) > 0 {
		t.Errorf("just after it joined: %v, %v", u.Objects, err)
	}
	if u, err := PlanBroker(t.Context(), asAdmin, "upgraded", ""); err != nil || len(u.Objects) > 0 {
		t.Errorf("its broker: %v, %v", u.Objects, err)
	}
	tokens := &rbacv1.Role{}
	tokens.Namespace, tokens.Name = "upgraded", v1alpha1.MemberTokens("east")
	if err := asAdmin.Delete(t.Context(), tokens); err != nil {
		t.Fatal(err)
	}
	if u, err := PlanBroker(t.Context(), asAdmin, "upgraded", ""); err != nil || !slices.Equal(u.Objects, []PlannedObject{{"Role upgraded/" + tokens.Name, "created"}}) {
		t.Errorf("without the member's right to its tokens: %v, %v", u.Objects, err)
	}
	policy, _ := propertyPolicies()
	if err := member.Delete(t.Context(), policy); err != nil {
		t.Fatal(err)
	}
	u, err = PlanMember(t.Context(), member, r.Namespace)
	if err != nil || !slices.Equal(u.Objects, []PlannedObject{{"ValidatingAdmissionPolicy " + propertyPolicy, "created"}}) {
		t.Errorf("without the policy: %v, %v", u.Objects, err)
	}
	if err := u.Apply(t.Context()); err != nil {
		t.Fatal(err)
	}
	if u, err := PlanMember(t.Context(), member, "elsewhere"); err != nil || len(u.Objects) > 0 {
		t.Errorf("a cluster that is no member: %v, %v", u.Objects, err)
	}
}

func TestCutTag(t *testing.T) {
	t.Parallel()
	for image, want := range map[string][2]string{
		"isthmus/controller":                      {"isthmus/controller", ""},
		"isthmus/controller:v1":                   {"isthmus/controller", ":v1"},
		"reg:5000/isthmus/controller":             {"reg:5000/isthmus/controller", ""},
		"reg:5000/isthmus/controller:v1":          {"reg:5000/isthmus/controller", ":v1"},
		"reg:5000/isthmus/controller@sha256:12":   {"reg:5000/isthmus/controller", "@sha256:12"},
		"reg/isthmus/controller:v1.2-x@sha256:12": {"reg/isthmus/controller", ":v1.2-x@sha256:12"},
	} {
		if repository, tag := cutTag(image); repository != want[0] || tag != want[1] {
			t.Errorf("%s: %q and %q", image, repository, tag)
		}
	}
}
