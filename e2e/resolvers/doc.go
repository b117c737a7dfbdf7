// Package resolvers tests that common resolvers resolve the names of a ClusterSet: those of the C libraries, command-line
// tools, and unbound as a forwarder. It runs the real name server and no cluster.
package resolvers
