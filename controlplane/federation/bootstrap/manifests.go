package bootstrap

import (
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/admission"
	"github.com/isthmus-net/isthmus/controlplane/federation/policies"
)

// MemberObjects returns what Form writes into every member with Isthmus in namespace, but for claims and the Federation: the rights of
// leaders, and the admission policies that hold former leaders off. It is for those who form a federation without isthmusctl.
func MemberObjects(namespace string, member clusterset.ClusterID) []client.Object {
	return append(roles(meta.NewDefaultRESTMapper(nil), namespace, member, policies.Kinds(federationv1alpha1.PoliciesSpec{})),
		admission.Policies(namespace, member)...)
}

// AccountObjects returns what Form writes into a member for one supervisor: its account with the rights of a leader, and the Secret
// credential, to which its tokens are bound.
func AccountObjects(namespace string, supervisor clusterset.ClusterID, credential string) []client.Object {
	serviceAccount, rights := account(namespace, supervisor)
	m := metadata(namespace, supervisor)
	m.Name = credential
	objects := append([]client.Object{serviceAccount, &corev1.Secret{ObjectMeta: m, Type: corev1.SecretTypeOpaque}}, rights...)
	return append(objects, tokenRights(namespace, supervisor, credential, nil)...)
}

// ControllerObjects returns what Form writes into a supervisor for its controller: the namespace of its tokens, and the rights to read
// and to renew them.
func ControllerObjects(namespace string) []client.Object {
	objects := append([]client.Object{&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: federationv1alpha1.SecretNamespace}}},
		secretRights(namespace)...)
	for _, o := range objects {
		if role, ok := o.(*rbacv1.Role); ok { // the namespace has no other Secrets
			role.Rules = append(role.Rules, rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"secrets"}, Verbs: []string{"patch"}})
		}
	}
	return objects
}
