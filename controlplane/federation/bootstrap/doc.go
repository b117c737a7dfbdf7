// Package bootstrap is the life of a federation as administrators lead it: it makes one, takes clusters in ([Form]),
// renews the tokens of supervisors ([Rotate]), and lets clusters go ([Remove]).
//
// Everything in here runs in an administrator's shell, once, with an administrator's rights in every cluster that is
// named. Each step finds what an earlier run left and keeps it, so a command that was cut off is finished by running
// it again.
//
// # What stands where
//
// In every member: the definitions, ClusterClaims with its id and ClusterSet, the admission policies that keep them
// and fence leaders that were, and for each supervisor a ServiceAccount with the rights of a leader and a Secret with
// its token. In a supervisor beside that: a Secret for each member, with the token of this supervisor's account there,
// and the Federation that names all members. In any other cluster the Federation names nobody.
//
// A token of an account is in two places only: in its own cluster, and in the supervisor whose account it is.
package bootstrap
