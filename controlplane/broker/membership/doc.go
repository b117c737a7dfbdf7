// Package membership is the life of a ClusterSet and of its members, as administrators lead it: it sets up the
// broker ([DeployBroker]), takes clusters in ([Join]), changes what is registered of them ([Set], [List]),
// renews and takes away their credentials ([Rotate], [Revoke]), and lets them go ([Leave], [ForceLeave]).
//
// Everything in here runs in an administrator's shell, once, with the administrator's rights; the
// controllers only ever read what it wrote. Each step finds what an earlier run left and keeps it, so
// a command that was cut off is finished by running it again.
//
// # What stands where
//
// On the broker, in one namespace: the ClusterSetConfig with the settings, the blocks of all members and the
// reservations of those that are joining; a Member each; ConfigMap isthmus-clusterset-ip, which says the same in
// the words of Submariner; and a ServiceAccount, RoleBinding and token Secret a member. Cluster-scoped there are
// only definitions and admission policies, which DeployBroker alone writes. In a member: the Secret with its
// credentials, a copy of its Member, two ClusterProperties, and the admission policy that keeps those.
//
// # Who may do what
//
// A [BrokerInfo] carries the token of ServiceAccount isthmus-join. It may register anybody, and read what it
// needs for that, the tokens of members among it: whoever holds the file is an administrator of the ClusterSet
// until it expires, and of nothing else. A member may do what package access says.
package membership
