// Package policies replicates policies: users annotate an object ([federationv1alpha1.AnnotationPolicy]), and if it is of one
// of the kinds that the Federation lists, every member gets a copy. A [Status] on the original describes the result in each
// member.
//
// For example, a user in cluster a annotates the ClusterNetworkPolicy deny-db. Clusters b and c get copies. A change of the
// original changes the copies, an edit of a copy in b is undone, and when the original is deleted the copies go.
//
// # Origin and copies
//
// The annotated object is the origin: the copies follow it, and go when it is deleted or no longer annotated. If several
// origins have one name, the oldest counts, and the others stay unchanged in their clusters. A copy is never an origin. An
// object of the name that is not a copy belongs to a user; it is never changed, and the status reports it.
//
// A cluster-scoped policy goes to every member, a namespaced one to the members with its namespace. A copy is deleted when
// the origin's cluster is reachable and no longer has the origin, or is no longer a member; while that cluster is silent the
// copy stays. A member that misses a deletion therefore catches up when it is back.
//
// # Removal in a member
//
// A user who deletes a copy removes the policy everywhere. The leader of that member has to see the deletion, and records it there in a
// ConfigMap with the uid of the origin; the leader of the origin's cluster then deletes the origin. A copy that is merely missing was
// lost, and is created again. So are many copies of a member that go at a time, and those of a member that no grant lets replicate the
// policy. What goes with its namespace or its kind is neither.
//
// # Writers
//
// The leader of a member writes its copies. If the API server refuses one, the leader records the reason in a ConfigMap
// there, which the leaders of all members read. The leader of the origin's cluster joins these into the status, since it may
// write in that member only.
//
// # Peers
//
// Only federated Services are the same in all clusters. Peers that select pods, namespaces or addresses are copied
// unchanged, mean different objects in each cluster, and are listed in the status.
package policies
