package access

import (
	rbacv1 "k8s.io/api/rbac/v1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

// MemberBrokerRules returns the rules of a member's Role in the broker's namespace. A member reads all objects, and writes
// export records, EndpointSlices, aggregates and its Lease, but neither registrations nor the ClusterSetConfig. The rules
// alone do not protect other members' objects: see Policies.
//
// The caller owns the result. It must cover every request of controlplane/broker/internal/client.
func MemberBrokerRules() []rbacv1.PolicyRule {
	read := []string{"get", "list", "watch"}
	renew := append([]string{"create", "update", "patch"}, read...)
	write := append([]string{"delete"}, renew...)
	return []rbacv1.PolicyRule{
		{APIGroups: []string{"isthmus.dev"}, Resources: []string{"members", "clustersetconfigs"}, Verbs: read},
		{APIGroups: []string{"isthmus.dev"}, Resources: []string{"exportrecords"}, Verbs: write},
		{APIGroups: []string{"multicluster.x-k8s.io"}, Resources: []string{"serviceimports"}, Verbs: write},
		{APIGroups: []string{"multicluster.x-k8s.io"}, Resources: []string{"serviceimports/status"}, Verbs: []string{"update", "patch"}},
		{APIGroups: []string{"discovery.k8s.io"}, Resources: []string{"endpointslices"}, Verbs: write},
		// OpenShift admits addresses of its pod network in an EndpointSlice only with this right.
		{APIGroups: []string{"discovery.k8s.io"}, Resources: []string{"endpointslices/restricted"}, Verbs: []string{"create"}},
		{APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, Verbs: renew},
	}
}

// QuotaControllerRules returns the rules of the quota controller's Role in the broker's namespace. It reads and deletes what
// members write there, but creates and changes none of it; it writes the status of the ClusterSetConfig, its Lease and events.
//
// The caller owns the result. It must cover every request of controlplane/broker/quotacontroller.
func QuotaControllerRules() []rbacv1.PolicyRule {
	remove := []string{"get", "list", "watch", "delete"}
	return []rbacv1.PolicyRule{
		{APIGroups: []string{"isthmus.dev"}, Resources: []string{"clustersetconfigs"}, Verbs: []string{"get", "list", "watch"}},
		{APIGroups: []string{"isthmus.dev"}, Resources: []string{"clustersetconfigs/status"}, Verbs: []string{"update"}},
		{APIGroups: []string{"isthmus.dev"}, Resources: []string{"exportrecords"}, Verbs: remove},
		{APIGroups: []string{"multicluster.x-k8s.io"}, Resources: []string{"serviceimports"}, Verbs: remove},
		{APIGroups: []string{"discovery.k8s.io"}, Resources: []string{"endpointslices"}, Verbs: remove},
		{APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, Verbs: []string{"create"}},
		{APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, ResourceNames: []string{v1alpha1.QuotaController}, Verbs: []string{"get", "update"}},
		{APIGroups: []string{"", "events.k8s.io"}, Resources: []string{"events"}, Verbs: []string{"create", "patch"}},
	}
}
