// Package access says what a member may do on the broker: RBAC rules ([MemberBrokerRules]), and admission
// policies ([Policies], policies/*.yaml) that keep each member to what is its own. deploy-broker writes both, with
// an administrator's credentials. Joining adds the member to the ClusterSetConfig, which the policies read, and
// leaving removes it; neither needs a right outside of the broker's namespace.
//
// A member is the ServiceAccount member-ID of the broker's namespace, where ID is compared as a whole: members
// `a` and `a.b` exist side by side, so every name is recomputed from the object's fields and never matched by
// its beginning. RBAC leaves a member the kinds of the table, all inside the broker's namespace, and no verb that
// deletes a collection. What is in the table is then held by a policy each:
//
//	members         against one that left or was revoked: who is not listed in the ClusterSetConfig
//	                writes nothing, whatever rights and tokens it has kept
//	exportrecords   against speaking for another member: label, spec.clusterID and the name
//	                ID.SERVICE.NAMESPACE are the caller's before and after the write
//	endpointslices  against feeding traffic to another member's Services: label and the name
//	                ID.SERVICE.NAMESPACE-HASH as above; against feeding Services of the broker's own
//	                cluster: only labels of ours
//	leases          against keeping a dead member alive, or letting a living one look dead: each renews
//	                the Lease member-ID, and deletes none
//	aggregates      against taking a Service from those who export it: ClusterSetIP, its families, its
//	                allocator and whether there is one stay as first written; status.clusters gains and
//	                loses the caller's id alone; deleting is for the last one listed
//	clustersetips   against taking addresses of others: a ClusterSetIP comes from the caller's own block
//
// All of them refuse owner references and finalizers, by which the garbage collector or a hanging delete would
// act for the member, labels of others, by which other controllers would, and kube-* namespaces.
//
// Not held are ports, type and the like of an aggregate, which nobody believes; what a member says of itself, which
// importers check against its registration; and how much it says. Whoever may register members is not held either.
//
// The policies need Kubernetes 1.31: they were stable in 1.30, and CEL knows addresses since 1.31.
// Refusals are 403 Forbidden and say which field is wrong and what would be right.
package access
