package access

import (
	rbacv1 "k8s.io/api/rbac/v1"
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
