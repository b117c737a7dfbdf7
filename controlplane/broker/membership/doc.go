// Package membership implements the administrator's commands for a ClusterSet: it sets up the broker ([DeployBroker]), invites and
// adds clusters ([Invite], [Join]), changes and lists registrations ([Set], [List]), rotates and revokes credentials ([Rotate],
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
// format; and per member a ServiceAccount with its rights, and an empty Secret to which its tokens are bound. Its only cluster-scoped objects are
// definitions and admission policies, which DeployBroker alone writes.
//
// A member has the Secret with its credentials, a copy of its Member, two ClusterProperties, and the admission policy that
// protects those.
//
// # Rights
//
// Invite runs with an administrator's rights and creates the cluster's account, so that an invitation itself may only register
// that cluster and request its first token. Join deletes the invitation. A [BrokerInfo] without a ClusterID contains the token of
// ServiceAccount isthmus-join, which creates objects of new clusters and changes none of present members. Package access defines
// these rights, and those of a member.
package membership
