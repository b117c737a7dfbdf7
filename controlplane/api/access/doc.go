// Package access defines the rights of a member on the broker: RBAC rules ([MemberBrokerRules]), and admission policies
// ([Policies], policies/*.yaml) that restrict each member to its own objects. deploy-broker writes both with an
// administrator's credentials. Joining adds the member to the ClusterSetConfig, which the policies read, and leaving
// removes it; neither needs rights outside of the broker's namespace.
//
// For example, a compromised member "west" tries to write the EndpointSlice east.web.shop-abcdefghij with its own pods, to
// receive east's traffic. The API server refuses it with 403 Forbidden, because the name and the label must be west's.
//
// A member is the ServiceAccount member-ID of the broker's namespace, where ID is compared as a whole: members `a` and
// `a.b` may both exist, so the policies recompute every name from the object's fields and never match a prefix of it. RBAC
// gives a member only the kinds of this table, inside the broker's namespace, and no verb that deletes a collection. One
// policy protects each row:
//
//	members         against former members: a cluster that the ClusterSetConfig does not list writes
//	                nothing, whatever rights and tokens it still has
//	exportrecords   against impersonation: label, spec.clusterID and the name ID.SERVICE.NAMESPACE are
//	                the caller's before and after the write
//	endpointslices  against hijacking traffic of another member's Services: label and the name
//	                ID.SERVICE.NAMESPACE-HASH as above; against hijacking Services of the broker's own
//	                cluster: only labels of Isthmus
//	leases          against faking the liveness of another member: each renews the Lease member-ID, and
//	                deletes none
//	aggregates      against taking a Service from its exporters: ClusterSetIP, its families, its allocator
//	                and the choice of a ClusterSetIP are immutable once written, but for a second address; a
//	                write to status.clusters adds or removes only the caller; only the last listed member deletes
//	quotas          against filling the broker: a member that the status of the ClusterSetConfig lists creates
//	                no more objects of that kind; the quota controller writes that list
//	clustersetips   against taking addresses of others: a ClusterSetIP comes from the caller's own block; a
//	                second address is its allocator's while the aggregate lists that and it has a block
//	tokens          against keeping access: a member requests tokens of its own account only, bound to the
//	                Secret that the ClusterSetConfig names, which isthmusctl rotate and revoke delete
//
// Three further policies restrict the accounts that register clusters ([InvitationRules], [JoinRules]):
//
//	registrations   an invitation writes the Member of its cluster, isthmus-join a new one; blocks and settings
//	                are those of the ClusterSetConfig, and the time of joining is now
//	registered      a cluster that joins again adds no address of another member, and isthmus-join requests
//	                no token of a present member
//	joins           isthmus-join creates only objects of a new member, and adds only that to the ClusterSetConfig
//
// All policies refuse owner references and finalizers, with which the garbage collector or a hanging delete would act for
// the member; other labels, on which other controllers would act; and kube-* namespaces.
//
// The policies also bound the fields that importers copy onto objects of their own: labels and annotations, ports, zones and
// references to pods. Importers check all of them again, because a broker may be older.
//
// The policies ignore type and the like of an aggregate, which members ignore, too; a member's claims about itself,
// which importers check against its registration; and, without the quota controller, the number of objects. They do not apply
// to the account of the quota controller ([QuotaControllerRules]).
//
// The policies need Kubernetes 1.31: they are stable since 1.30, and CEL has IP addresses since 1.31. Refusals are 403
// Forbidden, and name the wrong field and the right value.
package access
