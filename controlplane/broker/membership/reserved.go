package membership

import (
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/fences"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
)

// reservedRights returns the right of a broker's accounts to write labels of Isthmus in the broker's namespace. They need it
// where the broker's API server is also a member's, which reserves these labels (package fences).
func reservedRights(namespace string) []client.Object {
	meta := metav1.ObjectMeta{Name: "isthmus." + namespace + ".reserved", Labels: admin.Ours()}
	return []client.Object{
		&rbacv1.ClusterRole{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{fences.MayUseReserved(namespace)}},
		&rbacv1.ClusterRoleBinding{
			ObjectMeta: meta, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: meta.Name},
			Subjects: []rbacv1.Subject{{Kind: rbacv1.GroupKind, APIGroup: rbacv1.GroupName, Name: "system:serviceaccounts:" + namespace}},
		},
	}
}
