// Package resolvers tests that the resolvers of the world find the names of a ClusterSet: those of the C libraries, the
// tools that people ask by, and unbound in front. The name server is the real one; no cluster runs.
package resolvers
