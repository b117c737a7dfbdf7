// Package neighbours tests that Isthmus starts, works and leaves cleanly on nodes that others have programmed: a
// kube-proxy in each of its modes and real CNI plugins. Its nodes are network namespaces; no cluster runs.
package neighbours
