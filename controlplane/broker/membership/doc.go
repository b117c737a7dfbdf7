// Package membership implements the administrator's commands for a ClusterSet: it sets up the broker ([DeployBroker]), adds
// clusters ([Join]), changes and lists registrations ([Set], [List]), rotates and revokes credentials ([Rotate],
// [Revoke]), and removes clusters ([Leave], [ForceLeave]).
//
// Each function runs once, in an administrator's shell and with the administrator's rights; controllers only read the
// objects that it wrote. Each step keeps what an earlier run wrote, so an interrupted command is completed by running it
// again. For example, a join that is interrupted after it registered the cluster finds its registration, and keeps the
// ClusterSetIP block.
//
// # Objects
//
// The broker has in one namespace: the ClusterSetConfig with the settings, the blocks of all members and the reservations
// of joining clusters; a Member per cluster; the ConfigMap isthmus-clusterset-ip, with the same content in Submariner's
// format; and a ServiceAccount, a RoleBinding and a token Secret per member. Its only cluster-scoped objects are
// definitions and admission policies, which DeployBroker alone writes.
//
// A member has the Secret with its credentials, a copy of its Member, two ClusterProperties, and the admission policy that
// protects those.
//
// # Rights
//
// A [BrokerInfo] contains the token of ServiceAccount isthmus-join. It may register any cluster, and read what that
// requires, including the tokens of members. So the holder of the file is an administrator of the ClusterSet, and of
// nothing else, until the token expires. Package access defines the rights of a member.
package membership
