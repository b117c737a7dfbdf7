// Package policies makes policies travel: an object that people annotated ([federationv1alpha1.AnnotationPolicy]) is
// copied into all members of a federation, if it is of one of the kinds that the Federation names. In go the objects
// of these kinds in all members; out come copies, and on each origin a [Status] that says what became of it where.
//
// # Whose text counts
//
// The object that people annotated is the origin, and decides: copies follow it, and go when it goes or is annotated
// no more. Of several origins of one name the oldest counts; the others stay as they are, where they are. A copy is
// no origin, and what somebody changes in one is put right. An object of that name which is no copy is somebody's own,
// is never touched, and is reported.
//
// A cluster-scoped policy goes to every member, one in a namespace where the member has that namespace. A copy is
// removed when its origin's cluster answers and has it no more, or is no member any longer; while that cluster is
// silent nothing is. So a removal that a member missed is made up for when it is back.
//
// # Who says what
//
// The leader of a member writes the copies in it, and what its API server refused into a ConfigMap there, which the
// leaders of all others can read. The leader of the origin's cluster makes the status of all that, for that member
// only it may write into.
//
// # What means the same elsewhere
//
// Only federated Services are the same in all clusters. Peers that select anything else (pods, namespaces, addresses)
// are copied as they are, mean what they mean in the cluster that enforces them, and are listed in the status.
package policies
