// Package bootstrap holds the administrator's operations on a federation: form one or add clusters ([Form]), renew the tokens
// of supervisors ([Rotate]), release withdrawals that are held back ([Release]), and remove clusters ([Remove]).
//
// Each operation runs once, with an administrator's rights in every given cluster. It keeps the results of an earlier run, so
// a repeated command completes an interrupted one.
//
// # Objects
//
// Every member has the definitions, ClusterClaims with its id and ClusterSet, and the admission policies that protect the
// claims and fence former leaders. For each supervisor it has a ServiceAccount with the rights of a leader, and a Secret with
// its token. A supervisor also has a Secret for each member, with the token of its account there, and a Federation that
// lists all members. The Federation of any other cluster lists none.
package bootstrap
