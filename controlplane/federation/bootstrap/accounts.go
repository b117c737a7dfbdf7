package bootstrap

import (
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/policies"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
)

const (
	// labelSupervisor names the supervisor that an account, its rights or its token belong to.
	labelSupervisor = "federation.isthmus.dev/supervisor"
	// roleName is the name of the Role and the ClusterRole of leaders in a member.
	roleName = "isthmus-federation"
	// controllerAccount is the ServiceAccount of the controller, in the namespace of Isthmus.
	controllerAccount = "isthmus-controller"
	// secretPrefix, followed by a member's id, names the Secret in a supervisor with its token for that member.
	secretPrefix = "federation-"
)

// all are the verbs of a leader on the kinds that it writes.
var all = []string{"get", "list", "watch", "create", "update", "patch", "delete"}

// rules returns the rights of a leader in all namespaces of a member. kinds are the kinds of policies that are replicated.
// The resource of a kind that the member does not have is guessed, so that the right exists when the kind is installed.
func rules(mapper meta.RESTMapper, kinds []federationv1alpha1.PolicyKind) []rbacv1.PolicyRule {
	read := []string{"get", "list", "watch"}
	given := []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"services"}, Verbs: all},
		{APIGroups: []string{""}, Resources: []string{"services/status"}, Verbs: []string{"patch"}},
		{APIGroups: []string{"discovery.k8s.io"}, Resources: []string{"endpointslices"}, Verbs: all},
		// OpenShift admits addresses of its pod network in an EndpointSlice only with this one.
		{APIGroups: []string{"discovery.k8s.io"}, Resources: []string{"endpointslices/restricted"}, Verbs: []string{"create"}},
		{APIGroups: []string{"multicluster.x-k8s.io"}, Resources: []string{"serviceimports"}, Verbs: all},
		{APIGroups: []string{"multicluster.x-k8s.io"}, Resources: []string{"serviceimports/status"}, Verbs: []string{"patch"}},
		{APIGroups: []string{""}, Resources: []string{"namespaces", "nodes"}, Verbs: read},
		{APIGroups: []string{federationv1alpha1.GroupVersion.Group}, Resources: []string{"clusterclaims", "federations"}, Verbs: read},
		{APIGroups: []string{"", "events.k8s.io"}, Resources: []string{"events"}, Verbs: []string{"create", "patch", "update"}},
	}
	for _, kind := range kinds {
		gvk := schema.GroupVersionKind(kind)
		resource, _ := meta.UnsafeGuessKindToResource(gvk)
		if mapping, err := mapper.RESTMapping(gvk.GroupKind(), gvk.Version); err == nil {
			resource = mapping.Resource
		}
		given = append(given, rbacv1.PolicyRule{APIGroups: []string{gvk.Group}, Resources: []string{resource.Resource}, Verbs: all})
	}
	if core := (federationv1alpha1.PolicyKind{Group: "networking.k8s.io", Version: "v1", Kind: "NetworkPolicy"}); !slices.Contains(kinds, core) {
		// Leaders delete what they wrote for the peers of such policies.
		given = append(given, rbacv1.PolicyRule{APIGroups: []string{core.Group}, Resources: []string{"networkpolicies"}, Verbs: append(read, "patch", "delete")})
	}
	return given
}

// roles returns the rights of leaders in a member: the ClusterRole, and a Role in the namespace of Isthmus.
func roles(mapper meta.RESTMapper, namespace string, member clusterset.ClusterID, kinds []federationv1alpha1.PolicyKind) []client.Object {
	return []client.Object{
		&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: roleName, Labels: admin.Ours()}, Rules: rules(mapper, kinds)},
		&rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: roleName, Labels: admin.Ours()}, Rules: []rbacv1.PolicyRule{
			// A right to create cannot be limited to a name.
			{APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, Verbs: []string{"create"}},
			{APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, ResourceNames: []string{string(member)}, Verbs: []string{"get", "update"}},
			{APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: all},
			{APIGroups: []string{v1alpha1.GroupVersion.Group}, Resources: []string{"nodereports"}, Verbs: []string{"get", "list", "watch"}},
		}},
	}
}

// metadata returns the metadata of the objects of a supervisor in a member.
func metadata(namespace string, supervisor clusterset.ClusterID) metav1.ObjectMeta {
	m := metav1.ObjectMeta{Namespace: namespace, Name: federationv1alpha1.SupervisorAccount(supervisor), Labels: admin.Ours()}
	m.Labels[labelSupervisor] = string(supervisor)
	return m
}

// account returns the ServiceAccount of a supervisor in a member, and its bindings.
func account(namespace string, supervisor clusterset.ClusterID) (*corev1.ServiceAccount, []client.Object) {
	subjects := []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: federationv1alpha1.SupervisorAccount(supervisor)}}
	ref := func(kind string) rbacv1.RoleRef {
		return rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: kind, Name: roleName}
	}
	return &corev1.ServiceAccount{ObjectMeta: metadata(namespace, supervisor), AutomountServiceAccountToken: new(false)},
		[]client.Object{
			&rbacv1.ClusterRoleBinding{ObjectMeta: metadata("", supervisor), RoleRef: ref("ClusterRole"), Subjects: subjects},
			&rbacv1.RoleBinding{ObjectMeta: metadata(namespace, supervisor), RoleRef: ref("Role"), Subjects: subjects},
		}
}

// secretMeta returns the metadata of an object beside the credentials of a supervisor.
func secretMeta(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: federationv1alpha1.SecretNamespace, Name: name, Labels: admin.Ours()}
}

// secretRights returns the right of a supervisor's controller, installed in namespace, to read its credentials and to renew the
// tokens in the Secrets names.
func secretRights(namespace string, names ...string) []client.Object {
	rules := []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"secrets"}, Verbs: []string{"list", "watch"}}}
	if len(names) > 0 {
		rules = append(rules, rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"secrets"}, ResourceNames: names, Verbs: []string{"patch"}})
	}
	return []client.Object{
		&rbacv1.Role{ObjectMeta: secretMeta(roleName), Rules: rules},
		&rbacv1.RoleBinding{
			ObjectMeta: secretMeta(roleName), RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: roleName},
			Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: controllerAccount}},
		},
	}
}

// secretNames returns the names of the Secrets of a supervisor with its tokens, sorted.
func (s *survey) secretNames() []string {
	names := map[string]bool{}
	for _, m := range s.members {
		names[m.Secret] = true
	}
	return slices.Sorted(maps.Keys(names))
}

// kinds returns the kinds of policies that are replicated, from the Federations of the supervisors.
func (s *survey) kinds() []federationv1alpha1.PolicyKind {
	for _, found := range s.clusters {
		if found.federation != nil && len(found.federation.Spec.Policies.Kinds) > 0 {
			return found.federation.Spec.Policies.Kinds
		}
	}
	return policies.Kinds(federationv1alpha1.PoliciesSpec{})
}
