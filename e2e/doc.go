// Package e2e holds the promise as tests: two real clusters joined into a ClusterSet, and traffic through
// VIPs and names from pods, hostNetwork pods and nodes, while parts of it are killed.
//
// The tests share one testbed, which TestMain brings up and takes down. With ISTHMUS_E2E_KEEP=1 it stays
// up, and the next run is faster by as much.
package e2e
