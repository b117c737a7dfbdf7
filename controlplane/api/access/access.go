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

// MemberTokenRules returns the rules of the Role with which member id requests tokens of its own account, and deletes the
// Secrets of its former tokens that do not expire. The caller owns the result.
func MemberTokenRules(id string, former ...string) []rbacv1.PolicyRule {
	rules := []rbacv1.PolicyRule{tokenRule(id)}
	if len(former) > 0 {
		rules = append(rules, rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"secrets"}, ResourceNames: former, Verbs: []string{"delete"}})
	}
	return rules
}

// tokenRule permits requests for tokens of member id.
func tokenRule(id string) rbacv1.PolicyRule {
	return rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"serviceaccounts/token"}, ResourceNames: []string{v1alpha1.MemberAccount(id)}, Verbs: []string{"create"}}
}

// InvitationRules returns the rules of an invitation for member id: it reads what a registration needs, writes that of id,
// requests a token of id's account, and deletes itself. The policies restrict the registration, and creations to id. The caller
// owns the result. It must cover every request of membership.Join with an invitation.
func InvitationRules(id string) []rbacv1.PolicyRule {
	group := []string{v1alpha1.GroupVersion.Group}
	return []rbacv1.PolicyRule{
		{APIGroups: group, Resources: []string{"clustersetconfigs"}, ResourceNames: []string{v1alpha1.ClusterSetConfigName}, Verbs: []string{"get"}},
		{APIGroups: group, Resources: []string{"members"}, Verbs: []string{"list", "create"}},
		{APIGroups: group, Resources: []string{"members"}, ResourceNames: []string{id}, Verbs: []string{"patch"}},
		tokenRule(id),
		{APIGroups: []string{""}, Resources: []string{"serviceaccounts"}, ResourceNames: []string{v1alpha1.InvitationAccount(id)}, Verbs: []string{"delete"}},
	}
}

// JoinRules returns the rules of the account isthmus-join, which admits new clusters with any id. It reads no Secret. The
// policies let it create objects of new members alone, and request tokens only of clusters that are no members yet. memberRole
// is the Role that it may bind. The caller owns the result. It must cover every request of membership.Join with a broker-info
// file.
func JoinRules(memberRole string) []rbacv1.PolicyRule {
	group, create := []string{v1alpha1.GroupVersion.Group}, []string{"create"}
	return []rbacv1.PolicyRule{
		{APIGroups: group, Resources: []string{"clustersetconfigs"}, ResourceNames: []string{v1alpha1.ClusterSetConfigName}, Verbs: []string{"get", "update", "patch"}},
		{APIGroups: group, Resources: []string{"members"}, Verbs: []string{"list", "create", "patch"}},
		{APIGroups: []string{"multicluster.x-k8s.io"}, Resources: []string{"serviceimports"}, Verbs: []string{"list"}},
		{APIGroups: []string{""}, Resources: []string{"serviceaccounts", "serviceaccounts/token", "secrets", "configmaps"}, Verbs: create},
		{APIGroups: []string{""}, Resources: []string{"configmaps"}, ResourceNames: []string{v1alpha1.ClusterSetIPConfigMap}, Verbs: []string{"get", "update"}},
		{APIGroups: []string{rbacv1.GroupName}, Resources: []string{"roles", "rolebindings"}, Verbs: create},
		{APIGroups: []string{rbacv1.GroupName}, Resources: []string{"roles"}, ResourceNames: []string{memberRole}, Verbs: []string{"bind"}},
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

// BridgeRules returns the rules of the bridge to Lighthouse in the broker's namespace: it acts as the accounts of the members that it
// represents, with their rights.
//
// The caller owns the result. It must cover every request of controlplane/broker/lighthouse, together with LighthouseRules.
func BridgeRules(accounts []string) []rbacv1.PolicyRule {
	rules := []rbacv1.PolicyRule{
		{APIGroups: []string{"isthmus.dev"}, Resources: []string{"members"}, Verbs: []string{"get", "list", "watch"}},
		{APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, Verbs: []string{"create"}},
		{APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, ResourceNames: []string{v1alpha1.LighthouseBridge}, Verbs: []string{"get", "update"}},
		{APIGroups: []string{"", "events.k8s.io"}, Resources: []string{"events"}, Verbs: []string{"create", "patch"}},
	}
	if len(accounts) > 0 {
		rules = append(rules, rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"serviceaccounts"}, ResourceNames: accounts, Verbs: []string{"impersonate"}})
	}
	return rules
}

// LighthouseRules returns the rules of the bridge in the namespace of Submariner's broker, which are those of its clusters. The
// caller owns the result.
func LighthouseRules() []rbacv1.PolicyRule {
	write := []string{"get", "list", "watch", "create", "update", "delete"}
	return []rbacv1.PolicyRule{
		{APIGroups: []string{"multicluster.x-k8s.io"}, Resources: []string{"serviceimports"}, Verbs: write},
		{APIGroups: []string{"multicluster.x-k8s.io"}, Resources: []string{"serviceimports/status"}, Verbs: []string{"update"}},
		{APIGroups: []string{"discovery.k8s.io"}, Resources: []string{"endpointslices"}, Verbs: write},
		{APIGroups: []string{"discovery.k8s.io"}, Resources: []string{"endpointslices/restricted"}, Verbs: []string{"create"}},
	}
}
