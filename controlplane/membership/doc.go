// Package membership sets up what members of a ClusterSet share, and takes clusters in: it writes the
// broker's namespace and settings ([DeployBroker]), registers a cluster there and gives it its
// credentials ([Join]).
//
// Everything in here runs in an administrator's shell, once, with the administrator's rights; the
// controllers only ever read what it wrote. Each step finds what an earlier run left and keeps it, so
// a command that was cut off is finished by running it again.
package membership
