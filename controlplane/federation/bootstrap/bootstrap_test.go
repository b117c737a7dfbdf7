package bootstrap

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/about"
	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/fences"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/admission"
	"github.com/isthmus-net/isthmus/controlplane/federation/policies"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
)

func clusterID(id string) clusterset.ClusterID { return clusterset.ClusterID(id) }

// A supervisor and a child form a federation. A second supervisor joins, tokens are rotated, and all three leave. The
// clusters are then as they were before.
func TestLifecycle(t *testing.T) {
	a, b, c := newTestbed(t)
	all := []Cluster{a, b, c}
	before := make([][]string, len(all))
	for i, cluster := range all {
		before[i] = everything(t, cluster)
	}

	formed, err := Form(t.Context(), Formation{ClusterSet: "prod", Namespace: namespace, Clusters: []Cluster{supervisor(a), c}})
	if err != nil {
		t.Fatal(err)
	}
	want := Formed{ClusterSet: "prod", Members: []Member{
		{ID: "a", Server: strings.TrimSuffix(a.Host, "/"), Supervisor: true, New: true},
		{ID: "c", Server: strings.TrimSuffix(c.Host, "/"), New: true},
	}}
	if diff := cmp.Diff(want, formed); diff != "" {
		t.Errorf("formed (-want +have):\n%s", diff)
	}
	if have := members(t, a); have != "a,c" {
		t.Errorf("supervisor a knows %s", have)
	}
	if have := members(t, c); have != "" {
		t.Errorf("child c knows %s", have)
	}
	token := held(t, a, "c")
	if _, err := handed(t, c, "a"); !apierrors.IsNotFound(err) {
		t.Errorf("the child has a token of the supervisor's cluster: %v", err)
	}
	leads(t, token)

	// A second supervisor needs all, and gets its own accounts.
	_, err = Form(t.Context(), Formation{Namespace: namespace, Clusters: []Cluster{supervisor(a), supervisor(b)}})
	if err == nil || !strings.Contains(err.Error(), "--child c=CONTEXT") {
		t.Errorf("a supervisor joined without the member c: %v", err)
	}
	_, err = Form(t.Context(), Formation{Namespace: namespace, Clusters: []Cluster{supervisor(b), c}})
	if err == nil || !strings.Contains(err.Error(), "--supervisor a=CONTEXT") {
		t.Errorf("a supervisor joined behind the back of a: %v", err)
	}
	if have := members(t, a); have != "a,c" {
		t.Errorf("what was refused has changed a, which knows %s", have)
	}
	edited := &federationv1alpha1.Federation{ObjectMeta: metav1.ObjectMeta{Name: federationv1alpha1.FederationName}}
	if err := a.Client.Patch(t.Context(), edited, client.RawPatch(types.MergePatchType, []byte(`{"spec":{"systemNamespace":"global-services","clusterSetIP":{"ranges":["242.0.0.0/16"]}}}`))); err != nil {
		t.Fatal(err)
	}
	if _, err = Form(t.Context(), Formation{Namespace: namespace, Clusters: []Cluster{supervisor(a), supervisor(b), c}}); err != nil {
		t.Fatal(err)
	}
	child := &federationv1alpha1.Federation{}
	if err := c.Client.Get(t.Context(), client.ObjectKey{Name: federationv1alpha1.FederationName}, child); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"242.0.0.0/16"}, child.Spec.ClusterSetIP.Ranges); diff != "" {
		t.Errorf("the ranges that the child's nodes serve (-want +have):\n%s", diff)
	}
	if err := c.Client.Get(t.Context(), client.ObjectKey{Name: "global-services"}, &corev1.Namespace{}); err != nil {
		t.Errorf("the namespace of global Services: %v", err)
	}
	if a, b := members(t, a), members(t, b); a != "a,b,c" || b != "a,b,c" {
		t.Errorf("supervisors know %s and %s", a, b)
	}
	if again := held(t, a, "c"); again != token {
		t.Error("the token of a for c changed without a rotation")
	}
	if held(t, b, "c") == token {
		t.Error("two supervisors have one token")
	}

	// Both tokens are good for a while, and then the new one is.
	done := make(chan []Rotated, 1)
	go func() {
		rotated, err := Rotate(t.Context(), namespace, []Cluster{supervisor(b), c}, 500*time.Millisecond)
		if err != nil {
			t.Error(err)
		}
		done <- rotated
	}()
	old := held(t, b, "c")
	await(t, "b has no new token", func() bool { return held(t, b, "c") != old })
	if !accepts(t, old) || !accepts(t, held(t, b, "c")) {
		t.Error("one of both tokens is not good while they are rotated")
	}
	if diff := cmp.Diff([]Rotated{{"b", "b", 1}, {"b", "c", 1}}, <-done); diff != "" {
		t.Errorf("rotated (-want +have):\n%s", diff)
	}
	if accepts(t, old) {
		t.Error("the old token is still valid")
	}
	if !accepts(t, held(t, b, "c")) || !accepts(t, token) {
		t.Error("the new token, or that of another supervisor, is worthless")
	}

	// The objects of leaders are deleted, and those of users stay.
	put(t, c, service("theirs", nil, nil))
	put(t, c, service("ours", map[string]string{v1alpha1.LabelManagedBy: federationv1alpha1.ManagedBy}, map[string]string{federationv1alpha1.AnnotationEpoch: "1"}))
	noted := []client.Object{
		&networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "noted", Annotations: map[string]string{
			federationv1alpha1.AnnotationEpoch: "1", policies.AnnotationStatus: "{}", "note": "x",
		}}},
		service("noted", nil, map[string]string{federationv1alpha1.AnnotationEpoch: "1", federationv1alpha1.AnnotationServiceStatus: "member of web", "note": "x"}),
	}
	for _, o := range noted {
		put(t, c, o)
	}
	made := &about.ClusterProperty{ // by the controller of c
		ObjectMeta: metav1.ObjectMeta{Name: about.ClusterID, Labels: map[string]string{v1alpha1.LabelManagedBy: federationv1alpha1.ManagedBy}},
		Spec:       about.ClusterPropertySpec{Value: "c"},
	}
	own := &about.ClusterProperty{ObjectMeta: metav1.ObjectMeta{Name: about.ClusterSet}, Spec: about.ClusterPropertySpec{Value: "prod"}}
	put(t, c, made)
	put(t, c, own)
	if _, err := Remove(t.Context(), Removal{ID: "c", Namespace: namespace, Clusters: []Cluster{supervisor(a), c}}); err == nil || !strings.Contains(err.Error(), "--supervisor b=CONTEXT") {
		t.Errorf("c left behind the back of b: %v", err)
	}
	removed, err := Remove(t.Context(), Removal{ID: "c", Namespace: namespace, Clusters: []Cluster{supervisor(a), supervisor(b), c}})
	if err != nil || removed.Objects != 1 {
		t.Fatalf("removed: %+v, %v", removed, err)
	}
	if err := c.Client.Get(t.Context(), client.ObjectKeyFromObject(made), made); !apierrors.IsNotFound(err) {
		t.Errorf("c still says that it is %s: %v", made.Spec.Value, err)
	}
	if err := c.Client.Delete(t.Context(), own); err != nil {
		t.Errorf("a user's ClusterProperty: %v", err)
	}
	await(t, "a supervisor that is none of c's is still let in", func() bool { return !accepts(t, token) })
	for _, o := range noted {
		if err := c.Client.Get(t.Context(), client.ObjectKeyFromObject(o), o); err != nil || len(o.GetAnnotations()) != 1 {
			t.Errorf("a user's %T: %v, %v", o, o.GetAnnotations(), err)
		}
	}
	for _, o := range append(noted, service("theirs", nil, nil)) {
		if err := c.Client.Delete(t.Context(), o); err != nil {
			t.Errorf("a user's object: %v", err)
		}
	}
	// A supervisor that cannot be reached any more; what is in it stays, until it is reached.
	if _, err := Remove(t.Context(), Removal{ID: "b", Namespace: namespace, Gone: true, Clusters: []Cluster{supervisor(a)}}); err != nil {
		t.Fatal(err)
	}
	if have := members(t, a); have != "a" {
		t.Errorf("the last supervisor knows %s", have)
	}
	for _, last := range []Cluster{b, a} {
		for range 2 { // the second time there is nothing left to do, which is an error
			_, err = Remove(t.Context(), Removal{ID: last.ID, Namespace: namespace, Clusters: []Cluster{supervisor(last), supervisor(a)}[:1+strings.Count(string(last.ID), "b")]})
		}
		if err == nil || !strings.Contains(err.Error(), "is not a member") {
			t.Errorf("removed %s, which had left: %v", last.ID, err)
		}
	}
	for i, cluster := range all {
		if diff := cmp.Diff(before[i], everything(t, cluster)); diff != "" {
			t.Errorf("cluster %s is not what it was (-before +now):\n%s", cluster.ID, diff)
		}
	}
}

// leads checks the rights of a supervisor's token in c.
func leads(t *testing.T, token string) {
	t.Helper()
	leader := newClient(t, as(t, token))
	o := service("led", map[string]string{"app.kubernetes.io/managed-by": "federation.isthmus.dev"}, map[string]string{federationv1alpha1.AnnotationEpoch: "0"})
	lease := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "c"},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: new("b/pod"), LeaseTransitions: new(int32(0))},
	}
	if err := leader.Create(t.Context(), lease); err != nil {
		t.Errorf("a supervisor cannot take the Lease: %v", err)
	}
	await(t, "who does not hold the Lease may write", func() bool {
		return apierrors.IsForbidden(leader.Create(t.Context(), o.DeepCopy(), client.DryRunAll))
	})
	lease.Spec.HolderIdentity = new("a/pod")
	if err := leader.Update(t.Context(), lease); err != nil {
		t.Errorf("a supervisor cannot renew the Lease: %v", err)
	}
	await(t, "who holds the Lease may not write", func() bool { return leader.Create(t.Context(), o.DeepCopy(), client.DryRunAll) == nil })
	own := service("own", nil, map[string]string{federationv1alpha1.AnnotationEpoch: "0"})
	await(t, "a leader may make anything of its own", func() bool {
		return apierrors.IsForbidden(leader.Create(t.Context(), own.DeepCopy(), client.DryRunAll))
	})
	for what, err := range map[string]error{
		"list namespaces":      leader.List(t.Context(), &corev1.NamespaceList{}),
		"list NetworkPolicies": leader.List(t.Context(), &networkingv1.NetworkPolicyList{}),
	} {
		if err != nil {
			t.Errorf("a leader cannot %s: %v", what, err)
		}
	}
	for what, err := range map[string]error{
		"list Secrets":                leader.List(t.Context(), &corev1.SecretList{}, client.InNamespace(namespace)),
		"list ConfigMaps of others":   leader.List(t.Context(), &corev1.ConfigMapList{}, client.InNamespace("default")),
		"take another Lease":          leader.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: "isthmus-federation"}, &coordinationv1.Lease{}),
		"list pods":                   leader.List(t.Context(), &corev1.PodList{}),
		"give itself rights":          leader.Create(t.Context(), &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "more"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"}}),
		"change the claims":           leader.Delete(t.Context(), &federationv1alpha1.ClusterClaim{ObjectMeta: metav1.ObjectMeta{Name: "id.k8s.io"}}),
		"change what c's admins said": leader.Delete(t.Context(), &federationv1alpha1.Federation{ObjectMeta: metav1.ObjectMeta{Name: "federation"}}),
	} {
		if !apierrors.IsForbidden(err) {
			t.Errorf("a leader may %s: %v", what, err)
		}
	}
}

// may reports whether a user may do something with Secrets of a namespace.
func may(t *testing.T, c Cluster, user, verb, namespace string) bool {
	t.Helper()
	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: user, ResourceAttributes: &authorizationv1.ResourceAttributes{Namespace: namespace, Verb: verb, Resource: "secrets"},
	}}
	if err := c.Client.Create(t.Context(), review); err != nil {
		t.Fatal(err)
	}
	return review.Status.Allowed
}

// The controller of a supervisor reads the credentials for members, in a namespace of their own, and no other Secrets. That of a
// child reads none.
func TestCredentialsStandApart(t *testing.T) {
	a, _, c := newTestbed(t)
	formPair(t, a, c)
	const controller = "system:serviceaccount:isthmus-system:isthmus-controller"
	await(t, "the supervisor's controller may not read its credentials", func() bool {
		return may(t, a, controller, "list", "isthmus-federation") && may(t, a, controller, "watch", "isthmus-federation")
	})
	for _, refused := range []struct {
		cluster         Cluster
		verb, namespace string
	}{
		{a, "list", namespace},
		{a, "get", namespace},
		{a, "watch", namespace},
		{a, "list", ""},
		{a, "create", "isthmus-federation"},
		{a, "update", "isthmus-federation"},
		{a, "patch", "isthmus-federation"}, // others than those for members
		{a, "delete", "isthmus-federation"},
		{c, "list", namespace},
		{c, "list", "isthmus-federation"},
		{c, "list", ""},
	} {
		if may(t, refused.cluster, controller, refused.verb, refused.namespace) {
			t.Errorf("the controller of %s may %s Secrets of namespace %q", refused.cluster.ID, refused.verb, refused.namespace)
		}
	}
	if may(t, a, "system:serviceaccount:isthmus-system:federation-a", "list", "isthmus-federation") {
		t.Error("a supervisor's account may read credentials")
	}
	removeAll(t, c, a)
}

// formPair forms a federation of supervisor a and child c, or forms it again.
func formPair(t *testing.T, a, c Cluster) {
	t.Helper()
	if _, err := Form(t.Context(), Formation{ClusterSet: "prod", Namespace: namespace, Clusters: []Cluster{supervisor(a), c}}); err != nil {
		t.Fatal(err)
	}
}

// Every member reserves the labels of Isthmus, whether the chart is installed or not, and a child has the ranges of ClusterSetIPs
// that its policy compares with.
func TestMembersReserveLabels(t *testing.T) {
	a, _, c := newTestbed(t)
	formPair(t, a, c)
	edited := &federationv1alpha1.Federation{ObjectMeta: metav1.ObjectMeta{Name: federationv1alpha1.FederationName}}
	patch := client.RawPatch(types.MergePatchType, []byte(`{"spec":{"clusterSetIP":{"enabled":true,"ranges":["242.0.0.0/16"]}}}`))
	if err := a.Client.Patch(t.Context(), edited, patch); err != nil {
		t.Fatal(err)
	}
	// In a the chart is installed now, with a policy of its own version.
	chart := &admissionv1.ValidatingAdmissionPolicy{}
	if err := a.Client.Get(t.Context(), client.ObjectKey{Name: fences.ReservedName}, chart); err != nil {
		t.Fatal(err)
	}
	if chart.Annotations["meta.helm.sh/release-name"] != "isthmus" || chart.Labels[v1alpha1.LabelManagedBy] != "Helm" {
		t.Errorf("Helm would refuse to take over a policy with %v and %v", chart.Labels, chart.Annotations)
	}
	chart.Labels["app.kubernetes.io/instance"], chart.Annotations["note"] = "isthmus", "of the chart"
	chart.Spec.Validations = chart.Spec.Validations[:1]
	if err := a.Client.Update(t.Context(), chart); err != nil {
		t.Fatal(err)
	}
	formPair(t, a, c)
	child := &federationv1alpha1.Federation{}
	if err := c.Client.Get(t.Context(), client.ObjectKey{Name: federationv1alpha1.FederationName}, child); err != nil || !slices.Equal(child.Spec.ClusterSetIP.Ranges, []string{"242.0.0.0/16"}) {
		t.Errorf("the child has the ranges %v, %v", child.Spec.ClusterSetIP.Ranges, err)
	}
	if err := a.Client.Get(t.Context(), client.ObjectKeyFromObject(chart), chart); err != nil || len(chart.Spec.Validations) != 1 {
		t.Errorf("the chart's policy is written: %v", err)
	}
	stranger := newClient(t, impersonating(t, c))
	await(t, "the child reserves no labels", func() bool {
		o := service("x", map[string]string{v1alpha1.LabelCluster: "a"}, nil)
		return apierrors.IsForbidden(stranger.Create(t.Context(), o, client.DryRunAll))
	})
	removeAll(t, c, a)
	if err := c.Client.Get(t.Context(), client.ObjectKey{Name: fences.ReservedName}, &admissionv1.ValidatingAdmissionPolicy{}); !apierrors.IsNotFound(err) {
		t.Errorf("the child keeps the policy: %v", err)
	}
	if err := a.Client.Get(t.Context(), client.ObjectKeyFromObject(chart), chart); err != nil {
		t.Errorf("the chart's policy is deleted: %v", err)
	}
	for _, o := range []client.Object{chart, &admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: fences.ReservedName}}} {
		_ = a.Client.Delete(t.Context(), o)
	}
}

// removeAll removes a child and then the supervisor.
func removeAll(t *testing.T, child, of Cluster) {
	t.Helper()
	for _, r := range []Removal{
		{ID: child.ID, Namespace: namespace, Clusters: []Cluster{supervisor(of), child}}, {ID: of.ID, Namespace: namespace, Clusters: []Cluster{supervisor(of)}},
	} {
		if _, err := Remove(t.Context(), r); err != nil {
			t.Fatal(err)
		}
	}
}

// impersonating returns a configuration of a tenant of c, who may write Services.
func impersonating(t *testing.T, c Cluster) *rest.Config {
	t.Helper()
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "jane"}, Rules: []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"services"}, Verbs: []string{"*"}}}}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "jane"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "jane"},
		Subjects: []rbacv1.Subject{{Kind: "User", APIGroup: rbacv1.GroupName, Name: "jane"}},
	}
	put(t, c, role)
	put(t, c, binding)
	t.Cleanup(func() {
		_, _ = c.Client.Delete(context.Background(), role), c.Client.Delete(context.Background(), binding)
	})
	cfg := serverC.Config(t)
	cfg.Impersonate = rest.ImpersonationConfig{UserName: "jane"}
	return cfg
}

// Form writes nothing, and its error names the context and the remedy.
func TestFormRefuses(t *testing.T) {
	a, b, c := newTestbed(t)
	said := &federationv1alpha1.ClusterClaim{ObjectMeta: metav1.ObjectMeta{Name: "id.k8s.io"}, Spec: federationv1alpha1.ClusterClaimSpec{Name: "id.k8s.io", Value: "other"}}
	put(t, b, said)
	defer func() {
		if err := b.Client.Delete(t.Context(), said); err != nil {
			t.Error(err)
		}
	}()
	plain := supervisor(a)
	plain.Server = "http://192.0.2.1"
	twin := c
	twin.ID = "z"
	twin.Context = "ctx-z"
	tests := map[string]struct {
		clusterSet string
		clusters   []Cluster
		want       []string
	}{
		"no supervisor":     {"prod", []Cluster{a, c}, []string{"--supervisor ID=CONTEXT"}},
		"no ClusterSet":     {"", []Cluster{supervisor(a)}, []string{"--clusterset"}},
		"a bad ClusterSet":  {"Prod", []Cluster{supervisor(a)}, []string{"Prod"}},
		"an id twice":       {"prod", []Cluster{supervisor(a), a}, []string{"given twice", "ctx-a"}},
		"a cluster twice":   {"prod", []Cluster{supervisor(c), twin}, []string{"reach the same cluster", "ctx-c", "ctx-z"}},
		"no https":          {"prod", []Cluster{plain}, []string{"ctx-a", "--server a=https://"}},
		"it is another one": {"prod", []Cluster{supervisor(a), b}, []string{"ctx-b", "ClusterClaim id.k8s.io is other"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			before := everything(t, a)
			_, err := Form(t.Context(), Formation{ClusterSet: tc.clusterSet, Namespace: namespace, Clusters: tc.clusters})
			if err == nil {
				t.Fatal("it was formed")
			}
			for _, part := range tc.want {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%q does not say %q", err, part)
				}
			}
			if diff := cmp.Diff(before, everything(t, a)); diff != "" {
				t.Errorf("it was written all the same (-before +now):\n%s", diff)
			}
		})
	}
}

func put(t *testing.T, c Cluster, o client.Object) {
	t.Helper()
	if err := c.Client.Create(t.Context(), o); err != nil {
		t.Fatal(err)
	}
}

func service(name string, labels, annotations map[string]string) *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Labels: labels, Annotations: annotations},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}},
	}
}

// members returns the members in the Federation of a cluster.
func members(t *testing.T, c Cluster) string {
	t.Helper()
	f := &federationv1alpha1.Federation{}
	if err := c.Client.Get(t.Context(), client.ObjectKey{Name: "federation"}, f); err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, m := range f.Spec.Members {
		ids = append(ids, m.ClusterID)
	}
	return strings.Join(ids, ",")
}

func handed(t *testing.T, c Cluster, member string) (*corev1.Secret, error) {
	t.Helper()
	s := &corev1.Secret{}
	return s, c.Client.Get(t.Context(), client.ObjectKey{Namespace: federationv1alpha1.SecretNamespace, Name: "federation-" + member}, s)
}

// held returns the token of a supervisor for a member.
func held(t *testing.T, c Cluster, member string) string {
	t.Helper()
	s, err := handed(t, c, member)
	if err != nil {
		t.Fatal(err)
	}
	if len(s.Data["ca.crt"]) == 0 {
		t.Error("the Secret has no ca.crt")
	}
	return string(s.Data["token"])
}

// as returns the configuration of a client with a token of server c.
func as(t *testing.T, token string) *rest.Config {
	t.Helper()
	cfg := rest.AnonymousClientConfig(serverC.Config(t))
	cfg.BearerToken = token
	return cfg
}

// accepts reports whether server c accepts a token.
func accepts(t *testing.T, token string) bool {
	t.Helper()
	err := newClient(t, as(t, token)).List(t.Context(), &corev1.NamespaceList{})
	if err != nil && !apierrors.IsUnauthorized(err) && !apierrors.IsForbidden(err) {
		t.Fatal(err)
	}
	return err == nil
}

func await(t *testing.T, overdue string, done func() bool) {
	t.Helper()
	if err := admin.Await(t.Context(), overdue, func() (bool, error) { return done(), nil }); err != nil {
		t.Fatal(err)
	}
}

// everything lists the objects of a cluster that a federation may have created, as KIND NAMESPACE/NAME.
func everything(t *testing.T, c Cluster) []string {
	t.Helper()
	var found []string
	for _, list := range []client.ObjectList{
		&federationv1alpha1.FederationList{}, &federationv1alpha1.ClusterClaimList{}, &corev1.SecretList{}, &corev1.ServiceAccountList{},
		&corev1.ServiceList{}, &rbacv1.ClusterRoleList{}, &rbacv1.ClusterRoleBindingList{}, &rbacv1.RoleList{}, &rbacv1.RoleBindingList{},
		&admissionv1.ValidatingAdmissionPolicyList{}, &admissionv1.ValidatingAdmissionPolicyBindingList{}, &coordinationv1.LeaseList{},
	} {
		if err := c.Client.List(t.Context(), list); err != nil {
			t.Fatal(err)
		}
		text, err := names(list)
		if err != nil {
			t.Fatal(err)
		}
		found = append(found, text...)
	}
	slices.Sort(found)
	return found
}

// names returns the objects of a list that a federation may have created.
func names(list client.ObjectList) ([]string, error) {
	var found []string
	err := meta.EachListItem(list, func(o runtime.Object) error {
		m, err := meta.Accessor(o)
		if err == nil && (strings.Contains(m.GetName(), "federation") || m.GetLabels()[v1alpha1.LabelManagedBy] == v1alpha1.ManagedBy) {
			found = append(found, fmt.Sprintf("%T %s/%s", o, m.GetNamespace(), m.GetName()))
		}
		return err
	})
	return found, err
}

// A formation and a removal leave the objects of the chart alone.
func TestChartsObjectsStay(t *testing.T) {
	a, _, _ := newTestbed(t)
	a = supervisor(a)
	objects := slices.DeleteFunc(MemberObjects(namespace, a.ID), admission.IsParameters) // which stay for good
	for i, o := range append([]client.Object{&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}}, objects...) {
		if i > 0 {
			o.SetLabels(map[string]string{"app.kubernetes.io/instance": "isthmus", "app.kubernetes.io/managed-by": "Helm"})
		}
		if err := a.Client.Create(t.Context(), o); err != nil && (i > 0 || !apierrors.IsAlreadyExists(err)) {
			t.Fatal(err)
		}
		if i == 0 {
			continue // namespaces stay
		}
		t.Cleanup(func() {
			if err := a.Client.Delete(context.WithoutCancel(t.Context()), o); err != nil {
				t.Errorf("the chart's %T %s is gone: %v", o, o.GetName(), err)
			}
		})
	}
	if _, err := Form(t.Context(), Formation{ClusterSet: "prod", Namespace: namespace, Clusters: []Cluster{a}}); err != nil {
		t.Fatal(err)
	}
	if _, err := Remove(t.Context(), Removal{ID: "a", Namespace: namespace, Clusters: []Cluster{a}}); err != nil {
		t.Fatal(err)
	}
	for _, o := range objects {
		have := o.DeepCopyObject().(client.Object)
		if err := a.Client.Get(t.Context(), client.ObjectKeyFromObject(o), have); err != nil {
			t.Errorf("%T %s: %v", o, o.GetName(), err)
		} else if have.GetLabels()["app.kubernetes.io/managed-by"] != "Helm" {
			t.Errorf("%T %s was taken over: %v", o, o.GetName(), have.GetLabels())
		}
	}
}
